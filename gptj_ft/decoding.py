"""The streamed model as a `transformers` model that can generate: search, sampling and stopping come from there.

`transformers` pads a batch on the left; here the padding is taken off again, and every prompt of the batch shares
each pass over the weights as a document of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoConfig, DynamicCache, GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from gptj_ft.families import Architecture
from gptj_ft.layers import KVCache, pack
from gptj_ft.recipe import Generation
from gptj_ft.stack import LayerStack
from gptj_ft.streaming import next_token_logits

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BATCH_TOKENS = 16384  # of prompts that share the passes over the weights


class RaggedCache(DynamicCache):  # type: ignore[misc]
    """What `transformers` believes to be its cache: it counts padded columns and carries ours."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = KVCache()
        self.num_columns = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the columns seen so far, padding included: `generate` feeds only what comes after."""
        return self.num_columns

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Follow the beams that survived."""
        self.kv.select(beam_idx.tolist())


class StreamedModel(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """A causal language model whose weights are in a `LayerStack`. Only inference; logits of the last position only."""

    _is_stateful = False

    def __init__(self, architecture: Architecture, stack: LayerStack) -> None:
        super().__init__(AutoConfig.for_model(**architecture.raw))
        self.stack = stack
        self.generation_config = GenerationConfig()  # the settings come with each call, not from the folder

    @property
    def device(self) -> torch.device:
        return self.stack.device

    @property
    def dtype(self) -> torch.dtype:
        return self.stack.compute_dtype

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: RaggedCache | None = None,
        **ignored: Any,
    ) -> CausalLMOutputWithPast:
        """Compute the next token's logits of each row.

        Args:
            input_ids: new columns, int64 [rows, columns].
            attention_mask: 0 at padding, [rows, columns seen before and now]; none: no padding.
            past_key_values: made by `generate_tokens`; none: nothing came before.
            ignored: what `generate` passes on to models that need it.

        Returns: logits fp32 [rows, 1, vocabulary].
        """
        cache = past_key_values if past_key_values is not None else RaggedCache()
        rows, columns = input_ids.shape
        if attention_mask is None:
            attention_mask = torch.ones(rows, cache.num_columns + columns, dtype=torch.int64)
        is_token = attention_mask[:, -columns:].bool().cpu()
        starts = attention_mask[:, :-columns].sum(1).tolist()
        documents = [ids[kept].tolist() for ids, kept in zip(input_ids.cpu(), is_token, strict=True)]
        batch = pack(documents, starts=starts, cache=cache.kv).to(self.stack.device)
        cache.num_columns += columns
        return CausalLMOutputWithPast(logits=next_token_logits(self.stack, batch)[:, None], past_key_values=cache)


def generate_tokens(
    model: StreamedModel,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[Sequence[int]],
    settings: Generation,
) -> list[list[int]]:
    """Continue prompts, all of them in each pass over the weights.

    Args:
        model: the streamed model.
        tokenizer: its tokenizer; EOS ends a row.
        prompts: token ids, one sequence a row, none empty.
        settings: greedy at temperature 0, else sampling from torch's default generator.

    Returns: the new tokens of each row, EOS and what follows left out.
    """
    width = max(len(prompt) for prompt in prompts)
    input_ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    attention_mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        input_ids[row, width - len(prompt) :] = torch.tensor(prompt)
        attention_mask[row, width - len(prompt) :] = 1
    sampling = (
        {"do_sample": True, "temperature": settings.temperature, "top_p": settings.top_p, "top_k": settings.top_k}
        if settings.temperature > 0
        else {"do_sample": False}
    )
    eos = int(tokenizer.eos_token_id)
    stop = {"stop_strings": list(settings.stop), "tokenizer": tokenizer} if settings.stop else {}
    output = model.generate(
        input_ids.to(model.device),
        attention_mask=attention_mask.to(model.device),
        past_key_values=RaggedCache(),
        max_new_tokens=settings.max_new_tokens,
        eos_token_id=eos,
        pad_token_id=eos,  # what finished rows are filled with; it is cut off below and enters no loss
        **sampling,
        **stop,
    )
    return [row[: row.index(eos)] if eos in row else row for row in output[:, width:].tolist()]


def write_answers(
    model: StreamedModel,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[Sequence[int]],
    settings: Generation,
) -> Iterator[tuple[int, str]]:
    """Yield (row, text) for each prompt, longest prompts first so that rows of like length share a batch.

    Text ends before the first stop string and is stripped.
    """
    order = sorted(range(len(prompts)), key=lambda row: (-len(prompts[row]), row))
    while order:
        count = max(1, BATCH_TOKENS // (len(prompts[order[0]]) + settings.max_new_tokens))
        rows, order = order[:count], order[count:]
        answers = generate_tokens(model, tokenizer, [prompts[row] for row in rows], settings)
        for row, tokens in zip(rows, answers, strict=True):
            text = tokenizer.decode(tokens, skip_special_tokens=True)
            yield row, cut_at(text, settings.stop).strip()


def cut_at(text: str, stop: Sequence[str]) -> str:
    """Return the text up to the first stop string that comes after something was said."""
    start = len(text) - len(text.lstrip())
    ends = [at for string in stop if (at := text.find(string, start)) >= 0]
    return text[: min(ends, default=len(text))]
