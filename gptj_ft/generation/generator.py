"""A prompt and its answers, through the template that the model was tuned with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gptj_ft.checkpoints.formats.peft import base_folder, tokenizer_folder
from gptj_ft.config.options import Recipe
from gptj_ft.data.chat import MESSAGES, asked
from gptj_ft.data.columns import stripped
from gptj_ft.data.prepare import load_tokenizer
from gptj_ft.data.template import Prompt, encode_prompt, fields_of
from gptj_ft.errors import UsageError, did_you_mean
from gptj_ft.generation.decoding import StreamedModel, generate_tokens, text_of
from gptj_ft.models.registry import Architecture, read_architecture
from gptj_ft.planning.machine_profile import choose_dtype
from gptj_ft.planning.plan import device_cap
from gptj_ft.streaming.open import reading_stack
from gptj_ft.system import machine

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Answer:
    """What the model wrote, and what it was given."""

    texts: list[str]
    prompt_tokens: int
    was_cut: bool


@dataclass(frozen=True)
class Asker:
    """What a model is asked, and how.

    Attributes:
        folder: the model folder.
        recipe: template and generation settings.
        architecture: of the model.
        tokenizer: of the model.
        device: where it runs.
        dtype: of the computation.
    """

    folder: Path
    recipe: Recipe
    architecture: Architecture
    tokenizer: PreTrainedTokenizerFast
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def of(cls, folder: Path, recipe: Recipe) -> Asker:
        """Read what a model folder says of its model.

        Raises:
            UsageError, DataError: as `families.read_architecture` and `load_tokenizer`.
        """
        device = machine.choose_device(recipe.device)
        dtype = choose_dtype(recipe.precision, device)
        tokenizer = load_tokenizer(tokenizer_folder(folder))
        return cls(folder, recipe, read_architecture(base_folder(folder)), tokenizer, device, dtype)

    @property
    def room(self) -> int:
        """Most tokens of a prompt."""
        longest = min(self.recipe.max_length, int(self.architecture.config.n_positions))
        return longest - self.recipe.generation.max_new_tokens

    def encode(self, values: Mapping[str, Any]) -> Prompt:
        """Return the prompt of a row's fields, shortened as the recipe says."""
        return encode_prompt(self.recipe, self.tokenizer, values, self.room)


@dataclass(frozen=True)
class Writer(Asker):
    """A model that is open, and how it is to write.

    Attributes:
        model: the streamed model.
    """

    model: StreamedModel

    def write(
        self, values: Mapping[str, Any], num_return: int = 1, show: Callable[[str], object] | None = None
    ) -> Answer:
        """Answer a row's fields; ``show`` is given the text of a single one, as it is written if possible."""
        from gptj_ft.generation.text_streamer import Typewriter

        prompt, settings = self.encode(values), self.recipe.generation
        as_written = show is not None and settings.num_beams == 1  # which beam is the answer is known in the end
        streamer = Typewriter(self.tokenizer, settings, show) if show and as_written else None
        rows = generate_tokens(self.model, self.tokenizer, [prompt.ids], settings, num_return, streamer)
        texts = [text_of(self.tokenizer, row, settings) for row in rows]
        if show and not as_written:
            show(texts[0])
        return Answer(texts, len(prompt.ids), prompt.cut)


@contextmanager
def open_writer(asker: Asker, weights: str | None = None) -> Iterator[Writer]:
    """Open a model to write with.

    Args:
        asker: model and settings; the recipe's ``seed`` makes sampling repeatable.
        weights: where they live; ``None``: the recipe says.

    Raises:
        UsageError, DataError: as `model.reading_stack`.
    """
    recipe, device = asker.recipe, asker.device
    cap = device_cap(recipe, device.type == "cpu")
    opened = reading_stack(asker.folder, device, asker.dtype, weights or recipe.weights, recipe.read_ahead, cap)
    with opened as (architecture, stack):
        torch.manual_seed(recipe.seed)
        yield Writer(**vars(asker), model=StreamedModel(architecture, stack, recipe.micro_batch_tokens))


def check_num_return(recipe: Recipe, num_return: int) -> None:
    """Check that a search can give so many different answers.

    Raises:
        UsageError: it cannot.
    """
    settings = recipe.generation
    if num_return > 1 and settings.temperature == 0 and settings.num_beams < num_return:
        raise UsageError(
            f"--num-return {num_return}: greedy decoding has one answer; add --temperature 0.8, or "
            f"--num-beams {num_return}"
        )
    if num_return > 1 and settings.temperature > 0 and 1 < settings.num_beams < num_return:
        raise UsageError(
            f"--num-return {num_return}: there are {settings.num_beams} beams; add --num-beams {num_return}"
        )
    if num_return > 1 and settings.prompt_lookup_num_tokens:
        raise UsageError(
            "--num-return: with guesses from the prompt there is one answer; add "
            "--set generation.prompt_lookup_num_tokens=0"
        )


def fill_fields(recipe: Recipe, prompt: str, more: Mapping[str, str]) -> dict[str, Any]:
    """Return a text for every field of the prompt template.

    The prompt goes to the one field that is left when the others have their texts; a question rather than its passage.

    Raises:
        UsageError: a field that the template does not have, or one without a text.
    """
    names = fields_of(recipe.prompt or recipe.completion)
    if not names:
        raise UsageError("this model's template has no field that a prompt could stand in: use --raw")
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
    texts = stripped(recipe, {**more, left[0]: prompt})
    return {**texts, left[0]: asked(prompt)} if left[0] == MESSAGES else texts
