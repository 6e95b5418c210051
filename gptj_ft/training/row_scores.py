"""Compute the loss of a run's model on its validation rows, and the scores of each row, to compare two runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from gptj_ft.config.options import Recipe
from gptj_ft.data.batches import Rows, first_fit
from gptj_ft.data.table import TokenTable
from gptj_ft.evaluation.label_evaluation import answer_rows, outputs_of, row_outputs
from gptj_ft.evaluation.likelihood import passes
from gptj_ft.evaluation.metrics import TASK_SCORES, score_names
from gptj_ft.evaluation.metrics.language_model import RowLoss, language_model
from gptj_ft.evaluation.metrics.statistic import Ratio, Statistic
from gptj_ft.evaluation.readout import RowAnswer, readout_of
from gptj_ft.models.batch import PackedBatch
from gptj_ft.planning.inference_plan import TokenBudget
from gptj_ft.streaming.buffers import PASS_TOKENS
from gptj_ft.streaming.objective import CrossEntropy, Objective, StepLoss
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.streaming.scoring import evaluate_losses, score_tokens, target_query
from gptj_ft.training.setup import TrainSetup

TEXT_SCORES = ("loss", "perplexity", "token_accuracy")  # of a language model


def searchable_scores(task: str) -> list[str]:
    """List the scores by which runs of a task can be compared."""
    return list(TEXT_SCORES) if task == "language-model" else ["loss", *score_names((), task)]


@dataclass(frozen=True)
class RowScores:
    """Losses and answers of a model, by validation row."""

    losses: Sequence[float]  # sum over the targets of each row, nats
    weights: Sequence[float]  # divisor of each sum
    right: Sequence[int] = ()  # targets that are the argmax; language models only
    texts: Sequence[str] = ()  # answers of a head
    expected: Sequence[Any] = ()  # targets of a head; empty for tasks whose answers are texts
    predicted: Sequence[Any] = ()  # answers of a head as numbers; likewise

    def figures(self, recipe: Recipe, labels: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, Any]:
        """Return the statistics of the scores, by name."""
        if self.right:
            rows = zip(self.losses, self.weights, self.right, strict=True)
            return dict(language_model([RowLoss(loss, int(weight), right, None, None) for loss, weight, right in rows]))
        pairs = zip(self.expected, self.predicted, strict=True) if self.expected else [(None, None)] * len(self.texts)
        answers = [
            RowAnswer(text, {}, expected, np.asarray(predicted) if isinstance(predicted, list) else predicted)
            for text, (expected, predicted) in zip(self.texts, pairs, strict=True)
        ]
        loss: Statistic = Ratio(np.array(self.losses, np.float64), np.array(self.weights, np.float64))
        return {"loss": loss, **readout_of(recipe, labels).figures(answers, references)}


def score_rows(
    setup: TrainSetup, table: TokenTable, offloaded: OffloadedModel, before_pass: Callable[[], None] = lambda: None
) -> tuple[StepLoss, RowScores]:
    """Score a flushed model on the validation rows.

    Args:
        table: the validation rows.
        before_pass: called before each pass over the weights; may raise to stop.

    Returns: the loss over all rows, for a language model that of `validate`, and the scores by row.

    Raises:
        NotFinite: the loss of a row of a task with labels.
    """
    if setup.recipe.task == "language-model":
        return _score_texts(setup.validation, offloaded, setup.recipe.micro_batch_tokens, before_pass)
    losses = list[StepLoss]()
    budget = TokenBudget(setup.recipe.micro_batch_tokens, offloaded.budget.pass_tokens)
    outputs = outputs_of(offloaded, setup.validation, setup.objective, budget, before_pass, losses.append)
    readout = readout_of(setup.recipe, setup.architecture.labels)
    scored = answer_rows(setup.recipe, readout, list(row_outputs(table, setup.validation, outputs)))
    loss = scored.figures["loss"]
    assert isinstance(loss, Ratio)
    has_numbers = setup.recipe.task in TASK_SCORES
    return _total(losses), RowScores(
        loss.above_N.tolist(),
        loss.below_N.tolist(),
        texts=[answer.text for answer in scored.answers],
        expected=[np.asarray(answer.expected).tolist() for answer in scored.answers] if has_numbers else (),
        predicted=[np.asarray(answer.predicted).tolist() for answer in scored.answers] if has_numbers else (),
    )


def references_of(table: TokenTable) -> list[list[str]]:
    """Return the accepted answers of each row; a long row has several documents."""
    columns = zip(table["references"], table["continues"], strict=True)
    return [list(references) for references, continues in columns if not continues]


def validate(
    offloaded: OffloadedModel,
    rows: Rows,
    budget_tokens: int,
    before_pass: Callable[[], None] = lambda: None,
    objective: Objective = CrossEntropy(),
    span_tokens: int = PASS_TOKENS,
) -> StepLoss:
    """Compute the loss over rows, without training.

    Args:
        budget_tokens: most tokens of a micro-batch.
        before_pass: called before each pass over the weights; may raise to stop.
        span_tokens: tokens of rows that are in memory at the same time.
    """
    losses: list[StepLoss] = []
    for batches in _batches(offloaded, rows, budget_tokens, before_pass, span_tokens):
        losses += evaluate_losses(offloaded, batches, objective)
    return _total(losses)


def _batches(
    offloaded: OffloadedModel,
    rows: Rows,
    budget_tokens: int,
    before_pass: Callable[[], None],
    span_tokens: int = PASS_TOKENS,
) -> Iterator[list[PackedBatch]]:
    """Yield the micro-batches of each pass over the weights.

    Only the rows decide which of them share a micro-batch. `BufferBudget.pass_tokens` decides how many micro-batches
    share a pass over the weights, and changes no number.
    """
    # Two bounds: rows of a span are in memory together, and batches of a pass share one load of the weights.
    for span in passes(rows.lengths, span_tokens):
        batches = rows.batches(span, budget_tokens)
        for some in passes([len(batch.tokens_T) for batch in batches], offloaded.budget.pass_tokens):
            before_pass()
            yield [batches[number].to(offloaded.device) for number in some]


def _score_texts(
    rows: Rows, offloaded: OffloadedModel, budget_tokens: int, before_pass: Callable[[], None] = lambda: None
) -> tuple[StepLoss, RowScores]:
    losses, of_row = list[StepLoss](), dict[int, tuple[float, int, int]]()
    scores = (
        each
        for batches in _batches(offloaded, rows, budget_tokens, before_pass)
        for each in score_tokens(offloaded, batches, list(map(target_query, batches)))
    )
    spans = passes(rows.lengths, PASS_TOKENS)
    # The rows of each micro-batch, as `micro_batches` groups them.
    groups = ((span, group) for span in spans for group in first_fit([rows.lengths[n] for n in span], budget_tokens))
    for (span, group), each in zip(groups, scores, strict=True):
        losses.append(each.loss)
        numbers = [span.start + place for place in group]
        ends = accumulate((rows.targets[row] for row in numbers), initial=0)
        for row, (start, end) in zip(numbers, pairwise(ends), strict=True):
            # fsum rounds only once, so the total does not depend on the order.
            loss = -math.fsum(each.log_probabilities_SK[start:end].flatten().tolist())
            of_row[row] = loss, end - start, int(each.is_argmax_SK[start:end].sum())
    return _total(losses), RowScores(*map(list, zip(*(of_row[row] for row in range(len(rows))), strict=True)))


def _total(losses: list[StepLoss]) -> StepLoss:
    return StepLoss(sum(loss.total for loss in losses), sum(loss.weight for loss in losses))
