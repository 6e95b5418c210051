"""Test that duplicate rows are found for any bucket size, as by comparing all rows."""

from __future__ import annotations

import random

import pytest

from gptj_ft.data.checks.texts import Duplicates


@pytest.mark.parametrize("bucket", [1, 7, 100, 10**6])
@pytest.mark.parametrize("held", [1, 13, 1000])
def test_duplicates_match_a_full_comparison(bucket: int, held: int) -> None:
    draw = random.Random(0)
    rows = [(draw.randrange(2**64 - 40, 2**64), draw.randrange(3), f"file{n % 3}", n) for n in range(200)]
    seen: dict[int, int] = {}
    expected: dict[bool, list[str]] = {True: [], False: []}
    duplicates = Duplicates(bucket, held)
    for prompt, answer, source, line in rows:
        duplicates.add(prompt, answer, source, line)
        if prompt in seen:
            expected[seen[prompt] == answer].append(f"{source}:{line}")
        seen.setdefault(prompt, answer)
    assert duplicates.count(5) == {same: (len(places), places[:5]) for same, places in expected.items()}
    assert len(expected[True]) > 20
    duplicates.close()


def test_empty_input_has_no_duplicates() -> None:
    assert Duplicates().count(5) == {True: (0, []), False: (0, [])}
