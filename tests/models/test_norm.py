"""Test the root-mean-square norm."""

from __future__ import annotations

import pytest
import torch

from gptj_ft.models.norm import RMSNorm


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("is_trained", [True, False])
def test_norm_gradients_match_autograd(offset: float, is_trained: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    norm = RMSNorm(12, 1e-5, offset)
    norm.weight = torch.nn.Parameter(torch.randn(12, generator=generator), requires_grad=is_trained)
    x, gradient = (torch.randn(7, 12, generator=generator) for _ in range(2))
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    weight = norm.weight.detach().clone().requires_grad_()
    expected = theirs * (theirs.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * (offset + weight)
    expected.backward(gradient)
    norm(ours).backward(gradient)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)
    if is_trained:
        torch.testing.assert_close(norm.weight.grad, weight.grad, rtol=1e-5, atol=1e-6)
    else:
        assert norm.weight.grad is None
