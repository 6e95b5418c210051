"""Compare a DoRA layer with PEFT's, and with the layer that it starts from."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers.pytorch_utils import Conv1D as TransformersConv1D

from gptj_ft.models.dropout import Dropout, Noise, NoiseSpan
from gptj_ft.models.linear import Conv1D, Linear
from gptj_ft.models.lora import DoRALinear, LoRALinear, Rank
from gptj_ft.models.products import Products

WIDTH, HEIGHT, TOKENS = 32, 48, 20
NOISE = Noise((NoiseSpan(7, 0, TOKENS, TOKENS),))


class Masked(torch.nn.Module):
    """Our dropout in PEFT's layer: the masks of torch's own differ."""

    def __init__(self, dropout: Dropout) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(x, NOISE)


def layer_of(kind, is_transposed: bool, dropout: float = 0.0, dtype: torch.dtype = torch.float32):
    """Return a layer with random weight and A, and with zeros in all else."""
    generator = torch.Generator().manual_seed(0)
    linear = Conv1D(WIDTH, HEIGHT) if is_transposed else Linear(WIDTH, HEIGHT)
    layer = kind(linear, Rank(4, 2.0), Dropout(dropout, "adapter"))
    for name, parameter in list(layer.named_parameters()):
        is_random = name in ("weight", "lora_A")
        value = 0.2 * torch.randn(parameter.shape, generator=generator) if is_random else torch.zeros(parameter.shape)
        setattr(layer, name, torch.nn.Parameter(value.to(dtype), requires_grad="lora" in name))
    return layer


def rows_of(noise=None) -> SimpleNamespace:
    return SimpleNamespace(kernel="training", noise=noise)


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm()).item()


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_dora_layer_and_gradients_match_peft(is_transposed: bool, dropout: float) -> None:
    ours = layer_of(DoRALinear, is_transposed, dropout)
    torch.manual_seed(1)
    for parameter in (ours.bias, ours.lora_B, ours.lora_magnitude_vector):
        parameter.data.normal_(0, 0.3)
    base = TransformersConv1D(HEIGHT, WIDTH) if is_transposed else torch.nn.Linear(WIDTH, HEIGHT)
    base.load_state_dict({"weight": ours.weight.detach(), "bias": ours.bias.detach()})
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=["0"], use_dora=True, lora_dropout=dropout, fan_in_fan_out=is_transposed
    )
    theirs = get_peft_model(torch.nn.Sequential(base), config).base_model.model[0].train()
    trained = {name: getattr(theirs, name)["default"].weight for name in ("lora_A", "lora_B", "lora_magnitude_vector")}
    for name, parameter in trained.items():
        # PEFT's magnitude starts as the norms of the weight.
        start = parameter.detach().clone() if "magnitude" in name else 0
        parameter.data.copy_(start + getattr(ours, name))
    if dropout:
        theirs.lora_dropout["default"] = Masked(ours.dropout)
    x, gradient = torch.randn(TOKENS, WIDTH), torch.randn(TOKENS, HEIGHT)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = ours(inputs[0], rows_of(NOISE)), theirs(inputs[1])
    for output in outputs:
        output.backward(gradient)
    pairs = [outputs, (inputs[0].grad, inputs[1].grad)]
    pairs += [(getattr(ours, name).grad, parameter.grad) for name, parameter in trained.items()]
    assert max(relative(*pair) for pair in pairs) < 1e-6


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("kind", [LoRALinear, DoRALinear])
def test_widened_adapter_matches_fp32(kind, is_transposed: bool, monkeypatch) -> None:
    monkeypatch.setattr("gptj_ft.models.products.WIDE_ROWS", 8)  # the last rows are 4
    torch.manual_seed(1)
    values = {name: torch.randn(shape).bfloat16() for name, shape in (("bias", HEIGHT), ("lora_B", (HEIGHT, 4)))}
    x, gradient = torch.randn(TOKENS, WIDTH).bfloat16(), torch.randn(TOKENS, HEIGHT).bfloat16()
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        layer = layer_of(kind, is_transposed, 0.3, torch.bfloat16).to(dtype)
        layer.products = Products(widens=True)
        for name, value in values.items():
            getattr(layer, name).data.copy_(value)
        inputs = x.to(dtype, copy=True).requires_grad_()
        output = layer(inputs, rows_of(NOISE))
        output.backward(gradient.to(dtype))
        results.append([output, inputs.grad, layer.lora_A.grad, layer.lora_B.grad])
    # Rounded to bf16 a few times: outputs, the narrow matrix, the two gradients of the inputs.
    assert max(relative(ours.float(), theirs) for ours, theirs in zip(*results, strict=True)) < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_new_dora_changes_no_bit(dtype: torch.dtype) -> None:
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    outputs = [layer_of(kind, False, dtype=dtype)(x, rows_of()) for kind in (DoRALinear, LoRALinear)]
    assert torch.equal(*outputs)


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0])
def test_dora_norms_match_direct_sum(size: float, is_transposed: bool) -> None:
    layer = layer_of(DoRALinear, is_transposed)
    layer.lora_B.data.normal_(0, size, generator=torch.Generator().manual_seed(1))
    weight = layer.weight.t() if is_transposed else layer.weight
    direct = torch.linalg.norm(weight.double() + 2 * layer.lora_B.double() @ layer.lora_A.double(), dim=1)
    norms = layer._norms()
    torch.testing.assert_close(norms[1].double(), direct, rtol=1e-6, atol=0)
    torch.testing.assert_close(norms[0], torch.linalg.norm(weight, dim=1), rtol=1e-6, atol=0)


def test_dora_of_zero_rows_is_finite() -> None:
    layer = layer_of(DoRALinear, False)
    layer.weight.data[3] = 0
    output = layer(torch.ones(TOKENS, WIDTH), rows_of())
    output.sum().backward()
    assert not output[:, 3].any()
    assert all(getattr(layer, name).grad.isfinite().all() for name in ("lora_A", "lora_B", "lora_magnitude_vector"))
