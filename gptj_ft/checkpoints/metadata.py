"""Read and write ``gptj_ft.json`` and the other texts of a tuned model folder, which say how the model is to be asked.

Other tools and other people read them: they name no files, folders, texts of columns or rows of who trained the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptj_ft.checkpoints.download import read_origin
from gptj_ft.checkpoints.fingerprint import sampled_digest
from gptj_ft.checkpoints.model_card import Card, write_card
from gptj_ft.checkpoints.model_folder import GENERATION_CONFIG, METADATA_FILE, Checkpoint, open_checkpoint
from gptj_ft.config.generation_config import search_options
from gptj_ft.config.options import Generation, Recipe
from gptj_ft.data.chat import chat_template
from gptj_ft.data.tokenization import load_tokenizer
from gptj_ft.errors import DataError, UsageError
from gptj_ft.models.registry import Architecture
from gptj_ft.system.digests import check_file, read_json
from gptj_ft.system.paths import name_in_home

# The options of a recipe that say how texts become prompts and how answers are written and judged.
TEMPLATE_KEYS = (
    "recipe", "prompt", "completion", "fields", "map", "documents", "quotes", "sentences", "labels", "no_answer",
    "shorten", "on_long", "cut", "max_length", "metrics", "stemming", "generation",
)  # fmt: skip


@dataclass(frozen=True)
class ModelMetadata:
    """Content of ``gptj_ft.json``.

    Attributes:
        base_model: name in `paths.models` of the model that training started from; empty if it lies elsewhere: this
            file goes wherever the model goes, and names no folder.
        template: the recipe's `TEMPLATE_KEYS`.
        data: number of rows trained on and held out, and digest of the data.
        metrics: validation loss before and after, steps.
        base_digest: of an adapter, `fingerprint.sampled_digest` of its base model; ``None`` for a model.
    """

    base_model: str
    template: Mapping[str, Any]
    data: Mapping[str, Any]
    metrics: Mapping[str, Any]
    base_digest: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {"format": 1, **self.__dict__}


def template_of(recipe: Recipe) -> dict[str, Any]:
    """Return the part of a recipe that a tuned model keeps."""
    options = recipe.model_dump(mode="json")
    return {key: options[key] for key in TEMPLATE_KEYS}


def read_metadata(model: Path) -> ModelMetadata | None:
    """Return the metadata of a model folder; ``None`` for a model that was not tuned here.

    Raises:
        DataError: the file is damaged.
    """
    path = model / METADATA_FILE
    if not path.is_file():
        return None
    check_file(path)
    values = read_json(path)
    try:
        return ModelMetadata(**{key: values[key] for key in ModelMetadata.__dataclass_fields__ if key in values})
    except TypeError as error:
        raise DataError(f"{path} is damaged: {error!r}") from error


def check_base(adapter: Path, architecture: Architecture, checkpoint: Checkpoint) -> None:
    """Check that a model is the one that an adapter was trained for; one from elsewhere does not say.

    Raises:
        DataError: it is another one.
    """
    tuning = read_metadata(adapter)
    if tuning and tuning.base_digest and sampled_digest(architecture, checkpoint) != tuning.base_digest:
        raise DataError(
            f"{checkpoint.folder} is not the model that the adapter in {adapter} was trained for, but another of its "
            "shape, or the same in another type: put the right one there"
        )


@dataclass(frozen=True)
class TunedModel:
    """State of a run that becomes a model.

    Attributes:
        recipe: options of the run.
        base: folder of the model that the run started from.
        architecture: architecture of both.
        data: ``rows`` trained on, ``validation_rows`` held out, ``sha256`` of the file.
        metrics: ``validation_loss``, ``baseline_validation_loss``, ``steps``.
    """

    recipe: Recipe
    base: Path
    architecture: Architecture
    data: Mapping[str, Any]
    metrics: Mapping[str, Any]


def metadata_files(trained: TunedModel, is_adapter: bool = False) -> dict[str, str]:
    """Return the text files of the model folder, by name.

    Args:
        trained: the state.
        is_adapter: whether the folder holds an adapter for the base instead of a model; default false.

    Raises:
        DataError: the base's ``source.json`` is damaged.
    """
    recipe, config = trained.recipe, trained.architecture.config
    try:
        tokenizer = load_tokenizer(trained.base)
        end, token = tokenizer.eos_token_id, tokenizer.eos_token
    except UsageError:  # a model of token ids alone
        end, token = getattr(config, "eos_token_id", None), None
    begin = trained.architecture.raw.get("bos_token_id")
    settings = _generation_config(recipe.generation, end) | ({} if begin is None else {"bos_token_id": begin})
    template = chat_template(recipe)
    base_digest = None
    if is_adapter:
        with open_checkpoint(trained.base) as checkpoint:
            base_digest = sampled_digest(trained.architecture, checkpoint)
    tuning = ModelMetadata(name_in_home(trained.base), template_of(recipe), trained.data, trained.metrics, base_digest)
    card = Card(recipe, read_origin(trained.base), trained.architecture.family.model_type, trained.data,
                trained.metrics, token, bool(template), is_adapter)  # fmt: skip
    files = {
        METADATA_FILE: json.dumps(tuning.to_dict(), indent=2, ensure_ascii=False) + "\n",
        GENERATION_CONFIG: json.dumps(settings, indent=2, ensure_ascii=False) + "\n",
        "README.md": write_card(card),
    }
    return files | ({"chat_template.jinja": template} if template else {})


def _generation_config(settings: Generation, end: int | None) -> dict[str, Any]:
    """Return the generation settings of a recipe as `transformers` keeps them: what is not its default.

    Args:
        settings: the recipe's.
        end: id of the token that ends a document, and pads.
    """
    # Guessing ahead changes nothing but the speed, and not all that read this can.
    plain = search_options(Generation.model_validate({})) | {
        "prompt_lookup_num_tokens": settings.prompt_lookup_num_tokens
    }
    kept = {"max_new_tokens", "do_sample"}
    options = {key: value for key, value in search_options(settings).items() if key in kept or value != plain.get(key)}
    return options | ({} if end is None else {"eos_token_id": end, "pad_token_id": end})
