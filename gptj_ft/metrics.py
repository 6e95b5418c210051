"""Scores of written answers, named and computed as published results compute them.

ROUGE: F-measure of the rouge-score package (https://github.com/google-research/google-research/tree/master/rouge) with
stemming. SQuAD: exact match and F1 of the official scripts (https://rajpurkar.github.io/SQuAD-explorer). Both are means
over rows; a row counts its best reference. Labels: accuracy and macro-averaged F1. Relations: precision, recall and F1
of all facts of all rows together. All times 100.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from gptj_ft.errors import DataError

Scores = dict[str, float]
ROUGE_TYPES = ("rouge1", "rouge2", "rougeL", "rougeLsum")
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def score(names: Sequence[str], predictions: Sequence[str], references: Sequence[Sequence[str]]) -> Scores:
    """Return every score of the named metrics.

    Args:
        names: keys of `METRICS`.
        predictions: one text per row.
        references: for each row, all texts that are right.

    Raises:
        DataError: no rows, or a row without what the metric needs.
    """
    scores: Scores = {}
    for name in names:
        scores |= METRICS[name](predictions, references)
    return scores


def rouge(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> Scores:
    """Return the means of `rouge_rows`."""
    return _mean(rouge_rows(predictions, references))


def rouge_rows(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> list[Scores]:
    """Return ROUGE-1, -2, -L and -Lsum of each row.

    Each of the four takes the reference that is best for it, as the package's ``score_multi`` does. For ROUGE-Lsum a
    sentence ends at a line's end, and where ``.``, ``!`` or ``?`` is followed by white space.

    Raises:
        DataError: no rows, or a row without a reference.
    """
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(list(ROUGE_TYPES), use_stemmer=True)
    rows = []
    for row, (prediction, targets) in enumerate(_pairs(predictions, references), start=1):
        if not targets:
            raise DataError(f"row {row} has no reference, which ROUGE needs")
        best = scorer.score_multi(
            [_one_sentence_a_line(target) for target in targets], _one_sentence_a_line(prediction)
        )
        rows.append({name: 100.0 * float(best[name].fmeasure) for name in ROUGE_TYPES})
    return rows


def squad(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> Scores:
    """Return the means of `squad_rows`."""
    return _mean(squad_rows(predictions, references))


def squad_rows(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> list[Scores]:
    """Return exact match and F1 of each row, after SQuAD v1.1's normalisation.

    A row without references, or with empty ones only, is a question without an answer: as in v2.0, an empty prediction
    is right and any other is wrong.

    Raises:
        DataError: no rows.
    """
    rows = []
    for prediction, targets in _pairs(predictions, references):
        answers = [target for target in targets if normalize_answer(target)] or [""]
        exact = max(normalize_answer(prediction) == normalize_answer(answer) for answer in answers)
        rows.append({"exact_match": 100.0 * exact, "f1": 100.0 * max(_f1(prediction, answer) for answer in answers)})
    return rows


def accuracy(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> Scores:
    """Return the share of answers that are right, and F1 averaged over the labels.

    An answer is right if it is one of the row's references; case, and blanks at both ends, do not count. A row's label
    is the reference that was met, else the first. F1 of a label is 2 tp / (2 tp + fp + fn), where tp counts the rows of
    the label with it as the answer, fp the other rows with it as the answer, fn the rows of the label with another
    answer. ``macro_f1`` is the plain mean over the labels that rows have: an answer that is no label lowers the F1 of
    the row's label only (scikit-learn's ``f1_score(average="macro", labels=those of y_true)``).

    Raises:
        DataError: no rows, or a row without a reference.
    """
    labels, answers = [], []
    for row, (prediction, targets) in enumerate(_pairs(predictions, references), start=1):
        if not targets:
            raise DataError(f"row {row} has no reference, which accuracy needs")
        answer, accepted = _label(prediction), [_label(target) for target in targets]
        answers.append(answer)
        labels.append(answer if answer in accepted else accepted[0])
    right = Counter(label for label, answer in zip(labels, answers, strict=True) if label == answer)
    of_label, of_answer = Counter(labels), Counter(answers)
    # tp + fn are the rows of a label, tp + fp the rows that were given it.
    f1 = [2.0 * right[label] / (of_label[label] + of_answer[label]) for label in of_label]
    return {"accuracy": 100.0 * right.total() / len(labels), "macro_f1": 100.0 * math.fsum(f1) / len(f1)}


def relations(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> Scores:
    """Return precision, recall and F1 of facts, one ``subject | relation | object`` a line, over all rows together.

    The facts of a text are a set: neither their order nor how often one stands there counts, nor do case and the number
    of blanks. Of several references a row takes the one with the best F1; a row without one has no facts. With tp facts
    in both, precision is tp / written, recall tp / expected, F1 2 tp / (written + expected); where nothing was written,
    or nothing expected, the quotient is 0, but all are 100 if that is so of both: there was nothing to find.

    Raises:
        DataError: no rows.
    """
    both = written = expected = 0
    for prediction, targets in _pairs(predictions, references):
        facts = _facts(prediction)
        right = max((_facts(target) for target in targets or [""]), key=lambda target: _dice(facts, target))
        both, written, expected = both + len(facts & right), written + len(facts), expected + len(right)
    if not written and not expected:
        return {"relations_precision": 100.0, "relations_recall": 100.0, "relations_f1": 100.0}
    return {
        "relations_precision": 100.0 * both / max(written, 1),
        "relations_recall": 100.0 * both / max(expected, 1),
        "relations_f1": 200.0 * both / (written + expected),
    }


METRICS: Mapping[str, Callable[[Sequence[str], Sequence[Sequence[str]]], Scores]] = {
    "rouge": rouge,
    "squad": squad,
    "accuracy": accuracy,
    "relations": relations,
}


def normalize_answer(text: str) -> str:
    """Lower-case, drop ASCII punctuation and the articles a, an, the, and squeeze white space, in SQuAD's order."""
    kept = text.lower().translate(NO_PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def perplexity(loss: float) -> float:
    """Return e to the mean loss per token (nats); infinity where a float ends."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def _f1(prediction: str, answer: str) -> float:
    """Return the F1 of the words in common, each as often as both have it."""
    predicted, expected = normalize_answer(prediction).split(), normalize_answer(answer).split()
    if not predicted or not expected:
        return float(predicted == expected)
    common = (Counter(predicted) & Counter(expected)).total()
    return 2.0 * common / (len(predicted) + len(expected))


def _label(text: str) -> str:
    return text.strip().casefold()


def _facts(text: str) -> frozenset[tuple[str, ...]]:
    """Return the lines of a text that are not blank, each as its parts between ``|``."""
    lines = (line.casefold().split("|") for line in text.splitlines() if line.strip())
    return frozenset(tuple(" ".join(part.split()) for part in line) for line in lines)


def _dice(facts: frozenset[tuple[str, ...]], others: frozenset[tuple[str, ...]]) -> float:
    """Return the F1 of two sets; 1 if both are empty."""
    return 2.0 * len(facts & others) / (len(facts) + len(others)) if facts or others else 1.0


def _one_sentence_a_line(text: str) -> str:
    return re.sub(r"(?<=[.!?])\s+", "\n", text)


def _pairs(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> list[tuple[str, Sequence[str]]]:
    if not predictions:
        raise DataError("no rows to score")
    assert len(predictions) == len(references), f"{len(predictions)} predictions, {len(references)} rows of references"
    assert not any(isinstance(targets, str) for targets in references), "references are lists of texts"
    return list(zip(predictions, references, strict=True))


def _mean(rows: Sequence[Scores]) -> Scores:
    return {name: math.fsum(row[name] for row in rows) / len(rows) for name in rows[0]}
