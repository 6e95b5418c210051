"""Plans of inference: placement, token budgets, refusals, measured memory."""

from __future__ import annotations

import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from gptj_ft.checkpoints.architecture import read_architecture
from gptj_ft.checkpoints.tiny import make_tiny
from gptj_ft.config.options import Generation
from gptj_ft.config.presets import load_preset
from gptj_ft.config.resolve import build
from gptj_ft.evaluation.text_evaluation import plan_on_rows
from gptj_ft.planning.constants import PROCESS_BYTES
from gptj_ft.planning.inference_plan import BATCH_TOKENS, InferenceWorkload, plan_inference, token_budget_within
from gptj_ft.planning.memory import Free, reserve

GiB = 2**30
CLEAR_REFS, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
SHAPE = {"vocab_size": 50400, "n_positions": 2048, "n_embd": 4096, "n_layer": 28, "n_head": 16, "rotary_dim": 64}


@pytest.fixture
def reads(tmp_path: Path) -> InferenceWorkload:
    """GPT-J 6B, with rows of a summarization."""
    config = {**SHAPE, "model_type": "gptj", "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5}
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}), encoding="utf-8")
    lengths = [200 + 7 * n for n in range(100)]
    documents = [length + 60 for length in lengths]
    settings = Generation(max_new_tokens=128)
    return InferenceWorkload.of(
        read_architecture(tmp_path), torch.float32, settings, documents=documents, prompts=lengths
    )


def free(memory: float) -> Free:
    return Free(int(memory), int(memory), 100 * GiB, is_shared=True)


def test_inference_streams_weights_that_do_not_fit(reads: InferenceWorkload) -> None:
    recipe = build({})
    roomy, tight, small = (plan_inference(recipe, reads, free(size * GiB)) for size in (100, 30, 8))
    assert (roomy.weights, roomy.together.written) == ("device", BATCH_TOKENS)
    assert tight.weights == "device"
    assert 2048 <= tight.together.written < BATCH_TOKENS
    assert small.weights == "disk"
    for plan in (roomy, tight, small):
        assert all(need.need <= need.have for need in plan.needs)
    assert plan_inference(build({"host_memory": "8GiB"}), reads, free(100 * GiB)).to_dict() == small.to_dict()
    assert plan_inference(recipe, reads, free(30 * GiB), written=512).together.written == 512, (
        "the budget of the earlier part"
    )


def test_inference_leaves_an_accelerators_reserve(reads: InferenceWorkload) -> None:
    enough = plan_inference(build({}), reads, Free(100 * GiB, 100 * GiB, 100 * GiB, is_shared=False))
    tensors = plan_inference(build({}), reads, free(100 * GiB)).device_bytes
    assert enough.device_bytes == tensors + reserve(tensors)


@pytest.mark.thorough
def test_inference_refusal_suggests_options(reads: InferenceWorkload) -> None:
    from gptj_ft.errors import ResourceError

    with pytest.raises(
        ResourceError, match=r"does not fit: .* it needs .* of memory, 5.4 GB is allowed; try --weights auto"
    ):
        plan_inference(build({"weights": "device", "host_memory": "5GiB"}), reads, free(100 * GiB))
    with pytest.raises(ResourceError, match="helps most, but is not enough"):
        plan_inference(build({}), reads, free(1 * GiB))


def test_little_memory_reduces_the_token_budget(reads: InferenceWorkload) -> None:
    most = token_budget_within(reads, 2048, 100 * GiB)
    least = token_budget_within(reads, 2048, 0)
    assert most.written == BATCH_TOKENS
    assert (least.written, least.computed) == (1, 2048)
    few = token_budget_within(reads, 2048, 6 * GiB)
    assert least.written < few.written < most.written
    assert reads.working_bytes(few) <= 6 * GiB


def test_longrope_rows_are_planned_to_be_reread(reads: InferenceWorkload) -> None:
    most = token_budget_within(reads, 2048, 100 * GiB)
    plain, never, some = (
        replace(reads, rotary_switches=lengths).working_bytes(most) for lengths in ((), (5000,), (1000,))
    )
    assert plain == never < some


def status(name: str) -> int:
    lines = STATUS.read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def evaluate_and_measure(folder: Path) -> tuple[int, int]:
    """Evaluate a model on ``rows.jsonl``; return by how many bytes the process grew, and by how many it might."""
    recipe = build({**load_preset("summarization"), "max_length": 512, "weights": "disk", "precision": "fp32",
                    "micro_batch_tokens": 8192, "generation": {"max_new_tokens": 6}})  # fmt: skip
    planned = plan_on_rows(folder, recipe, Path("rows.jsonl"), None)
    assert planned.plan.together.written == BATCH_TOKENS
    CLEAR_REFS.write_text("5")
    before = status("VmRSS")
    planned.run()
    needs = sum(need.need for need in planned.plan.needs if need.resource == "memory")
    return status("VmHWM") - before, needs - PROCESS_BYTES


@pytest.mark.thorough
def test_evaluation_stays_within_planned_memory(tmp_path: Path) -> None:
    try:
        CLEAR_REFS.write_text("5")
    except OSError:
        pytest.skip("the peak of a process's memory cannot be reset on this system")
    sizes = {"n_embd": 256, "n_layer": 2, "n_head": 4, "rotary_dim": 16, "n_positions": 512}
    folder = make_tiny(tmp_path / "model", ["A note of some words. "] * 20, seed=0, vocab_target=300, **sizes)
    rows = [{"document": "A note of some words. " * 8 + str(n), "summary": f"Note {n}."} for n in range(120)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    # This process has memory left of the tests before, which it would use without growing.
    with ProcessPoolExecutor(1, get_context("spawn")) as fresh:
        growth, allowed = fresh.submit(evaluate_and_measure, folder).result()
    assert growth > 20e6, "memory grows"
    assert growth <= allowed
    assert allowed < 3 * growth, "the plan is tight"


def test_resumed_generation_keeps_its_token_budget(shell, tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "model", ["A note of some words. "] * 20, seed=0, vocab_target=300)
    Path("rows.jsonl").write_text('{"document": "A note."}\n' * 3, encoding="utf-8")
    line = f"generate --model {folder} --recipe summarization --max-new-tokens 4 --set max_length=64 --input rows.jsonl"
    planned = shell(f"{line} --output out.jsonl --dry-run --json")
    assert planned.json["weights"] == "device"
    assert not Path("out.jsonl").exists()
    assert "tokens while generating" in shell(f"{line} --output out.jsonl --dry-run").out
    refused = shell(f"{line} --output out.jsonl --host-memory 100MB")
    assert refused.code == 4
    assert "try a larger --host-memory" in refused.err
    assert shell(f"{line} --output out.jsonl").code == 0
    settings = json.loads(Path("out.jsonl.settings.json").read_text(encoding="utf-8"))
    assert settings["together"] == BATCH_TOKENS
    assert shell(f"{line} --output out.jsonl --host-memory 600MB").code == 0, "all rows are already answered"
