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
WORDS = ("recipe", "method", "precision", "moments", "gradients", "weights", "optimizer_state")  # no path, no text

# It would send what is printed (rows, answers), command lines with their paths, code, and who and where the user is.
WANDB_PRIVATE = {
    "console": "off", "disable_code": True, "disable_git": True, "x_disable_machine_info": True, "x_disable_meta": True,
}  # fmt: skip


def check_tracker(name: str) -> None:
    """Check that a tracker is installed.

    Raises:
        UsageError: it is not.
    """
    if name != "none" and find_spec(name) is None:
        raise UsageError(f"--report-to {name}: its package is not installed; type `pip install {name}`")


@contextmanager
def tracking(run: Run, recipe: Recipe, warn: Callable[[str], None]) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Yield the receiver of each line of ``metrics.jsonl``: the file, and then the recipe's tracker.

    Whatever a tracker does wrong is said once; it gets nothing more, and the run goes on. What it prints
    goes to stderr.

    Args:
        run: run that the lines are of.
        recipe: options; ``report_to`` names the tracker.
        warn: callback for a failure of the tracker.
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
        except Exception as error:  # of libraries and services that nobody here knows
            tracker, reason = None, (str(error).splitlines() or [""])[0]
            warn(
                f"{recipe.report_to} gets no more figures: {type(error).__name__}: {reason}; training goes on, and all "
                "of them are in metrics.jsonl"
            )

    def record(line: Mapping[str, Any]) -> None:
        run.append_metrics(line)
        if tracker:
            attempt(partial(tracker.log, figures(line), step=line["step"]))

    if recipe.report_to != "none":
        attempt(start)
    try:
        yield record
    finally:
        if tracker:
            attempt(tracker.finish)


def make_tracker(run: Run, recipe: Recipe) -> GeneralTracker:
    """Return the tracker of a run, not started; a resumed run goes on in the same place."""
    from accelerate.tracking import TensorBoardTracker, TrackioTracker, WandBTracker

    if recipe.report_to == "tensorboard":
        return TensorBoardTracker("tensorboard", logging_dir=run.folder)
    facts = {"name": run.folder.name, "config": settings(recipe), "resume": "allow"}
    if recipe.report_to == "trackio":
        return TrackioTracker(PROJECT, **facts)
    began = run.recipe_file.stat().st_mtime_ns  # two runs of the same name are two
    identity = hashlib.sha256(f"{run.folder.name} {began}".encode()).hexdigest()[:16]
    return WandBTracker(PROJECT, id=identity, dir=str(run.folder), settings=WANDB_PRIVATE, **facts)


def settings(recipe: Recipe) -> dict[str, Any]:
    """Return the options of a run that say how it learns: numbers and choices, no path and no template."""
    options = recipe.to_dict()
    numbers = {key: value for key, value in options.items() if isinstance(value, int | float)}
    return {**{key: options[key] for key in WORDS}, **numbers}


def figures(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a line of ``metrics.jsonl`` by their names there; scores as ``scores/rougeL``."""
    scores = {f"scores/{name}": value for name, value in line.get("scores", {}).items()}
    return {key: value for key, value in {**line, **scores}.items() if key != "step" and isinstance(value, int | float)}
