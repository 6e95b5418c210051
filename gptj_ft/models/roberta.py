"""RoBERTa (https://arxiv.org/abs/1907.11692) and XLM-R (https://arxiv.org/abs/1911.02116): BERT, trained differently.

Positions start behind the padding token's id, all tokens have one type, and the classifier includes the layer that is
BERT's pooler.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gptj_ft.errors import DataError
from gptj_ft.models.batch import HeadRows
from gptj_ft.models.bert import FAMILY as BERT
from gptj_ft.models.bert import BertConfig, Classifier, SpanOutputs, build_layers, read_config, trunk_keys, with_parts
from gptj_ft.models.dropout import Dropout
from gptj_ft.models.linear import Linear
from gptj_ft.models.registry import Family, HeadForm

PREFIX = "roberta."
POOLER = f"{PREFIX}pooler.dense"
PRETRAINING_HEAD = (  # tensors of the pre-training head, which no task uses
    "lm_head.bias", "lm_head.dense.weight", "lm_head.dense.bias", "lm_head.layer_norm.weight",
    "lm_head.layer_norm.bias", "lm_head.decoder.weight", "lm_head.decoder.bias",
)  # fmt: skip


@dataclass(frozen=True)
class RobertaConfig(BertConfig):
    """Hugging Face's field names and defaults, so that ``config.json`` loads unchanged."""

    vocab_size: int = 50265
    max_position_embeddings: int = 514
    type_vocab_size: int = 1
    layer_norm_eps: float = 1e-5
    pad_token_id: int | None = 1

    @property
    def first_position(self) -> int:
        """Position embedding row of the first token; earlier rows belong to padding."""
        return (self.pad_token_id or 0) + 1


def read_roberta(raw: Mapping[str, Any]) -> BertConfig:
    """Read ``config.json``; reject unsupported values."""
    padding = raw.get("pad_token_id", RobertaConfig.pad_token_id)
    if type(padding) is not int or padding < 0:
        raise DataError(f"pad_token_id must be a token id (positions start behind it), not {padding!r}")
    return read_config(raw, RobertaConfig)


class ClassificationHead(nn.Module):
    """Two linear layers with tanh between them, each after dropout."""

    def __init__(self, config: BertConfig, num_outputs: int) -> None:
        super().__init__()
        self.inner_dropout = Dropout(config.head_dropout, "classifier input")
        self.dense = Linear(config.hidden_size, config.hidden_size)
        self.dropout = Dropout(config.head_dropout, "classifier")
        self.out_proj = Linear(config.hidden_size, num_outputs)

    def forward(self, x_SD: Tensor, rows: HeadRows) -> Tensor:
        inner_SD = torch.tanh(self.dense(self.inner_dropout(x_SD, rows.noise), rows))
        logits_SC: Tensor = self.out_proj(self.dropout(inner_SD, rows.noise), rows)
        return logits_SC


class TextClassifier(nn.Module):
    """Classifier of the first token of a text; logits in fp32."""

    def __init__(self, config: BertConfig, num_outputs: int) -> None:
        super().__init__()
        self.classifier = ClassificationHead(config, num_outputs)

    def forward(self, x_SD: Tensor, rows: HeadRows) -> Tensor:
        logits_SC: Tensor = self.classifier(x_SD, rows).float()
        return logits_SC


def _family(model_type: str, prefix: str) -> Family:
    """Return the family of a ``model_type``; ``prefix`` begins its class names."""
    texts = HeadForm(
        f"{prefix}ForSequenceClassification", TextClassifier, "classifier", (),
        ("classification", "multi-label", "regression"),
    )  # fmt: skip
    return Family(
        model_type=model_type,
        class_name=f"{prefix}Model",
        read_config=read_roberta,
        build_layers=build_layers,
        keys={
            **trunk_keys(PREFIX),
            **with_parts({
                POOLER: ("head", "pooler"),
                "classifier.dense": ("head", "classifier.dense"),
                "classifier.out_proj": ("head", "classifier.out_proj"),
                "classifier": ("head", "classifier"),
                "qa_outputs": ("head", "qa_outputs"),
            }),
            **dict.fromkeys(PRETRAINING_HEAD),
        },
        heads=(
            texts,
            HeadForm(f"{prefix}ForTokenClassification", Classifier, "classifier", (), ("token-labels",)),
            HeadForm(f"{prefix}ForQuestionAnswering", SpanOutputs, "qa_outputs", (), ("spans",)),
        ),
        prefix=PREFIX,
        trunk=BERT.trunk,
        aliases=BERT.aliases,
        dropouts=BERT.dropouts,
        is_encoder=True,
        optional=frozenset({f"{POOLER}.weight", f"{POOLER}.bias"}),
    )  # fmt: skip


ROBERTA, XLM_ROBERTA = _family("roberta", "Roberta"), _family("xlm-roberta", "XLMRoberta")
