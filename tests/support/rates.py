"""Provide rates of imaginary machines, in round numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gptj_ft.models.layout import NO_PARAMETERS
from gptj_ft.models.products import Libraries
from gptj_ft.planning import layer_times, probe, product_times
from gptj_ft.planning.layer_times import NOTHING, LayerKind, Seconds
from gptj_ft.planning.machine_profile import MachineProbe
from gptj_ft.planning.probe import ComputeRates, DiskRates, Rates
from gptj_ft.planning.product_times import Choice, ProductKind
from gptj_ft.planning.workload import LayerTimes, ModelTimes, SecondsByTokens, Workload


def layers_by(compute: ComputeRates) -> Callable[[Sequence[LayerKind]], list[Seconds]]:
    """Return a layer timer for a machine that does only matrix products, at these rates."""

    def seconds(kind: LayerKind) -> Seconds:
        rate = compute.fp32 if kind.shape.dtype == torch.float32 else compute.bf16
        parameters = sum(parameter.numel() for parameter in kind.layer.parameters())
        forward = (2.0 * parameters * kind.shape.tokens + 1.0) / rate
        return Seconds(forward, 2.0 * forward if kind.is_trained else 0.0)

    return lambda kinds: [seconds(kind) for kind in kinds]


def timed_by_flops(workload: Workload, flops_per_second: float = 1e12) -> Workload:
    """Return a workload whose layers take as long as their matrix products."""

    def line(flops_per_token: float) -> SecondsByTokens:
        return SecondsByTokens(0.0, flops_per_token / flops_per_second)

    frozen = workload.frozen or [NO_PARAMETERS] * len(workload.layouts)
    pairs = [(own.num_used, own.num_used + rest.num_used) for own, rest in zip(workload.layouts, frozen, strict=True)]
    layers = [LayerTimes(line(2.0 * whole), line(2.0 * (own + whole))) for own, whole in pairs[1:]]
    return replace(workload, times=ModelTimes((NOTHING, *layers)))


def choose_onednn(kinds: Sequence[ProductKind]) -> list[Choice]:
    """Choose libraries as on a machine on which MKL is no faster."""
    return [Choice(Libraries(), 1.0, 1.0)] * len(kinds)


def set_rates(patch: pytest.MonkeyPatch, rates: Rates) -> None:
    """Make measurements of the machine return these rates."""
    patch.setattr(probe, "measure_compute", lambda device: rates.compute)
    patch.setattr(probe, "measure_disk", lambda folder: rates.disk)
    patch.setattr(probe, "core_load", lambda: 0.0)
    patch.setattr(probe, "meter_others", lambda: lambda: 0.0)  # other tests are no load
    patch.setattr(layer_times, "time_kinds", layers_by(rates.compute))
    patch.setattr(product_times, "time_products", choose_onednn)


def round_rates(disk: DiskRates, to_device: float, from_device: float, on_cpu: bool = False) -> Rates:
    """Return the rates of a machine with 1 TFLOP/s in fp32 and 4 TFLOP/s in bf16."""
    compute = ComputeRates(
        fp32=1e12,
        bf16=4e12,
        fp32_narrow=1e12,
        bf16_narrow=4e12,
        memory=1e12,
        near_memory=1e12,
        attention=1e18,
        to_device=to_device,
        from_device=from_device,
    )
    return Rates(compute, disk, on_cpu)


class FakeMachine(MachineProbe):
    """A machine with known rates; counts its measurements."""

    def __init__(self, rates: Rates, load: float = 0.0, free: int = 10**13, has_bf16: bool = True) -> None:
        self.rates, self.load, self.free, self.has_bf16 = rates, load, free, has_bf16
        self.emulates = False  # it has no bf16 unit
        self.others = 0.0  # share of the cores that other programs use while it measures
        self.counts = Counter[str]()
        self.timed: list[LayerKind] = []
        self.timed_products: list[ProductKind] = []
        self.choose_products = choose_onednn
        self.time_layers = layers_by(rates.compute)

    def compute(self, device: torch.device) -> ComputeRates:
        self.counts["compute"] += 1
        return self.rates.compute

    def disk(self, folder: Path) -> DiskRates:
        self.counts["disk"] += 1
        return self.rates.disk

    def fill_write_cache(self, folder: Path, seconds: float) -> None:
        self.counts["filled"] += 1

    def layers(self, kinds: Sequence[LayerKind]) -> list[Seconds]:
        self.timed += kinds
        return self.time_layers(kinds)

    def products(self, kinds: Sequence[ProductKind]) -> list[Choice]:
        self.timed_products += kinds
        return self.choose_products(kinds)

    def core_load(self) -> float:
        return self.load

    def meter_others(self) -> Callable[[], float]:
        return lambda: self.others

    def free_disk(self, folder: Path) -> int:
        return self.free

    def supports_bf16(self, device: torch.device) -> bool:
        return self.has_bf16

    def emulates_bf16(self) -> bool:
        return self.emulates
