"""Map names and layouts of the Cerebras model zoo, following the table in its format description."""

from __future__ import annotations

import torch
from support.checkpoint_files import State
from transformers import GPT2Config, GPT2LMHeadModel

NAMES = {"attn.q_proj": "self_attn.proj_q_dense_layer", "attn.k_proj": "self_attn.proj_k_dense_layer"}
NAMES |= {"attn.v_proj": "self_attn.proj_v_dense_layer", "attn.out_proj": "self_attn.proj_output_dense_layer"}
NAMES |= {"mlp.fc_in": "ffn.ffn.0.linear_layer", "mlp.fc_out": "ffn.ffn.1.linear_layer", "ln_1": "norm1"}
PARAMS = """
train_input: {batch_size: 65}
model:
  hidden_size: 16
  num_heads: 2
  num_hidden_layers: 2
  vocab_size: 64
  rotary_dim: 4
  filter_size: 64
  max_position_embeddings: 32
  nonlinearity: gelu_new
  layer_norm_epsilon: 1e-5
  position_embedding_type: rotary
  share_embedding_weights: false
optimizer: {weight_decay_rate: 0.1}
"""


def theirs(state: State, prefix: str = "model.") -> State:
    """Rename a model's tensors to Cerebras names."""
    named = {}
    for name, tensor in state.items():
        own = name.removeprefix("transformer.")
        if own.startswith("h."):
            _, number, rest = own.split(".", 2)
            module, _, part = rest.rpartition(".")
            own = f"transformer_decoder.layers.{number}.{NAMES[module]}.{part}"
        elif own == "wte.weight":
            own = "embedding_layer.word_embeddings.weight"
        elif own.startswith("ln_f"):
            named[prefix + own] = tensor
            own = own.replace("ln_f", "transformer_decoder.norm")
        named[prefix + own] = tensor
    return named


GPT2 = """
model: {hidden_size: 24, num_heads: 2, num_hidden_layers: 2, vocab_size: 70, max_position_embeddings: 32,
        filter_size: 80, nonlinearity: gelu, share_embedding_weights: TIED, use_bias_in_output: false}
"""


def gpt2_state(is_tied: bool) -> State:
    config = GPT2Config(
        vocab_size=70, n_positions=32, n_embd=24, n_layer=2, n_head=2, n_inner=80, tie_word_embeddings=is_tied
    )
    generator = torch.Generator().manual_seed(0)
    state = GPT2LMHeadModel(config).state_dict()
    drawn = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in state.items()}
    return {**drawn, "lm_head.weight": drawn["transformer.wte.weight"]} if is_tied else drawn


def gpt2_theirs(state: State, positions: str) -> State:
    """Rename a GPT-2's tensors to Cerebras names: transposed matrices, separate q, k and v."""
    named = {
        "embedding_layer.word_embeddings.weight": state["transformer.wte.weight"],
        positions: state["transformer.wpe.weight"],
        "lm_head.weight": state["lm_head.weight"],
    }
    for part in ("weight", "bias"):
        named[f"ln_f.{part}"] = named[f"transformer_decoder.norm.{part}"] = state[f"transformer.ln_f.{part}"]
        for n in range(2):
            ours, layer = f"transformer.h.{n}.", f"transformer_decoder.layers.{n}."
            for mine, other in {"ln_1": "norm1", "ln_2": "norm3"}.items():
                named[f"{layer}{other}.{part}"] = state[f"{ours}{mine}.{part}"]
            modules = {"attn.c_proj": "self_attn.proj_output_dense_layer"}
            modules |= {"mlp.c_fc": "ffn.ffn.0.linear_layer", "mlp.c_proj": "ffn.ffn.1.linear_layer"}
            for mine, other in modules.items():
                named[f"{layer}{other}.{part}"] = state[f"{ours}{mine}.{part}"].t().contiguous()
            thirds = state[f"{ours}attn.c_attn.{part}"].t().chunk(3)
            for name, third in zip("vkq", reversed(thirds), strict=True):  # the file's order says nothing
                named[f"{layer}self_attn.proj_{name}_dense_layer.{part}"] = third.contiguous()
    return {f"model.{name}": tensor for name, tensor in named.items()}
