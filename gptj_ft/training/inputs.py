"""Gather what a run reads: model folder, tokenizer, rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from gptj_ft.checkpoints.base_model import choose_model
from gptj_ft.config.options import Recipe
from gptj_ft.data.dataset import Prepared, Report
from gptj_ft.data.load import data_path, read_or_prepare
from gptj_ft.data.readers.rows import PLACES_SHOWN, Occurrences
from gptj_ft.data.readers.source import FileOptions, identify
from gptj_ft.data.split import split
from gptj_ft.data.tokenization import load_row_tokenizer, vocab_size_of


@dataclass(frozen=True)
class Inputs:
    """The model to start from and the rows, ready to be packed.

    Attributes:
        model: folder.
        train: rows to train on.
        validation: rows to measure on.
        report: on the rows that ``data`` names, whichever of them are held out.
    """

    model: Path
    train: Prepared
    validation: Prepared | None
    report: Report


def gather(recipe: Recipe) -> Inputs:
    """Find the model and prepare the rows of a run; without validation rows, hold some out.

    Args:
        recipe: options; ``data`` must be set.

    Raises:
        UsageError, DataError: as their parts.
    """
    source = identify(data_path(recipe.data), FileOptions.of(recipe))
    model = choose_model(recipe, source)
    tokenizer = load_row_tokenizer(model)
    vocab_size = vocab_size_of(model)
    rows = read_or_prepare(recipe, tokenizer, vocab_size, source)
    if recipe.val_data is not None:
        validation = read_or_prepare(recipe, tokenizer, vocab_size, data_path(recipe.val_data))
        train = warn_of_shared(rows, validation)
        return Inputs(model, train, validation, train.report)
    train, held_out = split(rows, recipe.holdout, recipe.seed)
    return Inputs(model, train, held_out, rows.report)


def warn_of_shared(train: Prepared, validation: Prepared) -> Prepared:
    """Return the training rows with a warning in their report if the validation rows have documents of theirs."""
    held = set(validation.rows["group"])
    columns = (train.rows[name] for name in ("group", "source", "line"))
    places = dict.fromkeys(f"{source}:{line}" for group, source, line in zip(*columns, strict=True) if group in held)
    if not places:
        return train
    what = "the same document is in the validation rows, which then do not tell how well the model does on others"
    warnings = {**train.report.warnings, what: Occurrences(len(places), list(places)[:PLACES_SHOWN])}
    return replace(train, report=replace(train.report, warnings=warnings))
