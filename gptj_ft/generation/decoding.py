"""Decode: generate tokens with `transformers`' search, and turn them into answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from gptj_ft.config.options import Generation
from gptj_ft.generation.hf_model import RaggedCache, StreamedModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast
    from transformers.generation.streamers import BaseStreamer

__all__ = ["StreamedModel", "cut_at", "generate_tokens", "text_of"]


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
