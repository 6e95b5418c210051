"""Measure core-seconds per gigabyte to read, check, update and write layer state on disk.

Blocks of a GPT-J go through the store and the optimizer of a run, with nothing computed beside them: state that this
process has written is read; state that it has not is read and compared with its digests; it is written; and a pending
update is applied to it (read, AdamW, written). Beside it stand plain reads and writes of the same bytes past the page
cache, at several sizes of requests and numbers in flight, and the digest alone. The computation has one thread, for
those of OpenMP burn processor time while they wait for each other.

    python benchmarks/transfer_cost.py --work /tmp/bench

``--steps N`` adds steps of the same model in RAM and from disk alternating, by `streamed_vs_resident.py`: their
processor time beside the seconds that they take.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from processor_time import COMPUTING, ProcessorTime
from streamed_vs_resident import TYPES, fill_randomly, open_model
from torch import Tensor

from gptj_ft.config.options import Recipe
from gptj_ft.models.layout import Kind
from gptj_ft.streaming.adamw import AdamW, Update
from gptj_ft.streaming.buffers import BufferBudget
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.streaming.stores.state_file import digest
from gptj_ft.system.direct_io import open_direct
from gptj_ft.system.memory import allocate
from gptj_ft.training.restore import optimizer_config

MIB = 2**20
REQUESTS = [(1, 1), (1, 8), (4, 4), (8, 1), (8, 8), (16, 4), (32, 2)]  # MiB, in flight


@dataclass(frozen=True)
class Cost:
    """Cost of moving bytes.

    Attributes:
        moved_bytes: bytes read and written.
        seconds: seconds of the clock.
        spent: processor time.
    """

    moved_bytes: int
    seconds: float
    spent: ProcessorTime

    @classmethod
    def of(cls, work: Callable[[], int]) -> Cost:
        """Measure a function that returns the number of bytes it moved."""
        start, before = time.perf_counter(), ProcessorTime.now()
        moved_bytes = work()
        return cls(moved_bytes, time.perf_counter() - start, ProcessorTime.now().since(before))

    @property
    def a_gigabyte(self) -> float:
        """Core-seconds of this process per gigabyte."""
        return self.spent.total / self.moved_bytes * 1e9


def show(name: str, costs: list[Cost]) -> None:
    """Print the minimum and the median over turns; other programs only ever add cost."""
    best = min(costs, key=lambda cost: cost.a_gigabyte)
    gigabytes = best.moved_bytes / 1e9
    middle = statistics.median(cost.a_gigabyte for cost in costs)
    threads = {
        name: round(seconds / gigabytes, 4)
        for name, seconds in best.spent.by_threads.items()
        if seconds / gigabytes > 5e-5
    }
    print(
        f"{name:<42}{best.a_gigabyte:>8.4f}{middle:>8.4f}{best.spent.user / gigabytes:>9.4f}"
        f"{best.spent.system / gigabytes:>8.4f}{gigabytes / best.seconds:>7.2f}{best.spent.page_faults:>9}  {threads}",
        flush=True,
    )


# ---------------------------------------------------------------- through the store


def read_all(model: OffloadedModel) -> int:
    """Read the whole state in parts, several in flight; return its bytes."""
    before = model.meter.bytes_read
    for layer in model.trained:
        for kind in model.updated_kinds:
            numel, part = model.layouts[layer].numel, model.budget.chunk_numel
            leases = []
            for start in range(0, numel, part):
                if len(leases) == model.budget.num_chunks:
                    _end(leases.pop(0))
                lease = model.pools.lease_chunk(kind, layer, slice(start, min(start + part, numel)))
                model.transfers.fill(lease, kind, layer, start)
                leases.append(lease)
            while leases:
                _end(leases.pop(0))
    return model.meter.bytes_read - before


def _end(lease) -> None:  # type: ignore[no-untyped-def]
    for transfer in lease.transfers:
        transfer.result()
    lease.release()


def write_all(model: OffloadedModel, kinds: tuple[Kind, ...], step: int) -> int:
    """Write and commit some kinds of every layer from the buffers; return the bytes."""
    before = model.meter.bytes_written
    for layer in model.trained:
        for kind in kinds:
            model.write_chunks(kind, layer, lambda start, part: None)
        model.transfers.commit(kinds, layer, step)
    model.drain()
    return model.meter.bytes_written - before


def update_all(model: OffloadedModel, optimizer: AdamW, step: int) -> int:
    """Apply a pending update to every layer; return the bytes read and written."""
    before = model.meter.bytes_read + model.meter.bytes_written
    optimizer.updates.step = step
    optimizer.resume(Update(step, 1e-5, 0.5, num_skipped=-1), set(model.trained))  # not the first: that is compared
    optimizer.flush()
    return model.meter.bytes_read + model.meter.bytes_written - before


def through_store(arguments: argparse.Namespace) -> None:
    """Measure the store and the optimizer, after one warm-up turn that allocates the buffers."""
    costs: dict[str, list[Cost]] = {}

    def measure(name: str, work: Callable[[], int]) -> None:
        costs.setdefault(name, []).append(Cost.of(work))

    opened = partial(open_model, arguments, "disk", BufferBudget(num_chunks=arguments.parts))
    model = opened()
    optimizer = AdamW(model, optimizer_config(Recipe()))
    fill_randomly(model)
    for step in range(1, arguments.turns + 2):
        measure("store: read", partial(read_all, model))
        measure("store: write the state", partial(write_all, model, model.updated_kinds, step))
        measure("store: write the gradients", partial(write_all, model, ("grad",), step))
        measure("store: read, AdamW, write", partial(update_all, model, optimizer, step))
    model.close()
    model = opened()
    for _ in range(arguments.turns + 1):
        measure("store: read and check", partial(read_all, model))
    model.close()
    for name in costs:
        show(name, costs[name][1:])


# ---------------------------------------------------------------- without it


def plain(path: Path, buffer: Tensor, request: int, in_flight: int, is_write: bool) -> int:
    """Read or write a file with requests of one size and a number in flight; return its bytes."""
    view = memoryview(buffer.numpy())  # type: ignore[arg-type]
    size, transfer = len(view), os.pwritev if is_write else os.preadv
    descriptor = open_direct(path, os.O_RDWR)

    def move(start: int) -> None:
        done = transfer(descriptor, [view[start : min(start + request, size)]], start)
        assert done == min(request, size - start)

    try:
        with ThreadPoolExecutor(in_flight, "plain") as pool:
            list(pool.map(move, range(0, size, request)))
    finally:
        os.close(descriptor)
    return size


def without_store(arguments: argparse.Namespace) -> None:
    """Measure plain requests, and the digest of bytes in RAM."""
    path = arguments.work / "plain"
    buffer = allocate(arguments.plain_mib * MIB, torch.uint8, torch.device("cpu")).fill_(7)
    path.touch()
    os.truncate(path, len(buffer))
    plain(path, buffer, 8 * MIB, 1, True)  # has its blocks from now on
    for is_write in (False, True):
        for request, in_flight in REQUESTS:
            work = partial(plain, path, buffer, request * MIB, in_flight, is_write)
            name = f"plain {'write' if is_write else 'read'}: {request} MiB, {in_flight} in flight"
            show(name, [Cost.of(work) for _ in range(arguments.turns)])
    path.unlink()
    part = 16 * MIB

    def digests() -> int:
        view = memoryview(buffer.numpy())  # type: ignore[arg-type]
        for start in range(0, len(view), part):
            digest(view[start : start + part])
        return len(view)

    show("digest, parts of 16 MiB from RAM", [Cost.of(digests) for _ in range(arguments.turns)])


# ---------------------------------------------------------------- whole steps


def steps(arguments: argparse.Namespace) -> Iterator[str]:
    """Alternate steps in RAM and from disk; yield a line for each process."""
    script = Path(__file__).with_name("streamed_vs_resident.py")
    for place in ("device", "disk") * arguments.turns:
        words = [
            f"--work={arguments.work / 'steps'}", f"--width={arguments.width}", f"--layers={arguments.layers}",
            f"--tokens={arguments.tokens}", f"--micro-batch={arguments.tokens}", f"--steps={arguments.steps + 1}",
            f"--parts={arguments.parts}", f"--compute={arguments.compute}", f"--moments={arguments.moments}",
            f"--gradients={arguments.gradients}", f"--variant={place}",
        ]  # fmt: skip
        done = subprocess.run([sys.executable, str(script), *words], check=True, stdout=subprocess.PIPE)
        shutil.rmtree(arguments.work / "steps", ignore_errors=True)
        result = json.loads(done.stdout)
        for seconds, waited, moved, spent in list(
            zip(result["seconds"], result["waited"], result["moved_bytes"], result["processor"], strict=True)
        )[1:]:
            of_transfers = sum(value for name, value in spent["by_threads"].items() if name != COMPUTING)
            total = spent["user"] + spent["system"]
            yield (
                f"{place:<8}{seconds:>8.2f} s, waiting {waited:.2f}; {total:.2f} core-seconds ({spent['system']:.2f} "
                f"in the kernel, {of_transfers:.2f} of transfers, {of_transfers / max(moved, 1) * 1e9:.3f} a GB), "
                f"{moved / 1e9:.2f} GB, {spent['page_faults']} page faults"
            )


def main() -> None:
    """Measure the transfers and, with ``--steps``, whole steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="new folder, removed at the end")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--plain-mib", type=int, default=512, help="size of the file of the plain requests")
    parser.add_argument("--compute", default="bf16", choices=list(TYPES))
    parser.add_argument("--moments", default="bf16", choices=list(TYPES))
    parser.add_argument("--gradients", default="bf16", choices=list(TYPES))
    parser.add_argument("--threads", type=int, default=1, help="compute threads")
    parser.add_argument("--steps", type=int, default=0, help="steady steps in RAM and from disk, each turn")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--no-plain", action="store_true", help="measure the store only")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True)
    torch.set_num_threads(arguments.threads)
    print(
        f"core-seconds a GB moved{'':<19}{'best':>8}{'median':>8}{'user':>9}{'kernel':>8}{'GB/s':>7}{'faults':>9}  "
        "of threads"
    )
    through_store(arguments)
    if not arguments.no_plain:
        without_store(arguments)
    if arguments.steps:
        for line in steps(arguments):
            print(line, flush=True)
    shutil.rmtree(arguments.work)


if __name__ == "__main__":
    main()
