"""Write slim checkpoints of mesh-transformer-jax, version 1: all shards together, a few tensors at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from gptj_ft.checkpoints.foreign.mesh import NUM_FILES, PARTS_BYTES, leaves_of
from gptj_ft.checkpoints.foreign.npz import NpzWriter
from gptj_ft.checkpoints.model_folder import RowRange, write_json_file
from gptj_ft.checkpoints.source import CheckpointSource
from gptj_ft.checkpoints.transfer import TensorTransfer, checksum_of
from gptj_ft.errors import UsageError
from gptj_ft.models.registry import Architecture, Leaf
from gptj_ft.system.memory import borrow_tensor, bytes_of, cast, contiguous
from gptj_ft.system.ordered_tasks import SizedTask, run_ordered
from gptj_ft.system.write_behind import WriteBehind

STORABLE = {torch.float32, torch.bfloat16}


def write_mesh(folder: Path, source: CheckpointSource, weights: TensorTransfer, num_shards: int) -> None:
    """Write a checkpoint's weights into a folder: ``step_N/shard_*/*.npz`` and ``meta.json``.

    Raises:
        UsageError: mesh-transformer-jax has no such type or model, or it cannot be split into so many shards.
    """
    if not weights.types <= STORABLE:
        raise UsageError("mesh-transformer-jax stores fp32 or bf16: add --dtype fp32 or --dtype bf16")
    MeshWriter(folder / f"step_{source.step}", source.architecture, num_shards, weights).write(source.step)
    write_json_file(
        folder / "meta.json", {"step": source.step, "checkpoints": [source.step], "aux": {str(source.step): {}}}
    )


@dataclass(frozen=True)
class ShardParts:
    """Rows of a tensor, split among the shards."""

    parts: Sequence[Tensor]  # of one shard, or of each
    rows: RowRange | None = None  # None: the step counter
    digest: str = ""  # checksum of the rows' bytes in the tensor's order


class MeshWriter:
    """Writer of the shards of a slim checkpoint."""

    def __init__(self, folder: Path, architecture: Architecture, num_shards: int, transfer: TensorTransfer) -> None:
        """Check that the model can be split into the shards.

        Args:
            folder: ``step_N``; complete files in it are kept.
            transfer: tensors and their stored types.
        """
        self.folder, self.num_shards = folder, num_shards
        self._transfer, self._checkpoint, self._entries = transfer, transfer.checkpoint, transfer.entries
        if not architecture.family.mesh:
            raise UsageError(f"mesh-transformer-jax has no {architecture.family.model_type}: use --to huggingface")
        self._leaves = leaves_of(architecture.family, len(architecture.skeleton) - 2)
        # A bias that is summed over shards is divided by their number, which is exact for powers of two only.
        num_heads = architecture.config.n_head
        if num_shards < 1 or num_shards & (num_shards - 1) or num_heads % num_shards:
            raise UsageError(f"--mesh-shards {num_shards}: must be a power of two that divides the {num_heads} heads")
        for leaf in self._leaves:
            if leaf.join in ("rows", "columns"):
                length = self._checkpoint.shape(leaf.name)[1 if leaf.join == "columns" else 0]
                if length % num_shards:
                    raise UsageError(
                        f"--mesh-shards {num_shards}: {leaf.name} has {length} {leaf.join}, no multiple of {num_shards}"
                    )

    def write(self, step: int) -> None:
        """Write the files: file 0 of all shards together, then file 1, and so on.

        Raises:
            DataError: the source is damaged, or holds values that cannot be stored.
        """
        leaves: list[Leaf | None] = [*self._leaves, None]  # the last one is the step
        # Like numpy.array_split: the first files have one leaf more.
        size, more = divmod(len(leaves), NUM_FILES)
        unfinished = []
        for number in range(NUM_FILES):
            begin = number * size + min(number, more)
            files = [self.folder / f"shard_{shard}" / f"{number}.npz" for shard in range(self.num_shards)]
            # A resumed conversion keeps only files that are complete in all shards: one read serves them all.
            if not all(file.is_file() for file in files):
                unfinished.append((files, leaves[begin : begin + size + (number < more)]))
        tasks = (task for _, leaves in unfinished for leaf in leaves for task in self._tasks(leaf, step))
        with WriteBehind(self.num_shards) as behind, closing(run_ordered(tasks)) as cuts:
            for files, leaves in unfinished:
                self._write_files(behind, files, leaves, cuts)

    def _write_files(
        self, behind: WriteBehind, files: Sequence[Path], leaves: Sequence[Leaf | None], cuts: Iterator[ShardParts]
    ) -> None:
        """Write one file per shard under a temporary name, and rename each when the disk has it."""
        pages = []
        with ExitStack() as stack:
            writers = []
            for file in files:
                file.parent.mkdir(parents=True, exist_ok=True)
                pages.append(behind.open(file.with_suffix(".part")))
                writers.append(stack.enter_context(NpzWriter(pages[-1])))
            for leaf in leaves:
                # A task makes the part of one shard, or those of all.
                left = list(writers)
                while left:
                    cut = next(cuts)
                    for part in cut.parts:
                        left.pop(0).write(part)
                    if leaf is not None and cut.rows is not None:
                        self._transfer.written(leaf.name, cut.rows, cut.digest)
                    # Free these parts before the next ones arrive.
                    del cut, part
        for file, page in zip(files, pages, strict=True):
            page.finish(partial(file.with_suffix(".part").replace, file))

    def _tasks(self, leaf: Leaf | None, step: int) -> Iterator[SizedTask[ShardParts]]:
        """Yield the tasks that make the parts of a leaf: one task per shard if rows are split, else one for all."""
        if leaf is None:
            yield 0, lambda: ShardParts([torch.tensor(step, dtype=torch.int32)] * self.num_shards)
            return
        entry = self._entries[leaf.name]
        if leaf.join == "rows":
            rows = entry.rows // self.num_shards
            for shard in range(self.num_shards):
                some = shard * rows, (shard + 1) * rows
                size = self._checkpoint.read_task(leaf.name, some)[0] + entry.num_bytes // self.num_shards
                yield size, partial(self._rows, leaf, some)
        else:
            make = {"columns": self._columns, "added": self._zeros}.get(leaf.join, self._shared)
            yield 2 * entry.num_bytes if leaf.join == "columns" else 0, partial(make, leaf)

    def _rows(self, leaf: Leaf, rows: RowRange) -> ShardParts:
        piece = self._checkpoint.read(leaf.name, *rows)
        self._transfer.inspect(leaf.name, piece)
        piece = cast(piece, self._entries[leaf.name].dtype)
        return ShardParts([contiguous(piece.t()) if leaf.is_transposed else piece], rows, checksum_of(piece))

    def _columns(self, leaf: Leaf) -> ShardParts:
        name, entry, digest = leaf.name, self._entries[leaf.name], xxhash.xxh3_128()
        width = entry.shape[1] // self.num_shards
        parts = [borrow_tensor((entry.rows, width), entry.dtype) for _ in range(self.num_shards)]
        if leaf.is_transposed:
            parts = [part.view(width, entry.rows) for part in parts]
        tasks = (self._checkpoint.read_task(name, rows) for rows in self._checkpoint.row_ranges(name))
        start = 0
        with closing(run_ordered(tasks, PARTS_BYTES)) as pieces:
            for piece in pieces:
                self._transfer.inspect(name, piece)
                piece = cast(piece, entry.dtype)
                digest.update(bytes_of(piece))
                stop = start + len(piece)
                for part, columns in zip(parts, piece.chunk(self.num_shards, dim=1), strict=True):
                    if leaf.is_transposed:  # contiguous first: then PyTorch transposes in cache-sized blocks
                        part[:, start:stop] = contiguous(contiguous(columns).t())
                    else:
                        part[start:stop] = columns
                start = stop
        return ShardParts(parts, (0, entry.rows), digest.hexdigest())

    def _zeros(self, leaf: Leaf) -> ShardParts:
        entry = self._entries[leaf.name]
        # Hugging Face's GPT-J has no bias of the embedding.
        return ShardParts([torch.zeros(entry.shape[1:], dtype=entry.dtype)] * self.num_shards)

    def _shared(self, leaf: Leaf) -> ShardParts:
        entry = self._entries[leaf.name]
        whole = self._checkpoint.read(leaf.name)
        self._transfer.inspect(leaf.name, whole)
        whole = cast(whole, entry.dtype)
        # Shards add up their shares of a summed bias; replicated tensors are equal in all shards.
        # Exact, since the number of shards is a power of two.
        part = whole / self.num_shards if leaf.join == "sum" else whole
        return ShardParts([part] * self.num_shards, (0, entry.rows), checksum_of(whole))
