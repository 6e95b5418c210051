"""Test mesh-transformer-jax checkpoints against an independent writer and model, `mesh_reference`."""

import json
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from support import mesh_reference as reference
from support.checkpoint_files import make_state, write_source
from support.mesh_reference import Leaves

from gptj_ft.checkpoints.convert import Conversion, convert
from gptj_ft.checkpoints.foreign import config as foreign_config
from gptj_ft.checkpoints.foreign.mesh import leaves_of
from gptj_ft.checkpoints.model_folder import open_checkpoint
from gptj_ft.errors import DataError, ResourceError, UsageError
from gptj_ft.models.registry import families

TOKENS = [5, 90, 0, 17, 33, 33, 64, 95, 2, 48, 71, 9, 80]


@pytest.fixture(scope="module")
def shards() -> list[Leaves]:
    return reference.random_shards()


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "mesh.json"
    path.write_text(json.dumps(reference.SHAPE))
    return path


def logits_of(folder: Path) -> np.ndarray:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits[0].numpy()


def canonical(shards: list[Leaves]) -> list[Leaves]:
    """Return shards whose values a Hugging Face model can hold exactly."""
    result = [dict(leaves) for leaves in shards]
    for leaves in result:
        leaves["embedding_shard/~/linear", "b"] = np.zeros_like(leaves["embedding_shard/~/linear", "b"])
        leaves |= {key: shards[0][key] for key in leaves if key[0].endswith("replicated_layer_norm")}
    return result


@pytest.mark.sampled(6)
@pytest.mark.parametrize("form", ["slim", "full", "its parent", "tar", "tar.zst"])
def test_checkpoint_keeps_logits_of_its_shards(tmp_path: Path, shards: list[Leaves], config: Path, form: str) -> None:
    source = reference.write(tmp_path / "mesh", shards, moments=(shards, shards) if form == "full" else ())
    if form.startswith("tar"):
        source = reference.pack(source, tmp_path / f"step_10_slim.{form}")
    source = source.parent if form == "its parent" else source
    report = convert(source, tmp_path / "out" / "model", Conversion(config=config))
    assert report.has_left_moments is (form == "full")
    assert_allclose(logits_of(tmp_path / "out" / "model"), reference.forward(shards, TOKENS), rtol=1e-4, atol=2e-5)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("count", [1, 2])
def test_any_shard_count_is_read(tmp_path: Path, config: Path, count: int) -> None:
    shards = reference.random_shards(1, count)
    convert(reference.write(tmp_path / "mesh", shards), tmp_path / "model", Conversion(config=config))
    assert_allclose(logits_of(tmp_path / "model"), reference.forward(shards, TOKENS), rtol=1e-4, atol=2e-5)


def test_bf16_sums_widen_when_inexact(tmp_path: Path, shards: list[Leaves], config: Path) -> None:
    source = reference.write(tmp_path / "mesh", shards, bf16=True)
    convert(source, tmp_path / "model", Conversion(config=config))
    with open_checkpoint(tmp_path / "model") as model:
        assert model.dtype("transformer.h.3.mlp.fc_out.bias") == torch.bfloat16  # four times the same is exact
        assert model.dtype("transformer.wte.weight") == torch.float32  # with the sum of the biases it is not
        halves = reference.as_bf16(shards[1]["layer_11/~/linear_1", "w"]).view(np.uint16)
        rows = model.read("transformer.h.11.attn.v_proj.weight")[8:16]
        assert np.array_equal(rows.t().contiguous().view(torch.uint16).numpy(), halves)


@pytest.mark.thorough
def test_fortran_order_is_read(tmp_path: Path, shards: list[Leaves], config: Path) -> None:
    turned = [{key: np.asfortranarray(array) for key, array in leaves.items()} for leaves in shards]
    convert(reference.write(tmp_path / "a", turned), tmp_path / "model-a", Conversion(config=config))
    convert(reference.write(tmp_path / "b", shards), tmp_path / "model-b", Conversion(config=config))
    for path in (tmp_path / "model-b").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "model-a" / path.name).read_bytes()


@pytest.mark.thorough
@pytest.mark.sampled(2)
@pytest.mark.parametrize("bf16", [False, True])
def test_mesh_round_trip_keeps_every_array(tmp_path: Path, shards: list[Leaves], config: Path, bf16: bool) -> None:
    source = reference.write(tmp_path / "mesh", canonical(shards), bf16=bf16)
    convert(source, tmp_path / "model", Conversion(config=config))
    convert(tmp_path / "model", tmp_path / "back", Conversion(to="mesh", mesh_shards=reference.SHARDS))
    files = sorted(path.relative_to(source) for path in source.rglob("*.npz"))
    assert len(files) == 16 * reference.SHARDS
    back = tmp_path / "back" / "step_0"
    assert sorted(path.relative_to(back) for path in back.rglob("*.npz")) == files
    for file in files:
        with np.load(source / file) as before, np.load(back / file) as after:
            assert before.files == after.files
            for name in before.files:
                is_step = str(file).endswith("15.npz") and name == before.files[-1]
                assert (before[name].dtype, before[name].shape) == (after[name].dtype, after[name].shape)
                assert is_step or before[name].tobytes() == after[name].tobytes(), (file, name)


def test_written_mesh_keeps_logits_and_shape(tmp_path: Path) -> None:
    state = make_state()[1]
    source = write_source(tmp_path / "source", state)
    convert(source, tmp_path / "mesh", Conversion(to="mesh", mesh_shards=2))
    assert json.loads((tmp_path / "mesh/meta.json").read_text()) == {"step": 0, "checkpoints": [0], "aux": {"0": {}}}
    convert(tmp_path / "mesh", tmp_path / "model")  # without --config
    with open_checkpoint(tmp_path / "model") as model:
        assert all(torch.equal(model.read(name), tensor) for name, tensor in state.items())


@pytest.mark.thorough
def test_shard_count_and_step_are_kept(tmp_path: Path, shards: list[Leaves], config: Path) -> None:
    source = reference.write(tmp_path / "mesh", canonical(shards), step=383500)
    convert(source, tmp_path / "two", Conversion(config=config, to="mesh", mesh_shards=2))
    assert sorted(path.name for path in (tmp_path / "two/step_383500").iterdir()) == ["shard_0", "shard_1"]
    convert(tmp_path / "two", tmp_path / "a")
    convert(source, tmp_path / "b", Conversion(config=config))
    for path in (tmp_path / "b").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "a" / path.name).read_bytes()


@pytest.mark.parametrize(
    ("conversion", "reason"),
    [
        (Conversion(to="mesh", mesh_shards=3), "a power of two that divides the 2 heads"),
        (Conversion(to="mesh", mesh_shards=4), "a power of two that divides the 2 heads"),
        (Conversion(to="mesh", mesh_shards=2, dtype="fp16"), "stores fp32 or bf16"),
    ],
)
def test_unsupported_mesh_conversion_is_rejected(tmp_path: Path, conversion: Conversion, reason: str) -> None:
    source = write_source(tmp_path / "source", make_state()[1])
    with pytest.raises(UsageError, match=reason):
        convert(source, tmp_path / "out" / "mesh", conversion)
    assert not (tmp_path / "out" / "mesh").exists()


def test_gptj_6b_leaves_sort_as_strings() -> None:
    names = [leaf.name for leaf in leaves_of(families()["gptj"], 28)]
    assert len(names) == 286
    assert names[:2] == ["transformer.wte.weight"] * 2
    blocks = [int(name.split(".")[2]) for name in names if name.endswith("q_proj.weight")]
    assert blocks == [0, 1, *range(10, 20), 2, *range(20, 28), *range(3, 10)]
    assert [name.rpartition("h.0.")[2] for name in names[2:6]] == [
        f"attn.{which}_proj.weight" for which in ("q", "v", "k", "out")
    ]


def test_missing_config_assumes_gptj_6b(
    tmp_path: Path, shards: list[Leaves], config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = reference.write(tmp_path / "mesh", shards)
    with pytest.raises(UsageError, match=r"the shape is not GPT-J 6B's; name the JSON of its"):
        convert(source, tmp_path / "model")
    monkeypatch.setattr(foreign_config, "GPTJ_6B", foreign_config.read_foreign_config(config))
    convert(source, tmp_path / "model")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"n_vocab": 100}, r"transformer\.wte\.weight .*\[96, 32\], config\.json says \[100, 32\]"),
        ({"layers": 11}, r"h\.11\.\S+ .*is no tensor"),
        ({"d_model": 64}, "shape"),
        ({"pe": "t5"}, "pe is 't5'; GPT-J has 'rotary'"),
        ({"norm": "rmsnorm"}, "norm is 'rmsnorm'"),
        ({"n_heads": 5}, "not a multiple of n_head"),
        ({"d_model": None}, "hidden_size|d_model"),
    ],
)
def test_config_contradicting_shards_is_rejected(
    tmp_path: Path, shards: list[Leaves], change: dict[str, object], reason: str
) -> None:
    source = reference.write(tmp_path / "mesh", shards)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({k: v for k, v in {**reference.SHAPE, **change}.items() if v is not None}))
    with pytest.raises((DataError, UsageError), match=reason):
        convert(source, tmp_path / "model", Conversion(config=path))
    assert not (tmp_path / "model").exists()


def damage(step: Path, what: str) -> str:
    """Damage a checkpoint; return the expected message."""
    npz = step / "shard_2" / "7.npz"
    if what == "a shard is missing":
        shutil.rmtree(step / "shard_2")
        return "shard_2 is missing"
    if what == "the last shard is missing":
        shutil.rmtree(step / f"shard_{reference.SHARDS - 1}")
        return r"transformer\.\S+ .* has shape"
    if what == "a file is missing":
        npz.unlink()
        return r"shard_2/7\.npz is missing"
    if what == "a link":
        npz.rename(step.parent.parent / "elsewhere.npz")
        npz.symlink_to(step.parent.parent / "elsewhere.npz")
        return r"shard_2/7\.npz is a link to .*elsewhere\.npz, out of the folder"
    if what == "truncated":
        os.truncate(npz, npz.stat().st_size - 100)
        return r"shard_2/7\.npz: truncated or corrupt"
    if what == "a flipped bit":
        raw = bytearray(npz.read_bytes())
        raw[600] ^= 1
        npz.write_bytes(raw)
        return r"shard_2/7\.npz: arr_\d+ is damaged: its checksum differs"
    with np.load(npz) as loaded:
        arrays = [loaded[name] for name in loaded.files]
    if what == "compressed":
        np.savez_compressed(npz, *arrays)
        return r"shard_2/7\.npz: arr_0.npy in it is compressed"
    if what == "code":
        arrays[1] = np.array([{"code": 1}], dtype=object)
        np.savez(npz, *arrays, allow_pickle=True)
        return r"shard_2/7\.npz: arr_1 holds Python objects"
    if what == "another type":
        np.savez(npz, *(array.astype(np.float16) for array in arrays))
        return r"shard_2/7\.npz: transformer\.h\S+ is torch\.float16, in shard_0 torch\.float32"
    if what == "another shape":
        np.savez(npz, *(array[:-1] for array in arrays))
        return r"transformer\.h\S+ has different shapes in different shards|has shape"
    if what == "one array more":
        np.savez(npz, *arrays, arrays[0])
        return r"shard_2 has \d+ arrays, shard_0 \d+"
    raise AssertionError(what)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "what",
    ["a shard is missing", "the last shard is missing", "a file is missing", "a link", "truncated", "a flipped bit",
     "compressed", "code", "another type", "another shape", "one array more"],
)  # fmt: skip
def test_damage_error_names_file_and_array(tmp_path: Path, shards: list[Leaves], config: Path, what: str) -> None:
    step = reference.write(tmp_path / "mesh", shards)
    reason = damage(step, what)
    with pytest.raises(DataError, match=reason):
        convert(step, tmp_path / "out" / "model", Conversion(config=config))
    assert not list(tmp_path.glob("out/*"))


@pytest.mark.parametrize("what", ["truncated", "not zstandard", "a link", "no checkpoint", "two checkpoints"])
def test_damaged_archive_leaves_nothing(tmp_path: Path, shards: list[Leaves], config: Path, what: str) -> None:
    step = reference.write(tmp_path / "mesh", shards)
    path = tmp_path / "a.tar.zst"
    if what == "a link":
        (step / "shard_1" / "3.npz").unlink()
        (step / "shard_1" / "3.npz").symlink_to("/etc/passwd")
    if what == "two checkpoints":
        with tarfile.open(path.with_suffix(""), "w") as archive:
            archive.add(step, "step_1")
            archive.add(step, "step_2")
        path = path.with_suffix("")
    else:
        reference.pack(step if what != "no checkpoint" else (tmp_path / "mesh.json"), path)
    if what == "truncated":
        os.truncate(path, path.stat().st_size // 2)
    if what == "not zstandard":
        path.write_bytes(path.read_bytes()[:5000] + bytes(5000))
    with pytest.raises(DataError, match=rf"{path.name}.*(truncated|cannot be read|a link|no checkpoint|several)"):
        convert(path, tmp_path / "out" / "model", Conversion(config=config))
    assert not list(tmp_path.glob("out/*"))


@pytest.mark.parametrize("form", ["tar", "tar.zst"])
def test_low_disk_fails_before_unpacking(
    tmp_path: Path, shards: list[Leaves], config: Path, set_free_space: Callable[[int], None], form: str
) -> None:
    path = tmp_path / f"a.{form}"
    reference.pack(reference.write(tmp_path / "mesh", shards), path)
    size = path.stat().st_size
    set_free_space(size // 2)
    reason = rf"{path.name} unpacks to {size / 1e9:.1f} GB, but .* GB free"
    with pytest.raises(ResourceError, match=reason):
        convert(path, tmp_path / "out" / "model", Conversion(config=config))
    assert list((tmp_path / "out").iterdir()) == []


def test_archive_names_cannot_escape_folder(tmp_path: Path, shards: list[Leaves], config: Path) -> None:
    step = reference.write(tmp_path / "mesh", shards)
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.add(step, "../../step_10")
        archive.add(tmp_path / "mesh.json", "../evil.json")
    convert(tmp_path / "a.tar", tmp_path / "out" / "model", Conversion(config=config))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model"]
    assert not list(tmp_path.parent.rglob("evil.json"))
