"""Test rotary position embedding against plain arithmetic and `transformers`."""

from __future__ import annotations

import pytest
import torch

from gptj_ft.models.batch import pack
from gptj_ft.models.rotary import apply_rotary, rotary_freqs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [12, 7])
def test_rotation_and_gradient_match_pair_arithmetic(dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(0)
    batch = pack([[1] * 9, [1] * 4])
    x = torch.randn(13, 2, width).to(dtype).requires_grad_()
    gradient, rotary_dim = torch.randn(x.shape).to(dtype), 6
    out = apply_rotary(x, rotary_freqs(batch, rotary_dim), in_place=False)
    (ours,) = torch.autograd.grad(out, x, gradient)
    exact = x.detach().double().requires_grad_()
    angles = batch.positions_T[:, None] * 10000.0 ** (-torch.arange(0, rotary_dim, 2).double() / rotary_dim)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    even, odd = exact[..., :rotary_dim:2], exact[..., 1:rotary_dim:2]
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    expected = torch.cat((turned, exact[..., rotary_dim:]), -1)
    (theirs,) = torch.autograd.grad(expected, exact, gradient.double())
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out.detach().double(), expected.detach(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance)
