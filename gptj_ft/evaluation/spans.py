"""Answers that are spans of a text, from the logits of their starts and ends: as transformers' ``run_qa`` reads them.

https://github.com/huggingface/transformers/blob/main/examples/pytorch/question-answering/utils_qa.py. It leaves the
order of equal scores open: here the earlier window comes first, then the earlier start, then the shorter answer.

Axis letters: L tokens of a window, A starts and Z ends that are looked at, K candidates.
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

NO_ANSWER = "empty"
"""answer where no window has a span that is allowed: ``run_qa``'s"""


@dataclass(frozen=True)
class SpanSettings:
    """How spans are read.

    Attributes:
        num_best: number of starts and ends that are looked at in each window, and of answers listed; default 20.
        max_answer_tokens: greatest length of an answer; default 30.
        may_abstain: whether a question may have no answer (SQuAD v2.0); default false.
        null_threshold: margin by which no answer must score better than the best one to be the answer; default 0.
    """

    num_best: int = 20
    max_answer_tokens: int = 30
    may_abstain: bool = False
    null_threshold: float = 0.0


@dataclass(frozen=True)
class Window:
    """Logits of one window of a context.

    Attributes:
        starts_L: logit of each token as the first of the answer; that of token 0 stands for no answer.
        ends_L: logit of each token as the last of the answer.
        offsets_L2: start and end of each token in the context, characters; -1, -1 for a token that is not of it.
    """

    starts_L: Vector | NDArray[np.float32]
    ends_L: Vector | NDArray[np.float32]
    offsets_L2: NDArray[np.int32] | NDArray[np.int64]


@dataclass(frozen=True)
class SpanCandidate:
    """A possible answer.

    Attributes:
        text: the span; empty: no answer.
        probability: softmax of the scores of all candidates of the question.
        start_logit: logit of its start.
        end_logit: logit of its end.
        start: first character in the context; -1: no span.
        end: character behind the last one; -1: no span.
    """

    text: str
    probability: float
    start_logit: float
    end_logit: float
    start: int
    end: int

    @property
    def score(self) -> float:
        return self.start_logit + self.end_logit

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON values, as in ``run_qa``'s ``nbest_predictions.json``."""
        names = ("text", "probability", "start_logit", "end_logit")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class SpanAnswer:
    """The answer to a question.

    Attributes:
        text: the answer; empty: there is none.
        best: the best span, whether it is the answer or not.
        candidates: answers by score, the best first: at most `SpanSettings.num_best`, and no answer where that may be.
        null_odds: score of no answer less that of the best span; ``None`` where every question has an answer.
    """

    text: str
    best: SpanCandidate
    candidates: tuple[SpanCandidate, ...]
    null_odds: float | None


def best_answer(windows: Sequence[Window], context: str, settings: SpanSettings) -> SpanAnswer:
    """Choose the answer to a question.

    In each window the spans between its best starts and its best ends compete, those of all windows together. No answer
    scores as token 0 of the window where that is least likely.

    Args:
        windows: all windows of the context, in order.
        context: the text that the offsets are in.
        settings: limits, and whether there may be no answer.
    """
    found = _best_spans(windows, settings)
    null = min(((float(each.starts_L[0]), float(each.ends_L[0])) for each in windows), key=sum)
    if settings.may_abstain:
        # After spans with the same score, and in any case there.
        place = sum(span[0] + span[1] >= sum(null) for span in found)
        if place < settings.num_best:
            found = found[: settings.num_best - 1]
        found.insert(place, (*null, -1, -1))
    texts = [context[max(start, 0) : max(end, 0)] for _, _, start, end in found]
    if not any(texts):
        found.insert(0, (0.0, 0.0, -1, -1))
        texts.insert(0, NO_ANSWER)
    probabilities = softmax([start + end for start, end, _, _ in found]).tolist()
    candidates = tuple(
        SpanCandidate(text, probability, *span)
        for text, probability, span in zip(texts, probabilities, found, strict=True)
    )
    best = next(candidate for candidate in candidates if candidate.text)
    if not settings.may_abstain:
        return SpanAnswer(best.text, best, candidates, None)
    odds = sum(null) - best.score
    return SpanAnswer("" if odds > settings.null_threshold else best.text, best, candidates, odds)


def _best_spans(windows: Sequence[Window], settings: SpanSettings) -> list[tuple[float, float, int, int]]:
    """Return start logit, end logit, first character and the one behind the last of the best spans, the best first."""
    columns: list[tuple[NDArray[Any], ...]] = []
    for number, window in enumerate(windows):
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
    order = np.lexsort((end_K, start_K, window_K, -(span[0] + span[1])))[: settings.num_best]
    return list(zip(*(column[order].tolist() for column in span), strict=True))


@dataclass(frozen=True)
class BestThresholds:
    """Thresholds of the null odds with the best scores, as SQuAD v2.0's official script finds them.

    Attributes:
        best_exact: exact match in percent.
        best_exact_threshold: null odds above which there is no answer, for that.
        best_f1: F1 in percent.
        best_f1_threshold: null odds above which there is no answer, for that.
    """

    best_exact: float
    best_exact_threshold: float
    best_f1: float
    best_f1_threshold: float


def best_thresholds(answers: Sequence[SpanAnswer], references: Sequence[Sequence[str]]) -> BestThresholds:
    """Find the thresholds that score best on some questions, from answering none of them to answering all.

    Args:
        answers: answers with their null odds.
        references: accepted texts of each question; none where it has no answer.
    """
    odds_N = np.array([answer.null_odds for answer in answers], np.float64)
    has_answer_N = np.array([any(map(str.strip, texts)) for texts in references])
    scores = squad([answer.best.text for answer in answers], references)
    order = np.argsort(odds_N, kind="stable")
    found: list[float] = []
    for name in ("exact_match", "f1"):
        rows_N = scores[name].rows_N
        assert rows_N is not None
        # Answering a question without an answer loses the point that silence has there.
        gains = np.where(has_answer_N, rows_N / 100.0, -1.0)[order]
        totals = np.concatenate([[0.0], gains.cumsum()]) + (~has_answer_N).sum()
        best = int(totals.argmax())
        found += [100.0 * float(totals[best]) / len(answers), float(odds_N[order[best - 1]]) if best else 0.0]
    return BestThresholds(*found)
