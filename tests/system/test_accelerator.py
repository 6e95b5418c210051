"""Configure CUDA devices: deterministic kernels for a step alone, expandable segments of memory, pinned memory.

The last test is of the simulated device itself: it runs the kernels of a stream in their order.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.accelerator import simulation
from support.accelerator.memory import is_mapped
from support.fake_cuda import pretend_cuda
from torch.utils._python_dispatch import TorchDispatchMode

from gptj_ft.system import accelerator
from gptj_ft.system.accelerator import allow_deterministic_products, deterministic_kernels, pin
from gptj_ft.system.machine import choose_device
from gptj_ft.system.memory import allocate

CUDA = torch.device("cuda", 0)


def flags() -> tuple[bool, bool, bool]:
    """Return whether torch is deterministic, only warns, and fills new memory."""
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )


def test_deterministic_kernels_are_selected_in_the_block_alone() -> None:
    before = flags()
    with deterministic_kernels(CUDA):
        # Strict: with a warning alone, attention would keep its other backward kernel.
        assert flags() == (True, False, False)
    assert flags() == before


@pytest.mark.parametrize("device", ["cpu", "mps", "xpu"])
def test_other_devices_are_left_alone(device: str) -> None:
    before = flags()
    with deterministic_kernels(torch.device(device)):
        assert flags() == before


def test_rocm_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.2")
    before = flags()
    with deterministic_kernels(CUDA):
        assert flags() == before


@pytest.mark.parametrize(("before", "after"), [(None, ":4096:8"), (":4096:2:16:8", ":4096:8"), (":16:8", ":16:8")])
def test_workspaces_of_products_are_reproducible(
    before: str | None, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = accelerator.WORKSPACES
    monkeypatch.setenv(name, "") if before is None else monkeypatch.setenv(name, before)
    allow_deterministic_products(CUDA)
    assert os.environ[name] == after


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Pretend that there is a CUDA device on Linux; return the settings of its allocator."""
    monkeypatch.setattr(sys, "platform", "linux")
    for name in accelerator.ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return pretend_cuda(monkeypatch, count=1)


def test_chosen_device_extends_its_segments(settings: list[str]) -> None:
    choose_device("cpu")
    assert settings == []
    choose_device("cuda")
    assert settings == ["expandable_segments:True"]


@pytest.mark.parametrize("name", accelerator.ALLOCATOR_VARIABLES)
def test_own_allocator_settings_are_respected(name: str, settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:64")
    choose_device("cuda")
    assert settings == []


@pytest.mark.parametrize(("owner", "name", "value"), [(sys, "platform", "win32"), (torch.version, "hip", "6.2")])
def test_other_platforms_keep_their_segments(owner, name, value, settings: list[str], monkeypatch) -> None:
    monkeypatch.setattr(owner, name, value)
    choose_device("cuda")
    assert settings == []


def test_device_without_virtual_memory_keeps_its_segments(settings: list[str], monkeypatch) -> None:
    def fail(*_: object) -> torch.Tensor:
        raise RuntimeError("CUDA driver error: operation not supported")

    monkeypatch.setattr(accelerator, "allocate", fail)
    assert choose_device("cuda") == CUDA
    assert settings == ["expandable_segments:True", "expandable_segments:False"]


class CudaRuntime:
    """Record what `pin` registers, and whether the memory is still there when it is unregistered."""

    def __init__(self) -> None:
        self.registered, self.was_mapped = list[int](), list[bool]()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.registered.append(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        assert address in self.registered
        self.was_mapped.append(is_mapped(address))
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> CudaRuntime:
    found = CudaRuntime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    return found


@pytest.mark.parametrize("holds_view", [False, True])
def test_memory_is_unpinned_before_it_is_freed(holds_view: bool, runtime: CudaRuntime) -> None:
    values = allocate(1 << 20, torch.uint8, torch.device("cpu"))
    unpin = pin(values, CUDA)
    kept = values[: 1 << 10] if holds_view else None
    del values
    assert runtime.was_mapped == ([] if holds_view else [True])
    del kept
    assert runtime.was_mapped == [True]
    assert unpin is not None
    unpin()
    assert runtime.was_mapped == [True]


def test_memory_is_unpinned_once_when_asked(runtime: CudaRuntime) -> None:
    values = allocate(1 << 20, torch.uint8, torch.device("cpu"))
    unpin = pin(values, CUDA)
    assert unpin is not None
    unpin()
    assert runtime.was_mapped == [True]
    del values
    assert runtime.was_mapped == [True]


class Sleeping(TorchDispatchMode):
    """Queue a pause on a simulated stream before each aten operation of the thread."""

    def __init__(self, stream: simulation.Stream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._stream.put(simulation.Operation("sleep", kind="sleep"))
        return func(*args, **(kwargs or {}))


def test_simulated_kernels_run_in_order_under_a_dispatch_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "_now", None)
    stream = simulation.start("random").defaults[0]
    values = torch.zeros(20)
    order: list[int] = []

    def run(number: int) -> None:
        values[number] = 1  # the mode would see this
        order.append(number)

    stream.queue.extend(queued(stream, partial(run, number)) for number in range(len(values)))
    with Sleeping(stream):
        stream.finish()
    assert order == list(range(len(values)))


def queued(stream: simulation.Stream, run: Callable[[], None]) -> simulation.Operation:
    operation = simulation.Operation("kernel", run)
    operation.stream = stream
    return operation
