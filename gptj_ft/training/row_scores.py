"""Score a run's model on each validation row, so that two runs can be compared row by row."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from gptj_ft.config.options import Recipe
from gptj_ft.config.run_folder import Run
from gptj_ft.data.batches import Rows, first_fit
from gptj_ft.data.dataset import load_dataset
from gptj_ft.data.table import TokenTable
from gptj_ft.errors import NotFinite
from gptj_ft.evaluation.label_evaluation import NO_TOKEN_LIMIT, answer_rows, outputs_of, row_outputs
from gptj_ft.evaluation.likelihood import passes
from gptj_ft.evaluation.metrics import TASK_SCORES, score_names
from gptj_ft.evaluation.metrics.language_model import RowLoss, language_model
from gptj_ft.evaluation.metrics.statistic import Ratio, Statistic
from gptj_ft.evaluation.readout import RowAnswer, readout_of
from gptj_ft.planning.inference_plan import TokenBudget
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.streaming.scoring import score_tokens, target_query
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
    setup: TrainSetup, run: Run, offloaded: OffloadedModel, before_pass: Callable[[], None] = lambda: None
) -> RowScores:
    """Score a flushed model on the validation rows.

    Args:
        before_pass: called before each pass over the weights; may raise to stop.

    Raises:
        NotFinite: the loss of a row.
    """
    if setup.recipe.task == "language-model":
        return _score_texts(setup, offloaded, before_pass)
    table, rows = load_dataset(run.data / "validation").rows, setup.validation
    budget = TokenBudget(setup.recipe.micro_batch_tokens, offloaded.budget.pass_tokens)
    outputs = outputs_of(offloaded, rows, setup.objective, budget, before_pass)
    readout = readout_of(setup.recipe, setup.architecture.labels)
    scored = answer_rows(setup.recipe, readout, list(row_outputs(table, rows, outputs)))
    loss = scored.figures["loss"]
    assert isinstance(loss, Ratio)
    has_numbers = setup.recipe.task in TASK_SCORES
    return RowScores(
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


def _score_texts(setup: TrainSetup, offloaded: OffloadedModel, before_pass: Callable[[], None]) -> RowScores:
    scored = list(_token_scores(setup.validation, offloaded, setup.recipe.micro_batch_tokens, before_pass))
    losses, weights, right = zip(*scored, strict=True)
    if not all(map(math.isfinite, losses)):
        raise NotFinite("the loss of a validation row is not finite")
    return RowScores(losses, weights, right)


def _token_scores(
    rows: Rows, offloaded: OffloadedModel, budget_tokens: int, before_pass: Callable[[], None]
) -> Iterator[tuple[float, int, int]]:
    """Yield loss, number of targets, and number of right targets of each row."""
    for span in passes(rows.lengths, offloaded.budget.pass_tokens):
        before_pass()
        groups = first_fit([rows.lengths[row] for row in span], budget_tokens)
        numbers = [[span.start + place for place in group] for group in groups]
        batches = [batch.to(offloaded.device) for group in numbers for batch in rows.batches(group, NO_TOKEN_LIMIT)]
        of_row: dict[int, tuple[float, int, int]] = {}
        batch_scores = score_tokens(offloaded, batches, [target_query(batch) for batch in batches])
        for group, scores in zip(numbers, batch_scores, strict=True):
            ends = accumulate((rows.targets[row] for row in group), initial=0)
            for row, (start, end) in zip(group, pairwise(ends), strict=True):
                # fsum rounds only once, so the total does not depend on the order.
                loss = -math.fsum(scores.log_probabilities_S[start:end].tolist())
                of_row[row] = loss, end - start, int(scores.is_argmax_S[start:end].sum())
        yield from (of_row[row] for row in span)
