"""A kept checkpoint as a model folder."""

from __future__ import annotations

from pathlib import Path

from gptj_ft.checkpoint import parameters
from gptj_ft.data.prepare import load
from gptj_ft.errors import DataError, UsageError
from gptj_ft.families import read_architecture
from gptj_ft.home import is_model
from gptj_ft.keeping import find_checkpoint
from gptj_ft.outcome import write_outcome
from gptj_ft.run import Run
from gptj_ft.selection import select
from gptj_ft.tuned import Trained
from gptj_ft.verify import Checker


def export_checkpoint(run: Run, name: str, target: Path) -> int:
    """Write the state of a checkpoint as a model, like the one that a run ends with; return its step.

    Args:
        run: of which.
        name: of the checkpoint, see `keeping.find_checkpoint`.
        target: the model folder; it must not exist.

    Raises:
        UsageError: no such checkpoint, the target exists, or the model that the run started from has moved.
        DataError: the checkpoint is damaged.
        ResourceError: the disk is full.
    """
    recipe, step = run.recipe(), find_checkpoint(run, name)
    run.check_recipe(recipe)
    source = Path(recipe.model or "")
    if not is_model(source):
        raise UsageError(
            f"the model that {run.folder} started from is not in {source} any more: its tokenizer is needed"
        )
    architecture = read_architecture(source)
    selection = select(architecture, recipe)
    if damage := list(Checker(run, selection.trained).checkpoint(step)):
        raise DataError("\n".join(damage))
    report = load(run.data / "train").report
    losses = {line["step"]: line["validation_loss"] for line in run.metrics() if "validation_loss" in line}
    held_out = run.data / "validation"
    data = {
        "sha256": report.data_sha256, "rows": report.windows,
        "validation_rows": load(held_out).report.windows if held_out.exists() else 0,
    }  # fmt: skip
    metrics = {"validation_loss": losses.get(step), "baseline_validation_loss": losses.get(0), "steps": step}
    trained = Trained(recipe, source, architecture, data, metrics)
    write_outcome(target, trained, selection, parameters(run.checkpoint(step), selection.trained))
    return step
