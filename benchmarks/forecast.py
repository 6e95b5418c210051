"""Compare forecasts with runs: memory and seconds per step.

Random GPT-Js on rows of DialogSum, fp32 and bf16 on a CPU, in several placements. Each is planned (`finetune --dry-run
--json`) and then run, in separate processes. `plan --measure` measures the machine before each of them, because the
speed of a virtual machine changes; nothing else should run. Targets: memory 0 to 10 % above the measured peak, time
within 15 %, in nine of ten runs.

    python benchmarks/forecast.py --data train.jsonl --tokenizer gpt2/ --work /tmp/forecast

The first step is not timed: it has no pending update. Steps differ in length, so the measured time is the median of
seconds per token, times the mean tokens of a step. Memory is the kernel's peak.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from same_work import SHAPE, make_model
from side_by_side import command, parser, watch

from gptj_ft.config.run_folder import Run

MODELS = {
    "8 x 1024": SHAPE,
    "4 x 2048": {**SHAPE, "n_embd": 2048, "n_layer": 4},
    "16 x 512": {**SHAPE, "n_embd": 512, "n_layer": 16, "n_head": 8},
}
ON_DISK = {"weights": "disk", "optimizer_state": "disk"}
BF16 = {"precision": "bf16"}
NARROW_STATE = {"moments": "bf16", "gradients": "bf16"}
RUNS: list[tuple[str, dict[str, Any]]] = [
    ("8 x 1024", {}),
    ("8 x 1024", BF16),
    ("8 x 1024", {**ON_DISK, "activations": "recompute", **NARROW_STATE}),
    ("8 x 1024", {**BF16, **ON_DISK, "activations": "recompute"}),
    ("8 x 1024", {**BF16, **ON_DISK, "activations": "keep", **NARROW_STATE}),
    ("8 x 1024", {**BF16, "device_memory": "3GiB"}),
    ("4 x 2048", {**ON_DISK, "batch_size": 2}),
    ("4 x 2048", {**BF16, "weights": "device", "optimizer_state": "disk", "activations": 2}),
    ("16 x 512", {**ON_DISK, "activations": "recompute", "boundaries": "disk", "batch_size": 16}),
    ("16 x 512", {**BF16, "activations": "recompute", "batch_size": 16}),
    ("8 x 1024", {"method": "lora"}),
    ("8 x 1024", {**BF16, "method": "lora"}),
]


def main() -> None:
    """Measure, plan and run each configuration; print a table."""
    options = parser(__doc__)
    options.add_argument("--only", help="numbers of the configurations, from 1; default all")
    arguments = options.parse_args()
    arguments.work.mkdir(parents=True)
    chosen = [int(word) - 1 for word in arguments.only.split(",")] if arguments.only else range(len(RUNS))
    results = []
    for number in chosen:
        name, different = RUNS[number]
        model = arguments.work / name.replace(" ", "")
        if not model.exists():
            make_model(model, arguments.tokenizer, MODELS[name])
        measuring = [*command("plan", {"model": model, "output": arguments.work / "run"}), "--measure", "--json"]
        subprocess.run(measuring, check=True, stdout=subprocess.DEVNULL)
        results.append({"model": name, **different, **plan_and_run(arguments, model, different)})
        print(json.dumps(results[-1]), flush=True)
    print(f"{'':<66}{'memory, GB':>22}{'':>7}{'seconds a step':>20}")
    for result in results:
        plan, run = result["forecast"], result["measured"]
        label = ", ".join(str(result[key]) for key in result if key not in ("forecast", "measured", "placement"))
        print(
            f"{label[:48]:<50}{plan['memory'] / 1e9:>12.2f}{run['memory'] / 1e9:>8.2f}"
            f"{plan['memory'] / run['memory'] - 1:>8.0%}{plan['seconds']:>12.1f}{run['seconds']:>8.1f}"
            f"{plan['seconds'] / run['seconds'] - 1:>8.0%}"
        )


def plan_and_run(arguments: Any, model: Path, different: dict[str, Any]) -> dict[str, Any]:
    """Return the forecast and the measured values."""
    run = Run(arguments.work / "run")
    choices = {
        "recipe": "summarization", "model": model, "data": arguments.data, "output": run.folder, "holdout": 0,
        "max_steps": arguments.steps, "batch_size": arguments.batch_size, "max_length": arguments.max_length,
        "precision": "fp32", "device": "cpu", **different,
    }  # fmt: skip
    planned = subprocess.run(
        [*command("finetune", choices), "--dry-run", "--json"], check=True, stdout=subprocess.PIPE, stderr=sys.stderr
    )
    plan = json.loads(planned.stdout)
    watched = watch(command("finetune", choices), run.metrics_file)
    shutil.rmtree(run.folder)
    steady = watched.lines[arguments.warm_up :]
    return {
        "placement": plan["placement"],
        "kept": plan["room"]["kept"],
        "forecast": {"memory": plan["device_bytes"] + plan["host_bytes"], "seconds": plan["seconds_per_step"]},
        "measured": {
            "memory": watched.peak_rss_bytes,
            "seconds": median(line["seconds"] / line["tokens"] for line in steady) * plan["tokens_per_step"],
            "stall": sum(line["waited_seconds"] for line in steady) / sum(line["seconds"] for line in steady),
        },
    }


if __name__ == "__main__":
    main()
