"""Find the model and prepare the training and validation rows of a new run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from gptj_ft.checkpoints.architecture import read_architecture, vocab_size_of
from gptj_ft.checkpoints.base_model import choose_model
from gptj_ft.checkpoints.model_defaults import with_model_defaults, within_context
from gptj_ft.config.options import Recipe
from gptj_ft.config.resolve import Resolved
from gptj_ft.data.canaries import check_canaries, plant
from gptj_ft.data.dataset import Prepared, Report
from gptj_ft.data.load import data_path, read_or_prepare
from gptj_ft.data.prepare import TokenizeJob
from gptj_ft.data.readers.rows import PLACES_SHOWN, Occurrences, format_places
from gptj_ft.data.readers.source import FileOptions, identify
from gptj_ft.data.split import split
from gptj_ft.data.tokenization import load_row_tokenizer


@dataclass(frozen=True)
class Inputs:
    """The model to start from, and its rows."""

    recipe: Recipe  # completed with the model's chat template and context
    model: Path  # folder
    train: Prepared
    validation: Prepared | None
    report: Report  # on all rows of ``data``, held-out ones included
    note: str  # on a changed option; usually empty


def gather(resolved: Resolved) -> Inputs:
    """Find the model and prepare the rows; hold some out for validation unless ``val_data`` is set."""
    recipe = resolved.recipe
    check_canaries(recipe)
    source = identify(data_path(recipe.data), FileOptions.of(recipe))
    model = choose_model(recipe, source)
    recipe, note = within_context(with_model_defaults(recipe, model, source.path), model, resolved.typed)
    read_architecture(model).family.head_for(recipe.task)
    tokenizer = load_row_tokenizer(model)
    vocab_size = vocab_size_of(model)
    known = read_architecture(model).labels if recipe.task != "language-model" else ()
    rows = read_or_prepare(TokenizeJob(recipe, tokenizer, source, vocab_size, known_labels=known))
    validation: Prepared | None
    if recipe.val_data is not None:
        path, labels = data_path(recipe.val_data), rows.report.labels
        validation = read_or_prepare(TokenizeJob.of(recipe, tokenizer, path, vocab_size, labels=labels))
        train = warn_of_shared(note_left_out(rows, validation), validation)
        report = train.report
    else:
        (train, validation), report = split(rows, recipe.holdout, recipe.seed), rows.report
    if recipe.canaries:
        train = plant(train, recipe, tokenizer)
        report = replace(report, notes=train.report.notes)
    return Inputs(recipe, model, train, validation, report, note)


def note_left_out(train: Prepared, validation: Prepared) -> Prepared:
    """Note in the report of the training rows how many validation rows were left out, and why."""
    notes = tuple(
        f"validation rows left out, {skips.count:,}: {reason} ({format_places(skips.first, skips.count)})"
        for reason, skips in validation.report.rows_skipped.items()
    )
    return replace(train, report=replace(train.report, notes=(*train.report.notes, *notes)))


def warn_of_shared(train: Prepared, validation: Prepared) -> Prepared:
    """Warn in the report of the training rows about documents that are in the validation rows, too."""
    groups = set(validation.rows["group"])
    columns = (train.rows[name] for name in ("group", "source", "line"))
    places = dict.fromkeys(f"{source}:{line}" for group, source, line in zip(*columns, strict=True) if group in groups)
    if not places:
        return train
    warning = "the same document is in the validation rows, so the validation loss does not measure unseen documents"
    warnings = {**train.report.warnings, warning: Occurrences(len(places), list(places)[:PLACES_SHOWN])}
    return replace(train, report=replace(train.report, warnings=warnings))
