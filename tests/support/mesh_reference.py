"""Implement mesh-transformer-jax from the description of its files: checkpoints and forward pass.

It shares no code with the package. Leaves are kept in the file layout, one set per shard.
"""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Leaves = dict[tuple[str, str], Array]
SHAPE = {"layers": 12, "d_model": 32, "n_heads": 4, "n_vocab": 96, "seq": 64, "pe": "rotary", "pe_rotary_dims": 4}
SHAPE |= {"norm": "layernorm"}  # type: ignore[dict-item]
SHARDS = 4


def random_shards(seed: int = 0, shards: int = SHARDS) -> list[Leaves]:
    """Draw a plausible trained model: embedding biases, and norms in other shards than 0, which do not count."""
    draw = np.random.default_rng(seed)
    d, ff, v = SHAPE["d_model"], 4 * SHAPE["d_model"], SHAPE["n_vocab"]

    def normal(*shape: int) -> Array:
        return (0.15 * draw.standard_normal(shape)).astype(np.float32)

    result: list[Leaves] = []
    fc_out_biases = [normal(d) for _ in range(SHAPE["layers"])]  # every shard has the same
    for shard in range(shards):
        leaves: Leaves = {
            ("embedding_shard/~/linear", "b"): normal(d),
            ("embedding_shard/~/linear", "w"): normal(v // shards, d),
            ("projection_shard/~/linear", "b"): normal(v // shards),
            ("projection_shard/~/linear", "w"): normal(d, v // shards),
        }
        norms = ["projection_shard/~/replicated_layer_norm"]
        for layer in range(SHAPE["layers"]):
            module = f"layer_{layer}/~/"
            for number in range(3):
                leaves[module + ("linear" if not number else f"linear_{number}"), "w"] = normal(d, d // shards)
            leaves[module + "linear_3", "w"] = normal(d // shards, d)
            leaves[module + "linear_4", "b"] = normal(ff // shards)
            leaves[module + "linear_4", "w"] = normal(d, ff // shards)
            leaves[module + "linear_5", "b"] = fc_out_biases[layer]
            leaves[module + "linear_5", "w"] = normal(ff // shards, d)
            norms.append(module + "replicated_layer_norm")
        for norm in norms:
            is_first = shard == 0
            leaves[norm, "offset"] = normal(d) if is_first else np.zeros(d, np.float32)
            leaves[norm, "scale"] = 1 + normal(d) if is_first else np.ones(d, np.float32)
        result.append(leaves)
    return result


def in_order(leaves: Leaves) -> list[NDArray[np.generic]]:
    """Return the leaves of a dictionary, sorted by key as string."""
    named = {("causal_transformer_shard/~/" + module, name): array for (module, name), array in leaves.items()}
    return [named[key] for key in sorted(named)]


def flat(leaves: Leaves, step: int, moments: tuple[Leaves, ...] = ()) -> list[NDArray[np.generic]]:
    """Return the leaves of a shard's tree in file order."""
    count = np.array(step, np.int32)
    state = [count, *(array for moment in moments for array in in_order(moment)), count] if moments else []
    return [*state, *in_order(leaves), count]


def as_bf16(array: NDArray[np.generic]) -> NDArray[np.generic]:
    """Return the upper halves of fp32 numbers as jax's bfloat16 appears in numpy: two bytes of unknown type."""
    if array.dtype != np.float32:
        return array
    return (array.view(np.uint32) >> 16).astype(np.uint16).view("V2")


def write(
    folder: Path, shards: list[Leaves], *, step: int = 10, moments: tuple[list[Leaves], ...] = (), bf16: bool = False
) -> Path:
    """Write ``step_N/shard_I/J.npz``, with moments if the checkpoint has them; return the step's folder."""
    for number, leaves in enumerate(shards):
        arrays = flat(leaves, step, tuple(moment[number] for moment in moments))
        if bf16:
            arrays = [as_bf16(array) for array in arrays]
        target = folder / f"step_{step}" / f"shard_{number}"
        target.mkdir(parents=True)
        small, more = divmod(len(arrays), 16)
        for file in range(16):
            size = small + (file < more)
            np.savez(target / f"{file}.npz", *arrays[:size])
            arrays = arrays[size:]
        assert not arrays
    return folder / f"step_{step}"


def pack(step: Path, path: Path) -> Path:
    """Write a checkpoint into an archive, compressed by its suffix."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        archive.add(step, step.name)
    if path.suffix in (".zst", ".zstd"):
        import pyarrow

        path.write_bytes(pyarrow.compress(raw.getvalue(), "zstd", asbytes=True))
    else:
        path.write_bytes(raw.getvalue())
    return path


def forward(shards: list[Leaves], tokens: list[int]) -> NDArray[np.float64]:
    """Return the logits of each position, summed over shards where the model uses psum."""
    d_head = SHAPE["d_model"] // SHAPE["n_heads"]
    wide = [{key: array.astype(np.float64) for key, array in leaves.items()} for leaves in shards]
    rows = len(wide[0]["embedding_shard/~/linear", "w"])
    x = np.zeros((len(tokens), SHAPE["d_model"]))
    for number, leaves in enumerate(wide):
        hot = np.eye(rows * len(wide))[tokens][:, number * rows : (number + 1) * rows]
        x += hot @ leaves["embedding_shard/~/linear", "w"] + leaves["embedding_shard/~/linear", "b"]
    for layer in range(SHAPE["layers"]):
        module = f"layer_{layer}/~/"
        h, out = _norm(wide[0], module + "replicated_layer_norm", x), np.zeros_like(x)
        for leaves in wide:
            q, v, k = (
                (h @ leaves[module + name, "w"]).reshape(len(tokens), -1, d_head)
                for name in ("linear", "linear_1", "linear_2")
            )
            q, k = _rotate(q), _rotate(k)
            scores = np.einsum("thd,Thd->htT", q, k) / np.sqrt(d_head)
            scores = np.where(np.tri(len(tokens), dtype=bool), scores, -1e10)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            heads = np.einsum("htT,Thd->thd", weights, v).reshape(len(tokens), -1)
            hidden = h @ leaves[module + "linear_4", "w"] + leaves[module + "linear_4", "b"]
            gelu = 0.5 * hidden * (1 + np.tanh(np.sqrt(2 / np.pi) * (hidden + 0.044715 * hidden**3)))
            out += heads @ leaves[module + "linear_3", "w"]
            out += gelu @ leaves[module + "linear_5", "w"] + leaves[module + "linear_5", "b"]
        x = x + out
    x = _norm(wide[0], "projection_shard/~/replicated_layer_norm", x)
    return np.concatenate(
        [x @ leaves["projection_shard/~/linear", "w"] + leaves["projection_shard/~/linear", "b"] for leaves in wide], -1
    )


def _norm(
    leaves: dict[tuple[str, str], NDArray[np.float64]], module: str, x: NDArray[np.float64]
) -> NDArray[np.float64]:
    centred = x - x.mean(-1, keepdims=True)
    normed = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return normed * leaves[module, "scale"] + leaves[module, "offset"]


def _rotate(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rotate the pairs (2i, 2i+1) of the first dimensions by position / 10000^(2i/dims)."""
    dims, result = SHAPE["pe_rotary_dims"], x.copy()
    for i in range(dims // 2):
        angle = np.arange(len(x))[:, None] / 10000 ** (2 * i / dims)
        a, b = x[..., 2 * i], x[..., 2 * i + 1]
        result[..., 2 * i] = a * np.cos(angle) - b * np.sin(angle)
        result[..., 2 * i + 1] = b * np.cos(angle) + a * np.sin(angle)
    return result
