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
    """Select documents by position; update the report's counts of documents and tokens."""
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


def first_rows(prepared: Prepared, count: int) -> Prepared:
    """Select the first rows of labelled data, each with all its windows."""
    starts = np.flatnonzero(~np.array(prepared.rows["continues"], np.bool_))
    end = int(starts[count]) if count < len(starts) else len(prepared.rows)
    return select_rows(prepared, range(end))


def split(prepared: Prepared, holdout: float, seed: int) -> tuple[Prepared, Prepared | None]:
    """Hold out a share of the rows. The seed decides, not the order of the rows.

    Rows that share a document stay together, as do the windows of a document, unless there is only one document. With
    labels, each label is held out in proportion; for tasks with labels, the training rows keep at least one row of
    each. Each side gets at least one document.

    Args:
        holdout: share of the documents, 0 to 1.

    Returns:
        (train, held out); held out is ``None`` if ``holdout`` is 0 or there are fewer than two documents.
    """
    groups = prepared.rows.numbers("group")
    members, inverse = np.unique(groups, return_inverse=True)
    if len(members) == 1:  # one document: split its windows
        members = inverse = np.arange(len(groups))
        labels = np.zeros(len(groups), np.int32)
    else:
        labels = np.empty(len(members), np.int32)
        labels[inverse] = _ranks_of(prepared.rows["label"])  # the last row of a document decides
    if holdout == 0 or len(members) < 2:
        return prepared, None
    count = min(max(round(holdout * len(members)), 1), len(members) - 1)
    is_held = _choose(members, labels, count, seed, keeps_one=bool(prepared.report.labels))[inverse]
    return select_rows(prepared, np.flatnonzero(~is_held)), select_rows(prepared, np.flatnonzero(is_held))


def _choose(groups: _Numbers, labels: _Numbers, count: int, seed: int, keeps_one: bool) -> NDArray[np.bool_]:
    """Choose groups, stratified by label.

    Args:
        groups: hashes.
        keeps_one: leave at least one group of each label, unless no label has more than one.
    """
    sizes = np.bincount(labels)
    most = sizes - 1 if keeps_one and (sizes - 1).sum() else sizes
    count = min(count, int(most.sum()))
    shares = count * sizes / len(groups)
    taken = np.minimum(shares.astype(np.int64), most)
    # Largest remainders: labels that lost most by rounding down get the rest.
    while left := count - int(taken.sum()):
        order = np.lexsort((np.arange(len(sizes)), taken - shares))
        taken[order[taken[order] < most[order]][:left]] += 1
    # By label, then by seeded hash: the first groups of each label are held out, whatever the order of the rows.
    order = np.lexsort((groups, _mixed(groups, seed), labels))
    rank = np.arange(len(groups)) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # within the label
    chosen = np.zeros(len(groups), np.bool_)
    chosen[order[rank < np.repeat(taken, sizes)]] = True
    return chosen


def _mixed(groups: _Numbers, seed: int) -> NDArray[np.uint64]:
    """Hash numbers with a seed (SplitMix64, doi:10.1145/2714064.2660195)."""
    start = int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=8).digest(), "little")
    # The algorithm relies on unsigned integers that wrap around.
    z = groups.astype(np.uint64) + np.uint64(start)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _ranks_of(texts: Sequence[str]) -> NDArray[np.int32]:
    """Return each text's rank among the distinct texts."""
    seen: dict[str, int] = {}
    numbers = np.fromiter((seen.setdefault(text, len(seen)) for text in texts), np.int32, len(texts))
    rank = {text: number for number, text in enumerate(sorted(seen))}
    return np.array([rank[text] for text in seen], np.int32)[numbers]
