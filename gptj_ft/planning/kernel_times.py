"""Compute the seconds of layers from the kernels that their own code runs, at the rates of a device.

Layers that were not timed take them: those of accelerators, and those for which a CPU has too little memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gptj_ft.planning.constants import LAUNCH_SECONDS
from gptj_ft.planning.layer_cost import KernelCost, LayerCost, LayerInput, embedding_cost, measure_blocks
from gptj_ft.planning.layer_times import Seconds, around, through
from gptj_ft.planning.memory import head_cost, largest_chunk
from gptj_ft.planning.probe import ComputeRates
from gptj_ft.planning.workload import LayerTimes, SecondsByTokens, Workload


def kernel_seconds(kernel: KernelCost, workload: Workload, compute: ComputeRates) -> float:
    """Return the seconds of a kernel: the longer of its FLOPs and its bytes, and its start."""
    rate = compute.attention if kernel.is_attention else compute.matmul(workload.dtype, workload.width)
    return max(kernel.flops / rate, kernel.num_bytes / compute.memory_for(kernel.num_bytes / 2)) + LAUNCH_SECONDS


def layer_costs(workload: Workload, tokens: int) -> list[LayerCost]:
    """Return the costs of embedding and blocks on a micro-batch of so many tokens, and of the head on its chunk."""
    attended = workload.rows.attended
    row = min(tokens, max(1, round(2 * attended) if attended else workload.rows.longest))
    batch = LayerInput.of_rows(tokens, row, workload.width, workload.dtype)
    blocks = measure_blocks(workload.layers, workload.layouts, batch, workload.lowest_trained)
    return [embedding_cost(workload.layouts[0], batch), *blocks, head_cost(workload)]


def with_kernel_times(workload: Workload, compute: ComputeRates) -> Workload:
    """Return a workload with the times of its layers: those it has, or those of the kernels."""
    if workload.times.layers:
        return workload
    step = workload.typical_steps[0].workload

    def seconds(kernels: Sequence[KernelCost]) -> float:
        return sum(kernel_seconds(kernel, step, compute) for kernel in kernels)

    def both(cost: LayerCost) -> Seconds:
        return Seconds(sum(map(seconds, cost.forward)), seconds(cost.backward))

    sizes = around(step.step.micro_batch_mean)
    few, many = ([both(cost) for cost in layer_costs(step, tokens)] for tokens in sizes)
    *layers, _ = (through(sizes, pair) for pair in zip(few, many, strict=True))
    # The head computes targets, whatever the tokens of the micro-batch.
    head = LayerTimes(*(SecondsByTokens(0.0, each / largest_chunk(step)) for each in many[-1][:2]))
    return replace(workload, times=workload.times._replace(layers=(*layers, head)))
