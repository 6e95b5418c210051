"""Read HDF5 samples of the Cerebras model zoo: rows of tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gptj_ft.data.readers.rows import Findings, Row, token_row
from gptj_ft.data.readers.source import File, ReadLimits
from gptj_ft.errors import DataError, UsageError, listed

if TYPE_CHECKING:
    import h5py

DATASET = "data"

_MOST_TOKENS = 2**24  # of a sample

_LARGEST_ID = 2**31 - 1
IDS, MASK, LABELS, SPANS, POSITIONS = range(5)
_Tokens = tuple[list[int], list[int]]  # input ids and trained spans, as in `token_row`


def read_samples(file: File, findings: Findings) -> Iterator[Row]:
    """Read the samples or the corpus in the HDF5 dataset `data`; a row's line is its sample number.

    * (N, 3, S): input ids, loss mask, labels (the ids shifted by one). A row ends at its last target: what follows,
      such as padding, has no effect. If the mask is 0 everywhere, the row is the whole sample without targets.
    * (N, 5, S): several documents per sample, with attention spans and positions. Each document is a row under the same
      number; a document starts where the positions restart at 0.
    * (T): a corpus; all tokens except the first are targets. A row has `corpus_row` tokens and repeats the last token
      of the row before, so that its successor is a target too.
    """
    if file.compression:
        raise DataError(f"{file.path}: compressed HDF5 cannot be read; decompress the file ({file.compression}) first")
    with open_hdf5(file.path) as opened:
        data, stated = _dataset(file, opened), opened.attrs.get("n_examples")
        if data.ndim == 1:
            yield from _corpus(file, findings, data)
            return
        if stated is not None and not np.array_equal(stated, len(data)):
            findings.note(f"{file.path} has {len(data)} examples, but its attribute n_examples is {stated}")
        yield from _samples(file, findings, data)


@contextmanager
def open_hdf5(path: Path) -> Iterator[h5py.File]:
    """Open an HDF5 file."""
    try:
        import h5py
    except ImportError as error:
        raise UsageError(f"{path} is an HDF5 file, and h5py is not installed: pip install 'gptj-ft[hdf5]'") from error
    try:
        with h5py.File(path, "r", locking=False) as file:  # some file systems support no locks
            yield file
    except DataError:
        raise
    # h5py maps HDF5's error classes to these; a damaged file may raise any of them.
    except (OSError, RuntimeError, LookupError, ValueError, TypeError, OverflowError, MemoryError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise DataError(f"{path}: truncated or corrupt HDF5 ({reason}); get the file again") from error


def _dataset(file: File, opened: h5py.File) -> h5py.Dataset:
    """Return the HDF5 dataset of samples or tokens."""
    import h5py

    expected = f"expected '{DATASET}' of integers, (N, 3, S) or (N, 5, S) samples, or (T) tokens"
    data = opened.get(DATASET)
    if not isinstance(data, h5py.Dataset):
        raise DataError(f"{file.path}: {expected}; found {listed(sorted(opened), 10)}")
    shape: tuple[int, ...] = data.shape or ()
    is_known = len(shape) == 1 or (len(shape) == 3 and shape[1] in (3, 5) and 0 < shape[2] <= _MOST_TOKENS)
    if data.dtype.kind not in "iu" or not is_known:
        raise DataError(f"{file.path}: {expected}; found {data.dtype}, ({', '.join(map(str, shape))})")
    return data


def _corpus(file: File, findings: Findings, data: h5py.Dataset) -> Iterator[Row]:
    before, size = np.empty(0, data.dtype), file.options.limits.corpus_row
    for number, start in enumerate(range(0, len(data), size), 1):
        ids = np.concatenate([before, data[start : start + size]])
        before = ids[-1:]
        if problem := _not_ids(ids):
            findings.add(file, number, problem)
        else:
            yield token_row(file, number, ids.tolist(), [1, len(ids)] if len(ids) > 1 else [])


def samples_at_once(data: h5py.Dataset, limits: ReadLimits) -> int:
    """Return the number of samples to read at once: bounded, and a multiple of the chunk size if possible."""
    sample_bytes = int(math.prod(data.shape[1:]) * data.dtype.itemsize)
    count = max(1, limits.samples // sample_bytes)
    chunk = int(data.chunks[0]) if data.chunks else 1
    # HDF5 decompresses whole chunks: reads that end within one would decompress it twice.
    return max(chunk, count // chunk * chunk) if chunk * sample_bytes <= limits.hdf5_chunk else count


def _samples(file: File, findings: Findings, data: h5py.Dataset) -> Iterator[Row]:
    count, number = samples_at_once(data, file.options.limits), 0
    for start in range(0, len(data), count):
        for sample in data[start : start + count]:
            number += 1
            rows = _of_one(sample) if len(sample) == 3 else _of_several(sample)
            if isinstance(rows, str):
                findings.add(file, number, rows)
            else:
                for input_ids, trained in rows:
                    yield token_row(file, number, input_ids, trained)


def _of_several(sample: NDArray[Any]) -> list[_Tokens] | str:
    """Return the rows of a sample of shape (5, S), or a description of the problem."""
    # Files may store unsigned integers, whose differences would wrap around.
    positions = sample[POSITIONS].astype(np.int64)
    is_used = (sample[MASK] != 0) | (sample[SPANS] != 0)  # padding has neither
    starts = positions == 0
    follows = np.concatenate([[False], np.diff(positions) == 1])
    if (is_used & ~starts & ~follows).any():
        return "positions neither continue nor restart at 0"
    rows: list[_Tokens] = []
    # Padding may start "documents" too; those without a used token are skipped below.
    bounds = np.append(np.flatnonzero(starts), len(positions))
    for start, end in pairwise(bounds):
        if is_used[start:end].any():
            row = _of_one(sample[:, start:end])
            if isinstance(row, str):
                return row
            rows += row
    # Without any used token, the sample is one row without targets, as in (N, 3, S).
    return rows or _of_one(sample)


def _of_one(sample: NDArray[Any]) -> list[_Tokens] | str:
    """Return the row of a sample of shape (3 or more, S), as a list of one, or a description of the problem."""
    ids, mask, labels = sample[IDS], sample[MASK], sample[LABELS]
    if ((mask != 0) & (mask != 1)).any():
        return "the mask has values other than 0 and 1"
    positions = np.flatnonzero(mask)  # each predicts the next token
    if len(positions):
        # The last target may lie beyond the input ids: only the labels have it.
        ids = np.append(ids[: positions[-1] + 1], labels[positions[-1]])
        if (ids[positions + 1] != labels[positions]).any():
            return "the labels are not the input ids shifted by one"
    return _not_ids(ids) or [(ids.tolist(), _spans(positions + 1))]


def _spans(indices: NDArray[np.int64]) -> list[int]:
    """Convert ascending indices to half-open intervals, all bounds in one list: 3 4 5 8 -> 3 6 8 9."""
    gaps = np.flatnonzero(np.diff(indices) != 1)
    firsts, lasts = np.concatenate([indices[:1], indices[gaps + 1]]), np.concatenate([indices[gaps], indices[-1:]])
    bounds: list[int] = np.stack([firsts, lasts + 1], axis=1).ravel().tolist()
    return bounds


def _not_ids(ids: NDArray[Any]) -> str:
    wrong = ids[(ids < 0) | (ids > _LARGEST_ID)]
    return f"{wrong[0]} is not a token id" if len(wrong) else ""
