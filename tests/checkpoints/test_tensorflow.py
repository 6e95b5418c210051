"""Test reading google-research/bert checkpoints without TensorFlow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.tensorflow_reference import googles, message, number, write_bundle
from torch import Tensor

from gptj_ft.checkpoints.convert import Conversion, convert
from gptj_ft.checkpoints.foreign.tensorflow import find_bundle, open_bundle
from gptj_ft.errors import DataError, UsageError

CONFIG = {
    "vocab_size": 101, "max_position_embeddings": 24, "hidden_size": 32, "num_hidden_layers": 12,
    "num_attention_heads": 4, "intermediate_size": 48, "hidden_act": "gelu", "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1, "type_vocab_size": 2, "initializer_range": 0.02,
}  # fmt: skip
HEADS = {"pre-training": "ForPreTraining", "labels": "ForSequenceClassification", "spans": "ForQuestionAnswering"}


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(**CONFIG, num_labels=3 if kind == "labels" else 2)
    model = getattr(transformers, f"Bert{HEADS[kind]}")(config)
    for parameter in model.parameters():
        parameter.data += torch.randn(parameter.shape) * 0.1
    return model.eval()


def write(folder: Path, state: dict[str, Tensor], **options: Any) -> Path:
    """Write a folder like those in Google's archives."""
    folder.mkdir()
    (folder / "bert_config.json").write_text(json.dumps(CONFIG))
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "the")))
    named = googles(state)
    named |= {f"{name}/{part}": torch.ones(3) for name in list(named) for part in ("adam_m", "adam_v")}
    named["global_step"] = torch.tensor(7)
    return write_bundle(folder / "bert_model.ckpt", named, **options).parent


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize(("num_files", "block_entries"), [(1, 1000), (3, 7)])
def test_google_folder_opens_in_transformers(kind: str, num_files: int, block_entries: int, tmp_path: Path) -> None:
    model = model_of(kind)
    source = write(tmp_path / "L-12", model.state_dict(), num_files=num_files, block_entries=block_entries)
    report = convert(source, tmp_path / "model")
    assert report.is_verified
    found = {"pre-training": "", "labels": "ForSequenceClassification", "spans": "ForQuestionAnswering"}[kind]
    auto = getattr(transformers, f"AutoModel{found}")
    theirs = auto.from_pretrained(tmp_path / "model")
    own = model.bert if kind == "pre-training" else model
    for name, tensor in theirs.state_dict().items():
        if "pooler" in name and kind == "spans":
            continue
        assert torch.equal(tensor, own.state_dict()[name]), name
    assert any(name.startswith("cls.") for name in report.left_out) == (kind == "pre-training")
    assert (tmp_path / "model" / "vocab.txt").is_file()
    assert theirs.config.num_labels == (3 if kind == "labels" else 2)


def test_checkpoint_is_found_by_any_name(tmp_path: Path) -> None:
    source = write(tmp_path / "source", model_of("labels").state_dict())
    for name in ("bert_model.ckpt", "bert_model.ckpt.index", "bert_model.ckpt.data-00000-of-00001"):
        assert find_bundle(source / name) == source / "bert_model.ckpt.index"
    convert(source / "bert_model.ckpt", tmp_path / "model")
    write_bundle(source / "other", {"global_step": torch.tensor(7)})
    assert find_bundle(source) is None
    with pytest.raises(UsageError, match="no checkpoint of a known format"):
        convert(source, tmp_path / "again")
    with pytest.raises(UsageError, match="or several: name one"):
        convert(source, tmp_path / "again", Conversion(format="tensorflow"))


def test_checkpoint_of_other_program_is_rejected(tmp_path: Path) -> None:
    source = write(tmp_path / "source", model_of("labels").state_dict())
    name = "layer_with_weights-0/kernel/.ATTRIBUTES/VARIABLE_VALUE"
    write_bundle(source / "bert_model.ckpt", {name: torch.ones(2, 2)})
    with pytest.raises(UsageError, match=r"layer_with_weights-0.*is no tensor of google-research/bert"):
        convert(source, tmp_path / "model")
    (source / "bert_config.json").unlink()
    with pytest.raises(UsageError, match=r"has no bert_config.json: name the JSON of the model's shape with --config"):
        convert(source, tmp_path / "model")


def test_unsupported_bundles_are_rejected(tmp_path: Path) -> None:
    tensors = {"bert/x": torch.arange(6.0)}
    for options, reason in (
        ({"compression": 1}, "a block is compressed"),
        ({"header": number(2, 1)}, "big-endian checkpoint"),
        ({"more": message(7, b"")}, "bert/x is partitioned into slices"),
    ):
        index = write_bundle(tmp_path / "x", tensors, **options).with_name("x.index")  # type: ignore[arg-type]
        with pytest.raises((UsageError, DataError), match=reason):
            open_bundle(index)


def test_any_damaged_byte_is_detected(tmp_path: Path) -> None:
    tensors = {"bert/a": torch.arange(6.0).reshape(2, 3), "bert/b": torch.tensor(3), "bert/c": torch.ones(2).bfloat16()}
    index = write_bundle(tmp_path / "x", tensors, block_entries=2).with_name("x.index")
    data, whole = tmp_path / "x.data-00000-of-00001", index.read_bytes()
    for name, tensor in tensors.items():
        assert torch.equal(open_bundle(index).read(name), tensor), name
    footer = len(whole) - 48
    used = len(whole[footer:-8].rstrip(b"\x00"))
    for place in range(len(whole)):
        index.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        if footer + used <= place < len(whole) - 8:  # the padding of the footer
            assert open_bundle(index).entries.keys() == tensors.keys()
            continue
        with pytest.raises(DataError):
            open_bundle(index)
    for length in range(len(whole)):
        index.write_bytes(whole[:length])
        with pytest.raises(DataError):
            open_bundle(index)
    index.write_bytes(whole)
    content = data.read_bytes()
    data.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(DataError, match="bert/a is damaged: its checksum differs"):
        open_bundle(index).read("bert/a")
    data.write_bytes(content[:-1])
    with pytest.raises(DataError, match="is too short: it lacks bert/c"):
        open_bundle(index)
    data.unlink()
    with pytest.raises(DataError, match="is missing"):
        open_bundle(index)
