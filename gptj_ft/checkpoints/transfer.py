"""The tensors of a checkpoint on their way into another: written, looked at as they pass, and compared afterwards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from gptj_ft.checkpoints.checksums import Proof
from gptj_ft.checkpoints.formats.tensor_info import Entry
from gptj_ft.checkpoints.model_folder import Checkpoint
from gptj_ft.checkpoints.streamed import Rows, Watch, write_streamed
from gptj_ft.checkpoints.writer import INDEX, write_json
from gptj_ft.errors import DataError
from gptj_ft.models.registry import Architecture


class Copy:
    """The tensors of a checkpoint, to be written somewhere.

    Attributes:
        checkpoint: where they come from.
        entries: how they are stored: type and shape by Hugging Face's name, layer by layer.
        bytes: their size as stored.
        not_finite: names of those that hold NaN or infinity.
        watch: what whoever writes them has to tell.
    """

    def __init__(
        self,
        architecture: Architecture,
        checkpoint: Checkpoint,
        dtype: torch.dtype | None,
        advance: Callable[[int], None],
        is_square: bool = False,
    ) -> None:
        """Choose how the tensors of a checkpoint are stored.

        Args:
            architecture: of the model.
            checkpoint: where they come from; it has all tensors of the model.
            dtype: the type to store; ``None``: each tensor's own.
            advance: called with the bytes that were written, and compared, since the last call.
            is_square: whether they are means of squares, so that a negative one is an error.
        """
        self.checkpoint, self._advance, self._is_square = checkpoint, advance, is_square
        self.layers: list[dict[str, Entry]] = []
        for layer in range(len(architecture.layers())):
            found = {name: checkpoint.entry(name) for name in checkpoint.names_of(architecture, layer).values()}
            self.layers.append({name: Entry(dtype or entry.dtype, entry.shape) for name, entry in found.items()})
        self.entries = {name: entry for layer in self.layers for name, entry in layer.items()}
        self.bytes = sum(entry.num_bytes for entry in self.entries.values())
        self.not_finite: set[str] = set()
        self.watch = Watch(self._inspect, self._written)
        self._proof = Proof()

    @property
    def types(self) -> set[torch.dtype]:
        return {entry.dtype for entry in self.entries.values()}

    def files(self, shard_bytes: int | None) -> dict[str, list[str]]:
        """Return which tensors go into which safetensors file.

        Args:
            shard_bytes: most bytes of a file; what fits into one is not sharded. ``None``: a file for each layer.
        """
        groups: list[list[str]] = []
        room = 0
        for layer in self.layers:
            if shard_bytes is None:
                groups.append(list(layer))
                continue
            for name, entry in layer.items():
                if entry.num_bytes > room or not groups:
                    groups.append([])
                    room = shard_bytes
                groups[-1].append(name)
                room -= entry.num_bytes
        if shard_bytes is not None and len(groups) == 1:
            return {"model.safetensors": groups[0]}
        return {
            f"model-{number:05d}-of-{len(groups):05d}.safetensors": names
            for number, names in enumerate(groups, start=1)
        }

    def write(self, folder: Path, shard_bytes: int | None = None) -> None:
        """Write safetensors files, and their index where there are several; see `files`."""
        folder.mkdir(parents=True, exist_ok=True)
        files = self.files(shard_bytes)
        entries = {folder / file: {name: self.entries[name] for name in names} for file, names in files.items()}
        write_streamed(entries, self.checkpoint, self.watch)
        if len(files) > 1 or shard_bytes is None:
            weight_map = {name: file for file, names in files.items() for name in names}
            write_json(folder / INDEX, {"metadata": {"total_size": self.bytes}, "weight_map": weight_map})

    def compare(self, written: Checkpoint) -> None:
        """Compare each tensor with its source.

        Raises:
            DataError: one differs.
        """
        for name, problem in self._proof.problems(self.checkpoint, written, self.entries):
            if problem:
                raise DataError(
                    f"{problem}: what was read back is not what {self.checkpoint.folder} holds; is the disk faulty?"
                )
            self._advance(self.entries[name].num_bytes)

    def _inspect(self, name: str, piece: Tensor) -> None:
        """Note what is not finite in a piece of a tensor, in any thread; refuse what its type cannot hold."""
        if not piece.numel():
            return
        dtype, path = self.entries[name].dtype, self.checkpoint.folder
        low, high = piece.aminmax()
        largest = max(abs(float(low)), abs(float(high)))
        if not largest < float("inf"):  # NaN, too
            self.not_finite.add(name)
        if dtype is torch.float16 and torch.finfo(dtype).max < largest < float("inf"):
            raise DataError(f"{path}: {name} holds {largest:.6g}, too large for fp16; use bf16 or fp32")
        if self._is_square and low < 0:
            raise DataError(
                f"{path}: the second moment of {name} holds {float(low):.6g}, but squares are not "
                "negative; leave out --with-optimizer"
            )

    def _written(self, name: str, rows: Rows, digest: str) -> None:
        self._proof.note(name, rows, digest)
        entry = self.entries[name]
        self._advance(entry.num_bytes * (rows[1] - rows[0]) // max(1, entry.rows))
