"""Generate text from a prompt, through the template that the model was tuned with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from gptj_ft.checkpoints.adapter import tokenizer_folder, tuned_architecture, weight_bytes
from gptj_ft.config.options import Recipe
from gptj_ft.data.chat import MESSAGES, asked
from gptj_ft.data.encode import Prompt, encode_prompt
from gptj_ft.data.template import fields_of, stripped
from gptj_ft.data.tokenization import load_tokenizer
from gptj_ft.errors import UsageError, did_you_mean
from gptj_ft.generation.decoding import generate_tokens, text_of
from gptj_ft.generation.hf_model import StreamedModel
from gptj_ft.generation.workers import NO_WORKERS, Workers
from gptj_ft.models.registry import Architecture
from gptj_ft.planning.inference_plan import InferencePlan, InferenceWorkload, plan_inference
from gptj_ft.planning.memory import device_cap
from gptj_ft.planning.resources import free_resources, inference_dtype
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.streaming.open import open_for_inference
from gptj_ft.system import machine
from gptj_ft.system.dtypes import PRECISION_NAMES
from gptj_ft.system.plain_text import command_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Answer:
    """Generated texts, the length of the prompt in tokens, and whether it was shortened to fit."""

    texts: list[str]
    prompt_tokens: int
    was_cut: bool


@dataclass(frozen=True)
class InferenceSetup:
    """Model folder and options: everything that inference needs but rows and weights.

    Attributes:
        folder: model folder.
        recipe: templates, generation settings, placement.
        architecture: family and configuration of the model.
        device: device that computes.
        dtype: data type of the computation.
        workers: ranks that share read-only work.
    """

    folder: Path
    recipe: Recipe
    architecture: Architecture
    device: torch.device
    dtype: torch.dtype
    workers: Workers = field(default=NO_WORKERS, kw_only=True)

    @classmethod
    def of(
        cls, folder: Path, recipe: Recipe, *, workers: Workers = NO_WORKERS, local_rank: int | None = None, **more: Any
    ) -> Self:
        """Read the configuration of a model folder.

        Args:
            folder: model folder.
            recipe: options of computing.
            workers: ranks that share read-only work.
            local_rank: local rank of a worker.
            **more: attributes of a subclass.

        Raises:
            UsageError, DataError: as `tuned_architecture`.
        """
        if recipe.threads is not None:
            torch.set_num_threads(recipe.threads)
        local_rank = workers.group.local_rank if local_rank is None else local_rank
        device = machine.choose_device(recipe.device, recipe.device_memory, local_rank)
        architecture = tuned_architecture(folder)
        dtype = inference_dtype(recipe, architecture, device)
        return cls(folder, recipe, architecture, device, dtype, workers=workers, **more)

    @property
    def context(self) -> int:
        """Most tokens of a document."""
        return int(self.architecture.config.n_positions)

    def plan(self, disk: Path, before: int | None = None, **workload: Any) -> InferencePlan:
        """Plan memory and passes.

        Args:
            disk: folder whose free space counts.
            before: tokens written together, where that was decided before; default: none.
            **workload: attributes of `InferenceWorkload` after ``settings``.

        Raises:
            ResourceError: it does not fit.
        """
        size, settings = weight_bytes(self.folder), self.recipe.generation
        reads = InferenceWorkload.of(self.architecture, self.dtype, settings, adapter_bytes=size, **workload)
        free = free_resources(self.device, disk, self.recipe.device, self.workers.group)
        return plan_inference(self.recipe, reads, free, before)

    @contextmanager
    def open(self, weights: str, cap: int | None = None) -> Iterator[tuple[Architecture, OffloadedModel]]:
        """Open the weights in all processes, see `open_for_inference`; ``weights`` is their place.

        Raises:
            UsageError: another process is of another version, or has other threads, another command, another model.
        """
        recipe = self.recipe.model_copy(update={"precision": PRECISION_NAMES[self.dtype]})
        self.workers.announce(self.folder, recipe, weights, cap)
        opened = open_for_inference(self.folder, self.device, self.dtype, weights, self.recipe.read_ahead, cap)
        with opened as (architecture, offloaded), self.workers.attached(offloaded):
            yield architecture, offloaded


def check_writes(setup: InferenceSetup) -> None:
    """Check that a model can write texts.

    Raises:
        UsageError: it has another head, or is an encoder.
    """
    folder, task = setup.folder, setup.architecture.task
    if task is not None:
        ask = command_line("predict", "--model", folder)
        raise UsageError(f"{folder} is for task '{task}' and writes no text: {ask} \"text\" asks it")
    if setup.architecture.family.is_encoder:
        raise UsageError(
            f"{folder} is an encoder, which writes no text: train it for a task, then ask it with `gptj-ft predict`"
        )


@dataclass(frozen=True)
class GenerationSetup(InferenceSetup):
    """Model folder, template and search settings: everything that generation needs but the weights.

    Attributes:
        tokenizer: tokenizer of the model folder.
    """

    tokenizer: PreTrainedTokenizerFast

    @classmethod
    def of(cls, folder: Path, recipe: Recipe, **more: Any) -> Self:
        """Read configuration and tokenizer of a model folder.

        Raises:
            UsageError, DataError: as `tuned_architecture` and `load_tokenizer`; or the model writes no text.
        """
        setup = super().of(folder, recipe, tokenizer=load_tokenizer(tokenizer_folder(folder)), **more)
        check_writes(setup)
        return setup

    @property
    def room(self) -> int:
        """Longest prompt, in tokens, that leaves room for the new ones."""
        return min(self.recipe.max_length, self.context) - self.recipe.generation.max_new_tokens

    def encode(self, values: Mapping[str, Any]) -> Prompt:
        """Render and tokenize the prompt of a row, shortened as the recipe says."""
        return encode_prompt(self.recipe, self.tokenizer, values, self.room)


@dataclass(frozen=True)
class Generator:
    """An open model with its generation setup.

    Attributes:
        setup: template, tokenizer and search settings.
        model: streamed model.
    """

    setup: GenerationSetup
    model: StreamedModel

    def write(
        self, values: Mapping[str, Any], num_return: int = 1, show: Callable[[str], object] | None = None
    ) -> Answer:
        """Generate answers to one row.

        Args:
            values: texts of the template's fields.
            num_return: number of answers.
            show: callback for the text of a single answer, piece by piece where the search allows it.
        """
        from gptj_ft.generation.decoding import AnswerStreamer

        tokenizer, settings = self.setup.tokenizer, self.setup.recipe.generation
        prompt = self.setup.encode(values)
        as_written = show is not None and settings.num_beams == 1  # which beam is the answer is known in the end
        streamer = AnswerStreamer(tokenizer, settings, show) if show and as_written else None
        rows = generate_tokens(self.model, tokenizer, [prompt.ids], settings, num_return, streamer)
        texts = [text_of(tokenizer, row, settings) for row in rows]
        if show and not as_written:
            show(texts[0])
        return Answer(texts, len(prompt.ids), prompt.cut)


@contextmanager
def open_generator(setup: GenerationSetup, weights: str | None = None) -> Iterator[Generator]:
    """Open the weights of a model for generation.

    Args:
        setup: model and settings; the recipe's ``seed`` makes sampling repeatable.
        weights: place of the weights; default: the recipe's.

    Raises:
        UsageError, DataError: as `open_for_inference`.
    """
    recipe = setup.recipe
    cap = device_cap(recipe, setup.device.type == "cpu")
    with setup.open(weights or recipe.weights, cap) as (architecture, offloaded):
        torch.manual_seed(recipe.seed)
        yield Generator(setup, StreamedModel(architecture, offloaded, recipe.micro_batch_tokens))


def check_num_return(recipe: Recipe, num_return: int) -> None:
    """Check that a search can give so many different answers.

    Raises:
        UsageError: a search that gives fewer.
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
    """Assign texts to the fields of the prompt template.

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
