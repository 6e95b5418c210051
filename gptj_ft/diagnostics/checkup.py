"""Run the parts of a check-up independently, and sum them up in a verdict of four lines."""

from __future__ import annotations

import logging
import re
import socket
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
from gptj_ft.diagnostics import facts, parity, speed, streams
from gptj_ft.diagnostics.parity import Mismatch, Skipped
from gptj_ft.diagnostics.speed import Blocks
from gptj_ft.diagnostics.trial import SmallModel, single_thread
from gptj_ft.errors import GptjFtError, Interrupted, ResourceError
from gptj_ft.planning.machine_profile import rates
from gptj_ft.planning.probe import Rates
from gptj_ft.system.accelerator import (
    allow_deterministic_products,
    has_streams,
    is_accelerator,
    module_of,
    supports_bf16,
)
from gptj_ft.system.paths import RUNS
from gptj_ft.system.plain_text import HIDDEN
from gptj_ft.system.scratch import scratch_folder
from gptj_ft.system.units import gigabytes
from gptj_ft.training.forecast import forecast_run
from gptj_ft.training.reporter import Reporter

MODEL = "EleutherAI/gpt-j-6b"
SHAKING_SECONDS = 25.0
# A quoted path; a bare one up to a file's suffix, with spaces; or any word with a slash, up to punctuation.
PATH = re.compile(
    r"""(['"])(?=[^'"]*/|~)[^'"]*?\1|(?<![\w.])[/~][^:;,'"\n]*?\.\w{1,8}(?=[\s:;,]|$)|[^\s:;,'"/]*[/~][^\s:;,'"]+"""
)
RATE = re.compile(r"\d+/\d+|\w+/s")  # 1/2, kB/s
MIN_PRIVATE_LENGTH = 3  # characters; shorter user and host names occur inside ordinary words
State = Literal["passed", "differs", "failed", "skipped"]
"""``differs``: more than rounding explains, less than a wrong computation would."""
Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Effort:
    """Extent of a check-up."""

    num_steps: int = 3  # optimizer steps of each comparison
    is_thorough: bool = True  # compare every placement, else only those that differ most
    num_seeds: int = 20  # most seeds of random delays
    blocks: Blocks | None = None  # streamed blocks; None: the widest that fit
    is_sanitized: bool = True  # run torch's sanitizer


QUICK = Effort(num_steps=2, is_thorough=False)


@dataclass(frozen=True)
class Part:
    """Result of one part of a check-up."""

    name: str
    state: State
    seconds: float
    numbers: Facts = field(default_factory=dict)
    problem: str = ""  # reason for failing or skipping, or the differences that are larger than expected
    exit_code: int = 0  # of the command, if the part failed
    places: Sequence[str] = ()  # traceback in this package, as file:line, innermost last

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "state": self.state,
            "seconds": round(self.seconds, 3),
            "found": self.numbers,
            "problem": self.problem,
            "exit_code": self.exit_code,
            "places": list(self.places),
        }


@dataclass(frozen=True)
class Diagnosis:
    """Result of a check-up."""

    device: str  # checked device
    facts: Facts  # facts of machine, device and libraries; no names of people, hosts, folders or files
    parts: Sequence[Part]  # in the order of their run
    verdict: Sequence[str]  # four lines for people
    messages: Sequence[str] = ()  # logged lines

    @property
    def works(self) -> bool:
        return not any(part.state == "failed" for part in self.parts)

    @property
    def exit_code(self) -> int:
        return next((part.exit_code for part in self.parts if part.state == "failed"), 0)

    def to_dict(self) -> dict[str, Any]:
        """Return the object of `--json` and ``doctor.json``."""
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
    """Check a device: parity, streams, rates, overlap, memory and forecast.

    Args:
        effort: default: a quick check-up on a CPU, the whole one on an accelerator.
    """
    reporter = reporter or Reporter()
    effort = effort or (Effort() if is_accelerator(device) else QUICK)
    allow_deterministic_products(device)
    with scratch_folder() as folder, logged() as messages:
        reporter.on_activity("reading the machine")
        known = facts.collect(device, RUNS)
        parts = []
        for name, (activity, work) in Checkup(device, effort, folder).parts().items():
            reporter.on_activity(activity)
            parts.append(run_part(name, work))
    return Diagnosis(str(device), known, parts, verdict(device, known, parts), tuple(messages))


@contextmanager
def logged() -> Iterator[list[str]]:
    """Collect the warnings that the program logs in the block, without private names or repetitions."""
    messages: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = without_private(record.getMessage())
            if text not in messages:
                messages.append(text)

    logger, handler = logging.getLogger("gptj_ft"), Collector(logging.WARNING)
    propagates = logger.propagate
    logger.addHandler(handler)
    # Else the handlers of the root logger would print them as well.
    logger.propagate = False
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates


def run_part(name: str, work: Callable[[], Facts]) -> Part:
    """Run a part and turn any error except `Interrupted` into its result."""
    start = time.monotonic()
    try:
        numbers = work()
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
        # torch reports a full device as RuntimeError: recognize it by its text.
        code = ResourceError.exit_code if "out of memory" in problem else getattr(error, "exit_code", 1)
        text = without_private(lines[0] if lines else type(error).__name__)
        return Part(name, "failed", time.monotonic() - start, {}, text, code, places)
    differs = list(numbers.get("differs", ()))
    return Part(name, "differs" if differs else "passed", time.monotonic() - start, numbers, "; ".join(differs))


def without_private(text: str, user: Callable[[], str] = getuser, host: Callable[[], str] = socket.gethostname) -> str:
    """Hide paths and the names of user and host in a message."""
    text = PATH.sub(lambda match: match[0] if RATE.fullmatch(match[0]) else HIDDEN, text)
    private = [host()]
    with suppress(Exception):  # a container may have no name for the user's number
        private.append(user())
    for name in private:
        if len(name) >= MIN_PRIVATE_LENGTH:
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", HIDDEN, text, flags=re.IGNORECASE)
    return text


@dataclass(frozen=True)
class Checkup:
    """Parts of the check-up of a device; they write only into ``folder``."""

    device: torch.device
    effort: Effort
    folder: Path

    def parts(self) -> dict[str, tuple[str, Callable[[], Facts]]]:
        """Return for each part the activity to report and the function to run."""
        return {
            "transformers": ("comparing with transformers", self.compare_with_transformers),
            "placements": ("comparing placements", self.compare_placements),
            "attention": ("comparing attention kernels", self.compare_attention),
            "streams": ("shaking the streams", self.shake_streams),
            "sanitizer": ("looking for races with torch's sanitizer", self.sanitize),
            "rates": ("measuring products, link and disk", lambda: speed.measure_rates(self.device, RUNS)),
            "overlap": ("streaming blocks of GPT-J's size", self.measure_overlap),
            "memory": ("keeping a cap on the device's memory", self.measure_memory),
            "forecast": ("planning GPT-J 6B", self.plan_model),
        }

    @property
    def precision(self) -> str:
        """Half precision that runs on this device use."""
        return "bf16" if supports_bf16(self.device) else "fp16"

    def small_model(self, family: str = "gptj") -> SmallModel:
        folder = self.folder / family
        if not (folder / "config.json").is_file():
            parity.save_reference(parity.make_reference(family), folder)
        return SmallModel.read(folder)

    def known_rates(self) -> Rates:
        return rates(self.device, RUNS)

    def blocks(self) -> Blocks:
        return self.effort.blocks or Blocks.fitting(self.device, self.precision, self.known_rates())

    def require_streams(self) -> None:
        if not has_streams(self.device):
            raise Skipped("no device with a memory and streams of its own")

    def compare_with_transformers(self) -> Facts:
        with single_thread():
            return parity.check_transformers(self.folder, self.effort.num_steps)

    def compare_placements(self) -> Facts:
        """Compare placements with each other, and an accelerator with the CPU."""
        is_thorough = self.effort.is_thorough
        numbers: dict[str, Any] = {"differs": []}
        half = dict.fromkeys((self.precision, "fp16") if is_thorough else (self.precision,))
        for family, more in (("gptj", half if is_accelerator(self.device) else ()), ("gpt2", ())):
            groups = [
                [replace(trial, num_steps=self.effort.num_steps) for trial in group]
                for precision in ("fp32", *more)
                for group in parity.trials(self.device, precision, is_thorough)
            ]
            if not has_streams(self.device) and is_accelerator(self.device):
                # Apple's GPUs share the host's memory: every placement is the same.
                groups = [group[:1] for group in groups]
            with single_thread():
                numbers[family] = parity.check_placements(self.small_model(family), groups)
            numbers["differs"] += numbers[family]["differs"]
        return numbers

    def compare_attention(self) -> Facts:
        if not is_accelerator(self.device):
            raise Skipped("the CPU is the reference of the comparison")
        return parity.check_attention(self.device, self.precision)

    def shake_streams(self) -> Facts:
        self.require_streams()
        if not hasattr(module_of(self.device), "_sleep"):
            raise Skipped("torch cannot make this device wait")
        trials = streams.shaken_trials(self.device, self.precision, self.effort.num_steps)
        with single_thread():
            return streams.check_shaken(self.small_model(), trials, self.effort.num_seeds, SHAKING_SECONDS)

    def sanitize(self) -> Facts:
        if self.device.type != "cuda" or not self.effort.is_sanitized:
            raise Skipped("torch has a sanitizer for CUDA only")
        return streams.run_sanitizer(self.small_model().folder, self.device, self.precision)

    def measure_overlap(self) -> Facts:
        self.require_streams()
        return speed.measure_overlap(self.blocks(), self.known_rates())

    def measure_memory(self) -> Facts:
        self.require_streams()
        blocks = self.blocks()
        return speed.measure_memory(blocks, self.known_rates(), sorted(blocks.tokens)[len(blocks.tokens) // 2])

    def plan_model(self) -> Facts:
        rows, length = (16, 1024) if is_accelerator(self.device) else (8, 256)
        options = {"device": str(self.device), "model": MODEL, "batch_size": rows, "max_length": length}
        forecast = forecast_run(resolve(options, environment={}))
        costs = forecast.plan.costs
        return {
            "tokens_per_step": rows * length,
            "seconds_per_step": costs.seconds_per_step,
            "tokens_per_second": rows * length / costs.seconds_per_step,
            "precision": forecast.plan.precision,
            "placement": str(forecast.plan.placement),
            "needs": {need.resource: need.need for need in forecast.plan.needs},
            "problem": str(forecast.problem or ""),
        }


def verdict(device: torch.device, known: Facts, parts: Sequence[Part]) -> tuple[str, ...]:
    """Return four lines: works or not and the remedy, speed, the cost of GPT-J 6B, and how to report."""
    by_name = {part.name: part for part in parts}
    return (
        _status(device, known, parts),
        _speed(device, by_name),
        _forecast(by_name["forecast"]),
        "for an issue: the file doctor.json has all figures, and no names of people, machines, folders or files",
    )


def _status(device: torch.device, known: Facts, parts: Sequence[Part]) -> str:
    failed = [part for part in parts if part.state == "failed"]
    accelerator = known.get("device") or {}
    name = accelerator.get("name") or (known.get("cpu") or {}).get("name") or device.type
    if accelerator.get("is_in_build") is False:
        return (
            f"does not work: torch here is built for {', '.join(accelerator['built_for'])}, and {name} has compute "
            f"capability {accelerator['capability']}: install a torch that is built for it, or use --device cpu"
        )
    if failed:
        others = f" (failed, too: {', '.join(part.name for part in failed[1:])})" if failed[1:] else ""
        instead = "; use --device cpu meanwhile" if is_accelerator(device) else ""
        return f"does not work on {name}: {failed[0].name}: {failed[0].problem}{others}{instead}"
    if differing := [part for part in parts if part.state == "differs"]:
        lines = "; ".join(f"{part.name}: {part.problem}" for part in differing)
        return f"works on {name}, but differs more than expected: {lines}; please report it"
    if not is_accelerator(device):
        return f"works on {name}: the numbers of transformers; the same bits from RAM and from disk"
    numbers = {part.name: part.numbers for part in parts}
    seeds, races = numbers["streams"].get("seeds"), numbers["sanitizer"].get("possible_races", 0)
    shaken = f", and under {seeds} shaken schedules" if seeds else ""
    warning = f"; but torch's sanitizer thinks {races} races possible: please report" if races else ""
    return f"works on {name}: the numbers of the CPU; the same bits in every placement{shaken}{warning}"


def _speed(device: torch.device, parts: Mapping[str, Part]) -> str:
    measured, overlap = parts["rates"], parts.get("overlap")
    if measured.state != "passed":
        return f"speed: unknown: {measured.problem}"
    compute, disk = measured.numbers["compute"], measured.numbers["disk"]
    best = max(("fp32", "bf16"), key=lambda name: float(compute[name]))
    texts = [f"products {compute[best] / 1e12:.3g} TFLOP/s in {best}"]
    if is_accelerator(device):
        texts.append(f"link {compute['to_device'] / 1e9:.3g} GB/s to it, {compute['from_device'] / 1e9:.3g} from it")
    texts.append(f"disk reads {disk['read'] / 1e9:.2g}, writes {disk['write'] / 1e9:.2g} GB/s")
    if overlap is not None and overlap.state == "passed":
        shares = ", ".join(f"{row['share']:.0%} at {row['tokens']}" for row in overlap.numbers["steps"])
        texts.insert(0, f"of what products and link allow: {shares} tokens a step")
    return "speed: " + "; ".join(texts)


def _forecast(part: Part) -> str:
    if part.state != "passed":
        return f"GPT-J 6B: no forecast: {part.problem}"
    numbers = part.numbers
    if numbers["problem"]:
        return f"GPT-J 6B: {numbers['problem']}"
    needs = ", ".join(f"{gigabytes(need)} of {resource}" for resource, need in numbers["needs"].items() if need)
    rate, tokens = numbers["tokens_per_second"], numbers["tokens_per_step"]
    return f"GPT-J 6B: {rate:,.3g} tokens/s expected at {tokens:,} a step in {numbers['precision']}; {needs}"
