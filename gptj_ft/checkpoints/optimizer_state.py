"""Read the optimizer state in a model folder: Adam's two moments, stored next to the weights.

``optimizer/exp_avg/`` and ``optimizer/exp_avg_sq/`` hold the moments under the names of their parameters.
``optimizer/state.json`` holds the number of updates that the moments have seen: bias correction continues from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gptj_ft.checkpoints.model_folder import Checkpoint, open_checkpoint
from gptj_ft.errors import DataError
from gptj_ft.models.layout import MOMENTS, Kind
from gptj_ft.system.digests import read_json

FOLDER = "optimizer"
STATE = "state.json"


@dataclass(frozen=True)
class Moments:
    """Open optimizer state."""

    updates: int  # number of updates that the moments have seen
    checkpoints: Mapping[Kind, Checkpoint]  # first and second moment, under their parameters' names


def has_moments(folder: Path) -> bool:
    """Tell whether a model folder holds optimizer state."""
    return (folder / FOLDER / STATE).is_file()


def count_updates(folder: Path) -> int:
    """Return the number of updates that the moments in a model folder have seen."""
    path = folder / FOLDER / STATE
    updates = read_json(path).get("updates")
    if type(updates) is not int or updates < 0:
        raise DataError(f"{path}: updates is {updates!r}, not a number of updates; convert the model again")
    return updates


def open_moments(folder: Path) -> Moments:
    """Open the optimizer state in a model folder.

    Raises:
        DataError, UsageError: a file is damaged or missing.
    """
    return Moments(count_updates(folder), {kind: open_checkpoint(folder / FOLDER / kind) for kind in MOMENTS})
