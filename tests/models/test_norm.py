"""Test RMS norms and gated activations against `transformers`."""

from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2FN
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from gptj_ft.models.gated import ACTIVATIONS, gated
from gptj_ft.models.norm import RMSNorm

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2e-2}


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
