"""Count rows, tokens and targets while rows are prepared."""

from __future__ import annotations

from collections.abc import Sequence

from gptj_ft.data.readers.rows import Occurrences

COUNTS = ("rows_read", "rows_kept", "rows_cut", "tokens_cut", "windows", "tokens", "target_tokens", "longest")


class RowCounts:
    """Count kept and skipped rows, their tokens and targets."""

    def __init__(self) -> None:
        self.numbers = dict.fromkeys(COUNTS, 0)  # named as in `Report`
        self.skipped: dict[str, Occurrences] = {}  # by reason

    def skip(self, where: str, reason: str) -> None:
        """Count a skipped row."""
        self.numbers["rows_read"] += 1
        self.skipped.setdefault(reason, Occurrences()).add(where)

    def keep(self, documents: Sequence[tuple[int, int]], tokens_cut: int) -> None:
        """Count a kept row.

        Args:
            documents: tokens and targets of each document.
            tokens_cut: tokens lost by truncation.
        """
        numbers = self.numbers
        numbers["rows_read"] += 1
        numbers["rows_kept"] += 1
        numbers["rows_cut"] += tokens_cut > 0
        numbers["tokens_cut"] += tokens_cut
        numbers["windows"] += len(documents)
        for tokens, targets in documents:
            numbers["tokens"] += tokens
            numbers["target_tokens"] += targets
            numbers["longest"] = max(numbers["longest"], tokens)
