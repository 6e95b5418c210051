"""Compare LoRA with `peft`, compare placements with each other, and run the commands."""

from __future__ import annotations

import json
import mmap
import platform
import shutil
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import random_gptj, random_model
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from support.family_models import random_of_family
from support.rates import timed_by_flops
from support.small_run import Power, assert_same_weights, cut_and_resume, new_run, small_session, weights_of
from support.small_run import train as train_run
from support.small_stack import (
    CPU,
    LENGTHS,
    LITTLE,
    PROMPTS,
    assert_identical,
    documents,
    lr_of,
    next_token_logits,
    oracle_loss,
    relative,
    train,
)  # fmt: skip
from support.steps import interrupting
from transformers import AutoModelForCausalLM, BertConfig, BertForMaskedLM

from gptj_ft.checkpoints.adapter import MergedCheckpoint, open_adapter
from gptj_ft.checkpoints.architecture import read_architecture
from gptj_ft.checkpoints.model_folder import open_checkpoint
from gptj_ft.config.options import Recipe
from gptj_ft.config.resolve import resolve
from gptj_ft.config.run_folder import Run
from gptj_ft.data.batches import micro_batches
from gptj_ft.models.batch import PackedBatch, pack
from gptj_ft.models.dropout import Dropout, seed_of
from gptj_ft.models.lora import Rank, linear_layers, name_of
from gptj_ft.models.trainable import select
from gptj_ft.planning.costs import training_passes
from gptj_ft.planning.layer_cost import LayerInput, measure_block
from gptj_ft.planning.step_replay import ScheduleInputs
from gptj_ft.planning.workload import StepTokens, Workload
from gptj_ft.streaming.activations import boundary_layout
from gptj_ft.streaming.adamw import AdamW
from gptj_ft.streaming.buffers import BufferBudget
from gptj_ft.streaming.objective import CrossEntropy
from gptj_ft.streaming.open import load_weights, open_for_inference, open_for_training, open_frozen
from gptj_ft.streaming.scoring import evaluate_losses
from gptj_ft.streaming.step import train_step
from gptj_ft.streaming.stores.placement import Placement, training_dtypes
from gptj_ft.system.memory import return_free_heap
from gptj_ft.training.export import shortest_endings
from gptj_ft.training.restore import optimizer_config

TARGETS = {"narrow": ("q_proj", "v_proj", "mlp.fc_out"), "gpt2": ("c_attn", "mlp.c_proj")}


def lora(shape: str = "narrow", **options: object) -> Recipe:
    own = {"rank": 4, "alpha": 6, "targets": TARGETS[shape]} if shape in TARGETS else {}
    return Recipe(method="lora", lora={**own, **options})


def model_of(shape: str):
    return random_model(shape) if shape in TARGETS else random_of_family(shape)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {shape: tmp_path_factory.mktemp(shape) for shape in (*TARGETS, "llama")}
    for shape, folder in made.items():
        model_of(shape).save_pretrained(folder)
    return made


def open_training(folder: Path, tmp: Path, recipe: Recipe, placement=("device", "device"), budget=LITTLE, **places):
    architecture, where = read_architecture(folder), Placement(*placement, **places)
    stack = open_for_training(
        architecture, where, training_dtypes(torch.float32), CPU, tmp, budget,
        boundary=boundary_layout(sum(LENGTHS), architecture.config.n_embd, len(LENGTHS)),
        selection=select(architecture, recipe),
    )  # fmt: skip
    checkpoint = open_checkpoint(folder)
    open_frozen(stack, architecture, checkpoint, where)
    load_weights(stack, architecture, checkpoint, recipe.seed)
    return stack


def adapters_of(stack, kind: str = "weight") -> dict[str, torch.Tensor]:
    """Return the matrices, or their gradients, by PEFT's names."""
    block = stack.layers[1]
    family = "llama" if not hasattr(block, "ln_1") else "gpt2" if hasattr(block, "ln_2") else "gptj"
    from gptj_ft.models.registry import families

    found = {}
    for layer in stack.trained:
        flat = torch.cat([part.clone() for _, part in stack.read_chunks(kind, layer)])
        for local, view in stack.layouts[layer].views(flat).items():
            found[name_of(families()[family], layer, local, len(stack.layers))] = view
    return found


def as_peft(shape: str, matrices: dict[str, torch.Tensor], dora: bool):
    """Return the same model with the same adapters in PEFT, and its initial magnitudes."""
    config = (
        LoraConfig(r=4, lora_alpha=6, target_modules=list(TARGETS[shape]), fan_in_fan_out=shape == "gpt2")
        if shape in TARGETS
        else LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    )
    config.use_dora = dora
    model = get_peft_model(model_of(shape), config)
    named = {name.removeprefix("base_model.model.").replace(".default", ""): p for name, p in model.named_parameters()}
    trained = {name.replace("vector.weight", "vector"): p for name, p in named.items() if p.requires_grad}
    assert trained.keys() == matrices.keys()
    start = {name: p.detach().clone() for name, p in trained.items() if "magnitude" in name}
    for name, parameter in trained.items():
        parameter.data.copy_(start.get(name, 0) + matrices[name])
    return model, trained, start


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    ("shape", "dora"),
    [(shape, False) for shape in (*TARGETS, "llama")]
    + [("gpt2", True), pytest.param("llama", True, marks=pytest.mark.slow), ("narrow", True)],
)
def test_losses_gradients_and_ten_steps_match_peft(shape: str, dora: bool, folders, tmp_path: Path) -> None:
    recipe = lora(shape, dora=dora).model_copy(update={"clip_norm": 0.05})
    docs = documents(101)
    stack = open_training(folders[shape], tmp_path, recipe)
    model, trained, start = as_peft(shape, adapters_of(stack), dora)
    if dora and shape == "narrow":  # gradients of q_proj are so small that PEFT in fp32 is 1.5e-5 from itself in fp64
        model.double()
    groups = [
        {"params": [trained[name] for name in trained.keys() - start.keys()], "weight_decay": recipe.weight_decay},
        # Decay would pull the norms of the model's own rows to zero, where B's decay only undoes the change.
        {"params": [trained[name] for name in start], "weight_decay": 0.0},
    ]
    theirs = torch.optim.AdamW(groups, eps=recipe.eps, betas=recipe.betas)
    ours, norms = AdamW(stack, optimizer_config(recipe)), []
    for step in range(10):
        for group in theirs.param_groups:
            group["lr"] = lr_of(step)
        theirs.zero_grad()
        loss = oracle_loss(model, docs)
        loss.backward()
        gradients = {name: parameter.grad.clone() for name, parameter in trained.items()}
        norms.append(torch.nn.utils.clip_grad_norm_(trained.values(), 0.05).item())
        theirs.step()
        ours.begin_step(lr_of(step))
        assert train_step(stack, ours, micro_batches(docs, PROMPTS, 40)).mean == pytest.approx(loss.item(), rel=1e-5)
        for name, gradient in adapters_of(stack, "grad").items():
            # Adam turns differences of rounding into different weights, and these into different gradients.
            assert relative(gradient, gradients[name]) < (2e-5 if step < 5 else 3e-5), (step, name)
        assert ours.finish_step() == pytest.approx(norms[-1], rel=1e-5)
    ours.flush()
    assert max(norms) > 0.05, "clipping was never needed, so this test would not see it"
    for name, matrix in adapters_of(stack).items():
        assert relative(matrix + start.get(name, 0), trained[name]) < 1e-4, name
    stack.close()


def test_initial_adapters_match_peft_for_any_seed(folders, tmp_path: Path) -> None:
    first, again, other = (
        adapters_of(open_training(folders["narrow"], tmp_path / str(n), lora().model_copy(update={"seed": seed})))
        for n, seed in enumerate((0, 0, 1))
    )
    for name, matrix in first.items():
        assert torch.equal(matrix, again[name])
        if "lora_B" in name:
            assert not matrix.any()
            continue
        assert not torch.equal(matrix, other[name])
        bound = matrix.shape[1] ** -0.5  # of kaiming_uniform_ with a = sqrt(5)
        assert 0.9 * bound < matrix.abs().max() <= bound
    assert len({float(matrix.sum()) for name, matrix in first.items() if "lora_A" in name}) == len(first) // 2


def with_seeds(batches, *key: int):
    return [
        replace(batch, seeds=tuple(seed_of((*key, number, n)) for n in range(len(batch.cu_seqlens) - 1)))
        for number, batch in enumerate(batches)
    ]


@pytest.mark.sampled(21)
@pytest.mark.parametrize(
    ("shape", "dropout", "dora"),
    [("narrow", 0.3, False), ("gpt2", 0.3, False), ("gpt2", 0.3, True)]
    + [
        pytest.param(*each, marks=pytest.mark.slow)
        for each in (("narrow", 0.0, False), ("gpt2", 0.0, False), ("narrow", 0.3, True), ("narrow", 0.0, True))
    ],
)
@pytest.mark.parametrize("part", range(3))
def test_placement_and_recomputation_change_no_bit(
    shape: str, dropout: float, dora: bool, part: int, folders, tmp_path: Path
) -> None:
    batches_of = (lambda *rest: with_seeds(micro_batches(*rest))) if dropout else micro_batches
    recipe = lora(shape, dropout=dropout, dora=dora)
    expected = train(open_training(folders[shape], tmp_path / "resident", recipe), recipe, batches_of=batches_of)
    for number, (placement, places, budget, late) in enumerate(
        [
            (("disk", "disk"), {"frozen": "disk"}, LITTLE, 1),
            (("disk", "disk", "disk"), {"frozen": "host"}, replace(LITTLE, read_ahead=0), 0),
            (("device", "device", "host"), {"frozen": "disk"}, replace(LITTLE, read_ahead=3, num_kept_layers=1), 0),
            (("host", "host"), {"frozen": "device"}, replace(LITTLE, num_kept_layers=3), 2),
            (("disk", "disk"), {"frozen": "disk", "in_memory": (1, 3), "memory": "device"}, LITTLE, 0),
            (("disk", "disk"), {"frozen": "disk", "in_memory": (2,)}, LITTLE, 0),
        ][part::3]
    ):
        stack = open_training(folders[shape], tmp_path / str(number), recipe, placement, budget, **places)
        # an embedding off the device is read by rows
        assert_identical(expected, train(stack, recipe, late=late, batches_of=batches_of))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("read_ahead", [0, 1, 2])
def test_frozen_bytes_read_match_forecast(folders, tmp_path: Path, read_ahead: int) -> None:
    recipe = lora()
    stack = open_training(folders["narrow"], tmp_path, recipe, budget=BufferBudget(read_ahead), frozen="disk")
    optimizer, reads = AdamW(stack, optimizer_config(recipe)), []
    batches = micro_batches(documents(101), PROMPTS, 40)
    for _ in range(3):
        before = stack.meter.bytes_read
        optimizer.begin_step(1e-3)
        train_step(stack, optimizer, batches)
        optimizer.finish_step()
        reads.append((stack.meter.bytes_read - before) // 4)
    rows = 48 * len(torch.cat([batch.tokens_T for batch in batches]).unique())
    load = Workload(stack.layouts, 48, torch.float32, StepTokens(40, 74, 74.0, 50.0), 3, frozen=stack.frozen)
    where, stored = Placement("device", "device", frozen="disk"), training_dtypes(torch.float32)
    schedule = ScheduleInputs(where, tuple(stored.items()), BufferBudget(read_ahead))
    *passes, _ = training_passes(timed_by_flops(load), schedule, on_cpu=False)
    assert reads[2] - rows == sum(each.read.get("disk", 0) for each in passes) // 4
    stack.close()


def test_flush_reads_no_frozen_weights(folders, tmp_path: Path) -> None:
    recipe = lora()
    stack = open_training(folders["narrow"], tmp_path, recipe, frozen="disk")
    optimizer = AdamW(stack, optimizer_config(recipe))
    optimizer.begin_step(1e-3)
    train_step(stack, optimizer, micro_batches(documents(101), PROMPTS, 40))
    optimizer.finish_step()
    before = stack.meter.bytes_read
    optimizer.flush()
    assert stack.meter.bytes_read == before
    stack.close()


def test_evaluation_between_steps_uses_no_dropout(folders, tmp_path: Path) -> None:
    recipe = lora(dropout=0.5)
    stack = open_training(folders["narrow"], tmp_path, recipe)
    for layer in stack.trained:  # initially B is zero and hides A
        stack.stores["weight"].own("weight", layer).fill_(0.1)
    batches = micro_batches(documents(101), PROMPTS, 40)
    before = [loss.total for loss in evaluate_losses(stack, batches)]
    optimizer = AdamW(stack, optimizer_config(recipe))
    optimizer.begin_step(0.0)
    train_step(stack, optimizer, with_seeds(batches))
    assert [loss.total for loss in evaluate_losses(stack, batches)] == before
    stack.close()


def test_adapter_dropout_depends_on_seed_in_training(folders, tmp_path: Path) -> None:
    docs = documents(101)
    losses = {}
    for name, dropout, noise in (("without", 0.0, None), ("off", 0.5, None), ("one", 0.5, 1), ("two", 0.5, 2)):
        recipe = lora(dropout=dropout)
        stack = open_training(folders["narrow"], tmp_path / name, recipe)
        for layer in stack.trained:  # initially B is zero and hides A
            stack.stores["weight"].own("weight", layer).fill_(0.1)
        batches = micro_batches(docs, PROMPTS, 40)
        batches = batches if noise is None else with_seeds(batches, noise)
        before = torch.random.get_rng_state()
        optimizer = AdamW(stack, optimizer_config(recipe))
        optimizer.begin_step(1e-3)
        losses[name] = train_step(stack, optimizer, batches).mean
        assert torch.equal(torch.random.get_rng_state(), before)
        if noise is None:
            assert evaluate_losses(stack, batches)[0].mean == pytest.approx(
                evaluate_losses(stack, [replace(batch, seeds=None) for batch in batches])[0].mean
            )
        stack.close()
    assert losses["without"] == losses["off"]
    assert len(set(losses.values())) == 3


def test_recomputation_repeats_adapter_dropout(folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    apply_mask, masks = Dropout.apply_mask, []

    def watched(self: Dropout, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        masks.append((tuple(x.shape), (~keep).flatten().tolist()))
        return apply_mask(self, x, keep)

    monkeypatch.setattr(Dropout, "apply_mask", watched)
    recipe = lora(dropout=0.5).model_copy(
        update={"lora": lora(dropout=0.5).lora.model_copy(update={"targets": ["q_proj"]})}
    )
    stack = open_training(folders["narrow"], tmp_path, recipe)
    docs = [documents(101)[1]] * 2  # two micro-batches of one shape
    batches = with_seeds(micro_batches(docs, [0, 0], len(docs[0])))
    optimizer = AdamW(stack, optimizer_config(recipe))
    optimizer.begin_step(1e-3)
    train_step(stack, optimizer, batches)
    stack.close()
    blocks, forward = 3, masks[: 3 * len(batches)]
    assert len({shape for shape, _ in masks}) == 1
    assert len({tuple(mask) for _, mask in forward}) == blocks * len(batches), "some layers drop the same"
    assert {tuple(mask) for _, mask in masks} == {tuple(mask) for _, mask in forward}, "recomputed otherwise"
    assert len(masks) == 2 * len(forward)


def adapter_of(run) -> dict[str, torch.Tensor]:
    return load_file(run.model / "adapter_model.safetensors")


LORA = {"method": "lora", "lora": {"rank": 4, "dropout": 0.1}, "num_steps": 4}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("straight")
    session, run = small_session(folder / "model", **LORA), new_run(folder)
    train_run(session, run)
    return session, run


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("weights", "state"), [("device", "auto"), ("disk", "auto"), ("host", "device"), ("disk", "host")]
)
def test_lora_placements_agree_without_weight_writes(weights: str, state: str, straight, tmp_path: Path) -> None:
    session = small_session(straight[0].model, **LORA, weights=weights, optimizer_state=state)
    run = new_run(tmp_path)
    before = {path.name: path.stat().st_mtime_ns for path in session.model.iterdir()}
    train_run(session, run)
    assert_same_weights(adapter_of(run), adapter_of(straight[1]), weights, state)
    assert {path.name: path.stat().st_mtime_ns for path in session.model.iterdir()} == before
    losses = [[line.get("loss") for line in each.metrics()] for each in (run, straight[1])]
    assert losses[0] == losses[1]
    trained = sum(layout.numel for layout in session.selection.trained)
    assert session.plan.workload.num_trained <= trained
    if state == "auto":
        assert session.plan.placement == Placement("disk", "disk", frozen=weights)
        lines = [line for line in run.metrics() if "loss" in line]
        assert all(line["bytes_written"] <= 16 * trained for line in lines)
        assert session.plan.costs.disk_bytes_written_per_step == 16 * trained


@pytest.mark.thorough
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_kept_activations_return_free_heap(tmp_path: Path) -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    shape = {"vocab_size": 64, "n_embd": 128, "n_positions": 512, "n_layer": 24, "n_head": 4, "rotary_dim": 16}
    random_gptj(**shape).save_pretrained(tmp_path)
    recipe = Recipe(method="lora")
    stack = open_training(tmp_path, tmp_path, recipe, budget=BufferBudget(num_kept_layers=24))
    given, found = LayerInput((512,), 128, torch.float32), []
    kept = 24 * measure_block(stack.layers[1], stack.layouts[1], given).kept_bytes

    class Watched(CrossEntropy):
        def weight(self, batch: PackedBatch) -> float:  # called once, when the head starts
            found.append(resident_bytes() - before)
            return super().weight(batch)

    optimizer = AdamW(stack, optimizer_config(recipe))
    optimizer.begin_step(1e-3)
    return_free_heap()
    before = resident_bytes()
    stack.budget = replace(stack.budget, forward_bytes=before + int(1.25 * kept))
    train_step(stack, optimizer, micro_batches([[1] * 512], [1], 512), Watched())
    stack.close()
    assert found[0] < 1.4 * kept, (found, kept)


@pytest.mark.thorough
@pytest.mark.parametrize("stride", [23, pytest.param(1, marks=pytest.mark.slow)])
def test_run_cut_anywhere_resumes_to_same_adapter(stride: int, straight, tmp_path: Path) -> None:
    session = small_session(straight[0].model, **LORA)
    with pytest.MonkeyPatch.context() as patch:
        power = Power(patch)
        (tmp_path / "count").mkdir()
        train_run(session, new_run(tmp_path / "count"))
    assert power.count > 30
    for last in range(3, power.count, stride):
        run = new_run(tmp_path)
        cut_and_resume(session, run, [last])
        assert_same_weights(adapter_of(run), adapter_of(straight[1]), last)
        shutil.rmtree(run.folder)


def logits_of(folder: Path, docs) -> torch.Tensor:
    with open_for_inference(folder, CPU, torch.float32) as (_, stack):
        return next_token_logits(stack, pack(docs))


@pytest.fixture(
    params=[("narrow", False), ("gpt2", False), ("gpt2", True), pytest.param(("narrow", True), marks=pytest.mark.slow)],
    ids=str,
)
def foreign(request: pytest.FixtureRequest, folders, tmp_path: Path):
    """Make an adapter with PEFT: two ranks, nonzero matrices."""
    shape, dora = request.param
    config = LoraConfig(
        r=4, lora_alpha=6, target_modules=list(TARGETS[shape]), fan_in_fan_out=shape == "gpt2", use_dora=dora,
        rank_pattern={r"h\.1\..*": 2}, alpha_pattern={r"h\.1\..*": 5}, use_rslora=True,
    )  # fmt: skip
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folders[shape]), config).eval()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.3, generator=generator)
        if "magnitude" in name:
            parameter.data.mul_(1 + 0.3 * torch.rand(parameter.shape, generator=generator))
    model.save_pretrained(tmp_path / "foreign")
    return model, tmp_path / "foreign", folders[shape]


def test_peft_adapters_give_equal_logits(foreign) -> None:
    model, folder, base = foreign
    docs = documents(101)
    with torch.no_grad():
        theirs = torch.stack([model(torch.tensor([ids])).logits[0, -1] for ids in docs])
    torch.testing.assert_close(logits_of(folder, docs), theirs, rtol=1e-5, atol=1e-5)
    assert relative(theirs, logits_of(base, docs)) > 0.1, "the adapter does too little for this test to see"


@pytest.mark.thorough
def test_convert_merges_an_adapter_tensor_by_tensor(foreign, shell, tmp_path: Path) -> None:
    model, folder, base = foreign
    done = shell("convert --json --merge", folder, base, tmp_path / "merged")
    assert done.code == 0, done.err
    expected = model.merge_and_unload().state_dict()
    merged = weights_of(tmp_path / "merged")
    changed = 0
    for name, tensor in merged.items():
        assert relative(tensor, expected[name]) < 1e-6, name
        changed += not torch.equal(tensor, AutoModelForCausalLM.from_pretrained(base).state_dict()[name])
    assert changed == len([name for name in load_file(folder / "adapter_model.safetensors") if "lora_A" in name])


@pytest.mark.parametrize("foreign", [("gpt2", True)], indirect=True)
def test_dora_adapters_have_no_gguf_form(foreign, shell) -> None:
    done = shell("convert --to gguf", foreign[1], "adapter.gguf")
    assert (done.code, f"convert --merge {foreign[1]} --to gguf" in done.err) == (2, True), done.err


class Overtaken(MergedCheckpoint):
    """Another thread merges a tensor right after this thread has started its own merge."""

    @property
    def _change(self) -> tuple[str, torch.Tensor]:
        return self._last

    @_change.setter
    def _change(self, change: tuple[str, torch.Tensor]) -> None:
        self._last = "of another tensor", torch.full_like(change[1], 9.0)


def test_concurrent_merges_change_no_bit(foreign) -> None:
    _, folder, base = foreign
    adapter = open_adapter(folder, read_architecture(base))
    with open_checkpoint(base) as checkpoint:
        for module in adapter.ranks:
            name = f"{module}.weight"
            change = adapter.change(module)
            expected = checkpoint.read(name) + change
            if adapter.ranks[module].magnitude:
                scale = adapter.scale(module, checkpoint, change)
                expected *= scale if module in adapter.transposed else scale[:, None]
            assert torch.equal(Overtaken(checkpoint, adapter).read(name), expected), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lora_bias": True}, "lora_bias True is not supported"),
        ({"alora_invocation_tokens": [7, 8]}, "alora_invocation_tokens [7, 8] is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "save it with path_initial_model_for_weight_conversion"),
        ({"peft_type": "IA3"}, "peft_type IA3 is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"base_model_name_or_path": "nowhere/at-all"}, "nowhere/at-all, which does not exist"),
    ],
)
def test_unsupported_adapters_are_rejected(change, message: str, shell, straight, tmp_path) -> None:
    folder = shutil.copytree(straight[1].model, tmp_path / "adapter")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, **change}))
    if "base_model_name_or_path" not in change:  # users may change this one
        done = shell("convert --merge", folder)
        assert (done.code, "adapter_config.json is damaged, or was edited" in done.err) == (3, True), done.err
        (folder / "digests.json").unlink()
    done = shell("convert --merge", folder)
    assert (done.code, message in done.err) == (2, True), done.err


def test_dora_adapter_without_magnitudes_is_rejected(shell, straight, tmp_path) -> None:
    folder = shutil.copytree(straight[1].model, tmp_path / "adapter")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    (folder / "digests.json").unlink()
    done = shell("convert --merge", folder)
    assert (done.code, "q_proj.lora_magnitude_vector is missing" in done.err) == (3, True), done.err


def test_adapter_of_another_model_is_rejected(shell, straight, tmp_path: Path) -> None:
    folder = shutil.copytree(straight[1].model, tmp_path / "adapter")
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file(
        {**tensors, "base_model.model.score.lora_A.weight": torch.zeros(2, 2)}, folder / "adapter_model.safetensors"
    )
    done = shell("convert --merge", folder, straight[0].model, tmp_path / "merged")
    assert (done.code, "base_model.model.score.lora_A.weight belongs to no linear layer" in done.err) == (3, True)


DORA = {"method": "lora", "lora": {"rank": 4, "dropout": 0.1, "dora": True, "merge": True}, "num_steps": 4}


@pytest.mark.thorough
def test_cut_dora_run_opens_in_peft(straight, tmp_path: Path) -> None:
    (tmp_path / "cut").mkdir()
    session, run, cut = small_session(straight[0].model, **DORA), new_run(tmp_path), new_run(tmp_path / "cut")
    train_run(session, run)
    cut_and_resume(session, cut, [25])
    assert_same_weights(adapter_of(cut), adapter_of(run))
    base = AutoModelForCausalLM.from_pretrained(session.model)
    model, docs = PeftModel.from_pretrained(base, run.model).eval(), [[5, 9, 2, 7], [1, 2, 3]]
    with torch.no_grad():
        theirs = torch.stack([model(torch.tensor([ids])).logits[0, -1] for ids in docs])
    torch.testing.assert_close(logits_of(run.model, docs), theirs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits_of(run.folder / "merged", docs), theirs, rtol=1e-5, atol=1e-5)
    assert relative(theirs, logits_of(session.model, docs)) > 1e-3
    model.save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "adapter_model.safetensors")
    assert_same_weights(again, adapter_of(run))


TINY = "--recipe summarization --data rows.jsonl --model tiny --method lora --batch-size 8 --lr 1e-2"


def test_the_commands_with_an_adapter(shell, rows_file: Path, tmp_path: Path) -> None:
    plan = shell(f"finetune {TINY} --max-steps 40 --dry-run --json").json
    assert plan["num_trained"] < plan["num_parameters"] / 5
    done = shell(f"finetune {TINY} --max-steps 40 --output runs/out --set lora.rank=4 --set lora.merge=true --json")
    assert done.code == 0, done.err
    result = done.json
    assert result["loss_after"] < result["loss_before"] - 0.5
    adapter = Path(result["model"])
    assert adapter == Path("runs/out/model")
    assert not (adapter / "config.json").exists()
    assert shell("runs verify runs/out").code == 0
    assert "finished" in shell("runs").out
    written = shell("generate --max-new-tokens 12 --json", "The printer on floor 3 is out of paper.")
    assert written.code == 0, written.err
    assert written.json["model"] == str(adapter.resolve())
    done = shell("evaluate --json --limit 6 --data rows.jsonl")
    assert done.code == 0, done.err
    assert done.json["model"]["loss"] < done.json["baseline"]["loss"] - 0.5
    merged = shell("evaluate runs/out/merged --json --limit 6 --data rows.jsonl --baseline none")
    assert merged.json["model"]["loss"] == pytest.approx(done.json["model"]["loss"], rel=1e-5)
    again = shell("convert --json --merge runs/out/model")
    assert again.code == 0, again.err
    assert_same_weights(weights_of(Path(again.json["folder"])), weights_of(Path("runs/out/merged")))
    done = shell("finetune --recipe summarization --data rows.jsonl --model runs/out")
    assert (done.code, "convert --merge" in done.err) == (2, True), done.err

    # PEFT opens the adapter with its base model, and computes the same outputs.
    config = json.loads((adapter / "adapter_config.json").read_text())
    base = AutoModelForCausalLM.from_pretrained(config["base_model_name_or_path"])
    model = PeftModel.from_pretrained(base, adapter).eval()
    docs = [[5, 9, 2, 7], [1, 2, 3]]
    with torch.no_grad():
        theirs = torch.stack([model(torch.tensor([ids])).logits[0, -1] for ids in docs])
    torch.testing.assert_close(logits_of(adapter, docs), theirs, rtol=1e-5, atol=1e-5)
    assert config["target_modules"] == ["q_proj", "k_proj", "v_proj", "out_proj", "fc_in", "fc_out"]


def load_recipe(run: str) -> Recipe:
    return Run(Path(run)).recipe()


@pytest.mark.thorough
def test_resume_in_another_placement_changes_no_bit(shell, rows_file: Path) -> None:
    options = f"finetune {TINY} --max-steps 6 --set lora.dropout=0.2 --set save_every=2"
    assert shell(f"{options} --output straight --weights device").code == 0

    with interrupting(3, 5):
        assert shell(f"{options} --output stopped --weights disk").code == 130
        assert shell("finetune --resume stopped --optimizer-state device --weights host").code == 130
    (weights,) = Path(load_recipe("stopped").model).glob("model-00002-of-*.safetensors")
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    refused = shell("finetune --resume stopped")
    assert (refused.code, f"{weights} has changed since the run began" in refused.err) == (3, True), refused.err
    assert "has changed since the run began" in shell("runs verify stopped").out
    weights.write_bytes(whole)
    assert shell("runs verify stopped").code == 0
    done = shell("finetune --resume stopped --weights device")
    assert done.code == 0, done.err
    ours, theirs = (load_file(Path(name) / "model/adapter_model.safetensors") for name in ("stopped", "straight"))
    assert_same_weights(ours, theirs)


def test_options_of_lora(shell, rows_file: Path, folders) -> None:
    done = shell(f"finetune {TINY} --set lora.targets=q_porj,v_proj")
    assert (done.code, "did you mean 'q_proj'" in done.err) == (2, True), done.err
    done = shell(f"finetune {TINY} --train h.1.*")
    assert (done.code, "use lora.targets" in done.err) == (2, True), done.err
    assert resolve({"method": "lora", "recipe": "summarization"}).recipe.lr == 2e-4
    assert resolve({"method": "lora", "recipe": "summarization", "lr": 1e-3}).recipe.lr == 1e-3
    architecture = read_architecture(folders["narrow"])
    chosen = select(architecture, lora(targets=("h.[12].mlp.*",))).adapters
    assert list(chosen) == [name for name in linear_layers(architecture) if ".mlp." in name and ".0." not in name]
    chosen = select(architecture, lora(targets=("all-linear", "lm_head"))).adapters
    assert chosen.keys() == linear_layers(architecture).keys()
    old = select(architecture, lora(targets=())).adapters  # recorded by runs before all-linear
    assert {name.rpartition(".")[2] for name in old} == {"q_proj", "v_proj"}


def random_bert() -> BertForMaskedLM:
    return BertForMaskedLM(
        BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48)
    )


@pytest.mark.parametrize("shape", ["narrow", "gpt2", "bert"])
def test_default_targets_are_pefts_all_linear(shape: str, tmp_path: Path) -> None:
    model = random_bert() if shape == "bert" else random_model(shape)
    model.save_pretrained(tmp_path)
    architecture = read_architecture(tmp_path)
    adapters = select(architecture, Recipe(method="lora")).adapters
    theirs = get_peft_model(deepcopy(model), LoraConfig(target_modules="all-linear")).targeted_module_names
    assert adapters.keys() == {name for name in theirs if ".layer." in name or ".h." in name}
    assert set(adapters.values()) == {Rank(16, 2.0)}
    endings = shortest_endings(adapters, linear_layers(architecture))
    assert len(endings) < 7
    again = get_peft_model(model, LoraConfig(target_modules=endings)).targeted_module_names
    assert set(again) == adapters.keys()
