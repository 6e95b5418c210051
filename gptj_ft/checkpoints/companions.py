"""What a tuned model folder holds beside weights and tokenizer: how to ask the model, and what it has been through.

Other tools read it, and other people: nothing in it names files, folders, columns' texts or rows of who trained it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptj_ft.checkpoints.download import read_origin
from gptj_ft.checkpoints.fingerprint import sampled_digest
from gptj_ft.checkpoints.metadata import Tuning, template_of
from gptj_ft.checkpoints.model_card import Card, write_card
from gptj_ft.checkpoints.model_folder import open_checkpoint
from gptj_ft.checkpoints.writer import TUNING
from gptj_ft.config.options import Generation, Recipe
from gptj_ft.data.chat_template import chat_template
from gptj_ft.data.tokenizer import load_tokenizer
from gptj_ft.errors import UsageError
from gptj_ft.models.registry import Architecture
from gptj_ft.system.paths import name_in_home


@dataclass(frozen=True)
class Trained:
    """A state of a run that becomes a model.

    Attributes:
        recipe: of the run.
        base: folder of the model that it started from.
        architecture: of both.
        data: ``rows`` trained on, ``validation_rows`` held out, ``sha256`` of the file.
        metrics: ``validation_loss``, ``baseline_validation_loss``, ``steps``.
    """

    recipe: Recipe
    base: Path
    architecture: Architecture
    data: Mapping[str, Any]
    metrics: Mapping[str, Any]


def files_of(trained: Trained, is_adapter: bool = False) -> dict[str, str]:
    """Return the text files of the model folder, by name.

    Args:
        trained: what became a model.
        is_adapter: whether the folder holds an adapter for the base, and no model.

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
    settings = generation_config(recipe.generation, end) | ({} if begin is None else {"bos_token_id": begin})
    template = chat_template(recipe)
    base_digest = digest_of_base(trained) if is_adapter else None
    tuning = Tuning(name_in_home(trained.base), template_of(recipe), trained.data, trained.metrics, base_digest)
    card = Card(recipe, read_origin(trained.base), trained.architecture.family.model_type, trained.data,
                trained.metrics, token, bool(template), is_adapter)  # fmt: skip
    files = {
        TUNING: json.dumps(tuning.to_dict(), indent=2, ensure_ascii=False) + "\n",
        "generation_config.json": json.dumps(settings, indent=2, ensure_ascii=False) + "\n",
        "README.md": write_card(card),
    }
    return files | ({"chat_template.jinja": template} if template else {})


def digest_of_base(trained: Trained) -> str:
    """Return what an adapter knows its model by."""
    with open_checkpoint(trained.base) as checkpoint:
        return sampled_digest(trained.architecture, checkpoint)


def generation_config(settings: Generation, end: int | None) -> dict[str, Any]:
    """Return the generation settings of a recipe as `transformers` keeps them: what is not its default.

    Args:
        settings: the recipe's.
        end: id of the token that ends a document, and pads.
    """
    from gptj_ft.config.generation_config import search_options

    # Guessing ahead changes nothing but the speed, and not all that read this can.
    plain = search_options(Generation.model_validate({})) | {
        "prompt_lookup_num_tokens": settings.prompt_lookup_num_tokens
    }
    kept = {"max_new_tokens", "do_sample"}
    options = {key: value for key, value in search_options(settings).items() if key in kept or value != plain.get(key)}
    return options | ({} if end is None else {"eos_token_id": end, "pad_token_id": end})
