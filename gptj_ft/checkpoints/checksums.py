"""The proof that a conversion wrote what its source holds: everything is read back, and its digests are compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import partial

from gptj_ft.checkpoints.compare import difference
from gptj_ft.checkpoints.formats.tensor_info import Entry
from gptj_ft.checkpoints.model_folder import Checkpoint
from gptj_ft.checkpoints.streamed import Rows, digest_of, reading
from gptj_ft.system.prefetch import Task, ahead


class Proof:
    """Digests of the values that the source had for each tensor, in the type that was asked for, by rows.

    They are taken of the numbers before these go into a file, wherever in it, and compared with digests of what the
    file's reader finds under the tensor's name: so the source need not be read again.
    """

    def __init__(self) -> None:
        self._digests: dict[str, dict[Rows, str]] = {}

    def note(self, name: str, rows: Rows, digest: str) -> None:
        """Note the digest of some rows' bytes."""
        self._digests.setdefault(name, {})[rows] = digest

    def problems(
        self, source: Checkpoint, written: Checkpoint, entries: Mapping[str, Entry]
    ) -> Iterator[tuple[str, str]]:
        """Yield each tensor with what is wrong with it, or nothing.

        Args:
            source: where they come from; read for those tensors only that another process has written, and to say what
                the difference is.
            written: the result.
            entries: the tensors as they should be there.
        """
        known = {name: self._digests[name] for name in entries if self._is_whole(name, entries[name])}
        tasks = (_digesting(written, name, rows) for name, digests in known.items() for rows in digests)
        with closing(ahead(tasks)) as found:
            for name, entry in entries.items():
                there = written.entry(name)
                if there.dtype != entry.dtype:
                    yield name, f"{name} is {there.dtype}"
                same = [next(found) == digest for digest in known.get(name, {}).values()]
                if same and all(same):
                    yield name, ""
                else:
                    differs = difference(source, written, name)
                    yield name, differs or (f"{name} is read now like this, now like that" if same else "")

    def _is_whole(self, name: str, entry: Entry) -> bool:
        """Tell whether there are digests of all rows of a tensor."""
        end = 0
        for start, stop in sorted(self._digests.get(name, ())):
            if start != end:
                return False
            end = stop
        return end == entry.rows


def _digesting(checkpoint: Checkpoint, name: str, rows: Rows) -> Task[str]:
    size, read = reading(checkpoint, name, rows)
    return size, partial(lambda: digest_of(read()))
