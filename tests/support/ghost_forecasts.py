"""Compare forecasts of GPT-J 6B with ledger and replay of a step without data; needs a separate process.

    python -m support.ghost_forecasts memory '{"cap": 8, "tokens": 16384, "method": "full"}' ...
    python -m support.ghost_forecasts time '{"device": "RTX 4060 8GB", "tokens": 16384}' ...

It prints a JSON line per case.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from support import accelerator
from support.accelerator.ghost import GPTJ_6B, GhostBatch, ghost_step
from support.accelerator.replay import RATES, DeviceRates, replay

ROW_TOKENS, MICRO_BATCH_TOKENS = 1024, 4096
NARROW = {"moments": "bf16", "gradients": "bf16"}


def memory(case: dict[str, Any]) -> dict[str, Any]:
    """Plan a step within a cap and return the ledger of that plan."""
    from gptj_ft.planning.memory import usable

    options = {**NARROW, "method": case["method"]}
    if case["method"] == "lora":
        options["optimizer_state"] = "device"  # small; and disks are not simulated
    plan, shape, options = planned(case, options, int(case["cap"] * 1e9), RATES["RTX 4090 24GB"])
    ledger, _ = ghost_step(shape, plan.placement, plan.budget, batch(case), options)
    return {
        **case, "placement": str(plan.placement), "kept": plan.budget.num_kept_layers, "have": plan.have.device,
        "need": plan.device_bytes, "forecast": usable(plan.device_bytes), "ledger": ledger.peak,
        "at_peak": ledger.at_peak[:6],
    }  # fmt: skip


def time(case: dict[str, Any]) -> dict[str, Any]:
    """Replay a step by the planner's timeline and by the recorded operations, at the same rates."""
    from gptj_ft.planning.plan import Plan

    rates, options = RATES[case["device"]], {**NARROW, "weights": "host", "optimizer_state": "host"}
    if "kept" in case:
        options["activations"] = case["kept"]
    plan, shape, options = planned(case, options, case.get("cap", 1000) * 10**9, rates)
    assert isinstance(plan, Plan)
    assert plan.timeline is not None
    _, trace = ghost_step(shape, plan.placement, plan.budget, batch(case), options)
    result, timeline, busy = replay(trace, rates), plan.timeline, plan.timeline.step
    return {
        **case, "kept": plan.budget.num_kept_layers, "forecast": timeline.seconds, "replay": result.seconds,
        "share": timeline.share_of_bound, "share_of_replay": result.share_of_bound, "busy": result.busy,
        "forecast_busy": {"compute": busy.compute, "h2d": busy.link_in, "d2h": busy.link_out},
    }  # fmt: skip


def batch(case: dict[str, Any]) -> GhostBatch:
    return GhostBatch(case["tokens"], ROW_TOKENS, MICRO_BATCH_TOKENS)


def planned(case: dict[str, Any], options: dict[str, Any], cap: int, device: DeviceRates) -> Any:
    """Return the plan of a case, the model's shape and the recipe's options."""
    from gptj_ft.config.resolve import build
    from gptj_ft.models.registry import Architecture, families
    from gptj_ft.models.trainable import select
    from gptj_ft.planning.memory import Free
    from gptj_ft.planning.plan import choose
    from gptj_ft.planning.workload import RowLengths, StepTokens, Workload

    shape = {**GPTJ_6B, "n_layer": case.get("layers", GPTJ_6B["n_layer"])}
    options |= {"micro_batch_tokens": MICRO_BATCH_TOKENS}
    recipe, family, tokens = build(options), families()["gptj"], case["tokens"]
    architecture = Architecture(family, family.read_config(shape), shape)
    selection = select(architecture, recipe)
    workload = Workload(
        selection.trained, 4096, torch.bfloat16, StepTokens(MICRO_BATCH_TOKENS, tokens, tokens, tokens), None,
        RowLengths(ROW_TOKENS), layers=selection.build(),
        frozen=selection.frozen if recipe.method == "lora" else (),
    )  # fmt: skip
    free = Free(cap, 10**12, 10**15, is_shared=False)
    rates = rates_of(device)
    return choose(recipe, workload, free, rates), shape, options


def rates_of(device: DeviceRates) -> Any:
    """Convert the rates of a replay to the planner's rates."""
    from gptj_ft.planning.probe import ASSUMED_DISK, ComputeRates, Rates

    products, moved = device.flops * device.reached, device.memory * device.memory_reached
    return Rates(
        ComputeRates(
            fp32=products / 4, bf16=products, fp32_narrow=products / 4, bf16_narrow=products, memory=moved,
            near_memory=moved, attention=products, to_device=device.link, from_device=device.link,
        ),
        ASSUMED_DISK,
    )  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    accelerator.install()
    for argument in sys.argv[2:]:
        print(json.dumps({"memory": memory, "time": time}[sys.argv[1]](json.loads(argument))), flush=True)
