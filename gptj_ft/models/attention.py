"""Causal or bidirectional attention within the documents of a packed batch.

Grouped heads: K key heads divide N query heads. Query head ``n`` reads key head ``n // (N / K)``.

Axis letters: T tokens of a packed batch, N query heads, K key heads, R = N / K query heads of a key head, H head width,
G documents of a bucket, L its length.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gptj_ft.models.batch import SHORT, Bucket, BucketIndex, Documents, PackedBatch
from gptj_ft.models.chunked_attention import ScoreRule, attend_backward, attend_forward
from gptj_ft.models.dropout import Dropout, NoiseSpan, mask_to, masked
from gptj_ft.system.machine import bf16_unit

log = logging.getLogger(__name__)
CPU = torch.device("cpu")
FUSED_DEVICE = "cpu"  # has the fused kernel of `_CausalAttention`


@lru_cache
def takes_ragged(device: torch.device, dtype: torch.dtype, head_width: int, is_grouped: bool = False) -> bool:
    """Tell whether a device has a kernel for attention within many documents, by trying it forward and backward.

    The kernel is FlashAttention for half precision; devices and head widths are limited. The ``meta`` device passes, so
    that plans assume it.
    """
    if device.type == "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return False
    if device.type == "meta":  # untried: the meter of a plan would count the trial's kernels
        return True
    try:
        # The first caller may be in inference mode, which records no graph for backward.
        with torch.inference_mode(mode=False), torch.enable_grad():
            q_TNH, k_TKH = (
                torch.ones(3, heads, head_width, dtype=dtype, device=device, requires_grad=True)
                for heads in (1 + is_grouped, 1)
            )
            tokens_T = torch.zeros(3, dtype=torch.int64, device=device)
            attend_ragged(q_TNH, k_TKH, k_TKH, PackedBatch(tokens_T, tokens_T, tokens_T, (0, 1, 3))).sum().backward()  # type: ignore[no-untyped-call]
    except (ImportError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        log.warning("no ragged attention kernel, attending document by document: %s", str(error).partition("\n")[0])
        return False
    return True


def attend_ragged(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    batch: PackedBatch,
    scale: float | None = None,
    is_causal: bool = True,
    window: int | None = None,
) -> Tensor:
    """Attend within all documents by one kernel, without a cache; see `takes_ragged`."""
    from torch.nn.attention.varlen import varlen_attn

    ends, group = batch.cu_seqlens_T, q_TNH.shape[1] // k_TKH.shape[1]
    grouped: dict[str, Any] = {}
    if group > 1 and "enable_gqa" in inspect.signature(varlen_attn).parameters:
        grouped = {"enable_gqa": True}
    elif group > 1:  # torch 2.11
        k_TKH, v_TKH = (x.repeat_interleave(group, 1) for x in (k_TKH, v_TKH))
    out = varlen_attn(
        q_TNH.contiguous(), k_TKH.contiguous(), v_TKH.contiguous(), ends, ends, batch.longest, batch.longest,
        # Keys visible before and after each query; -1: all of the document.
        scale=scale, window_size=(-1 if window is None else window - 1, 0 if is_causal else -1), **grouped,
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out


def attend(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    batch: PackedBatch,
    layer: int,
    scale: float | None = None,
    dropout: Dropout | None = None,
    window: int | None = None,
    cap: float | None = None,
) -> Tensor:
    """Attend causally within each document, and within its branches; softmax in fp32.

    With a cache, queries also see the cached keys of their document.

    Args:
        scale: factor of the scores; default: 1/sqrt(H).
        dropout: dropout of the attention weights.
        window: keys that a query sees, its own included; default: all earlier ones.
        cap: scores become ``cap * tanh(score / cap)``; default: no cap.

    Returns:
        [T, N, H].
    """
    rule = ScoreRule(q_TNH.shape[-1] ** -0.5 if scale is None else scale, window, cap)
    if batch.parents_T is not None:
        return attend_in_branches(q_TNH, k_TKH, v_TKH, batch, rule)
    group = q_TNH.shape[1] // k_TKH.shape[1]
    if dropout is not None and dropout.rate and batch.seeds is not None:
        k_TNH, v_TNH = (x.repeat_interleave(group, 1) if group > 1 else x for x in (k_TKH, v_TKH))
        return attend_in_buckets(q_TNH, k_TNH, v_TNH, batch.documents, scale, dropout, True, window, cap)
    if batch.cache is not None:
        if batch.is_decode_step:
            return batch.cache.attend(layer, q_TNH, k_TKH, v_TKH, rule)
        batch.cache.put(layer, k_TKH, v_TKH, batch.cu_seqlens, batch.document_ids)
    if cap is None and takes_ragged(q_TNH.device, q_TNH.dtype, q_TNH.shape[-1], group > 1):
        return attend_ragged(q_TNH, k_TKH, v_TKH, batch, scale, window=window)
    if q_TNH.device.type == FUSED_DEVICE:
        out: Tensor = _CausalAttention.apply(q_TNH, k_TKH, v_TKH, batch.documents, rule)  # type: ignore[no-untyped-call]
        return out
    if cap is not None or rule.is_windowed(batch.longest):
        out = _ChunkedAttention.apply(q_TNH, k_TKH, v_TKH, batch.documents, rule)  # type: ignore[no-untyped-call]
        return out
    if len(batch.documents.buckets) < len(batch.cu_seqlens) - 1:
        return attend_in_buckets(q_TNH, k_TKH, v_TKH, batch.documents, scale, is_causal=True)
    # Heads of a group read their keys with stride 0, without a copy, if the key heads are the kernel's batch axis.
    groups = 1 if group == 1 else k_TKH.shape[1]
    # Split instead of slicing: each slice's gradient would be a zero-padded tensor of the whole batch.
    parts = zip(*(_by_document(x, batch.documents, groups)[:-1] for x in (q_TNH, k_TKH, v_TKH)), strict=True)
    outputs = []
    for q, *keys in parts:
        k, v = (x.expand(-1, q.shape[1], -1, -1) for x in keys)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[-2] > 1, scale=scale)
        outputs.append(out.flatten(0, 1).transpose(0, 1))
    return torch.cat([*outputs, q_TNH.new_zeros(batch.num_fillers, *q_TNH.shape[1:])])


def attend_in_branches(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, batch: PackedBatch, rule: ScoreRule) -> Tensor:
    """Attend from each token to those before it in its branch, one document after another; for scoring only.

    Tokens before the first branch need no mask; so the mask has rows for the branches only, however long the prompt is.
    """
    documents, dtype = batch.documents, attention_dtype(q_TNH.dtype, q_TNH.device)
    out_TNH = q_TNH.new_zeros(q_TNH.shape)
    parts = zip(*(x.split_with_sizes(documents.sizes)[:-1] for x in (q_TNH, k_TKH, v_TKH, out_TNH)), strict=True)
    for number, (q_LNH, k_LKH, v_LKH, out_LNH) in enumerate(parts):
        seen_BL = _seen_in_branches(batch, number, rule.window)
        trunk = len(q_LNH) - len(seen_BL)  # tokens before the first branch
        attend_forward(out_LNH[:trunk], q_LNH[:trunk], k_LKH[:trunk], v_LKH[:trunk], rule, dtype)
        q, k, v = _repeat(*(x.to(dtype).transpose(0, 1)[None] for x in (q_LNH[trunk:], k_LKH, v_LKH)))
        if rule.cap is None:
            out = F.scaled_dot_product_attention(q, k, v, seen_BL, scale=rule.scale)
        else:
            scores = (q * rule.factor @ k.transpose(2, 3)).float().tanh_().mul_(rule.cap)
            out = scores.masked_fill_(~seen_BL, -math.inf).softmax(-1).to(dtype) @ v
        out_LNH[trunk:] = out[0].transpose(0, 1)
    return out_TNH


def _seen_in_branches(batch: PackedBatch, number: int, window: int | None) -> Tensor:
    """Return the keys that each of the last B tokens of a document sees, bool [B, L], once for all layers.

    The tokens before them follow one another: they see all earlier ones, within the window.
    """
    documents, key = batch.documents, ("branches", number, window)
    if key not in documents.hidden:
        start, end = documents.cu_seqlens[number : number + 2]
        parents = (batch.on_host("parents_T")[start:end] - start).tolist()
        trunk = next((row for row, parent in enumerate(parents) if row and parent != row - 1), len(parents))
        seen_BL = torch.zeros(len(parents) - trunk, len(parents), dtype=torch.bool)
        for row, parent in enumerate(parents[trunk:]):
            # A token sees what the token before it sees, and itself.
            if parent < trunk:
                seen_BL[row, : parent + 1] = True
            else:
                seen_BL[row] = seen_BL[parent - trunk]
            seen_BL[row, trunk + row] = True
        if window is not None:
            positions_L = batch.on_host("positions_T")[start:end]
            seen_BL &= positions_L[trunk:, None] - positions_L < window
        documents.hidden[key] = seen_BL.to(documents.device)
    kept = documents.hidden[key]
    assert kept is not None
    return kept


class _CausalAttention(torch.autograd.Function):
    """Causal attention on a CPU by torch's fused kernel; long documents one by one, short ones in buckets.

    Long documents with grouped heads, windows or capped scores are attended by chunks. Saves only its inputs, its
    output and, from the fused kernel, one number per row and head.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, documents: Documents, rule: ScoreRule) -> Tensor:
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        # Without AMX this kernel takes two to five times as long in bf16. Measured, 2,048 tokens in documents of 40,
        # 6 heads of 64, one thread of an AMD EPYC with AVX-512: 45 ms forward and backward in bf16, 15 in fp32.
        out, norms, dtype = q.new_empty(q.shape), [], attention_dtype(q.dtype, q.device)
        ways = _Ways.of(q, k, documents, rule)
        *inputs, out_parts = (_by_document(x, documents) for x in (q, k, v, out))
        for i in ways.fused:
            taken = tuple(parts[i].to(dtype) for parts in inputs)
            values, norm = attend(*taken, 0.0, True, attn_mask=None, scale=rule.scale)
            out_parts[i].copy_(values)
            norms.append(norm)
        for bucket in ways.buckets:  # causal: no token attends to the padding behind it
            taken = _repeat(*(bucket.take(x).to(dtype) for x in (q, k, v)))
            values, norm = attend(*taken, 0.0, True, attn_mask=None, scale=rule.scale)
            bucket.put(out, values)
            norms.append(norm)
        *rows, out_rows = (x.split_with_sizes(documents.sizes) for x in (q, k, v, out))
        for i in ways.chunked:
            q_part, k_part, v_part = (parts[i] for parts in rows)
            attend_forward(out_rows[i], q_part, k_part, v_part, rule, dtype)
        # Uninitialized filler rows may hold NaN, which times a zero gradient is NaN in the weights' gradients.
        out[documents.cu_seqlens[-1] :] = 0.0
        # Concatenated: kept graphs handle every saved tensor separately.
        flat = torch.cat([norm.flatten() for norm in norms]) if norms else q.new_empty(0)
        ctx.save_for_backward(q, k, v, out, flat)
        ctx.documents, ctx.rule, ctx.shapes = documents, rule, [norm.shape for norm in norms]
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        q, k, v, out, flat = ctx.saved_tensors
        documents, rule, dtype = ctx.documents, ctx.rule, attention_dtype(q.dtype, q.device)
        ways = _Ways.of(q, k, documents, rule)
        input_gradients = [x.new_empty(x.shape) for x in (q, k, v)]
        flats = flat.split_with_sizes([shape.numel() for shape in ctx.shapes])
        norms = [norm.view(shape) for norm, shape in zip(flats, ctx.shapes, strict=True)]
        inputs = [_by_document(x, documents) for x in (gradients[0], q, k, v, out)]
        outputs = [_by_document(x, documents) for x in input_gradients]
        for i, norm in zip(ways.fused, norms, strict=False):
            taken = tuple(parts[i].to(dtype) for parts in inputs)
            results = attend(*taken, norm, 0.0, True, attn_mask=None, scale=rule.scale)
            for parts, result in zip(outputs, results, strict=True):
                parts[i].copy_(result)
        for bucket, norm in zip(ways.buckets, norms[len(ways.fused) :], strict=True):
            taken = _repeat(*(bucket.take(x).to(dtype) for x in (q, k, v)))
            gradient, out_part = bucket.take_gradient(gradients[0]).to(dtype), bucket.take(out).to(dtype)
            results = attend(gradient, *taken, out_part, norm, 0.0, True, attn_mask=None, scale=rule.scale)
            for x_TNH, result in zip(input_gradients, results, strict=True):
                bucket.put(x_TNH, _add_up(result, x_TNH.shape[1]))
        rows = [x.split_with_sizes(documents.sizes) for x in (gradients[0], q, k, v, out, *input_gradients)]
        for i in ways.chunked:
            dout, q_part, k_part, v_part, out_part, *written = (parts[i] for parts in rows)
            attend_backward((written[0], written[1], written[2]), (dout, q_part, k_part, v_part, out_part), rule, dtype)
        for x_TNH in input_gradients:
            # Filler rows were not computed either: their gradients are zero.
            x_TNH[documents.cu_seqlens[-1] :] = 0.0
        return *input_gradients, None, None


class _ChunkedAttention(torch.autograd.Function):
    """Causal attention on an accelerator by chunks of queries; the documents of a bucket are further heads.

    Saves its inputs and its output.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, documents: Documents, rule: ScoreRule) -> Tensor:
        index = documents.index(1, in_token_order=True)
        taken = [_to_bucket_heads(x, documents, index) for x in (q, k, v)]
        out_P, outs = _new_bucket_heads(q, documents, index)
        for out, *inputs in zip(outs, *taken, strict=True):
            attend_forward(out, inputs[0], inputs[1], inputs[2], rule, q.dtype)
        out = out_P.index_select(0, index.slot_T).view_as(q)
        ctx.save_for_backward(q, k, v, out)
        ctx.documents, ctx.rule = documents, rule
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        q, k, v, out = ctx.saved_tensors
        documents = ctx.documents
        index = documents.index(1, in_token_order=True)
        taken = [_to_bucket_heads(x, documents, index) for x in (gradients[0], q, k, v, out)]
        made = [_new_bucket_heads(x, documents, index) for x in (q, k, v)]
        for bucket, written, inputs in zip(
            documents.buckets, zip(*(parts for _, parts in made), strict=True), zip(*taken, strict=True), strict=True
        ):
            if bucket.is_padding_LG1 is not None:
                # Padding repeats a real row, whose gradient must not count again.
                gradient_LGW = inputs[0].view(bucket.length, len(bucket.documents), -1)
                gradient_LGW.masked_fill_(bucket.is_padding_LG1, 0.0)
            attend_backward(written, inputs, ctx.rule, q.dtype)
        results = (x_P.index_select(0, index.slot_T) for x_P, _ in made)
        return *(x.view_as(like) for x, like in zip(results, (q, k, v), strict=True)), None, None


def _to_bucket_heads(x_TNH: Tensor, documents: Documents, index: BucketIndex) -> list[Tensor]:
    """Gather the rows of each bucket with its documents as further heads, [L, G N, H]."""
    return _bucket_heads(x_TNH.flatten(1).index_select(0, index.source_P), documents, x_TNH.shape[2])


def _new_bucket_heads(x_TNH: Tensor, documents: Documents, index: BucketIndex) -> tuple[Tensor, list[Tensor]]:
    """Allocate rows for all slots, zero for fillers, and return them with views like those of `_to_bucket_heads`."""
    x_PW = x_TNH.new_empty(len(index.source_P), x_TNH[0].numel())
    if documents.num_fillers:
        x_PW[-documents.num_fillers :] = 0.0
    return x_PW, _bucket_heads(x_PW, documents, x_TNH.shape[2])


def _bucket_heads(x_PW: Tensor, documents: Documents, width: int) -> list[Tensor]:
    sizes = [len(bucket.documents) * bucket.length for bucket in documents.buckets]
    parts = x_PW.split_with_sizes([*sizes, documents.num_fillers])[:-1]
    return [part.view(bucket.length, -1, width) for part, bucket in zip(parts, documents.buckets, strict=True)]


class _Ways(NamedTuple):
    """Numbers of the documents to attend by torch's kernel, by chunks, and by torch's kernel in buckets."""

    fused: list[int]
    chunked: list[int]
    buckets: list[Bucket]

    @classmethod
    def of(cls, q_TNH: Tensor, k_TKH: Tensor, documents: Documents, rule: ScoreRule) -> _Ways:
        """Choose by the document alone, so that it has the same bits in any batch."""
        takes_none = rule.cap is not None
        long, buckets = documents.split(0 if takes_none else min(SHORT, rule.window or SHORT))
        is_plain = q_TNH.shape == k_TKH.shape and not takes_none
        fused = [i for i in long if is_plain and not rule.is_windowed(documents.sizes[i])]
        return cls(fused, [i for i in long if i not in set(fused)] if len(fused) < len(long) else [], buckets)


def _by_document(x_TNH: Tensor, documents: Documents, groups: int = 1) -> Sequence[Tensor]:
    """Return the rows of each document, [groups, heads of a group, L, H], then the fillers."""
    rows, heads, width = x_TNH.shape
    parts_TKRH = x_TNH.view(rows, groups, heads // groups, width)
    return parts_TKRH.permute(1, 2, 0, 3).split_with_sizes(documents.sizes, 2)


def _repeat(q_GNLH: Tensor, k_GKLH: Tensor, v_GKLH: Tensor) -> tuple[Tensor, ...]:
    """Copy keys and values for each head of their group."""
    group = q_GNLH.shape[1] // k_GKLH.shape[1]
    if group == 1:
        return q_GNLH, k_GKLH, v_GKLH
    return q_GNLH, k_GKLH.repeat_interleave(group, 1), v_GKLH.repeat_interleave(group, 1)


def _add_up(x_GNLH: Tensor, num_heads: int) -> Tensor:
    """Sum gradients over the query heads of each of ``num_heads`` key heads; changes its argument."""
    # One by one: `Tensor.sum` orders its additions by the whole shape, so a document's bits would depend on its bucket.
    groups, heads, length, width = x_GNLH.shape
    first, *others = x_GNLH.view(groups, num_heads, heads // num_heads, length, width).unbind(2)
    for other in others:
        first += other
    return first


@lru_cache
def attention_dtype(dtype: torch.dtype, device: torch.device = CPU) -> torch.dtype:
    """Return the type of attention's products: that of the queries; on a CPU fp32, except bf16 with AMX."""
    if device.type != "cpu":
        return dtype
    return dtype if dtype == torch.bfloat16 and bf16_unit() == "AMX" else torch.float32


def attend_both_ways(
    q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, batch: PackedBatch, dropout: Dropout | None = None
) -> Tensor:
    """Attend from each token to all tokens of its document; scores scaled by 1/sqrt(H), softmax in fp32.

    Returns:
        [T, N, H].
    """
    drops = dropout is not None and dropout.rate and batch.seeds is not None
    if not drops and takes_ragged(q_TNH.device, q_TNH.dtype, q_TNH.shape[-1]):
        return attend_ragged(q_TNH, k_TNH, v_TNH, batch, is_causal=False)
    return attend_in_buckets(q_TNH, k_TNH, v_TNH, batch.documents, None, dropout)


def attend_in_buckets(
    q_TNH: Tensor,
    k_TNH: Tensor,
    v_TNH: Tensor,
    documents: Documents,
    scale: float | None = None,
    dropout: Dropout | None = None,
    is_causal: bool = False,
    window: int | None = None,
    cap: float | None = None,
) -> Tensor:
    """Attend by one call per bucket of documents, which is faster for short documents than a call for each.

    Args:
        k_TNH, v_TNH: may have fewer, grouped heads with a causal mask, without dropout and window.
        scale: factor of the scores; default: 1/sqrt(H).
        dropout: dropout of the attention weights, seeded per document, which no fused kernel supports.
        is_causal: whether tokens see no later ones.
        window, cap: see `attend`; a cap needs dropout, since the fused kernel has none.
    """
    width, scale = q_TNH.shape[-1], q_TNH.shape[-1] ** -0.5 if scale is None else scale
    drops = dropout is not None and dropout.rate and documents.seeds is not None
    assert cap is None or drops
    taken = zip(*(_to_buckets(x_TNH, documents) for x_TNH in (q_TNH, k_TNH, v_TNH)), strict=True)
    outputs = []
    for number, (q, k, v) in enumerate(taken):
        if dropout is not None and drops:
            hidden = _hidden(number, documents, is_causal, window, q.dtype)
            kept = _kept(number, documents, dropout, q.shape[1])
            attention: Any = _DroppedAttention if documents.keys_T is None else _DroppedDeviceAttention
            out = attention.apply(q, k, v, hidden, kept, scale, dropout.scale, cap)
        elif is_causal and window is None:
            out = _attend_causally(q, k, v, scale)
        else:
            hidden = _hidden(number, documents, is_causal, window, q.dtype)
            seen = ~hidden if hidden is not None and hidden.dtype == torch.bool else hidden
            out = F.scaled_dot_product_attention(q, k, v, seen, scale=scale)
        outputs.append(out.reshape(-1, width))
    if documents.num_fillers:
        outputs.append(q_TNH.new_zeros(documents.num_fillers * q_TNH.shape[1], width))
    index = documents.index(q_TNH.shape[1])
    out_PH = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    out_TH: Tensor = _Gather.apply(out_PH, index.slot_T, index.source_P, False)  # type: ignore[no-untyped-call]
    return out_TH.view_as(q_TNH)


def _attend_causally(q_GNLH: Tensor, k_GKLH: Tensor, v_GKLH: Tensor, scale: float) -> Tensor:
    """Attend by torch's fused kernel. No token sees the padding behind it."""
    # Heads of a group read their keys with stride 0, without a copy, if the key heads are part of the batch axis.
    group = q_GNLH.shape[1] // k_GKLH.shape[1]
    q_BRLH = q_GNLH.reshape(-1, group, *q_GNLH.shape[2:])
    k_BRLH, v_BRLH = (x.flatten(0, 1)[:, None].expand(-1, group, -1, -1) for x in (k_GKLH, v_GKLH))
    return F.scaled_dot_product_attention(q_BRLH, k_BRLH, v_BRLH, is_causal=True, scale=scale)


def _unseen(bucket: Bucket, is_causal: bool, device: torch.device, window: int | None = None) -> Tensor | None:
    """Return the mask of invisible keys, bool [G, 1, 1 or L, L]; ``None``: all are visible."""
    # Only keys are masked: padding queries see tokens, since a softmax over no key at all is NaN.
    unseen = None if bucket.mask_GL is None else ~bucket.mask_GL[:, None, None]
    if is_causal:
        later_LL = torch.ones(bucket.length, bucket.length, dtype=torch.bool, device=device).triu(1)
        unseen = later_LL[None, None] if unseen is None else unseen | later_LL
        if window is not None:
            earlier_LL = torch.ones_like(later_LL).tril(-window)
            # Padding queries see all tokens, since none may be within their window.
            unseen = unseen | (earlier_LL if bucket.mask_GL is None else earlier_LL & bucket.mask_GL[:, None, :, None])
    return unseen


def _hidden(
    number: int, documents: Documents, is_causal: bool, window: int | None, dtype: torch.dtype
) -> Tensor | None:
    """Return the mask of a bucket's invisible keys: bool, or on an accelerator -inf, once for all layers."""
    if documents.device.type == "cpu" and documents.keys_T is None:
        return _unseen(documents.buckets[number], is_causal, documents.device, window)
    key = number, is_causal, window, dtype
    if key not in documents.hidden:
        unseen = _unseen(documents.buckets[number], is_causal, documents.device, window)
        if unseen is not None:
            unseen = torch.zeros_like(unseen, dtype=dtype).masked_fill_(unseen, -math.inf)
        documents.hidden[key] = unseen
    return documents.hidden[key]


def _kept(number: int, documents: Documents, dropout: Dropout, num_heads: int) -> Tensor:
    """Draw which attention weights of a bucket to keep, bool [G, N, L, L], for each document by its own seed."""
    bucket = documents.buckets[number]
    if documents.keys_T is not None:
        return dropout.hashed_squares(documents.slot_keys[number], num_heads)
    assert documents.seeds is not None
    noise = tuple(NoiseSpan(documents.seeds[document], 0, num_heads, num_heads) for document in bucket.documents)
    return dropout.mask_squares(noise, bucket.length, documents.device)


def _to_buckets(x_TNH: Tensor, documents: Documents) -> list[Tensor]:
    """Gather the rows of each bucket, [G, N, L, H]. Padding has no gradient, since nothing attends to it."""
    num_heads, width = x_TNH.shape[1:]
    index = documents.index(num_heads)
    x_PH: Tensor = _Gather.apply(x_TNH.flatten(0, 1), index.source_P, index.slot_T, True)  # type: ignore[no-untyped-call]
    shapes = [(len(bucket.documents), num_heads, bucket.length, width) for bucket in documents.buckets]
    sizes = [math.prod(shape[:3]) for shape in shapes]
    sizes += [documents.num_fillers * num_heads] if documents.num_fillers else []
    parts = x_PH.split_with_sizes(sizes) if len(sizes) > 1 else (x_PH,)  # a split's backward pass copies
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=False)]  # parts have fillers in addition


class _Gather(torch.autograd.Function):
    """Gather rows, forward and backward: every row has at most one slot with a gradient.

    The backward pass of `torch.index_select` would add gradients row by row, in one thread.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, inverse: Tensor, has_padding: bool) -> Tensor:
        ctx.save_for_backward(rows, inverse)
        ctx.has_padding = has_padding
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        rows, inverse = ctx.saved_tensors
        if ctx.has_padding:  # rows repeat: gather each row's own slot
            return gradients[0].index_select(0, inverse), None, None, None
        # Padding slots keep a zero gradient; each other slot is written once.
        zeros = gradients[0].new_zeros(len(inverse), gradients[0].shape[1])
        return zeros.index_copy_(0, rows, gradients[0]), None, None, None


class _DroppedAttention(torch.autograd.Function):
    """Attention with a dropout mask on its weights; takes less memory and fewer passes than autograd."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        unseen: Tensor | None,
        keep: Tensor,
        scale: float,
        kept: float,
        cap: float | None,
    ) -> Tensor:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))  # bmm wants one batch axis
        scores = torch.bmm(q, k.transpose(1, 2)).mul_(scale).view(keep.shape)
        tanh = []
        if cap is not None:
            tanh = [scores.div_(cap).tanh_().flatten(0, 1)]
            scores = scores * cap
        if unseen is not None and unseen.shape[-2] == 1:  # adding a broadcast row takes a sixth of masked_fill's time
            scores += torch.zeros(unseen.shape, dtype=scores.dtype, device=scores.device).masked_fill_(
                unseen, -math.inf
            )
        elif unseen is not None:
            scores.masked_fill_(unseen, -math.inf)
        weights = scores.softmax(-1, dtype=torch.float32).flatten(0, 1)
        keep = keep.flatten(0, 1)
        ctx.save_for_backward(q, k, v, weights, keep, *tanh)
        ctx.scale, ctx.kept, ctx.num_heads = scale, kept, scores.shape[1]
        return torch.bmm(mask_to(keep, v.dtype).mul_(kept).mul_(weights.to(v.dtype)), v)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        q, k, v, weights, keep, *tanh = ctx.saved_tensors
        (gradient,) = gradients
        # The mask is converted again: keeping it as numbers would take two or four times the memory.
        scaled = mask_to(keep, v.dtype).mul_(ctx.kept)
        dv = torch.bmm((weights.to(v.dtype) * scaled).transpose(1, 2), gradient)
        dweights = torch.bmm(gradient, v.transpose(1, 2)).mul_(scaled).float()
        # dweights is the gradient of the weights before dropout: masked and scaled like the weights themselves.
        dscores = torch._softmax_backward_data(dweights, weights, -1, torch.float32).to(q.dtype).mul_(ctx.scale)
        if tanh:
            dscores.mul_(1.0 - tanh[0].square())
        dq, dk = torch.bmm(dscores, k), torch.bmm(q.transpose(1, 2), dscores).transpose(1, 2)
        shape = len(keep) // ctx.num_heads, ctx.num_heads, *q.shape[1:]
        return dq.view(shape), dk.reshape(shape), dv.view(shape), None, None, None, None, None


class _DroppedDeviceAttention(torch.autograd.Function):
    """`_DroppedAttention` in fewer launches, for accelerators; its weights have the type of the queries.

    Kernels of softmax compute in fp32. In half precision, rounded weights save four conversions and half of the memory.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        hidden: Tensor | None,
        keep: Tensor,
        scale: float,
        kept: float,
        cap: float | None,
    ) -> Tensor:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        scores = _scaled_product(q, k.transpose(1, 2), scale if cap is None else scale / cap).view(keep.shape)
        tanh = []
        if cap is not None:
            tanh = [scores.tanh_()]
            scores = scores * cap
        if hidden is not None:
            scores += hidden
        weights = scores.softmax(-1)
        ctx.save_for_backward(q, k, v, weights, keep, *tanh)
        ctx.scale, ctx.kept = scale, kept
        return torch.bmm(masked(weights, keep, kept).flatten(0, 1), v)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        q, k, v, weights, keep, *tanh = ctx.saved_tensors
        (gradient,) = gradients
        dropped = masked(weights, keep, ctx.kept).flatten(0, 1)
        dv = torch.bmm(dropped.transpose(1, 2), gradient)
        dweights = masked(torch.bmm(gradient, v.transpose(1, 2)).view(keep.shape), keep, ctx.kept)
        dscores = torch._softmax_backward_data(dweights, weights, -1, weights.dtype)
        if tanh:
            dscores.mul_(1.0 - tanh[0].square())
        dscores = dscores.flatten(0, 1)
        dq, dk = _scaled_product(dscores, k, ctx.scale), _scaled_product(dscores.transpose(1, 2), q, ctx.scale)
        shape = *keep.shape[:2], *q.shape[1:]
        return dq.view(shape), dk.view(shape), dv.view(shape), None, None, None, None, None


def _scaled_product(left: Tensor, right: Tensor, factor: float) -> Tensor:
    """Multiply batches of matrices and scale the result, in one kernel."""
    return torch.baddbmm(left.new_empty(1, 1, 1), left, right, beta=0.0, alpha=factor)  # the first factor is not read
