"""Converting a checkpoint, and proving that nothing was lost."""

import json
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from test_formats import FORMS, logits, make_state, write_source
from torch import Tensor
from transformers import AutoModelForCausalLM

from gptj_ft import convert as convert_module
from gptj_ft.convert import Conversion, convert
from gptj_ft.errors import DataError, ResourceError, UsageError
from gptj_ft.formats.huggingface import Checkpoint, open_checkpoint

State = dict[str, Tensor]


@pytest.fixture
def state() -> State:
    return make_state()[1]


@pytest.fixture
def source(tmp_path: Path, state: State) -> Path:
    return write_source(tmp_path / "source", state)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_converts_to_equal_logits(tmp_path: Path, state: State, form: str) -> None:
    source = write_source(tmp_path / "source", state, form)
    convert(source, tmp_path / "model")
    assert torch.equal(logits(tmp_path / "model"), logits(source))


@pytest.mark.parametrize(
    ("choice", "stored"), [("keep", torch.float16), ("fp32", torch.float32), ("bf16", torch.bfloat16)]
)
def test_a_half_precision_source_becomes_what_was_asked_for(
    tmp_path: Path, state: State, choice: str, stored: torch.dtype
) -> None:
    half = {name: tensor.half() for name, tensor in state.items()}
    source = write_source(tmp_path / "source", half, "bin")
    report = convert(source, tmp_path / "model", Conversion(dtype=choice))  # type: ignore[arg-type]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.dtype == stored
    assert all(torch.equal(tensor, half[name].to(stored)) for name, tensor in model.state_dict().items())
    assert (report.dtype, report.bytes) == (str(stored).split(".")[1], report.parameters * stored.itemsize)


def test_a_mixed_source_is_kept_tensor_by_tensor(tmp_path: Path, state: State) -> None:
    state["lm_head.bias"] = state["lm_head.bias"].bfloat16()
    state["lm_head.weight"] = state["lm_head.weight"].half()
    report = convert(write_source(tmp_path / "source", state), tmp_path / "model")
    with open_checkpoint(tmp_path / "model") as checkpoint:
        assert checkpoint.dtype("lm_head.bias") == torch.bfloat16
        assert checkpoint.dtype("lm_head.weight") == torch.float16
        assert checkpoint.dtype("transformer.wte.weight") == torch.float32
    assert report.dtype == "mixed"
    assert json.loads((tmp_path / "model/config.json").read_text())["dtype"] == "float32"


def test_the_report_counts_what_was_written(tmp_path: Path, state: State) -> None:
    masks = {f"transformer.h.{n}.attn.masked_bias": torch.tensor(-1e9) for n in range(2)}
    source = write_source(tmp_path / "source", {**state, **masks}, "bin")
    steps: list[tuple[int, int]] = []
    report = convert(
        source, tmp_path / "model", Conversion(dtype="bf16"), lambda done, total: steps.append((done, total))
    )
    assert report.tensors == len(state)
    assert report.parameters == sum(tensor.numel() for tensor in state.values())
    assert report.bytes == 2 * report.parameters
    assert sorted(report.dropped) == sorted(masks)
    assert [total for _, total in steps] == [2 * report.bytes] * len(steps)
    assert [done for done, _ in steps] == sorted({done for done, _ in steps})
    assert steps[-1] == (2 * report.bytes, 2 * report.bytes)


def test_what_a_tuned_model_says_about_its_prompt_is_kept(tmp_path: Path, source: Path) -> None:
    (source / "gptj_ft.json").write_text('{"prompt": "Q: {question}"}')
    (source / "tokenizer.json").write_text("{}")
    convert(source, tmp_path / "model")
    assert json.loads((tmp_path / "model/gptj_ft.json").read_text()) == {"prompt": "Q: {question}"}
    assert (tmp_path / "model/tokenizer.json").read_text() == "{}"


def test_nan_and_infinity_are_carried_over_and_said(tmp_path: Path, state: State) -> None:
    state["lm_head.bias"][:2] = torch.tensor([float("nan"), float("inf")])
    report = convert(write_source(tmp_path / "source", state), tmp_path / "model", Conversion(dtype="fp16"))
    assert report.not_finite == ("lm_head.bias",)
    with open_checkpoint(tmp_path / "model") as checkpoint:
        assert torch.equal(checkpoint.read("lm_head.bias"), state["lm_head.bias"].half()) is False  # NaN
        assert checkpoint.read("lm_head.bias")[1] == float("inf")


def test_a_value_too_large_for_fp16_is_refused(tmp_path: Path, state: State) -> None:
    state["transformer.h.1.mlp.fc_out.bias"][3] = -70000.0
    source = write_source(tmp_path / "source", state)
    with pytest.raises(DataError, match=r"mlp\.fc_out\.bias holds 70000, too large for fp16"):
        convert(source, tmp_path / "out" / "model", Conversion(dtype="fp16"))
    assert list((tmp_path / "out").iterdir()) == []


def test_a_result_that_differs_never_appears(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Checkpoint.read

    def faulty(self: Checkpoint, name: str, *rows: int) -> Tensor:
        tensor = read(self, name, *rows)
        return tensor + 1 if name == "lm_head.bias" and ".converting" in str(self.folder) else tensor

    monkeypatch.setattr(Checkpoint, "read", faulty)
    with pytest.raises(DataError, match="differs"):
        convert(source, tmp_path / "out" / "model")
    assert list((tmp_path / "out").iterdir()) == []


def test_too_little_disk_is_found_before_anything_is_written(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(convert_module.shutil, "disk_usage", lambda path: usage(0, 0, 1 << 20))
    with pytest.raises(ResourceError, match=r"needs 0\.0 GB, but .* has 0\.0 GB free"):
        convert(source, tmp_path / "out" / "model")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("contradiction", "reason"),
    [({"tie_word_embeddings": True}, "tie_word_embeddings"), ({"activation_function": "gelu"}, "gelu_new")],
)
def test_a_config_that_would_compute_something_else_is_refused(
    tmp_path: Path, source: Path, contradiction: dict[str, object], reason: str
) -> None:
    raw = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**raw, **contradiction}))
    with pytest.raises(DataError, match=reason):
        convert(source, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_weights_that_do_not_fit_are_refused_before_anything_is_written(tmp_path: Path, state: State) -> None:
    del state["lm_head.bias"]
    source = write_source(tmp_path / "source", state)
    with pytest.raises(DataError, match=r"lm_head\.bias of shape \[64\] is missing"):
        convert(source, tmp_path / "out" / "model")
    assert not (tmp_path / "out").exists()


def test_an_existing_target_is_refused(tmp_path: Path, source: Path) -> None:
    convert(source, tmp_path / "model")
    with pytest.raises(UsageError, match="exists"):
        convert(source, tmp_path / "model")
    with safe_open(tmp_path / "model/model-00001-of-00004.safetensors", "pt") as shard:
        assert shard.metadata() == {"format": "pt"}
