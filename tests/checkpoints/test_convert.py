"""Test conversion: equal bits, verification, resuming, full disks."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
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

from gptj_ft.checkpoints.architecture import read_architecture
from gptj_ft.checkpoints.convert import Conversion, convert
from gptj_ft.checkpoints.model_folder import Checkpoint, open_checkpoint
from gptj_ft.errors import DataError, ResourceError, UsageError
from gptj_ft.system import paths
from gptj_ft.system.atomic import atomic_folder

Read = Callable[..., Tensor]
Wrap = Callable[[Callable[..., Tensor]], None]


@pytest.fixture
def state() -> State:
    return make_state()[1]


@pytest.fixture
def source(tmp_path: Path, state: State) -> Path:
    return write_source(tmp_path / "source", state)


@pytest.mark.parametrize("form", FORMS)
def test_every_layout_converts_to_equal_logits(tmp_path: Path, state: State, form: str) -> None:
    source = write_source(tmp_path / "source", state, form)
    convert(source, tmp_path / "model")
    assert torch.equal(logits(tmp_path / "model"), logits(source))


@pytest.mark.parametrize(
    ("choice", "stored"), [("keep", torch.float16), ("fp32", torch.float32), ("bf16", torch.bfloat16)]
)
def test_half_precision_source_gets_requested_dtype(
    tmp_path: Path, state: State, choice: str, stored: torch.dtype
) -> None:
    half = {name: tensor.half() for name, tensor in state.items()}
    source = write_source(tmp_path / "source", half, "bin")
    report = convert(source, tmp_path / "model", Conversion(dtype=choice))  # type: ignore[arg-type]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.dtype == stored
    assert all(torch.equal(tensor, half[name].to(stored)) for name, tensor in model.state_dict().items())
    assert (report.dtype, report.bytes) == (str(stored).split(".")[1], report.parameters * stored.itemsize)


def test_mixed_dtypes_are_kept_per_tensor(tmp_path: Path, state: State) -> None:
    state["lm_head.bias"] = state["lm_head.bias"].bfloat16()
    state["lm_head.weight"] = state["lm_head.weight"].half()
    report = convert(write_source(tmp_path / "source", state), tmp_path / "model")
    with open_checkpoint(tmp_path / "model") as checkpoint:
        assert checkpoint.dtype("lm_head.bias") == torch.bfloat16
        assert checkpoint.dtype("lm_head.weight") == torch.float16
        assert checkpoint.dtype("transformer.wte.weight") == torch.float32
    assert report.dtype == "mixed"
    assert json.loads((tmp_path / "model/config.json").read_text())["dtype"] == "float32"


def test_report_counts_written_tensors(tmp_path: Path, state: State) -> None:
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


def test_tuned_model_keeps_its_metadata(tmp_path: Path, source: Path) -> None:
    (source / "gptj_ft.json").write_text('{"prompt": "Q: {question}"}')
    (source / "tokenizer.json").write_text("{}")
    convert(source, tmp_path / "model")
    assert json.loads((tmp_path / "model/gptj_ft.json").read_text()) == {"prompt": "Q: {question}"}
    assert (tmp_path / "model/tokenizer.json").read_text() == "{}"


def test_nan_and_infinity_are_kept_and_reported(tmp_path: Path, state: State) -> None:
    state["lm_head.bias"][:2] = torch.tensor([float("nan"), float("inf")])
    report = convert(write_source(tmp_path / "source", state), tmp_path / "model", Conversion(dtype="fp16"))
    assert report.not_finite == ("lm_head.bias",)
    with open_checkpoint(tmp_path / "model") as checkpoint:
        assert torch.equal(checkpoint.read("lm_head.bias"), state["lm_head.bias"].half()) is False  # NaN
        assert checkpoint.read("lm_head.bias")[1] == float("inf")


def test_fp16_overflow_is_rejected(tmp_path: Path, state: State) -> None:
    state["transformer.h.1.mlp.fc_out.bias"][3] = -70000.0
    source = write_source(tmp_path / "source", state)
    with pytest.raises(DataError, match=r"mlp\.fc_out\.bias holds 70000, too large for fp16"):
        convert(source, tmp_path / "out" / "model", Conversion(dtype="fp16"))
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shard_bytes", [10**9, 3000])
def test_hugging_face_round_trip_keeps_every_bit(
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


def test_piece_size_does_not_change_bytes(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_killed_conversion_is_incomplete_and_resumes(tmp_path: Path, source: Path, wrap_reads: Wrap, to: str) -> None:
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
    names: list[str] = []

    def counted(read: Read, checkpoint: Checkpoint, name: str, *rows: int) -> Tensor:
        if checkpoint.folder == source:
            names.append(name)
        return read(checkpoint, name, *rows)

    wrap_reads(counted)
    convert(source, target, replace(conversion, verify=False))
    # The first tensors are complete, so they are not even read.
    assert 0 < len(set(names)) < len(read_architecture(source).layers()) * 8
    assert "transformer.wte.weight" not in names
    assert list(target.parent.iterdir()) == [target]
    files = sorted(path.relative_to(tmp_path / "whole") for path in (tmp_path / "whole").rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(target) for path in target.rglob("*") if path.is_file())
    for file in files:
        assert (tmp_path / "whole" / file).read_bytes() == (target / file).read_bytes(), file


@pytest.mark.thorough
def test_changed_source_restarts_killed_conversion(tmp_path: Path, source: Path) -> None:
    target = tmp_path / "model"
    arguments = [sys.executable, "-c", KILLED, str(source), str(target), "folder", "15"]
    assert subprocess.run(arguments, check=False).returncode == 9
    weights = load_file(source / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, source / "model.safetensors")
    convert(source, target, Conversion(verify=False))
    with open_checkpoint(target) as model:
        assert all(torch.equal(model.read(name), tensor + 1) for name, tensor in weights.items())


def test_ctrl_c_keeps_progress_error_removes_it(tmp_path: Path, source: Path, wrap_reads: Wrap) -> None:
    def failing(error: BaseException) -> None:
        def fails(read: Read, checkpoint: Checkpoint, name: str, *rows: int) -> Tensor:
            if name == "lm_head.bias":
                raise error
            return read(checkpoint, name, *rows)

        wrap_reads(fails)

    failing(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out" / "model")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".model.converting"]
    failing(DataError("damaged"))
    with pytest.raises(DataError, match="damaged"):
        convert(source, tmp_path / "out" / "model")
    assert list((tmp_path / "out").iterdir()) == []


def test_signal_keeps_progress_and_command_resumes(tmp_path: Path, source: Path, shell, wrap_reads: Wrap) -> None:
    signals: list[int] = []

    def signalled(read: Read, checkpoint: Checkpoint, name: str, *rows: int) -> Tensor:
        if name == "lm_head.bias" and not signals:
            signals.append(signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGUSR1)
        return read(checkpoint, name, *rows)

    wrap_reads(signalled)
    done = shell("convert", source, tmp_path / "model")
    assert (done.code, "converted files are kept; run the same command to resume" in done.said) == (
        130,
        True,
    )
    assert shell("convert", source, tmp_path / "model").code == 0


@pytest.mark.parametrize("call", ["fsync", "pwritev"])
@pytest.mark.parametrize("to", ["folder", "huggingface", "mesh"])
def test_full_disk_during_conversion_leaves_nothing(
    tmp_path: Path, source: Path, fill_disk: Callable[..., None], monkeypatch: pytest.MonkeyPatch, to: str, call: str
) -> None:
    fill_disk(call, after=4)
    monkeypatch.setattr("gptj_ft.system.write_behind.BUFFER_BYTES", 4096)
    num_open = psutil.Process().num_fds()
    with pytest.raises(ResourceError, match="no space left on the disk while writing"):
        convert(source, tmp_path / "out" / "model", Conversion(to=to, mesh_shards=2))  # type: ignore[arg-type]
    assert list((tmp_path / "out").iterdir()) == []
    assert psutil.Process().num_fds() == num_open


def test_target_in_use_is_rejected(tmp_path: Path, source: Path) -> None:
    with atomic_folder(tmp_path / "model", resume={}), pytest.raises(UsageError, match="is in use"):
        convert(source, tmp_path / "model")


def test_no_verify_skips_read_back(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gptj_ft.checkpoints.transfer.checksum_of", None)
    assert convert(source, tmp_path / "model", Conversion(verify=False)).is_verified is False
    with pytest.raises(TypeError):
        convert(source, tmp_path / "other")


def test_differing_result_is_discarded(tmp_path: Path, source: Path, wrap_reads: Wrap) -> None:
    def faulty(read: Read, checkpoint: Checkpoint, name: str, *rows: int) -> Tensor:
        tensor = read(checkpoint, name, *rows)
        return tensor + 1 if name == "lm_head.bias" and ".converting" in str(checkpoint.folder) else tensor

    wrap_reads(faulty)
    with pytest.raises(DataError, match="differs"):
        convert(source, tmp_path / "out" / "model")
    assert list((tmp_path / "out").iterdir()) == []


def flip_bit(path: Path) -> None:
    """Flip one bit near the end of a file's data."""
    # In place: another thread may be reading the file, and must not find it truncated.
    with path.open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-100, os.SEEK_END)
        file.write(bytes([byte ^ 1]))


def test_disk_bit_flip_fails_verification(tmp_path: Path, source: Path, wrap_reads: Wrap) -> None:
    reads: list[str] = []

    def counted(read: Read, checkpoint: Checkpoint, name: str, *rows: int) -> Tensor:
        if checkpoint.folder == source:
            reads.append(name)
        return read(checkpoint, name, *rows)

    wrap_reads(counted)
    report = convert(source, tmp_path / "out" / "model")
    assert report.is_verified
    assert len(reads) == len(set(reads)) == report.tensors

    flipped: list[Path] = []

    def flipping(read: Read, checkpoint: Checkpoint, name: str, *rows: int) -> Tensor:
        if ".converting" in str(checkpoint.folder) and not flipped:  # the first read back
            flipped.append(checkpoint.folder)
            flip_bit(checkpoint.folder / "model-00002-of-00004.safetensors")
        return read(checkpoint, name, *rows)

    wrap_reads(flipping)
    with pytest.raises(DataError, match=r"transformer\.h\.0\..* differs: number"):
        convert(source, tmp_path / "out" / "bad")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model"]


def test_low_disk_fails_before_writing(tmp_path: Path, source: Path, set_free_space: Callable[[int], None]) -> None:
    set_free_space(1 << 20)
    with pytest.raises(ResourceError, match=r"needs 16.8 MB, but .* has 1.0 MB free"):
        convert(source, tmp_path / "out" / "model")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("contradiction", "reason"),
    [({"tie_word_embeddings": True}, "tie_word_embeddings"), ({"activation_function": "gelu"}, "gelu_new")],
)
def test_unsupported_config_is_rejected(
    tmp_path: Path, source: Path, contradiction: dict[str, object], reason: str
) -> None:
    raw = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**raw, **contradiction}))
    with pytest.raises(DataError, match=reason):
        convert(source, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_misfit_weights_fail_before_writing(tmp_path: Path, state: State) -> None:
    del state["lm_head.bias"]
    source = write_source(tmp_path / "source", state)
    with pytest.raises(DataError, match=r"lm_head\.bias of shape \[64\] is missing"):
        convert(source, tmp_path / "out" / "model")
    assert list((tmp_path / "out").iterdir()) == []


def test_existing_target_is_rejected(tmp_path: Path, source: Path) -> None:
    convert(source, tmp_path / "model")
    with pytest.raises(UsageError, match="exists"):
        convert(source, tmp_path / "model")
    with safe_open(tmp_path / "model/model-00001-of-00004.safetensors", "pt") as shard:
        assert shard.metadata() == {"format": "pt"}
