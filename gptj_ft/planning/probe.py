"""Measure the machine: matrix products, memory bandwidth, the link to the device, the disk."""

from __future__ import annotations

import math
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from threading import Event

import torch
import torch.nn.functional as F
from torch import Tensor

from gptj_ft.models.attention import attend
from gptj_ft.models.batch import PackedBatch
from gptj_ft.models.linear import project
from gptj_ft.streaming.stores.state_file import digest
from gptj_ft.system.accelerator import empty_cache, is_accelerator, pin, shares_memory, supports_bf16, timed
from gptj_ft.system.direct_io import open_direct, read_direct, write_bytes
from gptj_ft.system.memory import allocate

WIDTH, INNER = 4096, 16384  # GPT-J's MLP
NARROW = 512  # its smaller kin's; products of such matrices reach less
_MOST_TOKENS, _MOST_TOKENS_ON_CPU = 8192, 1024  # computed at once; more do not make it faster
LONGEST_PRODUCT = 2.0  # seconds
PRODUCTS_SECONDS, MOST_PRODUCTS = 0.2, 50  # of one size
_COPY_BYTES = 128 * 2**20
HEADS, ATTENDED, HEAD_DIM = 4, 512, 256  # of an attention that is measured
DOCUMENTS = 8  # measured at once on an accelerator
NEAR_BYTES = 4 * 2**20  # of each of two tensors that the caches hold together
FILE_BYTES = 512 * 2**20
_CHUNK_BYTES = 128 * 2**20
LONGEST_TRANSFER = 1.5  # seconds after which a slow disk has shown what it does
UPDATED_NUMEL = 1 << 23  # elements; four times as many are more than caches hold
UPDATES_SECONDS = 0.4


@dataclass(frozen=True)
class ComputeRates:
    """Compute rates of a device.

    Attributes:
        fp32: FLOP/s of a matrix product, at GPT-J's width.
        bf16: the same in bf16; in fp16 on a device that has no bf16.
        fp32_narrow: FLOP/s at a width of `NARROW`.
        bf16_narrow: the same in bf16.
        memory: bytes/s, read and written together, of a copy inside the device's memory.
        near_memory: the same of a copy so small that it stays in the caches.
        gelu: elements/s of GPT-J's activation, which on a CPU takes longer than reading and writing them.
        attention: FLOP/s of causal attention to some hundred tokens.
        to_device: bytes/s from host memory; where the device is the CPU, of a copy.
        from_device: bytes/s to host memory.
        load: average load of each core in the minute before; others may have slowed this down.
    """

    fp32: float
    bf16: float
    fp32_narrow: float
    bf16_narrow: float
    memory: float
    near_memory: float
    gelu: float
    attention: float
    to_device: float
    from_device: float
    load: float = 0.0

    @property
    def gain(self) -> float:
        """Speed of bf16 relative to fp32."""
        return self.bf16 / self.fp32

    def matmul(self, dtype: torch.dtype, width: int = WIDTH) -> float:
        """Return FLOP/s of a matrix product at a model width, interpolated between the two measured."""
        is_half = dtype in (torch.bfloat16, torch.float16)
        narrow, wide = (self.bf16_narrow, self.bf16) if is_half else (self.fp32_narrow, self.fp32)
        share = math.log(min(max(width, NARROW), WIDTH) / NARROW) / math.log(WIDTH / NARROW)
        return narrow + share * (wide - narrow)

    def memory_for(self, size: float) -> float:
        """Return bytes/s of operations on tensors of a size, interpolated between the two measured."""
        share = math.log(min(max(size, NEAR_BYTES), _COPY_BYTES) / NEAR_BYTES) / math.log(_COPY_BYTES / NEAR_BYTES)
        return math.exp((1 - share) * math.log(self.near_memory) + share * math.log(self.memory))


@dataclass(frozen=True)
class DiskRates:
    """Disk rates in bytes/s, by direct I/O with several requests in flight.

    Attributes:
        read: rate of reading while nothing is written.
        write: rate of writing while nothing is read.
        mixed: rate of reading and writing together, at the same time.
        read_cpu: seconds of a processor that reading takes, per byte.
        write_cpu: the same of writing, with the digest of what is written.
        update_delay: seconds that updates on a CPU, which its memory bounds, take longer for a byte that is moved
            beside them.
    """

    read: float
    write: float
    mixed: float
    read_cpu: float = 0.0
    write_cpu: float = 0.0
    update_delay: float = 0.0

    def seconds(self, read: float, written: float) -> float:
        """Return the seconds to read and write, overlapping as long as there are both."""
        both = min(read, written)
        return 2 * both / self.mixed + (read - both) / self.read + (written - both) / self.write

    def shared(self, processes: int) -> DiskRates:
        """Return the rates of one of several processes that read and write at the same time, in step."""
        of_each = {name: getattr(self, name) / processes for name in ("read", "write", "mixed")}
        return replace(self, **of_each)

    def cpu_seconds(self, read: float, written: float) -> float:
        """Return the processor seconds that reading and writing cost."""
        return read * self.read_cpu + written * self.write_cpu


ASSUMED_DISK = DiskRates(read=0.5e9, write=0.5e9, mixed=0.5e9)  # of a plain SSD, where there is no room to measure


@dataclass(frozen=True)
class Rates:
    """Rates of the machine.

    Attributes:
        compute: rates of the device.
        disk: rates of a file system.
        on_cpu: the device is the CPU, which does the work of transfers too.
    """

    compute: ComputeRates
    disk: DiskRates
    on_cpu: bool = False

    @property
    def is_disk_assumed(self) -> bool:
        return self.disk == ASSUMED_DISK


def core_load() -> float:
    """Return the average load of each core in the last minute, what this program did included; 0: not known."""
    return os.getloadavg()[0] / (os.cpu_count() or 1) if hasattr(os, "getloadavg") else 0.0


def measure_compute(device: torch.device) -> ComputeRates:
    """Measure a device; about three seconds on two cores."""
    load = core_load()
    one, other = (torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    copy = to_device = from_device = _copy_rate(one, other)
    near = max(copy, _copy_rate(one[:NEAR_BYTES], other[:NEAR_BYTES]))
    if not shares_memory(device):
        host = allocate(_COPY_BYTES, torch.uint8, torch.device("cpu"))
        unpin = pin(host, device)  # as stores do, where the device takes it
        to_device, from_device = _copy_rate(host, one), _copy_rate(one, host)
        if unpin is not None:
            unpin()
    del one, other
    half = torch.bfloat16 if supports_bf16(device) else torch.float16
    dtypes = (torch.float32, half)
    wide = [matmul_rate(device, dtype) for dtype in dtypes]
    narrow = [matmul_rate(device, dtype, NARROW, 2 * NARROW) for dtype in dtypes]
    block = _block_rates(device, half if is_accelerator(device) else torch.float32)
    empty_cache(device)  # what torch keeps for later would count as taken
    return ComputeRates(
        wide[0], wide[1], narrow[0], narrow[1], 2 * copy, 2 * near, *block, to_device, from_device, load
    )


def _block_rates(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Measure the rest of a block: elements/s of GELU, FLOP/s of causal attention by the kernel of training."""
    x = torch.full((4 * NEAR_BYTES // 4,), 0.5, device=device).to(dtype)
    gelu = min(timed(lambda: F.gelu(x, approximate="tanh"), device) for _ in range(3))
    number = DOCUMENTS if is_accelerator(device) else 1  # a single document does not fill an accelerator
    tokens = number * ATTENDED
    q = torch.full((tokens, HEADS, HEAD_DIM), 0.01, device=device).to(dtype)
    ids = torch.zeros(tokens, dtype=torch.int64, device=device)
    batch = PackedBatch(ids, ids, ids, tuple(range(0, tokens + 1, ATTENDED)))
    with torch.no_grad():
        attention = min(timed(lambda: attend(q, q, q, batch, 0), device) for _ in range(3))
    return x.numel() / gelu, 2.0 * number * HEADS * ATTENDED**2 * HEAD_DIM / attention


def matmul_rate(device: torch.device, dtype: torch.dtype, width: int = WIDTH, inner: int = INNER) -> float:
    """Measure [tokens, width] @ [width, inner], as training computes it: FLOP/s, the best over token counts.

    The tokens grow while that helps, and while a product does not take too long.
    """
    most = _MOST_TOKENS if is_accelerator(device) else _MOST_TOKENS_ON_CPU
    weight = torch.full((inner, width), 0.01, device=device).to(dtype)
    tokens, best = most // 64, 0.0
    if is_accelerator(device):
        # The first product pays for the context, the library and its kernels; the device would be taken for slow.
        F.linear(torch.zeros(tokens, width, dtype=dtype, device=device), weight)
    while True:
        seconds = _matmul_seconds(torch.full((tokens, width), 0.01, device=device).to(dtype), weight)
        rate = 2 * tokens * width * inner / seconds
        if rate < 1.1 * best or 4 * tokens > most or 4 * seconds > LONGEST_PRODUCT:
            return max(best, rate)
        tokens, best = 4 * tokens, rate


def _matmul_seconds(x: Tensor, weight: Tensor) -> float:
    """Return the median time of a product; a slow one runs once."""

    def product() -> Tensor:
        return project(x, weight, None, "training")

    seconds = timed(product, x.device)
    if seconds > LONGEST_PRODUCT / 4:
        return seconds
    repeats = max(2, min(MOST_PRODUCTS, round(PRODUCTS_SECONDS / seconds)))
    return median([seconds, *(timed(product, x.device) for _ in range(repeats))])


def measure_disk(folder: Path, file_bytes: int = FILE_BYTES, chunk_bytes: int = _CHUNK_BYTES) -> DiskRates:
    """Measure a folder's file system with the disk store's access pattern; leaves no file.

    Args:
        folder: folder on the file system to measure.
        file_bytes: bytes written to each of two files, or fewer if that takes long.
        chunk_bytes: moved by one call.

    Raises:
        OSError, ResourceError: a file system that cannot be written, or fails.
    """
    with _nameless_file(folder) as old, _nameless_file(folder) as new:
        source, target = _noise(chunk_bytes), _noise(chunk_bytes)
        written = _transfer(lambda offset: _write(old, source, offset), file_bytes, chunk_bytes).bytes
        # Over what is there, as a run does from its second step on: new blocks can take more than twice as long.
        write = _transfer(lambda offset: _write(old, source, offset), written, chunk_bytes)
        if hasattr(os, "posix_fadvise"):  # where direct I/O is not taken, reads must not come from the page cache
            os.posix_fadvise(old, 0, written, os.POSIX_FADV_DONTNEED)
        read = _transfer(lambda offset: read_direct(old, target, offset), written, chunk_bytes)
        _transfer(lambda offset: _write(new, source, offset), written, chunk_bytes)
        mixed = _mixed_rate(lambda offset: _write(new, source, offset), old, target, written)
        digested = _transfer(lambda offset: digest(source), written, chunk_bytes)

        def move(offset: int) -> None:
            read_direct(old, target, offset)
            _write(new, source, offset)
            digest(source)

        delay = _update_delay(move, written, 2 * chunk_bytes)
    return DiskRates(
        read.bytes / read.seconds,
        write.bytes / write.seconds,
        mixed,
        read.cpu_seconds / read.bytes,
        write.cpu_seconds / write.bytes + digested.cpu_seconds / digested.bytes,
        delay,
    )


@dataclass(frozen=True)
class _Moved:
    """Bytes moved, wall seconds and processor seconds."""

    bytes: int
    seconds: float
    cpu_seconds: float


def _mixed_rate(write: Callable[[int], None], old: int, target: memoryview, file_bytes: int) -> float:
    """Measure bytes/s of simultaneous reading and writing."""
    part = target[: len(target) // 4]  # small, so that little is read after the last write
    num_read, start = 0, time.perf_counter()
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(_transfer, write, file_bytes, len(target))
        while not writing.done():
            num_read += read_direct(old, part, num_read % file_bytes)
    return (writing.result().bytes + num_read) / (time.perf_counter() - start)


def _update_delay(move: Callable[[int], object], file_bytes: int, moved_at_once: int) -> float:
    """Measure how much longer updates on all cores take for each byte that is moved beside them, in seconds."""
    state = [torch.full((UPDATED_NUMEL,), 0.5) for _ in range(4)]
    alone, ended = _updates_per_second(state), Event()

    def go_on() -> _Moved:
        start, number = time.perf_counter(), 0
        while not number or not ended.is_set():
            move(number * moved_at_once // 2 % file_bytes)
            number += 1
        return _Moved(number * moved_at_once, time.perf_counter() - start, 0.0)

    with ThreadPoolExecutor(1) as pool:
        moving = pool.submit(go_on)
        try:
            beside = _updates_per_second(state)
        finally:
            ended.set()  # or the pool would wait for the thread without end
        moved = moving.result()
    return max(0.0, 1 - beside / alone) * moved.seconds / moved.bytes


def _updates_per_second(state: Sequence[Tensor]) -> float:
    """Measure the rate of AdamW's updates of so many elements, per second."""
    parameter, gradient, first, second = ([tensor] for tensor in state)
    step, start, number, seconds = torch.ones(()), time.perf_counter(), 0, 0.0
    while not number or seconds < UPDATES_SECONDS:
        torch._fused_adamw_(
            parameter, gradient, first, second, [], [step],
            lr=1e-3, beta1=0.9, beta2=0.999, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip
        number, seconds = number + 1, time.perf_counter() - start
    return number / seconds


def _transfer(move: Callable[[int], object], most: int, chunk: int) -> _Moved:
    """Move chunks until all are done or time is up."""
    start, cpu_start, done, seconds = time.perf_counter(), time.process_time(), 0, 0.0
    while done == 0 or (done < most and seconds < LONGEST_TRANSFER):
        move(done)
        done += chunk
        seconds = time.perf_counter() - start
    return _Moved(done, seconds, time.process_time() - cpu_start)


def _write(descriptor: int, source: memoryview, offset: int) -> None:
    write_bytes(descriptor, source, offset)
    os.fsync(descriptor)  # costs little, and bounds what the page cache takes up where there is no direct I/O


@contextmanager
def _nameless_file(folder: Path) -> Iterator[int]:
    """Open an unlinked file, which disappears when it is closed or the process ends."""
    path = folder / f".measure-{uuid.uuid4().hex}"
    descriptor = open_direct(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        path.unlink()
        yield descriptor
    finally:
        os.close(descriptor)


def _noise(size: int) -> memoryview:
    """Return incompressible, page-aligned bytes."""
    words = allocate(size // 8, torch.int64, torch.device("cpu"))
    words.random_(generator=torch.Generator().manual_seed(0))  # the generator that runs use is left alone
    return memoryview(words.view(torch.uint8).numpy())  # type: ignore[arg-type]


def _copy_rate(source: Tensor, target: Tensor) -> float:
    """Measure bytes/s of a copy: the best of three, the first of which faults the pages in."""
    device = source.device if source.device.type != "cpu" else target.device
    seconds = min(timed(lambda: target.copy_(source, non_blocking=True), device) for _ in range(3))
    return source.nbytes / seconds
