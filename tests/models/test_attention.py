"""Test causal attention on a CPU: neither grouping nor type changes a document's result."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gptj_ft.models import attention, chunked_attention, kv_cache
from gptj_ft.models.attention import attend, attend_both_ways
from gptj_ft.models.batch import Documents, PackedBatch, few_groups, pack, padded_length
from gptj_ft.models.dropout import Dropout
from gptj_ft.models.kv_cache import KVCache

LENGTHS = (5, 70, 31, 7, 1, 34, 30, 8, 33, 6)  # short ones are filled up to 8 and 32, and computed together
HEADS, WIDTH = 6, 12
CPU = torch.device("cpu")


Rule = tuple[int, int | None, float | None]
# Key heads, window, cap. Windows of 5 and 33 cut short and long documents, within a chunk of queries and beyond.
RULES: list[Rule] = [
    (6, None, None), (2, None, None), (1, None, None), (6, 33, None), (2, 5, None), (2, None, 1.5), (6, 33, 1.5),
]  # fmt: skip


def inputs(dtype: torch.dtype, key_heads: int = HEADS) -> tuple[PackedBatch, list[Tensor], Tensor]:
    """Return a batch with fillers; queries, keys and values; the gradient of the output."""
    torch.manual_seed(0)
    batch = pack([[1] * length for length in LENGTHS]).padded()
    rows = len(batch.tokens_T)
    assert batch.num_fillers
    taken = [torch.randn(rows, heads, WIDTH).to(dtype).requires_grad_() for heads in (HEADS, key_heads, key_heads)]
    gradient = torch.randn(rows, HEADS, WIDTH).to(dtype)
    gradient[batch.cu_seqlens[-1] :] = 0.0
    return batch, taken, gradient


def found(batch: PackedBatch, taken: list[Tensor], gradient: Tensor, rule: Rule, **more: Any) -> list[Tensor]:
    """Return attention and its gradients."""
    out = attend(*taken, batch, 0, window=rule[1], cap=rule[2], **more)
    return [out.detach(), *torch.autograd.grad(out, taken, gradient)]


def reference(
    q: Tensor, k: Tensor, v: Tensor, window: int | None = None, cap: float | None = None, is_causal: bool = True
) -> Tensor:
    """Return the attention of one document, with all scores."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
    unseen = (distance < 0) & is_causal | (distance >= (window or len(q)))
    scores = torch.einsum("qnh,knh->nqk", q, k) * WIDTH**-0.5
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    return torch.einsum("nqk,knh->qnh", F.softmax(scores.masked_fill(unseen, -torch.inf), -1), v)


@pytest.mark.parametrize("takes_groups", [True, False])
def test_key_heads_are_repeated_for_kernels_without_groups(takes_groups: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, dict[str, Any]]] = []

    def kernel(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Tensor:
        assert torch.equal(k, v)
        seen.append((k.shape[1], options))
        return q

    def old(q: Tensor, k: Tensor, v: Tensor, *rest: Any, scale: float | None, window_size: Any) -> Tensor:
        assert torch.equal(k[:, 0], k[:, 1]), "a group's query heads read the same keys"
        return kernel(q, k, v)

    def new(q: Tensor, k: Tensor, v: Tensor, *rest: Any, scale: Any, window_size: Any, enable_gqa: bool) -> Tensor:
        return kernel(q, k, v, enable_gqa=enable_gqa)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", new if takes_groups else old)  # of torch 2.13, of 2.11
    batch, (q, k, _), _ = inputs(torch.bfloat16, key_heads=2)
    attention.attend_ragged(q, k, k, batch)
    assert seen == [(2, {"enable_gqa": True}) if takes_groups else (HEADS, {})]


@pytest.mark.parametrize("rule", RULES)
def test_document_bits_are_independent_of_batch(rule: Rule) -> None:
    batch, taken, gradient = inputs(torch.float32, rule[0])
    together = found(batch, taken, gradient, rule)
    for start, end in pairwise(batch.cu_seqlens):
        parts = [x[start:end].detach().requires_grad_() for x in taken]
        alone = found(pack([[1] * (end - start)]), parts, gradient[start:end], rule)
        for ours, theirs in zip(alone, together, strict=True):
            assert torch.equal(ours, theirs[start:end]), end - start
    for each in together:
        assert not each[batch.cu_seqlens[-1] :].any(), "fillers"


def test_bits_are_independent_of_number_of_threads() -> None:
    batch, results, before = pack([[1] * 100]), [], torch.get_num_threads()
    torch.manual_seed(0)
    taken = [torch.randn(100, heads, 64).requires_grad_() for heads in (16, 4, 4)]
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(found(batch, taken, taken[0].detach(), (4, 40, 1.5)))
    torch.set_num_threads(before)
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("key_heads", [HEADS, 2])
def test_wide_window_changes_no_bit(key_heads: int) -> None:
    batch, taken, gradient = inputs(torch.float32, key_heads)
    wide = found(batch, taken, gradient, (key_heads, max(LENGTHS), None))
    for ours, theirs in zip(wide, found(batch, taken, gradient, (key_heads, None, None)), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 4e-2)])
def test_attention_and_gradients_match_fp64_torch(dtype: torch.dtype, tolerance: float, rule: Rule) -> None:
    batch, taken, gradient = inputs(dtype, rule[0])
    compare(batch, taken, found(batch, taken, gradient, rule), gradient, rule, tolerance)


def compare(
    batch: PackedBatch, taken: list[Tensor], ours: list[Tensor], gradient: Tensor, rule: Rule, tolerance: float,
    is_causal: bool = True,
) -> None:  # fmt: skip
    """Compare attention and its gradients with the reference in fp64, document by document."""
    for start, end in pairwise(batch.cu_seqlens):
        parts = [x[start:end].detach().double().requires_grad_() for x in taken]
        out = reference(*parts, *rule[1:], is_causal)
        theirs = [out, *torch.autograd.grad(out, parts, gradient[start:end].double())]
        for each, expected in zip(ours, theirs, strict=True):
            assert each.dtype == taken[0].dtype
            torch.testing.assert_close(each[start:end].double(), expected.detach(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("is_hashed", [False, True])
def test_dropout_path_matches_fp64_torch(is_hashed: bool, rule: Rule) -> None:
    """Drop nothing that is visible at this tolerance: a rate of 1e-9."""
    batch, taken, gradient = inputs(torch.float32, rule[0])
    seeded = replace(batch, seeds=tuple(range(len(LENGTHS))))
    if is_hashed:  # as on an accelerator, where batches have no fillers
        end = batch.cu_seqlens[-1]
        seeded = replace(seeded, tokens_T=seeded.tokens_T[:end])
        vars(seeded)["keys"] = seeded._host_keys()
        taken, gradient = [x[:end].detach().requires_grad_() for x in taken], gradient[:end]
    compare(batch, taken, found(seeded, taken, gradient, rule, dropout=Dropout(1e-9, 0)), gradient, rule, 2e-6)


@pytest.mark.parametrize("rate", [0.0, 1e-9])
def test_bidirectional_attention_matches_fp64_torch(rate: float) -> None:
    batch, taken, gradient = inputs(torch.float32)
    seeded = replace(batch, seeds=tuple(range(len(LENGTHS))))
    out = attend_both_ways(*taken, seeded, Dropout(rate, 0))
    ours = [out.detach(), *torch.autograd.grad(out, taken, gradient)]
    compare(batch, taken, ours, gradient, (HEADS, None, None), 2e-6, is_causal=False)


def test_dropout_drops_per_query_head() -> None:
    batch, (q, k, v), _ = inputs(torch.float32, 2)
    seeded = replace(batch, seeds=tuple(range(len(LENGTHS))))
    grouped = attend(q, k, v, seeded, 0, dropout=Dropout(0.5, 0))
    expanded = attend(q, *(x.repeat_interleave(3, 1) for x in (k, v)), seeded, 0, dropout=Dropout(0.5, 0))
    assert torch.equal(grouped, expanded)
    assert not torch.equal(grouped, attend(q, k, v, batch, 0))


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule[1] != 33] + [(2, 7, 1.5)])
@pytest.mark.parametrize(("beams", "prompts"), [(1, (4, 9)), (1, (9, 9)), (2, (4, 9))])
def test_decoding_matches_full_attention(
    rule: Rule, beams: int, prompts: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode two prompts, with beams that swap and finish, and compare with one pass over each row's tokens."""
    torch.manual_seed(0)
    monkeypatch.setattr(kv_cache, "MORE_ROOM", 0)  # so that unseen slots are dropped early
    (key_heads, window, cap), new = rule, 16
    cache = KVCache()
    cache.begin(prompts, beams, CPU)
    rows = [[torch.randn(length, heads, WIDTH) for heads in (HEADS, key_heads, key_heads)] for length in prompts]
    filled = [torch.cat(parts) for parts in zip(*rows, strict=True)]
    attend(*filled, pack([[1] * length for length in prompts], cache=cache), 0, window=window, cap=cap)
    rows = [row for row in rows for _ in range(beams)]
    for step in range(new):
        columns = 3 if beams == 1 and step == 5 else 1  # as prompt lookup does
        positions = cache.begin_decode_step(columns, torch.float32)
        assert positions[:, 0].tolist() == [len(row[0]) for row in rows]
        tokens = [torch.randn(len(rows), columns, heads, WIDTH) for heads in (HEADS, key_heads, key_heads)]
        ids = torch.ones(len(rows) * columns, dtype=torch.int64)
        batch = PackedBatch(ids, ids, ids, tuple(range(0, len(ids) + 1, columns)), cache, is_decode_step=True)
        out = attend(*(x.flatten(0, 1) for x in tokens), batch, 0, window=window, cap=cap)
        rows = [[torch.cat((x, t[i])) for x, t in zip(row, tokens, strict=True)] for i, row in enumerate(rows)]
        for i, row in enumerate(rows):
            expected = reference(*row, window, cap)[-columns:]
            torch.testing.assert_close(out[i * columns : (i + 1) * columns], expected, rtol=1e-6, atol=1e-6)
        if columns == 3:
            cache.crop(2)
            rows = [[x[:-2] for x in row] for row in rows]
        order = [0, 1, 2, 3][: len(rows)]
        if step == new - 4:
            order.pop()  # a row finishes
        elif beams > 1 and len(rows) == 4 and step % 2:
            order = [1, 1, 2, 3] if step % 4 == 1 else [1, 0, 3, 2]
        cache.select(torch.tensor(order))
        rows = [rows[i] for i in order]


@pytest.mark.parametrize("rule", RULES)
def test_accelerator_path_matches_fp64_torch(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attend as on an accelerator without a ragged kernel: by torch's public function, or by large chunks."""
    batch, taken, gradient = inputs(torch.float32, rule[0])
    monkeypatch.setattr(attention, "FUSED_DEVICE", "none")
    monkeypatch.setattr(chunked_attention, "CPU_CHUNK", chunked_attention.ACCELERATOR_CHUNK)
    compare(batch, taken, found(batch, taken, gradient, rule), gradient, rule, 2e-6)


@pytest.mark.parametrize(("num_heads", "in_token_order"), [(1, False), (3, False), (1, True)])
def test_index_made_on_device_equals_host(num_heads: int, in_token_order: bool) -> None:
    """Make the index of heads from the table of slots, as on an accelerator."""
    ends = tuple(accumulate(LENGTHS, initial=0))
    on_device, on_host = (Documents(ends, None, CPU) for _ in range(2))
    vars(on_host)["buckets"] = on_device._device_buckets()
    made, expected = on_device._device_index(num_heads, in_token_order), on_host.index(num_heads, in_token_order)
    assert torch.equal(made.source_P, expected.source_P)
    assert torch.equal(made.slot_T, expected.slot_T)


def test_few_groups_hold_all_documents_once() -> None:
    for lengths in (LENGTHS, (0, 300, 0, 12), (2000,) * 3, (16,) * 100 + (400,)):
        groups = few_groups(lengths)
        assert sorted(i for _, group in groups for i in group) == [i for i, length in enumerate(lengths) if length]
        for longest, group in groups:
            assert longest == padded_length(max(lengths[i] for i in group))
            assert longest * len(group) <= 2 * sum(padded_length(lengths[i]) for i in group)
    assert [len(group) for _, group in few_groups((128,) * 64)] == [32, 32]
