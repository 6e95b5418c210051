"""An optimizer's two moments beside the weights of a model folder, each kept as the weights are.

``optimizer/exp_avg/`` and ``optimizer/exp_avg_sq/`` hold them under the names of their parameters, and in
``optimizer/state.json`` stands how many updates they have seen, from where the correction of their bias goes on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from gptj_ft.checkpoints.model_folder import Checkpoint, open_checkpoint
from gptj_ft.errors import DataError
from gptj_ft.models.layout import MOMENTS, Kind
from gptj_ft.system.files import read_text

FOLDER = "optimizer"
STATE = "state.json"


@dataclass(frozen=True)
class Moments:
    """Moments that were opened.

    Attributes:
        updates: how many they have seen.
        checkpoints: the first and the second, under Hugging Face's names of their parameters.
    """

    updates: int
    checkpoints: Mapping[Kind, Checkpoint]


def has_moments(folder: Path) -> bool:
    """Tell whether a model folder holds an optimizer's moments."""
    return (folder / FOLDER / STATE).is_file()


def count_updates(folder: Path) -> int:
    """Return how many updates the moments in a model folder have seen.

    Raises:
        DataError: it does not say.
    """
    path = folder / FOLDER / STATE
    try:
        updates = json.loads(read_text(path))["updates"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(f"{path}: cannot be read ({error!r}); convert the model again") from error
    if type(updates) is not int or updates < 0:
        raise DataError(f"{path}: updates is {updates!r}, not a number of updates; convert the model again")
    return updates


@contextmanager
def open_moments(folder: Path) -> Iterator[Moments]:
    """Open the moments in a model folder.

    Raises:
        DataError, UsageError: a file is damaged or missing.
    """
    with ExitStack() as opened:
        checkpoints = {kind: opened.enter_context(open_checkpoint(folder / FOLDER / kind)) for kind in MOMENTS}
        yield Moments(count_updates(folder), checkpoints)
