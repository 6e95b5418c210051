"""Generate text from a prompt with the template that the model was tuned with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from gptj_ft.checkpoints.adapter import base_folder, tokenizer_folder, tuned_architecture, weight_bytes
from gptj_ft.checkpoints.model_folder import open_checkpoint, with_stored_sizes
from gptj_ft.config.options import Recipe
from gptj_ft.data.chat import MESSAGES, start_conversation
from gptj_ft.data.columns import is_unicode
from gptj_ft.data.encode import Prompt, encode_prompt
from gptj_ft.data.template import fields_of, stripped
from gptj_ft.data.tokenization import check_ids, load_tokenizer
from gptj_ft.errors import DataError, UsageError, did_you_mean
from gptj_ft.generation.decoding import AnswerStreamer, generate_tokens, text_of
from gptj_ft.generation.hf_model import StreamedModel
from gptj_ft.generation.workers import NO_WORKERS, Workers
from gptj_ft.models.registry import Architecture
from gptj_ft.planning.inference_plan import InferencePlan, InferenceWorkload, model_layouts, plan_inference
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
    """Generated answers to one prompt."""

    texts: list[str]
    prompt_tokens: int
    was_cut: bool  # whether the prompt was shortened to fit


@dataclass(frozen=True)
class InferenceSetup:
    """Model folder and options: everything that inference needs except rows and weights."""

    folder: Path
    recipe: Recipe  # templates, generation settings, placement
    architecture: Architecture
    device: torch.device
    dtype: torch.dtype  # of the computation
    workers: Workers = field(default=NO_WORKERS, kw_only=True)  # ranks that share read-only work

    @classmethod
    def of(
        cls, folder: Path, recipe: Recipe, *, workers: Workers = NO_WORKERS, local_rank: int | None = None, **more: Any
    ) -> Self:
        """Read the configuration of a model folder.

        Args:
            workers: ranks that share read-only work.
            local_rank: local rank of a worker; default: the local rank of this rank.
            **more: fields of a subclass.
        """
        if recipe.threads is not None:
            torch.set_num_threads(recipe.threads)
        local_rank = workers.group.local_rank if local_rank is None else local_rank
        device = machine.choose_device(recipe.device, recipe.device_memory, local_rank)
        architecture = tuned_architecture(folder)
        dtype = inference_dtype(recipe, architecture, device, workers.group)
        return cls(folder, recipe, architecture, device, dtype, workers=workers, **more)

    @property
    def context(self) -> int:
        """Maximum number of tokens of a document."""
        return int(self.architecture.config.n_positions)

    def plan(self, disk: Path, before: int | None = None, **workload: Any) -> InferencePlan:
        """Plan memory and passes.

        Args:
            disk: folder whose free space counts.
            before: ``together.written`` of the plan of an interrupted job, which the new plan keeps; default: none.
            **workload: fields of `InferenceWorkload` after ``settings``.

        Raises:
            ResourceError: the model does not fit.
        """
        size, settings = weight_bytes(self.folder), self.recipe.generation
        with open_checkpoint(base_folder(self.folder)) as checkpoint:
            layouts = with_stored_sizes(self.architecture, checkpoint, model_layouts(self.architecture))
        reads = InferenceWorkload.of(
            self.architecture, self.dtype, settings, layouts=layouts, adapter_bytes=size, **workload
        )
        free = free_resources(self.device, disk, self.recipe.device, self.workers.group)
        return plan_inference(self.recipe, reads, free, before)

    @contextmanager
    def open(self, weights: str, cap: int | None = None) -> Iterator[tuple[Architecture, OffloadedModel]]:
        """Open the weights in all processes, see `open_for_inference`.

        Args:
            weights: placement of the weights.
            cap: maximum bytes on the device; default: no limit.

        Raises:
            UsageError: another process has another version, command, model or number of threads.
        """
        recipe = self.recipe.model_copy(update={"precision": PRECISION_NAMES[self.dtype]})
        # Before opening: the workers then check and open their copies at the same time.
        self.workers.announce(self.folder, recipe, weights, cap)
        opened = open_for_inference(self.folder, self.device, self.dtype, weights, self.recipe.read_ahead, cap)
        with opened as (architecture, offloaded), self.workers.attached(offloaded):
            yield architecture, offloaded


def check_writes(setup: InferenceSetup) -> None:
    """Check that a model can generate text."""
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
    """Model folder, template and search settings: everything that generation needs except the weights."""

    tokenizer: PreTrainedTokenizerFast

    @classmethod
    def of(cls, folder: Path, recipe: Recipe, **more: Any) -> Self:
        """Read configuration and tokenizer of a model folder."""
        setup = super().of(folder, recipe, tokenizer=load_tokenizer(tokenizer_folder(folder)), **more)
        check_writes(setup)
        return setup

    @property
    def room(self) -> int:
        """Maximum length of a prompt that leaves room for the new tokens."""
        return min(self.recipe.max_length, self.context) - self.recipe.generation.max_new_tokens

    def encode(self, values: Mapping[str, Any]) -> Prompt:
        """Render, tokenize and shorten the prompt of a row as the recipe says."""
        prompt = encode_prompt(self.recipe, self.tokenizer, values, self.room)
        check_ids(prompt.ids, int(self.architecture.config.vocab_size))
        return prompt


@dataclass(frozen=True)
class Generator:
    """An open model with its generation setup."""

    setup: GenerationSetup
    model: StreamedModel

    def write(
        self, values: Mapping[str, Any], num_return: int = 1, show: Callable[[str], object] | None = None
    ) -> Answer:
        """Generate answers to one row.

        Args:
            values: texts of the template's fields.
            show: receiver of the text of a single answer, in pieces unless beams are searched.
        """
        tokenizer, settings = self.setup.tokenizer, self.setup.recipe.generation
        prompt = self.setup.encode(values)
        can_stream = show is not None and settings.num_beams == 1  # with beams, the best is known only at the end
        streamer = AnswerStreamer(tokenizer, settings, show) if show and can_stream else None
        rows = generate_tokens(self.model, tokenizer, [prompt.ids], settings, num_return, streamer)
        texts = [text_of(tokenizer, row, settings) for row in rows]
        if show and not can_stream:
            show(texts[0])
        return Answer(texts, len(prompt.ids), prompt.cut)


@contextmanager
def open_generator(setup: GenerationSetup, weights: str | None = None) -> Iterator[Generator]:
    """Open the weights of a model for generation.

    Args:
        setup: model and settings; sampling starts from the recipe's ``seed``.
        weights: placement of the weights; default: the recipe's.
    """
    recipe = setup.recipe
    cap = device_cap(recipe, setup.device.type == "cpu")
    with setup.open(weights or recipe.weights, cap) as (architecture, offloaded):
        torch.manual_seed(recipe.seed)
        yield Generator(setup, StreamedModel(architecture, offloaded, recipe.micro_batch_tokens))


def check_num_return(recipe: Recipe, num_return: int) -> None:
    """Check that the search settings can give ``num_return`` different answers."""
    settings = recipe.generation
    if num_return > 1 and settings.temperature == 0 and settings.num_beams < num_return:
        raise UsageError(
            f"--num-return {num_return}: greedy decoding gives one answer; add --temperature 0.8, or "
            f"--num-beams {num_return}"
        )
    if num_return > 1 and settings.temperature > 0 and 1 < settings.num_beams < num_return:
        raise UsageError(
            f"--num-return {num_return}: there are {settings.num_beams} beams; add --num-beams {num_return}"
        )
    if num_return > 1 and settings.prompt_lookup_num_tokens:
        raise UsageError(
            "--num-return: prompt lookup gives one answer; add --set generation.prompt_lookup_num_tokens=0"
        )


def check_unicode(name: str, text: str) -> None:
    """Raise `DataError` for undecodable bytes of the command line, which no tokenizer accepts."""
    if not is_unicode(text):
        raise DataError(f"{name} is not UTF-8 text: it has unpaired surrogates (invalid Unicode); encode it as UTF-8")


def fill_fields(recipe: Recipe, prompt: str, more: Mapping[str, str]) -> dict[str, Any]:
    """Assign texts to the fields of the prompt template.

    The prompt goes to the only field without a text in ``more``.

    Raises:
        UsageError: a field that the template does not have, or several fields without a text.
        DataError: a text is not valid Unicode.
    """
    check_unicode("the prompt", prompt)
    for name, text in more.items():
        check_unicode(f"the field '{name}'", text)
    names = fields_of(recipe.prompt or recipe.completion)
    if not names:
        raise UsageError("this model's template has no field for the prompt: use --raw")
    for name in more:
        if name not in names:
            raise UsageError(
                f"--field {name}: the template has no such field{did_you_mean(name, names)}; it has {', '.join(names)}"
            )
    left = [name for name in names if name not in more]
    if not left:
        raise UsageError(f"--field {names[0]}: the prompt itself is the last field; give this text as the prompt")
    if len(left) != 1:
        example = (
            " ".join(f'--field {name}="..."' for name in names if name == recipe.shorten) or f'--field {names[0]}="..."'
        )
        raise UsageError(
            f"this model's template has the fields {', '.join(names)}: give all but one, e.g. {example}, or use --raw"
        )
    texts = stripped(recipe, {**more, left[0]: prompt})
    return {**texts, left[0]: start_conversation(prompt)} if left[0] == MESSAGES else texts
