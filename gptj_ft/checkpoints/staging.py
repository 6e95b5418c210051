"""A folder that appears when it is whole; what a killed process has done of it is there for the next."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gptj_ft.checkpoints.writer import writing
from gptj_ft.errors import UsageError
from gptj_ft.system.files import (
    SHARED_FOLDER,
    discard,
    hidden_name,
    keep_folder,
    read_text,
    remove,
    replace_text,
    require_plain,
    sync_path,
)
from gptj_ft.system.lock import LOCK, locked

PLAN = "plan.json"


def draft_name(folder: Path) -> Path:
    """Return the hidden name under which a folder is made."""
    return hidden_name(folder, "converting")


@contextmanager
def drafted(folder: Path, plan: Mapping[str, Any]) -> Iterator[Path]:
    """Make a folder under a hidden name; it gets its own when the block ends.

    An error undoes all. After a kill, or Ctrl-C, what was done stays, and the next block with the same plan finds it.

    Args:
        folder: it must not exist.
        plan: all that decides what is written.

    Raises:
        UsageError: the folder exists, cannot be written, or another process is making it.
        ResourceError: the disk is full.
    """
    if os.path.lexists(folder):
        raise UsageError(f"output folder {folder} exists; name another or remove it")
    draft = draft_name(folder)
    with writing(folder):
        keep_folder(draft, SHARED_FOLDER)
    with locked(draft, "converting into"):
        try:
            with writing(folder):
                _begin(draft, dict(plan))
            yield draft
            with writing(folder):
                (draft / PLAN).unlink()
                (draft / LOCK).unlink(missing_ok=True)
                sync_path(draft)
                draft.rename(folder)
                sync_path(folder.parent)
        except Exception:
            discard(draft)
            raise


def _begin(draft: Path, plan: Mapping[str, Any]) -> None:
    """Keep what is there if it is of the same plan."""
    path = draft / PLAN
    try:
        require_plain(draft)
        if json.loads(read_text(path)) == plan:
            return
    except (OSError, ValueError):
        pass  # nothing yet, of a process that was killed before it began, or not made here
    for old in draft.iterdir():
        if old.name != LOCK:
            remove(old)
    replace_text(path, json.dumps(plan))
