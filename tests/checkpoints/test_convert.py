"""Converting a checkpoint, and proving that nothing was lost."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.checkpoint_files import FORMS, State, logits, make_state, write_source
from torch import Tensor
from transformers import AutoModelForCausalLM

from gptj_ft.checkpoints import convert as convert_module
from gptj_ft.checkpoints.architecture import read_architecture
from gptj_ft.checkpoints.convert import Conversion, convert
from gptj_ft.checkpoints.model_folder import Checkpoint, open_checkpoint
from gptj_ft.errors import DataError, ResourceError, UsageError
from gptj_ft.system import paths
from gptj_ft.system.atomic import atomic_folder


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shard_bytes", [10**9, 3000])
def test_hugging_face_to_folder_and_back_gives_every_bit_back(
    tmp_path: Path, state: State, dtype: torch.dtype, shard_bytes: int
) -> None:
    weights = {name: tensor.to(dtype) for name, tensor in state.items()}
    convert(write_source(tmp_path / "source", weights, "bin in shards"), tmp_path / "model")
    convert(tmp_path / "model", tmp_path / "back", Conversion(to="huggingface", shard_bytes=shard_bytes))
    files = sorted((tmp_path / "back").glob("*.safetensors"))
    assert [file.name for file in files] == ["model.safetensors"] if shard_bytes > 3000 else len(files) > 3
    assert all(len(file.read_bytes()) < shard_bytes + 2500 for file in files)
    written = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert written.keys() == weights.keys()
    assert all(
        torch.equal(tensor.view(torch.uint8), weights[name].view(torch.uint8)) for name, tensor in written.items()
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert model.dtype == dtype
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


def test_pieces_of_any_size_make_the_same_bytes(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert(source, tmp_path / "one", Conversion(dtype="bf16"))
    monkeypatch.setattr("gptj_ft.checkpoints.weight_file.PIECE_BYTES", 200)
    convert(source, tmp_path / "two", Conversion(dtype="bf16"))
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes()


KILLED = """
import os, sys, time
from pathlib import Path
from gptj_ft.checkpoints import convert as module
from gptj_ft.checkpoints.transfer import TensorTransfer
from gptj_ft.system import write_behind as behind
behind.BUFFER_BYTES = behind.PAGE
left = int(sys.argv[4])
def inspect(self, name, piece, inspect=TensorTransfer.inspect):
    global left
    left -= 1
    if left < 0:
        time.sleep(0.3)  # what is on its way to the disk arrives
        os._exit(9)
    return inspect(self, name, piece)
TensorTransfer.inspect = inspect
module.convert(Path(sys.argv[1]), Path(sys.argv[2]), module.Conversion(to=sys.argv[3], mesh_shards=2, shard_bytes=4000))
"""


@pytest.mark.parametrize(
    "to",
    ["folder", pytest.param("huggingface", marks=pytest.mark.slow), pytest.param("mesh", marks=pytest.mark.slow)],
)
def test_a_killed_conversion_looks_unfinished_and_is_gone_on_with(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    target = tmp_path / "out" / "model"
    conversion = Conversion(to=to, mesh_shards=2, shard_bytes=4000)  # type: ignore[arg-type]
    convert(source, tmp_path / "whole", conversion)
    arguments = [sys.executable, "-c", KILLED, str(source), str(target), to, "15"]
    assert subprocess.run(arguments, check=False).returncode == 9
    (left,) = target.parent.iterdir()
    assert left != target
    assert not paths.is_model(left)
    if to == "folder":  # what the other process wrote is compared, too
        damaged = tmp_path / "damaged" / left.name
        shutil.copytree(left, damaged)
        flip_bit(min(path for path in damaged.rglob("*") if path.suffix == ".safetensors"))
        with pytest.raises(DataError, match="differs"):
            convert(source, tmp_path / "damaged" / "model", conversion)
        assert list(damaged.parent.iterdir()) == []
    read: list[str] = []
    original = Checkpoint.read

    def counted(self: Checkpoint, name: str, *rows: int) -> Tensor:
        if self.folder == source:
            read.append(name)
        return original(self, name, *rows)

    monkeypatch.setattr(Checkpoint, "read", counted)
    convert(source, target, replace(conversion, verify=False))
    # What was done is not done again: the first tensors of all are not even read.
    assert 0 < len(set(read)) < len(read_architecture(source).layers()) * 8
    assert "transformer.wte.weight" not in read
    assert list(target.parent.iterdir()) == [target]
    files = sorted(path.relative_to(tmp_path / "whole") for path in (tmp_path / "whole").rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(target) for path in target.rglob("*") if path.is_file())
    for file in files:
        assert (tmp_path / "whole" / file).read_bytes() == (target / file).read_bytes(), file


def test_what_a_killed_conversion_of_something_else_left_is_not_used(tmp_path: Path, source: Path) -> None:
    target = tmp_path / "model"
    arguments = [sys.executable, "-c", KILLED, str(source), str(target), "folder", "15"]
    assert subprocess.run(arguments, check=False).returncode == 9
    weights = load_file(source / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, source / "model.safetensors")
    convert(source, target, Conversion(verify=False))
    with open_checkpoint(target) as model:
        assert all(torch.equal(model.read(name), tensor + 1) for name, tensor in weights.items())


def test_ctrl_c_keeps_what_was_done_and_an_error_does_not(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Checkpoint.read

    def failing(error: BaseException) -> None:
        def fails(self: Checkpoint, name: str, *rows: int) -> Tensor:
            if name == "lm_head.bias":
                raise error
            return read(self, name, *rows)

        monkeypatch.setattr(Checkpoint, "read", fails)

    failing(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out" / "model")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".model.converting"]
    failing(DataError("damaged"))
    with pytest.raises(DataError, match="damaged"):
        convert(source, tmp_path / "out" / "model")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_signal_says_that_what_was_converted_is_kept_and_the_same_command_goes_on(
    tmp_path: Path, source: Path, shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Checkpoint.read

    def signalled(self: Checkpoint, name: str, *rows: int) -> Tensor:
        if name == "lm_head.bias":
            os.kill(os.getpid(), signal.SIGUSR1)
        return read(self, name, *rows)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "read", signalled)
        done = shell("convert", source, tmp_path / "model")
    assert (done.code, "what was converted is kept, and the same command goes on from there" in done.said) == (
        130,
        True,
    )
    assert shell("convert", source, tmp_path / "model").code == 0


@pytest.mark.parametrize("call", ["fsync", "pwritev"])
@pytest.mark.parametrize("to", ["folder", "huggingface", "mesh"])
def test_a_full_disk_is_a_resource_error_and_leaves_nothing(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, to: str, call: str
) -> None:
    calls: list[int] = []
    original = getattr(os, call)

    def full(descriptor: int, *rest: object) -> object:
        calls.append(descriptor)
        if len(calls) > 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(descriptor, *rest)

    monkeypatch.setattr(os, call, full)
    monkeypatch.setattr("gptj_ft.system.write_behind.BUFFER_BYTES", 4096)
    num_open = psutil.Process().num_fds()
    with pytest.raises(ResourceError, match="no space left on the disk while writing"):
        convert(source, tmp_path / "out" / "model", Conversion(to=to, mesh_shards=2))  # type: ignore[arg-type]
    assert list((tmp_path / "out").iterdir()) == []
    assert psutil.Process().num_fds() == num_open


def test_two_conversions_into_one_folder_do_not_mix(tmp_path: Path, source: Path) -> None:
    with atomic_folder(tmp_path / "model", resume={}), pytest.raises(UsageError, match="is in use"):
        convert(source, tmp_path / "model")


def test_no_verify_reads_nothing_back(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gptj_ft.checkpoints.transfer.checksum_of", None)
    assert convert(source, tmp_path / "model", Conversion(verify=False)).is_verified is False
    with pytest.raises(TypeError):
        convert(source, tmp_path / "other")


def test_a_result_that_differs_never_appears(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Checkpoint.read

    def faulty(self: Checkpoint, name: str, *rows: int) -> Tensor:
        tensor = read(self, name, *rows)
        return tensor + 1 if name == "lm_head.bias" and ".converting" in str(self.folder) else tensor

    monkeypatch.setattr(Checkpoint, "read", faulty)
    with pytest.raises(DataError, match="differs"):
        convert(source, tmp_path / "out" / "model")
    assert list((tmp_path / "out").iterdir()) == []


def flip_bit(path: Path) -> None:
    """Change a number in the middle of a file's data."""
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


def test_a_bit_that_the_disk_flips_is_found_though_the_source_is_read_once(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, verify, reads = Checkpoint.read, convert_module._Work.verify, []

    def counted(self: Checkpoint, name: str, *rows: int) -> Tensor:
        if self.folder == source:
            reads.append(name)
        return read(self, name, *rows)

    monkeypatch.setattr(Checkpoint, "read", counted)
    report = convert(source, tmp_path / "out" / "model")
    assert report.is_verified
    assert len(reads) == len(set(reads)) == report.tensors

    def verified(self: convert_module._Work, draft: Path) -> None:
        flip_bit(draft / "model-00002-of-00004.safetensors")
        verify(self, draft)

    monkeypatch.setattr(convert_module._Work, "verify", verified)
    with pytest.raises(DataError, match=r"transformer\.h\.0\..* differs: number"):
        convert(source, tmp_path / "out" / "bad")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model"]


def test_too_little_disk_is_found_before_anything_is_written(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 1 << 20))
    with pytest.raises(ResourceError, match=r"needs 0\.0 GB, but .* has 0\.0 GB free"):
        convert(source, tmp_path / "out" / "model")
    assert list((tmp_path / "out").iterdir()) == []


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
    assert list((tmp_path / "out").iterdir()) == []


def test_an_existing_target_is_refused(tmp_path: Path, source: Path) -> None:
    convert(source, tmp_path / "model")
    with pytest.raises(UsageError, match="exists"):
        convert(source, tmp_path / "model")
    with safe_open(tmp_path / "model/model-00001-of-00004.safetensors", "pt") as shard:
        assert shard.metadata() == {"format": "pt"}
