"""Test own kernels against torch: products, lookups, attention, masks."""

from __future__ import annotations

from functools import partial
from itertools import accumulate, pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gptj_ft.models import linear
from gptj_ft.models.attention import attend_in_buckets
from gptj_ft.models.batch import Documents, padded_length
from gptj_ft.models.dropout import Dropout, Noise, NoiseSpan, row_keys
from gptj_ft.models.embedding import Embedding
from gptj_ft.models.linear import project
from gptj_ft.streaming.loaded_layer import sum_into

CPU = torch.device("cpu")
LENGTHS = (5, 17, 0, 33, 8, 48, 9, 1, 70)


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("has_sum", [True, False])
def test_onednn_products_and_gradients_match_torch(has_bias: bool, is_transposed: bool, has_sum: bool) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(61, 40), torch.randn(24, 40), torch.randn(24)]
    gradient, begun = torch.randn(61, 24), torch.randn(24, 40)
    results = []
    for is_ours in (True, False):
        x, weight, bias = (tensor.clone().requires_grad_() for tensor in tensors)
        if has_sum:
            weight.grad = begun.clone()
        if is_ours and is_transposed:
            stored = weight.detach().t().contiguous().requires_grad_()
            stored.grad = None if weight.grad is None else weight.grad.t().contiguous()
            output = project(x, stored, bias if has_bias else None, "training", is_transposed=True)
        else:
            product = partial(project, kernel="training") if is_ours else F.linear
            output = product(x, weight, bias=bias if has_bias else None)
        output.backward(gradient)
        of_weight = stored.grad.t() if is_ours and is_transposed and stored.grad is not None else weight.grad
        results.append([output.detach(), x.grad, of_weight, *([bias.grad] if has_bias else [])])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sparse_lookup_gradient_has_dense_fp32_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    embedding = Embedding(300, 16)
    indices = torch.cat([(torch.rand(400) ** 3 * 300).long(), torch.zeros(1000, dtype=torch.int64)])
    table, before, gradient = torch.randn(300, 16), torch.randn(300, 16), torch.randn(1400, 16).add_(1.0).to(dtype)
    whole = table.clone().requires_grad_()
    embedding.weight = torch.nn.Parameter(table.to(dtype))
    for leaf in (whole, embedding.weight):
        sum_into(leaf, before.clone())
    F.embedding(indices, whole).backward(gradient.float())
    embedding(indices).backward(gradient)
    assert whole.grad is not None
    assert embedding.weight.grad is not None
    assert torch.equal(embedding.weight.grad, whole.grad)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("rate", "is_hashed"), [(0.0, False), (0.2, False), (0.2, True)])
def test_bucket_attention_matches_single_documents(rate: float, is_hashed: bool, is_causal: bool) -> None:
    torch.manual_seed(0)
    ends, heads, width = tuple(accumulate(LENGTHS, initial=0)), 3, 5
    seeds = tuple(range(70, 70 + len(LENGTHS)))
    spans = [NoiseSpan(seed, 0, length, length) for seed, length in zip(seeds, LENGTHS, strict=True)]
    documents = Documents(ends, seeds, CPU, keys_T=row_keys(spans) if is_hashed else None)  # as on an accelerator
    dropout, tensors = Dropout(rate, 4, "weights"), [torch.randn(ends[-1], heads, width) for _ in range(4)]
    results = []
    for is_ours in (True, False):
        q, k, v = (tensor.clone().requires_grad_() for tensor in tensors[:3])
        if is_ours:
            output = attend_in_buckets(q, k, v, documents, None, dropout, is_causal)
        else:
            parts = []
            for span, (start, end) in zip(spans, pairwise(ends), strict=True):
                scores = torch.einsum("qnh,knh->nqk", q[start:end], k[start:end]) * width**-0.5
                if is_causal:
                    scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float("-inf"))
                length, side = end - start, padded_length(end - start)
                if is_hashed:
                    (drawn,) = dropout.hashed_squares(row_keys([span])[None], heads)
                else:
                    noise = Noise((NoiseSpan(span.seed, 0, heads, heads),))
                    drawn = dropout.mask(noise, (side, side), CPU)[:, :length, :length]
                weights = scores.softmax(-1) * (drawn * dropout.scale if rate else 1.0)
                parts.append(torch.einsum("nqk,knh->qnh", weights, v[start:end]))
            output = torch.cat(parts)
        output.backward(tensors[3])
        results.append([output.detach(), q.grad, k.grad, v.grad])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("width", [7, 8])
def test_joint_masks_equal_single_masks(width: int) -> None:
    dropout = Dropout(0.3, 2, "mlp")
    for start, short in ((0, 0), (1, 0), (0, 1)):
        noise = tuple(
            NoiseSpan(seed, min(start, length), max(length - short, 0), length) for seed, length in enumerate(LENGTHS)
        )
        together = dropout.mask(Noise(noise), (width,), CPU)
        assert torch.equal(together, torch.cat([dropout.mask(Noise((span,)), (width,), CPU) for span in noise]))


@pytest.mark.parametrize("is_transposed", [False, True])
def test_summed_products_round_no_gradient(is_transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sum gradients of weight and bias as on an accelerator, with its product emulated."""

    def add_summed(total: Tensor, left: Tensor, right: Tensor) -> None:
        total += left.float().t() @ right.float()

    monkeypatch.setattr(linear, "has_onednn", lambda x: False)
    monkeypatch.setattr(linear, "sums_products", lambda *_: True)
    monkeypatch.setattr(linear, "add_summed", add_summed)
    torch.manual_seed(0)
    weight, bias = (torch.randn(shape).bfloat16().requires_grad_() for shape in ((24, 40), (24,)))
    stored = weight.detach().t().contiguous().requires_grad_() if is_transposed else weight
    weight_sum, bias_sum = torch.zeros(stored.shape), torch.zeros(24)
    linear.sum_products_into(stored, weight_sum)
    linear.sum_products_into(bias, bias_sum)
    expected = torch.zeros(24, 40), torch.zeros(24)
    for _ in range(3):
        x, gradient = torch.randn(61, 40).bfloat16(), torch.randn(61, 24).bfloat16()
        project(x, stored, bias, "training", is_transposed).backward(gradient)
        expected[0].addmm_(gradient.float().t(), x.float())
        expected[1].add_(gradient.float().sum(0))
    torch.testing.assert_close(weight_sum.t() if is_transposed else weight_sum, expected[0], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(bias_sum, expected[1], rtol=1e-5, atol=1e-4)
    assert stored.grad is None
    assert bias.grad is None


def test_residual_sum_with_hashed_mask_equals_two_steps() -> None:
    torch.manual_seed(0)
    spans = (NoiseSpan(3, 0, 20, 20),)
    noise, dropout = Noise(spans, row_keys(spans)), Dropout(0.3, 1, "mlp")
    gradient, results = torch.randn(20, 8), []
    given = [torch.randn(20, 8) for _ in range(2)]
    for is_fused in (True, False):
        x, update = (each.clone().requires_grad_() for each in given)
        out = dropout.added(x, update, noise) if is_fused else x + dropout(update, noise)
        out.backward(gradient)
        results.append([out.detach(), x.grad, update.grad])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)
