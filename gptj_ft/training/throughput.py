"""Measure optimizer steps: tokens, seconds, bytes, and rates."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any

from gptj_ft.system.units import gigabytes

if TYPE_CHECKING:
    from gptj_ft.planning.flops import Flops
    from gptj_ft.streaming.offloaded_model import OffloadedModel

SHOWN_STALL = 0.05  # share of the time


@dataclass(frozen=True)
class StepCounts:
    """Tokens, seconds, bytes and memory of one step, or of several."""

    tokens: int
    target_tokens: int  # tokens with a loss
    seconds: float  # wall time
    waited_seconds: float  # of it, the computation waited for the stores
    bytes_read: int  # by the stores
    bytes_written: int  # by the stores
    memory_bytes: int  # peak resident memory of the process so far
    device_memory_bytes: int  # peak allocated on an accelerator so far; 0 on a CPU
    device_reserved_bytes: int = 0  # peak reserved by the accelerator's allocator; 0 on a CPU

    @classmethod
    def total(cls, steps: Sequence[StepCounts]) -> StepCounts:
        """Sum the counts of steps; memory is the peak."""
        columns = {field.name: [getattr(counts, field.name) for counts in steps] for field in fields(cls)}
        peaks = ("memory_bytes", "device_memory_bytes", "device_reserved_bytes")
        return cls(**{name: max(column) if name in peaks else sum(column) for name, column in columns.items()})


@dataclass(frozen=True)
class Throughput:
    """Rates, each a mean over time.

    MFU and HFU follow https://arxiv.org/abs/2205.05198, but relate to the rate of a large matrix product measured on
    this machine instead of the data sheet's rate.
    """

    target_tokens_per_second: float  # tokens with a loss
    tokens_per_second: float  # all tokens
    model_gflops: float  # GFLOP/s without recomputation
    hardware_gflops: float  # GFLOP/s with recomputation
    mfu: float  # model_gflops as a share of a matrix product's rate
    hfu: float  # hardware_gflops as a share of a matrix product's rate
    stall: float  # share of the time that the computation waited for the stores

    @classmethod
    def of(cls, counts: StepCounts, flops: Flops, matmul_rate: float) -> Throughput:
        """Compute the rates of counts; ``matmul_rate`` in FLOP/s."""
        model, hardware = flops.model / counts.seconds, flops.hardware / counts.seconds
        return cls(
            target_tokens_per_second=counts.target_tokens / counts.seconds,
            tokens_per_second=counts.tokens / counts.seconds,
            model_gflops=model / 1e9,
            hardware_gflops=hardware / 1e9,
            mfu=model / matmul_rate,
            hfu=hardware / matmul_rate,
            stall=counts.waited_seconds / counts.seconds,
        )

    @classmethod
    def mean(cls, throughput: Sequence[Throughput], seconds: Sequence[float]) -> Throughput:
        """Return the means, weighted by seconds."""
        total = sum(seconds)
        return cls(
            **{
                field.name: sum(getattr(each, field.name) * s for each, s in zip(throughput, seconds, strict=True))
                / total
                for field in fields(cls)
            }
        )


def summarize(lines: Sequence[Mapping[str, Any]]) -> tuple[StepCounts, Throughput]:
    """Sum up the steps of a run from ``metrics.jsonl``, without incomplete lines."""
    names = {field.name for form in (StepCounts, Throughput) for field in fields(form) if field.default is MISSING}
    lines = [line for line in lines if names <= line.keys()]
    if not lines:  # all lines are damaged
        return StepCounts(0, 0, 0.0, 0.0, 0, 0, 0, 0), Throughput(**{field.name: 0.0 for field in fields(Throughput)})
    counted = [field.name for field in fields(StepCounts)]  # earlier versions wrote fewer
    steps = [StepCounts(**{name: line[name] for name in counted if name in line}) for line in lines]
    throughput = [Throughput(**{field.name: line[field.name] for field in fields(Throughput)}) for line in lines]
    return StepCounts.total(steps), Throughput.mean(throughput, [counts.seconds for counts in steps])


class Stopwatch:
    """Measure tokens, seconds and bytes since construction."""

    def __init__(self, offloaded: OffloadedModel) -> None:
        self._offloaded, self._start, self._before = offloaded, time.monotonic(), _counters(offloaded)

    def read(self, tokens: int, target_tokens: int) -> StepCounts:
        """Return the counts since construction, without a reset; the arguments are the step's tokens."""
        # Not at the top of the file: the terminal imports this module without torch.
        from gptj_ft.system import machine
        from gptj_ft.system.accelerator import peak_device_memory

        # Counters are totals of the process: a step's values are differences.
        seconds = time.monotonic() - self._start
        waited, read, written = (now - then for now, then in zip(_counters(self._offloaded), self._before, strict=True))
        on_device = peak_device_memory(self._offloaded.device)
        return StepCounts(
            tokens, target_tokens, seconds, waited, int(read), int(written), machine.peak_memory(), *on_device
        )  # fmt: skip


def _counters(offloaded: OffloadedModel) -> tuple[float, int, int]:
    return offloaded.meter.waited_seconds, offloaded.meter.bytes_read, offloaded.meter.bytes_written


def describe_throughput(counts: StepCounts, throughput: Throughput, verbose: bool = False) -> list[str]:
    """Format the rates of a step or a run; ``verbose`` adds FLOP/s and bytes moved."""
    memory = f"{gigabytes(counts.memory_bytes)} of memory"
    if counts.device_memory_bytes:
        reserved = f" ({gigabytes(counts.device_reserved_bytes)} reserved)" if verbose else ""
        memory = f"{gigabytes(counts.device_memory_bytes)} on the device{reserved}, {memory}"
    all_tokens, trained = _rate(throughput.tokens_per_second), _rate(throughput.target_tokens_per_second)
    texts = [f"{all_tokens} tokens/s ({trained} trained on), {memory}"]
    if verbose:
        texts.append(f"{throughput.hardware_gflops:,.1f} GFLOP/s, {throughput.hfu:.0%} of matmul")
    if throughput.stall >= (0.005 if verbose else SHOWN_STALL):
        texts.append(f"waiting for the stores {throughput.stall:.0%}")
    if verbose and (counts.bytes_read or counts.bytes_written):
        texts.append(f"read {gigabytes(counts.bytes_read)}, wrote {gigabytes(counts.bytes_written)}")
    return texts


def _rate(per_second: float) -> str:
    return f"{per_second:,.0f}" if per_second >= 10 else f"{per_second:.2g}"
