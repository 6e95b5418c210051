"""Print ghost steps for the tests as JSON; needs a separate process."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
from support import accelerator
from support.accelerator.ghost import GPTJ_6B, GhostBatch, ghost_step
from support.accelerator.replay import RATES, replay

SMALL = {"vocab_size": 301, "n_positions": 64, "n_embd": 64, "n_layer": 4, "n_head": 4, "rotary_dim": 8}
NARROW = {"moments": "bf16", "gradients": "bf16"}
LORA = {"method": "lora", "lora": {"rank": 8, "targets": ["q_proj", "v_proj"], "dropout": 0.0}}


def small() -> list[dict[str, Any]]:
    """Return ledgers of a small model with and without data, and the forecast bytes."""
    from gptj_ft.streaming.buffers import BufferBudget
    from gptj_ft.streaming.stores.placement import Placement

    found = []
    for options, placement, kept in (
        (NARROW, Placement("host", "host", "host"), 2),
        ({**NARROW, "clip_norm": None}, Placement("host", "device"), 1),
        (LORA, Placement("device", "device", frozen="host"), 1),
    ):
        budget = BufferBudget(1, 2, 3, 4096, kept)
        batch = GhostBatch(192, 48, 96)
        peaks = {}
        for ghost in (True, False):
            ledger, trace = ghost_step(SMALL, placement, budget, batch, options, ghost=ghost)
            peaks[ghost] = ledger.peak
        result = replay(trace, RATES["RTX 4060 8GB"])
        found.append(
            {
                "placement": str(placement), "kept": kept, "ghost": peaks[True], "real": peaks[False],
                "seconds": result.seconds, "busy": result.busy, "operations": ledger.num_operations,
            }
        )  # fmt: skip
    return found


def whole() -> dict[str, Any]:
    """Return ledger and seconds of a GPT-J 6B step with 16,384 tokens in the 8 GB of an RTX 4060."""
    from gptj_ft.streaming.buffers import BufferBudget
    from gptj_ft.streaming.stores.placement import Placement

    started = time.monotonic(), time.process_time()
    batch = GhostBatch(16384, 1024, 2048)
    ledger, trace = ghost_step(GPTJ_6B, Placement("host", "host"), BufferBudget(1, 2, 24), batch, NARROW)
    took = time.monotonic() - started[0], time.process_time() - started[1]
    results = {name: replay(trace, rates) for name, rates in RATES.items()}
    return {
        "peak": ledger.peak, "at_peak": ledger.at_peak[:8], "operations": ledger.num_operations, "seconds": took,
        "steps": {
            name: [round(x.seconds, 3), round(x.share_of_bound, 4), x.busy, x.moved] for name, x in results.items()
        },
    }  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    accelerator.install()
    print(json.dumps(whole() if sys.argv[1:] == ["whole"] else small()), flush=True)
    os._exit(0)
