"""Adapters on quantized weights: the same bits in every place, and as on a plain model with the restored values."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import random_model
from support.cli_runner import Shell
from support.family_models import random_of_family
from support.gguf_models import make_model, quantize_matrices
from support.small_run import assert_same_weights, cut_and_resume, new_run, small_session, weights_of
from support.small_run import train as train_run
from support.small_stack import CPU, LENGTHS, LITTLE, PROMPTS, documents, train

from gptj_ft.checkpoints.architecture import read_architecture
from gptj_ft.checkpoints.convert import Conversion, convert
from gptj_ft.checkpoints.fingerprint import check_unchanged, fingerprint
from gptj_ft.checkpoints.model_folder import open_checkpoint, with_stored_sizes
from gptj_ft.config.options import Recipe
from gptj_ft.data.batches import micro_batches
from gptj_ft.errors import DataError, UsageError
from gptj_ft.models.layout import FROZEN, Layout
from gptj_ft.models.trainable import select
from gptj_ft.planning.memory import Free, forecast_memory
from gptj_ft.planning.plan import candidates
from gptj_ft.planning.step_replay import ScheduleInputs, count_step
from gptj_ft.planning.workload import StepTokens, Workload
from gptj_ft.streaming.activations import boundary_layout
from gptj_ft.streaming.open import load_weights, open_for_inference, open_for_training, open_frozen
from gptj_ft.streaming.scoring import evaluate_losses
from gptj_ft.streaming.stores import quantized as quantized_store
from gptj_ft.streaming.stores.placement import Placement, training_dtypes

FORMS = [("narrow", "nf4"), ("gpt2", "int8"), ("llama", "nf4"), ("gguf", "keep")]  # gpt2 stores weights (in, out)
LORA = Recipe(method="lora", lora={"rank": 4, "targets": ["all-linear"]})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Return a quantized model of each shape, and a plain one with its values."""
    made = {}
    for shape, quantization in FORMS:
        tmp = tmp_path_factory.mktemp(shape)
        source = tmp / "model"
        if shape == "gguf":
            make_model(tmp / "made", "llama", hidden_size=256, intermediate_size=256, head_dim=64)
            convert(tmp / "made", tmp / "plain.gguf", Conversion(to="gguf"))
            source = quantize_matrices(tmp / "plain.gguf", tmp / "codes.gguf", ["Q4_K", "Q6_K", "Q8_0"])
        else:
            (random_of_family(shape) if shape == "llama" else random_model(shape)).save_pretrained(source)
        convert(source, tmp / quantization, Conversion(quantize=quantization))  # type: ignore[arg-type]
        convert(tmp / quantization, tmp / "plain", Conversion(dtype="fp32"))
        made[shape] = tmp / quantization, tmp / "plain"
    return made


def trained(folder: Path, tmp: Path, dtype: torch.dtype, **places: object) -> tuple[object, list[torch.Tensor]]:
    """Train three steps; return losses and norms, and all weights afterwards."""
    architecture, where = read_architecture(folder), Placement("device", "device", **places)  # type: ignore[arg-type]
    selection = select(architecture, LORA)
    with open_checkpoint(folder) as checkpoint:
        frozen = with_stored_sizes(architecture, checkpoint, selection.frozen)
        stack = open_for_training(
            architecture, where, training_dtypes(dtype), CPU, tmp, LITTLE,
            boundary=boundary_layout(sum(LENGTHS), architecture.config.n_embd, len(LENGTHS)),
            selection=replace(selection, frozen=frozen),
        )  # fmt: skip
        open_frozen(stack, architecture, checkpoint, where)
        load_weights(stack, architecture, checkpoint)
        curve, weights = train(stack, LORA, steps=3)
    return curve, [value for layer in weights[1:] for value in layer.values()]  # an embedding may be read by rows


PLACES = ({"frozen": "device"}, {"frozen": "host"}, {"frozen": "disk"}, {"frozen": "disk", "in_memory": (1,)})


@pytest.mark.sampled(20)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", [shape for shape, _ in FORMS])
@pytest.mark.parametrize("part", range(2))
def test_training_has_the_bits_of_a_plain_model_in_every_place(
    shape: str, dtype, part: int, folders, tmp_path: Path
) -> None:
    quantized, plain = folders[shape]
    curve, weights = trained(plain, tmp_path / "plain", dtype, frozen="device")
    for number, places in enumerate(PLACES[part::2]):
        ours, found = trained(quantized, tmp_path / str(number), dtype, **places)
        assert ours == curve, places
        assert len(found) == len(weights)
        assert all(map(torch.equal, found, weights)), places


@pytest.mark.thorough
def test_matrix_that_arrives_in_many_pieces_has_the_same_bits(folders, tmp_path: Path, monkeypatch) -> None:
    quantized, plain = folders["narrow"]
    curve, _ = trained(plain, tmp_path / "plain", torch.float32, frozen="device")
    monkeypatch.setattr(quantized_store, "PIECE_BYTES", 256)
    for place in ("host", "disk"):
        assert trained(quantized, tmp_path / place, torch.float32, frozen=place)[0] == curve


@pytest.mark.parametrize("weights", ["device", "host", "disk"])
@pytest.mark.parametrize("shape", [shape for shape, _ in FORMS])
def test_inference_has_the_losses_of_a_plain_model(shape: str, weights: str, folders) -> None:
    def losses(folder: Path, place: str) -> list[float]:
        with open_for_inference(folder, CPU, torch.float32, place) as (_, stack):
            batches = list(micro_batches(documents(101), PROMPTS, 64))
            return [loss.total for _ in range(2) for loss in evaluate_losses(stack, batches)]

    quantized, plain = folders[shape]
    assert losses(quantized, weights) == losses(plain, "device")


def test_bytes_read_are_those_of_the_codes(folders, tmp_path: Path) -> None:
    quantized, _ = folders["narrow"]
    architecture = read_architecture(quantized)
    selection = select(architecture, LORA)
    with open_checkpoint(quantized) as checkpoint:
        frozen = with_stored_sizes(architecture, checkpoint, selection.frozen)
    workload = Workload(selection.trained, 48, torch.bfloat16, StepTokens(64, 64, 64, 64), None, frozen=frozen)
    in_files = sum(file.stat().st_size for file in quantized.glob("*.safetensors"))
    assert in_files * 0.8 < sum(layout.bytes_in("disk", torch.bfloat16) for layout in frozen) < in_files
    block: Layout = frozen[1]
    assert block.bytes_in("host", torch.bfloat16) < 0.35 * block.bytes_in("device", torch.bfloat16)
    # Blocks are read once in each pass, from where they are; the embedding by rows, the head once.
    stored = tuple(training_dtypes(torch.bfloat16).items())
    for place in ("host", "disk"):
        where = Placement("device", "device", frozen=place)
        memory = forecast_memory(where, workload, LORA, Free(1 << 34, 1 << 34, 1 << 34, False))
        up, down, _ = count_step(
            tuple(workload.layouts), tuple(frozen), 48, torch.bfloat16, ScheduleInputs(where, stored, memory.budget)
        )
        blocks = sum(layout.bytes_in(place, torch.bfloat16) for layout in frozen[1:-1])
        head = frozen[-1].bytes_in(place, torch.bfloat16)
        assert blocks + head <= up.read[place] + down.read[place] <= 2 * (blocks + head)


def test_codes_in_memory_are_planned_where_values_do_not_fit(folders) -> None:
    free = Free(1 << 30, 1 << 30, 1 << 30, True)
    assert "host" not in {placement.of(FROZEN) for placement in candidates(LORA, free)}
    places = [placement.of(FROZEN) for placement in candidates(LORA, free, is_quantized=True)]
    assert [place for place, before in zip(places, [None, *places], strict=False) if place != before] == [
        "device", "host", "disk",
    ]  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"train": ("h.1.*",)}], ids=["all", "a block"])
def test_training_quantized_weights_is_refused(options: dict[str, object], tmp_path: Path) -> None:
    small_session(tmp_path / "plain")
    convert(tmp_path / "plain", tmp_path / "nf4", Conversion(quantize="nf4"))
    with pytest.raises(UsageError, match=r"quantized \(nf4\), so only adapters can be trained: use --method lora"):
        small_session(tmp_path / "nf4", **options)


def adapter_of(tmp: Path) -> Path:
    """Train an adapter on a quantized model; return the run's."""
    (tmp / "plain").mkdir()
    small_session(tmp / "plain")
    convert(tmp / "plain", tmp / "nf4", Conversion(quantize="nf4"))
    run = new_run(tmp)
    train_run(small_session(tmp / "nf4", method="lora", lora={"targets": ["all-linear"]}), run)
    return run.model


def test_adapter_on_another_quantization_is_named_and_merged_only_with_any_base(tmp_path: Path, shell: Shell) -> None:
    adapter = adapter_of(tmp_path)
    metadata = json.loads((adapter / "gptj_ft.json").read_text())
    assert metadata["base_quantization"] == "nf4"
    result = shell("convert --merge", adapter, tmp_path / "plain", tmp_path / "merged")
    assert (result.code, (tmp_path / "merged").exists()) == (3, False)
    assert "trained on a model that is quantized as nf4" in result.said
    assert "--any-base" in result.said
    result = shell("convert --any-base --merge", adapter, tmp_path / "plain", tmp_path / "merged")
    assert result.code == 0, result.said
    own = shell("convert --merge", adapter, tmp_path / "nf4", tmp_path / "merged nf4")
    assert own.code == 0, own.said
    plain, merged, restored = (weights_of(tmp_path / name) for name in ("plain", "merged", "merged nf4"))
    name = "transformer.h.0.attn.q_proj.weight"
    base = restored[name] - (merged[name] - plain[name])  # the change is the same
    with open_checkpoint(tmp_path / "nf4") as checkpoint:
        assert torch.allclose(base, checkpoint.read(name), atol=1e-6)
    config = json.loads((tmp_path / "nf4/config.json").read_text())
    del config["quantization_config"]
    config_path = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(
        json.dumps({**config_path, "base_model_name_or_path": str(tmp_path / "plain")})
    )
    message = "trained on a model that is quantized as nf4"
    with pytest.raises(DataError, match=message), open_for_inference(adapter, CPU, torch.float32):
        pass


@pytest.mark.thorough
def test_merged_model_is_quantized_in_one_command(tmp_path: Path, shell: Shell) -> None:
    adapter = adapter_of(tmp_path)
    merged, both = tmp_path / "merged", tmp_path / "both"
    assert shell("convert --merge", adapter, tmp_path / "nf4", merged).code == 0
    convert(merged, tmp_path / "after", Conversion(quantize="int8"))
    result = shell("convert --quantize int8 --merge", adapter, tmp_path / "nf4", both)
    assert result.code == 0, result.said
    assert_same_weights(weights_of(both), weights_of(tmp_path / "after"))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("quantization", ["nf4", "int8"])
@pytest.mark.parametrize("place", ["disk", "host"])
def test_run_cut_at_any_write_resumes_to_the_same_adapter(place: str, quantization: str, tmp_path: Path) -> None:
    small_session(tmp_path / "plain")
    convert(tmp_path / "plain", tmp_path / "base", Conversion(quantize=quantization))  # type: ignore[arg-type]
    options = {"method": "lora", "lora": {"targets": ["all-linear"]}, "weights": place}
    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()
    whole, cut = new_run(tmp_path / "whole"), new_run(tmp_path / "cut")
    train_run(small_session(tmp_path / "base", **options), whole)
    cut_and_resume(small_session(tmp_path / "base", **options), cut, (3, 11, 20))
    assert_same_weights(weights_of(cut.model), weights_of(whole.model))


def test_changed_codes_are_noticed_before_a_run_resumes(tmp_path: Path) -> None:
    small_session(tmp_path / "plain")
    convert(tmp_path / "plain", tmp_path / "base", Conversion(quantize="nf4"))
    session = small_session(tmp_path / "base", method="lora", weights="disk")
    run = new_run(tmp_path)
    train_run(session, run)
    before = fingerprint(tmp_path / "base")
    file = sorted((tmp_path / "base").glob("*.safetensors"))[1]
    content = bytearray(file.read_bytes())
    content[-300] ^= 1
    file.write_bytes(content)
    with pytest.raises(DataError, match=f"{file.name} has changed"):
        check_unchanged(tmp_path / "base", before)
