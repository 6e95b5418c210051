"""Read checkpoints of mesh-transformer-jax, version 1 (https://github.com/kingoflolz/mesh-transformer-jax).

``step_N/shard_{0..}/{0..15}.npz``: each shard is a tree {opt_state, params, step}, flattened in alphabetical order and
split into 16 files. A slim checkpoint has no opt_state, a full one has. The files hold no names: a leaf is identified
by its position, and the number of leaves gives the number of blocks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from gptj_ft.checkpoints.foreign.config import architecture_from, find_config
from gptj_ft.checkpoints.foreign.mesh_archive import is_archive, unpack
from gptj_ft.checkpoints.foreign.npz import NpzArray, arrays_of
from gptj_ft.checkpoints.model_folder import Checkpoint
from gptj_ft.checkpoints.optimizer_state import Moments
from gptj_ft.checkpoints.source import CheckpointSource, OpenRequest
from gptj_ft.checkpoints.weight_file import TensorInfo
from gptj_ft.errors import DataError, UsageError
from gptj_ft.models.layout import MOMENTS
from gptj_ft.models.registry import Family, Leaf, families
from gptj_ft.system.files import inside
from gptj_ft.system.memory import borrow_tensor, contiguous
from gptj_ft.system.ordered_tasks import run_ordered

NUM_FILES = 16  # per shard
PARTS_BYTES = 64 << 20  # read ahead of a tensor's parts


def detect_mesh(path: Path) -> bool:
    """Recognize a tar archive by its name, or a folder of shards.

    Raises:
        UsageError: the folder holds several checkpoints.
    """
    return is_archive(path) or (path.is_dir() and find_step(path) is not None)


@contextmanager
def open_mesh_source(request: OpenRequest) -> Iterator[CheckpointSource]:
    """Open a checkpoint with its architecture and optimizer state; unpack an archive first."""
    path, has_archive = request.path, is_archive(request.path)
    if has_archive:
        unpack(path, request.scratch)
    folder = request.scratch if has_archive else find_step(path)
    if folder is None:
        raise UsageError(f"{path} holds no checkpoint of mesh-transformer-jax: no shard_0 in it")
    mesh = open_mesh(folder, families()["gptj"])
    with _as_checkpoint(path, mesh.parameters) as checkpoint:
        config = None if has_archive else find_config([folder, folder.parent])
        architecture = architecture_from(request.config or config, checkpoint)
        moments = None
        if mesh.moments:
            opened = (_as_checkpoint(path, part) for part in mesh.moments)
            moments = Moments(mesh.updates, dict(zip(MOMENTS, opened, strict=True)))
        opener = (lambda: moments) if moments else None
        home = config.parent if config else folder
        yield CheckpointSource(path, "mesh", architecture, checkpoint, home, mesh.step, opener)


def _as_checkpoint(path: Path, shards: MeshShards) -> Checkpoint:
    return Checkpoint(path, dict.fromkeys(shards.entries, shards))


def leaves_of(family: Family, num_blocks: int) -> list[Leaf]:
    """Return the leaves of the parameters in the checkpoint's order, each with its tensor's name.

    JAX sorts modules by their names as strings: block 10 comes before block 2.
    """
    named = []
    for (module, parameter), leaf in family.mesh.items():
        for block in range(num_blocks) if "{}" in module else (0,):
            tensor = Leaf(leaf.name.format(block), leaf.join, leaf.is_transposed)
            named.append(((module.format(block), parameter), tensor))
    return [tensor for _, tensor in sorted(named, key=lambda item: item[0])]


def find_step(path: Path) -> Path | None:
    """Return the folder of a checkpoint's shards: the given one, or the only ``step_N`` in it."""
    if (path / "shard_0").is_dir():
        return path
    steps = sorted(folder for folder in path.glob("step_*") if (folder / "shard_0").is_dir())
    if len(steps) > 1:
        raise UsageError(f"{path} holds several checkpoints; name one: {', '.join(step.name for step in steps)}")
    return steps[0] if steps else None


@dataclass(frozen=True)
class JoinedTensor:
    """Tensor and its parts in the shards."""

    leaf: Leaf
    parts: Sequence[NpzArray]

    @property
    def is_concatenated(self) -> bool:
        return self.leaf.join in ("rows", "columns")

    def shape(self) -> tuple[int, ...]:
        """Return the shape of the joined tensor in Hugging Face's layout."""
        shapes = [part.shape[::-1] if self.leaf.is_transposed else part.shape for part in self.parts]
        axis = 1 if self.leaf.join == "columns" else 0
        # Every shard must agree even on replicated tensors, of which only shard 0's copy is read.
        others = {(len(shape), *(length for at, length in enumerate(shape) if at != axis)) for shape in shapes}
        if len(others) > 1 or len(shapes[0]) <= axis or (not self.is_concatenated and len(set(shapes)) > 1):
            raise DataError(
                f"{self.parts[0].path.parent.parent}: {self.leaf.name} has different shapes in different shards: "
                f"{', '.join(str(list(part.shape)) for part in self.parts)}"
            )
        if not self.is_concatenated:
            return shapes[0]
        whole = list(shapes[0])
        whole[axis] = sum(shape[axis] for shape in shapes)
        return tuple(whole)


@dataclass(frozen=True)
class MeshCheckpoint:
    """Open checkpoint; tensors and moments have the Hugging Face names of their parameters."""

    parameters: MeshShards
    step: int  # optimizer step
    moments: tuple[MeshShards, ...] = ()  # Adam's two; empty for a slim checkpoint
    updates: int = 0  # number of updates that the moments have seen


def open_mesh(path: Path, family: Family) -> MeshCheckpoint:
    """Open the shards in a folder, slim or full.

    Raises:
        DataError: a shard is missing, damaged, or of another shape than the others.
    """
    shards = [_arrays_of_shard(folder) for folder in _shard_folders(path)]
    for number, arrays in enumerate(shards):
        if len(arrays) != len(shards[0]):
            raise DataError(f"{path}: shard_{number} has {len(arrays)} arrays, shard_0 {len(shards[0])}")
    num_blocks, first = _layout(path, family, len(shards[0]))
    leaves = leaves_of(family, num_blocks)

    def tree(begin: int, leaves: Sequence[Leaf]) -> MeshShards:
        numbered = enumerate(leaves, start=begin)
        return MeshShards(path, [JoinedTensor(leaf, [arrays[index] for arrays in shards]) for index, leaf in numbered])

    # JAX sorts opt_state, params, step: the step is the last leaf, the count of updates the first.
    parameters, step = tree(first, leaves), _count(shards[0][-1])
    if not first:
        return MeshCheckpoint(parameters, step)
    # Each shard stores its own share of a summed bias, but sees the gradient of the whole bias. So moments are equal
    # in all shards: take the first. The first leaf, the embedding's bias, is added to the embedding: drop its moments.
    assert leaves[0].join == "added"
    moment_leaves = [replace(leaf, join="first") if leaf.join == "sum" else leaf for leaf in leaves[1:]]
    # Leaf 0 is the count. Both moments follow in the order of the parameters.
    moments = tree(2, moment_leaves), tree(2 + len(leaves), moment_leaves)
    return MeshCheckpoint(parameters, step, moments, _count(shards[0][0]))


def _count(array: NpzArray) -> int:
    return int(array.read().reshape(-1)[0])


class MeshShards:
    """Tree of a checkpoint as tensors under Hugging Face's names; each is joined when it is read."""

    def __init__(self, path: Path, leaves: Sequence[JoinedTensor]) -> None:
        self.path, self.num_shards = path, len(leaves[0].parts)
        self._joined: dict[str, JoinedTensor] = {}
        self._sums: dict[str, Tensor] = {}
        self._added: dict[str, Tensor] = {}
        entries: dict[str, TensorInfo] = {}
        for joined in leaves:
            leaf = joined.leaf
            if leaf.join == "added":
                self._added[leaf.name] = _sum(joined.parts)
            else:
                entries[leaf.name] = self._open(joined)
        self.entries: Mapping[str, TensorInfo] = entries

    def _open(self, joined: JoinedTensor) -> TensorInfo:
        """Register a tensor; return its joined shape, and a type that holds the joined values exactly."""
        name, parts = joined.leaf.name, joined.parts
        self._joined[name] = joined
        shape, dtype = joined.shape(), parts[0].entry.dtype
        for part in parts:
            if part.entry.dtype != dtype:
                raise DataError(f"{part.path}: {name} is {part.entry.dtype}, in shard_0 {dtype}")
        # A sum of bf16 shares may need more bits than bf16 has.
        if joined.leaf.join == "sum":
            self._sums[name] = total = _sum(parts)
            if not torch.equal(total.to(dtype).double(), total):
                dtype = torch.promote_types(dtype, torch.float32)
        # In alphabetical order the bias `b` comes before its weight `w`, so its sum is known by now.
        if name in self._added and self._added[name].any():
            dtype = torch.promote_types(dtype, torch.float32)
        return TensorInfo(dtype, shape)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        joined, entry = self._joined[name], self.entries[name]
        stop = entry.rows if stop is None else min(stop, entry.rows)
        if joined.leaf.join == "sum":
            return self._sums[name][start:stop].to(entry.dtype)
        if joined.leaf.join == "first":
            # A slice would keep the whole part in memory.
            return joined.parts[0].read()[start:stop].clone()
        if joined.leaf.join == "columns":
            return self._read_columns(joined, entry, start, stop)
        pieces, begin = [], 0
        for part in joined.parts:
            length = part.shape[-1] if joined.leaf.is_transposed else part.shape[0]
            low, high = max(start, begin), min(stop, begin + length)
            if low < high:
                rows = _read_part(joined, part)[low - begin : high - begin]
                pieces.append(self._with_added(name, rows, entry.dtype))
            begin += length
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def rows_at_once(self, name: str) -> int:
        # A part is always read whole, for its checksum: smaller pieces would read it several times.
        return self.entries[name].rows // (self.num_shards if self._joined[name].leaf.join == "rows" else 1)

    def _read_columns(self, joined: JoinedTensor, entry: TensorInfo, start: int, stop: int) -> Tensor:
        shape = (stop - start, *entry.shape[1:])
        whole = borrow_tensor(shape, entry.dtype)
        begin = 0
        tasks = ((part.entry.num_bytes, partial(_read_part, joined, part)) for part in joined.parts)
        with closing(run_ordered(tasks, PARTS_BYTES)) as parts:
            for part in parts:
                width = part.shape[1]
                whole[:, begin : begin + width] = part[start:stop]
                begin += width
        return whole

    def _with_added(self, name: str, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Add the embedding's bias to rows, if the tensor has one that is not zero."""
        added = self._added.get(name)
        return (rows.double() + added).to(dtype) if added is not None and added.any() else rows


def _read_part(joined: JoinedTensor, part: NpzArray) -> Tensor:
    """Read a shard's part in Hugging Face's axis order."""
    tensor = part.read()
    # Transpose into a contiguous tensor: PyTorch does this in cache-sized blocks, but not into a slice of columns.
    return contiguous(tensor.t()) if joined.leaf.is_transposed else tensor


def _sum(parts: Sequence[NpzArray]) -> Tensor:
    return torch.stack([part.read().double() for part in parts]).sum(0)


def _shard_folders(path: Path) -> list[Path]:
    numbers = sorted(
        int(match[1]) for folder in path.iterdir() if (match := re.fullmatch(r"shard_(\d+)", folder.name)) is not None
    )
    for expected, number in enumerate(numbers):
        if number != expected:
            raise DataError(f"{path}: shard_{expected} is missing; download that folder again")
    return [path / f"shard_{number}" for number in numbers]


def _arrays_of_shard(folder: Path) -> list[NpzArray]:
    files = [folder / f"{number}.npz" for number in range(NUM_FILES)]
    for file in files:
        if not file.is_file():
            raise DataError(f"{file} is missing; download that folder again")
        inside(file, folder.parent)
    return [array for file in files for array in arrays_of(file)]


def _layout(path: Path, family: Family, num_leaves: int) -> tuple[int, int]:
    """Return the number of blocks, and the index of the first parameter leaf; opt_state precedes it."""
    in_block = sum("{}" in module for module, _ in family.mesh)
    outside = len(family.mesh) - in_block
    # Slim: the parameters and step. Full: also two moments for each parameter, and two counts.
    for copies, others in ((1, 1), (3, 3)):
        blocks, rest = divmod(num_leaves - others - copies * outside, copies * in_block)
        if blocks > 0 and not rest:
            return blocks, num_leaves - 1 - outside - blocks * in_block
    raise DataError(
        f"{path}: {num_leaves} arrays per shard fit no {family.model_type} of mesh-transformer-jax, version 1"
    )
