"""What becomes of the rows: counted, and those that are left out by their reasons."""

from __future__ import annotations

from dataclasses import dataclass

from gptj_ft.data.dataset import Skips
from gptj_ft.data.loss_mask import num_targets
from gptj_ft.data.readers.rows import Row
from gptj_ft.data.template import Encoded
from gptj_ft.data.validation import Checks, Found
from gptj_ft.errors import DataError

UNKNOWN_IDS = "token ids that the model has and its tokenizer lacks, as other systems use for separators"


@dataclass
class Counts:
    """The numbers of a `Report`, while they grow."""

    rows_read: int = 0
    rows_kept: int = 0
    rows_cut: int = 0
    tokens_cut: int = 0
    windows: int = 0
    tokens: int = 0
    target_tokens: int = 0
    longest: int = 0


class Tally:
    """What becomes of the rows.

    Args:
        vocab_size: token ids that the model has; ``None``: no row can have another.
        checks: of rows that are kept.
        known_ids: where the tokenizer's token ids end; ``None``: no row can have others.
    """

    def __init__(self, vocab_size: int | None, checks: Checks, known_ids: int | None = None) -> None:
        self.vocab_size, self.checks, self.known_ids = vocab_size, checks, known_ids
        self.counts = Counts()
        self._skipped: dict[str, Found] = {}

    def skip(self, where: str, reason: str) -> None:
        """Count a row that is left out."""
        self.counts.rows_read += 1
        self._skipped.setdefault(reason, Found()).add(where)

    def keep(self, row: Row, encoded: Encoded) -> None:
        """Count a row's documents; a DataError if the model lacks one of the tokens."""
        counts = self.counts
        counts.rows_read += 1
        counts.rows_kept += 1
        counts.rows_cut += encoded.tokens_cut > 0
        counts.tokens_cut += encoded.tokens_cut
        for ids in encoded.documents:
            if self.vocab_size is not None and max(ids) >= self.vocab_size:
                raise DataError(
                    f"{row.where}: token id {max(ids)}, but the model's ids end at {self.vocab_size - 1}; "
                    "the tokenizer is not this model's"
                )
            if self.known_ids is not None and max(ids) >= self.known_ids and ids is encoded.documents[0]:
                self.checks.add(UNKNOWN_IDS, row.where)
            counts.windows += 1
            counts.tokens += len(ids)
            counts.target_tokens += num_targets(len(ids), encoded.prompt_length, encoded.untrained)
            counts.longest = max(counts.longest, len(ids))

    def skips(self) -> dict[str, Skips]:
        """Return the rows that were left out, by reason."""
        return {reason: Skips(each.count, tuple(each.first)) for reason, each in self._skipped.items()}
