"""Quantized folders: written in bitsandbytes' layout, read back, restored, and rejected when they are damaged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import random_model
from safetensors.torch import load_file, save_file
from support.cli_runner import Shell
from support.family_models import random_of_family

from gptj_ft.checkpoints.architecture import read_architecture
from gptj_ft.checkpoints.convert import Conversion, convert
from gptj_ft.checkpoints.model_folder import Checkpoint, check_tensors, open_checkpoint
from gptj_ft.checkpoints.quantize import quantized_names
from gptj_ft.errors import DataError, UsageError
from gptj_ft.models.quantization.bitsandbytes import WRITTEN
from gptj_ft.models.quantization.form import QuantizedForm

FAMILIES = ("gptj", "gpt2", "llama")  # gpt2 stores weights (in, out)


def model_of(name: str):
    return random_of_family(name) if name == "llama" else random_model("narrow" if name == "gptj" else name)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) / "model" for name in FAMILIES}
    for name, folder in made.items():
        model_of(name).save_pretrained(folder)
    return made


def quantized(folder: Path, quantization: str, tmp: Path, **more: object) -> Path:
    target = tmp / f"{folder.parent.name}-{quantization}"
    convert(folder, target, Conversion(quantize=quantization, **more))  # type: ignore[arg-type]
    return target


def values_of(folder: Path) -> dict[str, torch.Tensor]:
    with open_checkpoint(folder) as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint.names}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("quantization", ["nf4", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_values_read_are_those_of_the_codec(family: str, quantization: str, folders, tmp_path: Path) -> None:
    folder = quantized(folders[family], quantization, tmp_path)
    plain, found = values_of(folders[family]), values_of(folder)
    architecture = read_architecture(folder)
    matrices = quantized_names(architecture)
    assert len(matrices) >= 4
    for name, values in plain.items():
        expected = values
        if name in matrices:
            stored = values.t() if matrices[name] else values
            codec = WRITTEN[quantization]
            restored = torch.empty(stored.shape)
            QuantizedForm(codec, *stored.shape, torch.float32).dequantize(codec.encode(stored), restored)
            expected = restored.t() if matrices[name] else restored
            assert not torch.equal(expected, values)
        assert torch.equal(found[name], expected), name


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_any_rows_read_alone_equal_rows_of_the_whole(quantization: str, folders, tmp_path: Path) -> None:
    folder = quantized(folders["llama"], quantization, tmp_path)
    with open_checkpoint(folder) as checkpoint:
        for name in quantized_names(read_architecture(folder)):
            whole = checkpoint.read(name)
            for start, stop in ((0, 1), (1, 3), (len(whole) - 1, len(whole)), (2, len(whole) - 1)):
                assert torch.equal(checkpoint.read(name, start, stop), whole[start:stop])


def test_folder_has_the_names_and_config_of_bitsandbytes(folders, tmp_path: Path) -> None:
    folder = quantized(folders["gptj"], "nf4", tmp_path, dtype="bf16")
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["load_in_4bit"], config["bnb_4bit_quant_type"]) == (
        "bitsandbytes",
        True,
        "nf4",
    )
    assert config["llm_int8_skip_modules"] == ["lm_head"]
    tensors = {key: x for file in folder.glob("*.safetensors") for key, x in load_file(file).items()}
    name = "transformer.h.0.attn.q_proj.weight"
    parts = [tensors[f"{name}{part}"] for part in ("", ".absmax", ".quant_map")]
    assert [part.dtype for part in parts] == [torch.uint8, torch.float32, torch.float32]
    assert [tuple(part.shape) for part in parts] == [(48 * 48 // 2, 1), (48 * 48 // 64,), (16,)]
    state = json.loads(bytes(tensors[f"{name}.quant_state.bitsandbytes__nf4"].tolist()))
    assert state == {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [48, 48]}
    eight = quantized(folders["gptj"], "int8", tmp_path)
    tensors = {key: x for file in eight.glob("*.safetensors") for key, x in load_file(file).items()}
    name = name.removesuffix(".weight")
    found = [(tensors[f"{name}.{part}"].dtype, tuple(tensors[f"{name}.{part}"].shape))
             for part in ("weight", "SCB", "weight_format")]  # fmt: skip
    assert found == [(torch.int8, (48, 48)), (torch.float32, (48,)), (torch.uint8, ())]


def test_transformers_computes_the_same_logits(folders, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM

    folder = quantized(folders["llama"], "nf4", tmp_path)
    restored = tmp_path / "restored"
    convert(folder, restored, Conversion(dtype="fp32"))
    tokens = torch.arange(12)[None]
    theirs, ours = (AutoModelForCausalLM.from_pretrained(each).eval()(tokens).logits for each in (folder, restored))
    assert torch.allclose(theirs, ours, atol=1e-5)


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_conversion_without_quantize_restores_a_plain_model(quantization: str, folders, tmp_path: Path) -> None:
    folder = quantized(folders["gpt2"], quantization, tmp_path)
    convert(folder, tmp_path / "plain", Conversion(dtype="fp32"))
    assert "quantization_config" not in json.loads((tmp_path / "plain/config.json").read_text())
    ours, theirs = values_of(tmp_path / "plain"), values_of(folder)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_quantization_in_a_killed_conversion_resumes_to_the_same_files(folders, tmp_path: Path, monkeypatch) -> None:
    whole = quantized(folders["llama"], "nf4", tmp_path)
    read, reads = Checkpoint.read, 0

    def cut(*arguments: object) -> torch.Tensor:
        nonlocal reads
        reads += 1
        if reads == 30:
            raise KeyboardInterrupt
        return read(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Checkpoint, "read", cut)
    options = Conversion(quantize="nf4")
    with pytest.raises(KeyboardInterrupt):
        convert(folders["llama"], tmp_path / "cut", options)
    monkeypatch.undo()
    convert(folders["llama"], tmp_path / "cut", options)
    for file in whole.glob("*.safetensors"):
        assert (tmp_path / "cut" / file.name).read_bytes() == file.read_bytes()


def rewritten(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        file = next(each for each in sorted(folder.glob("*.safetensors")) if "layers.0" in " ".join(load_file(each)))
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, {"format": "pt"})
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        index["weight_map"] = {key: name for key, name in index["weight_map"].items() if name != file.name}
        index["weight_map"] |= dict.fromkeys(tensors, file.name)
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return apply


NAME = "model.layers.0.mlp.up_proj.weight"
STATE = f"{NAME}.quant_state.bitsandbytes__nf4"


def state(**changes: object) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        values = json.loads(bytes(tensors[STATE].tolist())) | changes
        tensors[STATE] = torch.tensor([*json.dumps(values).encode()], dtype=torch.uint8)

    return change


DAMAGES = {
    "codes too short": (lambda x: x.update({NAME: x[NAME][:-32].clone()}), "does not fit the shape"),
    "scales missing": (lambda x: x.pop(f"{NAME}.absmax"), "absmax is missing"),
    "scales of another type": (lambda x: x.update({f"{NAME}.absmax": x[f"{NAME}.absmax"].int()}), "does not fit"),
    "another table": (lambda x: x[f"{NAME}.quant_map"].mul_(2), "other values than nf4"),
    "state not JSON": (lambda x: x.update({STATE: torch.tensor([123], dtype=torch.uint8)}), "is damaged"),
    "state a list": (lambda x: x.update({STATE: torch.tensor([*b"[1]"], dtype=torch.uint8)}), "is damaged"),
    "unknown codes": (state(quant_type="nf3"), "is damaged, or of a quantization"),
    "no block": (state(blocksize=0), "is damaged, or of a quantization"),
    "negative shape": (state(shape=[-16, 16]), "is damaged, or of a quantization"),
    "huge shape": (state(shape=[1 << 40, 1 << 20]), "does not fit the shape"),
    "another shape": (state(shape=[8, 64]), "."),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_folder_is_rejected_in_one_line(damage: str, folders, tmp_path: Path) -> None:
    folder = quantized(folders["llama"], "nf4", tmp_path)
    change, message = DAMAGES[damage]
    rewritten(change)(folder)
    with pytest.raises(DataError, match=message) as error, open_checkpoint(folder) as checkpoint:
        check_tensors(read_architecture(folder), checkpoint)
    assert "\n" not in str(error.value)
    assert str(folder) in str(error.value)


def test_old_eight_bit_layouts_are_rejected(folders, tmp_path: Path) -> None:
    folder = quantized(folders["llama"], "int8", tmp_path)
    rewritten(lambda x: x.update({NAME.replace("weight", "weight_format"): torch.tensor(2, dtype=torch.uint8)}))(folder)
    with pytest.raises(UsageError, match="8-bit layout of an old GPU"):
        open_checkpoint(folder)


def test_second_quantization_is_refused(folders, tmp_path: Path) -> None:
    folder = quantized(folders["llama"], "int8", tmp_path)
    with pytest.raises(UsageError, match=r"quantized already \(int8\)"):
        quantized(folder, "nf4", tmp_path / "again")


@pytest.mark.parametrize("values", [float("nan"), float("inf")])
@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_weights_that_are_not_finite_are_refused(values: float, quantization: str, folders, tmp_path: Path) -> None:
    shutil.copytree(folders["llama"], tmp_path / "model")
    tensors = load_file(tmp_path / "model/model.safetensors")
    tensors[NAME][3, 5] = values
    save_file(tensors, tmp_path / "model/model.safetensors", {"format": "pt"})
    with pytest.raises(DataError, match=f"{NAME} holds NaN, infinity"):
        convert(tmp_path / "model", tmp_path / "target", Conversion(quantize=quantization))  # type: ignore[arg-type]
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--to", "gguf"], "leave out --to gguf"),
        (["--to", "mesh"], "leave out --to mesh"),
        (["--with-optimizer"], "excludes --with-optimizer"),
        (["--quantize", "int3"], "expected nf4, int8 or keep"),
        (["--any-base"], "--any-base needs --merge"),
    ],
)
def test_options_that_exclude_quantization_are_named(
    options: list[str], message: str, folders, tmp_path: Path, shell: Shell
) -> None:
    result = shell("convert", folders["gptj"], tmp_path / "target", "--quantize", "nf4", *options)
    assert (result.code, result.out, "Traceback" in result.err) == (2, "", False)
    assert message in result.said


def test_folder_without_a_name_is_not_that_of_the_plain_model(folders, shell: Shell) -> None:
    result = shell("convert --json --quantize nf4", folders["gptj"])
    assert (result.code, Path(result.json["folder"]).name) == (0, "model-nf4")


def test_push_without_target_never_uploads_the_plain_model(folders, shell: Shell) -> None:
    result = shell("convert --quantize nf4 --push owner/name", folders["gptj"])
    assert (result.code, "name DEST to convert" in result.said) == (2, True)
