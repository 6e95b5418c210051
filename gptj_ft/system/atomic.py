"""Write files and folders that appear under their names when they are whole, or not at all."""

from __future__ import annotations

import glob
import json
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

from gptj_ft.errors import UsageError
from gptj_ft.system.files import (
    SHARED_FILE,
    SHARED_FOLDER,
    create_file,
    discard,
    disk_errors,
    hidden_name,
    keep_folder,
    read_text,
    remove,
    replace_text,
    require_plain,
    sync_path,
)
from gptj_ft.system.lock import LOCK, locked

PLAN = "plan.json"  # in a draft that can be resumed: everything that decides its content


def require_new(*paths: Path) -> None:
    """Check that none of some files exists.

    Raises:
        UsageError: one does.
    """
    for path in paths:
        if os.path.lexists(path):
            raise UsageError(f"{path} exists already, and nothing is overwritten; name another, or remove it")


@contextmanager
def atomic_files(*paths: Path) -> Iterator[list[TextIO]]:
    """Open new text files that get their names, synced, when the block ends; remove all of them on an error.

    Raises:
        UsageError: one exists, or cannot be written.
        ResourceError: the disk is full.
    """
    require_new(*paths)
    drafts = [hidden_name(path, "writing") for path in paths]
    named: list[Path] = []
    with disk_errors(" and ".join(map(str, paths)), "free some, or write to another disk", UsageError):
        try:
            with ExitStack() as stack:
                files: list[TextIO] = []
                for draft in drafts:
                    descriptor = create_file(draft, SHARED_FILE)
                    files.append(stack.enter_context(os.fdopen(descriptor, "w", encoding="utf-8", newline="\n")))
                yield files
                for file in files:
                    file.flush()
                    os.fsync(file.fileno())
            require_new(*paths)
            for path, draft in zip(paths, drafts, strict=True):
                draft.rename(path)
                named.append(path)
                sync_path(path.parent)
        except OSError:
            for path in named:
                path.unlink(missing_ok=True)
            raise
        finally:
            for draft in drafts:
                draft.unlink(missing_ok=True)


@contextmanager
def atomic_folder(folder: Path, resume: Mapping[str, Any] | None = None) -> Iterator[Path]:
    """Yield a hidden folder to fill; it gets its name, synced, when the block ends, and is removed on an error.

    Args:
        folder: the final name, which must not exist.
        resume: everything that decides the content, as JSON holds it. After a kill or Ctrl-C the draft stays, and the
            next block with the same value finds it, while no two processes fill it; ``None``: each block begins anew.

    Raises:
        UsageError: the folder exists, cannot be written, or another process is filling its draft.
        ResourceError: the disk is full.
    """
    if os.path.lexists(folder):
        raise UsageError(f"output folder {folder} exists; name another or remove it")
    with ExitStack() as stack:
        stack.enter_context(disk_errors(folder, other=UsageError))
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = draft_of(folder) if resume is None else hidden_name(folder, "converting")
        keep_folder(draft, SHARED_FOLDER)
        if resume is not None:
            stack.enter_context(locked(draft, "converting into"))
        try:
            _clear_unless(draft, resume)
            yield draft
            for own in (PLAN, LOCK):
                (draft / own).unlink(missing_ok=True)
            sync_path(draft)
            draft.rename(folder)
            sync_path(folder.parent)
        except BaseException as error:
            if resume is None or isinstance(error, Exception):
                discard(draft)
            raise


def _clear_unless(draft: Path, resume: Mapping[str, Any] | None) -> None:
    """Keep the content of a draft if it is of the same plan; else remove it and note the plan."""
    path = draft / PLAN
    try:
        require_plain(draft)
        if resume is not None and json.loads(read_text(path)) == resume:
            return
    except (OSError, ValueError):
        pass  # nothing yet, of a process that was killed before it began, or not made here
    for old in draft.iterdir():
        if old.name != LOCK:
            remove(old)
    if resume is not None:
        replace_text(path, json.dumps(resume))


def draft_of(folder: Path) -> Path:
    """Return the hidden name, of this process alone, under which a folder is made; remove what ended processes left.

    Nothing is known of the processes of another machine that shares the disk, so their drafts stay.
    """
    import psutil

    start = f".{folder.name}.{platform.node()}."
    for draft in folder.parent.glob(f"{glob.escape(start)}*.writing"):
        process = draft.name.removeprefix(start).removesuffix(".writing")
        if process.isdigit() and (int(process) == os.getpid() or not psutil.pid_exists(int(process))):
            discard(draft)
    return folder.with_name(f"{start}{os.getpid()}.writing")
