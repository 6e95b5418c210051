"""Run commands on failing devices and print each outcome and the following command as JSON.

It needs a separate process; every command gets its own simulation.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from support import accelerator
from support.accelerator import Faults, Simulation
from support.accelerator.__main__ import assume_rates
from support.accelerator.ghost import forget_tensors
from support.accelerator.simulation import now

LINE = (
    "finetune --recipe summarization --data rows.jsonl --model tiny --lr 1e-2 --batch-size 2 --max-steps 4 "
    "--save-every 2 --precision fp32 --device sim"
)
POINTS = int(os.environ.get("POINTS", "6"))  # allocations of a step that fail
PLACES = {
    "device": "--weights device --optimizer-state device",
    "host": "--weights host --optimizer-state host",
    "disk": "--weights disk --optimizer-state disk",
}


def command(line: str, **options: Any) -> tuple[dict[str, Any], Simulation]:
    """Run ``gptj-ft`` with the words of a line; return exit code, output and simulation."""
    from gptj_ft.cli import app

    forget_tensors()
    simulation = accelerator.start("random", seed=1, **options)
    out, err = io.StringIO(), io.StringIO()
    sys.argv, code = ["gptj-ft", *line.split()], 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            app.main()
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException as error:  # a user would see a traceback
            code, _ = -1, err.write(f"Traceback: {type(error).__name__}: {error}")
    found = {"code": code, "said": err.getvalue() + out.getvalue(), "races": len(simulation.races)}
    return found, simulation


@contextlib.contextmanager
def steps_counted() -> Iterator[list[range]]:
    """Yield a list that receives the numbers of the allocations of each step."""
    from gptj_ft.training import compute

    steps, take = list[range](), compute.train_step

    def counted(*args: Any) -> Any:
        first = now().num_allocations
        loss = take(*args)
        steps.append(range(first + 1, now().num_allocations + 1))
        return loss

    with patch.object(compute, "train_step", counted):
        yield steps


def spread(steps: Sequence[range]) -> list[int]:
    """Choose allocations of the steps after the first update, spread evenly.

    The first update, in step 2, allocates while it changes weights: a failure there ends the run.
    """
    numbers = [number for step in steps[2:] for number in step]
    return [numbers[at * (len(numbers) - 1) // (POINTS - 1)] for at in range(POINTS)]


def write_rows() -> None:
    """Write the rows of `LINE` into the working folder."""
    rows = [{"note": f"Room {n} is cold and dark at night.", "summary": f"Room {n} is cold."} for n in range(10)]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")


def digest(run: str) -> str:
    """Return the digest of a run's tuned model."""
    found = hashlib.sha256()
    for path in sorted(Path(run, "model").glob("*.safetensors")):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def cases(places: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield each fault with the command's output and a digest of the final model."""
    for place in places:
        options = PLACES[place]
        line = f"{LINE} {options} --output {place}"
        with steps_counted() as steps:
            straight, counted = command(line)
        total = {"allocation": counted.num_allocations, "operation": counted.num_operations}
        yield {"fault": "none", "place": place, **straight, "numbers": digest(place)}
        for number, (fault, faults, more) in enumerate(_faults(place, total)):
            name = f"{place}-{number}"
            failed, _ = command(f"{LINE} {options} --output {name}", faults=faults, **more)
            found = {"fault": fault, "place": place, **failed, "after": None}
            if failed["code"]:
                again = f"finetune --resume {name}" if Path(name).is_dir() else f"{LINE} {options} --output {name}"
                found["after"], _ = command(again)
            yield {**found, "numbers": digest(name)}
        for number in spread(steps):
            name = f"{place}-step-{number}"
            failed, _ = command(f"{LINE} {options} --output {name}", faults=Faults(failing_allocation=number))
            yield {"fault": "out of memory in a step", "place": place, "at": number, **failed, "numbers": digest(name)}
    for device in ("sim:9", "sim:1", "cuda:0"):
        refused, _ = command(f"{LINE} --output none".replace("--device sim", f"--device {device}"))
        yield {"fault": f"--device {device}", "place": "none", **refused, "numbers": None, "after": None}


def _faults(place: str, total: dict[str, int]) -> Iterator[tuple[str, Faults, dict[str, Any]]]:
    allocations, operations = total["allocation"], total["operation"]
    if place == "host":
        yield "no memory is locked", Faults(lockable_bytes=4096), {}
        yield "some memory is locked", Faults(lockable_bytes=300_000), {}
        yield "memory is taken", Faults(taken=(allocations // 2, (80 << 30) - 4096)), {}
    if place != "device":
        yield "out of memory at once", Faults(failing_allocation=3), {}
    yield "out of memory", Faults(failing_allocation=allocations * 7 // 10), {}
    yield "lost", Faults(lost_after=operations * 7 // 10), {}


if __name__ == "__main__":
    torch.set_num_threads(1)
    accelerator.install()
    folder = tempfile.mkdtemp(prefix="faults-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    os.environ["GPTJ_FT_HOME"] = f"{folder}/home"
    os.chdir(folder)
    assume_rates()
    logging.raiseExceptions = False
    places = sys.argv[1:] or list(PLACES)
    write_rows()
    try:
        for case in cases(places):
            print(json.dumps(case), file=sys.__stdout__, flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sys.__stdout__.flush()
    os._exit(0)
