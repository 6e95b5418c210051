"""Count the kernel launches of an optimizer step on an accelerator, without one.

    python benchmarks/launches.py
    python benchmarks/launches.py "BERT-base with dropout, bf16"

32 rows of 12 to 128 tokens in micro-batches of 2,048; model and state on the device. The simulated device of the tests
sees every operation that torch would launch. Floating point data is missing, so models have their full size.
`tests/support/launches.py` counts, and defines a launch. Prints a table: launches of forward (with the head), of
backward (with recomputation) and of updates; copies between host and device.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Count each model in one process; print a table."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests")))}
    command = [sys.executable, "-m", "support.launches", *sys.argv[1:]]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        print("| model | a step | forward | backward | updates | copies |\n|---|---|---|---|---|---|")
        for line in process.stdout or ():
            found = json.loads(line)
            numbers = (f"{found[name]:,}" for name in ("launches", "forward", "backward", "update", "copies"))
            print(f"| {found['model']} | {' | '.join(numbers)} |", flush=True)
    sys.exit(process.returncode)


if __name__ == "__main__":
    main()
