"""ROUGE F-measure by the rouge-score package, which most published results use.

https://github.com/google-research/google-research/tree/master/rouge
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from gptj_ft.evaluation.metrics.statistic import Statistic, mean

OF_PACKAGE = ("rouge1", "rouge2", "rougeL", "rougeLsum")
BY_SENTENCES = "rougeLsum_sentences"
ROUGE_SCORES = (*OF_PACKAGE, BY_SENTENCES)
_FOREIGN = 0.01  # share of dropped letters above which to warn


def rouge(
    predictions: Sequence[str], references: Sequence[Sequence[str]], stemming: bool = True
) -> dict[str, Statistic]:
    """Compute ROUGE-1, -2, -L and -Lsum, each averaged over rows.

    Each score takes its best reference, as the package's ``score_multi`` does. ROUGE-Lsum expects one sentence per
    line, which few systems write; ``rougeLsum_sentences`` also splits after ``.``, ``!`` and ``?``.
    """
    from rouge_score.rouge_scorer import RougeScorer

    scorer, by_sentences = RougeScorer(OF_PACKAGE, stemming), RougeScorer(["rougeLsum"], stemming)
    rows: dict[str, list[float]] = {name: [] for name in ROUGE_SCORES}
    for prediction, targets in zip(predictions, references, strict=True):
        for name, result in scorer.score_multi(targets, prediction).items():
            rows[name].append(100.0 * float(result.fmeasure))
        lines = [one_sentence_a_line(target) for target in targets]
        if [*lines, split := one_sentence_a_line(prediction)] == [*targets, prediction]:
            # Nothing was split, so this is rougeLsum, which is known already.
            rows[BY_SENTENCES].append(rows["rougeLsum"][-1])
        else:
            rows[BY_SENTENCES].append(100.0 * float(by_sentences.score_multi(lines, split)["rougeLsum"].fmeasure))
    return {name: mean(values) for name, values in rows.items()}


def one_sentence_a_line(text: str) -> str:
    """Insert newlines between sentences."""
    return re.sub(r"(?<=[.!?])\s+", "\n", text)


def warning(references: Iterable[Sequence[str]]) -> str | None:
    """Return a warning about texts in languages that ROUGE cannot score: its tokenizer keeps only a-z and 0-9."""
    letters = lost = 0
    for targets in references:
        for text in targets:
            kept = sum(map(str.isalpha, text))
            letters += kept
            lost += kept - len(re.findall("[a-zA-Z]", text))
    if lost <= _FOREIGN * letters:
        return None
    return (
        f"{lost / letters:.0%} of the letters of the references are not a to z, and ROUGE's tokeniser drops them: "
        "its scores are not to be trusted for this language"
    )
