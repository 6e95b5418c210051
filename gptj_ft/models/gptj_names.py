"""GPT-J's tensors as mesh-transformer-jax and Cerebras name them."""

from __future__ import annotations

from gptj_ft.models.registry import Leaf

# https://github.com/kingoflolz/mesh-transformer-jax, version 1 of its checkpoints; each module's name stands behind
# "causal_transformer_shard/~/". The linear layers of a block are numbered as they are made: q, v, k.
MESH = {
    ("embedding_shard/~/linear", "b"): Leaf("transformer.wte.weight", "added"),
    ("embedding_shard/~/linear", "w"): Leaf("transformer.wte.weight", "rows"),
    ("layer_{}/~/linear", "w"): Leaf("transformer.h.{}.attn.q_proj.weight", "rows", is_transposed=True),
    ("layer_{}/~/linear_1", "w"): Leaf("transformer.h.{}.attn.v_proj.weight", "rows", is_transposed=True),
    ("layer_{}/~/linear_2", "w"): Leaf("transformer.h.{}.attn.k_proj.weight", "rows", is_transposed=True),
    ("layer_{}/~/linear_3", "w"): Leaf("transformer.h.{}.attn.out_proj.weight", "columns", is_transposed=True),
    ("layer_{}/~/linear_4", "b"): Leaf("transformer.h.{}.mlp.fc_in.bias", "rows"),
    ("layer_{}/~/linear_4", "w"): Leaf("transformer.h.{}.mlp.fc_in.weight", "rows", is_transposed=True),
    ("layer_{}/~/linear_5", "b"): Leaf("transformer.h.{}.mlp.fc_out.bias", "sum"),
    ("layer_{}/~/linear_5", "w"): Leaf("transformer.h.{}.mlp.fc_out.weight", "columns", is_transposed=True),
    ("layer_{}/~/replicated_layer_norm", "offset"): Leaf("transformer.h.{}.ln_1.bias", "first"),
    ("layer_{}/~/replicated_layer_norm", "scale"): Leaf("transformer.h.{}.ln_1.weight", "first"),
    ("projection_shard/~/linear", "b"): Leaf("lm_head.bias", "rows"),
    ("projection_shard/~/linear", "w"): Leaf("lm_head.weight", "rows", is_transposed=True),
    ("projection_shard/~/replicated_layer_norm", "offset"): Leaf("transformer.ln_f.bias", "first"),
    ("projection_shard/~/replicated_layer_norm", "scale"): Leaf("transformer.ln_f.weight", "first"),
}

# Checkpoints of the Cerebras model zoo since 1.9; before, "model." may precede every name. In the order in which its
# modules are made, by which its optimizer numbers the parameters.
CEREBRAS: dict[str, str | Leaf | None] = {
    "embedding_layer.word_embeddings.weight": "transformer.wte.weight",
    **{f"transformer_decoder.norm.{part}": f"transformer.ln_f.{part}" for part in ("weight", "bias")},
    "ln_f.weight": None,  # a second copy of transformer_decoder.norm
    "ln_f.bias": None,
    **{
        f"transformer_decoder.layers.{{}}.self_attn.proj_{theirs}_dense_layer.weight": (
            f"transformer.h.{{}}.attn.{ours}_proj.weight"
        )
        for theirs, ours in {"q": "q", "k": "k", "v": "v", "output": "out"}.items()
    },
    **{
        f"transformer_decoder.layers.{{}}.norm1.{part}": f"transformer.h.{{}}.ln_1.{part}"
        for part in ("weight", "bias")
    },
    **{
        f"transformer_decoder.layers.{{}}.ffn.ffn.{theirs}.linear_layer.{part}": f"transformer.h.{{}}.mlp.{ours}.{part}"
        for theirs, ours in enumerate(("fc_in", "fc_out"))
        for part in ("weight", "bias")
    },
    "lm_head.weight": "lm_head.weight",
    "lm_head.bias": "lm_head.bias",
}
