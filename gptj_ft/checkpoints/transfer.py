"""Copy the tensors of a checkpoint into new files, a few megabytes at a time, and verify the copies by checksums."""

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
from gptj_ft.system.ordered_tasks import SizedTask, run_ordered
from gptj_ft.system.write_behind import WriteBehind


class TensorTransfer:
    """Copy of a checkpoint's tensors: writes them, then verifies the written files.

    Each piece is checksummed before it goes into a file. Verification reads the files back under the tensors' names and
    compares checksums, so the source is read only once.
    """

    def __init__(
        self,
        architecture: Architecture,
        checkpoint: Checkpoint,
        dtype: torch.dtype | None,
        advance: Callable[[int], None],
        is_square: bool = False,
    ) -> None:
        """Choose the stored types.

        Args:
            checkpoint: source; it may lack optional tensors only.
            dtype: type to store; ``None``: each tensor's own.
            advance: callback of the bytes written or verified since the last call.
            is_square: reject negative numbers, for second moments.
        """
        self.checkpoint, self._advance, self._is_square = checkpoint, advance, is_square
        self._file_name = architecture.file_name
        self.layers: list[dict[str, TensorInfo]] = []  # stored type and shape by Hugging Face's names, per layer
        for layer in range(len(architecture.skeleton)):
            names = [name for name in checkpoint.names_of(architecture, layer).values() if name in checkpoint.names]
            entries = {name: checkpoint.entry(name) for name in names}
            self.layers.append({name: TensorInfo(dtype or entry.dtype, entry.shape) for name, entry in entries.items()})
        self.entries = {name: entry for layer in self.layers for name, entry in layer.items()}
        self.bytes = sum(entry.num_bytes for entry in self.entries.values())
        self.not_finite: set[str] = set()  # names of tensors with NaN or infinity
        self._checksums: dict[str, dict[RowRange, str]] = {name: {} for name in self.entries}

    @property
    def types(self) -> set[torch.dtype]:
        return {entry.dtype for entry in self.entries.values()}

    def write(self, folder: Path, shard_bytes: int | None = None) -> None:
        """Write safetensors files, with an index if there are several. Keep files that an earlier call completed.

        Args:
            shard_bytes: size limit of a file; a model that fits into one is not sharded. ``None``: one file per layer.

        Raises:
            DataError: the source is damaged, or holds values that cannot be stored: see `inspect`.
        """
        folder.mkdir(parents=True, exist_ok=True)
        files = self._shards(shard_bytes)
        self._write_files({folder / file: names for file, names in files.items()})
        if len(files) > 1 or shard_bytes is None:
            write_index(
                folder, {self._file_name(name): file for file, names in files.items() for name in names}, self.bytes
            )

    def inspect(self, name: str, piece: Tensor) -> None:
        """Record whether rows of a tensor are finite. Thread-safe.

        Raises:
            DataError: a value is too large for the stored type, or a second moment is negative.
        """
        if not piece.numel():
            return
        dtype, path = self.entries[name].dtype, self.checkpoint.folder
        # One pass finds NaN as well: aminmax propagates it.
        low, high = piece.aminmax()
        largest = max(abs(float(low)), abs(float(high)))
        if not largest < float("inf"):  # true for NaN, too
            self.not_finite.add(name)
        if dtype is torch.float16 and torch.finfo(dtype).max < largest < float("inf"):
            raise DataError(f"{path}: {name} holds {largest:.6g}, too large for fp16; use bf16 or fp32")
        if self._is_square and low < 0:
            raise DataError(
                f"{path}: the second moment of {name} holds {float(low):.6g}, but a mean of squares cannot be "
                "negative; leave out --with-optimizer"
            )

    def written(self, name: str, rows: RowRange, checksum: str) -> None:
        """Record written rows, in row order, with the checksum of their stored bytes."""
        self._checksums[name][rows] = checksum
        entry = self.entries[name]
        self._advance(entry.num_bytes * (rows[1] - rows[0]) // max(1, entry.rows))

    def compare(self, written: Checkpoint) -> None:
        """Compare each stored tensor with its source.

        Raises:
            DataError: a tensor differs.
        """
        # An earlier, killed process may have written some files: without checksums of those, read the source again.
        known = {name: sums for name, sums in self._checksums.items() if _covers(sums, self.entries[name].rows)}
        tasks = (_checksum_task(written, name, rows) for name, sums in known.items() for rows in sums)
        with closing(run_ordered(tasks)) as checksums:
            for name, entry in self.entries.items():
                stored = written.entry(name).dtype
                same = [next(checksums) == checksum for checksum in known.get(name, {}).values()]
                problem = f"{name} is {stored}" if stored != entry.dtype else ""
                if not problem and not (same and all(same)):
                    # If this finds no difference although checksums differ, the same bytes were read differently.
                    problem = difference(self.checkpoint, written, name)
                    problem = problem or (f"two reads of {name} differ" if same else "")
                if problem:
                    raise DataError(
                        f"{problem}: the written file does not match {self.checkpoint.folder}; is the disk faulty?"
                    )
                self._advance(entry.num_bytes)

    def _shards(self, shard_bytes: int | None) -> dict[str, list[str]]:
        """Assign tensors to files, as `write` describes."""
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
        """Write safetensors files. Other threads read ahead and write behind, while this one casts."""
        source, unfinished = self.checkpoint, {path: names for path, names in files.items() if not path.is_file()}
        remaining = (name for names in unfinished.values() for name in names)
        tasks = (source.read_task(name, rows) for name in remaining for rows in source.row_ranges(name))
        with WriteBehind() as behind, closing(run_ordered(tasks)) as pieces:
            for path, names in unfinished.items():
                part = path.with_name(path.name + ".part")
                writer = behind.open(part)
                writer.write(header_of({self._file_name(name): self.entries[name] for name in names}))
                for name in names:
                    for rows in source.row_ranges(name):
                        piece, checksum = next(pieces), xxhash.xxh3_128()
                        self.inspect(name, piece)
                        writer.put(piece, self.entries[name].dtype, checksum)
                        del piece
                        self.written(name, rows, checksum.hexdigest())
                writer.finish(partial(part.replace, path))  # a file has its final name only when it is complete


def checksum_of(tensor: Tensor) -> str:
    """Return the XXH3-128 checksum of a tensor's bytes."""
    return xxhash.xxh3_128_hexdigest(bytes_of(tensor))


def _checksum_task(checkpoint: Checkpoint, name: str, rows: RowRange) -> SizedTask[str]:
    size, read = checkpoint.read_task(name, rows)
    return size, partial(lambda: checksum_of(read()))


def _covers(ranges: Mapping[RowRange, str], num_rows: int) -> bool:
    """Tell whether ranges of rows cover a whole tensor."""
    end = 0
    for start, stop in sorted(ranges):
        if start != end:
            return False
        end = stop
    return end == num_rows
