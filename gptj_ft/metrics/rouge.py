"""ROUGE: F-measure of the rouge-score package, with stemming.

https://github.com/google-research/google-research/tree/master/rouge, which most published results use.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from gptj_ft.metrics.figures import Figure, mean

NAMES = ("rouge1", "rouge2", "rougeL", "rougeLsum")
FOREIGN = 0.01  # share of letters from which on a text is not English


def rouge(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, Figure]:
    """Return ROUGE-1, -2, -L and -Lsum, each the mean over rows.

    Each of the four takes the reference that is best for it, as the package's ``score_multi`` does. For ROUGE-Lsum a
    sentence ends at a line's end, and where ``.``, ``!`` or ``?`` is followed by white space.
    """
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(list(NAMES), use_stemmer=True)
    rows = [
        scorer.score_multi([one_sentence_a_line(target) for target in targets], one_sentence_a_line(prediction))
        for prediction, targets in zip(predictions, references, strict=True)
    ]
    return {name: mean([100.0 * float(row[name].fmeasure) for row in rows]) for name in NAMES}


def one_sentence_a_line(text: str) -> str:
    """Put a line's end between sentences."""
    return re.sub(r"(?<=[.!?])\s+", "\n", text)


def warning(references: Iterable[Sequence[str]]) -> str | None:
    """Warn of texts that ROUGE measures badly: the package's tokeniser keeps a to z and 0 to 9 only."""
    letters = lost = 0
    for targets in references:
        for text in targets:
            kept = sum(map(str.isalpha, text))
            letters += kept
            lost += kept - len(re.findall("[a-zA-Z]", text))
    if lost <= FOREIGN * letters:
        return None
    return (
        f"{lost / letters:.0%} of the letters of the references are not a to z, and ROUGE's tokeniser drops them: "
        "its scores are not to be trusted for this language"
    )
