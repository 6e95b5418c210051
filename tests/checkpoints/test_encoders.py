"""Test converting published layouts of encoders: dropped heads and missing weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from gptj_ft.checkpoints.architecture import read_architecture
from gptj_ft.checkpoints.compare import diff_checkpoints
from gptj_ft.checkpoints.convert import Conversion, convert
from gptj_ft.checkpoints.model_folder import check_tensors, open_checkpoint
from gptj_ft.checkpoints.open import open_source
from gptj_ft.checkpoints.push import files_to_push
from gptj_ft.config.options import Recipe
from gptj_ft.errors import DataError, UsageError
from gptj_ft.generation.generator import InferenceSetup, check_writes
from gptj_ft.models.published import find_published
from gptj_ft.system.paths import download_folder, model_folder
from gptj_ft.training.inventory import models_in_home
from gptj_ft.training.setup import trained_architecture

SIZES = {"vocab_size": 101, "max_position_embeddings": 24, "hidden_size": 32, "num_hidden_layers": 2}
CONFIG = {**SIZES, "num_attention_heads": 4, "intermediate_size": 48}
LABELS = ("no", "perhaps", "yes")
# Google's: no model_type, no layer_norm_eps, and fields of a pooler that is not this one.
GOOGLE = {
    **CONFIG, "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
    "initializer_range": 0.02, "type_vocab_size": 2, "directionality": "bidi", "pooler_type": "first_token_transform",
    "pooler_fc_size": 768, "pooler_num_fc_layers": 3, "pooler_num_attention_heads": 12, "pooler_size_per_head": 128,
}  # fmt: skip
POOLER = ("bert.pooler.dense.bias", "bert.pooler.dense.weight")


def pretrained() -> Any:
    """Return a random BERT with both pre-training heads."""
    torch.manual_seed(0)
    model = transformers.BertForPreTraining(transformers.BertConfig(**CONFIG)).eval()
    for parameter in model.parameters():
        parameter.data += torch.randn(parameter.shape) * 0.1
    return model


def old_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    ends = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    return {
        next((name.removesuffix(new) + old for new, old in ends.items() if name.endswith(new)), name): tensor
        for name, tensor in tensors.items()
    }


def files_of(shape: str) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors of a published layout, and the classes in its config."""
    whole = {name: tensor.clone() for name, tensor in pretrained().state_dict().items()}
    ids = {"bert.embeddings.position_ids": torch.arange(24)[None]}
    if shape == "model without prefix":
        own = {name.removeprefix("bert."): tensor for name, tensor in whole.items() if name.startswith("bert.")}
        return {**own, "embeddings.position_ids": ids["bert.embeddings.position_ids"]}, ["BertModel"]
    if shape == "masked language model":
        return {name: tensor for name, tensor in whole.items() if ".pooler." not in name and "seq_" not in name}, [
            "BertForMaskedLM"
        ]
    if shape == "first files":
        return old_names({**whole, **ids}), ["BertForMaskedLM"]
    return {**whole, **ids}, ["BertForPreTraining"]


SHAPES = ("model without prefix", "masked language model", "first files", "pre-training")


def write(folder: Path, shape: str, form: str = "safetensors") -> Path:
    folder.mkdir()
    tensors, classes = files_of(shape)
    if form == "bin":
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": classes, **CONFIG}))
    return folder


def trunk_of(folder: Path) -> dict[str, Tensor]:
    with open_checkpoint(folder) as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint.names if name.startswith("bert.")}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("form", ["safetensors", "bin"])
@pytest.mark.parametrize("shape", SHAPES)
def test_base_checkpoint_layouts_open_in_transformers(shape: str, form: str, tmp_path: Path) -> None:
    source = write(tmp_path / "source", shape, form)
    report = convert(source, tmp_path / "model")
    own = pretrained().bert
    theirs = transformers.BertModel.from_pretrained(
        tmp_path / "model", add_pooling_layer=shape != "masked language model"
    )
    expected = dict(own.state_dict())
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    assert report.missing == (POOLER if shape == "masked language model" else ())
    assert {name.split(".")[0] for name in report.left_out} == (set() if "prefix" in shape else {"cls"})
    assert ("bert.embeddings.position_ids" in report.dropped) == (shape != "masked language model")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["architectures"] == ["BertModel"]
    with (
        open_source(source, None, None, tmp_path / "a") as first,
        open_source(tmp_path / "model", None, None, tmp_path / "b") as second,
    ):
        assert diff_checkpoints(first, second).tensors == report.tensors
    usual = convert(tmp_path / "model", tmp_path / "usual", Conversion(to="huggingface"))
    assert (tmp_path / "usual" / "model.safetensors").is_file()
    assert usual.missing == report.missing
    assert all(torch.equal(tensor, trunk_of(tmp_path / "usual")[name]) for name, tensor in trunk_of(source).items()
        if not name.endswith("position_ids"))  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("task", ["classification", "token-labels", "spans"])
def test_new_and_dropped_head_weights_are_reported(shape: str, task: str, tmp_path: Path) -> None:
    source = write(tmp_path / "source", shape)
    labels = () if task == "spans" else LABELS
    architecture = trained_architecture(Recipe.model_validate({"task": task}), source, labels)
    has_pooler = shape != "masked language model"
    output = "qa_outputs" if task == "spans" else "classifier"
    new = {f"{output}.weight", f"{output}.bias"}
    if task == "classification" and not has_pooler:
        new |= set(POOLER)
    assert architecture.new == new
    left_out = {name for name in architecture.left_out if not name.startswith("cls.")}
    assert left_out == (set(POOLER) if has_pooler and task != "classification" else set())
    assert any(name.startswith("cls.") for name in architecture.left_out) == ("prefix" not in shape)
    said = "\n".join(architecture.notes)
    assert f"{output}.bias" in said
    assert ("ignored tensors" in said) == bool(architecture.left_out)


@pytest.mark.parametrize("kind", ["Roberta", "XLMRoberta"])
def test_roberta_conversion_opens_in_transformers(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**CONFIG, "max_position_embeddings": 26, "type_vocab_size": 1})
    model = getattr(transformers, f"{kind}ForMaskedLM")(config)
    model.save_pretrained(tmp_path / "source")
    report = convert(tmp_path / "source", tmp_path / "model")
    assert report.missing == ("roberta.pooler.dense.bias", "roberta.pooler.dense.weight")
    assert {name.partition(".")[0] for name in report.left_out} == {"lm_head"}
    theirs = transformers.AutoModel.from_pretrained(tmp_path / "model", add_pooling_layer=False)
    assert type(theirs).__name__ == f"{kind}Model"
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(tensor, model.roberta.state_dict()[name]), name
    assert read_architecture(tmp_path / "model").config.n_positions == 24


def test_roberta_without_pad_token_is_rejected(tmp_path: Path) -> None:
    raw = {"model_type": "roberta", **CONFIG, "pad_token_id": None}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(DataError, match="pad_token_id must be a token id"):
        read_architecture(tmp_path)


def test_missing_trunk_weight_is_error(tmp_path: Path) -> None:
    source = write(tmp_path / "source", "pre-training")
    tensors, _ = files_of("pre-training")
    del tensors["bert.encoder.layer.1.output.dense.bias"]
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(DataError, match=r"bert.encoder.layer.1.output.dense.bias of shape \[32\] is missing"):
        convert(source, tmp_path / "model")


def test_missing_own_classifier_is_error(tmp_path: Path) -> None:
    source = write(tmp_path / "source", "pre-training")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "architectures": ["BertForSequenceClassification"]}))
    with open_checkpoint(source) as checkpoint, pytest.raises(DataError, match=r"classifier.weight .* is missing"):
        check_tensors(read_architecture(source), checkpoint)


def test_folder_with_google_config_converts(tmp_path: Path) -> None:
    source = write(tmp_path / "source", "first files", "bin")
    (source / "config.json").unlink()
    (source / "bert_config.json").write_text(json.dumps(GOOGLE))
    convert(source, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["model_type"] == "bert"
    assert not any(key.startswith(("pooler", "direct")) for key in config)
    theirs = transformers.AutoModel.from_pretrained(tmp_path / "model")
    assert theirs.config.layer_norm_eps == 1e-12
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(tensor, pretrained().bert.state_dict()[name]), name


def test_encoder_is_listed_and_pushed(tmp_path: Path) -> None:
    folder = model_folder("google-bert/bert-nano")
    folder.parent.mkdir(parents=True)
    convert(write(tmp_path / "source", "masked language model"), folder)
    (entry,) = models_in_home()
    assert (entry.family, entry.problem, entry.dtype) == ("bert", None, "float32")
    assert entry.parameters == sum(tensor.numel() for tensor in trunk_of(folder).values())
    names = [parcel.name for parcel in files_to_push(folder)]
    assert "config.json" in names
    assert "generation_config.json" not in names


def test_generate_with_encoder_suggests_predict(tmp_path: Path) -> None:
    torch.manual_seed(0)
    transformers.BertModel(transformers.BertConfig(**CONFIG)).save_pretrained(tmp_path / "base")
    transformers.BertForTokenClassification(transformers.BertConfig(**CONFIG)).save_pretrained(tmp_path / "tuned")
    for name in ("base", "tuned"):
        setup = InferenceSetup.of(tmp_path / name, Recipe.model_validate({"device": "cpu"}))
        with pytest.raises(UsageError, match="predict") as error:
            check_writes(setup)
        assert "\n" not in str(error.value)
        assert error.value.exit_code == 2


def test_ownerless_repository_and_conversion_use_different_folders() -> None:
    assert download_folder("bert-base-uncased") != model_folder("bert-base-uncased")
    assert download_folder("bert-base-uncased").name.split("--")[-1] == "bert-base-uncased"


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("base-uncased", 109_482_240),
        ("base-cased", 108_310_272),
        ("large-uncased", 335_141_888),
        ("large-cased", 333_579_264),
        ("base-multilingual-cased", 177_853_440),
        ("FacebookAI/roberta-base", 124_645_632),
        ("FacebookAI/xlm-roberta-base", 278_043_648),
    ],
)
def test_published_encoders_have_published_parameter_counts(name: str, parameters: int) -> None:
    repository = name if "/" in name else f"google-bert/bert-{name}"
    published = find_published(repository)
    assert published is not None
    assert published == find_published(repository.partition("/")[2])
    layers = published.architecture.layers()
    assert sum(tensor.numel() for layer in layers for tensor in layer.state_dict().values()) == parameters
