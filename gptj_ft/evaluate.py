"""Does it help? What a model makes of rows: its loss on them, and the answers that it gives or holds for likeliest."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gptj_ft import machine
from gptj_ft.answering import Answerer, scores_of
from gptj_ft.data.prepare import is_prepared, load_tokenizer
from gptj_ft.errors import NotFinite, UsageError
from gptj_ft.families import Architecture
from gptj_ft.formats.adapters import base_folder, tokenizer_folder
from gptj_ft.home import find_model, is_adapter, is_model, models
from gptj_ft.journal import Journal
from gptj_ft.likelihood import losses, passes
from gptj_ft.metrics import Figure
from gptj_ft.metrics import rouge as rouge_metric
from gptj_ft.metrics.figures import values
from gptj_ft.metrics.language_model import RowLoss, language_model
from gptj_ft.model import reading_stack
from gptj_ft.plan import device_cap
from gptj_ft.rates import choose_dtype
from gptj_ft.recipe import Recipe
from gptj_ft.run import Run
from gptj_ft.session import check_lengths
from gptj_ft.stack import LayerStack
from gptj_ft.task import Task, make_task
from gptj_ft.tuning import read_tuning

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Progress = Callable[[int, int], None]  # called with (rows done, rows to do)


@dataclass(frozen=True)
class Evaluation:
    """One model on some rows, or the outputs of any system.

    Attributes:
        model: its folder, or the file of outputs.
        figures: its scores, loss and perplexities among them, by name.
        places: of each row, its file and line.
        answers: what it wrote, row by row; empty texts where nothing was to be written.
        references: what was accepted, row by row.
        notes: what to know about the figures.
        target_tokens: tokens the loss is over; 0 if there is none.
    """

    model: str
    figures: dict[str, Figure]
    places: list[str]
    answers: list[str]
    references: list[list[str]]
    notes: tuple[str, ...] = ()
    target_tokens: int = 0

    @property
    def rows(self) -> int:
        return len(self.places)

    @property
    def scores(self) -> dict[str, float]:
        """Every score by name."""
        return values(self.figures, self.rows)


def evaluate_model(
    folder: Path, recipe: Recipe, data: Path, limit: int | None, progress: Progress | None = None
) -> tuple[Evaluation, Journal]:
    """Measure a model on rows; go on where an evaluation like this one was killed.

    Args:
        folder: the model folder.
        recipe: templates, metrics, generation settings, device.
        data: a file of rows, or prepared data.
        limit: use only the first rows.
        progress: called with (rows done, rows to do), first for the losses, then for the answers.

    Returns: the evaluation, and the journal to be closed when nothing can go wrong any more.

    Raises:
        NotFinite: a loss.
    """
    tokenizer = load_tokenizer(tokenizer_folder(folder))
    task = make_task(recipe, tokenizer, folder, data, limit)
    device = machine.choose_device(recipe.device)
    dtype = choose_dtype(recipe.precision, device)
    cap = device_cap(recipe, device.type == "cpu")
    journal = Journal({**task.facts, **facts_of(folder, recipe), "dtype": str(dtype), "device": device.type})
    with reading_stack(folder, device, dtype, recipe.weights, recipe.read_ahead, cap) as (architecture, stack):
        check_lengths(recipe, architecture)
        inquiry = Inquiry(recipe, tokenizer, task, journal, progress)
        rows = inquiry.losses(stack)
        answers = inquiry.answers(architecture, stack)
    figures = {**language_model(rows), **scores_of(recipe, answers, task.references)}
    evaluation = Evaluation(
        str(folder), figures, task.places, answers, task.references, task.notes, sum(row.targets for row in rows)
    )
    return with_warnings(evaluation, recipe), journal


def facts_of(folder: Path, recipe: Recipe) -> dict[str, Any]:
    """Return what, beside the rows, decides what a model makes of them."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    keys = {"metrics", "generation", "completion", "labels", "seed", "micro_batch_tokens"}
    return {
        "model": str(folder.resolve()),
        "files": [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files],
        "recipe": recipe.model_dump(mode="json", include=keys),
        "torch": torch.__version__,
    }


@dataclass(frozen=True)
class Inquiry:
    """What is to be found out about a model, and what is known already.

    Attributes:
        recipe: metrics and generation settings.
        tokenizer: of the model.
        task: the rows.
        journal: the findings so far.
        progress: see `evaluate_model`.
    """

    recipe: Recipe
    tokenizer: PreTrainedTokenizerFast
    task: Task
    journal: Journal
    progress: Progress | None = None

    def losses(self, stack: LayerStack) -> list[RowLoss]:
        """Return the loss of each row.

        Raises:
            NotFinite: one of them.
        """
        known, task = self.journal.of("loss"), self.task
        for rows in passes([len(document.ids) for document in task.documents]):
            if not known.keys() >= set(rows):
                documents = [task.documents[row] for row in rows]
                found = losses(stack, self.tokenizer, documents, self.recipe.micro_batch_tokens)
                for row, loss in zip(rows, found, strict=True):
                    if not math.isfinite(loss.total):
                        raise NotFinite(f"the loss of {task.places[row]} is not a finite number: the model is damaged")
                self.journal.add("loss", {row: asdict(loss) for row, loss in zip(rows, found, strict=True)})
            self._show(rows.stop)
        return [RowLoss(**known[row]) for row in range(len(task.documents))]

    def answers(self, architecture: Architecture, stack: LayerStack) -> list[str]:
        """Return the answer to each row: of labels the likeliest, else what is written; nothing if no metric asks."""
        recipe, prompts, known = self.recipe, self.task.prompts, self.journal.of("answer")
        if not recipe.metrics:
            return [""] * len(prompts)
        answerer = Answerer(recipe, self.tokenizer, architecture, stack)
        for rows in answerer.together(prompts):
            if not known.keys() >= set(rows):
                answers = answerer.answer([prompts[row] for row in rows], seed=rows[0])
                self.journal.add("answer", dict(zip(rows, answers, strict=True)))
            self._show(len(known))
        return [known[row] for row in range(len(prompts))]

    def _show(self, done: int) -> None:
        if self.progress:
            self.progress(done, len(self.task.documents))


def with_warnings(evaluation: Evaluation, recipe: Recipe) -> Evaluation:
    """Add what makes scores unfit for these rows to the notes."""
    warning = rouge_metric.warning(evaluation.references) if "rouge" in recipe.metrics else None
    return replace(evaluation, notes=(*evaluation.notes, warning)) if warning else evaluation


def choose_baseline(folder: Path, name: str) -> Path | None:
    """Return the model to compare with.

    Args:
        folder: the model that is measured.
        name: ``none``, ``auto`` (what the model was tuned from, if that is still there), or a model.
    """
    if name == "none":
        return None
    if name != "auto":
        return find_model(name)
    if is_adapter(folder):
        return base_folder(folder)
    if (tuning := read_tuning(folder)) is None:
        return None
    run = Run(folder.resolve().parent)
    bases = [Path(run.recipe().model or "")] if run.model == folder.resolve() and run.recipe_file.is_file() else []
    bases += [models() / tuning.base_model] if tuning.base_model else []
    return next(filter(is_model, bases), None)


def default_rows(folder: Path) -> Path:
    """Return the validation rows of the run a model belongs to.

    Raises:
        UsageError: there are none.
    """
    held_out = Run(folder.parent).data / "validation"
    if not is_prepared(held_out):
        raise UsageError(f"no rows are named, and {folder} has no run with held-out rows beside it: add --data FILE")
    return held_out
