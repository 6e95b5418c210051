"""Evaluate a model with a head on labelled rows: loss, scores of its task, scores by label."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gptj_ft.checkpoints.adapter import tokenizer_folder
from gptj_ft.config.options import Recipe
from gptj_ft.data.batches import Rows, first_fit
from gptj_ft.data.dataset import Prepared
from gptj_ft.data.load import read_or_prepare
from gptj_ft.data.split import select_rows
from gptj_ft.data.table import TokenTable
from gptj_ft.data.tokenization import load_row_tokenizer
from gptj_ft.errors import NotFinite, UsageError
from gptj_ft.evaluation.comparison import Evaluation
from gptj_ft.evaluation.likelihood import passes
from gptj_ft.evaluation.metrics.label_scores import LabelScores
from gptj_ft.evaluation.metrics.statistic import Ratio, Statistic
from gptj_ft.evaluation.readout import Outputs, Readout, RowAnswer, RowOutput, loss_of, readout_of
from gptj_ft.generation.generator import InferenceSetup
from gptj_ft.generation.workers import NO_WORKERS, Workers
from gptj_ft.models.batch import Marks
from gptj_ft.models.registry import Architecture
from gptj_ft.planning.inference_plan import InferencePlan, TokenBudget
from gptj_ft.planning.resources import check_lengths
from gptj_ft.streaming.objective import Objective, StepLoss, objective_of
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.streaming.scoring import head_outputs
from gptj_ft.system.paths import home

NO_TOKEN_LIMIT = 2**62  # tokens: no limit


def outputs_of(
    offloaded: OffloadedModel,
    rows: Rows,
    objective: Objective,
    together: TokenBudget,
    before_pass: Callable[[], None] = lambda: None,
    loss: Callable[[StepLoss], object] | None = None,
) -> Iterator[Outputs]:
    """Yield the outputs of the head for each document, [S, C].

    Args:
        offloaded: model.
        rows: documents.
        objective: objective that the head was trained with.
        together: tokens computed at once, and in a pass over the weights.
        before_pass: called before each pass over the weights; may raise to stop.
        loss: receiver of the loss of each micro-batch; default: the rows have no targets, and none is computed.
    """
    for span in passes(rows.lengths, together.read):
        before_pass()
        groups = first_fit([rows.lengths[row] for row in span], together.computed)
        numbers = [[span.start + place for place in group] for group in groups]
        batches = [batch.to(offloaded.device) for group in numbers for batch in rows.batches(group, NO_TOKEN_LIMIT)]
        found: dict[int, Outputs] = {}
        for group, batch, output_SC in zip(numbers, batches, head_outputs(offloaded, batches, objective), strict=True):
            if loss is not None:
                total, _ = objective.loss(output_SC, batch, batch.target_positions_T)
                loss(StepLoss(float(total), objective.weight(batch), num_targets=batch.num_targets))
            whole = output_SC.cpu().numpy()
            ends = pairwise((0, *batch.row_ends))
            found |= {row: whole[start:end] for row, (start, end) in zip(group, ends, strict=True)}
        yield from (found[row] for row in span)


def row_outputs(table: TokenTable, rows: Rows, outputs: Iterator[Outputs]) -> Iterator[RowOutput]:
    """Yield the outputs of whole rows: windows that continue a row belong to it.

    Args:
        table: the rows, as they were prepared.
        rows: the same, as documents.
        outputs: outputs of the head for each document.
    """
    assert rows.marks is not None
    columns = ("continues", "texts", "references", "source", "line", "offsets")
    window: list[tuple[Outputs, Marks, NDArray[np.int64]]] = []
    about: tuple[Sequence[str], Sequence[str], str] = (), (), ""

    def whole() -> RowOutput:
        given, marks, offsets = zip(*window, strict=True)
        return RowOutput(given, marks, offsets, *about)

    for output_SC, marks, (continues, texts, references, source, line, offsets) in zip(
        outputs, rows.marks, zip(*(table[name] for name in columns), strict=True), strict=True
    ):
        if window and not continues:
            yield whole()
            window.clear()
        if not window:
            about = texts, references, f"{source}:{line}"
        window.append((output_SC, marks, np.asarray(offsets, np.int64).reshape(-1, 2)))
    if window:
        yield whole()


def split_rows(table: TokenTable, most_tokens: int) -> Iterator[range]:
    """Yield ranges of documents of about so many tokens, none of which parts the windows of a row."""
    start = tokens = 0
    for number, (length, continues) in enumerate(zip(table.lengths().tolist(), table["continues"], strict=True)):
        if not continues and number > start and tokens + length > most_tokens:
            yield range(start, number)
            start, tokens = number, 0
        tokens += length
    if start < len(table):
        yield range(start, len(table))


@dataclass(frozen=True)
class ScoredAnswers:
    """Answers to rows that say what is right, with their scores.

    Attributes:
        answers: answer to each row.
        places: file and line of each row.
        references: accepted answers of each row.
        figures: statistics by name, the loss included.
        labels: scores of each label; ``None`` where there are none.
        remark: sentence about the scores; mostly empty.
    """

    answers: list[RowAnswer]
    places: list[str]
    references: list[list[str]]
    figures: dict[str, Statistic]
    labels: LabelScores | None
    remark: str


def answer_rows(recipe: Recipe, readout: Readout, rows: Sequence[RowOutput]) -> ScoredAnswers:
    """Read the answers to rows, and score them.

    Raises:
        NotFinite: a loss.
    """
    answers, losses = [readout.read(row) for row in rows], [loss_of(recipe.task, row) for row in rows]
    for row, (total, _) in zip(rows, losses, strict=True):
        if not np.isfinite(total):
            why = "the model is damaged, or too large for fp16; try --precision fp32"
            raise NotFinite(f"the loss of {row.place} is not a finite number: {why}")
    references = [list(row.references) for row in rows]
    total_N, weight_N = (np.array(column, np.float64) for column in zip(*losses, strict=True))
    figures = {"loss": Ratio(total_N, weight_N), **readout.figures(answers, references)}
    remark = readout.remark(answers, references)
    return ScoredAnswers(answers, [row.place for row in rows], references, figures, readout.by_label(answers), remark)


@dataclass(frozen=True)
class LabelledEvaluation:
    """An evaluation of labelled rows, planned and not begun.

    Attributes:
        setup: model and options.
        prepared: rows.
        plan: memory and token budget.
        notes: warnings on the rows.
    """

    setup: InferenceSetup
    prepared: Prepared
    plan: InferencePlan
    notes: tuple[str, ...]

    def with_note(self, note: str) -> LabelledEvaluation:
        """Return a copy with one more note."""
        return replace(self, notes=(*self.notes, note))

    def run(self, progress: Callable[[int, int], None] | None = None) -> Evaluation:
        """Evaluate the model on its rows.

        Args:
            progress: callback for (rows done, rows to do); default: none.

        Raises:
            NotFinite: a loss.
        """
        recipe, table = self.setup.recipe, self.prepared.rows
        rows, found = Rows.of(table), list[RowOutput]()
        total = len(table) - sum(table["continues"])
        with self.setup.open(self.plan.weights) as (architecture, offloaded):
            outputs = outputs_of(offloaded, rows, objective_of(recipe), self.plan.together)
            for row in row_outputs(table, rows, outputs):
                found.append(row)
                if progress:
                    progress(len(found), total)
        answered = answer_rows(recipe, readout_of(recipe, architecture.labels), found)
        notes = (*self.notes, answered.remark) if answered.remark else self.notes
        return Evaluation(
            str(self.setup.folder), answered.figures, answered.places, [each.text for each in answered.answers],
            answered.references, notes, rows.num_targets, answered.labels,
        )  # fmt: skip

    def close(self) -> None:
        """Do nothing: there is no cache, since reading rows again takes as long as reading results would."""


def plan_labelled(
    folder: Path, recipe: Recipe, data: Path, limit: int | None, workers: Workers = NO_WORKERS
) -> LabelledEvaluation:
    """Plan an evaluation of labelled rows.

    Args:
        folder: the model folder.
        recipe: task, templates, device.
        data: file of rows, or prepared data.
        limit: most rows, the first ones; ``None``: all.
        workers: ranks that share the work.

    Raises:
        UsageError: the model has no head for the task.
        ResourceError: the model does not fit in memory.
    """
    setup = InferenceSetup.of(folder, recipe, workers=workers)
    check_head(folder, recipe, setup.architecture)
    check_lengths(recipe, setup.architecture)
    prepared = read_labelled(setup, data)
    skipped = prepared.report.rows_skipped.items()
    notes = tuple(f"{skips.count:,} rows were left out: {reason}" for reason, skips in skipped)
    if limit is not None:
        prepared = select_rows(prepared, range(min(limit, len(prepared.rows))))
    plan = setup.plan(home(), None, documents=prepared.rows.lengths().tolist())
    return LabelledEvaluation(setup, prepared, plan, notes)


def read_labelled(setup: InferenceSetup, data: Path, needs_target: bool = True) -> Prepared:
    """Prepare rows for a model with a head, whose labels they have."""
    tokenizer, architecture = load_row_tokenizer(tokenizer_folder(setup.folder)), setup.architecture
    vocab_size = int(architecture.config.vocab_size)
    labels = architecture.labels
    return read_or_prepare(setup.recipe, tokenizer, vocab_size, data, labels=labels, needs_target=needs_target)


def check_head(folder: Path, recipe: Recipe, architecture: Architecture) -> None:
    """Check that a model has the head of a task.

    Raises:
        UsageError: it has none, or another.
    """
    if architecture.task == recipe.task != "language-model":
        return
    if recipe.task == "language-model" and not architecture.family.is_encoder:
        raise UsageError(f"{folder} writes texts: ask it with `gptj-ft generate`")
    task = "a task" if recipe.task == "language-model" else recipe.task
    has = f", but one for {architecture.task}" if architecture.task else ""
    train = f"gptj-ft finetune --recipe R --data FILE --model {folder}"
    raise UsageError(f"{folder} has no head for {task}{has}: train one with `{train}`")
