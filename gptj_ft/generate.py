"""One prompt, one answer, through the template that the model was tuned with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gptj_ft import machine
from gptj_ft.data.chat import MESSAGES, asked
from gptj_ft.data.prepare import load_tokenizer
from gptj_ft.data.template import encode_prompt, fields_of
from gptj_ft.decoding import StreamedModel, write_answers
from gptj_ft.errors import UsageError, did_you_mean
from gptj_ft.model import reading_stack
from gptj_ft.plan import device_cap
from gptj_ft.rates import choose_dtype
from gptj_ft.recipe import Recipe


@dataclass(frozen=True)
class Answer:
    """What the model wrote, and what it was given."""

    text: str
    prompt_tokens: int
    was_cut: bool


def answer(folder: Path, recipe: Recipe, prompt: str, more: Mapping[str, str]) -> Answer:
    """Write an answer to one prompt.

    Args:
        folder: the model folder.
        recipe: template and generation settings; ``seed`` makes sampling repeatable.
        prompt: text of the field that no other text is given for.
        more: texts of the template's other fields, by name.

    Raises:
        UsageError: a field that the template does not have, or one without a text.
        DataError: an empty prompt.
    """
    values = fill_fields(recipe, prompt, more)
    tokenizer = load_tokenizer(folder)
    device = machine.choose_device(recipe.device)
    dtype = choose_dtype(recipe.precision, device)
    cap = device_cap(recipe, device.type == "cpu")
    with reading_stack(folder, device, dtype, recipe.weights, recipe.read_ahead, cap) as (architecture, stack):
        room = min(recipe.max_length, architecture.config.n_positions) - recipe.generation.max_new_tokens
        encoded = encode_prompt(recipe, tokenizer, values, room)
        torch.manual_seed(recipe.seed)
        ((_, text),) = write_answers(StreamedModel(architecture, stack), tokenizer, [encoded.ids], recipe.generation)
    return Answer(text, len(encoded.ids), encoded.cut)


def fill_fields(recipe: Recipe, prompt: str, more: Mapping[str, str]) -> dict[str, Any]:
    """Return a text for every field of the prompt template.

    The prompt goes to the one field that is left when the others have their texts; a question rather than its passage.

    Raises:
        UsageError: as `answer`.
    """
    names = fields_of(recipe.prompt or recipe.completion)
    for name in more:
        if name not in names:
            raise UsageError(
                f"--field {name}: the template has no such field{did_you_mean(name, names)}; it has {', '.join(names)}"
            )
    left = [name for name in names if name not in more]
    if len(left) != 1:
        example = (
            " ".join(f'--field {name}="..."' for name in names if name == recipe.shorten) or f'--field {names[0]}="..."'
        )
        raise UsageError(
            f"this model's template has the fields {', '.join(names)}: give all but one, e.g. {example}, or use --raw"
        )
    return {**more, left[0]: asked(prompt) if left[0] == MESSAGES else prompt}
