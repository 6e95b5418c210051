"""Rates of machines that are not there, in round numbers."""

from __future__ import annotations

from gptj_ft.planning.probe import ComputeRates, DiskRates, Rates


def round_rates(disk: DiskRates, to_device: float, from_device: float, on_cpu: bool = False) -> Rates:
    """Return the rates of a machine that multiplies 10^12 numbers a second, in bf16 four times as many."""
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
