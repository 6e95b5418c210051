"""Send the metrics of a run to TensorBoard, Trackio or Weights & Biases, through accelerate."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from gptj_ft.config.options import Recipe
from gptj_ft.config.run_folder import Run
from gptj_ft.errors import UsageError

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

PROJECT = "gptj-ft"
# No paths and no text.
SENT_OPTIONS = ("recipe", "method", "precision", "moments", "gradients", "weights", "optimizer_state")

# By default, wandb sends printed rows and answers, command lines with paths, code, and facts of user and machine.
WANDB_PRIVATE = {
    "console": "off", "disable_code": True, "disable_git": True, "x_disable_machine_info": True, "x_disable_meta": True,
}  # fmt: skip


def check_tracker(name: str) -> None:
    """Raise `UsageError` if the tracker's package is not installed."""
    if name != "none" and find_spec(name) is None:
        raise UsageError(f"--report-to {name}: its package is not installed; type `pip install {name}`")


@contextmanager
def tracking(run: Run, recipe: Recipe, warn: Callable[[str], None]) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Yield a function that writes a line to ``metrics.jsonl`` and sends it to the recipe's tracker.

    After a failure of the tracker the run continues without it. Output that it prints goes to stderr.

    Args:
        recipe: ``report_to`` names the tracker.
        warn: called after a failure of the tracker.
    """
    tracker: GeneralTracker | None = None

    def start() -> None:
        nonlocal tracker
        made = make_tracker(run, recipe)
        made.start()
        tracker = made

    def attempt(action: Callable[[], None]) -> None:
        nonlocal tracker
        try:
            with redirect_stdout(sys.stderr):
                action()
        except Exception as error:  # trackers raise errors of their own libraries
            tracker, reason = None, (str(error).splitlines() or [""])[0]
            warn(
                f"{recipe.report_to} gets no more metrics: {type(error).__name__}: {reason}; training continues, and "
                "metrics.jsonl has all of them"
            )

    def record(line: Mapping[str, Any]) -> None:
        # The file first: a failing tracker must not lose a line.
        run.append_metrics(line)
        if tracker:
            attempt(partial(tracker.log, sent_numbers(line), step=line["step"]))

    if recipe.report_to != "none":
        attempt(start)
    try:
        yield record
    finally:
        if tracker:
            attempt(tracker.finish)


def make_tracker(run: Run, recipe: Recipe) -> GeneralTracker:
    """Return the tracker of a run, not started; a resumed run continues the same record."""
    from accelerate.tracking import TensorBoardTracker, TrackioTracker, WandBTracker

    if recipe.report_to == "tensorboard":
        return TensorBoardTracker("tensorboard", logging_dir=run.folder)
    facts = {"name": run.folder.name, "config": settings(recipe), "resume": "allow"}
    if recipe.report_to == "trackio":
        return TrackioTracker(PROJECT, **facts)
    created = run.recipe_file.stat().st_mtime_ns  # distinguishes runs of the same name
    identity = hashlib.sha256(f"{run.folder.name} {created}".encode()).hexdigest()[:16]
    return WandBTracker(PROJECT, id=identity, dir=str(run.folder), settings=WANDB_PRIVATE, **facts)


def settings(recipe: Recipe) -> dict[str, Any]:
    """Return the options to send to a tracker: numbers and choices, no paths and no templates."""
    options = recipe.to_dict()
    numbers = {key: value for key, value in options.items() if isinstance(value, int | float)}
    return {**{key: options[key] for key in SENT_OPTIONS}, **numbers}


def sent_numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a line of ``metrics.jsonl``, scores under names like ``scores/rougeL``."""
    scores = {f"scores/{name}": value for name, value in line.get("scores", {}).items()}
    return {key: value for key, value in {**line, **scores}.items() if key != "step" and isinstance(value, int | float)}
