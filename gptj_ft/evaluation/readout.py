"""Read answers from the outputs of a head and score them: one reader per task.

Axis letters: N rows, S positions of a window that the head reads, C outputs per position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gptj_ft.config.options import Recipe, Task
from gptj_ft.evaluation.metrics import score
from gptj_ft.evaluation.metrics.class_scores import best_threshold, multi_label, sigmoid, single_label, softmax
from gptj_ft.evaluation.metrics.entities import are_entity_tags, entities
from gptj_ft.evaluation.metrics.label_scores import (
    LabelScores,
    scores_of_entities,
    scores_of_label_sets,
    scores_of_rows,
    scores_of_words,
)
from gptj_ft.evaluation.metrics.regression import regression
from gptj_ft.evaluation.metrics.statistic import Statistic
from gptj_ft.evaluation.spans import SpanAnswer, SpanSettings, Window, best_answer, best_thresholds
from gptj_ft.models.batch import Marks

FloatArray = NDArray[np.float64]
Outputs = NDArray[np.float32]


@dataclass(frozen=True)
class RowOutput:
    """Outputs of a head for one row, with the row's targets."""

    outputs: Sequence[Outputs]  # of each window, [S, C]
    marks: Sequence[Marks]  # positions read and targets of each window
    offsets: Sequence[NDArray[np.int64]]  # start and end character of each token; for spans only
    texts: Sequence[str]  # context, words or sentences of the row; empty for other tasks
    references: Sequence[str]  # accepted answers
    place: str  # file and line


@dataclass(frozen=True)
class RowAnswer:
    """The answer to one row."""

    text: str  # label, comma-separated labels, number, span or summary
    facts: Mapping[str, Any]  # fields of the row in the output of `predict`, JSON values
    expected: Any = None  # target, for the scores; empty if the row has none
    predicted: Any = None  # the model's answer, for the scores


class Readout(Protocol):
    """Reader of one task: from outputs to answers, and from answers to scores."""

    def read(self, row: RowOutput) -> RowAnswer:
        """Read the answer to a row."""

    def figures(self, answers: Sequence[RowAnswer], references: Sequence[Sequence[str]]) -> dict[str, Statistic]:
        """Score the answers to labelled rows."""

    def by_label(self, answers: Sequence[RowAnswer]) -> LabelScores | None:
        """Score each label, if the task has labels."""

    def remark(self, answers: Sequence[RowAnswer], references: Sequence[Sequence[str]]) -> str:
        """Return a sentence about the scores; usually empty."""


def pooled(row: RowOutput) -> FloatArray:
    """Average the outputs of all windows of a text, [C]."""
    means: FloatArray = np.concatenate([output_SC[:1] for output_SC in row.outputs]).astype(np.float64).mean(0)
    return means


def by_name(names: Sequence[str], probabilities_C: FloatArray) -> dict[str, float]:
    """Return rounded probabilities by label."""
    return {name: round(float(each), 6) for name, each in zip(names, probabilities_C, strict=True)}


class PlainReadout:
    """Defaults of a reader without labels and remarks."""

    def by_label(self, answers: Sequence[RowAnswer]) -> LabelScores | None:
        return None

    def remark(self, answers: Sequence[RowAnswer], references: Sequence[Sequence[str]]) -> str:
        return ""


@dataclass(frozen=True)
class ClassReadout(PlainReadout):
    """Read the most likely label of a text; logits are averaged over windows."""

    names: tuple[str, ...]

    def read(self, row: RowOutput) -> RowAnswer:
        probabilities_C = softmax(pooled(row))
        label = self.names[int(probabilities_C.argmax())]
        facts = {"label": label, "probabilities": by_name(self.names, probabilities_C)}
        return RowAnswer(label, facts, row.marks[0].targets[0], probabilities_C)

    def figures(self, answers: Sequence[RowAnswer], references: Sequence[Sequence[str]]) -> dict[str, Statistic]:
        return single_label([each.expected for each in answers], np.stack([each.predicted for each in answers]))

    def by_label(self, answers: Sequence[RowAnswer]) -> LabelScores:
        probabilities_NC = np.stack([each.predicted for each in answers])
        return scores_of_rows([each.expected for each in answers], probabilities_NC, self.names)


@dataclass(frozen=True)
class LabelSetReadout(PlainReadout):
    """Read all labels of a text whose probability reaches a threshold."""

    names: tuple[str, ...]
    threshold: float

    def read(self, row: RowOutput) -> RowAnswer:
        probabilities_C = sigmoid(pooled(row))
        labels = [name for name, each in zip(self.names, probabilities_C, strict=True) if each >= self.threshold]
        facts = {"label": labels, "probabilities": by_name(self.names, probabilities_C)}
        return RowAnswer(", ".join(labels), facts, row.marks[0].values, probabilities_C)

    def figures(self, answers: Sequence[RowAnswer], references: Sequence[Sequence[str]]) -> dict[str, Statistic]:
        return multi_label(*self._arrays(answers), self.threshold)

    def by_label(self, answers: Sequence[RowAnswer]) -> LabelScores:
        return scores_of_label_sets(*self._arrays(answers), self.threshold, self.names)

    @staticmethod
    def _arrays(answers: Sequence[RowAnswer]) -> tuple[FloatArray, FloatArray]:
        return np.array([each.expected for each in answers], np.float64), np.stack([each.predicted for each in answers])

    def remark(self, answers: Sequence[RowAnswer], references: Sequence[Sequence[str]]) -> str:
        best = best_threshold(*self._arrays(answers))
        return f"on these rows label_threshold {best:.4g} has the best micro_f1; it is {self.threshold:g}"


@dataclass(frozen=True)
class NumberReadout(PlainReadout):
    """Read a number for a text, averaged over windows."""

    def read(self, row: RowOutput) -> RowAnswer:
        number = float(pooled(row)[0])
        values = row.marks[0].values
        return RowAnswer(f"{number:.6g}", {"score": number}, values[0] if len(values) else None, number)

    def figures(self, answers: Sequence[RowAnswer], references: Sequence[Sequence[str]]) -> dict[str, Statistic]:
        return regression([each.expected for each in answers], [each.predicted for each in answers])


@dataclass(frozen=True)
class WordReadout(PlainReadout):
    """Read the most likely label of each word, from its first token."""

    names: tuple[str, ...]

    def read(self, row: RowOutput) -> RowAnswer:
        probabilities_SC = softmax(np.concatenate(row.outputs).astype(np.float64))
        predicted = probabilities_SC.argmax(-1).tolist()
        expected = [target for mark in row.marks for target in mark.targets]
        labels = [self.names[number] for number in predicted]
        best = probabilities_SC.max(-1).tolist()
        tokens = [
            {"text": text, "label": label, "probability": round(each, 6)}
            for text, label, each in zip(row.texts, labels, best, strict=False)
        ]
        return RowAnswer(" ".join(labels), {"tokens": tokens}, expected, predicted)

    def figures(self, answers: Sequence[RowAnswer], references: Sequence[Sequence[str]]) -> dict[str, Statistic]:
        return entities(*self._tags(answers), self.names)

    def by_label(self, answers: Sequence[RowAnswer]) -> LabelScores:
        if are_entity_tags(self.names):
            return scores_of_entities(*self._tags(answers))
        expected, predicted = (
            [number for each in answers for number in getattr(each, of)] for of in ("expected", "predicted")
        )
        return scores_of_words(expected, predicted, self.names)

    def _tags(self, answers: Sequence[RowAnswer]) -> tuple[list[list[str]], list[list[str]]]:
        expected, predicted = (
            [[self.names[number] for number in getattr(each, of)] for each in answers]
            for of in ("expected", "predicted")
        )
        return expected, predicted


@dataclass(frozen=True)
class SpanReadout(PlainReadout):
    """Read the span of a text that answers a question."""

    settings: SpanSettings

    def read(self, row: RowOutput) -> RowAnswer:
        windows = [
            Window(output_SC[:, 0], output_SC[:, 1], offsets)
            for output_SC, offsets in zip(row.outputs, row.offsets, strict=True)
        ]
        answer = best_answer(windows, row.texts[0], self.settings)
        # The null threshold may overrule the ranking. Then the first candidate is not the answer.
        best = answer.candidates[0] if answer.text == answer.candidates[0].text else answer.best
        facts: dict[str, Any] = {"answer": answer.text, "probability": round(best.probability, 6)}
        facts |= {"start": best.start, "end": best.end} if answer.text else {}
        facts |= {} if answer.null_odds is None else {"null_odds": answer.null_odds}
        facts["candidates"] = [each.to_dict() for each in answer.candidates]
        return RowAnswer(answer.text, facts, row.references, answer)

    def figures(self, answers: Sequence[RowAnswer], references: Sequence[Sequence[str]]) -> dict[str, Statistic]:
        return score(("squad",), [each.text for each in answers], references)

    def remark(self, answers: Sequence[RowAnswer], references: Sequence[Sequence[str]]) -> str:
        """Name the thresholds that would have scored best, if questions may have no answer."""
        if not self.settings.may_abstain:
            return ""
        spans: list[SpanAnswer] = [each.predicted for each in answers]
        best = best_thresholds(spans, references)
        odds = [span.null_odds for span in spans if span.null_odds is not None]
        f1, exact = (_shown(each, odds) for each in (best.best_f1_threshold, best.best_exact_threshold))
        return (
            f"on these rows null_threshold {f1} has the best f1, {best.best_f1:.2f}, and {exact} the best exact match, "
            f"{best.best_exact:.2f}"
        )


def _shown(threshold: float, odds: Sequence[float]) -> str:
    """Write a threshold with as few digits as separate the same questions."""
    above = [each > threshold for each in odds]
    texts = (f"{threshold:.{digits}g}" for digits in range(3, 17))
    return next((text for text in texts if [each > float(text) for each in odds] == above), repr(threshold))


@dataclass(frozen=True)
class SentenceReadout(PlainReadout):
    """Read the sentences of a text that make its summary."""

    num_sentences: int
    block_trigrams: bool  # whether to skip sentences that repeat three words of the summary

    def read(self, row: RowOutput) -> RowAnswer:
        scores = sigmoid(np.concatenate(row.outputs)[:, 0].astype(np.float64))
        texts = list(row.texts)[: len(scores)]  # sentences beyond the context have no score
        chosen = select_sentences(scores[: len(texts)].tolist(), texts, self.num_sentences, self.block_trigrams)
        picked = [texts[number] for number in chosen]
        facts = {"sentences": picked, "numbers": chosen, "scores": [round(float(each), 6) for each in scores]}
        return RowAnswer("\n".join(picked), facts, row.references, chosen)

    def figures(self, answers: Sequence[RowAnswer], references: Sequence[Sequence[str]]) -> dict[str, Statistic]:
        return score(("rouge",), [each.text for each in answers], references)


def select_sentences(
    scores: Sequence[float], sentences: Sequence[str], num_sentences: int, block_trigrams: bool
) -> list[int]:
    """Choose the sentences of a summary by score; among equal scores the earlier sentence.

    Args:
        num_sentences: maximum number of sentences.
        block_trigrams: whether to skip a sentence that shares three consecutive words with a chosen one
            (Paulus et al. 2017, https://arxiv.org/abs/1705.04304, section 2.5).

    Returns:
        Numbers of the sentences, best first, which is also their order in the summary.
    """
    assert len(scores) == len(sentences), f"{len(scores)} scores, {len(sentences)} sentences"
    chosen: list[int] = []
    chosen_trigrams: set[tuple[str, ...]] = set()
    for number in np.argsort(-np.asarray(scores, dtype=np.float64), kind="stable"):
        if len(chosen) == num_sentences:
            break
        if block_trigrams:
            words = sentences[number].split()
            trigrams = set(zip(words, words[1:], words[2:], strict=False))
            if trigrams & chosen_trigrams:
                continue
            chosen_trigrams |= trigrams
        chosen.append(int(number))
    return chosen


def loss_of(task: Task, row: RowOutput) -> tuple[float, float]:
    """Compute a row's loss as a sum over its windows and the divisor of the sum, as `streaming.objective` does."""
    total = weight = 0.0
    for output_SC, mark in zip(row.outputs, row.marks, strict=True):
        logits = output_SC.astype(np.float64)
        # Cross-entropy is log-sum-exp minus the target's logit; for spans, over the positions of the window.
        if task in ("classification", "token-labels"):
            # np.c_ turns the class ids into a column, one per position.
            total += float((_log_sum(logits) - np.take_along_axis(logits, np.c_[list(mark.targets)], -1)[:, 0]).sum())
            weight += len(mark.targets)
        elif task == "spans":
            norms = _log_sum(logits.T)
            # The mean of the losses of start and end, as in transformers.
            total += float(sum(norms - [logits[token, end] for end, token in enumerate(mark.targets)])) / 2
            weight += 1
        elif task == "regression":
            total += float(((logits[0] - mark.values) ** 2).sum())
            weight += len(mark.values)
        else:
            expected = np.asarray(mark.values if task == "multi-label" else mark.targets, np.float64)
            predicted = logits[0] if task == "multi-label" else logits[:, 0]
            # Binary cross-entropy with logits: log(1 + e^x) - target * x.
            total += float((np.logaddexp(0.0, predicted) - expected * predicted).sum())
            weight += len(expected)
    return total, weight


def _log_sum(logits: FloatArray) -> FloatArray:
    """Compute log-sum-exp along the last axis."""
    largest = logits.max(-1)
    # Without the largest logit subtracted, exp would overflow.
    sums: FloatArray = largest + np.log(np.exp(logits - largest[..., None]).sum(-1))
    return sums


def readout_of(recipe: Recipe, labels: Sequence[str]) -> Readout:
    """Return the reader of a recipe's task.

    Args:
        recipe: task, and how to read its answers.
        labels: names of the labels, in the order of the head's outputs.
    """
    names = tuple(labels)
    spans = SpanSettings(recipe.num_best, recipe.max_answer_tokens, bool(recipe.no_answer), recipe.null_threshold)
    readers: Mapping[str, Readout] = {
        "classification": ClassReadout(names),
        "multi-label": LabelSetReadout(names, recipe.label_threshold),
        "regression": NumberReadout(),
        "token-labels": WordReadout(names),
        "spans": SpanReadout(spans),
        "sentences": SentenceReadout(recipe.num_sentences, recipe.block_trigrams),
    }
    return readers[recipe.task]
