"""Describe how llama.cpp stores a family in GGUF files; each family's module holds its own `GgufForm`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Metadata = Mapping[str, Any]  # values by key, without the architecture's prefix


def _nothing(_: Any) -> Metadata:
    return {}


def _no_factors(_: Any) -> Tensor | None:
    return None


def _same_order(config: Any, name: str) -> Tensor | None:
    return None


@dataclass(frozen=True)
class GgufForm:
    """A family's metadata and tensors in llama.cpp's terms.

    Tensor names come from ``gguf.get_tensor_name_map``. The source of the rest are llama.cpp's conversion scripts.
    """

    architecture: str  # ``general.architecture``, and prefix of the family's keys
    fields: Mapping[str, str]  # key of the metadata -> field of config.json
    to_metadata: Callable[[Any], Metadata] = _nothing
    """(config) -> further keys. Raises `UsageError` for a model that llama.cpp would compute differently."""
    to_config: Callable[[Metadata], Metadata] = _nothing
    """(metadata) -> further fields of config.json. Raises `UsageError` for a model that this family does not cover."""
    row_order: Callable[[Any, str], Tensor | None] = _same_order
    """(config, Hugging Face's tensor name) -> for each stored row, its row in Hugging Face's tensor; None: the same."""
    norm_offset: float = 0.0  # added to the weights of norms
    rope_factors: Callable[[Any], Tensor | None] = _no_factors
    """(config) -> divisors of the rotary frequencies, stored as ``rope_freqs.weight``; None: no such tensor."""


def neighbours(num_heads: int, width: int) -> Tensor:
    """Order the rows of a projection for rotary pairs (0, 1), (2, 3), ... instead of (0, H/2), (1, H/2 + 1), ...

    Args:
        num_heads: heads of the projection: key heads for keys.
        width: of a head.
    """
    return torch.arange(num_heads * width).view(num_heads, 2, width // 2).transpose(1, 2).reshape(-1)
