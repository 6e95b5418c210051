"""Compare the seconds per step of two checkouts, alternating: the same model, rows and options.

    python benchmarks/versions.py /path/to/before /path/to/after --repeats 6

Prints the median step of each run, and whether the losses are bit-identical. The order alternates from run to run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROWS = Path(__file__).parents[1] / "examples" / "clinic_notes_train.jsonl"
MODEL = """
import sys
from pathlib import Path
from gptj_ft.checkpoints.tiny import make_tiny
sizes = dict(n_embd=512, n_layer=8, n_head=8, rotary_dim=64, n_positions=512)
make_tiny(Path(sys.argv[1]), [Path(sys.argv[2]).read_text()], 0, **sizes)
"""
SKIPPED = 2  # first steps of a run: caches are cold


def main() -> None:
    """Run both checkouts alternately and print their medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--place", default="disk", help="device, host or disk")
    args = parser.parse_args()
    checkouts = [args.before.resolve(), args.after.resolve()]
    medians: dict[Path, list[float]] = {checkout: [] for checkout in checkouts}
    losses = set()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        model = Path(folder) / "model"
        run_python(checkouts[0], "-c", MODEL, str(model), str(ROWS))
        for repeat in range(args.repeats):
            for checkout in checkouts if repeat % 2 == 0 else checkouts[::-1]:
                output = Path(folder) / f"run-{repeat}-{checkouts.index(checkout)}"
                options = f"--weights {args.place} --optimizer-state {args.place} --batch-size 8 --quiet".split()
                sets = [
                    f"--set={value}" for value in ("max_length=512", f"max_steps={args.steps}", "validate_every=100")
                ]
                run_python(
                    checkout, "-m", "gptj_ft", "finetune", "--recipe", "summarization", "--data", str(ROWS),
                    "--model", str(model), "--output", str(output), *options, *sets,
                )  # fmt: skip
                steps = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
                steps = [step for step in steps if "seconds" in step]
                medians[checkout].append(statistics.median(step["seconds"] for step in steps[SKIPPED:]))
                losses.add(tuple(step["loss"] for step in steps))
    for checkout, seconds in medians.items():
        print(f"{checkout}: {', '.join(f'{value:.3f}' for value in seconds)} s")
    before, after = (statistics.median(seconds) for seconds in medians.values())
    print(f"median ratio {after / before:.3f}; losses {'equal' if len(losses) == 1 else 'DIFFER'}")


def run_python(checkout: Path, *arguments: str) -> None:
    """Run Python with the package of a checkout."""
    subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(checkout)},
        check=True,
        stdout=subprocess.DEVNULL,
    )


if __name__ == "__main__":
    main()
