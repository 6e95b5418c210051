"""Which rows say the same: found at the end, from digests on the disk, so that memory does not grow with the rows."""

from __future__ import annotations

import heapq
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gptj_ft.system.paths import make_home

RECORD = np.dtype([("asked", "<u8"), ("answered", "<u8"), ("source", "<u4"), ("line", "<u8")])
HELD = 2**14  # records in memory before they are written
BUCKET = 2**18  # records looked at together


class Repetitions:
    """Remembers what each row asks and what it answers."""

    def __init__(self, bucket: int = BUCKET) -> None:
        self._bucket = bucket
        self._sources: dict[str, int] = {}
        self._held: list[tuple[int, int, int, int]] = []
        # Not where temporary files go: that may be memory.
        self._file = tempfile.TemporaryFile(dir=make_home())  # noqa: SIM115 - closed by `close`

    def add(self, asked: int, answered: int, source: str, line: int) -> None:
        """Remember a row: digests of 64 bits, and where it is."""
        self._held.append((asked, answered, self._sources.setdefault(source, len(self._sources)), line))
        if len(self._held) == HELD:
            self._write()

    def found(self, places: int) -> dict[bool, tuple[int, list[str]]]:
        """Return, of the rows that ask what one before them asks, how many there are and where the first are.

        Args:
            places: how many of the first.

        Returns:
            For rows with the same answer as the first that asks so (``True``), and with another (``False``).
        """
        self._write()
        total = self._file.tell() // RECORD.itemsize
        count = {True: 0, False: 0}
        first: dict[bool, list[tuple[int, int, int]]] = {True: [], False: []}  # (number of the row, source, line)
        for bucket in range(buckets := max(1, -(-total // self._bucket))):
            for number, is_same, source, line in _again(*self._rows_of(bucket, buckets)):
                count[is_same] += 1
                first[is_same].append((number, source, line))
            first = {is_same: heapq.nsmallest(places, of) for is_same, of in first.items()}
        names = list(self._sources)
        return {same: (count[same], [f"{names[source]}:{line}" for _, source, line in first[same]]) for same in count}

    def close(self) -> None:
        """Forget all of it."""
        self._file.close()

    def _write(self) -> None:
        self._file.seek(0, 2)
        self._file.write(np.array(self._held, RECORD).tobytes())
        self._held.clear()

    def _rows_of(self, bucket: int, buckets: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return the records of a bucket, and the numbers of their rows."""
        self._file.seek(0)
        kept, numbers, start = [], [], 0
        while read := self._file.read(HELD * RECORD.itemsize):
            records = np.frombuffer(read, RECORD)
            chosen = np.flatnonzero(records["asked"] % np.uint64(buckets) == bucket)
            kept.append(records[chosen])
            numbers.append(chosen + start)
            start += len(records)
        return np.concatenate([np.empty(0, RECORD), *kept]), np.concatenate([np.empty(0, np.int64), *numbers])


def _again(records: NDArray[Any], numbers: NDArray[np.int64]) -> Iterator[tuple[int, bool, int, int]]:
    """Yield (number, whether the answer is the same, source, line) of the records that ask what one before asks."""
    order = np.argsort(records["asked"], kind="stable")
    asked, answered = records["asked"][order], records["answered"][order]
    is_first = np.ones(len(asked), bool)
    is_first[1:] = asked[1:] != asked[:-1]
    first = np.maximum.accumulate(np.where(is_first, np.arange(len(asked)), 0))
    again = np.flatnonzero(~is_first)
    same = answered[again] == answered[first[again]]
    rows = records[order[again]]
    columns = (numbers[order[again]], same, rows["source"], rows["line"])
    yield from zip(*(column.tolist() for column in columns), strict=True)
