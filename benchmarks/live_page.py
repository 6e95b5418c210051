"""Measure the cost of the page that a run writes while it trains, as a share of the run's steps.

    python benchmarks/live_page.py --model tiny --data rows.jsonl --steps 500

Times every call of the page's methods, in the training thread, and reads the process's memory before and after the
first and the last writing.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from gptj_ft import api
from gptj_ft.cli.html.live_page import LivePage
from gptj_ft.config.resolve import resolve
from gptj_ft.training.reporter import Reporter

EVENTS = ("on_activity", "on_start", "on_step", "on_validation", "on_end")


class Timed(Reporter):
    """Forward the events to a page, and add up the seconds and the memory that they take."""

    def __init__(self, page: LivePage) -> None:
        self.seconds, self.grown = 0.0, 0
        for name in EVENTS:
            setattr(self, name, partial(self._call, getattr(page, name)))

    def _call(self, event: Callable[..., None], *values: Any) -> None:
        memory, start = psutil.Process().memory_info().rss, time.perf_counter()
        event(*values)
        self.seconds += time.perf_counter() - start
        self.grown += psutil.Process().memory_info().rss - memory


def main() -> None:
    """Train a run with its page, and print what the page took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=500)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options = {"model": arguments.model, "data": str(arguments.data), "max_steps": arguments.steps}
        prepared = api.prepare_run(resolve({**options, "output": f"{folder}/run"}))
        with LivePage.of(prepared, print) as page:
            timed = Timed(page)
            result = prepared.train(timed)
    steps = result.counts.seconds
    print(
        f"{result.steps} steps, {steps:.1f} s, {1000 * steps / result.steps:.0f} ms each: the page took "
        f"{timed.seconds:.2f} s, {timed.seconds / steps:.2%} of the steps, and {timed.grown / 1e6:.1f} MB"
    )


if __name__ == "__main__":
    main()
