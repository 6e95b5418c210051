"""Devices: which one a process takes, in which precision it sums, and memory that its kernels keep."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from support.thread_group import Hub, Member

from gptj_ft.errors import UsageError
from gptj_ft.planning.resources import free_resources
from gptj_ft.system import accelerator
from gptj_ft.system.accelerator import NARROW_SUMS, sum_in_fp32
from gptj_ft.system.machine import choose_device


def test_a_cuda_device_is_known_by_a_number_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []
    for name, value in (("is_available", True), ("current_device", 1), ("device_count", 2)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert (
        [choose_device(name) for name in ("cuda", "cuda:0")]
        == current
        == [torch.device("cuda", number) for number in (1, 0)]
    )
    with pytest.raises(UsageError, match="cuda:2: there is no such device here; there are cuda:0, cuda:1"):
        choose_device("cuda:2")


@pytest.mark.parametrize(
    ("name", "chosen", "shares"),
    [("auto", [0, 1, 0], [2, 1, 2]), ("cuda", [0, 1, 0], [2, 1, 2]), ("cuda:1", [1, 1, 1], [3, 3, 3])],
)
def test_processes_of_a_machine_take_its_accelerators_in_turn(monkeypatch, name, chosen, shares, tmp_path) -> None:
    memory = (12 << 30, 12 << 30)
    for what, value in (
        ("is_available", True), ("current_device", 0), ("device_count", 2), ("set_device", None),
        ("mem_get_info", memory),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, what, lambda *args, value=value: value)
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
    """Let torch sum in narrow types on CUDA, all that it can be told to; it is told even where there is no CUDA."""
    products = torch.backends.cuda.matmul
    before = {name: getattr(products, name) for name in NARROW_SUMS}
    for name in NARROW_SUMS:
        setattr(products, name, True)
    yield
    for name, allowed in before.items():
        setattr(products, name, allowed)


@pytest.mark.usefixtures("narrow_sums")
def test_products_are_summed_in_fp32_on_the_device_that_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = partial(map, partial(getattr, torch.backends.cuda.matmul))
    assert choose_device("cpu") == torch.device("cpu")
    assert all(allowed(NARROW_SUMS)), "another device's are left alone"
    for name, value in (("is_available", True), ("current_device", 0), ("device_count", 1), ("set_device", None)):
        monkeypatch.setattr(torch.cuda, name, lambda *args, value=value: value)
    choose_device("cuda")
    assert not any(allowed(NARROW_SUMS))


def test_a_device_without_such_a_switch_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    sum_in_fp32(torch.device("mps"))
    only = SimpleNamespace(allow_bf16_reduced_precision_reduction=True)  # an older torch knows no other
    monkeypatch.setattr(torch.backends, "xpu", SimpleNamespace(matmul=only), raising=False)
    sum_in_fp32(torch.device("xpu"))
    assert vars(only) == {"allow_bf16_reduced_precision_reduction": False}


def test_memory_does_not_grow_with_the_shapes_that_bf16_steps_ask_for() -> None:
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
