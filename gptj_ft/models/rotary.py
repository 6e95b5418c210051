"""Rotary position embedding (https://arxiv.org/abs/2104.09864), in interleaved pairs (GPT-J) or in halves (Llama).

Axis letters: T tokens of a packed batch, N heads, H head width, R rotary width, F = R/2 frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from gptj_ft.errors import DataError
from gptj_ft.models.batch import PackedBatch

# Fields of ``rope_parameters`` (``rope_scaling`` in old files) that each type needs, without ``rope_theta``,
# ``partial_rotary_factor`` and the trained length.
NEEDED: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
}
OPTIONAL = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor")
KNOWN = {
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings", "truncate",
    "finetuned",  # a remark in files of the first YaRN models
    *OPTIONAL, *(name for names in NEEDED.values() for name in names),
}  # fmt: skip


@dataclass(frozen=True)
class RotarySpec:
    """Frequencies of a rotary embedding, as `transformers` defines its types (``modeling_rope_utils``)."""

    width: int  # R: leading dimensions of a head that are rotated
    theta: float
    kind: str = "default"  # a key of `NEEDED`
    factor: float = 1.0
    trained_length: int = 0  # tokens of a row before the context was extended
    low: float = 1.0  # llama3: lowest frequency kept partly, in turns per trained length
    high: float = 4.0  # llama3: frequencies above are kept
    beta_fast: float = 32.0  # yarn: dimensions with more turns per trained length are kept
    beta_slow: float = 1.0  # yarn: dimensions with fewer are divided by ``factor``
    truncate: bool = True  # yarn: whether these bounds are rounded to whole dimensions
    attention_factor: float = 1.0  # yarn, longrope: factor of cos and sin
    short_factors: tuple[float, ...] = ()  # longrope: divisors of the frequencies, up to the trained length
    long_factors: tuple[float, ...] = ()  # longrope: divisors in longer rows

    @property
    def depends_on_length(self) -> bool:
        """Whether frequencies differ between rows."""
        return self.kind in ("dynamic", "longrope")


def rotary_spec(
    raw: Mapping[str, Any], head_width: int, context: int, theta: float = 10_000.0, layer_type: str | None = None
) -> RotarySpec:
    """Read a rotary embedding from ``rope_parameters`` of ``config.json``, or from the fields of old files.

    Args:
        raw: content of ``config.json``.
        context: ``max_position_embeddings``.
        theta: the family's default of ``rope_theta``.
        layer_type: key of nested ``rope_parameters``, such as ``sliding_attention``.

    Raises:
        DataError: an unsupported type or field, or a value out of range.
    """
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if isinstance(given, Mapping) and isinstance(given.get(layer_type), Mapping):
        given = given[layer_type]
        raw = {name: raw[name] for name in ("rope_theta", "partial_rotary_factor") if name in raw}
    if not isinstance(given, Mapping):
        raise DataError(f"rope_parameters must be an object, not {given!r:.100}")
    own = {name: value for name, value in given.items() if value is not None}
    kind = own.get("rope_type", own.get("type", "default"))
    kind = "longrope" if kind == "su" else kind  # its name in the first files
    if kind not in NEEDED:
        raise DataError(f"rope_type {kind!r} is not supported; known are {', '.join(NEEDED)}")
    if unknown := sorted(own.keys() - KNOWN):
        raise DataError(f"rope_parameters has {unknown[0]!r}, which is not supported")
    if missing := [name for name in NEEDED[kind] if name not in own]:
        raise DataError(f"rope_parameters of type {kind!r} has no {missing[0]}")
    values = {name: _number(name, own[name]) for name in ("factor", "low_freq_factor", "high_freq_factor", *OPTIONAL)
              if name in own}  # fmt: skip
    partial = _number("partial_rotary_factor", own.get("partial_rotary_factor", raw.get("partial_rotary_factor") or 1))
    width = int(head_width * partial)
    if not 2 <= width <= head_width or width % 2:
        raise DataError(f"rotary width {width} of heads of {head_width} must be even, and at most the head's")
    # As in `transformers`, the field outside wins, and two types are not told of an earlier training.
    trained = raw.get("original_max_position_embeddings") or own.get("original_max_position_embeddings") or context
    trained = context if kind in ("linear", "dynamic") else int(_number("original_max_position_embeddings", trained))
    spec = RotarySpec(
        width=width,
        theta=_number("rope_theta", own.get("rope_theta", raw.get("rope_theta") or theta)),
        kind=kind,
        factor=values.get("factor", context / trained),
        trained_length=trained,
        low=values.get("low_freq_factor", 1.0),
        high=values.get("high_freq_factor", 4.0),
        beta_fast=values.get("beta_fast", 32.0),
        beta_slow=values.get("beta_slow", 1.0),
        truncate=bool(own.get("truncate", True)),
        attention_factor=_attention_factor(kind, values, context / trained, trained),
        short_factors=_numbers("short_factor", own, width) if kind == "longrope" else (),
        long_factors=_numbers("long_factor", own, width) if kind == "longrope" else (),
    )
    if kind == "llama3" and spec.high <= spec.low:
        raise DataError("rope_parameters: high_freq_factor must exceed low_freq_factor")
    return spec


def _number(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise DataError(f"{name} must be a positive number, not {value!r:.100}")
    return float(value)


def _numbers(name: str, parameters: Mapping[str, Any], width: int) -> tuple[float, ...]:
    values = parameters[name]
    if not isinstance(values, list) or len(values) != width // 2:
        raise DataError(f"{name} of rope_parameters must have {width // 2} numbers, half the rotary width")
    return tuple(_number(name, value) for value in values)


def _attention_factor(kind: str, values: Mapping[str, float], ratio: float, trained_length: int) -> float:
    """Return the factor of cos and sin: the file's, or the papers' (YaRN 2309.00071, LongRoPE 2402.13753)."""
    factor = values.get("factor", ratio)
    if kind not in ("yarn", "longrope"):
        return 1.0
    if "attention_factor" in values:
        return values["attention_factor"]
    if factor <= 1:
        return 1.0
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(trained_length))
    growth = 0.1 * math.log(factor)
    if "mscale" in values and "mscale_all_dim" in values:
        return (growth * values["mscale"] + 1) / (growth * values["mscale_all_dim"] + 1)
    return growth + 1


def angles(batch: PackedBatch, spec: RotarySpec) -> Tensor:
    """Return the angle of each token and frequency, fp32 [T, F].

    Types that depend on the length use the length of the token's own row, in decoding up to this token, and with
    branches that of the longest; `transformers` uses the longest row of the batch.
    """
    positions_T1 = batch.positions_T[:, None].float()
    if not spec.depends_on_length:
        return positions_T1 * _frequencies(spec, positions_T1.device)
    lengths_T1 = _row_lengths(batch)[:, None]
    if spec.kind == "longrope":
        short_F, long_F = _frequencies(spec, positions_T1.device).unbind()
        return positions_T1 * torch.where(lengths_T1 > spec.trained_length, long_F, short_F)
    # NTK-aware scaling: theta grows with the row, see `transformers`.
    stretch_T1 = spec.factor * lengths_T1.clamp(min=spec.trained_length) / spec.trained_length - (spec.factor - 1)
    theta_T1 = spec.theta * _power(stretch_T1, spec.width / (spec.width - 2))
    return positions_T1 * (1.0 / _power(theta_T1, _exponents(spec.width, positions_T1.device)))


def _power(base: Tensor, exponent: Tensor | float) -> Tensor:
    """Return the power in fp32, computed in fp64 except on MPS, which has no fp64.

    An element's power in fp32 depends in the last bit on its place: vectorized loops compute the rest behind the last
    full vector with another function. An angle would depend on the other rows of a batch.
    """
    return base**exponent if base.device.type == "mps" else (base.double() ** exponent).float()


def _row_lengths(batch: PackedBatch) -> Tensor:
    """Return the length of each token's row, int64 [T]; of a row with branches, that of its longest branch."""
    if batch.is_decode_step:
        return batch.positions_T + 1
    ends_T = torch.tensor([*batch.cu_seqlens, len(batch.tokens_T)], device=batch.tokens_T.device)  # with the fillers
    lengths_T = sizes_T = ends_T.diff()
    if batch.parents_T is not None:
        rows = batch.positions_T.split_with_sizes(batch.documents.sizes)
        lengths_T = torch.stack([each.max() + 1 if len(each) else each.new_zeros(()) for each in rows])
    return lengths_T.repeat_interleave(sizes_T, output_size=len(batch.tokens_T))


def _exponents(width: int, device: torch.device) -> Tensor:
    return torch.arange(0, width, 2, dtype=torch.int64, device=device).float() / width


@lru_cache
def _frequencies(spec: RotarySpec, device: torch.device) -> Tensor:
    """Return the frequencies, fp32 [F]; of type longrope [2, F], for short and long rows.

    The order of operations is that of `transformers`, for equal bits.
    """
    with torch.inference_mode(mode=False):  # training shares this cached tensor
        powers = spec.theta ** _exponents(spec.width, device)
        if spec.kind == "longrope":
            factors = torch.tensor((spec.short_factors, spec.long_factors), device=device)
            return 1.0 / (factors * powers)
        frequencies: Tensor = 1.0 / powers
        if spec.kind == "linear":
            return frequencies / spec.factor
        if spec.kind == "llama3":
            return _llama3(spec, frequencies)
        return _yarn(spec, powers) if spec.kind == "yarn" else frequencies


def _llama3(spec: RotarySpec, frequencies: Tensor) -> Tensor:
    """Divide low frequencies by the factor, keep high ones, and interpolate between."""
    wavelengths = 2 * math.pi / frequencies
    is_low = wavelengths > spec.trained_length / spec.low
    is_high = wavelengths < spec.trained_length / spec.high
    share = (spec.trained_length / wavelengths - spec.low) / (spec.high - spec.low)
    between = (1 - share) * frequencies / spec.factor + share * frequencies
    return torch.where(is_high, frequencies, torch.where(is_low, frequencies / spec.factor, between))


def llama3_factors(spec: RotarySpec) -> Tensor:
    """Return the divisor of each frequency of Llama 3's scaling, fp32 [F]: 1, ``factor``, or between."""
    frequencies = 1.0 / spec.theta ** _exponents(spec.width, torch.device("cpu"))
    return frequencies / _llama3(spec, frequencies)


def _yarn(spec: RotarySpec, powers: Tensor) -> Tensor:
    """Keep the frequencies of the first dimensions, divide those of the last by the factor; a ramp lies between."""

    def dimension(turns: float) -> float:  # that makes this many turns in the trained length
        return spec.width * math.log(spec.trained_length / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    first, last = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, spec.width - 1)
    last = last + 0.001 if first == last else last
    ramp = (torch.arange(spec.width // 2, dtype=torch.float32, device=powers.device) - first) / (last - first)
    kept = 1 - ramp.clamp(0, 1)
    return 1.0 / (spec.factor * powers) * (1 - kept) + 1.0 / powers * kept


def rotate_halves(x_TNH: Tensor, batch: PackedBatch, spec: RotarySpec) -> Tensor:
    """Rotate the first R dimensions of each head, as pairs of dimensions i and i + R/2; in place for decoding."""
    cos_T1F, sin_T1F = _cos_sin(batch, spec, x_TNH.dtype)
    if batch.kernel == "decoding":
        return _rotate(x_TNH, cos_T1F, sin_T1F, x_TNH)
    out: Tensor = _RotateHalves.apply(x_TNH, cos_T1F, sin_T1F)  # type: ignore[no-untyped-call]
    return out


def _cos_sin(batch: PackedBatch, spec: RotarySpec, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the angles, [T, 1, F], computed in fp32 and rounded as in `transformers`."""
    key = spec, dtype
    if key not in batch.rotary_cache:
        angles_T1F = angles(batch, spec)[:, None]
        cos_sin = (angles_T1F.cos() * spec.attention_factor, angles_T1F.sin() * spec.attention_factor)
        batch.rotary_cache[key] = tuple(each.to(dtype) for each in cos_sin)
    cos_T1F, sin_T1F = batch.rotary_cache[key]
    return cos_T1F, sin_T1F


class _RotateHalves(torch.autograd.Function):
    """Rotation in half the passes over memory that autograd takes; the gradient is rotated back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, torch.empty_like(x, memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        (gradient,) = gradients
        return _rotate(gradient, cos, -sin, torch.empty_like(gradient)), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> Tensor:
    """Write the rotated heads to ``out``, which may be ``x``."""
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    first = first.clone() if out is x else first  # needed after it is overwritten
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half : 2 * half]).addcmul_(first, sin)
    if out is not x and 2 * half < x.shape[-1]:
        out[..., 2 * half :] = x[..., 2 * half :]
    return out


def rotary_freqs(batch: PackedBatch, rotary_dim: int) -> Tensor:
    """Return the frequencies of interleaved pairs: cos + i sin of the angles, complex64 [T, 1, R/2].

    Cached for all layers of a pass: computing them takes longer than the rotation.
    """
    if rotary_dim not in batch.rotary_cache:
        # In fp32 always: bf16 cannot tell positions above 256 apart.
        angle_T1R = (batch.positions_T[:, None].float() * _inv_freq(rotary_dim, batch.positions_T.device))[:, None]
        batch.rotary_cache[rotary_dim] = torch.complex(angle_T1R.cos(), angle_T1R.sin())
    cached: Tensor = batch.rotary_cache[rotary_dim]
    return cached


@lru_cache
def _inv_freq(rotary_dim: int, device: torch.device) -> Tensor:
    with torch.inference_mode(mode=False):  # training shares this cached tensor
        exponent = torch.arange(0, rotary_dim, 2, device=device, dtype=torch.int64).float() / rotary_dim
        return 1.0 / 10000.0**exponent


def apply_rotary(x_TNH: Tensor, freqs: Tensor, in_place: bool) -> Tensor:
    """Apply rotary position embedding to the first R dims of each head (interleaved pairs), in fp32.

    As in mesh-transformer-jax and GPT-J (https://arxiv.org/abs/2104.09864).
    """
    rotary_dim = 2 * freqs.shape[-1]
    if in_place and x_TNH.dtype == torch.float32 and x_TNH.shape[-1] % 2 == 0:
        # One complex product rotates all pairs in fp32. view_as_complex needs even strides.
        pairs = x_TNH[..., :rotary_dim].view(*x_TNH.shape[:-1], -1, 2)
        torch.view_as_complex(pairs).mul_(freqs)
        return x_TNH
    out: Tensor = _RotatePairs.apply(x_TNH, freqs)  # type: ignore[no-untyped-call]
    return out


class _RotatePairs(torch.autograd.Function):
    """Rotate pairs in a third of the kernels that autograd takes; backward rotates the gradient by negative angles."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, freqs: Tensor) -> Tensor:
        ctx.save_for_backward(freqs)
        return _rotate_pairs(x, freqs, is_back=False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (freqs,) = ctx.saved_tensors
        return _rotate_pairs(gradients[0], freqs, is_back=True), None


def _rotate_pairs(x: Tensor, freqs: Tensor, is_back: bool) -> Tensor:
    """Rotate the pairs of each head; products and sums are rounded to fp32, then the sums to x's type.

    Not by `addcmul`, which may fuse the product and the sum, and then rounds once.

    Args:
        is_back: rotate by negative angles.
    """
    cos, sin, width = freqs.real, freqs.imag, 2 * freqs.shape[-1]
    even, odd = x[..., :width:2], x[..., 1:width:2]
    if x.device.type == "cpu":  # once; elsewhere the kernels convert what they read
        even, odd = even.float(), odd.float()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    of_even, of_odd = (torch.add, torch.sub) if is_back else (torch.sub, torch.add)
    of_even(even * cos, odd * sin, out=out[..., :width:2])
    of_odd(odd * cos, even * sin, out=out[..., 1:width:2])
    if width < x.shape[-1]:
        out[..., width:] = x[..., width:]
    return out
