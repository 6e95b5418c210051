"""Writing slim checkpoints of mesh-transformer-jax, version 1: every shard's part of a few tensors at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from gptj_ft.errors import UsageError
from gptj_ft.families import Architecture, Leaf
from gptj_ft.formats.huggingface import Checkpoint
from gptj_ft.formats.mesh import NUM_FILES, leaves_of
from gptj_ft.formats.npz import NpzWriter
from gptj_ft.formats.streamed import Convert, ahead

DTYPES = (torch.float32, torch.bfloat16)


class MeshWriter:
    """The shards of a slim checkpoint.

    Attributes:
        folder: of the checkpoint, ``step_N``.
        num_shards: how many.
    """

    def __init__(
        self, folder: Path, architecture: Architecture, checkpoint: Checkpoint, num_shards: int, convert: Convert
    ) -> None:
        """Check that the model can be cut into so many shards.

        Args:
            folder: where to; what is there already, whole, is kept.
            architecture: of the model.
            checkpoint: its tensors.
            num_shards: how many shards.
            convert: what to make of a tensor.

        Raises:
            UsageError: mesh-transformer-jax has no such model, or it cannot be cut like that.
        """
        self.folder, self.num_shards = folder, num_shards
        self._checkpoint, self._convert = checkpoint, convert
        if not architecture.family.mesh:
            raise UsageError(f"mesh-transformer-jax has no {architecture.family.model_type}: use --to huggingface")
        self._leaves = leaves_of(architecture.family, len(architecture.layers()) - 2)
        # A bias that every shard adds is divided by their number, which is exact for powers of two.
        num_heads = architecture.config.n_head
        if num_shards < 1 or num_shards & (num_shards - 1) or num_heads % num_shards:
            raise UsageError(f"--mesh-shards {num_shards}: must be a power of two that divides the {num_heads} heads")
        for leaf in self._leaves:
            if leaf.join in ("rows", "columns"):
                length = checkpoint.shape(leaf.name)[1 if leaf.join == "columns" else 0]
                if length % num_shards:
                    raise UsageError(
                        f"--mesh-shards {num_shards}: {leaf.name} has {length} {leaf.join}, not a multiple"
                    )

    def write(self, step: int) -> None:
        """Write the files, those of one number in all shards together.

        Raises:
            OSError: the disk's own.
            DataError: what reading and ``convert`` raise.
        """
        leaves: list[Leaf | None] = [*self._leaves, None]  # the last is the step
        size, more = divmod(len(leaves), NUM_FILES)
        for number in range(NUM_FILES):
            begin = number * size + min(number, more)
            files = [self.folder / f"shard_{shard}" / f"{number}.npz" for shard in range(self.num_shards)]
            if not all(file.is_file() for file in files):
                self._write_files(files, leaves[begin : begin + size + (number < more)], step)

    def _write_files(self, files: Sequence[Path], leaves: Sequence[Leaf | None], step: int) -> None:
        with ExitStack() as stack:
            opened, writers = [], []
            for file in files:
                file.parent.mkdir(parents=True, exist_ok=True)
                opened.append(stack.enter_context(file.with_suffix(".part").open("wb")))
                writers.append(stack.enter_context(NpzWriter(opened[-1])))
            for shard, part in ahead(self._parts(leaves, step)):
                writers[shard].write(part)
                del part
            for writer, npz in zip(writers, opened, strict=True):
                writer.close()
                npz.flush()
                os.fsync(npz.fileno())
        for path in files:
            path.with_suffix(".part").replace(path)

    def _parts(self, leaves: Sequence[Leaf | None], step: int) -> Iterator[tuple[int, Tensor]]:
        """Yield each leaf's part for each shard."""
        for leaf in leaves:
            cut = self._cut(leaf) if leaf else lambda shard: torch.tensor(step, dtype=torch.int32)
            for shard in range(self.num_shards):
                yield shard, cut(shard)

    def _cut(self, leaf: Leaf) -> Callable[[int], Tensor]:
        """Return what makes a shard's part of a tensor, as it lies in the file."""
        name, entry = leaf.name, self._checkpoint.entry(leaf.name)

        def read(start: int = 0, stop: int | None = None) -> Tensor:
            return self._convert(name, self._checkpoint.read(name, start, stop))

        if leaf.join == "added":
            zeros = torch.zeros_like(read(0, 1)[0])
            return lambda shard: zeros
        if leaf.join == "rows":
            rows = entry.rows // self.num_shards
            return lambda shard: _turned(leaf, read(shard * rows, (shard + 1) * rows))
        whole = read()
        if leaf.join == "columns":
            columns = entry.shape[1] // self.num_shards
            return lambda shard: _turned(leaf, whole[:, shard * columns : (shard + 1) * columns])
        shared = whole / self.num_shards if leaf.join == "sum" else whole
        return lambda shard: shared


def _turned(leaf: Leaf, part: Tensor) -> Tensor:
    return part.t().contiguous() if leaf.is_transposed else part
