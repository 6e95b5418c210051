"""Initialise the weights of a model that starts from nothing, as `transformers` does."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from gptj_ft.models.dropout import seed_of
from gptj_ft.models.embedding import Embedding
from gptj_ft.models.linear import Conv1D, Linear
from gptj_ft.models.registry import Architecture


def initial_layer(architecture: Architecture, layer: int, seed: int) -> Mapping[str, Tensor]:
    """Draw a layer's parameters in fp32, each from its own seed.

    Matrices are normal with the config's ``initializer_range``, biases zero; norms start as the identity.
    """
    module = architecture.skeleton[layer]
    return {name: _initial(architecture, layer, name, seed) for name in module.state_dict()}


def _initial(architecture: Architecture, layer: int, name: str, seed: int) -> Tensor:
    skeleton, family = architecture.skeleton[layer], architecture.family
    path, _, kind = name.rpartition(".")
    module, values = skeleton.get_submodule(path), torch.empty(skeleton.get_parameter(name).shape)
    if kind == "bias":
        return values.zero_()
    if not isinstance(module, Embedding | Linear | Conv1D):
        # Norms that multiply by offset + weight start at zero if the offset is one.
        return values.fill_(1.0 - getattr(module, "offset", 0.0))
    std = architecture.config.initializer_range
    if name.endswith(family.residual_outputs):
        std /= math.sqrt(2 * architecture.config.n_layer)
    values.normal_(0.0, std, generator=torch.Generator().manual_seed(seed_of((seed, layer, name))))
    if isinstance(module, Embedding) and module.padding_row is not None:
        values[module.padding_row] = 0.0
    return values
