"""A thread that computes alone leaves the number of threads of others as it was."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from gptj_ft.system.threads import compute_in_one_thread


def test_only_the_calling_thread_computes_alone() -> None:
    before = torch.get_num_threads()
    with ThreadPoolExecutor(1, initializer=compute_in_one_thread) as alone, ThreadPoolExecutor(1) as other:
        assert alone.submit(torch.get_num_threads).result() == 1
        assert other.submit(torch.get_num_threads).result() == before
    assert torch.get_num_threads() == before
