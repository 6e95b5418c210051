"""Gated activation (https://arxiv.org/abs/2002.05202): the inner step of the MLP of Llama, Mistral, Qwen and Gemma."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ATEN = torch.ops.aten
# ``hidden_act`` of config.json -> activation, and the function that writes the gradient of its input, from the gradient
# of its output and its input.
ACTIVATIONS: Mapping[str, tuple[Callable[[Tensor], Tensor], Callable[..., Tensor]]] = {
    **dict.fromkeys(("silu", "swish"), (F.silu, ATEN.silu_backward.grad_input)),
    "gelu": (F.gelu, ATEN.gelu_backward.grad_input),
    **dict.fromkeys(
        ("gelu_pytorch_tanh", "gelu_new"),
        (partial(F.gelu, approximate="tanh"), partial(ATEN.gelu_backward.grad_input, approximate="tanh")),
    ),
}


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Return ``activation(gate) * up``; backward computes the activation again instead of keeping it."""
    out: Tensor = _Gated.apply(gate, up, activation)  # type: ignore[no-untyped-call]
    return out


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return ACTIVATIONS[activation][0](gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        (gradient,), (activate, differentiate) = gradients, ACTIVATIONS[ctx.activation]
        of_gate = gradient * up
        return differentiate(of_gate, gate, grad_input=of_gate), activate(gate).mul_(gradient), None
