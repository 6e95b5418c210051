"""Test the choice of a device, its accumulation precision, and the memory of compiled kernels."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from support.fake_cuda import pretend_cuda
from support.thread_group import Hub, Member

from gptj_ft.errors import UsageError
from gptj_ft.planning.resources import free_resources
from gptj_ft.system import accelerator
from gptj_ft.system.accelerator import NARROW_SUMS, sum_in_fp32
from gptj_ft.system.machine import choose_device


def test_cuda_device_number_must_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []
    pretend_cuda(monkeypatch, count=2, current=1, set_device=current.append)
    assert (
        [choose_device(name) for name in ("cuda", "cuda:0")]
        == current
        == [torch.device("cuda", number) for number in (1, 0)]
    )
    with pytest.raises(UsageError, match="cuda:2: this machine has no such device, only cuda:0, cuda:1"):
        choose_device("cuda:2")


@pytest.mark.parametrize(
    ("name", "chosen", "shares"),
    [("auto", [0, 1, 0], [2, 1, 2]), ("cuda", [0, 1, 0], [2, 1, 2]), ("cuda:1", [1, 1, 1], [3, 3, 3])],
)
def test_local_processes_alternate_over_accelerators(monkeypatch, name, chosen, shares, tmp_path) -> None:
    memory = (12 << 30, 12 << 30)
    pretend_cuda(monkeypatch, count=2, mem_get_info=lambda device: memory)
    monkeypatch.setattr(accelerator, "default_accelerator", lambda: "cuda")
    members = [Member(Hub(3), rank) for rank in range(3)]
    devices = [choose_device(name, None, member.local_rank) for member in members]
    assert devices == [torch.device("cuda", index) for index in chosen]
    found = [free_resources(device, tmp_path, name, member) for device, member in zip(devices, members, strict=True)]
    assert [each.device for each in found] == [memory[0] // share for share in shares]
    assert choose_device(name, None, None).index == (1 if name == "cuda:1" else 0)
    assert free_resources(devices[0], tmp_path, name).device == memory[0]


@pytest.fixture
def narrow_sums() -> Iterator[None]:
    """Allow accumulation in narrow types on CUDA; the settings exist even without CUDA."""
    products = torch.backends.cuda.matmul
    before = {name: getattr(products, name) for name in NARROW_SUMS}
    for name in NARROW_SUMS:
        setattr(products, name, True)
    yield
    for name, allowed in before.items():
        setattr(products, name, allowed)


@pytest.mark.usefixtures("narrow_sums")
def test_chosen_device_accumulates_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = partial(map, partial(getattr, torch.backends.cuda.matmul))
    assert choose_device("cpu") == torch.device("cpu")
    assert all(allowed(NARROW_SUMS)), "another device's are left alone"
    pretend_cuda(monkeypatch, count=1)
    choose_device("cuda")
    assert not any(allowed(NARROW_SUMS))


def test_device_without_accumulation_setting_works(monkeypatch: pytest.MonkeyPatch) -> None:
    sum_in_fp32(torch.device("mps"))
    only = SimpleNamespace(allow_bf16_reduced_precision_reduction=True)  # an older torch knows no other
    monkeypatch.setattr(torch.backends, "xpu", SimpleNamespace(matmul=only), raising=False)
    sum_in_fp32(torch.device("xpu"))
    assert vars(only) == {"allow_bf16_reduced_precision_reduction": False}


@pytest.mark.thorough
def test_memory_is_bounded_over_bf16_shapes() -> None:
    code = """
from gptj_ft.system.machine import bound_kernel_caches
bound_kernel_caches()
import psutil, torch
torch.set_num_threads(1)
weight = torch.randn(96, 64, dtype=torch.bfloat16, requires_grad=True)
for tokens in range(1, 301):
    x = torch.randn(tokens, 64, dtype=torch.bfloat16, requires_grad=True)
    torch.nn.functional.linear(x, weight).sum().backward()
    if tokens == 100:
        before = psutil.Process().memory_info().rss
print((psutil.Process().memory_info().rss - before) / 1e6)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 60, "megabytes; 400 where every kernel is kept"
