"""Rows that say the same are found, whatever the size of the buckets, as a look at all of them would."""

from __future__ import annotations

import random

import pytest

from gptj_ft.data.checks import texts
from gptj_ft.data.checks.texts import Duplicates


@pytest.mark.parametrize("bucket", [1, 7, 100, 10**6])
@pytest.mark.parametrize("held", [1, 13, 1000])
def test_duplicates_match_a_full_comparison(bucket: int, held: int, monkeypatch) -> None:
    monkeypatch.setattr(texts, "HELD", held)
    draw = random.Random(0)
    rows = [(draw.randrange(2**64 - 40, 2**64), draw.randrange(3), f"file{n % 3}", n) for n in range(200)]
    seen: dict[int, int] = {}
    expected: dict[bool, list[str]] = {True: [], False: []}
    found = Duplicates(bucket)
    for asked, answered, source, line in rows:
        found.add(asked, answered, source, line)
        if asked in seen:
            expected[seen[asked] == answered].append(f"{source}:{line}")
        seen.setdefault(asked, answered)
    result = found.count(5)
    assert result == {same: (len(places), places[:5]) for same, places in expected.items()}
    assert len(expected[True]) > 20
    found.close()


def test_no_rows_repeat_nothing() -> None:
    assert Duplicates().count(5) == {True: (0, []), False: (0, [])}
