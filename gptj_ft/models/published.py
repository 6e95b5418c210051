"""Shapes and pre-training of published models, to plan a run before downloading anything.

Sources: ``config.json`` and model card of each on huggingface.co, https://arxiv.org/abs/2304.03208 (Cerebras-GPT, and
the loss of GPT-J on the Pile), https://github.com/kingoflolz/mesh-transformer-jax (GPT-J),
https://github.com/google-research/bert (BERT), https://github.com/facebookresearch/fairseq (RoBERTa, XLM-R).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gptj_ft.models.bert import BertConfig
from gptj_ft.models.gptj import GPTJConfig
from gptj_ft.models.registry import Architecture, families
from gptj_ft.models.roberta import RobertaConfig


@dataclass(frozen=True)
class Published:
    """A published model. The pre-training figures are ``None`` for models not trained on the Pile."""

    repository: str  # on the Hub
    config: Mapping[str, Any]  # the relevant part of config.json
    tokens: float | None = None
    flops: float | None = None
    pile_loss: float | None = None  # on the Pile's test set, nats per token

    @property
    def architecture(self) -> Architecture:
        family = families()[self.config["model_type"]]
        return Architecture(family, family.read_config(self.config), self.config)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


# Layers, width, heads; sequences of 2,048 tokens in a batch, batches; FLOPs, loss. The 13B model had two batch sizes,
# given here as an equivalent number of batches of one size.
CEREBRAS_GPT: Mapping[str, tuple[int, int, int, int, int, float, float]] = {
    "111M": (10, 768, 12, 120, 9_037, 2.6e18, 2.608),
    "256M": (14, 1088, 17, 264, 9_468, 1.3e19, 2.349),
    "590M": (18, 1536, 12, 264, 21_836, 6.1e19, 2.181),
    "1.3B": (24, 2048, 16, 528, 24_334, 2.8e20, 1.997),
    "2.7B": (32, 2560, 32, 528, 49_041, 1.1e21, 1.834),
    "6.7B": (32, 4096, 32, 1_040, 62_522, 6.3e21, 1.704),
    "13B": (40, 5120, 40, 720, 174_335, 2.3e22, 1.572),
}


PYTHIA_TOKENS = 299_892_736_000.0  # seen by each Pythia: 143,000 batches of 1,024 rows of 2,048 tokens
# Layers, width, heads; rows of the vocabulary.
PYTHIA_SIZES: Mapping[str, tuple[int, int, int, int]] = {
    "14m": (6, 128, 4, 50304),
    "31m": (6, 256, 8, 50304),
    "70m": (6, 512, 8, 50304),
    "160m": (12, 768, 12, 50304),
    "410m": (24, 1024, 16, 50304),
    "1b": (16, 2048, 8, 50304),
    "1.4b": (24, 2048, 16, 50304),
    "2.8b": (32, 2560, 32, 50304),
    "6.9b": (32, 4096, 32, 50432),
    "12b": (36, 5120, 40, 50688),
}

# Layers, width, heads; rows of the vocabulary.
BERT_SIZES: Mapping[str, tuple[int, int, int, int]] = {
    "base-uncased": (12, 768, 12, 30522),
    "base-cased": (12, 768, 12, 28996),
    "base-multilingual-cased": (12, 768, 12, 119547),
    "large-uncased": (24, 1024, 16, 30522),
    "large-cased": (24, 1024, 16, 28996),
}


ROBERTA_SIZES: Mapping[str, tuple[str, int, int, int, int]] = {
    "FacebookAI/roberta-base": ("roberta", 12, 768, 12, 50265),
    "FacebookAI/roberta-large": ("roberta", 24, 1024, 16, 50265),
    "FacebookAI/xlm-roberta-base": ("xlm-roberta", 12, 768, 12, 250002),
    "FacebookAI/xlm-roberta-large": ("xlm-roberta", 24, 1024, 16, 250002),
}

SIZES = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size",
    "vocab_size", "max_position_embeddings",
)  # fmt: skip
LLAMA_3_ROPE = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192}  # fmt: skip
# Fields that some models share, and the values of `SIZES` of each; braces hold the ends of the names of variants.
DECODERS: Sequence[tuple[Mapping[str, Any], Mapping[str, tuple[int, ...]]]] = (
    ({"model_type": "llama", "rms_norm_eps": 1e-5}, {
        "meta-llama/Llama-2-7b{-hf,-chat-hf}": (32, 4096, 32, 32, 11008, 32000, 4096),
        "meta-llama/Llama-2-13b{-hf,-chat-hf}": (40, 5120, 40, 40, 13824, 32000, 4096),
        "meta-llama/Llama-2-70b{-hf,-chat-hf}": (80, 8192, 64, 8, 28672, 32000, 4096),
        "TinyLlama/TinyLlama-1.1B{-Chat-v1.0,-intermediate-step-1431k-3T}": (22, 2048, 32, 4, 5632, 32000, 2048),
    }),
    ({"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 500_000.0}, {
        "meta-llama/Meta-Llama-3-8B{,-Instruct}": (32, 4096, 32, 8, 14336, 128256, 8192),
        "meta-llama/Meta-Llama-3-70B{,-Instruct}": (80, 8192, 64, 8, 28672, 128256, 8192),
    }),
    ({"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 500_000.0,
      "rope_scaling": {**LLAMA_3_ROPE, "factor": 8.0}}, {
        "meta-llama/Llama-3.1-8B{,-Instruct}": (32, 4096, 32, 8, 14336, 128256, 131072),
        "meta-llama/Llama-3.1-70B{,-Instruct}": (80, 8192, 64, 8, 28672, 128256, 131072),
        "meta-llama/Llama-3.1-405B{,-Instruct}": (126, 16384, 128, 8, 53248, 128256, 131072),
        "meta-llama/Llama-3.3-70B{-Instruct}": (80, 8192, 64, 8, 28672, 128256, 131072),
    }),
    ({"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "tie_word_embeddings": True,
      "rope_scaling": {**LLAMA_3_ROPE, "factor": 32.0}}, {
        "meta-llama/Llama-3.2-1B{,-Instruct}": (16, 2048, 32, 8, 8192, 128256, 131072),
        "meta-llama/Llama-3.2-3B{,-Instruct}": (28, 3072, 24, 8, 8192, 128256, 131072),
    }),
    ({"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 100_000.0, "tie_word_embeddings": True}, {
        "HuggingFaceTB/SmolLM2-135M{,-Instruct}": (30, 576, 9, 3, 1536, 49152, 8192),
        "HuggingFaceTB/SmolLM2-360M{,-Instruct}": (32, 960, 15, 5, 2560, 49152, 8192),
    }),
    ({"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 130_000.0, "tie_word_embeddings": True}, {
        "HuggingFaceTB/SmolLM2-1.7B{,-Instruct}": (24, 2048, 32, 32, 8192, 49152, 8192),
    }),
    ({"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 5_000_000.0}, {
        "01-ai/Yi{,-1.5}-6B{,-Chat}": (32, 4096, 32, 4, 11008, 64000, 4096),
        "01-ai/Yi-1.5-9B{,-Chat}": (48, 4096, 32, 4, 11008, 64000, 4096),
        "01-ai/Yi{,-1.5}-34B{,-Chat}": (60, 7168, 56, 8, 20480, 64000, 4096),
    }),
    ({"model_type": "mistral", "rms_norm_eps": 1e-5, "sliding_window": 4096}, {
        "mistralai/Mistral-7B{,-Instruct}-v0.1": (32, 4096, 32, 8, 14336, 32000, 32768),
    }),
    ({"model_type": "mistral", "rms_norm_eps": 1e-5, "sliding_window": None, "rope_theta": 1_000_000.0}, {
        "mistralai/Mistral-7B-Instruct-v0.2": (32, 4096, 32, 8, 14336, 32000, 32768),
        "mistralai/Mistral-7B{,-Instruct}-v0.3": (32, 4096, 32, 8, 14336, 32768, 32768),
    }),
    ({"model_type": "qwen2", "rope_theta": 1_000_000.0, "tie_word_embeddings": True}, {
        "Qwen/Qwen2.5-0.5B{,-Instruct}": (24, 896, 14, 2, 4864, 151936, 32768),
        "Qwen/Qwen2.5-1.5B{,-Instruct}": (28, 1536, 12, 2, 8960, 151936, 32768),
        "Qwen/Qwen2.5-3B{,-Instruct}": (36, 2048, 16, 2, 11008, 151936, 32768),
    }),
    ({"model_type": "qwen2", "rope_theta": 1_000_000.0}, {
        "Qwen/Qwen2.5-7B{,-Instruct}": (28, 3584, 28, 4, 18944, 152064, 32768),
        "Qwen/Qwen2.5-14B{,-Instruct}": (48, 5120, 40, 8, 13824, 152064, 32768),
    }),
    ({"model_type": "qwen3", "rope_theta": 1_000_000.0, "head_dim": 128, "tie_word_embeddings": True}, {
        "Qwen/Qwen3-0.6B{,-Base}": (28, 1024, 16, 8, 3072, 151936, 32768),
        "Qwen/Qwen3-1.7B{,-Base}": (28, 2048, 16, 8, 6144, 151936, 32768),
        "Qwen/Qwen3-4B{,-Base}": (36, 2560, 32, 8, 9728, 151936, 32768),
    }),
    ({"model_type": "qwen3", "rope_theta": 1_000_000.0, "head_dim": 128}, {
        "Qwen/Qwen3-8B{,-Base}": (36, 4096, 32, 8, 12288, 151936, 32768),
        "Qwen/Qwen3-14B{,-Base}": (40, 5120, 40, 8, 17408, 151936, 32768),
    }),
    ({"model_type": "granite", "rms_norm_eps": 1e-5, "rope_theta": 5_000_000.0, "tie_word_embeddings": True,
      "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.015625,
      "logits_scaling": 8.0}, {
        "ibm-granite/granite-3.1-2b-{base,instruct}": (40, 2048, 32, 8, 8192, 49155, 131072),
    }),
    ({"model_type": "granite", "rms_norm_eps": 1e-5, "rope_theta": 10_000_000.0, "tie_word_embeddings": True,
      "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.0078125,
      "logits_scaling": 16.0}, {
        "ibm-granite/granite-3.1-8b-{base,instruct}": (40, 4096, 32, 8, 12800, 49155, 131072),
    }),
    ({"model_type": "gemma", "head_dim": 256}, {
        "google/gemma{,-1.1}-2b{,-it}": (18, 2048, 8, 1, 16384, 256000, 8192),
        "google/gemma{,-1.1}-7b{,-it}": (28, 3072, 16, 16, 24576, 256000, 8192),
    }),
    ({"model_type": "gemma2", "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096}, {
        "google/gemma-2-2b{,-it}": (26, 2304, 8, 4, 9216, 256000, 8192),
        "google/gemma-2-9b{,-it}": (42, 3584, 16, 8, 14336, 256000, 8192),
    }),
    ({"model_type": "gemma2", "head_dim": 128, "query_pre_attn_scalar": 144, "sliding_window": 4096}, {
        "google/gemma-2-27b{,-it}": (46, 4608, 32, 16, 36864, 256000, 8192),
    }),
    ({"model_type": "gemma3_text", "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 512,
      "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0}, {
        "google/gemma-3-270m{,-it}": (18, 640, 4, 1, 2048, 262144, 32768),
        "google/gemma-3-1b-{pt,it}": (26, 1152, 4, 1, 6912, 262144, 32768),
    }),
)  # fmt: skip


def find_published(name: str) -> Published | None:
    """Return a published model by name, with or without its owner, ignoring case."""
    lower = name.lower()
    for each in _published():
        repository = each.repository.lower()
        if lower in (repository, repository.rpartition("/")[2]):
            return each
    return None


def names_of(pattern: str) -> list[str]:
    """Return the names that braces stand for.

    >>> names_of("Qwen/Qwen3-4B{,-Base}")
    ['Qwen/Qwen3-4B', 'Qwen/Qwen3-4B-Base']
    """
    start, brace, rest = pattern.partition("{")
    if not brace:
        return [pattern]
    choices, _, end = rest.partition("}")
    return [name for choice in choices.split(",") for name in names_of(start + choice + end)]


def _published() -> list[Published]:
    gptj = {"model_type": "gptj", **asdict(GPTJConfig())}
    return [
        Published("EleutherAI/gpt-j-6b", gptj, 402e9, 1.5e22, 1.613),
        *(
            Published(f"cerebras/Cerebras-GPT-{size}", _config(*shape), 2048.0 * batch * steps, flops, loss)
            for size, (*shape, batch, steps, flops, loss) in CEREBRAS_GPT.items()
        ),
        *(Published(f"EleutherAI/pythia-{size}{end}", _pythia_config(*shape), PYTHIA_TOKENS)
          for size, shape in PYTHIA_SIZES.items() for end in ("", "-deduped")),
        *(Published(name, {**shared, **dict(zip(SIZES, sizes, strict=True))})
          for shared, rows in DECODERS for pattern, sizes in rows.items() for name in names_of(pattern)),
        *(Published(f"google-bert/bert-{name}", _bert_config(*shape)) for name, shape in BERT_SIZES.items()),
        *(Published(name, _roberta_config(*shape)) for name, shape in ROBERTA_SIZES.items()),
    ]  # fmt: skip


def _config(n_layer: int, n_embd: int, n_head: int) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "vocab_size": 50257,
        "n_positions": 2048,
        "n_embd": n_embd,
        "n_layer": n_layer,
        "n_head": n_head,
        "n_inner": 4 * n_embd,
        "activation_function": "gelu",
        "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }


def _pythia_config(num_layers: int, width: int, num_heads: int, vocab_size: int) -> dict[str, Any]:
    return {
        "model_type": "gpt_neox",
        "vocab_size": vocab_size,
        "hidden_size": width,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "intermediate_size": 4 * width,
        "max_position_embeddings": 2048,
        "hidden_act": "gelu",
        "rotary_pct": 0.25,
        "rotary_emb_base": 10_000,
        "use_parallel_residual": True,
    }


def _bert_config(num_layers: int, width: int, num_heads: int, vocab_size: int) -> dict[str, Any]:
    config = BertConfig(vocab_size, width, num_layers, num_heads, intermediate_size=4 * width)
    return {"model_type": "bert", **asdict(config)}


def _roberta_config(model_type: str, num_layers: int, width: int, num_heads: int, vocab_size: int) -> dict[str, Any]:
    config = RobertaConfig(vocab_size, width, num_layers, num_heads, intermediate_size=4 * width)
    return {"model_type": model_type, **asdict(config)}
