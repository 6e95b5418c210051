"""Evaluate a model with a head on labelled rows: loss, scores of its task, scores by label.

A long row is split into windows, one document each; `row_outputs` joins the outputs of a row's windows again.

Axis letters: S positions of a window that the head reads, C outputs per position.
"""

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
from gptj_ft.data.prepare import TokenizeJob
from gptj_ft.data.split import first_rows
from gptj_ft.data.table import TokenTable
from gptj_ft.data.tokenization import load_row_tokenizer
from gptj_ft.errors import NotFinite, UsageError
from gptj_ft.evaluation.comparison import Evaluation
from gptj_ft.evaluation.likelihood import passes
from gptj_ft.evaluation.metrics.label_scores import LabelScores
from gptj_ft.evaluation.metrics.statistic import Ratio, Statistic
from gptj_ft.evaluation.readout import Outputs, Readout, RowAnswer, RowOutput, loss_of, readout_of
from gptj_ft.evaluation.row_job import Progress, check_complete
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

NO_TOKEN_LIMIT = 2**62


def outputs_of(
    offloaded: OffloadedModel,
    rows: Rows,
    objective: Objective,
    budget: TokenBudget,
    before_pass: Callable[[], None] = lambda: None,
    loss: Callable[[StepLoss], object] | None = None,
) -> Iterator[Outputs]:
    """Yield the outputs of the head for each document, [S, C].

    Args:
        budget: tokens computed at once, and in a pass over the weights.
        before_pass: called before each pass over the weights; may raise to stop.
        loss: receiver of each micro-batch's loss; default: the rows need no targets and no loss is computed.
    """
    for span in passes(rows.lengths, budget.read):
        before_pass()
        # Pack documents of the pass into micro-batches in any order; the last line restores theirs.
        groups = first_fit([rows.lengths[row] for row in span], budget.computed)
        numbers = [[span.start + place for place in group] for group in groups]
        batches = [batch.to(offloaded.device) for group in numbers for batch in rows.batches(group, NO_TOKEN_LIMIT)]
        of_document: dict[int, Outputs] = {}
        # Not strict: missing outputs are reported below.
        for group, batch, output_SC in zip(numbers, batches, head_outputs(offloaded, batches, objective), strict=False):
            if loss is not None:
                total, _ = objective.loss(output_SC, batch, batch.target_positions_T)
                loss(StepLoss(float(total), objective.weight(batch), num_targets=batch.num_targets))
            whole = output_SC.cpu().numpy()
            # The head reads only marked positions: documents end at other rows in its outputs than in the batch.
            ends = pairwise((0, *batch.row_ends))
            of_document |= {row: whole[start:end] for row, (start, end) in zip(group, ends, strict=True)}
        for row in span:
            if row not in of_document:
                return  # `check_complete` reports the rows without outputs
            yield of_document[row]


def row_outputs(table: TokenTable, rows: Rows, outputs: Iterator[Outputs]) -> Iterator[RowOutput]:
    """Join the outputs of each row's windows; end before a row without outputs.

    Args:
        table: the documents as prepared; ``continues`` marks all windows of a row but the first.
        rows: the same documents.
        outputs: outputs of the head for each document.
    """
    assert rows.marks is not None
    columns = ("continues", "texts", "references", "source", "line", "offsets")
    windows: list[tuple[Outputs, Marks, NDArray[np.int64]]] = []
    about: tuple[Sequence[str], Sequence[str], str] = (), (), ""

    def joined() -> RowOutput:
        own_outputs, marks, offsets = zip(*windows, strict=True)
        return RowOutput(own_outputs, marks, offsets, *about)

    num_read = 0
    for output_SC, marks, (continues, texts, references, source, line, offsets) in zip(
        outputs, rows.marks, zip(*(table[name] for name in columns), strict=True), strict=False
    ):
        num_read += 1
        # A new row begins: the windows collected so far are all of the previous one.
        if windows and not continues:
            yield joined()
            windows.clear()
        if not windows:
            about = texts, references, f"{source}:{line}"
        windows.append((output_SC, marks, np.asarray(offsets, np.int64).reshape(-1, 2)))
    if windows and num_read == len(table):
        yield joined()


def split_rows(table: TokenTable, max_tokens: int) -> Iterator[range]:
    """Split documents into ranges of about ``max_tokens``, without splitting a row's windows."""
    start = tokens = 0
    for number, (length, continues) in enumerate(zip(table.lengths().tolist(), table["continues"], strict=True)):
        if not continues and number > start and tokens + length > max_tokens:
            yield range(start, number)
            start, tokens = number, 0
        tokens += length
    if start < len(table):
        yield range(start, len(table))


@dataclass(frozen=True)
class ScoredAnswers:
    """Answers to labelled rows, with their scores."""

    answers: list[RowAnswer]
    places: list[str]  # file and line of each row
    references: list[list[str]]  # accepted answers of each row
    figures: dict[str, Statistic]  # by name, including the loss
    labels: LabelScores | None  # scores of each label, if the task has labels
    remark: str  # sentence about the scores; usually empty


def answer_rows(recipe: Recipe, readout: Readout, rows: Sequence[RowOutput]) -> ScoredAnswers:
    """Read the answers to labelled rows and score them.

    Raises:
        NotFinite: a loss is not finite.
    """
    answers, losses = [readout.read(row) for row in rows], [loss_of(recipe.task, row) for row in rows]
    for row, (total, _) in zip(rows, losses, strict=True):
        if not np.isfinite(total):
            why = "the model is damaged, or too large for fp16; try --precision fp32"
            raise NotFinite(f"the loss of {row.place} is not a finite number: {why}")
    references = [list(row.references) for row in rows]
    # Sums and divisors by row make the loss a ratio, whose interval the bootstrap can estimate.
    total_N, weight_N = (np.array(column, np.float64) for column in zip(*losses, strict=True))
    figures = {"loss": Ratio(total_N, weight_N), **readout.figures(answers, references)}
    remark = readout.remark(answers, references)
    return ScoredAnswers(answers, [row.place for row in rows], references, figures, readout.by_label(answers), remark)


@dataclass(frozen=True)
class LabelledEvaluation:
    """A planned evaluation of labelled rows."""

    setup: InferenceSetup
    prepared: Prepared
    plan: InferencePlan
    notes: tuple[str, ...]  # warnings for the report

    def with_note(self, note: str) -> LabelledEvaluation:
        """Return a copy with one more note."""
        return replace(self, notes=(*self.notes, note))

    def run(self, progress: Progress | None = None) -> Evaluation:
        """Evaluate the model on its rows.

        Raises:
            NotFinite: a loss is not finite.
            DataError: a row got no answer.
        """
        recipe, table = self.setup.recipe, self.prepared.rows
        documents, rows = Rows.of(table), list[RowOutput]()
        columns = zip(table["source"], table["line"], table["continues"], strict=True)
        places = [f"{source}:{line}" for source, line, continues in columns if not continues]
        with self.setup.open(self.plan.weights) as (architecture, offloaded):
            outputs = outputs_of(offloaded, documents, objective_of(recipe), self.plan.together)
            for row in row_outputs(table, documents, outputs):
                rows.append(row)
                if progress:
                    progress(len(rows), len(places))
        # Match in order, since several rows can have one place: all questions of a SQuAD article are on one line.
        unmatched = iter(enumerate(places))
        done = {next(number for number, place in unmatched if place == row.place) for row in rows}
        check_complete(done, len(places), places.__getitem__)
        scored = answer_rows(recipe, readout_of(recipe, architecture.labels), rows)
        notes = (*self.notes, scored.remark) if scored.remark else self.notes
        return Evaluation(
            str(self.setup.folder), scored.figures, scored.places, [each.text for each in scored.answers],
            scored.references, notes, documents.num_targets, scored.labels,
        )  # fmt: skip

    def close(self) -> None:
        """Do nothing: there is no cache, since computing a row takes little longer than reading its result."""


def plan_labelled(
    folder: Path, recipe: Recipe, data: Path, limit: int | None, workers: Workers = NO_WORKERS
) -> LabelledEvaluation:
    """Plan an evaluation of labelled rows.

    Args:
        data: file of rows, or prepared data.
        limit: maximum number of rows, taken from the start; None: all.
        workers: ranks that share the rows.

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
        prepared = first_rows(prepared, limit)
    plan = setup.plan(home(), None, documents=prepared.rows.lengths().tolist())
    return LabelledEvaluation(setup, prepared, plan, notes)


def read_labelled(setup: InferenceSetup, data: Path, needs_target: bool = True) -> Prepared:
    """Tokenize rows for a model with a head; ``needs_target``: skip rows without a label."""
    tokenizer, architecture = load_row_tokenizer(tokenizer_folder(setup.folder)), setup.architecture
    vocab_size = int(architecture.config.vocab_size)
    labels = architecture.labels
    job = TokenizeJob.of(setup.recipe, tokenizer, data, vocab_size, labels=labels, needs_target=needs_target)
    return read_or_prepare(job)


def check_head(folder: Path, recipe: Recipe, architecture: Architecture) -> None:
    """Check that a model has a head for the recipe's task."""
    if architecture.task == recipe.task != "language-model":
        return
    if recipe.task == "language-model" and not architecture.family.is_encoder:
        raise UsageError(f"{folder} writes texts: ask it with `gptj-ft generate`")
    task = "a task" if recipe.task == "language-model" else recipe.task
    has = f", but one for {architecture.task}" if architecture.task else ""
    train = f"gptj-ft finetune --recipe R --data FILE --model {folder}"
    raise UsageError(f"{folder} has no head for {task}{has}: train one with `{train}`")
