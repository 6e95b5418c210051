"""Test norms against torch, RMS norms and gated activations against `transformers`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from gptj_ft.models.gated import ACTIVATIONS, gated
from gptj_ft.models.norm import LayerNorm, RMSNorm
from gptj_ft.streaming.loaded_layer import sum_into

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2e-2}
HALF = (torch.bfloat16, torch.float16)


def layer_norm(dtype: torch.dtype) -> tuple[LayerNorm, Tensor, Tensor]:
    """Return a norm with random parameters, 3,000 rows whose mean is not 0, and a gradient of its output."""
    torch.manual_seed(0)
    norm = LayerNorm(256)
    for parameter in norm.parameters():
        parameter.data.normal_(1.0, 0.3)
    x, gradient = torch.randn(3000, 256).mul_(2.0).add_(1.0), torch.randn(3000, 256).add_(0.1)
    return norm.to(dtype), x.to(dtype).requires_grad_(), gradient.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_layer_norm_keeps_bits_of_torch(dtype: torch.dtype) -> None:
    norm, x, gradient = layer_norm(dtype)
    theirs = F.layer_norm(x, (256,), norm.weight, norm.bias, norm.eps)
    expected = torch.autograd.grad(theirs, (x, norm.weight, norm.bias), gradient)
    assert torch.equal(norm(x), theirs)
    num_equal = 3 if dtype == torch.float32 else 1  # else torch sums gradients of parameters in half precision
    of_leaves = torch.autograd.grad(norm(x), (x, norm.weight, norm.bias), gradient)
    assert all(torch.equal(*pair) for pair in zip(of_leaves[:num_equal], expected, strict=False))
    norm.bias.requires_grad_(False)
    assert torch.equal(torch.autograd.grad(norm(x), norm.weight, gradient)[0], of_leaves[1])
    norm.weight.requires_grad_(False)
    assert torch.equal(torch.autograd.grad(norm(x), x, gradient)[0], expected[0]), "frozen"


@pytest.mark.parametrize("dtype", HALF)
def test_half_layer_norm_sums_in_fp32(dtype: torch.dtype) -> None:
    norm, x, gradient = layer_norm(dtype)
    wide = [tensor.detach().double().requires_grad_() for tensor in (norm.weight, norm.bias)]
    expected = torch.autograd.grad(F.layer_norm(x.detach().double(), (256,), *wide), wide, gradient.double())
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for parameter in norm.parameters():
            parameter.grad = None
            sum_into(parameter, torch.zeros(256))
        norm(x).backward(gradient)
        torch.set_num_threads(before)
        for parameter, of_wide in zip(norm.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, of_wide.float(), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(7, 48), (7, 3, 16)])
def test_rms_norm_and_gradients_match_transformers(dtype: torch.dtype, offset: float, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    ours, theirs = RMSNorm(shape[-1], 1e-5, offset), (GemmaRMSNorm if offset else LlamaRMSNorm)(shape[-1], 1e-5)
    theirs.weight.data.normal_(0.3, 0.3)
    ours.weight.data.copy_(theirs.weight.data)
    x, gradient = (torch.randn(shape).to(dtype) for _ in range(2))
    results = []
    for norm in (ours.to(dtype), theirs.to(dtype)):
        given = x.clone().requires_grad_()
        out = norm(given)
        results.append((out, *torch.autograd.grad(out, (given, norm.weight), gradient)))
    for own, expected in zip(*results, strict=True):
        assert own.dtype == dtype
        torch.testing.assert_close(own, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    if dtype == torch.bfloat16:
        assert torch.equal(results[0][0], results[1][0]), "rounded at another place"
    ours.weight.requires_grad_(False)
    given = x.clone().requires_grad_()
    assert torch.equal(torch.autograd.grad(ours(given), given, gradient)[0], results[0][1]), "frozen"


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_activation_and_gradients_match_transformers(activation: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate, up = (torch.randn(9, 17).to(dtype).requires_grad_() for _ in range(2))
    gradient = torch.randn(9, 17).to(dtype)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out = gated(gate, up, activation)
    assert len(kept) == 2
    expected = ACT2FN[activation](gate) * up
    torch.testing.assert_close(out, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    pairs = (torch.autograd.grad(each, (gate, up), gradient) for each in (out, expected))
    for own, theirs in zip(*pairs, strict=True):
        torch.testing.assert_close(own, theirs, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
