"""A folder that appears when it is whole; what a killed process has done of it is there for the next."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gptj_ft.durable import replace_text, sync_path
from gptj_ft.errors import UsageError
from gptj_ft.formats.writing import writing
from gptj_ft.lock import LOCK, locked

PLAN = "plan.json"


def draft_name(folder: Path) -> Path:
    """Return the hidden name under which a folder is made."""
    return folder.with_name(f".{folder.name}.converting")


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
        draft.mkdir(parents=True, exist_ok=True)
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
            shutil.rmtree(draft, ignore_errors=True)
            raise


def _begin(draft: Path, plan: Mapping[str, Any]) -> None:
    """Keep what is there if it is of the same plan."""
    path = draft / PLAN
    try:
        if json.loads(path.read_text(encoding="utf-8")) == plan:
            return
    except (OSError, ValueError):
        pass  # nothing yet, or of a process that was killed before it began
    for old in draft.iterdir():
        if old.is_dir():
            shutil.rmtree(old)
        elif old.name != LOCK:
            old.unlink()
    replace_text(path, json.dumps(plan))
