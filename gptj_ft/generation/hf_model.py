"""Wrap the streamed model as a `transformers` model, which provides search, sampling and stopping.

`transformers` pads a batch on the left. The wrapper removes the padding and packs the prompts as documents, which share
each pass over the weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, DynamicCache, GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from gptj_ft.data.batches import first_fit
from gptj_ft.errors import DataError, NotFinite
from gptj_ft.models.batch import HeadRows, PackedBatch, pack
from gptj_ft.models.kv_cache import KVCache
from gptj_ft.models.registry import Architecture
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.streaming.prefetch import Prefetcher
from gptj_ft.streaming.schedule import inference_tasks
from gptj_ft.streaming.scoring import TokenQuery, TokenScores, score_hidden
from gptj_ft.streaming.step import forward

COMPUTED_TOKENS = 2048


class ForwardPasses:
    """Run forward passes in sequence; the end of one pass prefetches the first layers of the next."""

    def __init__(self, offloaded: OffloadedModel) -> None:
        self._offloaded = offloaded
        self._layers: Prefetcher | None = None

    def read(
        self, batches: Sequence[PackedBatch], positions: Sequence[Tensor], queries: Sequence[TokenQuery] = ()
    ) -> tuple[Tensor, list[TokenScores]]:
        """Compute logits at some positions, fp32 [positions of all batches, V], and score token queries.

        Args:
            batches: batches that share the pass.
            positions: positions to return logits of, for each batch.
            queries: token queries of each batch; default: none.
        """
        # If this pass fails, the next one starts with a new prefetcher.
        layers, self._layers = self._layers, None
        if layers is None or not layers.is_active:
            # Slots allocated in inference mode could not be used for training afterwards.
            self._offloaded.pools.allocate_slots()
            layers = Prefetcher(self._offloaded, inference_tasks(cycle(range(len(self._offloaded.layers)))))
        hidden = forward(layers, batches)
        head = next(layers)
        parameters = head.parameters()
        with torch.inference_mode():
            after_SD = torch.cat([x_TD[at] for x_TD, at in zip(hidden, positions, strict=True)])
            logits = head.run(parameters, after_SD, HeadRows("decoding"))
            scores = score_hidden(head, hidden, queries, "decoding") if queries else []
        self._layers = layers
        return logits, scores


class RaggedCache(DynamicCache):  # type: ignore[misc]
    """Cache for `transformers`: counts padded columns and holds the ragged key-value caches."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = KVCache()
        self.num_columns = 0
        self.ends = torch.empty(0, dtype=torch.int64)  # tokens after which a row needs no more logits
        self.rows: Tensor | None = None  # unfinished rows, as numbers of the rows that `transformers` sees
        self.first: Tensor | None = None  # logits after prefilled prompts, fp32 [prompts, V]; see `Prefill`

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of columns seen, including padding; `generate` feeds only later columns."""
        return self.num_columns

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select the rows of the surviving beams."""
        self.kv.select(beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last columns, rejected guesses; ``tokens_to_remove`` is negative."""
        self.num_columns += tokens_to_remove
        self.kv.crop(-tokens_to_remove)

    def drop_finished(self, tokens: Tensor) -> Tensor:
        """Drop finished rows; return the numbers of the others.

        Args:
            tokens: the newest columns of the rows that `transformers` sees, int64 [rows, columns].
        """
        rows = torch.arange(len(tokens), device=tokens.device) if self.rows is None else self.rows
        if len(self.ends):
            has_ended = (tokens[rows, -1, None] == self.ends.to(tokens.device)).any(1)
            if bool(has_ended.any()):
                self.kv.select((~has_ended).nonzero().squeeze(1))
                rows = rows[~has_ended]
        self.rows = rows
        return rows


class StreamedModel(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """A causal language model whose weights are streamed. Inference only.

    Args:
        budget_tokens: number of prompt tokens computed at once.
    """

    # `generate` refuses prompt lookup for models whose cache cannot be cropped.
    _is_stateful = False

    def __init__(
        self, architecture: Architecture, offloaded: OffloadedModel, budget_tokens: int = COMPUTED_TOKENS
    ) -> None:
        try:
            config = AutoConfig.for_model(**architecture.raw)
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            raise DataError(f"`transformers` cannot read config.json: {error}") from error
        super().__init__(config)
        self.offloaded, self.budget_tokens = offloaded, budget_tokens
        self.context = int(architecture.config.n_positions)  # its name in ``config`` differs between families
        self.rotary_switches = architecture.rotary_switches
        self.passes = ForwardPasses(offloaded)
        self.generation_config = GenerationConfig()  # not the folder's: settings come with each call

    @property
    def device(self) -> torch.device:
        return self.offloaded.device

    @property
    def dtype(self) -> torch.dtype:
        return self.offloaded.compute_dtype

    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> dict[str, Any]:
        """Return the arguments of `forward` for the next step of `generate`."""
        return {**super().prepare_inputs_for_generation(input_ids, **kwargs), "all_ids": input_ids}

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: DynamicCache | None = None,
        logits_to_keep: int = 0,
        all_ids: Tensor | None = None,
        **ignored: Any,
    ) -> CausalLMOutputWithPast:
        """Compute the logits of the newest columns.

        Args:
            input_ids: new columns, int64 [rows, columns].
            attention_mask: 0 at padding, which is on the left, [rows, old and new columns]; default: no padding.
            past_key_values: cache returned by the last call; None or empty at the start.
            logits_to_keep: number of last columns to return logits of; 0: all.
            all_ids: old and new columns, int64; needed in a decode step of a model with LongRoPE.
            ignored: further arguments of `generate`.

        Returns:
            Logits, fp32 [rows, kept columns, vocabulary]; zeros at padding and in finished rows.

        Raises:
            NotFinite: logits are not finite.
        """
        cache = past_key_values if isinstance(past_key_values, RaggedCache) else RaggedCache()
        columns = input_ids.shape[1]
        kept = min(logits_to_keep or columns, columns)
        if cache.num_columns:
            logits = self._decode_step(input_ids, cache, kept, all_ids)
        elif cache.first is not None:
            assert kept == 1
            logits = cache.first.repeat_interleave(len(input_ids) // len(cache.first), 0)[:, None]
            cache.first = None
        else:
            is_token = None if attention_mask is None else attention_mask[:, -columns:].bool()
            logits = self._prefill_prompts(input_ids, is_token, cache, kept)
        cache.num_columns += columns
        return CausalLMOutputWithPast(logits=logits, past_key_values=cache)

    def _prefill_prompts(self, input_ids: Tensor, is_token: Tensor | None, cache: RaggedCache, kept: int) -> Tensor:
        """Prefill the prompts; adjacent rows with the same prompt share it."""
        if is_token is None:
            is_token = torch.ones_like(input_ids, dtype=torch.bool)
        # `generate` repeats each prompt once per beam or returned sequence, in adjacent rows.
        width = _equal_rows(input_ids.masked_fill(~is_token, -1))
        ids, is_token = input_ids[::width].cpu(), is_token[::width].cpu()
        prompts = [row[real].tolist() for row, real in zip(ids, is_token, strict=True)]
        counts = list(map(len, prompts))
        cache.kv.begin(counts, width, self.device)
        batches, positions, rows, columns = [], [], list[int](), list[int]()
        for group in first_fit(counts, self.budget_tokens):
            batch = pack([prompts[row] for row in group], cache=cache.kv, document_ids=group)
            last = [min(kept, counts[row]) for row in group]  # columns before them are padding
            spans = [range(end - size, end) for end, size in zip(batch.cu_seqlens[1:], last, strict=True)]
            batches.append(batch.to(self.device))
            positions.append(torch.tensor([at for span in spans for at in span], device=self.device))
            rows += [row for row, size in zip(group, last, strict=True) for _ in range(size)]
            columns += [column for size in last for column in range(kept - size, kept)]
        logits = self.checked(self.passes.read(batches, positions)[0])
        full = logits.new_zeros(len(prompts), kept, logits.shape[-1])
        full[torch.tensor(rows), torch.tensor(columns)] = logits
        return full.repeat_interleave(width, 0)

    def _decode_step(self, input_ids: Tensor, cache: RaggedCache, kept: int, all_ids: Tensor | None) -> Tensor:
        num_rows, columns = input_ids.shape
        rows = cache.drop_finished(input_ids)
        if not len(rows):
            return torch.zeros(num_rows, kept, self.config.vocab_size, device=self.device)
        ids = input_ids[rows]
        lengths = cache.kv.lengths.tolist() if self.rotary_switches else []
        positions = cache.kv.begin_decode_step(columns, self.dtype)
        bounds = tuple(range(0, ids.numel() + 1, columns))
        # Decoding has no targets: `ids` fills an unused field.
        batches = [PackedBatch(ids.flatten(), positions.flatten(), ids, bounds, cache.kv, is_decode_step=True)]
        wanted = [torch.arange(ids.numel(), device=self.device).view_as(ids)[:, -kept:].flatten()]
        # Rows that outgrow a length of LongRoPE are computed again as a whole: all their tokens are rotated otherwise.
        # These batches come last, so that they replace keys, and find room for the new ones.
        order = list(range(len(wanted[0])))
        for row, length in enumerate(lengths):
            if any(length <= switch < length + columns for switch in self.rotary_switches):
                assert columns == 1, "internal error: guesses beyond the trained length"
                assert all_ids is not None, "internal error: unknown earlier tokens"
                document = all_ids[rows[row], -length - 1 :].tolist()
                batches.append(pack([document], cache=cache.kv, document_ids=[row]).to(self.device))
                wanted.append(torch.tensor([length], device=self.device))
                order[row] = len(order) + len(wanted) - 2
        logits = self.checked(self.passes.read(batches, wanted)[0])
        logits = (logits[order] if len(batches) > 1 else logits).view(len(rows), kept, -1)
        if len(rows) == num_rows:
            return logits.clone()  # `generate` may write to it, which is not allowed for a tensor of inference mode
        return logits.new_zeros(num_rows, kept, logits.shape[-1]).index_copy(0, rows, logits)

    def checked(self, logits: Tensor) -> Tensor:
        """Return the logits; raise `NotFinite` if they are not finite."""
        # NaN and infinity survive the sum, so only one number leaves the device.
        if not math.isfinite(logits.sum().item()):
            raise NotFinite(
                "the model's output is not finite: its weights are damaged, or too large for "
                f"{str(self.dtype).removeprefix('torch.')}; try --precision fp32, or another checkpoint"
            )
        return logits


class Prefill:
    """Prefill documents once: score token queries on them, then generate from their prompts.

    Args:
        counts: tokens of each document's prompt, with which the document starts.
        width: rows to generate from each prompt.
    """

    def __init__(self, model: StreamedModel, counts: Sequence[int], width: int) -> None:
        self._model, self._counts = model, counts
        self.cache = RaggedCache()  # for `generate`, after `score`
        self.cache.kv.begin(counts, width, model.device)

    def score(self, batches: Sequence[PackedBatch], queries: Sequence[TokenQuery]) -> list[TokenScores]:
        """Score token queries on all documents, as `score_tokens` does."""
        # Documents continue after their prompts. The logits at the end of each prompt start the generation, and
        # `KVCache.begin` has the prompts' lengths: it keeps only their keys and values.
        own = [replace(batch, cache=self.cache.kv) for batch in batches]
        ends = [
            torch.tensor(
                [start + self._counts[n] - 1 for start, n in zip(batch.cu_seqlens, batch.document_ids, strict=False)]
            )
            for batch in own
        ]
        logits, scores = self._model.passes.read(own, ends, queries)
        order = torch.tensor([number for batch in own for number in batch.document_ids]).argsort()
        self.cache.first = self._model.checked(logits)[order.to(logits.device)]
        return scores


def _equal_rows(rows: Tensor) -> int:
    """Return the largest width that splits the rows into groups of equal adjacent rows."""
    if len(rows) == 1:
        return 1
    is_other = (rows[1:] != rows[:-1]).any(1).tolist()
    runs, length = list[int](), 1
    for other in is_other:
        runs, length = ([*runs, length], 1) if other else (runs, length + 1)
    # Equal prompts in sequence make longer runs: only a common divisor splits all of them evenly.
    return math.gcd(*runs, length)
