"""What a run reads: the model folder, its tokenizer, the rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from gptj_ft.data.cache import prepare_once
from gptj_ft.data.checks import PLACES_SHOWN
from gptj_ft.data.hub_rows import is_reference, local_folder
from gptj_ft.data.prepare import Prepared, Report, check_compatible, is_prepared, load
from gptj_ft.data.prepared import Skips
from gptj_ft.data.records import FileOptions, Findings, read_rows, sha256_of
from gptj_ft.data.split import split
from gptj_ft.data.token_checks import check_tokens
from gptj_ft.data.tokenizer import RowTokenizer, load_row_tokenizer, vocab_size_of
from gptj_ft.errors import UsageError
from gptj_ft.home import (
    TINY_MODELS,
    downloaded_model,
    find_model,
    is_adapter,
    is_model,
    make_home,
    models,
    part_of_home,
)
from gptj_ft.plain_text import command_line
from gptj_ft.recipe import Recipe


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
        recipe: its ``data`` must be set.

    Raises:
        UsageError, DataError: as their parts.
    """
    source = data_path(recipe.data)
    model = choose_model(recipe, source)
    tokenizer = load_row_tokenizer(model)
    rows = read_or_prepare(recipe, tokenizer, model, source)
    if recipe.val_data is not None:
        validation = read_or_prepare(recipe, tokenizer, model, data_path(recipe.val_data))
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
    warnings = {**train.report.warnings, what: Skips(len(places), tuple(places)[:PLACES_SHOWN])}
    return replace(train, report=replace(train.report, warnings=warnings))


def data_path(data: str | None) -> Path:
    """Return the path of the rows; of those on the Hub, where they have been fetched to.

    Raises:
        UsageError: none were named, or they have not been fetched.
    """
    if data is None:
        raise UsageError(
            "no rows are named: add --data FILE (jsonl, json, csv, tsv, xlsx, parquet, txt, tfrecords, h5, a folder, "
            "or prepared) or --data hub:owner/name"
        )
    return local_folder(data) if is_reference(data) else Path(data).expanduser()


def choose_model(recipe: Recipe, source: Path) -> Path:
    """Return the folder of the model to start from: the one named, else the downloaded one; a tiny one is made here.

    Raises:
        UsageError: there is none; says what to type.
    """
    if recipe.model in TINY_MODELS:
        return tiny_model(recipe, source)
    if recipe.model is not None:
        folder = find_model(recipe.model)
        if is_adapter(folder):
            raise UsageError(
                f"{folder} is an adapter; to train on from it, merge it first: "
                f"{command_line('convert', '--merge', folder)}"
            )
        return folder
    found = downloaded_model()
    if found is None:
        raise UsageError("no model is named and none is downloaded: type `gptj-ft download`, or try --model tiny first")
    return found


def tiny_model(recipe: Recipe, source: Path) -> Path:
    """Return the tiny random model that belongs to some rows; make it, with a tokenizer of theirs, if it is new.

    Raises:
        UsageError: the rows are prepared and the model they were prepared for is gone.
    """
    name, prepared = recipe.model or "tiny", is_prepared(source)
    digest = load(source).report.data_sha256 if prepared else sha256_of(source)
    folder = models() / f"{name}-{digest[:12]}-{recipe.seed}"
    if not is_model(folder):
        if prepared:
            raise UsageError(
                f"{source} was prepared for another model than {folder}: prepare it again with --model {name}"
            )
        findings = Findings(recipe.max_bad_rows)
        rows = read_rows(source, findings, FileOptions.of(recipe))
        values = (value for row in rows for value in row.values.values())
        texts = (value for value in values if isinstance(value, str))
        from gptj_ft.tiny import make_tiny

        make_home()
        part_of_home("models")
        try:
            make_tiny(folder, texts, recipe.seed, model_type=TINY_MODELS[name])
        except UsageError:
            if not is_model(folder):  # of another process, that was first
                raise
    return folder


def read_or_prepare(
    recipe: Recipe,
    tokenizer: RowTokenizer,
    model: Path,
    source: Path,
) -> Prepared:
    """Return rows as tokens: loaded if they are prepared (and fit this recipe and tokenizer), else made from a file."""
    if is_adapter(model):
        from gptj_ft.formats.adapters import base_folder

        model = base_folder(model)
    if is_prepared(source):
        prepared = load(source)
        check_compatible(prepared, recipe, tokenizer)
        check_tokens(prepared, source, vocab_size_of(model), recipe.max_length)
        return prepared
    return prepare_once(recipe, tokenizer, source, vocab_size_of(model))
