"""Run the parts of a check-up, each for itself, and sum them up in a verdict of four lines."""

from __future__ import annotations

import logging
import os
import re
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from getpass import getuser
from pathlib import Path
from typing import Any, Literal

import torch

from gptj_ft.config.resolve import resolve
from gptj_ft.errors import GptjFtError, Interrupted, ResourceError
from gptj_ft.planning.machine_profile import rates
from gptj_ft.planning.probe import Rates
from gptj_ft.system.accelerator import has_streams, is_accelerator, module_of, supports_bf16
from gptj_ft.system.paths import RUNS
from gptj_ft.system.plain_text import HIDDEN
from gptj_ft.system.units import gigabytes
from gptj_ft.training.doctor import facts, parity, speed, streams
from gptj_ft.training.doctor.parity import Mismatch, Skipped
from gptj_ft.training.doctor.speed import Blocks
from gptj_ft.training.doctor.trial import SmallModel, single_thread
from gptj_ft.training.finetune import forecast_run
from gptj_ft.training.reporter import Reporter

MODEL = "EleutherAI/gpt-j-6b"
SHAKING_SECONDS = 25.0
PRIVATE_LEAST = 3  # characters: shorter names stand in too many words
State = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True)
class Effort:
    """How much is tried.

    Attributes:
        num_steps: optimizer steps of each comparison.
        is_thorough: whether every placement is compared; else those that differ most.
        num_seeds: seeds of random waits, at most.
        blocks: blocks that are streamed; ``None``: the widest that fit.
        is_sanitized: whether torch's sanitizer is tried.
    """

    num_steps: int = 3
    is_thorough: bool = True
    num_seeds: int = 20
    blocks: Blocks | None = None
    is_sanitized: bool = True


QUICK = Effort(num_steps=2, is_thorough=False)


@dataclass(frozen=True)
class Part:
    """A part of a check-up.

    Attributes:
        name: name of the part.
        state: ``passed``, ``failed`` or ``skipped``.
        seconds: seconds that it took.
        found: figures.
        problem: reason of its failure, or of skipping it.
        exit_code: exit code that a failure stands for.
        places: places in the program at which it failed, innermost last.
    """

    name: str
    state: State
    seconds: float
    found: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""
    exit_code: int = 0
    places: Sequence[str] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the part for `--json`."""
        return {**vars(self), "seconds": round(self.seconds, 3), "places": list(self.places)}


@dataclass(frozen=True)
class Diagnosis:
    """Result of a check-up.

    Attributes:
        device: device that was checked.
        facts: facts of machine, device and libraries; no names of people, hosts, folders or files.
        parts: parts in the order of their run.
        verdict: four lines for people.
        messages: lines that the program logged.
    """

    device: str
    facts: Mapping[str, Any]
    parts: Sequence[Part]
    verdict: Sequence[str]
    messages: Sequence[str] = ()

    @property
    def works(self) -> bool:
        """Whether no part failed."""
        return not any(part.state == "failed" for part in self.parts)

    @property
    def exit_code(self) -> int:
        """Exit code of the command: of the first part that failed; 0 if none did."""
        return next((part.exit_code for part in self.parts if part.state == "failed"), 0)

    def to_dict(self) -> dict[str, Any]:
        """Return all of it for `--json` and ``doctor.json``."""
        return {
            "device": self.device,
            "works": self.works,
            "exit_code": self.exit_code,
            "verdict": list(self.verdict),
            "facts": self.facts,
            "parts": [part.to_dict() for part in self.parts],
            "messages": list(self.messages),
        }


def check_up(device: torch.device, reporter: Reporter | None = None, effort: Effort | None = None) -> Diagnosis:
    """Check a device: parity, streams, rates, overlap, memory, forecast. A part that fails hides no other.

    Args:
        device: device of runs.
        reporter: receiver of activities.
        effort: extent of the trials; default: little on a CPU, all on an accelerator.
    """
    reporter = reporter or Reporter()
    effort = effort or (Effort() if is_accelerator(device) else QUICK)
    # cuBLAS reads it when the first product is made; without it products are not reproducible on several streams.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with tempfile.TemporaryDirectory(prefix="gptj-ft-") as folder, logged() as messages:
        reporter.on_activity("reading the machine")
        known = facts.collect(device, RUNS)
        parts = []
        for name, (activity, work) in Checkup(device, effort, Path(folder)).parts().items():
            reporter.on_activity(activity)
            parts.append(run_part(name, work))
    return Diagnosis(str(device), known, parts, verdict(device, known, parts), tuple(messages))


@contextmanager
def logged() -> Iterator[list[str]]:
    """Keep what the program logs inside: each message once."""
    messages: list[str] = []

    class Keeping(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = without_private(record.getMessage())
            if text not in messages:
                messages.append(text)

    logger, handler = logging.getLogger("gptj_ft"), Keeping(logging.WARNING)
    propagates = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates


def run_part(name: str, work: Callable[[], Mapping[str, Any]]) -> Part:
    """Run a part; whatever goes wrong in it is its result, but for a request to stop."""
    start = time.monotonic()
    try:
        found = work()
    except Interrupted:
        raise
    except Skipped as reason:
        return Part(name, "skipped", time.monotonic() - start, problem=str(reason))
    except Exception as error:
        problem = str(error) if isinstance(error, Mismatch | GptjFtError) else f"{type(error).__name__}: {error}"
        lines = problem.strip().splitlines()
        places = [
            f"{frame.filename.rpartition('gptj_ft/')[2]}:{frame.lineno}"
            for frame in traceback.extract_tb(error.__traceback__)
            if "gptj_ft/" in frame.filename
        ]
        code = ResourceError.exit_code if "out of memory" in problem else getattr(error, "exit_code", 1)
        text = without_private(lines[0] if lines else type(error).__name__)
        return Part(name, "failed", time.monotonic() - start, {}, text, code, places)
    return Part(name, "passed", time.monotonic() - start, found)


def without_private(text: str) -> str:
    """Return a message without the names of folders, people and hosts that this process knows."""
    text = re.sub(r"(['\"])[/~].*?\1|(?<![\w.])[/~][^\s:,;'\"]+", HIDDEN, text)
    private = [socket.gethostname()]
    with suppress(Exception):  # no such user, in a container
        private.append(getuser())
    for name in private:
        if len(name) >= PRIVATE_LEAST:
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", HIDDEN, text)
    return text


@dataclass(frozen=True)
class Checkup:
    """The parts of a check-up of a device; ``folder`` is for what they write."""

    device: torch.device
    effort: Effort
    folder: Path

    def parts(self) -> dict[str, tuple[str, Callable[[], Mapping[str, Any]]]]:
        """Return each part by its name: what is being done, for people, and the function that does it."""
        return {
            "transformers": ("comparing with transformers", self.compare_with_transformers),
            "placements": ("comparing placements", self.compare_placements),
            "attention": ("comparing attention kernels", self.compare_attention),
            "streams": ("shaking the streams", self.shake_streams),
            "sanitizer": ("looking for races with torch's sanitizer", self.sanitize),
            "rates": ("measuring products, link and disk", self.measure_rates),
            "overlap": ("streaming blocks of GPT-J's size", self.measure_overlap),
            "memory": ("keeping a cap on the device's memory", self.measure_memory),
            "forecast": ("planning GPT-J 6B", self.plan_model),
        }

    @property
    def precision(self) -> str:
        """Half precision that runs on an accelerator take."""
        return "bf16" if supports_bf16(self.device) else "fp16"

    def small_model(self, family: str = "gptj") -> SmallModel:
        """Return a small model, made if there is none yet."""
        folder = self.folder / family
        if not (folder / "config.json").is_file():
            parity.save_reference(parity.make_reference(family), folder)
        return SmallModel.read(folder)

    def known_rates(self) -> Rates:
        """Return the rates of the machine."""
        return rates(self.device, RUNS)

    def blocks(self) -> Blocks:
        """Return the blocks that are streamed."""
        return self.effort.blocks or Blocks.fitting(self.device, self.precision, self.known_rates())

    def require_streams(self) -> None:
        """Skip a part on a device without streams."""
        if not has_streams(self.device):
            raise Skipped("no device with a memory and streams of its own")

    def compare_with_transformers(self) -> dict[str, Any]:
        """Compare with `transformers` on the CPU."""
        with single_thread():
            return parity.check_transformers(self.folder, self.effort.num_steps)

    def compare_placements(self) -> dict[str, Any]:
        """Compare placements with each other, and a device with the CPU."""
        found, is_thorough = {}, self.effort.is_thorough
        half = dict.fromkeys((self.precision, "fp16") if is_thorough else (self.precision,))
        for family, more in (("gptj", half if is_accelerator(self.device) else ()), ("gpt2", ())):
            groups = [
                [replace(trial, num_steps=self.effort.num_steps) for trial in group]
                for precision in ("fp32", *more)
                for group in parity.trials(self.device, precision, is_thorough)
            ]
            if not has_streams(self.device) and is_accelerator(self.device):
                groups = [group[:1] for group in groups]
            with single_thread():
                found[family] = parity.check_placements(self.small_model(family), groups)
        return found

    def compare_attention(self) -> dict[str, Any]:
        """Compare attention kernels with the CPU's."""
        if not is_accelerator(self.device):
            raise Skipped("the CPU is what others are compared with")
        return parity.check_attention(self.device, self.precision)

    def shake_streams(self) -> dict[str, Any]:
        """Shake the streams."""
        self.require_streams()
        if not hasattr(module_of(self.device), "_sleep"):
            raise Skipped("torch cannot make this device wait")
        trials = streams.shaken_trials(self.device, self.precision, self.effort.num_steps)
        with single_thread():
            return streams.check_shaken(self.small_model(), trials, self.effort.num_seeds, SHAKING_SECONDS)

    def sanitize(self) -> dict[str, Any]:
        """Look for races with torch's sanitizer."""
        if self.device.type != "cuda" or not self.effort.is_sanitized:
            raise Skipped("torch has a sanitizer for CUDA only")
        return streams.run_sanitizer(self.small_model().folder, self.device, self.precision)

    def measure_rates(self) -> dict[str, Any]:
        """Measure rates."""
        return speed.measure_rates(self.device, RUNS)

    def measure_overlap(self) -> dict[str, Any]:
        """Measure how far computation hides transfers."""
        self.require_streams()
        return speed.measure_overlap(self.blocks(), self.known_rates())

    def measure_memory(self) -> dict[str, Any]:
        """Measure memory under a cap."""
        self.require_streams()
        blocks = self.blocks()
        return speed.measure_memory(blocks, self.known_rates(), sorted(blocks.tokens)[len(blocks.tokens) // 2])

    def plan_model(self) -> dict[str, Any]:
        """Plan a run of GPT-J 6B."""
        rows, length = (16, 1024) if is_accelerator(self.device) else (8, 256)
        options = {"device": str(self.device), "model": MODEL, "batch_size": rows, "max_length": length}
        found = forecast_run(resolve(options, environment={}))
        costs = found.plan.costs
        return {
            "tokens_per_step": rows * length,
            "seconds_per_step": costs.seconds_per_step,
            "tokens_per_second": rows * length / costs.seconds_per_step,
            "precision": found.plan.precision,
            "placement": str(found.plan.placement),
            "needs": {need.resource: need.need for need in found.plan.needs},
            "problem": str(found.problem or ""),
        }


def verdict(device: torch.device, known: Mapping[str, Any], parts: Sequence[Part]) -> tuple[str, ...]:
    """Return four lines: whether it works and what to do, speed, what GPT-J 6B would take, what to send."""
    by_name = {part.name: part for part in parts}
    return (
        _whether_it_works(device, known, parts),
        _speed(device, by_name),
        _expected(by_name["forecast"]),
        "for an issue: the file doctor.json has all figures, and no names of people, machines, folders or files",
    )


def _whether_it_works(device: torch.device, known: Mapping[str, Any], parts: Sequence[Part]) -> str:
    failed = [part for part in parts if part.state == "failed"]
    of_device = known.get("device") or {}
    name = of_device.get("name") or (known.get("cpu") or {}).get("name") or device.type
    if of_device.get("is_in_build") is False:
        built = ", ".join(of_device["built_for"])
        return (
            f"does not work: torch here is built for {built}, and {name} has compute capability "
            f"{of_device['capability']}: install a torch that is built for it, or use --device cpu"
        )
    if failed:
        others = f" (failed, too: {', '.join(part.name for part in failed[1:])})" if failed[1:] else ""
        instead = "; use --device cpu meanwhile" if is_accelerator(device) else ""
        return f"does not work on {name}: {failed[0].name}: {failed[0].problem}{others}{instead}"
    by_name = {part.name: part.found for part in parts}
    if not is_accelerator(device):
        return f"works on {name}: the numbers of transformers; the same bits from RAM and from disk"
    shaken = by_name["streams"].get("seeds")
    under = f", and under {shaken} shaken schedules" if shaken else ""
    races = by_name["sanitizer"].get("possible_races", 0)
    but = f"; but torch's sanitizer thinks {races} races possible: please report" if races else ""
    return f"works on {name}: the numbers of the CPU; the same bits in every placement{under}{but}"


def _speed(device: torch.device, parts: Mapping[str, Part]) -> str:
    rates_part, overlap = parts["rates"], parts.get("overlap")
    if rates_part.state != "passed":
        return f"speed: unknown: {rates_part.problem}"
    compute, disk = rates_part.found["compute"], rates_part.found["disk"]
    best = max(("fp32", "bf16"), key=lambda name: float(compute[name]))
    texts = [f"products {compute[best] / 1e12:.3g} TFLOP/s in {best}"]
    if is_accelerator(device):
        texts.append(f"link {compute['to_device'] / 1e9:.3g} GB/s to it, {compute['from_device'] / 1e9:.3g} from it")
    texts.append(f"disk reads {disk['read'] / 1e9:.2g}, writes {disk['write'] / 1e9:.2g} GB/s")
    if overlap is not None and overlap.state == "passed":
        shares = ", ".join(f"{row['share']:.0%} at {row['tokens']}" for row in overlap.found["steps"])
        texts.insert(0, f"of what products and link allow: {shares} tokens a step")
    return "speed: " + "; ".join(texts)


def _expected(part: Part) -> str:
    if part.state != "passed":
        return f"GPT-J 6B: no forecast: {part.problem}"
    found = part.found
    if found["problem"]:
        return f"GPT-J 6B: {found['problem']}"
    needs = ", ".join(f"{gigabytes(need)} of {resource}" for resource, need in found["needs"].items() if need)
    rate, tokens = found["tokens_per_second"], found["tokens_per_step"]
    return f"GPT-J 6B: {rate:,.3g} tokens/s expected at {tokens:,} a step in {found['precision']}; {needs}"
