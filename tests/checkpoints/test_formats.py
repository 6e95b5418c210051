"""Test reading and writing Hugging Face model folders."""

import json
import os
import subprocess
import sys
import weakref
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from support.checkpoint_files import FORMS, State, logits, make_state, write_source
from torch import Tensor

from gptj_ft.checkpoints.architecture import read_architecture
from gptj_ft.checkpoints.convert import convert
from gptj_ft.checkpoints.model_folder import check_tensors, layer_tensors, open_checkpoint, write_model
from gptj_ft.errors import DataError, ResourceError, UsageError
from gptj_ft.models.registry import Architecture


def layers_of(folder: Path) -> tuple[Architecture, list[State]]:
    architecture = read_architecture(folder)
    with open_checkpoint(folder) as checkpoint:
        check_tensors(architecture, checkpoint)
        return architecture, [layer_tensors(architecture, checkpoint, index) for index in range(4)]


@pytest.fixture
def state() -> State:
    return make_state()[1]


@pytest.fixture
def source(tmp_path: Path, state: State) -> Path:
    return write_source(tmp_path / "source", state)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", FORMS)
def test_every_layout_keeps_logits(tmp_path: Path, state: State, form: str) -> None:
    source = write_source(tmp_path / "source", state, form)
    architecture, layers = layers_of(source)
    write_model(tmp_path / "model", architecture, iter(layers), dtype=None, source=source)
    assert torch.equal(logits(tmp_path / "model"), logits(source))


def test_safetensors_are_preferred_to_bin(tmp_path: Path, source: Path, state: State) -> None:
    torch.save({}, source / "pytorch_model.bin")
    with open_checkpoint(source) as checkpoint:
        assert checkpoint.file_of("lm_head.bias").name == "model.safetensors"
        assert torch.equal(checkpoint.read("lm_head.bias"), state["lm_head.bias"])


def test_model_folder_has_one_shard_per_layer(tmp_path: Path, source: Path) -> None:
    for name in ("tokenizer.json", "vocab.json", "merges.txt", "LICENSE", "README.md"):
        (source / name).write_text(name)
    architecture, layers = layers_of(source)
    write_model(tmp_path / "model", architecture, layers, dtype=torch.bfloat16, source=source)
    files = {path.name for path in (tmp_path / "model").iterdir()}
    shards = {f"model-{number:05d}-of-00004.safetensors" for number in range(1, 5)}
    companions = {"config.json", "generation_config.json", "tokenizer.json", "vocab.json", "merges.txt"}
    assert files == shards | companions | {"model.safetensors.index.json", "LICENSE", "README.md"}
    raw = json.loads((tmp_path / "model/config.json").read_text())
    assert (raw["dtype"], raw["torch_dtype"], raw["n_embd"]) == ("bfloat16", "bfloat16", 16)
    assert json.loads((tmp_path / "model/generation_config.json").read_text()) == {"bos_token_id": 0, "eos_token_id": 0}
    index = json.loads((tmp_path / "model/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2 * sum(t.numel() for layer in layers for t in layer.values())
    with safe_open(tmp_path / "model/model-00002-of-00004.safetensors", "pt") as shard:
        assert shard.metadata() == {"format": "pt"}
        assert {index["weight_map"][name] for name in shard.keys()} == {"model-00002-of-00004.safetensors"}  # noqa: SIM118
        assert shard.get_tensor("transformer.h.0.ln_1.weight").dtype == torch.bfloat16


def test_layers_are_consumed_one_by_one(tmp_path: Path, source: Path) -> None:
    class Layer(dict[str, Tensor]):
        pass

    architecture, tensors = layers_of(source)
    alive: list[weakref.ref[Layer]] = []

    def layers() -> Iterator[Layer]:
        for each in tensors:
            assert all(reference() is None for reference in alive), "the layer before is still in memory"
            layer = Layer(each)
            alive.append(weakref.ref(layer))
            yield layer
            del layer

    write_model(tmp_path / "model", architecture, layers(), dtype=None)
    assert len(alive) == 4


def test_old_attention_masks_are_dropped(tmp_path: Path, state: State) -> None:
    masks = {f"transformer.h.{n}.attn.bias": torch.ones(1, 1, 32, 32, dtype=torch.bool) for n in range(2)}
    masks |= {f"transformer.h.{n}.attn.masked_bias": torch.tensor(-1e9) for n in range(2)}
    source = write_source(tmp_path / "source", {**state, **masks}, "bin")
    with open_checkpoint(source) as checkpoint:
        assert sorted(check_tensors(read_architecture(source), checkpoint)) == sorted(masks)


def test_missing_weights_error_lists_candidates(source: Path) -> None:
    (source / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"holds no weights: looked for model\.safetensors.*pytorch_model\.bin"):
        open_checkpoint(source)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("left", [0.0, 0.001, 0.5, 0.999])
def test_truncated_shard_fails_on_open(tmp_path: Path, state: State, form: str, left: float) -> None:
    source = write_source(tmp_path / "source", state, form)
    shard = sorted([*source.glob("*.safetensors"), *source.glob("*.bin")])[-1]
    os.truncate(shard, int(shard.stat().st_size * left))
    with pytest.raises(DataError, match=f"{shard.name}: .*get the file again"):
        open_checkpoint(source)


def test_damaged_header_fails_on_open(source: Path) -> None:
    shard = source / "model.safetensors"
    good = shard.read_bytes()
    for damage in (good.replace(b'"F32"', b'"F3?"', 1), good.replace(b'"shape":[', b'"shape":[9', 1), good + b"\0"):
        shard.write_bytes(damage)
        with pytest.raises(DataError, match=r"model\.safetensors: "):
            open_checkpoint(source)


def test_index_and_shards_must_agree(tmp_path: Path, state: State) -> None:
    source = write_source(tmp_path / "source", state, "safetensors in shards")
    path = source / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    first, second = sorted(set(index["weight_map"].values()))

    def opened(weight_map: dict[str, str]) -> None:
        path.write_text(json.dumps({"weight_map": weight_map}))
        open_checkpoint(source)

    opened(index["weight_map"])
    with pytest.raises(DataError, match=f"{first}: lacks lm_head.bias, which"):
        opened({**index["weight_map"], "lm_head.bias": first})
    with pytest.raises(DataError, match=f"{second}: holds lm_head.bias, which"):
        opened({name: file for name, file in index["weight_map"].items() if name != "lm_head.bias"})
    with pytest.raises(DataError, match=r"names \.\./elsewhere\.safetensors, which is not in"):
        opened({**index["weight_map"], "lm_head.bias": "../elsewhere.safetensors"})
    (source / second).unlink()
    with pytest.raises(DataError, match=f"names {second}, which is not in"):
        opened(index["weight_map"])
    path.write_text("{}")
    with pytest.raises(DataError, match="no weight_map in this index"):
        open_checkpoint(source)


def test_pickle_with_code_is_rejected(tmp_path: Path, state: State) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return (os.mkdir, (str(tmp_path / "ran"),))

    source = write_source(tmp_path / "source", {**state, "lm_head.bias": Evil()}, "bin")  # type: ignore[dict-item]
    with pytest.raises(DataError, match=r"pytorch_model\.bin: holds more than tensors"):
        open_checkpoint(source)
    assert not (tmp_path / "ran").exists()


def test_compressed_zip_is_rejected_before_unpacking(tmp_path: Path, state: State) -> None:
    source = write_source(tmp_path / "source", state, "bin")
    path = source / "pytorch_model.bin"
    with zipfile.ZipFile(path) as archive:
        members = {member: archive.read(member) for member in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content + bytes(10**6) if name.endswith("data.pkl") else content)
    with pytest.raises(DataError, match=r"pytorch_model\.bin: \S+data\.pkl in it is compressed"):
        open_checkpoint(source)


def test_pickled_views_and_transposes_read_correctly(tmp_path: Path, state: State) -> None:
    weights = {**state}
    both = torch.randn(3, 16, 16)
    for number, which in enumerate("qkv"):
        weights[f"transformer.h.0.attn.{which}_proj.weight"] = both[number]  # one storage
    weights["transformer.h.1.attn.out_proj.weight"] = both[0].t()
    source = write_source(tmp_path / "source", weights, "bin")
    with open_checkpoint(source) as checkpoint:
        for name, tensor in weights.items():
            assert torch.equal(checkpoint.read(name), tensor)
            assert torch.equal(checkpoint.read(name, 3, 9), tensor[3:9])


@pytest.mark.parametrize("form", FORMS)
def test_outside_link_is_rejected_except_hf_cache(tmp_path: Path, state: State, form: str) -> None:
    source = write_source(tmp_path / "source", state, form)
    shard = sorted([*source.glob("*.safetensors"), *source.glob("*.bin")])[-1]
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=f"{shard.name} is a link to .*elsewhere, out of the folder"):
        open_checkpoint(source)
    shard.unlink()
    (tmp_path / "elsewhere").rename(shard)
    (source / "tokenizer.json").symlink_to("/etc/hostname")
    with pytest.raises(DataError, match=r"tokenizer\.json is a link to /etc/hostname, out of the folder"):
        convert(source, tmp_path / "model")
    assert not list(tmp_path.glob("*model*"))
    (source / "tokenizer.json").unlink()
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    blobs = tmp_path / "models--x--y" / "blobs"
    blobs.mkdir(parents=True)
    shard.unlink()
    (tmp_path / "elsewhere").rename(blobs / "ab12")
    snapshot = tmp_path / "models--x--y" / "snapshots" / "1234"
    snapshot.parent.mkdir()
    source.rename(snapshot)
    (snapshot / shard.name).symlink_to("../../blobs/ab12")
    open_checkpoint(snapshot).close()


def test_legacy_pickle_is_rejected(tmp_path: Path, state: State) -> None:
    source = write_source(tmp_path / "source", state, "bin")
    torch.save(state, source / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(DataError, match=r"saved by PyTorch before 1\.6"):
        open_checkpoint(source)


def test_misfit_error_names_shapes_and_file(tmp_path: Path, state: State) -> None:
    state["transformer.h.0.attn.q_proj.weight"] = torch.zeros(3, 5)
    state["transformer.h.0.ln_1.bias"] = torch.zeros(16, dtype=torch.int64)
    state["transformer.h.7.ln_1.bias"] = torch.zeros(16)
    del state["lm_head.bias"]
    source = write_source(tmp_path / "source", state)
    with open_checkpoint(source) as checkpoint, pytest.raises(DataError) as caught:
        check_tensors(read_architecture(source), checkpoint)
    message = str(caught.value)
    assert (
        "transformer.h.0.attn.q_proj.weight in model.safetensors has shape [3, 5], config.json says [16, 16]" in message
    )
    assert "transformer.h.0.ln_1.bias in model.safetensors is torch.int64" in message
    assert "transformer.h.7.ln_1.bias in model.safetensors is no tensor of this gptj" in message
    assert message.endswith("and 1 more")


@pytest.mark.parametrize(
    ("suffix", "reason"),
    [("safetensors", "type 'F8_E4M3' are not supported"), ("bin", r"is torch\.float8_e4m3fn, not fp32, bf16 or fp16")],
)
def test_fp8_weights_are_named(tmp_path: Path, state: State, suffix: str, reason: str) -> None:
    source = write_source(tmp_path / "source", state)
    narrow = {name: value.to(torch.float8_e4m3fn) for name, value in state.items()}
    if suffix == "bin":
        (source / "model.safetensors").unlink()
        torch.save(narrow, source / "pytorch_model.bin")
    else:
        save_file(narrow, source / "model.safetensors")
    with pytest.raises(DataError, match=reason), open_checkpoint(source) as checkpoint:
        check_tensors(read_architecture(source), checkpoint)


def test_missing_tensor_is_named(tmp_path: Path, state: State) -> None:
    del state["lm_head.bias"]
    source = write_source(tmp_path / "source", state)
    with (
        open_checkpoint(source) as checkpoint,
        pytest.raises(DataError, match=r"lm_head\.bias of shape \[64\] is missing"),
    ):
        check_tensors(read_architecture(source), checkpoint)


def test_existing_folder_is_never_touched(tmp_path: Path, source: Path) -> None:
    architecture, layers = layers_of(source)
    (tmp_path / "model").mkdir()
    with pytest.raises(UsageError, match="model exists; name another or remove it"):
        write_model(tmp_path / "model", architecture, layers, dtype=None)
    assert list((tmp_path / "model").iterdir()) == []


def test_uncreatable_folder_is_usage_error(tmp_path: Path, source: Path) -> None:
    architecture, layers = layers_of(source)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UsageError, match=r"cannot write .*file/model"):
        write_model(tmp_path / "file" / "model", architecture, layers, dtype=None)


def test_full_disk_during_write_leaves_nothing(tmp_path: Path, source: Path, fill_disk: Callable[..., None]) -> None:
    architecture, layers = layers_of(source)
    fill_disk()
    with pytest.raises(ResourceError, match="no space left on the disk while writing"):
        write_model(tmp_path / "out" / "model", architecture, layers, dtype=None)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("failing", [0, 2, 3])
def test_interrupted_write_leaves_nothing(tmp_path: Path, source: Path, failing: int) -> None:
    architecture, layers = layers_of(source)

    def interrupted() -> Iterator[State]:
        for index, layer in enumerate(layers):
            if index == failing:
                raise KeyboardInterrupt
            yield layer

    with pytest.raises(KeyboardInterrupt):
        write_model(tmp_path / "out" / "model", architecture, interrupted(), dtype=None)
    assert list((tmp_path / "out").iterdir()) == []


KILLED = """
import os, sys
from pathlib import Path
from gptj_ft.checkpoints.architecture import read_architecture
from gptj_ft.checkpoints.model_folder import layer_tensors, open_checkpoint, write_model
source, target = Path(sys.argv[1]), Path(sys.argv[2])
architecture, checkpoint = read_architecture(source), open_checkpoint(source)
def layers():
    for index in range(4):
        if index == 3:
            os._exit(9)
        yield layer_tensors(architecture, checkpoint, index)
write_model(target, architecture, layers(), dtype=None)
"""


@pytest.mark.thorough
def test_killed_writer_leaves_no_model(tmp_path: Path, source: Path) -> None:
    target = tmp_path / "out" / "model"
    assert subprocess.run([sys.executable, "-c", KILLED, source, target], check=False).returncode == 9
    (left,) = target.parent.iterdir()
    assert left != target
    assert len(list(left.glob("*.safetensors"))) == 3
    assert not (left / "config.json").exists()
    architecture, layers = layers_of(source)
    write_model(target, architecture, layers, dtype=None, source=source)
    assert list(target.parent.iterdir()) == [target]
