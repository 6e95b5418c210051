"""Fixtures that make disk, network and checkpoint reads fail; `conftest` imports them for all tests."""

from __future__ import annotations

import errno
import os
import shutil
from collections import namedtuple
from collections.abc import Callable

import pytest
from support.os_calls import Call, wrap_calls
from torch import Tensor


@pytest.fixture
def set_free_space(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Set the free space that the disk reports, in bytes."""
    usage = namedtuple("usage", "total used free")

    def set_bytes(num_bytes: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, num_bytes))

    return set_bytes


@pytest.fixture
def fill_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make a system call fail with ENOSPC after a number of calls."""

    def fill(call: str = "fsync", after: int = 0) -> None:
        calls = list[int]()

        def limited(original: Call) -> Call:
            def full(descriptor: int, *rest: object) -> object:
                calls.append(descriptor)
                if len(calls) > after:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return original(descriptor, *rest)

            return full

        wrap_calls(monkeypatch, [call], limited)

    return fill


@pytest.fixture
def forbid_network(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Set HF_HUB_OFFLINE, which huggingface_hub reads only when it is imported."""
    from support.hub_server import set_hub_constants

    return lambda: set_hub_constants(monkeypatch, HF_HUB_OFFLINE=True)


@pytest.fixture
def wrap_reads(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Tensor]], None]:
    """Replace `Checkpoint.read` by a function that gets the original read, the checkpoint, the name and the rows."""
    from gptj_ft.checkpoints.model_folder import Checkpoint

    original = Checkpoint.read

    def wrap(wrapper: Callable[..., Tensor]) -> None:
        def read(self: Checkpoint, name: str, *rows: int) -> Tensor:
            return wrapper(original, self, name, *rows)

        monkeypatch.setattr(Checkpoint, "read", read)

    return wrap
