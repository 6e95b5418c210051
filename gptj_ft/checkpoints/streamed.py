"""Tensors from one checkpoint into the files of another, a few megabytes at a time, and on from where it was killed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import xxhash
from torch import Tensor

from gptj_ft.checkpoints.formats.safetensors import header_of
from gptj_ft.checkpoints.formats.tensor_info import Entry
from gptj_ft.checkpoints.model_folder import Checkpoint
from gptj_ft.system.files import SHARED_FILE, new_name, read_text, write_file
from gptj_ft.system.memory import bytes_of
from gptj_ft.system.prefetch import Task, ahead
from gptj_ft.system.write_behind import PageWriter, WriteBehind

Rows = tuple[int, int]  # the first, and the one behind the last
SYNC_BYTES = 256 << 20  # after so many, the disk has to have them, and a later process goes on from there


def ranges(checkpoint: Checkpoint, name: str, rows: int | None = None) -> Iterator[Rows]:
    """Yield a tensor's rows, ``rows`` at a time, or as many as are best for its file; a scalar is one row."""
    entry = checkpoint.entry(name)
    rows = rows or checkpoint.rows_at_once(name)
    for start in range(0, entry.rows, rows):
        yield start, min(start + rows, entry.rows)


def reading(checkpoint: Checkpoint, name: str, rows: Rows) -> Task[Tensor]:
    """Return the task of reading some rows."""
    entry = checkpoint.entry(name)
    return entry.num_bytes * (rows[1] - rows[0]) // entry.rows, partial(checkpoint.read, name, *rows)


def digest_of(tensor: Tensor) -> str:
    """Return the digest of a tensor's bytes, XXH3-128."""
    return xxhash.xxh3_128_hexdigest(bytes_of(tensor))


@dataclass(frozen=True)
class Watch:
    """What is to be told of everything that is written.

    Attributes:
        read: a tensor's name and some rows of it as they were read, in any thread; it may refuse them.
        written: a tensor's name, the rows, and the digest of their bytes as they are stored, in row order.
    """

    read: Callable[[str, Tensor], None]
    written: Callable[[str, Rows, str], None]


class _Unfinished:
    """A safetensors file that is not whole yet; another process may have begun it."""

    def __init__(self, path: Path, entries: Mapping[str, Entry]) -> None:
        self.path, self.entries = path, entries
        self.part, self._mark = path.with_name(path.name + ".part"), path.with_name(path.name + ".mark")
        self.header, names = header_of(entries), list(entries)
        num_done = int(read_text(self._mark)) if self._mark.is_file() and self.part.is_file() else 0
        self.left = names[num_done:]
        self._ends = [len(self.header)]  # of the header, of the header and the first tensor, ...
        for name in names:
            self._ends.append(self._ends[-1] + entries[name].num_bytes)
        self.begin, self.size = self._ends[num_done] if num_done else 0, self._ends[-1]

    def mark(self, num_bytes: int) -> None:
        """Note for a later process that the disk has so many bytes."""
        new = new_name(self._mark)
        write_file(new, str(max(0, sum(end <= num_bytes for end in self._ends) - 1)), SHARED_FILE)
        new.replace(self._mark)

    def finish(self) -> None:
        """Give it its name."""
        self.part.replace(self.path)
        self._mark.unlink(missing_ok=True)


def write_streamed(files: Mapping[Path, Mapping[str, Entry]], checkpoint: Checkpoint, watch: Watch) -> None:
    """Write safetensors files; what another process has done of them, as far as the disk has it, is kept.

    Some threads read what follows, others write what came before, and this one changes its type between them.

    Args:
        files: of each file, its tensors in order. Until it is whole it has another name.
        checkpoint: where they come from, under the same names.
        watch: what is told of them.

    Raises:
        OSError: the disk's own.
        DataError: what reading and ``watch`` raise.
    """
    unfinished = [_Unfinished(path, entries) for path, entries in files.items() if not path.is_file()]
    tasks = (
        reading(checkpoint, name, rows)
        for file in unfinished
        for name in file.left
        for rows in ranges(checkpoint, name)
    )
    with WriteBehind() as behind, closing(ahead(tasks)) as pieces:
        for file in unfinished:
            writer = behind.open(file.part, file.begin)
            if not file.begin:
                writer.write(file.header)
            for name in file.left:
                _write_tensor(writer, name, file.entries[name], checkpoint, pieces, watch)
                if writer.unsynced >= SYNC_BYTES:
                    writer.sync(file.mark)
            assert writer.size == file.size, "a tensor had other bytes than its header says"
            writer.finish(file.finish)


def _write_tensor(
    writer: PageWriter, name: str, entry: Entry, checkpoint: Checkpoint, pieces: Iterator[Tensor], watch: Watch
) -> None:
    for rows in ranges(checkpoint, name):
        piece, digest = next(pieces), xxhash.xxh3_128()
        watch.read(name, piece)
        writer.put(piece, entry.dtype, digest)
        del piece
        watch.written(name, rows, digest.hexdigest())
