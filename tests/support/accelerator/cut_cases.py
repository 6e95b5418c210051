"""Kill and stop commands on a simulated device, resume them, and print the outcomes as JSON.

Each command runs in a fork, since a killed one cannot report; this process only imports.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from support import accelerator
from support.accelerator import Faults
from support.accelerator.__main__ import assume_rates
from support.accelerator.fault_cases import LINE, PLACES, command, digest, write_rows

SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGTERM}


def in_fork(line: str, faults: Faults = Faults()) -> dict[str, Any]:
    """Run a command in a fork; return its exit code (the negative number of a fatal signal), output and operations."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        with os.fdopen(writer, "w") as pipe:
            found, simulation = command(line, faults=faults)
            json.dump({**found, "operations": simulation.num_operations}, pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        report = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return json.loads(report) if report else {"code": code, "said": "", "races": 0, "operations": 0}


def cases(places: Sequence[str], points: int) -> Iterator[dict[str, Any]]:
    """Yield the run without a cut, then each cut with the resumed run's output and the digest of its model.

    Args:
        points: cuts of each run by each signal, spread over its operations.
    """
    for place in places:
        line = f"{LINE} {PLACES[place]}"
        straight = in_fork(f"{line} --output {place}")
        yield {"cut": "none", "place": place, **straight, "numbers": digest(place)}
        for (cut, number), point in ((each, point) for each in SIGNALS.items() for point in range(points)):
            name, at = f"{place}-{cut}-{point}", straight["operations"] * (2 * point + 1) // (2 * points)
            first = in_fork(f"{line} --output {name}", Faults(signal=(at, number)))
            is_new = not Path(name, "recipe.yaml").exists()  # cut before the run began
            after = in_fork(f"{line} --output {name}" if is_new else f"finetune --resume {name}")
            yield {"cut": cut, "place": place, "at": at, **first, "after": after, "numbers": digest(name)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    accelerator.install()
    folder = tempfile.mkdtemp(prefix="cuts-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    os.environ["GPTJ_FT_HOME"] = f"{folder}/home"
    os.chdir(folder)
    assume_rates()
    write_rows()
    try:
        for case in cases(sys.argv[2:] or list(PLACES), int(sys.argv[1])):
            print(json.dumps(case), file=sys.__stdout__, flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sys.__stdout__.flush()
    os._exit(0)
