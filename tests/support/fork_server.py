"""Runs commands in forks of a process that has everything imported, and sends them signals when told to.

A command then takes as long as its own work, not the seconds that importing torch takes. As a script, it is the server:
one JSON object a line comes in, one goes out.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gptj_ft.system.signals import SIGNALS, StopRequest


@dataclass(frozen=True)
class Job:
    """A command line of gptj-ft, its working folder, and its signals: after how many seconds, and which."""

    line: str
    folder: str
    signals: Sequence[tuple[float, int]] = ()


class ForkServer:
    """The server's other end."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def run(self, line: str, folder: Path, *signals: tuple[float, int]) -> tuple[int, float]:
        """Run a command; return its exit code, -9 if it was killed, and the seconds that it took."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(Job(line, str(folder), signals))) + "\n")
        self._process.stdin.flush()
        code, seconds = json.loads(self._process.stdout.readline())
        return code, seconds

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve() -> None:
    import torch  # noqa: F401
    from transformers import AutoTokenizer, GPTJConfig, GPTJForCausalLM  # noqa: F401

    for text in sys.stdin:
        job = Job(**json.loads(text))
        start, due = time.monotonic(), sorted(job.signals)
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until the command takes them, as at its real start
        process = os.fork()
        if process == 0:
            work(job)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        while not (ended := os.waitpid(process, os.WNOHANG))[0]:
            if due and time.monotonic() - start > due[0][0]:
                os.kill(process, due.pop(0)[1])
            time.sleep(0.0005)
        status = os.waitstatus_to_exitcode(ended[1])
        print(json.dumps([status, time.monotonic() - start]), flush=True)


def work(job: Job) -> None:
    """Be the command; never returns."""
    code = 1
    try:
        from gptj_ft.__main__ import main

        os.chdir(job.folder)
        os.environ["GPTJ_FT_HOME"] = str(Path(job.folder) / "home")
        output = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.argv = ["gptj-ft", *job.line.split()]
        StopRequest().take()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
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


if __name__ == "__main__":
    serve()
