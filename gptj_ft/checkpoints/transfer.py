"""Transfer the tensors of a checkpoint into other files: a few megabytes at a time, verified by checksums."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from gptj_ft.checkpoints.compare import difference
from gptj_ft.checkpoints.model_folder import Checkpoint, RowRange, write_index
from gptj_ft.checkpoints.weight_file import TensorInfo, header_of
from gptj_ft.errors import DataError
from gptj_ft.models.registry import Architecture
from gptj_ft.system.memory import bytes_of
from gptj_ft.system.prefetch import SizedTask, prefetch
from gptj_ft.system.write_behind import WriteBehind


class TensorTransfer:
    """The tensors of a checkpoint, to be written as files and compared with what was written.

    Checksums are taken of the numbers before these go into a file, and compared with those of what the file's reader
    finds under the tensor's name: the source need not be read again.

    Attributes:
        checkpoint: the source.
        layers: type and shape to store, by Hugging Face's name, layer by layer.
        entries: those of all layers.
        bytes: size of all, as stored.
        not_finite: names of the tensors that hold NaN or infinity.
    """

    def __init__(
        self,
        architecture: Architecture,
        checkpoint: Checkpoint,
        dtype: torch.dtype | None,
        advance: Callable[[int], None],
        is_square: bool = False,
    ) -> None:
        """Choose how the tensors are stored.

        Args:
            architecture: the model's.
            checkpoint: the source; it has all tensors of the model but for those that are optional.
            dtype: type to store; ``None``: each tensor's own.
            advance: called with the bytes written, and compared, since the last call.
            is_square: whether they are means of squares, so that a negative number is an error; default false.
        """
        self.checkpoint, self._advance, self._is_square = checkpoint, advance, is_square
        self.layers: list[dict[str, TensorInfo]] = []
        for layer in range(len(architecture.skeleton)):
            names = [name for name in checkpoint.names_of(architecture, layer).values() if name in checkpoint.names]
            found = {name: checkpoint.entry(name) for name in names}
            self.layers.append({name: TensorInfo(dtype or entry.dtype, entry.shape) for name, entry in found.items()})
        self.entries = {name: entry for layer in self.layers for name, entry in layer.items()}
        self.bytes = sum(entry.num_bytes for entry in self.entries.values())
        self.not_finite: set[str] = set()
        self._checksums: dict[str, dict[RowRange, str]] = {name: {} for name in self.entries}

    @property
    def types(self) -> set[torch.dtype]:
        return {entry.dtype for entry in self.entries.values()}

    def write(self, folder: Path, shard_bytes: int | None = None) -> None:
        """Write safetensors files, and their index where there are several.

        Files that another process has completed are kept.

        Args:
            folder: the target; it is made if it is not there.
            shard_bytes: size limit of a file; what fits into one is not sharded. ``None``: a file for each layer.

        Raises:
            OSError: the disk's own.
            DataError: the source is damaged, or holds what cannot be stored, see `inspect`.
        """
        folder.mkdir(parents=True, exist_ok=True)
        files = self._shards(shard_bytes)
        self._write_files({folder / file: names for file, names in files.items()})
        if len(files) > 1 or shard_bytes is None:
            write_index(folder, {name: file for file, names in files.items() for name in names}, self.bytes)

    def inspect(self, name: str, piece: Tensor) -> None:
        """Note whether rows of a tensor are finite; thread-safe.

        Raises:
            DataError: the type to store cannot hold them, or a mean of squares is negative.
        """
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

    def written(self, name: str, rows: RowRange, checksum: str) -> None:
        """Note rows that have been handed to the disk, in row order, with the checksum of their stored bytes."""
        self._checksums[name][rows] = checksum
        entry = self.entries[name]
        self._advance(entry.num_bytes * (rows[1] - rows[0]) // max(1, entry.rows))

    def compare(self, written: Checkpoint) -> None:
        """Compare each stored tensor with its source.

        Where another process has written a part, so that its checksum is not known, the source is read again.

        Raises:
            DataError: one differs.
        """
        known = {name: sums for name, sums in self._checksums.items() if _covers(sums, self.entries[name].rows)}
        tasks = (_checksum_task(written, name, rows) for name, sums in known.items() for rows in sums)
        with closing(prefetch(tasks)) as found:
            for name, entry in self.entries.items():
                stored = written.entry(name).dtype
                same = [next(found) == checksum for checksum in known.get(name, {}).values()]
                problem = f"{name} is {stored}" if stored != entry.dtype else ""
                if not problem and not (same and all(same)):
                    problem = difference(self.checkpoint, written, name)
                    problem = problem or (f"{name} is read now like this, now like that" if same else "")
                if problem:
                    raise DataError(
                        f"{problem}: what was read back is not what {self.checkpoint.folder} holds; is the disk faulty?"
                    )
                self._advance(entry.num_bytes)

    def _shards(self, shard_bytes: int | None) -> dict[str, list[str]]:
        """Return the names of the tensors of each file, see `write`."""
        groups: list[list[str]] = []
        room = 0
        for layer in self.layers:
            if shard_bytes is None:
                groups += [list(layer)] if layer else []
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

    def _write_files(self, files: Mapping[Path, list[str]]) -> None:
        """Write safetensors files: threads read what follows and write what came before, this one changes the type."""
        source, unfinished = self.checkpoint, {path: names for path, names in files.items() if not path.is_file()}
        left = (name for names in unfinished.values() for name in names)
        tasks = (source.read_task(name, rows) for name in left for rows in source.row_ranges(name))
        with WriteBehind() as behind, closing(prefetch(tasks)) as pieces:
            for path, names in unfinished.items():
                part = path.with_name(path.name + ".part")
                writer = behind.open(part)
                writer.write(header_of({name: self.entries[name] for name in names}))
                for name in names:
                    for rows in source.row_ranges(name):
                        piece, checksum = next(pieces), xxhash.xxh3_128()
                        self.inspect(name, piece)
                        writer.put(piece, self.entries[name].dtype, checksum)
                        del piece
                        self.written(name, rows, checksum.hexdigest())
                writer.finish(partial(part.replace, path))


def checksum_of(tensor: Tensor) -> str:
    """Return the XXH3-128 checksum of a tensor's bytes."""
    return xxhash.xxh3_128_hexdigest(bytes_of(tensor))


def _checksum_task(checkpoint: Checkpoint, name: str, rows: RowRange) -> SizedTask[str]:
    size, read = checkpoint.read_task(name, rows)
    return size, partial(lambda: checksum_of(read()))


def _covers(ranges: Mapping[RowRange, str], num_rows: int) -> bool:
    """Tell whether ranges of rows make up a whole tensor."""
    end = 0
    for start, stop in sorted(ranges):
        if start != end:
            return False
        end = stop
    return end == num_rows
