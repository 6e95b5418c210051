"""Provide rates of imaginary machines, in round numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from gptj_ft.planning.layer_times import LayerKind, Seconds
from gptj_ft.planning.probe import ComputeRates, DiskRates, Rates


def layers_by(compute: ComputeRates) -> Callable[[Sequence[LayerKind]], list[Seconds]]:
    """Return a layer timer for a machine that does only matrix products, at these rates."""

    def seconds(kind: LayerKind) -> Seconds:
        rate = compute.fp32 if kind.given.dtype == torch.float32 else compute.bf16
        parameters = sum(parameter.numel() for parameter in kind.layer.parameters())
        forward = (2.0 * parameters * kind.given.tokens + 1.0) / rate
        return Seconds(forward, 2.0 * forward if kind.is_trained else 0.0)

    return lambda kinds: [seconds(kind) for kind in kinds]


def round_rates(disk: DiskRates, to_device: float, from_device: float, on_cpu: bool = False) -> Rates:
    """Return the rates of a machine with 1 TFLOP/s in fp32 and 4 TFLOP/s in bf16."""
    compute = ComputeRates(
        fp32=1e12,
        bf16=4e12,
        fp32_narrow=1e12,
        bf16_narrow=4e12,
        memory=1e12,
        near_memory=1e12,
        gelu=1e18,
        attention=1e18,
        to_device=to_device,
        from_device=from_device,
    )
    return Rates(compute, disk, on_cpu)
