"""Run commands and modules in forks of a process that has everything imported, and signal them on request.

A command then takes only its own time, without seconds of imports. Run as a script, this file is the server: JSON lines
in, JSON lines out.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pkgutil
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil

import gptj_ft
from gptj_ft.system.signals import SIGNALS, StopRequest

TESTS = Path(__file__).parents[1]
LAUNCHER_SECONDS = 8.0  # from the death of a process to SIGTERM for the others; torchrun sends it at once


@dataclass(frozen=True)
class Job:
    """Describe a command line, its working folder, and signals: delay, number and target rank.

    Several processes start as under a launcher and meet in a file of the folder. With a module, the line holds its
    arguments.
    """

    line: str
    folder: str
    signals: Sequence[tuple[float, int, int]] = ()
    processes: int = 1
    module: str = ""
    is_detached: bool = False  # answer with the process number instead of waiting for the end
    awaited: int = 0  # start nothing; wait for the end of a detached process


class Running:
    """A command in a fork of the server."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server, self.pid = server, pid

    def has_ended(self) -> bool:
        return psutil.Process(self.pid).status() == psutil.STATUS_ZOMBIE

    def end(self, number: int = signal.SIGKILL) -> int:
        """Send a signal, and wait until the system has removed the process; return its exit code."""
        os.kill(self.pid, number)
        return self.wait()

    def wait(self) -> int:
        """Wait until the process ends by itself and is removed; return its exit code."""
        pid, self.pid = self.pid, 0
        return os.waitstatus_to_exitcode(self._server.wait(pid))

    def kill(self) -> None:
        """Kill the process unless it was ended."""
        if self.pid:
            self.end()


class ForkServer:
    """Talk to the server process."""

    def __init__(self) -> None:
        path = os.pathsep.join(map(str, (TESTS.parent, TESTS)))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def run(self, line: str, folder: Path, *signals: tuple[float, int]) -> tuple[int, float]:
        """Run a command; return its exit code (-9 if killed) and its seconds."""
        codes, seconds = self.run_together(line, folder, 1, *((delay, number, 0) for delay, number in signals))
        return codes[0], seconds[0]

    def run_together(
        self, line: str, folder: Path, processes: int, *signals: tuple[float, int, int]
    ) -> tuple[list[int], list[float]]:
        """Run a command in several processes; return exit code and duration of each."""
        codes, seconds = self._do(Job(line, str(folder), signals, processes))
        return codes, seconds

    @contextmanager
    def running(self, line: str, folder: Path) -> Iterator[Running]:
        """Run a command during the block, then kill it."""
        process = Running(self, self._do(Job(line, str(folder), is_detached=True))[0])
        try:
            yield process
        finally:
            process.kill()

    def wait(self, pid: int) -> int:
        """Wait for the end of a detached process; return its status."""
        return int(self._do(Job("", "", awaited=pid))[1])

    def run_module(self, module: str, *words: str) -> list[Any]:
        """Run a module of the tests with these words; return its output, parsed from lines of JSON."""
        with tempfile.TemporaryDirectory() as folder:
            (code,), _ = self._do(Job(json.dumps(words), folder, module=module))
            said = Path(folder, "output.txt").read_text(encoding="utf-8")
            assert code == 0, Path(folder, "errors.txt").read_text(encoding="utf-8")
            return [json.loads(line) for line in said.splitlines()]

    def _do(self, job: Job) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(job)) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def import_everything() -> None:
    """Import what commands import, lazily or not: up to half of the time of a short one."""
    import pyarrow.compute  # noqa: F401
    import rich.live
    import rich.progress_bar
    import rich.table  # noqa: F401
    import torch  # noqa: F401
    from transformers import AutoTokenizer, GPTJConfig, GPTJForCausalLM  # noqa: F401

    for module in pkgutil.walk_packages(gptj_ft.__path__, "gptj_ft."):
        if ".lm_eval" not in module.name:  # an extra
            importlib.import_module(module.name)
    gc.collect()
    gc.freeze()  # otherwise the first full collection of each fork would visit, and copy, all of it


def serve() -> None:
    import_everything()
    from conftest import assumed_rates
    from support.rates import layers_by

    from gptj_ft.planning import layer_times, probe

    # Each home is a new one; measuring the machine for it would take longer than the command.
    rates = assumed_rates()
    probe.measure_compute = lambda device: rates.compute  # type: ignore[assignment]
    layer_times.time_kinds = layers_by(rates.compute)
    probe.measure_disk = lambda folder: rates.disk  # type: ignore[assignment]
    probe.core_load, probe.meter_others = (lambda: 0.0), (lambda: lambda: 0.0)  # other tests are no load
    for count, text in enumerate(sys.stdin):
        job = Job(**json.loads(text))
        if job.awaited:
            print(json.dumps(os.waitpid(job.awaited, 0)), flush=True)
            continue
        start, due = time.monotonic(), sorted(job.signals)
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until the command installs its handlers, as in a real start
        processes = [os.fork() or work(job, rank, count) for rank in range(job.processes)]
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        if job.is_detached:
            print(json.dumps(processes), flush=True)
            continue
        ended: dict[int, tuple[int, float]] = {}
        is_ending = False
        while len(ended) < len(processes):
            while due and time.monotonic() - start > due[0][0]:
                _, number, rank = due.pop(0)
                if rank not in ended:
                    os.kill(processes[rank], number)
            for rank, process in enumerate(processes):
                if rank not in ended and (found := os.waitpid(process, os.WNOHANG))[0]:
                    ended[rank] = os.waitstatus_to_exitcode(found[1]), time.monotonic() - start
            killed = [seconds for code, seconds in ended.values() if code < 0]
            if killed and not is_ending and time.monotonic() - start > min(killed) + LAUNCHER_SECONDS:
                is_ending = True
                due += [(0.0, signal.SIGTERM, rank) for rank in range(len(processes)) if rank not in ended]
            time.sleep(0.0005)
        print(json.dumps([[ended[rank][at] for rank in range(len(processes))] for at in (0, 1)]), flush=True)


def work(job: Job, rank: int, number: int) -> NoReturn:
    """Run the command or module in the fork; never returns."""
    code = 1
    try:
        if job.module:
            run_module(job)
            sys.exit(0)
        if job.processes > 1:
            store = Path(job.folder) / f"store-{number}"
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(job.processes), "GPTJ_FT_STORE": str(store)}
            os.environ |= {"LOCAL_WORLD_SIZE": str(job.processes), "GPTJ_FT_TOKEN": "of-the-test"}
        from gptj_ft.__main__ import main

        os.chdir(job.folder)
        os.environ["GPTJ_FT_HOME"] = str(Path(job.folder) / "home")
        output = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.argv = ["gptj-ft", *job.line.split()]
        take = StopRequest.take

        def take_pending(request: StopRequest) -> None:
            take(request)
            # Signals sent meanwhile arrive in the command, as in a real start.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

        StopRequest.take = take_pending  # type: ignore[method-assign]
        main()
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_module(job: Job) -> None:
    for name, stream in (("output.txt", 1), ("errors.txt", 2)):
        os.dup2(os.open(Path(job.folder, name), os.O_WRONLY | os.O_CREAT, 0o644), stream)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    os.chdir(TESTS.parent)
    sys.argv = [job.module, *json.loads(job.line)]
    runpy.run_module(job.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    serve()
