"""Split rows into training and validation rows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from gptj_ft.data.dataset import Prepared

_Numbers = NDArray[np.integer]


def select_rows(prepared: Prepared, indices: Iterable[int]) -> Prepared:
    """Select documents; update the report's counts of documents and tokens.

    Args:
        prepared: the data.
        indices: positions in its ``rows``.
    """
    rows = prepared.rows.select(indices)
    lengths = rows.lengths()
    report = replace(
        prepared.report,
        windows=len(rows),
        tokens=int(lengths.sum()),
        target_tokens=rows.num_targets(),
        longest=int(lengths.max(initial=0)),
    )
    return Prepared(rows, report)


def split(prepared: Prepared, holdout: float, seed: int) -> tuple[Prepared, Prepared | None]:
    """Hold out a share of the rows; deterministic by seed, whatever the order of the rows.

    Rows that share a document stay together, and so do the windows of one, unless there is but one document. Where
    rows have labels, each label is held out in its share; of a task with labels, none loses its only row to the held
    ones, as it could not be learnt. Each side gets at least one document.

    Args:
        prepared: the data.
        holdout: share of the documents, 0 to 1; 0 holds out nothing.
        seed: the recipe's.

    Returns:
        (train, held); held is ``None`` when nothing is held out or there are fewer than two documents.
    """
    groups = prepared.rows.numbers("group")
    members, inverse = np.unique(groups, return_inverse=True)
    if len(members) == 1:  # windows of one document, or one row
        members = inverse = np.arange(len(groups))
        labels = np.zeros(len(groups), np.int32)
    else:
        labels = np.empty(len(members), np.int32)
        labels[inverse] = _places_of(prepared.rows["label"])  # of rows that share a document, the last one's
    if holdout == 0 or len(members) < 2:
        return prepared, None
    count = min(max(round(holdout * len(members)), 1), len(members) - 1)
    is_held = _choose(members, labels, count, seed, keeps_one=bool(prepared.report.labels))[inverse]
    return select_rows(prepared, np.flatnonzero(~is_held)), select_rows(prepared, np.flatnonzero(is_held))


def _choose(groups: _Numbers, labels: _Numbers, count: int, seed: int, keeps_one: bool) -> NDArray[np.bool_]:
    """Choose groups stratified by label; deterministic by seed and group.

    Args:
        groups: hashes.
        labels: number of each group's label.
        count: groups to choose.
        seed: the recipe's.
        keeps_one: whether of each label one is left, if there are other labels with more.
    """
    sizes = np.bincount(labels)
    most = sizes - 1 if keeps_one and (sizes - 1).sum() else sizes
    count = min(count, int(most.sum()))
    shares = count * sizes / len(groups)
    taken = np.minimum(shares.astype(np.int64), most)
    # What rounding down has left goes to the labels that lost most by it.
    while left := count - int(taken.sum()):
        order = np.lexsort((np.arange(len(sizes)), taken - shares))
        taken[order[taken[order] < most[order]][:left]] += 1
    order = np.lexsort((groups, _mixed(groups, seed), labels))
    place = np.arange(len(groups)) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # of each among those of its label
    chosen = np.zeros(len(groups), np.bool_)
    chosen[order[place < np.repeat(taken, sizes)]] = True
    return chosen


def _mixed(groups: _Numbers, seed: int) -> NDArray[np.uint64]:
    """Hash numbers with a seed (SplitMix64, doi:10.1145/2714064.2660195)."""
    start = int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=8).digest(), "little")
    z = groups.astype(np.uint64) + np.uint64(start)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _places_of(texts: Sequence[str]) -> NDArray[np.int32]:
    """Return for each text of a column its rank among the distinct texts."""
    seen: dict[str, int] = {}
    numbers = np.fromiter((seen.setdefault(text, len(seen)) for text in texts), np.int32, len(texts))
    place = {text: number for number, text in enumerate(sorted(seen))}
    return np.array([place[text] for text in seen], np.int32)[numbers]
