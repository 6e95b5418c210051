"""Measure optimizer steps: tokens, seconds, bytes, and the rates that follow from them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any

from gptj_ft.system.units import gigabytes

if TYPE_CHECKING:
    from gptj_ft.planning.flops import Flops
    from gptj_ft.streaming.offloaded_model import OffloadedModel

WAITING_NOTICED = 0.05  # share of the time


@dataclass(frozen=True)
class StepCounts:
    """Tokens, seconds, bytes and memory of one step, or of many together.

    Attributes:
        tokens: tokens computed.
        target_tokens: tokens with a loss.
        seconds: wall time.
        waited_seconds: seconds of them that the computation waited for the stores.
        bytes_read: bytes read by the stores.
        bytes_written: bytes written by the stores.
        memory_bytes: peak resident memory of the process so far.
        device_memory_bytes: peak allocated on an accelerator so far; 0 on a CPU.
        device_reserved_bytes: peak that its allocator has taken for that; 0 on a CPU.
    """

    tokens: int
    target_tokens: int
    seconds: float
    waited_seconds: float
    bytes_read: int
    bytes_written: int
    memory_bytes: int
    device_memory_bytes: int
    device_reserved_bytes: int = 0

    @classmethod
    def total(cls, tallies: Sequence[StepCounts]) -> StepCounts:
        """Add up what was done; of memory, take the most."""
        columns = {field.name: [getattr(counts, field.name) for counts in tallies] for field in fields(cls)}
        peaks = ("memory_bytes", "device_memory_bytes", "device_reserved_bytes")
        return cls(**{name: max(column) if name in peaks else sum(column) for name, column in columns.items()})


@dataclass(frozen=True)
class Throughput:
    """Rates. Each is a mean over time, so those of many steps are the means of theirs, weighted by seconds.

    Attributes:
        target_tokens_per_second: tokens with a loss.
        tokens_per_second: all tokens.
        model_gflops: GFLOP/s of what every way of training the model computes.
        hardware_gflops: GFLOP/s with recomputation counted as work.
        mfu: ``model_gflops`` as a share of the rate of a large matrix product, measured here. (MFU and HFU as in
            https://arxiv.org/abs/2205.05198, which takes the data sheet's rate.)
        hfu: ``hardware_gflops``, likewise.
        stall: share of the time that the computation stood still for the stores.
    """

    target_tokens_per_second: float
    tokens_per_second: float
    model_gflops: float
    hardware_gflops: float
    mfu: float
    hfu: float
    stall: float

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
        """Average over the time that each was measured in."""
        total = sum(seconds)
        return cls(
            **{
                field.name: sum(getattr(each, field.name) * s for each, s in zip(throughput, seconds, strict=True))
                / total
                for field in fields(cls)
            }
        )


def summarize(lines: Sequence[Mapping[str, Any]]) -> tuple[StepCounts, Throughput]:
    """Put the steps of a run together, from their lines in ``metrics.jsonl``; of those that lack something, nothing."""
    names = {field.name for form in (StepCounts, Throughput) for field in fields(form) if field.default is MISSING}
    lines = [line for line in lines if names <= line.keys()]
    if not lines:  # all were damaged
        return StepCounts(0, 0, 0.0, 0.0, 0, 0, 0, 0), Throughput(**{field.name: 0.0 for field in fields(Throughput)})
    counted = [field.name for field in fields(StepCounts)]  # versions before wrote fewer
    tallies = [StepCounts(**{name: line[name] for name in counted if name in line}) for line in lines]
    throughput = [Throughput(**{field.name: line[field.name] for field in fields(Throughput)}) for line in lines]
    return StepCounts.total(tallies), Throughput.mean(throughput, [counts.seconds for counts in tallies])


class Stopwatch:
    """Measure tokens, seconds and bytes since construction."""

    def __init__(self, offloaded: OffloadedModel) -> None:
        self._offloaded, self._start, self._before = offloaded, time.monotonic(), _counters(offloaded)

    def read(self, tokens: int, target_tokens: int) -> StepCounts:
        """Return the counts of a step with so many tokens."""
        # Not above: a terminal shows progress before torch is needed.
        from gptj_ft.system import machine
        from gptj_ft.system.accelerator import peak_device_memory

        seconds = time.monotonic() - self._start
        waited, read, written = (now - then for now, then in zip(_counters(self._offloaded), self._before, strict=True))
        on_device = peak_device_memory(self._offloaded.device)
        return StepCounts(
            tokens, target_tokens, seconds, waited, int(read), int(written), machine.peak_memory(), *on_device
        )  # fmt: skip


def _counters(offloaded: OffloadedModel) -> tuple[float, int, int]:
    return offloaded.meter.waited_seconds, offloaded.meter.bytes_read, offloaded.meter.bytes_written


def describe_throughput(counts: StepCounts, throughput: Throughput, verbose: bool = False) -> list[str]:
    """Return the rates of a step as people read them; what does not apply is left out.

    Args:
        counts: counts of one step or of a whole run.
        throughput: rates of the same.
        verbose: whether the engine's FLOPs and bytes moved are shown.
    """
    memory = f"{gigabytes(counts.memory_bytes)} of memory"
    if counts.device_memory_bytes:
        reserved = f" ({gigabytes(counts.device_reserved_bytes)} reserved)" if verbose else ""
        memory = f"{gigabytes(counts.device_memory_bytes)} on the device{reserved}, {memory}"
    all_tokens, trained = _rate(throughput.tokens_per_second), _rate(throughput.target_tokens_per_second)
    texts = [f"{all_tokens} tokens/s ({trained} trained on), {memory}"]
    if verbose:
        texts.append(f"{throughput.hardware_gflops:,.1f} GFLOP/s, {throughput.hfu:.0%} of matmul")
    if throughput.stall >= (0.005 if verbose else WAITING_NOTICED):
        texts.append(f"waiting for the stores {throughput.stall:.0%}")
    if verbose and (counts.bytes_read or counts.bytes_written):
        texts.append(f"read {gigabytes(counts.bytes_read)}, wrote {gigabytes(counts.bytes_written)}")
    return texts


def _rate(per_second: float) -> str:
    return f"{per_second:,.0f}" if per_second >= 10 else f"{per_second:.2g}"
