"""Prove the claims of weight streaming on this machine: little memory, no step lost by a kill, equal bits.

A random GPT-2 trains on random rows, with its state on disk and its process in a control group of little memory.
SIGKILL ends it in the middle of a step, and another process resumes it. Then the same steps run once more, in RAM if it
suffices, else from disk without a kill, and every bit is compared. Each process runs the command `finetune`; the
processes share nothing but the disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from gptj_ft.checkpoints.published_configs import GPT2
from gptj_ft.checkpoints.tiny import make_tiny
from gptj_ft.config.resolve import resolve
from gptj_ft.config.run_folder import Run, steps_done
from gptj_ft.diagnostics import facts
from gptj_ft.errors import GptjFtError, ResourceError, UsageError
from gptj_ft.planning.memory import Need
from gptj_ft.planning.plan import Plan
from gptj_ft.system.atomic import require_new
from gptj_ft.system.cgroup import Cgroup, NoCgroup, limited_memory
from gptj_ft.system.files import SHARED_FOLDER, disk_bytes, disk_errors, files_in, keep_folder, remove
from gptj_ft.system.units import clock, gibibytes, gigabytes
from gptj_ft.training.forecast import forecast_run
from gptj_ft.training.reporter import Reporter

POLL_SECONDS, SAMPLE_SECONDS = 0.02, 0.25  # between looks at metrics, and at memory: one sample costs a millisecond
KILL_AT = 0.5  # of a step
LONG_STEP_SECONDS = 3.0
PLANNED_SHARES = (0.9, 0.97)  # of the memory limit, tried in this order; measured peaks were 3 to 7 % above plans
# Seconds of a process beside its steps, and for making and comparing a model, measured on 2 cores.
PROCESS_SECONDS, SECONDS_PER_BILLION = 12.0, 45.0
ROWS_PER_STEP = 4
STATE_BYTES_PER_PARAMETER = 4 + 2 + 2 + 2  # weights in fp32; two moments and the gradient in bf16
LimitMemory = Callable[[int, str], AbstractContextManager[Cgroup]]


@dataclass(frozen=True)
class ProofSize:
    """Shape of a model under Hugging Face's names, and the run that trains it."""

    n_layer: int
    n_embd: int
    n_head: int
    memory: int  # bytes, limit of the control group
    vocab_size: int = 50257
    row_tokens: int = 256
    num_steps: int = 4

    @property
    def config(self) -> dict[str, Any]:
        """Fields of ``config.json``."""
        shape = {name: getattr(self, name) for name in ("n_layer", "n_embd", "n_head", "vocab_size")}
        return {**shape, "n_positions": 1024, "initializer_range": 0.02}


PROOF_SIZES: Mapping[str, ProofSize] = {
    "1.3B": ProofSize(24, 2048, 16, 3 * 2**30),
    "350M": ProofSize(24, 1024, 16, 2 * 2**30),
    "124M": ProofSize(12, 768, 12, 7 * 2**28),
    "tiny": ProofSize(4, 64, 4, 2**30, vocab_size=512, row_tokens=32, num_steps=24),
}


@dataclass(frozen=True)
class ProofRequest:
    """Options of a proof."""

    size: str  # a name in `PROOF_SIZES`
    folder: Path  # of the pages; models and runs are in ``work`` inside until the end
    num_steps: int | None = None  # optimizer steps; default: the size's
    memory: int | None = None  # bytes, limit of the control group; default: the size's
    precision: str = "fp32"  # of the computation, ``fp32`` or ``bf16``
    keeps_files: bool = False  # keep models, runs and logs

    @property
    def work(self) -> Path:
        return self.folder / "work"

    @property
    def shape(self) -> ProofSize:
        size = PROOF_SIZES[self.size]
        return replace(size, num_steps=self.num_steps or size.num_steps, memory=self.memory or size.memory)


@dataclass(frozen=True)
class Cost:
    """Forecast of a proof."""

    streamed: Plan  # of the run from disk
    host_memory: int  # bytes that it is planned for
    reference: Plan  # of the run that it is compared with
    is_in_ram: bool  # the reference keeps its state in RAM
    disk_bytes: int
    seconds: float


@dataclass(frozen=True)
class Memory:
    """Peak memory of a process in bytes."""

    rss: int = 0
    page_cache: int | None = None  # of the control group; without one, growth of the whole machine's page cache
    group: int | None = None  # RAM and page cache of the control group, as the kernel counts them

    def joined(self, other: Memory) -> Memory:
        """Return the larger of each number."""
        pairs = ((getattr(self, name), getattr(other, name)) for name in ("rss", "page_cache", "group"))
        return Memory(*(max((each for each in pair if each is not None), default=None) for pair in pairs))  # type: ignore[arg-type]


@dataclass(frozen=True)
class ProofRun:
    """Numbers of a finished run; sequences have one entry per step."""

    losses: Sequence[float]  # nats per target token
    norms: Sequence[float]  # gradient norms before clipping
    weights_sha256: str  # of the tuned model's weight files, concatenated
    step_seconds: Sequence[float]
    bytes_read: Sequence[int]  # from the stores
    bytes_written: Sequence[int]  # to the stores
    memory: Memory
    seconds: float  # of all its processes

    @property
    def steady_seconds(self) -> float:
        """Median seconds of a step with an update: the first step has none."""
        return statistics.median(self.step_seconds[1:] or self.step_seconds)

    def difference(self, other: ProofRun) -> str:
        """Describe the first different bit; empty if all are equal."""
        for name, one in (("losses", "loss"), ("norms", "gradient norm")):
            pairs = zip(getattr(self, name), getattr(other, name), strict=True)
            for step, (a, b) in enumerate(pairs, 1):
                if a != b:
                    return f"the {one} of step {step} is {a!r} instead of {b!r}"
        return "" if self.weights_sha256 == other.weights_sha256 else "the weights differ"


@dataclass(frozen=True)
class Proof:
    """Result of a proof."""

    size: str
    precision: str
    parameters: int  # of the model, all trained
    state_bytes: int  # weights, moments and gradients
    tokens_per_step: int
    limit: int  # bytes of memory allowed
    not_caged: str  # reason for running without a control group; empty: with one
    is_without_swap: bool  # the limited process could not swap
    num_limited: int  # times that the limit was reached and the kernel dropped page cache
    killed_in: int  # step that SIGKILL interrupted
    committed: int  # step that the second process resumed from
    lost_seconds: float  # of work
    streamed: ProofRun  # from disk, killed and resumed
    reference: ProofRun
    is_in_ram: bool  # the reference kept its state in RAM
    difference: str  # first difference between the two; empty: every bit is equal
    disk_bytes: int  # peak
    forecast: Mapping[str, float]  # seconds and disk_bytes
    machine: Mapping[str, Any]  # facts; no names of people, hosts or folders
    seconds: float

    @property
    def holds(self) -> bool:
        return not self.difference

    @property
    def verdict(self) -> str:
        """The result in one line."""
        other = "the same steps in RAM" if self.is_in_ram else "a run from disk that nobody killed"
        where = "without a memory limit" if self.not_caged else f"in {gibibytes(self.limit)} of memory"
        done = f"{self.parameters:,} parameters trained from disk {where}, killed and resumed"
        if self.difference:
            return f"not proven: {done}: {self.difference} of {other}"
        return f"proven: {done}: equal bits to {other}"

    def to_dict(self) -> dict[str, Any]:
        """Return the object of `--json`."""
        return {"verdict": self.verdict, "holds": self.holds, **asdict(self)}


def run_proof(
    request: ProofRequest, reporter: Reporter | None = None, limit_memory: LimitMemory = limited_memory
) -> Proof:
    """Train from disk in little memory, kill, resume, train again in RAM, and compare.

    Raises:
        ResourceError: the disk is too small, or a run needs more memory than its limit.
    """
    start, reporter = time.monotonic(), reporter or Reporter()
    if request.size not in PROOF_SIZES:
        raise UsageError(f"--size {request.size}: there are {', '.join(PROOF_SIZES)}")
    size = request.shape
    require_new(request.folder)
    with _work_folder(request):
        reporter.on_activity("planning")
        cost = plan_proof(request)
        reporter.on_message(announcement(request, cost))
        reporter.on_activity("making the model")
        _make_inputs(request)

        with ExitStack() as stack:
            group, not_caged = _enter(stack, limit_memory, size.memory)
            where = f"in a control group of {gibibytes(size.memory)}" if group else f"not caged: {not_caged}"
            reporter.on_message(f"1 of 3: training from disk, {where}")
            first = _Process(request, "streamed", group, reporter)
            first.run(_finetune(request, "streamed", cost.host_memory), kill_after=size.num_steps // 2)
            killed_in, committed = first.num_steps + 1, steps_done(first.run_folder)
            if killed_in > size.num_steps:
                raise GptjFtError("the run was done before it could be killed: add --steps with more")
            lost = seconds_in(first.lost_seconds)
            reporter.on_message(f"killed (SIGKILL) {lost} into step {killed_in}; step {committed} is on the disk")
            reporter.on_message("2 of 3: resuming in another process")
            second = _Process(request, "streamed", group, reporter)
            second.run(["finetune", "--resume", str(second.run_folder.folder)])
            num_limited, is_without_swap = (group.num_limited, group.is_without_swap) if group else (0, False)
        memory = first.memory.joined(second.memory)
        streamed = _read_run(first.run_folder, memory, first.seconds + second.seconds)
        if not request.keeps_files:
            remove(first.run_folder.folder)

        reporter.on_message(f"3 of 3: training {'in RAM' if cost.is_in_ram else 'from disk, without a kill'}")
        with ExitStack() as stack:
            group = None if cost.is_in_ram else _enter(stack, limit_memory, size.memory)[0]
            third = _Process(request, "reference", group, reporter)
            third.run(_finetune(request, "reference", None if cost.is_in_ram else cost.host_memory))
        reference = _read_run(third.run_folder, third.memory, third.seconds)

        num_parameters = cost.streamed.workload.num_parameters
        return Proof(
            size=request.size, precision=request.precision, parameters=num_parameters,
            state_bytes=STATE_BYTES_PER_PARAMETER * num_parameters, tokens_per_step=ROWS_PER_STEP * size.row_tokens,
            limit=size.memory, not_caged=not_caged, is_without_swap=is_without_swap, num_limited=num_limited,
            killed_in=killed_in, committed=committed, lost_seconds=first.lost_seconds, streamed=streamed,
            reference=reference, is_in_ram=cost.is_in_ram, difference=streamed.difference(reference),
            disk_bytes=max(process.disk_bytes for process in (first, second, third)),
            forecast={"seconds": cost.seconds, "disk_bytes": cost.disk_bytes},
            machine=facts.collect(torch.device("cpu"), request.folder), seconds=time.monotonic() - start,
        )  # fmt: skip


def plan_proof(request: ProofRequest) -> Cost:
    """Plan both runs from the model's shape; raise `ResourceError` if disk or memory limit are too small."""
    shape = request.work / "shape"
    keep_folder(shape)
    config = {**GPT2, "activation_function": "gelu", **request.shape.config}
    (shape / "config.json").write_text(json.dumps(config), encoding="utf-8")

    def plan(name: str, host_memory: int | None) -> Plan:
        options = {**_options(request, name, host_memory), "model": str(shape)}
        del options["data"]
        return forecast_run(resolve(options, environment={})).plan

    limit = request.shape.memory
    for share in PLANNED_SHARES:
        host_memory = int(share * limit)
        streamed = plan("streamed", host_memory)
        missing = missing_memory(streamed)
        if missing is None:
            break
    else:
        assert missing is not None
        raise ResourceError(
            f"the run needs {gibibytes(missing.need)} of memory, and {share:.0%} of {gibibytes(limit)} are planned "
            f"for it: add --memory with at least {gibibytes(missing.need / PLANNED_SHARES[0] + 2**26)}"
        )
    reference = plan("reference", None)
    is_in_ram = missing_memory(reference) is None
    reference = reference if is_in_ram else streamed
    model_bytes = 4 * streamed.workload.num_parameters
    disk = model_bytes + max(streamed.disk_bytes, reference.disk_bytes if is_in_ram else 0)
    if disk > streamed.have.disk:
        raise ResourceError(
            f"this needs {gigabytes(disk)} of disk, {gigabytes(streamed.have.disk)} are free in "
            f"{request.folder.parent.resolve()}; add --output on a larger one, "
            f"or --size with one of {', '.join(PROOF_SIZES)}"
        )
    steps = sum(float(each.to_dict()["seconds"]) for each in (streamed, reference))
    repeated = (1 + KILL_AT) * streamed.costs.seconds_per_step
    other = 3 * PROCESS_SECONDS + SECONDS_PER_BILLION * streamed.workload.num_parameters / 1e9
    return Cost(streamed, host_memory, reference, is_in_ram, disk, steps + repeated + other)


def missing_memory(plan: Plan) -> Need | None:
    """Return the memory that a plan needs and this machine lacks."""
    return next((need for need in plan.lacking if need.resource != "disk"), None)


def announcement(request: ProofRequest, cost: Cost) -> str:
    """Return the message before a proof: its parts and its cost."""
    num_parameters, size = cost.streamed.workload.num_parameters, request.shape
    other = "with everything in RAM" if cost.is_in_ram else "without a kill, from disk: RAM is short"
    return (
        f"{num_parameters:,} random parameters in {request.precision}, "
        f"{gigabytes(STATE_BYTES_PER_PARAMETER * num_parameters)} of "
        f"state on disk, {size.num_steps} steps within {gibibytes(size.memory)} of memory, killed and resumed; then "
        f"the same {other}\nit takes about {clock(cost.seconds)} and {gigabytes(cost.disk_bytes)} of disk in "
        f"{request.work}{'' if request.keeps_files else ', which is removed at the end'}; Ctrl-C stops it"
    )


@contextmanager
def _work_folder(request: ProofRequest) -> Iterator[None]:
    """Make the folders; remove the work at the end, and after a failure the folder of the pages."""
    succeeded = False
    with disk_errors(request.folder, "name another place with --output", UsageError):
        keep_folder(request.folder, SHARED_FOLDER)
        keep_folder(request.work)
    try:
        yield
        succeeded = True
    finally:
        if not request.keeps_files:
            remove(request.work)
            if not succeeded:
                with suppress(OSError):
                    request.folder.rmdir()


def _enter(stack: ExitStack, limit_memory: LimitMemory, limit: int) -> tuple[Cgroup | None, str]:
    """Make a control group; return it, or the reason why none can be made."""
    try:
        return stack.enter_context(limit_memory(limit, f"gptj-ft-{os.getpid()}")), ""
    except NoCgroup as reason:
        return None, str(reason)


def _make_inputs(request: ProofRequest) -> None:
    """Write a random model, and rows of random tokens of the whole vocabulary: every embedding row gets a gradient."""
    size = request.shape
    make_tiny(request.work / "model", [""], 0, model_type="gpt2", vocab_target=257, **size.config)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(size.vocab_size, (ROWS_PER_STEP * size.num_steps, size.row_tokens), generator=generator)
    lines = (json.dumps({"input_ids": row}) + "\n" for row in rows.tolist())
    (request.work / "rows.jsonl").write_text("".join(lines), encoding="utf-8")


def _options(request: ProofRequest, name: str, host_memory: int | None) -> dict[str, Any]:
    """Return the options of a run; runs differ only in options that change no number.

    Args:
        host_memory: bytes to plan a run from disk for; ``None`` keeps the state in RAM.
    """
    size, place = request.shape, "device" if host_memory is None else "disk"
    return {
        "recipe": "custom", "model": str(request.work / "model"), "data": str(request.work / "rows.jsonl"),
        "output": str(request.work / name), "holdout": 0, "cache": False, "seed": 0, "max_steps": size.num_steps,
        "batch_size": ROWS_PER_STEP, "max_length": size.row_tokens, "micro_batch_tokens": size.row_tokens, "lr": 1e-4,
        "moments": "bf16", "gradients": "bf16", "precision": request.precision, "device": "cpu", "weights": place,
        "optimizer_state": place, "activations": "recompute", "save_minutes": 1e6,
        **({} if host_memory is None else {"host_memory": host_memory}),
    }  # fmt: skip


def _finetune(request: ProofRequest, name: str, host_memory: int | None) -> list[str]:
    options = _options(request, name, host_memory)
    return ["finetune", *(word for key, value in options.items() for word in ("--set", f"{key}={json.dumps(value)}"))]


class _Process:
    """A command of this program, with its progress and memory observed from outside."""

    def __init__(self, request: ProofRequest, name: str, group: Cgroup | None, reporter: Reporter) -> None:
        self.run_folder = Run(request.work / name)
        self.memory, self.seconds, self.disk_bytes = Memory(), 0.0, 0  # peaks, except seconds
        self.lost_seconds = 0.0  # from the end of the last step to the kill
        self._request, self._group, self._reporter = request, group, reporter
        self._log = request.work / f"{name}.log"
        self._page_cache, self._metrics_size, self._lines = _page_cache(), -1, list[dict[str, Any]]()

    @property
    def num_steps(self) -> int:
        """Steps that the run has recorded."""
        return len(self._lines)

    def run(self, words: Sequence[str], kill_after: int | None = None) -> None:
        """Run a command to its end, or kill it in the middle of the step after step ``kill_after``.

        Raises:
            ResourceError: it needs more memory than its control group allows.
            GptjFtError: it failed, or was done before it could be killed.
        """
        command = [sys.executable, "-P", "-m", "gptj_ft", *words, "--quiet"]
        start = step_end = time.monotonic()
        next_sample = 0.0
        self._read_metrics()  # steps before a resume
        with _started(self._group.command(command) if self._group else command, self._log) as process:
            while process.poll() is None:
                now = time.monotonic()
                if self._read_metrics():
                    step_end, last = now, self._lines[-1]
                    progress = f"step {self.num_steps}/{self._request.shape.num_steps}"
                    text = f"{progress}  loss {last['loss']:.4f}  {seconds_in(last['seconds'])}"
                    is_long = last["seconds"] > LONG_STEP_SECONDS
                    (self._reporter.on_message if is_long else self._reporter.on_activity)(text)
                is_due = kill_after is not None and self.num_steps >= kill_after
                # Kill in the middle of a step: half of the shortest step so far has passed since the last one ended.
                if is_due and now - step_end > KILL_AT * min(line["seconds"] for line in self._lines):
                    _kill(process)
                    # The step may have ended between the last look and the kill.
                    self._read_metrics()
                    self._sample(None)
                    self.seconds, self.lost_seconds = now - start, now - step_end
                    return
                if now >= next_sample:
                    next_sample = now + SAMPLE_SECONDS
                    self._sample(process.pid)
                time.sleep(POLL_SECONDS)
        self._sample(None)
        self.seconds = time.monotonic() - start
        # The kernel's counter, not the exit code, tells its kill from ours.
        if self._group is not None and self._group.num_killed:
            raise ResourceError(
                f"the run needs more than the {gibibytes(self._group.limit)} of its control group, and the kernel "
                "killed it; add --memory with more"
            )
        if process.returncode:
            lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise GptjFtError(
                f"a run failed with exit code {process.returncode}: {lines[-1] if lines else 'it printed nothing'}"
            )
        if kill_after is not None:
            raise GptjFtError("the run was done before it could be killed: add --steps with more")

    def _read_metrics(self) -> bool:
        """Read the steps recorded so far; return True if there are new ones."""
        file = self.run_folder.metrics_file
        size = file.stat().st_size if file.is_file() else 0
        if size == self._metrics_size:
            return False
        self._metrics_size, before = size, self.num_steps
        self._lines = [line for line in self.run_folder.metrics() if "loss" in line]
        return self.num_steps > before

    def _sample(self, pid: int | None) -> None:
        """Update the peaks of memory and disk; ``None`` samples the control group after the process has ended."""
        self.disk_bytes = max(self.disk_bytes, disk_bytes(files_in(self._request.work)))
        rss = 0
        with suppress(psutil.Error):
            rss = psutil.Process(pid).memory_info().rss if pid is not None else 0
        if self._group is not None:
            sample = Memory(rss, self._group.page_cache_bytes, self._group.peak_bytes)
        else:
            cached, before = _page_cache(), self._page_cache
            sample = Memory(rss, None if cached is None or before is None else max(0, cached - before))
        self.memory = self.memory.joined(sample)


@contextmanager
def _started(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command in a session of its own, which a Ctrl-C of the terminal does not reach; kill it at the end."""
    with log.open("ab") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            yield process
        finally:
            _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    # It started a session, so its number is also that of its process group.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def seconds_in(seconds: float) -> str:
    """Format a duration, with a decimal if it is short."""
    return f"{seconds:.1f} s" if seconds < 10 else clock(seconds)


def _page_cache() -> int | None:
    cached = getattr(psutil.virtual_memory(), "cached", None)
    return None if cached is None else int(cached)


def _read_run(run: Run, memory: Memory, seconds: float) -> ProofRun:
    lines = [line for line in run.metrics() if "loss" in line]
    keys = ("loss", "grad_norm", "seconds", "bytes_read", "bytes_written")
    losses, norms, step_seconds, read, written = (tuple(line[key] for line in lines) for key in keys)
    memory = memory.joined(Memory(max(line["memory_bytes"] for line in lines)))
    digest = hashlib.sha256()
    for path in sorted(run.model.glob("*.safetensors")):
        with path.open("rb") as file:
            # `file_digest` updates the object that the function returns: one digest over all files.
            hashlib.file_digest(file, lambda: digest)
    return ProofRun(losses, norms, digest.hexdigest(), step_seconds, read, written, memory, seconds)
