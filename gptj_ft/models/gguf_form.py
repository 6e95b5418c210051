"""Describe how llama.cpp stores a family in GGUF files; each family's module holds its own `GgufForm`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gptj_ft.errors import UsageError
from gptj_ft.models.rotary import RotarySpec, llama3_factors

Metadata = Mapping[str, Any]  # values by key, without the architecture's prefix
TENSORS = "tensors"
FACTORS, LONG_FACTORS, SHORT_FACTORS = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = (FACTORS, LONG_FACTORS, SHORT_FACTORS)
LLAMA3_LENGTH = 8192  # trained length of Llama 3, which llama.cpp's files do not hold


def _nothing(_: Any) -> Metadata:
    return {}


def same_order(config: Any, name: str) -> Tensor | None:
    """Keep the order of all rows."""
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
    """(metadata) -> further fields of config.json. Raises `UsageError` for a model that this family does not cover.
    The key `TENSORS` holds the names of the file's tensors, and the names of `rope_factors` hold numbers.
    """
    row_order: Callable[[Any, str], Tensor | None] = same_order
    """(config, Hugging Face's tensor name) -> for each stored row, its row in Hugging Face's tensor; None: the same."""
    norm_offset: float = 0.0  # added to the weights of norms
    rope_factors: Callable[[Any], Mapping[str, Tensor]] = _nothing
    """(config) -> tensors with divisors of the rotary frequencies, by their names in the file."""


def rotary_metadata(spec: RotarySpec, kinds: tuple[str, ...]) -> dict[str, Any]:
    """Return the keys of a rotary embedding.

    Args:
        kinds: types that llama.cpp computes in this architecture.

    Raises:
        UsageError: another type.
    """
    if spec.kind not in kinds:
        raise UsageError(f"rope_type {spec.kind!r}: llama.cpp computes only {', '.join(kinds)} here")
    own: dict[str, Any] = {"rope.dimension_count": spec.width, "rope.freq_base": spec.theta}
    if spec.kind in ("linear", "yarn"):
        own |= {"rope.scaling.type": spec.kind, "rope.scaling.factor": spec.factor}
    if spec.kind == "yarn":
        if not spec.truncate or abs(spec.attention_factor - (0.1 * math.log(spec.factor) + 1)) > 1e-6:
            raise UsageError("rope_type 'yarn' with truncate, attention_factor or mscale: llama.cpp has its own values")
        own |= {"rope.scaling.yarn_beta_fast": spec.beta_fast, "rope.scaling.yarn_beta_slow": spec.beta_slow}
    if spec.kind == "longrope":
        own |= {"rope.scaling.type": "longrope", "rope.scaling.attn_factor": spec.attention_factor}
    if spec.kind in ("yarn", "longrope", "llama3"):
        own["rope.scaling.original_context_length"] = spec.trained_length
    return own


def rotary_factors(spec: RotarySpec) -> dict[str, Tensor]:
    """Return the divisors of the frequencies that llama.cpp reads as tensors."""
    if spec.kind == "longrope":
        both = {LONG_FACTORS: spec.long_factors, SHORT_FACTORS: spec.short_factors}
        return {name: torch.tensor(factors) for name, factors in both.items()}
    return {FACTORS: llama3_factors(spec)} if spec.kind == "llama3" else {}


def rotary_config(metadata: Metadata) -> dict[str, Any]:
    """Return ``rope_parameters`` of ``config.json``: the inverse of `rotary_metadata` and `rotary_factors`.

    Raises:
        UsageError: another scaling, or factors that are not Llama 3's.
    """
    own: dict[str, Any] = {"rope_theta": metadata.get("rope.freq_base", 10_000.0), "rope_type": "default"}
    kind = metadata.get("rope.scaling.type", "none")
    factor = metadata.get("rope.scaling.factor", metadata.get("rope.scale_linear", 1.0))
    length = metadata.get("rope.scaling.original_context_length")
    if FACTORS in metadata:
        return {"rope_parameters": own | _llama3_parameters(metadata, own["rope_theta"], length or LLAMA3_LENGTH)}
    if LONG_FACTORS in metadata:
        lists = {"long_factor": metadata[LONG_FACTORS], "short_factor": metadata[SHORT_FACTORS]}
        own |= {"rope_type": "longrope", **lists}
        if (attention := metadata.get("rope.scaling.attn_factor")) is not None:
            own["attention_factor"] = attention
        outside = {} if length is None else {"original_max_position_embeddings": length}
        return {"rope_parameters": own, **outside}
    if kind == "yarn":
        own |= {"rope_type": kind, "factor": factor, "original_max_position_embeddings": length}
        betas = {name: metadata.get(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
        own |= {name: value for name, value in betas.items() if value is not None}
    elif kind in ("linear", "none") and factor not in (0.0, 1.0):
        own |= {"rope_type": "linear", "factor": factor}
    elif kind not in ("linear", "none"):
        raise UsageError(f"rope.scaling.type {kind!r} is not supported")
    return {"rope_parameters": own}


def _llama3_parameters(metadata: Metadata, theta: float, length: int) -> dict[str, Any]:
    """Find the parameters of Llama 3's scaling whose factors a file holds."""
    stored = torch.tensor(metadata[FACTORS])
    factor, width = round(float(stored.max()), 4), 2 * len(stored)
    spec = RotarySpec(width, theta, "llama3", factor=factor, trained_length=length)
    if not torch.allclose(llama3_factors(spec), stored, rtol=1e-4, atol=0):
        raise UsageError(f"{FACTORS} are not the factors of Llama 3's scaling, so no config.json can describe them")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": spec.low,
        "high_freq_factor": spec.high,
        "original_max_position_embeddings": length,
    }


def neighbours(num_heads: int, width: int) -> Tensor:
    """Order the rows of a projection for rotary pairs (0, 1), (2, 3), ... instead of (0, H/2), (1, H/2 + 1), ...

    Args:
        num_heads: heads of the projection: key heads for keys.
        width: width of a head.
    """
    return torch.arange(num_heads * width).view(num_heads, 2, width // 2).transpose(1, 2).reshape(-1)
