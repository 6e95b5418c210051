"""Test GGUF files: read, written, and used as models; the packages gguf and transformers are the oracles."""

import json
import os
import shutil
import signal
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from support.gguf_models import MODELS, make_model
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from gptj_ft.checkpoints.architecture import read_architecture
from gptj_ft.checkpoints.base_model import find_model
from gptj_ft.checkpoints.convert import Conversion, convert
from gptj_ft.checkpoints.gguf.header import read_header
from gptj_ft.checkpoints.gguf.layout import READ_TYPES, TensorForm
from gptj_ft.checkpoints.gguf.modelfile import modelfile
from gptj_ft.checkpoints.gguf.source import GgufShard
from gptj_ft.checkpoints.gguf.tokenizer import Vocabulary
from gptj_ft.checkpoints.model_folder import open_checkpoint
from gptj_ft.checkpoints.tiny import make_tiny
from gptj_ft.errors import DataError, UsageError

TEXT = "The printer's 123 pages;\n\n\tdon't   naïve 日本 <|im_start|>user"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Return a function: name of a model -> its folder and its GGUF file, made once."""
    home, made = tmp_path_factory.mktemp("gguf"), dict[str, tuple[Path, Path]]()

    def export(name: str) -> tuple[Path, Path]:
        if name not in made:
            folder = make_model(home / name, name)
            convert(folder, home / f"{name}.gguf", Conversion(to="gguf"))
            made[name] = folder, home / f"{name}.gguf"
        return made[name]

    return export


@pytest.mark.parametrize("name", READ_TYPES)
def test_dequantized_values_equal_gguf(tmp_path: Path, name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rows = (5, max(512, block) // block * size)
    data = np.random.default_rng(0).integers(0, 256, rows, np.uint8)
    if block > 1:  # no NaN in the scales, which would hide differences
        data = np.where(data % 128 >= 120, data & 0x87, data).astype(np.uint8)
    else:
        data = (np.arange(5 * 512, dtype=np.float32).reshape(5, 512) - 99).astype("f4" if name != "F16" else "f2")
        data = gguf.quantize(data.astype("f4"), kind).view(np.uint8).reshape(5, -1)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("x", data, raw_dtype=kind)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    stored = gguf.GGUFReader(tmp_path / "x.gguf").tensors[0]
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(np.array(gguf.dequantize(stored.data, stored.tensor_type), dtype=np.float32))
    shard = GgufShard(read_header(tmp_path / "x.gguf"), {"x": TensorForm("x")})
    values = shard.read("x").float()
    assert torch.equal(values.view(torch.int32), expected.view(torch.int32))
    assert torch.equal(shard.read("x", 2, 4).float().view(torch.int32), expected[2:4].view(torch.int32))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", MODELS)
def test_model_survives_gguf_and_back(tmp_path: Path, exported: Callable[[str], tuple[Path, Path]], name: str) -> None:
    folder, file = exported(name)
    convert(file, tmp_path / "back")
    with open_checkpoint(folder) as before, open_checkpoint(tmp_path / "back") as after:
        assert set(before.names) == set(after.names)
        is_offset = name.startswith("gemma")
        for tensor in before.names:
            one, other = before.read(tensor), after.read(tensor)
            assert torch.equal(one, other) or (is_offset and torch.allclose(one, other, atol=1e-6)), tensor
    tokenizers = [Tokenizer.from_file(str(each / "tokenizer.json")) for each in (folder, tmp_path / "back")]
    assert tokenizers[0].encode(TEXT).ids == tokenizers[1].encode(TEXT).ids
    assert (tmp_path / "back/chat_template.jinja").read_text() == (folder / "chat_template.jinja").read_text()
    ends = json.loads((tmp_path / "back/generation_config.json").read_text())["eos_token_id"]
    assert ends in (2, [2, 0])


def test_ids_of_another_vocabulary_are_dropped(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", "phi3", pad_token_id=None)
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | {"bos_token_id": 50256, "eos_token_id": 50256}
    path.write_text(json.dumps(raw))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    kept = {key: value for key, value in settings.items() if key not in ("bos_token", "pad_token")}
    (folder / "tokenizer_config.json").write_text(json.dumps(kept))
    (folder / "generation_config.json").unlink()
    convert(folder, tmp_path / "m.gguf", Conversion(to="gguf"))
    assert "tokenizer.ggml.bos_token_id" not in read_header(tmp_path / "m.gguf").metadata
    convert(tmp_path / "m.gguf", tmp_path / "back")
    back = read_architecture(tmp_path / "back")
    assert (back.config.bos_token_id, back.config.pad_token_id) == (None, None), "not the family's 32000"
    AutoModelForCausalLM.from_pretrained(tmp_path / "back")


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_transformers_opens_gguf(exported: Callable[[str], tuple[Path, Path]], name: str) -> None:
    folder, file = exported(name)
    ids = torch.tensor([[3, 99, 280, 5, 61, 7]])
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    assert tokenizer(TEXT)["input_ids"] == AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"]
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, expected(ids).logits, atol=1e-5)


def test_gemma_norms_are_stored_plus_one(exported: Callable[[str], tuple[Path, Path]]) -> None:
    """llama.cpp multiplies by the stored weight, `transformers` by one more than its own."""
    folder, file = exported("gemma2")
    stored = next(each for each in gguf.GGUFReader(file).tensors if each.name == "output_norm.weight")
    with open_checkpoint(folder) as checkpoint:
        assert torch.allclose(torch.from_numpy(np.array(stored.data)), checkpoint.read("model.norm.weight") + 1)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "q8_0"])
def test_matrices_have_the_requested_type(tmp_path: Path, exported, dtype: str) -> None:
    folder, _ = exported("llama")
    report = convert(folder, tmp_path / "x.gguf", Conversion(to="gguf", dtype=dtype))
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "x.gguf").tensors}
    kind = {"fp16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}[dtype]
    assert tensors["blk.0.ffn_down.weight"].tensor_type.name == kind == report.dtype.upper()
    assert tensors["blk.0.ffn_norm.weight"].tensor_type.name == "F32"
    with open_checkpoint(folder) as source:
        weight = source.read("model.layers.0.mlp.down_proj.weight").numpy()
    expected = gguf.quantize(weight, tensors["blk.0.ffn_down.weight"].tensor_type)
    stored = tensors["blk.0.ffn_down.weight"].data
    assert np.array_equal(stored.view(np.uint8).ravel(), np.ascontiguousarray(expected).view(np.uint8).ravel())


def test_modelfile_has_template_and_stops(exported) -> None:
    _, file = exported("llama")
    assert file.with_suffix(".Modelfile").read_text() == (
        "FROM ./llama.gguf\n"
        'TEMPLATE """{{- range .Messages }}'
        '{{- if eq .Role "system" }}{{ "<|im_start|>system\\n" }}{{ .Content }}{{ "<|im_end|>\\n" }}'
        '{{- else if eq .Role "user" }}{{ "<|im_start|>user\\n" }}{{ .Content }}{{ "<|im_end|>\\n" }}'
        '{{- else if eq .Role "assistant" }}{{ "<|im_start|>assistant\\n" }}{{ .Content }}{{ "<|im_end|>\\n" }}'
        '{{- end }}{{- end }}{{ "<|im_start|>assistant\\n" }}"""\n'
        'PARAMETER stop "<|im_end|>"\nPARAMETER stop "<|endoftext|>"\n'
    )


def test_modelfile_leaves_prompt_templates_to_gguf(tmp_path: Path) -> None:
    vocabulary = Vocabulary({}, ["<end>"], (0,), "Summarize:\n{{ messages[-1].content }}\nSummary:", False, None)
    assert modelfile(tmp_path / "x.gguf", vocabulary).splitlines()[1].startswith("# the chat template is in the GGUF")


def test_gguf_is_converted_once(exported, own_home: Path) -> None:
    _, file = exported("llama")
    folder = find_model(str(file))
    changed = (folder / "config.json").stat().st_mtime_ns
    assert find_model(str(file)) == folder
    assert (folder / "config.json").stat().st_mtime_ns == changed
    assert folder.parent == own_home / "models"


def test_file_of_a_run_has_the_runs_name(exported, own_home: Path, shell) -> None:
    folder, _ = exported("llama")
    shutil.copytree(folder, Path("runs/mine/model"))
    done = shell("convert runs/mine --to gguf --quiet")
    assert done.code == 0, done.err
    assert {path.name for path in (own_home / "models").iterdir()} == {"mine.gguf", "mine.Modelfile"}


def test_stopped_export_keeps_nothing(tmp_path: Path, exported, shell, wrap_reads) -> None:
    folder, signals = exported("llama")[0], [signal.SIGUSR1]

    def signalled(read: Callable[..., torch.Tensor], *arguments: object) -> torch.Tensor:
        if signals:
            os.kill(os.getpid(), signals.pop())
        return read(*arguments)

    wrap_reads(signalled)
    done = shell("convert --to gguf", folder, tmp_path / "out" / "x.gguf")
    assert (done.code, "nothing is kept; run the same command to start again" in done.said) == (130, True), done.err
    assert list((tmp_path / "out").iterdir()) == []


def test_gptj_is_rejected_in_one_line(tmp_path: Path) -> None:
    make_tiny(tmp_path / "m", ["a text"], 0, vocab_target=300)
    with pytest.raises(UsageError, match="no graph for gptj") as error:
        convert(tmp_path / "m", tmp_path / "x.gguf", Conversion(to="gguf"))
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def _patched(data: bytes, old: bytes, new: bytes) -> bytes:
    assert old in data
    return data.replace(old, new, 1)


DAMAGES = {
    "header": (lambda data: data[:500], "truncated"),
    "tensors": (lambda data: data[:-4000], "truncated"),
    "letters": (lambda data: b"GGML" + data[4:], "no checkpoint of a known format|no GGUF file"),
    "architecture": (lambda data: _patched(data, b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba"), "'mamba'"),
    "big-endian": (lambda data: data[:4] + struct.pack(">I", 3) + data[8:], "big-endian"),
    "version": (lambda data: data[:4] + struct.pack("<I", 9) + data[8:], "version 9"),
    "count": (lambda data: data[:8] + struct.pack("<QQ", 2**60, 2**60) + data[24:], "corrupt|truncated"),
    "quantization": (
        lambda data: _patched(data, b"ffn_down.weight\2\0\0\0" + struct.pack("<QQI", 96, 48, 0),
                              b"ffn_down.weight\2\0\0\0" + struct.pack("<QQI", 96, 48, 16)),
        "quantized as IQ2_XXS are not read",
    ),
    "splitter": (lambda data: _patched(data, b"llama-bpe", b"llama-bpx"), "'llama-bpx', which is not"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_bad_file_is_one_line(tmp_path: Path, exported, damage: str) -> None:
    change, message = DAMAGES[damage]
    (tmp_path / "x.gguf").write_bytes(change(exported("llama")[1].read_bytes()))
    with pytest.raises((DataError, UsageError), match=message) as error:
        convert(tmp_path / "x.gguf", tmp_path / "out")
    assert "\n" not in str(error.value)
    assert str(error.value).count("get the file again") <= 1
    assert str(tmp_path / "x.gguf") in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["x.gguf"]


def test_missing_part_is_named(tmp_path: Path, exported) -> None:
    folder, file = exported("llama")
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama", split_max_tensors=10)
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            sub = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) == 3
    convert(parts[1], tmp_path / "back")
    with open_checkpoint(folder) as before, open_checkpoint(tmp_path / "back") as after:
        assert all(torch.equal(before.read(name), after.read(name)) for name in before.names)
    parts[2].unlink()
    with pytest.raises(DataError, match=f"{parts[2].name} is missing"):
        convert(parts[0], tmp_path / "again")
