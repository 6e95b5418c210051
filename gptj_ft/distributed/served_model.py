"""Open one model in several processes, so that what is computed with it can be dealt out."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

from gptj_ft.checkpoints.fingerprint import tuned_fingerprint
from gptj_ft.config.options import Recipe
from gptj_ft.distributed.environment import check_alike, facts_here
from gptj_ft.errors import UsageError
from gptj_ft.system.group import Group
from gptj_ft.system.paths import is_tuned


def announce_model(group: Group, folder: Path, recipe: Recipe, **opening: Any) -> None:
    """Tell the other processes which model is opened, and hear that they have it, too.

    Args:
        group: the processes; the others are in `hear_model`.
        folder: model folder.
        recipe: options; its precision has been chosen.
        **opening: options of `InferenceSetup.open`.

    Raises:
        UsageError: one of them is of another version, or has other threads, or another command.
        PeerFailed: one has another model, or none; says so.
    """
    if group.size == 1:
        return
    told = {"folder": str(folder.resolve()), "recipe": recipe.model_dump(mode="json"), **opening}
    told["files"] = tuned_fingerprint(folder)
    check_alike(group.gather("model", {"facts": facts_here(), "model": told}), recipe.threads)
    group.gather("agreed", {})


def announce_end(group: Group) -> None:
    """Tell the other processes that no model is opened any more."""
    if group.size > 1:
        group.gather("model", {"facts": facts_here(), "model": None})


def hear_model(group: Group) -> dict[str, Any] | None:
    """Return the model that process 0 opens, and its options; ``None`` if it opens none any more.

    Raises:
        UsageError: it is not here, or it is another one.
    """
    said = group.gather("model", {"facts": facts_here(), "model": None})
    told = said[0]["model"]
    if told is None:
        return None
    check_alike(said, told["recipe"]["threads"])
    folder, where = Path(told["folder"]), platform.node()
    if not is_tuned(folder):
        raise UsageError(f"the model is not in {folder} on {where}: every machine needs it at the same place")
    if tuned_fingerprint(folder) != told["files"]:
        raise UsageError(f"the model in {folder} on {where} is not the one of process 1: copy it from there")
    group.gather("agreed", {})
    return dict(told)
