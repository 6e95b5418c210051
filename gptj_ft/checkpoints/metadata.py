"""``gptj_ft.json``: what a tuned model folder remembers, so that `generate` and `evaluate` use it as it was trained."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptj_ft.checkpoints.writer import TUNING
from gptj_ft.config.options import Recipe
from gptj_ft.errors import DataError
from gptj_ft.system.digests import check_file
from gptj_ft.system.files import read_text

# The options of a recipe that say how texts become prompts and how answers are written and judged.
TEMPLATE_KEYS = (
    "recipe", "prompt", "completion", "fields", "map", "documents", "quotes", "sentences", "labels", "no_answer",
    "shorten", "on_long", "cut", "max_length", "metrics", "stemming", "generation",
)  # fmt: skip


@dataclass(frozen=True)
class Tuning:
    """The content of ``gptj_ft.json``.

    Attributes:
        base_model: name in `home.models` of the model that training started from; empty if it lies elsewhere: this file
            goes wherever the model goes, and names no folder.
        template: the recipe's `TEMPLATE_KEYS`.
        data: what was trained on, and its digest.
        metrics: validation loss before and after.
        base_digest: of an adapter, that of the model which it was trained for, see `unchanged.sampled_digest`.
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


def read_tuning(model: Path) -> Tuning | None:
    """Return what a model folder remembers; ``None`` for a model that was not tuned here.

    Raises:
        DataError: the file is damaged.
    """
    path = model / TUNING
    if not path.is_file():
        return None
    try:
        check_file(path)
        values = json.loads(read_text(path))
        return Tuning(**{key: values[key] for key in Tuning.__dataclass_fields__ if key in values})
    except DataError:
        raise
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise DataError(f"{path} is damaged: {error!r}") from error
