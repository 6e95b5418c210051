"""Profile one step of a run: seconds of kernels and of the program, launches, and the operations that take longest.

    python benchmarks/step_profile.py 5 finetune --recipe summarization --data my.jsonl --max-steps 6

The first word is the number of the step, from 1; the rest is a command line of `gptj-ft`. Prints JSON lines: the step
before it without a profiler, the step with it, then operations by the program's own time and kernels by the device's.
If the program's time is near the wall's and the kernels' is not, launches bound the step.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from gptj_ft.__main__ import main as run_command
from gptj_ft.training import compute

SHOWN = 30
train_step = compute.train_step


def main() -> None:
    """Run the command with one of its steps profiled."""
    chosen, number = int(sys.argv[1]), 0
    sys.argv = ["gptj-ft", *sys.argv[2:]]

    def step(model: Any, *rest: Any) -> Any:
        nonlocal number
        number += 1
        if number < chosen - 1 or number > chosen:
            return train_step(model, *rest)
        is_profiled = number == chosen
        start, before = time.perf_counter(), time.process_time()
        if not is_profiled:
            result = train_step(model, *rest)
        else:
            kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if model.device.type == "cuda" else [])]
            with profile(activities=kinds, acc_events=True) as found:
                result = train_step(model, *rest)
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        print(json.dumps({
            "step": number, "profiled": is_profiled, "seconds": time.perf_counter() - start,
            "processor_seconds": time.process_time() - before,
        }))  # fmt: skip
        if is_profiled:
            show(found.key_averages())
        return result

    compute.train_step = step
    run_command()


def show(events: Any) -> None:
    """Print sums over all operations and kernels, then the longest ones."""
    kernels = [each for each in events if each.device_type == torch.autograd.DeviceType.CUDA]
    calls = [each for each in events if each.device_type == torch.autograd.DeviceType.CPU]
    launches = sum(each.count for each in calls if "LaunchKernel" in each.key)
    print(json.dumps({
        "kernels": sum(each.count for each in kernels), "launches": launches,
        "kernel_seconds": sum(each.self_device_time_total for each in kernels) / 1e6,
        "program_seconds": sum(each.self_cpu_time_total for each in calls) / 1e6,
    }))  # fmt: skip
    for what, of in (("self_cpu_time_total", calls), ("self_device_time_total", kernels)):
        for each in sorted(of, key=lambda each: -getattr(each, what))[:SHOWN]:
            print(json.dumps({what: getattr(each, what) / 1e6, "name": each.key[:80], "count": each.count}))


if __name__ == "__main__":
    main()
