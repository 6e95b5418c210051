"""Does it help? Loss, and scores of written answers, of a model and of the one it was tuned from, on the same rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptj_ft import machine
from gptj_ft.data.batches import Rows
from gptj_ft.data.prepare import is_prepared, load_tokenizer, select
from gptj_ft.decoding import StreamedModel, write_answers
from gptj_ft.errors import UsageError
from gptj_ft.home import find_model, is_model, models
from gptj_ft.inputs import read_or_prepare
from gptj_ft.metrics import perplexity, score
from gptj_ft.model import reading_stack
from gptj_ft.plan import device_cap
from gptj_ft.rates import choose_dtype
from gptj_ft.recipe import Recipe
from gptj_ft.run import Run
from gptj_ft.session import check_lengths
from gptj_ft.trainer import validate
from gptj_ft.tuning import read_tuning


@dataclass(frozen=True)
class Evaluation:
    """One model on some rows.

    Attributes:
        model: its folder.
        rows: how many were used.
        target_tokens: tokens the loss is over.
        loss: mean per target token.
        perplexity: exp(loss).
        scores: of the written answers, by name; x100.
        answers: what it wrote, row by row.
        references: what was accepted, row by row.
        notes: what to know about the figures.
    """

    model: str
    rows: int
    target_tokens: int
    loss: float
    perplexity: float
    scores: dict[str, float]
    answers: list[str]
    references: list[list[str]]
    notes: tuple[str, ...] = ()

    def to_dict(self, texts: bool) -> dict[str, Any]:
        """Return the figures for `--json`; texts only when asked for."""
        return {key: value for key, value in self.__dict__.items() if texts or key not in ("answers", "references")}


def evaluate_model(
    folder: Path, recipe: Recipe, data: Path, limit: int | None, progress: Callable[[int, int], None] | None = None
) -> Evaluation:
    """Measure a model on rows.

    Args:
        folder: the model folder.
        recipe: templates, metrics, generation settings, device.
        data: a file of rows, or prepared data.
        limit: use only the first rows.
        progress: called with (answers written, answers to write).
    """
    tokenizer = load_tokenizer(folder)
    notes: tuple[str, ...] = ()
    if recipe.cut == "answer" and not is_prepared(data):
        recipe = recipe.model_copy(update={"cut": "end"})  # who asks does not know where the answer is
    prepared = read_or_prepare(recipe, tokenizer, folder, data)
    if recipe.cut == "answer" and prepared.report.rows_cut:
        notes = (
            f"{prepared.report.rows_cut:,} of these rows were shortened around their answers, which makes them easier "
            "than what will be asked: name the file they come from with --data for figures without that",
        )
    if limit is not None:
        prepared = select(prepared, range(min(limit, len(prepared.rows))))
    rows, references = Rows.of(prepared.rows), [list(texts) for texts in prepared.rows["references"]]
    device = machine.choose_device(recipe.device)
    dtype = choose_dtype(recipe.precision, device)
    cap = device_cap(recipe, device.type == "cpu")
    with reading_stack(folder, device, dtype, recipe.weights, recipe.read_ahead, cap) as (architecture, stack):
        check_lengths(recipe, architecture)
        loss = validate(stack, rows, recipe.micro_batch_tokens)
        answers = [""] * len(rows)
        if recipe.metrics:
            model = StreamedModel(architecture, stack)
            prompts = [list(rows.prompt(row)) for row in range(len(rows))]
            for done, (row, text) in enumerate(write_answers(model, tokenizer, prompts, recipe.generation), 1):
                answers[row] = text
                if progress:
                    progress(done, len(rows))
    return Evaluation(
        str(folder), len(rows), loss.num_targets, loss.mean, perplexity(loss.mean),
        score(recipe.metrics, answers, references), answers, references, notes,
    )  # fmt: skip


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
