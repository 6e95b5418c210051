"""The streamed model as a `transformers` model that can generate: search, sampling and stopping come from there.

`transformers` pads a batch on the left; here the padding is taken off again, and every prompt of the batch shares
each pass over the weights as a document of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from transformers import AutoConfig, DynamicCache, GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from gptj_ft.errors import NotFinite
from gptj_ft.families import Architecture
from gptj_ft.kv_cache import KVCache
from gptj_ft.layers import PackedBatch, pack
from gptj_ft.passage import Passage, Visit
from gptj_ft.stack import LayerStack
from gptj_ft.streaming import forward, stream


class Passes:
    """Passes over the same weights, one after another: while one ends, the next one's first layers are on their way."""

    def __init__(self, stack: LayerStack) -> None:
        self._stack = stack
        self._layers: Iterator[Passage] = iter(())
        self._stream: Iterable[object] | None = None  # ours, as long as nobody has begun another on this stack

    def logits(self, batch: PackedBatch, positions: Tensor) -> Tensor:
        """Return the logits after some tokens of a batch, fp32 [positions, V]."""
        stack, top = self._stack, len(self._stack.layers) - 1
        if stack.coming is not self._stream:
            stack.take_slots()  # memory that is first taken while writing could not be trained with afterwards
            self._layers = stream(stack, (Visit(layer) for layer in cycle(range(top + 1))))
        self._stream = None  # a pass that is broken off leaves the next one nothing to go on from
        (hidden,) = forward(islice(self._layers, top), [batch])
        head = next(self._layers)
        with torch.inference_mode():
            logits: Tensor = functional_call(head.module, head.parameters(), (hidden[positions],))
        self._stream = stack.coming
        return logits


class RaggedCache(DynamicCache):  # type: ignore[misc]
    """What `transformers` believes to be its cache: it counts padded columns and carries ours.

    Attributes:
        ends: tokens after which a row needs no more logits; none: `transformers` is not told to stop at them.
        rows: those that are still computed, of the ones that `transformers` sees.
    """

    def __init__(self, ends: Sequence[int] = ()) -> None:
        super().__init__()
        self.kv = KVCache()
        self.num_columns = 0
        self.ends = torch.tensor(ends, dtype=torch.int64)
        self.rows: Tensor | None = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the columns seen so far, padding included: `generate` feeds only what comes after."""
        return self.num_columns

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Follow the beams that survived."""
        self.kv.select(beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Take columns back, so many as the number is below zero: guesses that were wrong."""
        self.num_columns += tokens_to_remove
        self.kv.crop(-tokens_to_remove)

    def live(self, tokens: Tensor) -> Tensor:
        """Drop the rows that have ended; return the numbers of those that have not.

        Args:
            tokens: the newest columns of the rows that `transformers` sees, int64 [rows, columns].
        """
        rows = torch.arange(len(tokens), device=tokens.device) if self.rows is None else self.rows
        if len(self.ends):
            has_ended = torch.isin(tokens[rows, -1], self.ends.to(tokens.device))
            if bool(has_ended.any()):
                self.kv.select((~has_ended).nonzero().squeeze(1))
                rows = rows[~has_ended]
        self.rows = rows
        return rows


class StreamedModel(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """A causal language model whose weights are in a `LayerStack`. Only inference."""

    _is_stateful = False

    def __init__(self, architecture: Architecture, stack: LayerStack) -> None:
        super().__init__(AutoConfig.for_model(**architecture.raw))
        self.stack = stack
        self.passes = Passes(stack)
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
        past_key_values: DynamicCache | None = None,
        logits_to_keep: int = 0,
        **ignored: Any,
    ) -> CausalLMOutputWithPast:
        """Compute the logits after the newest columns.

        Args:
            input_ids: new columns, int64 [rows, columns].
            attention_mask: 0 at padding, which may only be on the left, [rows, columns seen before and now]; none: no
                padding.
            past_key_values: what the last call returned; none, or an empty one: nothing came before.
            logits_to_keep: columns to return the logits of, the last ones; 0: all.
            ignored: what `generate` passes on to models that need it.

        Returns: logits fp32 [rows, columns kept, vocabulary]; zeros at padding and in rows that have ended.

        Raises:
            NotFinite: logits that are no numbers.
        """
        cache = past_key_values if isinstance(past_key_values, RaggedCache) else RaggedCache()
        columns = input_ids.shape[1]
        kept = min(logits_to_keep or columns, columns)
        if cache.num_columns:
            logits = self._go_on(input_ids, cache, kept)
        else:
            is_token = None if attention_mask is None else attention_mask[:, -columns:].bool()
            logits = self._begin(input_ids, is_token, cache, kept)
        cache.num_columns += columns
        return CausalLMOutputWithPast(logits=logits, past_key_values=cache)

    def _begin(self, input_ids: Tensor, is_token: Tensor | None, cache: RaggedCache, kept: int) -> Tensor:
        """Read the prompts; rows that go on from the same one read it once."""
        if is_token is None:
            is_token = torch.ones_like(input_ids, dtype=torch.bool)
        width = _equal_rows(input_ids.masked_fill(~is_token, -1))
        ids, is_token = input_ids[::width].cpu(), is_token[::width].cpu()
        batch = pack([row[real].tolist() for row, real in zip(ids, is_token, strict=True)], cache=cache.kv)
        cache.kv.begin(is_token.sum(1).tolist(), width, self.device)
        wanted = is_token[:, -kept:]
        place = is_token.flatten().cumsum(0).view_as(is_token)[:, -kept:] - 1
        logits = self._checked(batch.to(self.device), place[wanted].to(self.device))
        full = logits.new_zeros(*wanted.shape, logits.shape[-1])
        full[wanted.to(self.device)] = logits
        return full.repeat_interleave(width, 0)

    def _go_on(self, input_ids: Tensor, cache: RaggedCache, kept: int) -> Tensor:
        """Read the newest tokens of the rows that have not ended."""
        num_rows, columns = input_ids.shape
        rows = cache.live(input_ids)
        if not len(rows):
            return torch.zeros(num_rows, kept, self.config.vocab_size, device=self.device)
        ids = input_ids[rows]
        positions = cache.kv.go_on(columns, self.dtype)
        bounds = tuple(range(0, ids.numel() + 1, columns))
        batch = PackedBatch(ids.flatten(), positions.flatten(), ids, bounds, cache.kv, goes_on=True)
        wanted = torch.arange(ids.numel(), device=self.device).view_as(ids)[:, -kept:]
        logits = self._checked(batch, wanted.flatten()).view(len(rows), kept, -1)
        if len(rows) == num_rows:
            return logits.clone()  # `generate` may change it in place, which autograd does not allow as it is
        return logits.new_zeros(num_rows, kept, logits.shape[-1]).index_copy(0, rows, logits)

    def _checked(self, batch: PackedBatch, positions: Tensor) -> Tensor:
        logits = self.passes.logits(batch, positions)
        if not math.isfinite(logits.sum().item()):
            raise NotFinite(
                "the model's output is not finite: its weights are damaged, or too large for "
                f"{str(self.dtype).removeprefix('torch.')}; try --precision fp32, or another checkpoint"
            )
        return logits


def _equal_rows(rows: Tensor) -> int:
    """Return into how many equal rows each different one has been multiplied, next to each other."""
    if len(rows) == 1:
        return 1
    is_other = (rows[1:] != rows[:-1]).any(1).tolist()
    runs, length = list[int](), 1
    for other in is_other:
        runs, length = ([*runs, length], 1) if other else (runs, length + 1)
    return math.gcd(*runs, length)
