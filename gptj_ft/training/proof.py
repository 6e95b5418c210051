"""Prove what weight streaming promises on this machine: little memory, no step lost by a kill, and the same bits.

A random model of GPT-2's shape is trained on random rows, all of its parameters, with its state on the disk and its
process in a control group of little memory. It is killed by SIGKILL in the middle of a step, resumed, and compared bit
by bit with the same steps of another process: everything in RAM where there is enough, else from disk without a kill.
Each process is the command `finetune`, as a user would type it; none shares anything with another but the disk.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from gptj_ft.checkpoints.published_configs import GPT2
from gptj_ft.checkpoints.tiny import make_tiny
from gptj_ft.config.resolve import resolve
from gptj_ft.config.run_folder import Run, steps_done
from gptj_ft.errors import GptjFtError, ResourceError, UsageError
from gptj_ft.planning.memory import Need
from gptj_ft.planning.plan import Plan
from gptj_ft.system.atomic import require_new
from gptj_ft.system.cage import Cage, NotCaged, caged
from gptj_ft.system.files import SHARED_FOLDER, disk_bytes, disk_errors, files_in, keep_folder, remove
from gptj_ft.system.units import clock, gibibytes, gigabytes
from gptj_ft.training.doctor import facts
from gptj_ft.training.finetune import forecast_run
from gptj_ft.training.reporter import Reporter

POLL_SECONDS, LOOK_SECONDS = 0.02, 0.25  # at the lines of a run; at its memory, a look at which costs a millisecond
KILL_AT = 0.5  # of a step
LONG_STEP_SECONDS = 3.0
PLANNED_SHARES = (0.9, 0.97)  # of the cage; the second where the first is too little. Peaks were 3 to 7 % above plans
# What a process takes beside its steps, and what making and comparing takes, measured on 2 cores.
PROCESS_SECONDS, SECONDS_PER_BILLION = 12.0, 45.0
ROWS_PER_STEP = 4
READ_BYTES = 1 << 22


@dataclass(frozen=True)
class ProofSize:
    """Shape of a model, and what is done with it.

    Attributes:
        n_layer, n_embd, n_head, vocab_size: shape, under Hugging Face's names.
        row_tokens: tokens of a row, of which a step has `ROWS_PER_STEP`.
        num_steps: optimizer steps.
        memory: bytes of the cage.
    """

    n_layer: int
    n_embd: int
    n_head: int
    memory: int
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
    """What is to be proven.

    Attributes:
        size: name of a size, one of `PROOF_SIZES`.
        folder: folder of the page; what is trained lies in ``work`` there until the end.
        num_steps: optimizer steps; ``None``: those of the size.
        memory: bytes of the cage; ``None``: those of the size.
        precision: data type of the computation, ``fp32`` or ``bf16``.
        keeps_files: whether models, runs and logs stay.
    """

    size: str
    folder: Path
    num_steps: int | None = None
    memory: int | None = None
    precision: str = "fp32"
    keeps_files: bool = False

    @property
    def work(self) -> Path:
        return self.folder / "work"


@dataclass(frozen=True)
class Cost:
    """What a proof takes; bytes and seconds.

    Attributes:
        streamed: plan of the run from disk.
        host_memory: bytes that it is planned for.
        reference: plan of the run that it is compared with.
        is_in_ram: whether that has everything in RAM.
        disk_bytes: bytes needed on the disk at most.
        seconds: seconds in all.
    """

    streamed: Plan
    host_memory: int
    reference: Plan
    is_in_ram: bool
    disk_bytes: int
    seconds: float

    @property
    def state_bytes(self) -> int:
        """Weights, moments and gradients of all parameters."""
        return sum(self.streamed.num_parameters * size for size in (4, 2, 2, 2))


@dataclass(frozen=True)
class Memory:
    """Peak memory of a process; bytes.

    Attributes:
        rss: resident memory.
        page_cache: page cache: of its control group, else by how much that of the whole machine grew; ``None``:
            this system does not say.
        group: all of the control group, as the kernel counts it; ``None``: there was none, or it does not say.
    """

    rss: int = 0
    page_cache: int | None = None
    group: int | None = None

    def joined(self, other: Memory) -> Memory:
        """Return the larger of each figure."""
        pairs = ((getattr(self, name), getattr(other, name)) for name in ("rss", "page_cache", "group"))
        return Memory(*(max((each for each in pair if each is not None), default=None) for pair in pairs))  # type: ignore[arg-type]


@dataclass(frozen=True)
class ProofRun:
    """A finished run.

    Attributes:
        losses: loss of each step, nats per target token.
        norms: gradient norm of each step, before clipping.
        weights_sha256: SHA-256 of the weight files of the tuned model, one after the other.
        step_seconds: seconds of each step.
        bytes_read: bytes that each step reads from the stores.
        bytes_written: bytes that each step writes to them.
        memory: peak.
        seconds: seconds of all its processes.
    """

    losses: Sequence[float]
    norms: Sequence[float]
    weights_sha256: str
    step_seconds: Sequence[float]
    bytes_read: Sequence[int]
    bytes_written: Sequence[int]
    memory: Memory
    seconds: float

    @property
    def steady_seconds(self) -> float:
        """Median seconds of a step with an update in it, so without the first."""
        return statistics.median(self.step_seconds[1:] or self.step_seconds)

    def difference(self, other: ProofRun) -> str:
        """Describe the first difference in any bit; empty: there is none."""
        for name, one in (("losses", "loss"), ("norms", "gradient norm")):
            mine, others = getattr(self, name), getattr(other, name)
            for step, (a, b) in enumerate(zip(mine, others, strict=True), 1):
                if a != b:
                    return f"the {one} of step {step} is {a!r} instead of {b!r}"
        return "" if self.weights_sha256 == other.weights_sha256 else "the weights differ"


@dataclass(frozen=True)
class Kill:
    """What became of the run that was killed.

    Attributes:
        step: step in the middle of which it was killed.
        committed: step that the second process went on from.
        seconds: seconds of work that the kill undid.
        disk_bytes: most disk space of both processes.
    """

    step: int
    committed: int
    seconds: float
    disk_bytes: int


@dataclass(frozen=True)
class Proof:
    """Result of a proof.

    Attributes:
        size: name of the size.
        precision: data type of the computation.
        parameters: parameters of the model, all trained.
        state_bytes: weights, moments and gradients.
        tokens_per_step: tokens of a step.
        limit: bytes of the cage that was asked for.
        not_caged: reason why there was none; empty: there was.
        is_without_swap: whether nothing of the caged process could be swapped out.
        num_limited: number of times that the cage was full, so that page cache had to go.
        killed_in: step in the middle of which the first process was killed.
        committed: step that the second one went on from.
        lost_seconds: seconds of work that the kill undid.
        streamed: run from disk, killed and resumed.
        reference: run that it is compared with.
        is_in_ram: whether that had everything in RAM.
        difference: first difference between the two; empty: every bit is equal.
        disk_bytes: disk space used at most.
        forecast: forecast before it began, by name.
        machine: facts of the machine; no names of people, hosts or folders.
        seconds: seconds in all.
    """

    size: str
    precision: str
    parameters: int
    state_bytes: int
    tokens_per_step: int
    limit: int
    not_caged: str
    is_without_swap: bool
    num_limited: int
    killed_in: int
    committed: int
    lost_seconds: float
    streamed: ProofRun
    reference: ProofRun
    is_in_ram: bool
    difference: str
    disk_bytes: int
    forecast: Mapping[str, float]
    machine: Mapping[str, Any]
    seconds: float

    @property
    def holds(self) -> bool:
        """Whether every bit is equal."""
        return not self.difference

    @property
    def verdict(self) -> str:
        """One line: what was done, and whether the bits are equal."""
        other = "the same steps in RAM" if self.is_in_ram else "a run from disk that nobody killed"
        where = "without a cage" if self.not_caged else f"in {gibibytes(self.limit)} of memory"
        done = f"{self.parameters:,} parameters trained from disk {where}, killed and resumed"
        if self.difference:
            return f"not proven: {done}: {self.difference} of {other}"
        return f"proven: {done}: equal bits to {other}"

    def to_dict(self) -> dict[str, Any]:
        """Return all of it for `--json`."""
        return {"verdict": self.verdict, "holds": self.holds, **asdict(self)}


def run_proof(request: ProofRequest, reporter: Reporter | None = None) -> Proof:
    """Train from disk in a cage, kill, resume, train again in RAM, and compare.

    Args:
        request: options of the proof.
        reporter: receiver of activities and messages.

    Raises:
        UsageError: the folder exists, or there is no such size.
        ResourceError: the disk is too small, or a run needs more memory than its cage has.
        GptjFtError: a run failed.
    """
    began, reporter = time.monotonic(), reporter or Reporter()
    if request.size not in PROOF_SIZES:
        raise UsageError(f"--size {request.size}: there are {', '.join(PROOF_SIZES)}")
    size = PROOF_SIZES[request.size]
    size = replace(size, num_steps=request.num_steps or size.num_steps, memory=request.memory or size.memory)
    require_new(request.folder)
    with _working(request):
        reporter.on_activity("planning")
        cost = plan_proof(request, size)
        reporter.on_message(announcement(request, size, cost))
        reporter.on_activity("making the model")
        _make_inputs(request, size)
        with ExitStack() as stack:
            cage, not_caged = _cage(stack, size.memory)
            where = f"in a control group of {gibibytes(size.memory)}" if cage else f"not caged: {not_caged}"
            reporter.on_message(f"1 of 3: training from disk, {where}")
            streamed, kill = _train_and_kill(request, size, cost, cage, reporter)
            num_limited, is_without_swap = (cage.num_limited, cage.is_without_swap) if cage else (0, False)
        _free(request, "streamed")
        reporter.on_message(f"3 of 3: training {'in RAM' if cost.is_in_ram else 'from disk, without a kill'}")
        with ExitStack() as stack:
            again = None if cost.is_in_ram else _cage(stack, size.memory)[0]
            options = _options(request, size, "reference", None if cost.is_in_ram else cost.host_memory)
            process = _Process(request, "reference", again, reporter)
            process.run(["finetune", *_words(options)], size.num_steps)
        reference = _trained(request, "reference", process.memory, process.seconds)
        return Proof(
            size=request.size, precision=request.precision, parameters=cost.streamed.num_parameters,
            state_bytes=cost.state_bytes, tokens_per_step=ROWS_PER_STEP * size.row_tokens, limit=size.memory,
            not_caged=not_caged, is_without_swap=is_without_swap, num_limited=num_limited, killed_in=kill.step,
            committed=kill.committed, lost_seconds=kill.seconds, streamed=streamed, reference=reference,
            is_in_ram=cost.is_in_ram, difference=streamed.difference(reference),
            disk_bytes=max(kill.disk_bytes, process.disk_bytes),
            forecast={"seconds": cost.seconds, "disk_bytes": cost.disk_bytes},
            machine=facts.collect(torch.device("cpu"), request.folder), seconds=time.monotonic() - began,
        )  # fmt: skip


def plan_proof(request: ProofRequest, size: ProofSize) -> Cost:
    """Plan both runs; nothing is written but the shape of the model.

    Raises:
        ResourceError: the disk is too small, or the cage.
    """
    shape = request.work / "shape"
    keep_folder(shape)
    config = {**GPT2, "activation_function": "gelu", **size.config}
    (shape / "config.json").write_text(json.dumps(config), encoding="utf-8")

    def plan(name: str, host_memory: int | None) -> Plan:
        options = {**_options(request, size, name, host_memory), "model": str(shape)}
        del options["data"]
        return forecast_run(resolve(options, environment={})).plan

    for share in PLANNED_SHARES:
        host_memory = int(share * size.memory)
        streamed = plan("streamed", host_memory)
        short = memory_lacking(streamed)
        if short is None:
            break
    else:
        assert short is not None
        raise ResourceError(
            f"the run needs {gibibytes(short.need)} of memory, and {share:.0%} of {gibibytes(size.memory)} are planned "
            f"for it: add --memory with at least {gibibytes(short.need / PLANNED_SHARES[0] + 2**26)}"
        )
    reference = plan("reference", None)
    is_in_ram = memory_lacking(reference) is None
    reference = reference if is_in_ram else streamed
    model_bytes = 4 * streamed.num_parameters
    disk = model_bytes + max(streamed.disk_bytes, reference.disk_bytes if is_in_ram else 0)
    if disk > streamed.have.disk:
        raise ResourceError(
            f"this needs {gigabytes(disk)} of disk, {gigabytes(streamed.have.disk)} are free in "
            f"{request.folder.parent.resolve()}; add --output on a larger one, "
            f"or --size with one of {', '.join(PROOF_SIZES)}"
        )
    steps = sum(float(each.to_dict()["seconds"]) for each in (streamed, reference))
    again = (1 + KILL_AT) * streamed.costs.seconds_per_step
    apart = 3 * PROCESS_SECONDS + SECONDS_PER_BILLION * streamed.num_parameters / 1e9
    return Cost(streamed, host_memory, reference, is_in_ram, disk, steps + again + apart)


def memory_lacking(plan: Plan) -> Need | None:
    """Return the memory that a plan lacks; ``None`` if it has enough."""
    return next((need for need in plan.lacking if need.resource != "disk"), None)


def announcement(request: ProofRequest, size: ProofSize, cost: Cost) -> str:
    """Return the message before a proof: its parts and its costs."""
    other = "with everything in RAM" if cost.is_in_ram else "without a kill, from disk: RAM is short"
    return (
        f"{cost.streamed.num_parameters:,} random parameters in {request.precision}, {gigabytes(cost.state_bytes)} of "
        f"state on disk, {size.num_steps} steps within {gibibytes(size.memory)} of memory, killed and resumed; then "
        f"the same {other}\nit takes about {clock(cost.seconds)} and {gigabytes(cost.disk_bytes)} of disk in "
        f"{request.work}{'' if request.keeps_files else ', which is removed at the end'}; Ctrl-C stops it"
    )


@contextmanager
def _working(request: ProofRequest) -> Iterator[None]:
    """Make the folder; remove at the end what is in the way of nobody but the disk."""
    is_done = False
    with disk_errors(request.folder, "name another place with --output", UsageError):
        keep_folder(request.folder, SHARED_FOLDER)
        keep_folder(request.work)
    try:
        yield
        is_done = True
    finally:
        if not request.keeps_files:
            remove(request.work)
            if not is_done:
                with suppress(OSError):
                    request.folder.rmdir()


def _cage(stack: ExitStack, limit: int) -> tuple[Cage | None, str]:
    """Enter a cage; return it, or why there is none."""
    try:
        return stack.enter_context(caged(limit, f"gptj-ft-{os.getpid()}")), ""
    except NotCaged as reason:
        return None, str(reason)


def _make_inputs(request: ProofRequest, size: ProofSize) -> None:
    """Write the model and the rows: random tokens, of the whole vocabulary, so that all of the embedding is trained."""
    make_tiny(request.work / "model", [""], 0, model_type="gpt2", vocab_target=257, **size.config)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(size.vocab_size, (ROWS_PER_STEP * size.num_steps, size.row_tokens), generator=generator)
    lines = (json.dumps({"input_ids": row}) + "\n" for row in rows.tolist())
    (request.work / "rows.jsonl").write_text("".join(lines), encoding="utf-8")


def _options(request: ProofRequest, size: ProofSize, name: str, host_memory: int | None) -> dict[str, Any]:
    """Return the options of a run; what decides its numbers is the same for all.

    Moments and stored gradients are in bf16: 10 bytes a parameter, so that 16 GB hold the run in RAM.

    Args:
        request: options of the proof.
        size: shape of the model, and steps.
        name: name of the run.
        host_memory: bytes that a run from disk is planned for; ``None``: everything is in RAM.
    """
    place = "device" if host_memory is None else "disk"
    return {
        "recipe": "custom", "model": str(request.work / "model"), "data": str(request.work / "rows.jsonl"),
        "output": str(request.work / name), "holdout": 0, "cache": False, "seed": 0, "max_steps": size.num_steps,
        "batch_size": ROWS_PER_STEP, "max_length": size.row_tokens, "micro_batch_tokens": size.row_tokens, "lr": 1e-4,
        "moments": "bf16", "gradients": "bf16", "precision": request.precision, "device": "cpu", "weights": place,
        "optimizer_state": place, "activations": "recompute", "save_minutes": 1e6,
        **({} if host_memory is None else {"host_memory": host_memory}),
    }  # fmt: skip


def _words(options: Mapping[str, Any]) -> list[str]:
    return [word for key, value in options.items() for word in ("--set", f"{key}={json.dumps(value)}")]


def _train_and_kill(
    request: ProofRequest, size: ProofSize, cost: Cost, cage: Cage | None, reporter: Reporter
) -> tuple[ProofRun, Kill]:
    """Train from disk; kill the process in the middle of a step, and resume in another."""
    run = Run(request.work / "streamed")
    first = _Process(request, "streamed", cage, reporter)
    options = _options(request, size, "streamed", cost.host_memory)
    lost = first.run(["finetune", *_words(options)], size.num_steps, kill_after=size.num_steps // 2)
    killed_in, committed = first.num_steps + 1, steps_done(run)
    if killed_in > size.num_steps:
        raise GptjFtError("the run was done before it could be killed: add --steps with more")
    reporter.on_message(f"killed (SIGKILL) {seconds_in(lost)} into step {killed_in}; step {committed} is on the disk")
    reporter.on_message("2 of 3: resuming in another process")
    second = _Process(request, "streamed", cage, reporter)
    second.run(["finetune", "--resume", str(run.folder)], size.num_steps)
    memory, seconds = first.memory.joined(second.memory), first.seconds + second.seconds
    kill = Kill(killed_in, committed, lost, max(first.disk_bytes, second.disk_bytes))
    return _trained(request, "streamed", memory, seconds), kill


class _Process:
    """A command of this program, watched from outside: its lines, its memory.

    Attributes:
        memory: peak so far.
        disk_bytes: most disk space that all files of the proof had.
        num_steps: steps that its run has lines of.
        seconds: seconds from its start to its end.
    """

    def __init__(self, request: ProofRequest, name: str, cage: Cage | None, reporter: Reporter) -> None:
        self._work, self._run = request.work, Run(request.work / name)
        self._log = request.work / f"{name}.log"
        self._cage, self._reporter = cage, reporter
        self._cached, self._size, self._lines = _page_cache(), -1, list[dict[str, Any]]()
        self.memory, self.seconds, self.disk_bytes = Memory(), 0.0, 0

    @property
    def num_steps(self) -> int:
        return len(self._lines)

    def run(self, words: Sequence[str], num_steps: int, kill_after: int | None = None) -> float:
        """Run it to its end, or kill it.

        Args:
            words: words of the command.
            num_steps: optimizer steps of the run.
            kill_after: kill it in the middle of the step after this one.

        Returns: seconds from the end of the last step to the kill; 0 without one.

        Raises:
            ResourceError: it needs more memory than its cage has.
            GptjFtError: it failed, or was done before it could be killed.
        """
        command = [sys.executable, "-m", "gptj_ft", *words, "--quiet"]
        began = since = time.monotonic()
        next_look = 0.0
        self._read_lines()  # of a run that is resumed
        with _started(self._cage.command(command) if self._cage else command, self._log) as process:
            while process.poll() is None:
                now = time.monotonic()
                if self._read_lines():
                    since, last = now, self._lines[-1]
                    shown = f"step {self.num_steps}/{num_steps}  loss {last['loss']:.4f}  {seconds_in(last['seconds'])}"
                    is_long = last["seconds"] > LONG_STEP_SECONDS  # a line of a log each
                    (self._reporter.on_message if is_long else self._reporter.on_activity)(shown)
                is_due = kill_after is not None and self.num_steps >= kill_after
                if is_due and now - since > KILL_AT * min(line["seconds"] for line in self._lines):
                    _kill(process)
                    self._read_lines()
                    self._look(None)
                    self.seconds = now - began
                    return now - since
                if now >= next_look:
                    next_look = now + LOOK_SECONDS
                    self._look(process.pid)
                time.sleep(POLL_SECONDS)
        self._look(None)
        self.seconds = time.monotonic() - began
        if self._cage is not None and self._cage.num_killed:
            raise ResourceError(
                f"the run needs more than the {gibibytes(self._cage.limit)} of its cage: the kernel ended it; add "
                "--memory with more"
            )
        if process.returncode:
            said = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise GptjFtError(
                f"a run failed with exit code {process.returncode}: {said[-1] if said else 'it said nothing'}"
            )
        if kill_after is not None:
            raise GptjFtError("the run was done before it could be killed: add --steps with more")
        return 0.0

    def _read_lines(self) -> bool:
        """Read the lines of the steps so far; tell whether there are new ones."""
        file = self._run.metrics_file
        size = file.stat().st_size if file.is_file() else 0
        if size == self._size:
            return False
        self._size, before = size, self.num_steps
        self._lines = [line for line in self._run.metrics() if "loss" in line]
        return self.num_steps > before

    def _look(self, pid: int | None) -> None:
        """Take note of memory and disk; with no process, of what its control group remembers."""
        self.disk_bytes = max(self.disk_bytes, disk_bytes(files_in(self._work)))
        rss = 0
        with suppress(psutil.Error):
            rss = psutil.Process(pid).memory_info().rss if pid is not None else 0
        if self._cage is not None:
            seen = Memory(rss, self._cage.page_cache_bytes, self._cage.peak_bytes)
        else:
            cached = _page_cache()
            seen = Memory(rss, None if cached is None or self._cached is None else max(0, cached - self._cached))
        self.memory = self.memory.joined(seen)


@contextmanager
def _started(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command in a session of its own, where no Ctrl-C of the terminal reaches it; kill it on the way out."""
    with log.open("ab") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            yield process
        finally:
            _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def seconds_in(seconds: float) -> str:
    """Return a duration with a digit after the point where it is short."""
    return f"{seconds:.1f} s" if seconds < 10 else clock(seconds)


def _page_cache() -> int | None:
    """Return the page cache of this machine."""
    cached = getattr(psutil.virtual_memory(), "cached", None)
    return None if cached is None else int(cached)


def _trained(request: ProofRequest, name: str, memory: Memory, seconds: float) -> ProofRun:
    """Read what a finished run has left."""
    run = Run(request.work / name)
    lines = [line for line in run.metrics() if "loss" in line]
    own = Memory(max(line["memory_bytes"] for line in lines))

    def each(key: str) -> tuple[Any, ...]:
        return tuple(line[key] for line in lines)

    return ProofRun(
        each("loss"), each("grad_norm"), _sha256(run.model), each("seconds"), each("bytes_read"),
        each("bytes_written"), memory.joined(own), seconds,
    )  # fmt: skip


def _sha256(model: Path) -> str:
    """Return the SHA-256 of a model's weight files, one after the other."""
    digest = hashlib.sha256()
    for path in sorted(model.glob("*.safetensors")):
        with path.open("rb") as file:
            while block := file.read(READ_BYTES):
                digest.update(block)
    return digest.hexdigest()


def _free(request: ProofRequest, name: str) -> None:
    """Remove a run that has been read."""
    if not request.keeps_files:
        remove(request.work / name)
