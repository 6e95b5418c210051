"""Test rotary position embedding against plain arithmetic and `transformers`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from gptj_ft.errors import DataError
from gptj_ft.models.batch import PackedBatch, pack
from gptj_ft.models.rotary import RotarySpec, angles, apply_rotary, rotary_freqs, rotary_spec, rotate_halves


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [12, 7, 6])
def test_rotated_pairs_have_the_bits_of_plain_operations(dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(0)
    freqs = rotary_freqs(pack([[1] * 9, [1] * 40]), 6)
    values, gradient = (torch.randn(49, 2, width).to(dtype) for _ in range(2))
    found = []
    for rotate in (lambda x: apply_rotary(x, freqs, in_place=False), lambda x: plain_rotation(x, freqs)):
        x = values.clone().requires_grad_()
        out = rotate(x.view(49, 2, width))
        found.append((out.detach(), *torch.autograd.grad(out, x, gradient)))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def plain_rotation(x: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    """Rotate pairs by operations that autograd knows, as mesh-transformer-jax does."""
    cos, sin, width = freqs.real, freqs.imag, 2 * freqs.shape[-1]
    even, odd = x[..., :width:2].float(), x[..., 1:width:2].float()
    rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    return torch.cat((rotated.to(x.dtype), x[..., width:]), dim=-1)


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


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
LONG = {"short_factor": [1 + 0.1 * n for n in range(12)], "long_factor": [1.0 + n for n in range(12)]}
# The types and fields of released configs: Llama 2, 3.1, 3.2, Qwen 2.5, Phi-3, and what else `transformers` computes.
ROTARY: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 1e6},
    "theta of old files": {"theta": 5e5},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "linear of old files": {"type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3.1": {**LLAMA3, "rope_theta": 5e5},
    "llama3.2": {**LLAMA3, "factor": 32.0, "rope_theta": 5e5},
    "yarn": YARN,
    "yarn, its numbers": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False, "rope_theta": 1e6},
    "yarn, attention": {**YARN, "attention_factor": 1.5},
    "yarn, mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2},
    "longrope": {"rope_type": "longrope", **LONG},
    "longrope, factor": {"rope_type": "longrope", "factor": 8.0, **LONG},
    "longrope, attention": {"rope_type": "longrope", "attention_factor": 1.2, **LONG},
}
TRAINED = 512  # tokens, the original length


def embedding_of(name: str) -> tuple[Any, dict[str, Any]]:
    """Return `transformers`' embedding of a type, with the content of its config.json."""
    fields = {"hidden_size": 96, "num_attention_heads": 3, "max_position_embeddings": TRAINED}
    parameters = dict(ROTARY[name])
    fields |= {"rope_theta": parameters.pop("theta")} if "theta" in parameters else {}
    kind = parameters.get("rope_type", "default")
    if kind in ("llama3", "yarn"):
        parameters["original_max_position_embeddings"] = TRAINED
        fields["max_position_embeddings"] = 4 * TRAINED
    if kind == "longrope":
        fields |= {"max_position_embeddings": 4 * TRAINED, "original_max_position_embeddings": TRAINED}
        fields |= {"pad_token_id": 0}
        parameters |= {"partial_rotary_factor": 0.75, "rope_theta": 10_000.0}
        return Phi3RotaryEmbedding(Phi3Config(**fields, rope_parameters=dict(parameters))), {
            **fields, "rope_parameters": parameters,
        }  # fmt: skip
    old = "type" in parameters or "rope_theta" in fields
    raw = {**fields, "rope_scaling" if old else "rope_parameters": parameters or None}
    return LlamaRotaryEmbedding(LlamaConfig(**{key: value for key, value in raw.items() if value is not None})), raw


@pytest.mark.parametrize("name", ROTARY)
def test_angles_match_transformers(name: str) -> None:
    embedding, raw = embedding_of(name)
    spec = rotary_spec(raw, 32, raw["max_position_embeddings"])
    for length in (TRAINED, 4 * TRAINED):
        batch = pack([[1] * 3, [1] * length])
        own = angles(batch, spec)[3:]
        positions = torch.arange(length)[None]
        cos, sin = (each[0, :, : spec.width // 2] for each in embedding(torch.zeros(1), positions))
        torch.testing.assert_close(own, positions[0, :, None] * embedding.inv_freq, rtol=1e-6, atol=0)
        torch.testing.assert_close(own.cos() * spec.attention_factor, cos, rtol=0, atol=1e-6)
        torch.testing.assert_close(own.sin() * spec.attention_factor, sin, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_a_long_row_changes_no_other(name: str) -> None:
    _, raw = embedding_of(name)
    spec = rotary_spec(raw, 32, raw["max_position_embeddings"])
    short, long = [1] * 9, [1] * (2 * TRAINED)
    together = angles(pack([short, long, short]), spec)
    assert torch.equal(together[:9], angles(pack([short]), spec))
    assert torch.equal(together[-9:], together[:9])
    assert not torch.equal(together[9:18], together[:9])
    assert torch.equal(angles(decode_step(torch.tensor([0, 2 * TRAINED - 1])), spec)[1], together[-10])
    positions = torch.arange(2 * TRAINED)
    few = [angles(decode_step(each), spec) for each in positions.split(7)]
    assert torch.equal(torch.cat(few), angles(decode_step(positions), spec)), "no element depends on its place"


def decode_step(positions: torch.Tensor) -> PackedBatch:
    """Return a batch with one token of each row."""
    return PackedBatch(*(positions,) * 3, tuple(range(len(positions) + 1)), is_decode_step=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [32, 8])
def test_rotated_halves_match_transformers(dtype: torch.dtype, width: int) -> None:
    batch, spec = pack([[1] * 40]), RotarySpec(width, 10_000.0, attention_factor=1.2)
    torch.manual_seed(0)
    x = torch.randn(40, 3, 32).to(dtype).requires_grad_()
    gradient = torch.randn(x.shape).to(dtype)
    out = rotate_halves(x, batch, spec)
    (ours,) = torch.autograd.grad(out, x, gradient)
    both = angles(batch, spec).repeat(1, 2)[None]
    cos, sin = ((each * 1.2).to(dtype) for each in (both.cos(), both.sin()))
    turned, _ = apply_rotary_pos_emb(*(x.transpose(0, 1)[None, ..., :width],) * 2, cos, sin)
    expected = torch.cat((turned[0].transpose(0, 1), x[..., width:]), -1)
    (theirs,) = torch.autograd.grad(expected, x, gradient)
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    decoding = PackedBatch(batch.tokens_T, batch.positions_T, batch.targets_T, (0, 40), cache=object())  # type: ignore[arg-type]
    plain = x.detach().clone()
    assert rotate_halves(plain, decoding, spec) is plain
    torch.testing.assert_close(plain, expected.detach(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"rope_type": "mrope"}, "rope_type 'mrope' is not supported; known are default, linear"),
        ({"rope_type": "llama3", "factor": 8.0}, "'llama3' has no low_freq_factor"),
        ({"rope_type": "linear", "factor": 0}, "factor must be a positive number"),
        ({"mrope_section": [1, 2]}, "'mrope_section', which is not supported"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "must have 16 numbers"),
        ({**LLAMA3, "high_freq_factor": 1.0}, "high_freq_factor must exceed"),
        ({"partial_rotary_factor": 0.1}, "rotary width 3 of heads of 32"),
        ([1], "must be an object"),
    ],
    ids=str,
)
def test_unsupported_rotary_embedding_is_rejected(parameters: Any, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        rotary_spec({"rope_parameters": parameters}, 32, 512)
