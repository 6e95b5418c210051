"""Write the model card: ``README.md`` of a tuned model folder, as the Hub shows it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptj_ft import __version__
from gptj_ft.checkpoints.download import Origin
from gptj_ft.config.options import Recipe
from gptj_ft.data.chat import is_chat
from gptj_ft.data.template import fields_of

# The options that made the weights what they are; none of them can hold a name of the user's.
HYPER_PARAMETERS = (
    "method", "train", "epochs", "max_steps", "batch_size", "max_length", "on_long", "packing", "lr", "schedule",
    "warmup", "final_lr", "betas", "eps", "weight_decay", "clip_norm", "z_loss", "seed", "precision", "moments",
    "gradients",
)  # fmt: skip
LOSSES = ("baseline_validation_loss", "validation_loss")


@dataclass(frozen=True)
class Card:
    """Content of the card.

    Attributes:
        recipe: options of the run.
        origin: repository of the base model; ``None``: not known.
        model_type: architecture.
        data: ``rows``, ``validation_rows``, ``sha256``.
        metrics: ``validation_loss``, ``baseline_validation_loss``, ``steps``, optionally ``updates_before``.
        end: token that ends an answer; ``None``: not known.
        has_chat_template: whether the folder has a chat template.
        is_adapter: whether the folder holds an adapter in PEFT's format instead of a model; default false.
    """

    recipe: Recipe
    origin: Origin | None
    model_type: str
    data: Mapping[str, Any]
    metrics: Mapping[str, Any]
    end: str | None
    has_chat_template: bool
    is_adapter: bool = False


def write_card(card: Card) -> str:
    """Return the text of the card, from ``model_card.md.jinja``."""
    from huggingface_hub import ModelCard, ModelCardData

    recipe, origin, before, after = card.recipe, card.origin, *map(card.metrics.get, LOSSES)
    library = "peft" if card.is_adapter else "transformers"
    head: dict[str, Any] = {"library_name": library, "pipeline_tag": "text-generation", "tags": ["gptj-ft"]}
    if origin is not None:
        head |= {"base_model": origin.repository, "license": origin.license or None}
        head["base_model_relation"] = "adapter" if card.is_adapter else "finetune"
    losses = [] if before is None or after is None else [float(before), float(after)]
    written = ModelCard.from_template(
        ModelCardData(**head),
        template_path=str(Path(__file__).with_name("model_card.md.jinja")),
        **vars(card),
        version=__version__,
        is_chat=is_chat(recipe),
        fields=fields_of(recipe.prompt),
        prompt=repr(recipe.prompt),
        stop=", ".join(map(repr, recipe.generation.stop)),
        block=_block,
        training=_training(card),
        losses=losses,
        perplexities=[math.exp(min(loss, 700.0)) for loss in losses],
    )
    return f"{str(written).rstrip()}\n"


def _training(card: Card) -> dict[str, str]:
    """Return the rows of the table of the training."""
    options, updates_before = card.recipe.to_dict(), card.metrics.get("updates_before", 0)
    lora = {f"lora.{key}": value for key, value in options["lora"].items()} if options["method"] == "lora" else {}
    options = {key: options[key] for key in HYPER_PARAMETERS if options.get(key) not in (None, [])} | lora
    return {
        "training rows": f"{card.data['rows']:,}",
        "validation rows": f"{card.data.get('validation_rows') or 0:,}",
        "SHA-256 of the data": f"`{card.data['sha256']}`" if card.data.get("sha256") else "not known",
        "optimizer steps": f"{card.metrics['steps']:,}",
        **({"updates of its moments before": f"{updates_before:,}"} if updates_before else {}),
        **{f"`{key}`": f"`{value}`" for key, value in options.items()},
    }


def _block(text: str, language: str) -> str:
    """Return a block of code whose fence is longer than any in the text."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"
