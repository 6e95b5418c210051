"""Folders that keep the codes of a GGUF file: llama.cpp's values, Hugging Face's order of rows, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.cli_runner import Shell
from support.gguf_models import make_model, quantize_matrices

from gptj_ft.checkpoints.architecture import read_architecture
from gptj_ft.checkpoints.convert import Conversion, convert
from gptj_ft.checkpoints.model_folder import open_checkpoint
from gptj_ft.checkpoints.quantize import quantized_names, vocabulary_names
from gptj_ft.errors import DataError, UsageError
from gptj_ft.models.quantization.form import QuantizedForm
from gptj_ft.models.quantization.ggml import GGML

SHAPES = {
    "llama": {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64},  # its rows have another order in GGUF
    "gpt2": {"n_embd": 256, "n_inner": 256},  # stores weights (in, out)
    "gpt_neox": {"hidden_size": 256, "intermediate_size": 256},
}
KEEP = Conversion(quantize="keep")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function: name of a model -> its GGUF file in fp32, made once."""
    home = tmp_path_factory.mktemp("gguf")

    def file_of(name: str) -> Path:
        file = home / f"{name}.gguf"
        if not file.is_file():
            convert(make_model(home / name, name, **SHAPES[name]), file, Conversion(to="gguf"))
        return file

    return file_of


@pytest.mark.parametrize("name", GGML)
def test_values_of_random_codes_equal_gguf(name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    codec, rows, columns = GGML[name], 7, 2 * 256
    blocks = np.random.default_rng(0).integers(0, 256, (rows * columns // block, size), np.uint8)
    scales = {"Q6_K": (208,), "Q8_0": (0,), "Q4_0": (0,), "Q5_0": (0,)}.get(name, (0, 2))
    for start in scales:
        numbers = np.random.default_rng(start).normal(size=(len(blocks), 1)).astype(np.float16)
        blocks[:, start : start + 2] = numbers.view(np.uint8)
    expected = torch.from_numpy(gguf.dequantize(blocks.reshape(rows, -1), kind))
    parts = codec.unpack(torch.from_numpy(blocks))
    form = QuantizedForm(codec, rows, columns, torch.float32)
    assert {part: len(items) for part, items in parts.items()} == form.num_items()
    out = torch.empty(rows, columns)
    form.dequantize(parts, out)
    assert torch.equal(out.view(torch.int32), expected.view(torch.int32))
    bits = form.num_bytes * 8 / (rows * columns)
    assert bits == pytest.approx(size * 8 / block, rel=0.03)  # the integers of K types have 8 bits instead of 6


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("model", "kinds"),
    [("llama", ["Q4_K", "Q6_K", "Q5_K"]), ("gpt2", ["Q8_0", "Q4_0"]), ("gpt_neox", ["Q4_1", "Q5_0", "Q5_1"])],
)
def test_kept_codes_restore_the_values(model: str, kinds: list[str], plain, tmp_path: Path) -> None:
    file = quantize_matrices(plain(model), tmp_path / "codes.gguf", kinds)
    convert(file, tmp_path / "values", Conversion(dtype="fp32"))
    report = convert(file, tmp_path / "codes", KEEP)
    assert report.dtype == " and ".join(sorted(kinds))
    architecture = read_architecture(tmp_path / "codes")
    matrices = {*quantized_names(architecture), *vocabulary_names(architecture)}
    with open_checkpoint(tmp_path / "values") as values, open_checkpoint(tmp_path / "codes") as codes:
        assert set(codes.names) == set(values.names)
        for name in values.names:
            assert torch.equal(codes.read(name), values.read(name)), name
            assert (codes.matrix(name) is not None) == (name in matrices), name
    stored = sum(file.stat().st_size for file in (tmp_path / "codes").glob("*.safetensors"))
    assert stored < 0.45 * sum(file.stat().st_size for file in (tmp_path / "values").glob("*.safetensors"))


def test_values_are_rounded_to_the_type_that_is_named(plain, tmp_path: Path) -> None:
    file = quantize_matrices(plain("llama"), tmp_path / "codes.gguf", ["Q8_0"])
    convert(file, tmp_path / "values", Conversion(dtype="bf16"))
    convert(file, tmp_path / "codes", Conversion(quantize="keep", dtype="bf16"))
    with open_checkpoint(tmp_path / "values") as values, open_checkpoint(tmp_path / "codes") as codes:
        for name in values.names:
            assert torch.equal(codes.read(name), values.read(name)), name


@pytest.mark.thorough
def test_adapter_on_kept_codes_is_trained_and_merged(plain, shell: Shell, rows_file: Path, tmp_path: Path) -> None:
    file = quantize_matrices(plain("llama"), tmp_path / "codes.gguf", ["Q4_0"])
    assert shell(f"convert {file} codes --quantize keep").code == 0
    assert shell(f"convert {file} values --dtype fp32").code == 0
    losses = []
    for base in ("codes", "values"):
        options = "--recipe summarization --method lora --max-steps 2 --batch-size 2 --precision fp32 --max-length 64"
        done = shell(f"finetune --data {rows_file} {options} --model {base} --output run-{base} --quiet")
        assert done.code == 0, done.said
        lines = (tmp_path / f"run-{base}/metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line).get("loss") for line in lines])
        merged = shell(f"convert --merge run-{base}/model {base} merged-{base}")
        assert merged.code == 0, merged.said
    assert losses[0] == losses[1]
    with open_checkpoint(tmp_path / "merged-codes") as ours, open_checkpoint(tmp_path / "merged-values") as theirs:
        assert all(torch.equal(ours.read(name), theirs.read(name)) for name in theirs.names)


def test_only_gguf_files_with_codes_are_kept(plain, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="none of its matrices is quantized as Q8_0"):
        convert(plain("llama"), tmp_path / "x", KEEP)
    with pytest.raises(UsageError, match="needs a GGUF file, whose codes it keeps"):
        convert(plain("llama").with_suffix(""), tmp_path / "x", KEEP)
    with pytest.raises(UsageError, match="--quantize keep excludes --merge and --average"):
        convert(plain("llama"), tmp_path / "x", Conversion(quantize="keep", average=(tmp_path,)))
    assert not (tmp_path / "x").exists()


def test_scales_of_infinity_are_refused(plain, tmp_path: Path) -> None:
    file = quantize_matrices(plain("llama"), tmp_path / "codes.gguf", ["Q8_0"])
    tensor = next(each for each in gguf.GGUFReader(file).tensors if each.name == "blk.1.ffn_up.weight")
    content = bytearray(file.read_bytes())
    content[tensor.data_offset : tensor.data_offset + 2] = np.array([np.inf], np.float16).tobytes()
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"blk\.1\.ffn_up\.weight has scales of NaN or infinity"):
        convert(file, tmp_path / "codes", KEEP)


NAME = "model.layers.0.mlp.up_proj.weight"
DAMAGES: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "no scales": (lambda stored: stored.pop(f"{NAME}.scales"), r"is quantized, but .*\.scales is missing"),
    "short codes": (lambda stored: stored.update({NAME: stored[NAME][1:].clone()}), "does not fit the shape"),
    "other type": (
        lambda stored: stored.update({f"{NAME}.ggml": torch.tensor([*b'{"type": "Q2_K"}'], dtype=torch.uint8)}),
        "of a quantization that is not read",
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_codes_are_named_in_one_line(damage: str, plain, tmp_path: Path) -> None:
    change, message = DAMAGES[damage]
    convert(quantize_matrices(plain("llama"), tmp_path / "codes.gguf", ["Q4_1"]), tmp_path / "codes", KEEP)
    for path in (tmp_path / "codes").glob("*.safetensors"):
        stored = load_file(path)
        if NAME in stored:
            change(stored)
            save_file(stored, path, {"format": "pt"})
    index = tmp_path / "codes/model.safetensors.index.json"
    names = json.loads(index.read_text())
    names["weight_map"] = {
        name: file for name, file in names["weight_map"].items() if name in _names(tmp_path / "codes")
    }
    index.write_text(json.dumps(names))
    with pytest.raises(DataError, match=message) as caught:
        open_checkpoint(tmp_path / "codes")
    assert "\n" not in str(caught.value)


def _names(folder: Path) -> set[str]:
    return {name for path in folder.glob("*.safetensors") for name in load_file(path)}
