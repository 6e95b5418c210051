"""Test recycled memory, ordered tasks and asynchronous writing."""

import mmap
import platform
import threading
from pathlib import Path

import pytest
import torch
import xxhash

from gptj_ft.errors import DataError
from gptj_ft.system import memory
from gptj_ft.system.memory import LEAST_BYTES, borrow, return_freed_memory
from gptj_ft.system.ordered_tasks import AHEAD_TASKS, run_ordered
from gptj_ft.system.write_behind import WriteBehind


def test_buffer_is_recycled_after_last_use() -> None:
    memory._idle.clear()
    first = borrow(LEAST_BYTES)
    address, view = first.data_ptr(), first.view(torch.float32).reshape(2, -1)[1:].numpy()
    del first
    second = borrow(LEAST_BYTES)  # the view still shares it
    assert second.data_ptr() != address
    del view
    assert borrow(LEAST_BYTES).data_ptr() == address


def test_idle_buffers_are_bounded() -> None:
    memory._idle.clear()
    unit = memory.MOST_IDLE_BYTES // 6  # pages that nothing touches cost no memory
    large = borrow(5 * unit)
    address = large.data_ptr()
    del large
    assert borrow(unit).data_ptr() != address
    several = [borrow(2 * unit) for _ in range(5)]
    del several
    assert sum(map(len, memory._idle)) == 6 * unit


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_heap_returns_to_the_system() -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    many = [torch.ones(100_000, dtype=torch.uint8) for _ in range(1_000)]  # less than what glibc maps for itself
    kept = many[::10]
    del many
    idle = borrow(LEAST_BYTES)
    del idle
    before = resident_bytes()
    return_freed_memory()
    assert before - resident_bytes() > 50e6
    assert all(bool(each.all()) for each in kept)
    assert not memory._idle, "what was to be lent again is not"


def test_results_keep_order_within_memory_limit() -> None:
    lock, counts = threading.Lock(), {"now": 0, "most": 0}

    def make(number: int) -> int:
        with lock:
            counts["now"] += 1
            counts["most"] = max(counts.values())
        return number

    found = []
    for number in run_ordered(((10, lambda number=number: make(number)) for number in range(50)), num_bytes=35):
        found.append(number)
        with lock:
            counts["now"] -= 1
    assert found == list(range(50))
    assert 1 < counts["most"] <= 3 < AHEAD_TASKS


def test_task_error_is_raised_in_order() -> None:
    def damaged() -> int:
        raise DataError("damaged")

    results = run_ordered([(1, lambda: 1), (1, damaged), (1, lambda: 3)])
    assert next(results) == 1
    with pytest.raises(DataError, match="damaged"):
        next(results)


def test_written_file_contains_all_types(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"of a process that was killed" * 9000)
    values = [torch.randn(size) for size in (700, 3, 4000, 1, 2500)]
    types = [torch.bfloat16, torch.bfloat16, torch.float32, torch.float16, torch.float64]  # one off its alignment
    finished: list[bool] = []
    with WriteBehind(2, buffer_bytes=4096) as files:
        writer, digest = files.open(path), xxhash.xxh3_128()
        for tensor, dtype in zip(values, types, strict=True):
            writer.put(tensor, dtype, digest)
        writer.write(b"end")
        writer.finish(lambda: finished.append(True))
    data = b"".join(
        tensor.to(dtype).view(torch.uint8).numpy().tobytes() for tensor, dtype in zip(values, types, strict=True)
    )
    assert path.read_bytes() == data + b"end"
    assert digest.hexdigest() == xxhash.xxh3_128_hexdigest(data)
    assert finished == [True]
