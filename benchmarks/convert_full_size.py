"""Convert all of a random GPT-J 6B: peak memory, and speed compared with copying the same bytes.

    python benchmarks/convert_full_size.py --work /tmp/bench           # 40 GB of disk
    python benchmarks/convert_full_size.py --work /tmp/bench --only moments --layers 2    # 20 GB of disk
    python benchmarks/convert_full_size.py --work /tmp/bench --layers 2 --width 64 --vocabulary 512    # a try

Each direction is a separate process, `gptj-ft convert`, with and without the comparison that follows; its memory is
what the kernel says (the most resident at a time). Before each, the files it reads are dropped from the page cache,
and what it writes is on the disk when it ends. The copy is the better of two ways: a file of the source after the
other through the page cache, and past it with eight requests in flight; both end with fsync. A direction's rate is all
bytes read and written over its seconds; for the comparison, what was written is read once.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from side_by_side import memory
from torch import Tensor

from gptj_ft.checkpoints.foreign.mesh import NUM_FILES, leaves_of
from gptj_ft.checkpoints.published_configs import GPTJ_6B
from gptj_ft.models.registry import Architecture, architecture_of
from gptj_ft.system.direct_io import PAGE, open_direct, read_direct, write_bytes
from gptj_ft.system.memory import allocate

PIECE_BYTES = 64 * 2**20
COPIED_BYTES = 4 * 10**9
SHARDS = 8
POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Direction:
    """Conversion to measure: source format, its writer, and the options."""

    name: str
    source: str
    make: Callable[[Path, Architecture], None] | None
    options: tuple[str, ...]


def random_tensor(*shape: int) -> Tensor:
    """Draw random fp32 weights."""
    return torch.randn(shape).mul_(0.02)


def make_bin(folder: Path, architecture: Architecture) -> None:
    """Write fp32 ``.bin`` shards, one per layer."""
    folder.mkdir(parents=True)
    layers, name_of = architecture.layers(), architecture.family.name_of
    weight_map = {}
    for index, layer in enumerate(layers):
        file_name = f"pytorch_model-{index + 1:05d}-of-{len(layers):05d}.bin"
        like = layer.state_dict()
        named = {name_of(index, local, len(layers)): random_tensor(*like[local].shape) for local in like}
        torch.save(named, folder / file_name)
        weight_map |= dict.fromkeys(named, file_name)
        del named
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(architecture.raw))


def make_mesh(folder: Path, architecture: Architecture, is_full: bool = False) -> None:
    """Write the bf16 shards of a slim checkpoint, or the fp32 shards of a full one, with moments."""
    width, rows = architecture.config.n_embd, architecture.config.vocab_size // SHARDS
    hidden = 4 * width // SHARDS
    shapes = {
        "wte.weight": (rows, width),
        "lm_head.weight": (width, rows),
        "lm_head.bias": (rows,),
        "out_proj.weight": (width // SHARDS, width),
        "fc_in.bias": (hidden,),
        "fc_in.weight": (width, hidden),
        "fc_out.weight": (hidden, width),
    }
    leaves = leaves_of(architecture.family, architecture.config.n_layer)

    def arrays() -> Iterator[np.ndarray]:
        count = np.array(0, np.int32)
        if is_full:
            yield count
            yield from tree()
            yield from tree()
            yield count
        yield from tree()
        yield count

    def tree() -> Iterator[np.ndarray]:
        for leaf in leaves:
            end = ".".join(leaf.name.split(".")[-2:])
            is_vector = leaf.join in ("added", "sum", "first")
            shape = (width,) if is_vector else shapes.get(end, (width, width // SHARDS))
            # What is added up is zero, as in a fresh model: the result has the type of the source.
            tensor = torch.zeros(shape) if leaf.join in ("added", "sum") else random_tensor(*shape)
            # A mean of squares is not negative.
            yield tensor.abs().numpy() if is_full else tensor.bfloat16().view(torch.int16).numpy().view("V2")

    for shard in range(SHARDS):
        target = folder / "step_0" / f"shard_{shard}"
        target.mkdir(parents=True)
        num_arrays = 3 * len(leaves) + 3 if is_full else len(leaves) + 1
        stream, (size, more) = arrays(), divmod(num_arrays, NUM_FILES)
        for file in range(NUM_FILES):
            np.savez(target / f"{file}.npz", *(next(stream) for _ in range(size + (file < more))))
    (folder / "config.json").write_text(json.dumps(architecture.raw))


def files_of(folder: Path) -> list[Path]:
    """Return a folder's files, largest first."""
    return sorted((path for path in folder.rglob("*") if path.is_file()), key=lambda path: -path.stat().st_size)


def forget(folder: Path) -> int:
    """Drop a folder's files from the page cache; return their bytes."""
    for path in files_of(folder):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    return sum(path.stat().st_size for path in files_of(folder))


def copy_buffered(source: Path, target: Path) -> None:
    """Copy a file through the page cache."""
    with source.open("rb", buffering=0) as reader, target.open("wb", buffering=0) as writer:
        while data := reader.read(PIECE_BYTES):
            writer.write(data)
        os.fsync(writer.fileno())


def copy_direct(source: Path, target: Path) -> None:
    """Copy a file past the page cache, eight requests in flight."""
    buffer = memoryview(allocate(PIECE_BYTES, torch.uint8, torch.device("cpu")).numpy())  # type: ignore[arg-type]
    size, at = source.stat().st_size, 0
    reader, writer = open_direct(source, os.O_RDONLY), open_direct(target, os.O_WRONLY | os.O_CREAT)
    while at < size:
        length = min(PIECE_BYTES, -(-(size - at) // PAGE) * PAGE)
        read_direct(reader, buffer[:length], at)
        write_bytes(writer, buffer[:length], at)
        at += length
    os.fsync(writer)
    os.close(reader)
    os.close(writer)


def copy_rate(source: Path, work: Path) -> float:
    """Return the rate of the faster way to copy, in bytes read and written per second."""
    rates = []
    for copy in (copy_buffered, copy_direct):
        forget(source)
        done, start = 0, time.perf_counter()
        for path in files_of(source):
            if done < COPIED_BYTES:
                copy(path, work / "copy")
                done += path.stat().st_size
                (work / "copy").unlink()
        rates.append(2 * done / (time.perf_counter() - start))
    return max(rates)


def converted(arguments: list[str]) -> tuple[float, int]:
    """Run `gptj-ft convert`; return its seconds and peak resident memory."""
    start, peak = time.perf_counter(), 0
    process = subprocess.Popen([sys.executable, "-m", "gptj_ft", "convert", "--json", *arguments], stdout=-3)
    while process.poll() is None:
        peak = max(peak, memory(process.pid, "VmHWM"))
        time.sleep(POLL_SECONDS)
    if process.returncode:
        raise SystemExit(f"convert ended with {process.returncode}")
    return time.perf_counter() - start, peak


def measure(direction: Direction, work: Path, architecture: Architecture) -> Path:
    """Convert without and with verification; print a line for each and return the written folder."""
    source, target = work / direction.source, work / direction.name.replace(" ", "-")
    if direction.make:
        direction.make(source, architecture)
    copied = copy_rate(source, work)
    for is_verified in (False, True):
        shutil.rmtree(target, ignore_errors=True)
        num_read = forget(source)
        verify = "--verify" if is_verified else "--no-verify"
        seconds, peak = converted([str(source), str(target), verify, *direction.options])
        moved = num_read + forget(target) * (2 if is_verified else 1)
        print(
            f"{direction.name:<28}{'and compared' if is_verified else '':<14}{moved / 1e9:>7.1f} GB{seconds:>8.0f} s"
            f"{moved / seconds / 1e9:>7.2f} GB/s, {moved / seconds / copied:.2f} of a copy's {copied / 1e9:.2f}"
            f"   peak RSS {peak / 2**30:.2f} GiB",
            flush=True,
        )
    return target


def main() -> None:
    """Measure all directions in order; remove files that are no longer needed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="new folder, on the disk to measure")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=50400)
    parser.add_argument("--only", choices=("bin", "mesh", "moments"), help="measure one source only")
    arguments = parser.parse_args()
    shape = {"n_layer": arguments.layers, "n_embd": arguments.width, "vocab_size": arguments.vocabulary}
    shape |= {"rotary_dim": min(64, arguments.width // 16)}
    architecture = architecture_of({**GPTJ_6B, **shape}, arguments.work)
    arguments.work.mkdir(parents=True)
    torch.manual_seed(0)
    try:
        if arguments.only in (None, "bin"):
            folder = measure(
                Direction("bin fp32 to folder bf16", "bin", make_bin, ("--dtype", "bf16")), arguments.work, architecture
            )
            shutil.rmtree(arguments.work / "bin")
            measure(
                Direction("folder bf16 to files fp16", folder.name, None, ("--to", "huggingface", "--dtype", "fp16")),
                arguments.work,
                architecture,
            )
            for done in arguments.work.iterdir():
                shutil.rmtree(done)
        if arguments.only in (None, "mesh"):
            folder = measure(Direction("mesh bf16 to folder", "mesh", make_mesh, ()), arguments.work, architecture)
            shutil.rmtree(arguments.work / "mesh")
            measure(Direction("folder to mesh bf16", folder.name, None, ("--to", "mesh")), arguments.work, architecture)
        if arguments.only == "moments":
            full, options = partial(make_mesh, is_full=True), ("--with-optimizer",)
            measure(Direction("full mesh, moments too", "full", full, options), arguments.work, architecture)
    finally:
        shutil.rmtree(arguments.work)


if __name__ == "__main__":
    main()
