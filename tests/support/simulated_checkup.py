"""Run the device check-up on the simulated device; needs a separate process.

``python -m support.simulated_checkup`` prints the report as JSON with the number of races, then a line for each fault
of `FAULTS`: its name and the result of the part that should find it.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from support.accelerator import NAME, Faults, install, now, start

from gptj_ft.diagnostics import checkup, parity, speed, trial
from gptj_ft.diagnostics.checkup import Checkup, Effort, check_up, run_part
from gptj_ft.diagnostics.speed import Blocks
from gptj_ft.diagnostics.trial import Outcome
from gptj_ft.planning import probe
from gptj_ft.planning.probe import DiskRates
from gptj_ft.streaming.stores import host

LINK_BYTES = 1 << 20
CHUNK_NUMEL = 4096
SHAPES = {
    "gptj": {"vocab_size": 101, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 1, "rotary_dim": 16},
    "gpt2": {
        "vocab_size": 101, "n_positions": 64, "n_embd": 48, "n_layer": 2, "n_head": 3, "activation_function": "gelu",
    },
}  # fmt: skip
HOARDED = 1 << 30
MOST_SEEDS = 24  # a planted race shows under every second seed
start("random", faults=Faults(lockable_bytes=1 << 31))
install()
DEVICE = torch.device(NAME, 0)
QUICK = Effort(num_steps=1, is_thorough=False, num_seeds=3, blocks=Blocks(DEVICE, 256, "bf16", (64, 128)))
copy, run, take_steps = host.copy, parity.run, speed.take_steps


def off_by_a_hundredth(model: Any, of: trial.Trial, *rest: Any) -> Outcome:
    outcome = run(model, of, *rest)
    if of.device != DEVICE:
        return outcome
    return Outcome(tuple(1.01 * loss for loss in outcome.losses), outcome.norms, outcome.weights)


def greedy(model: Any, *more: Any) -> Any:
    hoard = torch.zeros(HOARDED, dtype=torch.uint8, device=DEVICE)
    return take_steps(model, *more), hoard


# Each planted fault: the part that should find it, and the patches.
FAULTS: dict[str, tuple[str, list[Any]]] = {
    "copies wait for nothing": ("streams", [partial(patch.object, host, "copy", lambda a, b, after=(): copy(a, b))]),
    "a loss is off": ("placements", [partial(patch.object, parity, "run", off_by_a_hundredth)]),
    "more memory than planned": ("memory", [partial(patch.object, speed, "take_steps", greedy)]),
    "a cap that nothing enforces": (
        "memory",
        [
            partial(patch.object, speed, "take_steps", greedy),
            partial(patch.object, speed, "limit_memory", lambda device, num_bytes: None),
        ],
    ),
}


def find(part: str, planted: list[Callable[[], Any]], folder: Path) -> dict[str, Any]:
    """Run a part of the check-up with planted faults."""
    patches = [plant() for plant in planted]
    for each in patches:
        each.start()
    try:
        effort = replace(QUICK, num_seeds=MOST_SEEDS)
        return run_part(part, Checkup(DEVICE, effort, folder).parts()[part][1]).to_dict()
    finally:
        for each in patches:
            each.stop()


def main() -> None:
    torch.set_num_threads(1)
    # Products of GPT-J's size would take long; copies over the link are measured.
    probe.matmul_rate = lambda *_: 1e11
    probe._block_rates = lambda *_: (1e18, 1e18)
    probe.COPY_BYTES = LINK_BYTES
    probe.measure_disk = lambda folder: DiskRates(read=2e9, write=1e9, mixed=1.5e9)
    probe.core_load, probe.meter_others = (lambda: 0.0), (lambda: lambda: 0.0)  # other tests are no load
    checkup.MODEL = "cerebras/Cerebras-GPT-111M"  # faster to plan than GPT-J
    speed.LINK_BYTES, parity.SHAPES, trial.CHUNK_NUMEL = LINK_BYTES, SHAPES, CHUNK_NUMEL
    found = check_up(DEVICE, effort=QUICK)
    print(json.dumps({**found.to_dict(), "races": len(now().races)}), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, (part, planted) in FAULTS.items():
            print(json.dumps({"fault": name, **find(part, planted, Path(folder))}), flush=True)
    os._exit(0)  # do not wait for the simulated device's threads


if __name__ == "__main__":
    main()
