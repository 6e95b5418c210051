"""Train, score and write on the simulated device, in every placement; for a process of its own.

``python simulated.py SCENARIO ... [--all]`` prints a JSON line for each case: its names, a digest of its numbers, the
races that were found and between which places, and what went wrong. Without ``--all`` it takes the least that shows a
fault: one step, work done as late as waits allow.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS)]

import torch
from support import gpusim

torch.set_num_threads(1)
gpusim.patched("gptj_ft")
gpusim.start()

from conftest import random_model

from gptj_ft.checkpoints.model_folder import open_checkpoint
from gptj_ft.config.options import Generation, Recipe
from gptj_ft.data.batches import micro_batches
from gptj_ft.generation.decoding import generate_tokens
from gptj_ft.generation.hf_model import StreamedModel
from gptj_ft.models import attention
from gptj_ft.models.registry import read_architecture
from gptj_ft.models.trainable import select
from gptj_ft.streaming.activations import boundary_layout
from gptj_ft.streaming.adamw import AdamW
from gptj_ft.streaming.model import BufferBudget
from gptj_ft.streaming.open import load_weights, open_for_inference, open_for_training, open_frozen
from gptj_ft.streaming.step import evaluate_losses, train_step
from gptj_ft.streaming.stores.placement import Placement, training_dtypes
from gptj_ft.system.machine import choose_device
from gptj_ft.training.restore import optimizer_config

IS_WHOLE = "--all" in sys.argv
LENGTHS, PROMPTS, STEPS = (5, 17, 9, 30, 2, 11), (2, 3, 1, 10, 0, 5), 3 if IS_WHOLE else 1
POLICIES = ("lazy", "eager", "random", "eager-but-default", "eager-but-others") if IS_WHOLE else ("lazy",)
EVERYWHERE = {place: (place,) * 3 for place in ("device", "host", "disk")}
LORA = {"rank": 4, "alpha": 6, "targets": ("q_proj", "v_proj", "mlp.fc_out"), "dropout": 0.0}


Case = tuple[str, str, Callable[[], Any]]  # what it is, the policy of the device, what returns its numbers


def documents() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 101, (length,), generator=generator).tolist() for length in LENGTHS]


def train(folder: Path, device: torch.device, placement: Placement, recipe: Recipe, kept: int, late: int) -> Any:
    """Train some steps; return losses, gradient norms and the trained weights."""
    architecture = read_architecture(folder)
    selection = select(architecture, recipe)
    with tempfile.TemporaryDirectory() as tmp, open_checkpoint(folder) as checkpoint:
        stack = open_for_training(
            architecture, placement, training_dtypes(torch.float32), device, Path(tmp) / "state",
            BufferBudget(num_chunks=3, chunk_numel=2048, num_kept_layers=kept),
            recipe.clip_norm is not None or placement.is_durable,
            boundary_layout(200, architecture.config.n_embd, 6), selection,
        )  # fmt: skip
        open_frozen(stack, architecture, checkpoint, placement.of("frozen"))
        load_weights(stack, architecture, checkpoint, recipe.seed)
        optimizer, curve = AdamW(stack, optimizer_config(recipe), num_deferred=late), []
        for step in range(STEPS):
            optimizer.begin_step(1e-2 * (step + 1) / 10)
            batches = [batch.to(device) for batch in micro_batches(documents(), PROMPTS, 40)]
            curve.append((train_step(stack, optimizer, batches).mean, optimizer.finish_step()))
        optimizer.flush()
        weights = [
            part.cpu().double().sum().item()
            for layer in stack.trained
            for _, part in stack.read_chunks("weight", layer)
        ]
        stack.close()
    return curve, weights


def numbered(folder: Path) -> Iterator[Case]:
    """The device as ``--device`` names it, in each placement; losses and norms are those of the CPU."""
    for place, places in EVERYWHERE.items():

        def run(places: Any = places) -> Any:
            (device,) = {choose_device(name) for name in ("auto", gpusim.NAME, f"{gpusim.NAME}:0")}
            curve, _ = train(folder, device, Placement(*places), Recipe(), 0, 0)
            theirs, _ = train(folder, torch.device("cpu"), Placement(*places), Recipe(), 0, 0)
            torch.testing.assert_close(torch.tensor(curve), torch.tensor(theirs), rtol=1e-4, atol=0)
            return curve

        yield f"on {place}", "lazy", run


def full(folder: Path) -> Iterator[Case]:
    """Full fine-tuning: placements, kept activations, late updates, schedules of the device."""
    mixed = {"device, host": ("device", "host", "device"), "host, device": ("host", "device", "host")}
    for label, places in {**EVERYWHERE, **mixed}.items():
        for kept, late in ((0, 0), (1, 2)):
            for policy in POLICIES:
                run = partial(train, folder, torch.device(gpusim.NAME, 0), Placement(*places), Recipe(), kept, late)
                yield f"{label}, {kept} kept, {late} late", policy, run


def lora(folder: Path) -> Iterator[Case]:
    """Adapters, with the frozen weights in each place: from a folder they come by threads of the reader's own."""
    recipe = Recipe.model_validate({"method": "lora", "lora": LORA})
    for frozen in EVERYWHERE:
        for policy in POLICIES:
            placement = Placement("device", "device", "device", frozen=frozen)  # type: ignore[arg-type]
            run = partial(train, folder, torch.device(gpusim.NAME, 0), placement, recipe, 0, 0)
            yield f"frozen weights on {frozen}", policy, run


def score(folder: Path) -> Iterator[Case]:
    """Losses of a model that is only read, its weights in each place."""
    for weights in EVERYWHERE:
        for policy in POLICIES:

            def run(weights: str = weights) -> Any:
                device = torch.device(gpusim.NAME, 0)
                with open_for_inference(folder, device, torch.float32, weights) as (_, stack):
                    batches = [batch.to(device) for batch in micro_batches(documents(), PROMPTS, 40)]
                    return [loss.total for loss in evaluate_losses(stack, batches)]

            yield f"weights on {weights}", policy, run


def write(folder: Path) -> Iterator[Case]:
    """Tokens that a model writes in bf16, its weights in each place; the first thing that this process asks of it."""

    class Tokenizer:
        eos_token_id = 100

    prompts = [document[:9] for document in documents()[:3]]
    for weights in EVERYWHERE:
        for policy in POLICIES:

            def run(weights: str = weights) -> Any:
                attention.takes_ragged.cache_clear()
                device = torch.device(gpusim.NAME, 0)
                with open_for_inference(folder, device, torch.bfloat16, weights) as (architecture, stack):
                    model = StreamedModel(architecture, stack, 64)
                    rows = generate_tokens(model, Tokenizer(), prompts, Generation(max_new_tokens=6))
                assert attention.takes_ragged(device, torch.bfloat16, 16), "the kernel for ragged batches was given up"
                assert attention.takes_ragged.cache_info().misses == 1, "nothing asked for the kernel while writing"
                return rows

            yield f"weights on {weights}", policy, run


SCENARIOS: dict[str, Callable[[Path], Iterator[Case]]] = {
    "numbered": numbered,
    "full": full,
    "lora": lora,
    "score": score,
    "write": write,
}


def run_case(scenario: str, label: str, policy: str, case: Callable[[], Any]) -> dict[str, Any]:
    world = gpusim.start(policy=policy, seed=1)
    found: dict[str, Any] = {"scenario": scenario, "case": label, "policy": policy, "numbers": None, "error": None}
    try:
        found["numbers"] = hashlib.sha256(repr(case()).encode()).hexdigest()[:16]
    except BaseException as error:
        found["error"] = "".join(traceback.format_exception(error)[-3:])
    found["races"] = [f"{a} | {b}: {world.examples[a, b]}" for a, b in world.races]
    return found


def main(names: list[str]) -> None:
    logging.disable(logging.WARNING)
    for name in names:
        with tempfile.TemporaryDirectory() as tmp, contextlib.suppress(BrokenPipeError):
            random_model("narrow").save_pretrained(tmp)
            for label, policy, case in SCENARIOS[name](Path(tmp)):
                print(json.dumps(run_case(name, label, policy, case)), flush=True)
    os._exit(0)  # threads of a device that is not there need not be waited for


if __name__ == "__main__":
    main([name for name in sys.argv[1:] if name != "--all"])
