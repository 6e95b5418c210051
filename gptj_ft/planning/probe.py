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
from torch import Tensor, nn
from torch.func import functional_call

from gptj_ft.models.attention import attend
from gptj_ft.models.batch import HeadRows, PackedBatch
from gptj_ft.models.dropout import Dropout
from gptj_ft.models.layout import Layout
from gptj_ft.models.linear import project
from gptj_ft.models.lora import LoRALinear, Rank
from gptj_ft.models.products import products_for
from gptj_ft.planning.constants import KERNELS_PER_SECOND
from gptj_ft.planning.layer_cost import Meter, parameters_of
from gptj_ft.streaming.stores.state_file import digest
from gptj_ft.system.accelerator import (
    META,
    deterministic_kernels,
    empty_cache,
    is_accelerator,
    pin,
    shares_memory,
    supports_bf16,
    synchronize,
    timed,
)
from gptj_ft.system.direct_io import open_direct, read_direct, write_bytes
from gptj_ft.system.machine import emulates_bf16
from gptj_ft.system.memory import allocate

WIDTH, INNER = 4096, 16384  # GPT-J's MLP
NARROW = 512  # width of small models, whose products are slower
MOST_TOKENS, MOST_TOKENS_ON_CPU = 8192, 1024  # of a product; more are no faster
LONGEST_PRODUCT = 2.0  # seconds
PRODUCTS_SECONDS, MOST_PRODUCTS = 0.2, 50  # per size
COPY_BYTES = 128 * 2**20
NEAR_BYTES = 4 * 2**20  # two tensors of this size fit the caches
HEADS, ATTENDED, HEAD_DIM = 4, 512, 256  # of the measured attention
HEADS_ON_ACCELERATOR, MOST_DOCUMENTS = 16, 16  # the same on an accelerator, which few heads do not fill
LONGEST_ATTENTION = 0.05  # seconds
SUBMITTED_WIDTH, SUBMITTED_LAYERS = 64, 50  # layers so small that only their kernels' submission takes time
FILE_BYTES = 512 * 2**20
CHUNK_BYTES = 128 * 2**20
LONGEST_TRANSFER = 1.5  # seconds; enough to know a slow disk
UPDATED_NUMEL = 1 << 23  # elements; four tensors of this size exceed the caches
UPDATES_SECONDS = 0.4


@dataclass(frozen=True)
class ComputeRates:
    """Compute rates of a device."""

    fp32: float  # FLOP/s of a matrix product of width `WIDTH`
    bf16: float  # the same in bf16, or fp16 on a device without bf16
    fp32_narrow: float  # FLOP/s at width `NARROW`
    bf16_narrow: float
    memory: float  # bytes/s of a copy in the device's memory, reads and writes added up
    near_memory: float  # the same for a copy that stays in the caches
    attention: float  # FLOP/s of causal attention over some hundred tokens
    to_device: float  # bytes/s from host memory; on a CPU, of a copy
    from_device: float
    load: float = 0.0  # load per core in the minute before: other programs may have slowed the measurement down
    kernels: float = KERNELS_PER_SECOND  # kernels/s that the program submits to an accelerator; not used on a CPU

    @property
    def gain(self) -> float:
        """Speed of bf16 relative to fp32."""
        return self.bf16 / self.fp32

    def matmul(self, dtype: torch.dtype, width: int = WIDTH) -> float:
        """Return FLOP/s of a matrix product at a model width, interpolated between the measured widths."""
        is_half = dtype in (torch.bfloat16, torch.float16)
        narrow, wide = (self.bf16_narrow, self.bf16) if is_half else (self.fp32_narrow, self.fp32)
        share = math.log(min(max(width, NARROW), WIDTH) / NARROW) / math.log(WIDTH / NARROW)
        return narrow + share * (wide - narrow)

    def memory_for(self, size: float) -> float:
        """Return bytes/s of operations on tensors of a size, interpolated between the measured sizes."""
        share = math.log(min(max(size, NEAR_BYTES), COPY_BYTES) / NEAR_BYTES) / math.log(COPY_BYTES / NEAR_BYTES)
        return math.exp((1 - share) * math.log(self.near_memory) + share * math.log(self.memory))


@dataclass(frozen=True)
class DiskRates:
    """Disk rates in bytes/s, by direct I/O with several requests in flight."""

    read: float
    write: float
    mixed: float  # reads and writes at the same time, added up
    read_cpu: float = 0.0  # core seconds per byte read
    write_cpu: float = 0.0  # core seconds per byte written, digest included
    update_delay: float = 0.0  # seconds by which a byte moved delays concurrent AdamW updates on a CPU
    load: float = 0.0  # of the cores by other programs, when it was measured
    filled: float = 0.0  # seconds of writing before the measurement, for a drive whose write cache would hide its rate

    def seconds(self, read: float, written: float) -> float:
        """Return the seconds to read and write, in parallel as long as both last."""
        both = min(read, written)
        # While both last, their bytes together move at the mixed rate.
        return 2 * both / self.mixed + (read - both) / self.read + (written - both) / self.write

    def shared(self, processes: int) -> DiskRates:
        """Return the rates of one of several processes that use the disk at the same time."""
        rates = {name: getattr(self, name) / processes for name in ("read", "write", "mixed")}
        return replace(self, **rates)

    def cpu_seconds(self, read: float, written: float) -> float:
        """Return the core seconds that reading and writing cost."""
        return read * self.read_cpu + written * self.write_cpu


ASSUMED_DISK = DiskRates(read=0.5e9, write=0.5e9, mixed=0.5e9)  # of a plain SSD, if the disk is too full to measure


@dataclass(frozen=True)
class Rates:
    """Rates of the machine."""

    compute: ComputeRates
    disk: DiskRates  # of one file system
    on_cpu: bool = False  # the device is the CPU, which also does the work of transfers

    @property
    def is_disk_assumed(self) -> bool:
        return self.disk == ASSUMED_DISK


def core_load() -> float:
    """Return the load per core in the last minute, this program included; 0: unknown."""
    return os.getloadavg()[0] / (os.cpu_count() or 1) if hasattr(os, "getloadavg") else 0.0


def meter_others() -> Callable[[], float]:
    """Return a function that gives the share of the cores that other programs have used since this call."""
    # The load average lags by a minute: programs that have just started slow a measurement without showing in it.
    before, own, start = _busy_seconds(), time.process_time(), time.perf_counter()

    def share() -> float:
        others = _busy_seconds() - before - (time.process_time() - own)
        return max(0.0, others) / (max(1e-3, time.perf_counter() - start) * (os.cpu_count() or 1))

    return share


def _busy_seconds() -> float:
    """Return the seconds that all cores have worked since the system started; 0: unknown. Source: proc_stat(5)."""
    try:
        first = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()
    except OSError:
        return 0.0
    user, nice, system, _, _, irq, softirq, steal = map(int, first[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def measure_compute(device: torch.device) -> ComputeRates:
    """Measure a device; about three seconds on two cores."""
    load = core_load()
    one, other = (torch.empty(COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    copy = to_device = from_device = _copy_rate(one, other)
    near = max(copy, _copy_rate(one[:NEAR_BYTES], other[:NEAR_BYTES]))
    if not shares_memory(device):
        host = allocate(COPY_BYTES, torch.uint8, torch.device("cpu"))
        unpin = pin(host, device)  # as stores do
        to_device, from_device = _copy_rate(host, one), _copy_rate(one, host)
        if unpin is not None:
            unpin()
    del one, other
    half = torch.bfloat16 if supports_bf16(device) else torch.float16
    dtypes = (torch.float32, half)
    wide = [matmul_rate(device, dtype) for dtype in dtypes]
    narrow = [matmul_rate(device, dtype, NARROW, 2 * NARROW) for dtype in dtypes]
    attention = _attention_rate(device, half if is_accelerator(device) else torch.float32)
    kernels = submission_rate(device, half) if is_accelerator(device) else KERNELS_PER_SECOND
    empty_cache(device)  # torch's cached memory would count as taken
    return ComputeRates(
        wide[0], wide[1], narrow[0], narrow[1], 2 * copy, 2 * near, attention, to_device, from_device, load, kernels
    )


def submission_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the kernels that the program submits in a second: a small layer with an adapter, forward and backward."""
    layer = LoRALinear(nn.Linear(SUBMITTED_WIDTH, SUBMITTED_WIDTH, device="meta"), Rank(8, 1.0), Dropout(0.0))
    trained = Layout.of(layer, {"lora_A", "lora_B"})

    def train(parameters: dict[str, Tensor], number: int = SUBMITTED_LAYERS) -> None:
        shape, on = (SUBMITTED_WIDTH, SUBMITTED_WIDTH), parameters["weight"].device
        for _ in range(number):
            x_TD = torch.zeros(shape, dtype=dtype, device=on, requires_grad=True)
            torch.autograd.backward(functional_call(layer, parameters, (x_TD, HeadRows())), x_TD.detach())

    parameters, shapes = (parameters_of(layer, trained, dtype, on) for on in (device, META))
    with Meter() as meter:
        train(shapes, 1)
    train(parameters, 1)
    seconds = min(_wall_seconds(lambda: train(parameters), device) for _ in range(3))
    return SUBMITTED_LAYERS * sum(map(len, meter.kernels)) / seconds


def _wall_seconds(work: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def _attention_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Measure causal attention: FLOP/s; on an accelerator with backward, and with enough documents to fill it."""
    if not is_accelerator(device):
        q_TNH, batch = _attended(1, HEADS, device, dtype)
        with torch.no_grad():
            seconds = min(timed(lambda: attend(q_TNH, q_TNH, q_TNH, batch, 0), device) for _ in range(3))
        # Four FLOPs per pair and element, but the causal mask leaves half of the pairs.
        return 2.0 * HEADS * ATTENDED**2 * HEAD_DIM / seconds
    number, best = 1, 0.0
    while True:
        q_TNH, batch = _attended(number, HEADS_ON_ACCELERATOR, device, dtype)
        leaves = [q_TNH.clone().requires_grad_() for _ in range(3)]

        def attend_and_back(leaves: Sequence[Tensor] = leaves, batch: PackedBatch = batch) -> None:
            out_TNH = attend(leaves[0], leaves[1], leaves[2], batch, 0)
            torch.autograd.grad(out_TNH, leaves, out_TNH.detach())

        with deterministic_kernels(device):
            seconds = min(timed(attend_and_back, device) for _ in range(3))
        # Backward has five products where forward has two.
        rate = 7.0 * number * HEADS_ON_ACCELERATOR * ATTENDED**2 * HEAD_DIM / seconds
        if rate < 1.1 * best or 4 * number > MOST_DOCUMENTS or 4 * seconds > LONGEST_ATTENTION:
            return max(best, rate)
        number, best = 4 * number, rate


def _attended(number: int, heads: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, PackedBatch]:
    """Return queries and a batch of documents of `ATTENDED` tokens."""
    tokens = number * ATTENDED
    ids = torch.zeros(tokens, dtype=torch.int64, device=device)
    batch = PackedBatch(ids, ids, ids, tuple(range(0, tokens + 1, ATTENDED)))
    return torch.full((tokens, heads, HEAD_DIM), 0.01, device=device).to(dtype), batch


Timer = Callable[[Callable[[], object], torch.device], float]


def matmul_rate(
    device: torch.device, dtype: torch.dtype, width: int = WIDTH, inner: int = INNER, timed: Timer = timed
) -> float:
    """Measure [tokens, width] @ [width, inner] with training's kernel: FLOP/s, the best over token counts.

    The number of tokens grows while that helps and a product does not take too long.
    """
    most = MOST_TOKENS if is_accelerator(device) else MOST_TOKENS_ON_CPU
    weight = torch.full((inner, width), 0.01, device=device).to(dtype)
    tokens, best = most // 64, 0.0
    if is_accelerator(device):
        # The first product also loads the context, the library and its kernels.
        F.linear(torch.zeros(tokens, width, dtype=dtype, device=device), weight)
    while True:
        seconds = _matmul_seconds(torch.full((tokens, width), 0.01, device=device).to(dtype), weight, timed)
        rate = 2 * tokens * width * inner / seconds
        if rate < 1.1 * best or 4 * tokens > most or 4 * seconds > LONGEST_PRODUCT:
            return max(best, rate)
        tokens, best = 4 * tokens, rate


def _matmul_seconds(x: Tensor, weight: Tensor, timed: Timer) -> float:
    """Return the median time of a product; a slow one runs once."""

    products = products_for(x.dtype, x.device, emulates_bf16())

    def product() -> Tensor:
        return project(x, weight, None, "training", products=products)

    seconds = timed(product, x.device)
    if seconds > LONGEST_PRODUCT / 4:
        return seconds
    repeats = max(2, min(MOST_PRODUCTS, round(PRODUCTS_SECONDS / seconds)))
    return median([seconds, *(timed(product, x.device) for _ in range(repeats))])


def measure_disk(
    folder: Path, file_bytes: int = FILE_BYTES, chunk_bytes: int = CHUNK_BYTES, longest: float = LONGEST_TRANSFER
) -> DiskRates:
    """Measure a folder's file system with the disk store's access pattern; leave no file.

    Args:
        file_bytes: bytes written to each of two files, fewer on a slow disk.
        chunk_bytes: bytes of one call.
        longest: seconds after which a transfer stops.

    Raises:
        OSError, ResourceError: the file system cannot be written, or fails.
    """
    with _nameless_file(folder) as old, _nameless_file(folder) as new:
        source, target = _noise(chunk_bytes), _noise(chunk_bytes)

        def transfer(call: Callable[[int], object], most: int) -> _Moved:
            return _transfer(call, most, chunk_bytes, longest)

        written = transfer(lambda offset: _write(old, source, offset), file_bytes).bytes
        # Overwrite, as a run does from its second step on: new blocks can take more than twice as long.
        write = transfer(lambda offset: _write(old, source, offset), written)
        if hasattr(os, "posix_fadvise"):  # without direct I/O, reads must not come from the page cache
            os.posix_fadvise(old, 0, written, os.POSIX_FADV_DONTNEED)
        read = transfer(lambda offset: read_direct(old, target, offset), written)
        # Allocate the blocks of the second file, so that the mixed writes overwrite as well.
        transfer(lambda offset: _write(new, source, offset), written)
        mixed = _mixed_rate(lambda: transfer(lambda offset: _write(new, source, offset), written), old, target, written)
        digested = transfer(lambda offset: digest(source), written)

        def move(offset: int) -> None:
            read_direct(old, target, offset)
            _write(new, source, offset)
            digest(source)

        delay = update_delay(move, written, 2 * chunk_bytes)
    return DiskRates(
        read.bytes / read.seconds,
        write.bytes / write.seconds,
        mixed,
        read.cpu_seconds / read.bytes,
        write.cpu_seconds / write.bytes + digested.cpu_seconds / digested.bytes,
        delay,
    )


def fill_write_cache(
    folder: Path, seconds: float, file_bytes: int = FILE_BYTES, chunk_bytes: int = CHUNK_BYTES
) -> None:
    """Overwrite a file for some time, until a drive's write cache has no room left; leave no file.

    Flash drives write to a part of their cells that takes data faster, and move them later. A run that streams state
    from disk fills it in minutes: a drive then writes at a half to a tenth of the rate.

    Raises:
        OSError, ResourceError: the file system cannot be written, or fails.
    """
    end, source = time.perf_counter() + seconds, _noise(chunk_bytes)
    with _nameless_file(folder) as file:
        while (left := end - time.perf_counter()) > 0:
            _transfer(lambda offset: _write(file, source, offset), file_bytes, chunk_bytes, left)


@dataclass(frozen=True)
class _Moved:
    """Bytes moved, wall seconds and core seconds."""

    bytes: int
    seconds: float
    cpu_seconds: float


def _mixed_rate(write: Callable[[], _Moved], old: int, target: memoryview, file_bytes: int) -> float:
    """Measure bytes/s of simultaneous reads and writes."""
    part = target[: len(target) // 4]  # small, so that few reads outlast the last write
    num_read, start = 0, time.perf_counter()
    # The writes decide the duration; reads fill it, and wrap around at the end of the file.
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        while not writing.done():
            num_read += read_direct(old, part, num_read % file_bytes)
    return (writing.result().bytes + num_read) / (time.perf_counter() - start)


def update_delay(
    move: Callable[[int], object],
    file_bytes: int,
    moved_at_once: int,
    updates_per_second: Callable[[], float] | None = None,
) -> float:
    """Measure the seconds by which each byte moved delays concurrent updates on all cores."""
    measure, ended = updates_per_second or AdamWRate(), Event()
    alone = measure()

    def keep_moving() -> _Moved:
        start, number = time.perf_counter(), 0
        while not number or not ended.is_set():
            # `moved_at_once` counts a chunk read and a chunk written; the offset advances by one.
            move(number * moved_at_once // 2 % file_bytes)
            number += 1
        return _Moved(number * moved_at_once, time.perf_counter() - start, 0.0)

    with ThreadPoolExecutor(1) as pool:
        moving = pool.submit(keep_moving)
        try:
            slowed = measure()
        finally:
            ended.set()  # otherwise the pool waits forever
        moved = moving.result()
    return max(0.0, 1 - slowed / alone) * moved.seconds / moved.bytes


class AdamWRate:
    """Measure AdamW updates of `UPDATED_NUMEL` elements per second."""

    def __init__(self) -> None:
        self._state: Sequence[Tensor] = [torch.full((UPDATED_NUMEL,), 0.5) for _ in range(4)]

    def __call__(self) -> float:
        parameter, gradient, first, second = ([tensor] for tensor in self._state)
        step, start, number, seconds = torch.ones(()), time.perf_counter(), 0, 0.0
        while not number or seconds < UPDATES_SECONDS:
            torch._fused_adamw_(
                parameter, gradient, first, second, [], [step],
                lr=1e-3, beta1=0.9, beta2=0.999, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
            )  # fmt: skip
            number, seconds = number + 1, time.perf_counter() - start
        return number / seconds


def _transfer(move: Callable[[int], object], most: int, chunk: int, longest: float) -> _Moved:
    """Move chunks until all are done or time is up."""
    start, cpu_start, done, seconds = time.perf_counter(), time.process_time(), 0, 0.0
    while done == 0 or (done < most and seconds < longest):
        move(done)
        done += chunk
        seconds = time.perf_counter() - start
    return _Moved(done, seconds, time.process_time() - cpu_start)


def _write(descriptor: int, source: memoryview, offset: int) -> None:
    write_bytes(descriptor, source, offset)
    os.fsync(descriptor)  # cheap, and bounds the page cache without direct I/O


@contextmanager
def _nameless_file(folder: Path) -> Iterator[int]:
    """Open an unlinked file; it disappears when it is closed or the process ends."""
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
    words.random_(generator=torch.Generator().manual_seed(0))  # leaves the global generator alone
    return memoryview(words.view(torch.uint8).numpy())  # type: ignore[arg-type]


def _copy_rate(source: Tensor, target: Tensor) -> float:
    """Measure bytes/s of a copy: the best of three, because the first faults the pages in."""
    device = source.device if source.device.type != "cpu" else target.device
    seconds = min(timed(lambda: target.copy_(source, non_blocking=True), device) for _ in range(3))
    return source.nbytes / seconds
