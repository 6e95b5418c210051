"""Shapes and pre-training of published models, to plan a run before downloading anything.

Sources: ``config.json`` and model card of each on huggingface.co, https://arxiv.org/abs/2304.03208 (Cerebras-GPT, and
the loss of GPT-J on the Pile), https://github.com/kingoflolz/mesh-transformer-jax (GPT-J),
https://github.com/google-research/bert (BERT), https://github.com/facebookresearch/fairseq (RoBERTa, XLM-R).
"""

from __future__ import annotations

from collections.abc import Mapping
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


def find_published(name: str) -> Published | None:
    """Return a published model by name, with or without its owner, ignoring case."""
    lower = name.lower()
    for each in _published():
        repository = each.repository.lower()
        if lower in (repository, repository.rpartition("/")[2]):
            return each
    return None


def _published() -> list[Published]:
    gptj = {"model_type": "gptj", **asdict(GPTJConfig())}
    return [
        Published("EleutherAI/gpt-j-6b", gptj, 402e9, 1.5e22, 1.613),
        *(
            Published(f"cerebras/Cerebras-GPT-{size}", _config(*shape), 2048.0 * batch * steps, flops, loss)
            for size, (*shape, batch, steps, flops, loss) in CEREBRAS_GPT.items()
        ),
        *(Published(f"google-bert/bert-{name}", _bert_config(*shape)) for name, shape in BERT_SIZES.items()),
        *(Published(name, _roberta_config(*shape)) for name, shape in ROBERTA_SIZES.items()),
    ]


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


def _bert_config(num_layers: int, width: int, num_heads: int, vocab_size: int) -> dict[str, Any]:
    config = BertConfig(vocab_size, width, num_layers, num_heads, intermediate_size=4 * width)
    return {"model_type": "bert", **asdict(config)}


def _roberta_config(model_type: str, num_layers: int, width: int, num_heads: int, vocab_size: int) -> dict[str, Any]:
    config = RobertaConfig(vocab_size, width, num_layers, num_heads, intermediate_size=4 * width)
    return {"model_type": model_type, **asdict(config)}
