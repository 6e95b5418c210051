"""SQuAD metrics as in the official scripts (https://rajpurkar.github.io/SQuAD-explorer)."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

from gptj_ft.evaluation.metrics.statistic import Statistic, mean

SQUAD_SCORES = (
    "exact_match", "f1", "strict_match",
    "HasAns_exact", "HasAns_f1", "NoAns_exact", "NoAns_f1",
)  # fmt: skip
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def squad(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, Statistic]:
    """Compute exact match and F1 after SQuAD's normalization, and a strict match.

    A row without a non-blank reference is a question without an answer: only an empty prediction is right. If there are
    such rows, the definition is v2.0's, with separate scores for rows with an answer (``HasAns_``) and without
    (``NoAns_``); else v1.1's.

    Normalization makes 3.5 and 35 equal, or C and C++. ``strict_match`` compares all characters but white space.
    """
    answers = [[target for target in targets if target.strip()] for targets in references]
    has_answer = [bool(targets) for targets in answers]
    f1 = f1_v1 if all(has_answer) else f1_v2
    strict = [
        100.0 * (text.split() in ([answer.split() for answer in of] or [[]]))
        for text, of in zip(predictions, answers, strict=True)
    ]
    if not all(has_answer):
        # v2.0 ignores answers that normalization empties ("The") if there are others. In v1.1 their F1 is always 0.
        answers = [[target for target in targets if normalize_answer(target)] or [""] for targets in answers]
    rows = list(zip(predictions, answers, strict=True))
    exact = [100.0 * max(normalize_answer(text) == normalize_answer(answer) for answer in of) for text, of in rows]
    overlap = [100.0 * max(f1(text, answer) for answer in of) for text, of in rows]
    figures: dict[str, Statistic] = {"exact_match": mean(exact), "f1": mean(overlap), "strict_match": mean(strict)}
    if not all(has_answer):
        for part, chosen in (("HasAns", has_answer), ("NoAns", [not each for each in has_answer])):
            if any(chosen):
                figures |= {f"{part}_exact": mean(exact, chosen), f"{part}_f1": mean(overlap, chosen)}
    return figures


def normalize_answer(text: str) -> str:
    """Lower-case, drop ASCII punctuation and articles, and collapse white space, in SQuAD's order."""
    # Punctuation goes before articles: "a-b" becomes "ab", not "b".
    kept = text.lower().translate(NO_PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def f1_v1(prediction: str, answer: str) -> float:
    """Compute F1 over the multiset of common words (SQuAD v1.1)."""
    predicted, expected = normalize_answer(prediction).split(), normalize_answer(answer).split()
    common = (Counter(predicted) & Counter(expected)).total()
    return 2.0 * common / (len(predicted) + len(expected)) if common else 0.0


def f1_v2(prediction: str, answer: str) -> float:
    """Compute F1 as in SQuAD v2.0: 1 if neither text has a word."""
    if not normalize_answer(answer):
        return float(not normalize_answer(prediction))
    return f1_v1(prediction, answer)


def unanswered(texts: Sequence[str], no_answer: str) -> list[str]:
    """Replace the text for "no answer" by an empty text, as the official scripts expect.

    Args:
        no_answer: text that the model was trained to give for "no answer"; empty: none.
    """
    normal = normalize_answer(no_answer)
    return ["" if normal and normalize_answer(text) == normal else text for text in texts]
