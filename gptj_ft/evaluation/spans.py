"""Choose the span of a text that answers a question from start and end logits, as transformers' ``run_qa`` does.

https://github.com/huggingface/transformers/blob/main/examples/pytorch/question-answering/utils_qa.py. ``run_qa`` leaves
the order of equal scores open. Here the earlier window comes first, then the earlier start, then the shorter answer.

Axis letters: L tokens of a window, A candidate starts, Z candidate ends, K candidate spans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gptj_ft.evaluation.metrics.class_scores import softmax
from gptj_ft.evaluation.metrics.squad import squad
from gptj_ft.evaluation.metrics.statistic import Vector

NO_ANSWER = "empty"  # answer if no window has an allowed span, as in ``run_qa``


@dataclass(frozen=True)
class SpanSettings:
    """Limits of the search for spans."""

    num_best: int = 20  # best starts and best ends per window, and answers listed
    max_answer_tokens: int = 30
    may_abstain: bool = False  # whether a question may have no answer (SQuAD v2.0)
    null_threshold: float = 0.0  # abstain if "no answer" scores better than the best span by more than this


@dataclass(frozen=True)
class Window:
    """Logits of one window of a context."""

    starts_L: Vector | NDArray[np.float32]  # logit of each token as the first of the answer; token 0 means no answer
    ends_L: Vector | NDArray[np.float32]  # logit of each token as the last of the answer; token 0 means no answer
    offsets_L2: NDArray[np.int32] | NDArray[np.int64]  # start and end character in the context; -1, -1: outside it


@dataclass(frozen=True)
class SpanCandidate:
    """A possible answer."""

    text: str  # empty: no answer
    probability: float  # softmax over the scores of the question's candidates
    start_logit: float
    end_logit: float
    start: int  # first character in the context; -1: no span
    end: int  # character after the last one; -1: no span

    @property
    def score(self) -> float:
        return self.start_logit + self.end_logit

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON values, as in ``run_qa``'s ``nbest_predictions.json``."""
        names = ("text", "probability", "start_logit", "end_logit")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class SpanAnswer:
    """The answer to a question."""

    text: str  # empty: no answer
    best: SpanCandidate  # the best span, even if the answer is empty
    candidates: tuple[SpanCandidate, ...]  # best first, at most `SpanSettings.num_best`
    null_odds: float | None  # score of "no answer" minus that of the best span; None if every question has an answer


def best_answer(windows: Sequence[Window], context: str, settings: SpanSettings) -> SpanAnswer:
    """Choose the answer to a question among the spans of all windows of its context.

    "No answer" has the score of token 0 in the window where that score is lowest.

    Args:
        windows: windows of the context, in order.
        context: text that the offsets point into.
    """
    spans = _best_spans(windows, settings)
    null = min(((float(each.starts_L[0]), float(each.ends_L[0])) for each in windows), key=sum)
    if settings.may_abstain:
        # "No answer" is always listed, after spans with an equal score, even if that makes the list one longer.
        place = sum(span[0] + span[1] >= sum(null) for span in spans)
        if place < settings.num_best:
            spans = spans[: settings.num_best - 1]
        spans.insert(place, (*null, -1, -1))
    # "No answer" has the span -1, -1, which must become an empty text.
    texts = [context[max(start, 0) : max(end, 0)] for _, _, start, end in spans]
    if not any(texts):
        spans.insert(0, (0.0, 0.0, -1, -1))
        texts.insert(0, NO_ANSWER)
    probabilities = softmax([start + end for start, end, _, _ in spans]).tolist()
    candidates = tuple(
        SpanCandidate(text, probability, *span)
        for text, probability, span in zip(texts, probabilities, spans, strict=True)
    )
    # "No answer" may rank first, but the odds compare it with the best real span.
    best = next(candidate for candidate in candidates if candidate.text)
    if not settings.may_abstain:
        return SpanAnswer(best.text, best, candidates, None)
    odds = sum(null) - best.score
    return SpanAnswer("" if odds > settings.null_threshold else best.text, best, candidates, odds)


def _best_spans(windows: Sequence[Window], settings: SpanSettings) -> list[tuple[float, float, int, int]]:
    """Return start logit, end logit, start and end character of the best spans, best first."""
    columns: list[tuple[NDArray[Any], ...]] = []
    for number, window in enumerate(windows):
        # A stable sort of negated fp64 logits: equal ones keep their order, lower positions first.
        starts_A, ends_Z = (
            np.argsort(-np.asarray(logits_L, np.float64), kind="stable")[: settings.num_best]
            for logits_L in (window.starts_L, window.ends_L)
        )
        inside_L = window.offsets_L2[:, 0] >= 0
        length_AZ = ends_Z - starts_A[:, None] + 1
        allowed_AZ = (length_AZ > 0) & (length_AZ <= settings.max_answer_tokens)
        a_K, z_K = np.nonzero(allowed_AZ & inside_L[starts_A][:, None] & inside_L[ends_Z])
        start_K, end_K = starts_A[a_K], ends_Z[z_K]
        columns.append(
            (
                np.asarray(window.starts_L, np.float64)[start_K],
                np.asarray(window.ends_L, np.float64)[end_K],
                window.offsets_L2[start_K, 0],
                window.offsets_L2[end_K, 1],
                np.full(len(start_K), number),
                start_K,
                end_K,
            )
        )
    *span, window_K, start_K, end_K = map(np.concatenate, zip(*columns, strict=True))
    order = np.lexsort((end_K, start_K, window_K, -(span[0] + span[1])))[: settings.num_best]  # last key sorts first
    return list(zip(*(column[order].tolist() for column in span), strict=True))


@dataclass(frozen=True)
class BestThresholds:
    """Null thresholds with the best scores, in percent; found as in SQuAD v2.0's official script."""

    best_exact: float
    best_exact_threshold: float
    best_f1: float
    best_f1_threshold: float


def best_thresholds(answers: Sequence[SpanAnswer], references: Sequence[Sequence[str]]) -> BestThresholds:
    """Find the null thresholds that score best, from answering no question to answering all.

    Args:
        answers: answers with their null odds.
        references: accepted texts of each question; none if it has no answer.
    """
    odds_N = np.array([answer.null_odds for answer in answers], np.float64)
    has_answer_N = np.array([any(map(str.strip, texts)) for texts in references])
    scores = squad([answer.best.text for answer in answers], references)
    order = np.argsort(odds_N, kind="stable")
    best: list[float] = []
    for name in ("exact_match", "f1"):
        rows_N = scores[name].rows_N
        assert rows_N is not None
        # Start with no answers, then answer one question more at a time. Answering a question that has no answer
        # loses the point for the empty answer.
        gains = np.where(has_answer_N, rows_N / 100.0, -1.0)[order]
        totals = np.concatenate([[0.0], gains.cumsum()]) + (~has_answer_N).sum()
        num_answered = int(totals.argmax())
        # The script names 0 if no answer is best: right for probabilities, but odds may all be below 0.
        threshold = float(odds_N[order[num_answered - 1]] if num_answered else np.ceil(odds_N.min()) - 1)
        best += [100.0 * float(totals[num_answered]) / len(answers), threshold]
    return BestThresholds(*best)
