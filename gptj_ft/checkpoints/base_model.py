"""Choose the model folder that a run starts from; make the tiny random one on the spot."""

from __future__ import annotations

from pathlib import Path

from gptj_ft.config.options import Recipe
from gptj_ft.data.prepare import is_prepared, load
from gptj_ft.data.readers.records import FileOptions, Findings, read_rows, sha256_of
from gptj_ft.errors import UsageError
from gptj_ft.system.paths import (
    TINY_MODELS,
    downloaded_model,
    find_model,
    is_adapter,
    is_model,
    make_home,
    models,
    part_of_home,
)
from gptj_ft.system.plain_text import command_line


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
        from gptj_ft.checkpoints.tiny import make_tiny

        make_home()
        part_of_home("models")
        try:
            make_tiny(folder, texts, recipe.seed, model_type=TINY_MODELS[name])
        except UsageError:
            if not is_model(folder):  # of another process, that was first
                raise
    return folder
