"""Decode: generate tokens with `transformers`' search, and turn them into answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from gptj_ft.config.options import Generation
from gptj_ft.generation.hf_model import RaggedCache, StreamedModel
from gptj_ft.system.accelerator import fork_rng

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast
    from transformers.generation.streamers import BaseStreamer


T = TypeVar("T")


@dataclass(frozen=True)
class PromptBatch:
    """Prompts that share each pass over the weights while their continuations are generated.

    Attributes:
        prompts: token ids of each, none empty.
        settings: greedy at temperature 0, else sampling.
        seed: seed of the batch, so that samples depend neither on other batches nor on who generates them.
        num_return: continuations of each prompt; default 1.
    """

    prompts: Sequence[Sequence[int]]
    settings: Generation
    seed: int
    num_return: int = 1

    @property
    def num_tokens(self) -> int:
        """Tokens of prompts and continuations, at most."""
        most = self.settings.max_new_tokens * self.num_return
        return sum(len(prompt) + most for prompt in self.prompts)


def in_rounds(batches: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Yield as many batches at a time as there are processes that generate."""
    return (batches[start : start + size] for start in range(0, len(batches), size))


def generate_batches(
    model: StreamedModel, tokenizer: PreTrainedTokenizerFast, batches: Sequence[PromptBatch]
) -> list[list[list[int]]]:
    """Generate the continuations of batches, dealt out to the model's replicas if it has any; see `generate_tokens`.

    torch's generators are left as they were.
    """
    exchange = model.offloaded.exchange
    if exchange.num_replicas == 1:
        return [_continue(model, tokenizer, batch) for batch in batches]
    units = [{**vars(batch), "settings": batch.settings.model_dump(mode="json")} for batch in batches]
    sizes = [batch.num_tokens for batch in batches]
    return exchange.map_units("continuations", units, sizes, partial(continuations, model, tokenizer))


def continuations(
    model: StreamedModel, tokenizer: PreTrainedTokenizerFast, units: Sequence[Mapping[str, Any]]
) -> Iterator[list[list[int]]]:
    """Yield `generate_batches` of this process's share."""
    for unit in units:
        settings = Generation.model_validate(unit["settings"])
        yield _continue(model, tokenizer, PromptBatch(**{**unit, "settings": settings}))


def _continue(model: StreamedModel, tokenizer: PreTrainedTokenizerFast, batch: PromptBatch) -> list[list[int]]:
    with fork_rng(model.device):
        torch.manual_seed(batch.seed % 2**63)
        return generate_tokens(model, tokenizer, batch.prompts, batch.settings, batch.num_return)


def generate_tokens(
    model: StreamedModel,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[Sequence[int]],
    settings: Generation,
    num_return: int = 1,
    streamer: BaseStreamer | None = None,
    read: RaggedCache | None = None,
) -> list[list[int]]:
    """Generate continuations of prompts, all in each pass over the weights. Finished rows cost nothing.

    Args:
        model: the streamed model.
        tokenizer: tokenizer of the model; EOS ends a row.
        prompts: token ids, one sequence a row, none empty.
        settings: greedy at temperature 0, else sampling from torch's default generator.
        num_return: continuations of each prompt; default 1.
        streamer: receiver of the tokens of a single prompt as they come, not with beams; default: none.
        read: cache of prompts that have been prefilled, see `hf_model.Prefill`.

    Returns: the new tokens of each row, EOS and what follows left out; continuations of a prompt side by side.
    """
    width = max(len(prompt) for prompt in prompts)
    input_ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    attention_mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        input_ids[row, width - len(prompt) :] = torch.tensor(prompt)
        attention_mask[row, width - len(prompt) :] = 1
    eos = int(tokenizer.eos_token_id)
    # Beams that have ended are set aside by the search itself; those of a row that has ended run until all have.
    ends = [eos] if settings.num_beams == 1 and not settings.prompt_lookup_num_tokens else []
    cache = RaggedCache() if read is None else read
    cache.ends = torch.tensor(ends, dtype=torch.int64)
    output = model.generate(
        input_ids.to(model.device),
        attention_mask=attention_mask.to(model.device),
        past_key_values=cache,
        eos_token_id=eos,
        pad_token_id=eos,  # what finished rows are filled with; it is cut off below and enters no loss
        num_return_sequences=num_return,
        streamer=streamer,
        **settings.search_options(),
        **({"tokenizer": tokenizer} if settings.stop else {}),
    )
    return [row[: row.index(eos)] if eos in row else row for row in output[:, width:].tolist()]


def text_of(tokenizer: PreTrainedTokenizerFast, tokens: Sequence[int], settings: Generation) -> str:
    """Decode new tokens to an answer, cut at the first stop string and stripped."""
    return cut_at(tokenizer.decode(tokens, skip_special_tokens=True), settings.stop).strip()


def cut_at(text: str, stop: Sequence[str]) -> str:
    """Cut a text at the first stop string that follows a non-blank character."""
    start = len(text) - len(text.lstrip())
    ends = [at for string in stop if (at := text.find(string, start)) >= 0]
    return text[: min(ends, default=len(text))]


UNFINISHED = "\ufffd"  # what half a character is decoded to


class AnswerStreamer(BaseStreamer):  # type: ignore[misc]
    """Decode tokens incrementally; the pieces shown add up to the answer that decoding at once gives.

    Blanks wait for what follows them, because an answer ends without; so does what may become a stop string.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, settings: Generation, show: Callable[[str], object]) -> None:
        self._tokenizer, self._settings, self._show = tokenizer, settings, show
        self._tokens: list[int] = []
        self._has_prompt = False
        self._shown = ""

    def put(self, value: Tensor) -> None:
        """Receive the prompt first, then new tokens."""
        if not self._has_prompt:
            self._has_prompt = True
            return
        self._tokens += value.flatten().tolist()
        text = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        sure = cut_at(text, self._settings.stop)
        if sure == text:
            sure = text[: len(text) - self._held_back(text)]
        self._advance(sure.strip().rstrip(UNFINISHED).rstrip())

    def end(self) -> None:
        """Show the remaining text."""
        self._advance(text_of(self._tokenizer, self._tokens, self._settings))

    def _held_back(self, text: str) -> int:
        """Count the trailing characters that may begin a stop string."""
        starts = (stop[:length] for stop in self._settings.stop for length in range(1, len(stop)))
        return max((len(start) for start in starts if text.endswith(start)), default=0)

    def _advance(self, text: str) -> None:
        if text.startswith(self._shown) and len(text) > len(self._shown):
            self._show(text[len(self._shown) :])
            self._shown = text
