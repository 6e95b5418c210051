"""Write files and folders atomically: they get their names when they are complete, or not at all."""

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
    PRIVATE_FILE,
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
    write_file,
)
from gptj_ft.system.lock import LOCK, locked

PLAN = "plan.json"  # in a resumable draft: the values that decide its content


def require_new(*paths: Path) -> None:
    """Raise `UsageError` if one of the paths exists."""
    for path in paths:
        if os.path.lexists(path):
            raise UsageError(f"{path} exists already, and nothing is overwritten; name another, or remove it")


def require_writable(*paths: Path) -> None:
    """Check that files can be written, by drafts of them: a command writes its report after hours of work.

    Raises:
        UsageError: a folder is missing or cannot be written to.
        ResourceError: the disk is full.
    """
    for path in paths:
        if not path.parent.is_dir():
            raise UsageError(f"{path}: there is no folder {path.parent}; make it, or name another")
        with disk_errors(path, other=UsageError):
            draft = draft_of(path)
            os.close(create_file(draft))
            draft.unlink()


@contextmanager
def atomic_files(*paths: Path, mode: int = PRIVATE_FILE) -> Iterator[list[TextIO]]:
    """Open new text files; sync and name them when the block ends, or remove all of them on an error.

    Args:
        mode: permissions, before the umask.

    Raises:
        UsageError: one exists, or cannot be written.
        ResourceError: the disk is full.
    """
    require_new(*paths)
    drafts = [draft_of(path) for path in paths]
    named: list[Path] = []
    with disk_errors(" and ".join(map(str, paths)), "free some, or write to another disk", UsageError):
        try:
            with ExitStack() as stack:
                files: list[TextIO] = []
                for draft in drafts:
                    descriptor = create_file(draft, mode)
                    files.append(stack.enter_context(os.fdopen(descriptor, "w", encoding="utf-8", newline="\n")))
                yield files
                for file in files:
                    file.flush()
                    os.fsync(file.fileno())
            # Not atomic as a set: after a failure, the files named so far are removed again.
            for path, draft in zip(paths, drafts, strict=True):
                give_name(draft, path)
                named.append(path)
                sync_path(path.parent)
        except (OSError, UsageError):
            for path in named:
                path.unlink(missing_ok=True)
            raise
        finally:
            for draft in drafts:
                draft.unlink(missing_ok=True)


def give_name(draft: Path, path: Path) -> None:
    """Give a file its name, unless another process has created one with that name meanwhile.

    Raises:
        UsageError: there is such a file.
    """
    try:
        os.link(draft, path)  # `rename` would overwrite it
    except FileExistsError:
        require_new(path)
        raise
    except OSError:  # a file system without hard links
        require_new(path)
        draft.rename(path)


@contextmanager
def atomic_folder(folder: Path, resume: Mapping[str, Any] | None = None) -> Iterator[Path]:
    """Yield a hidden folder to fill; sync and name it when the block ends, or remove it on an error.

    Args:
        folder: the final name, which must not exist.
        resume: JSON values that decide the content. After a kill or Ctrl-C the draft stays, and the next block with the
            same value continues it; a lock keeps other processes out. ``None``: each block starts from scratch.

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
            if os.path.lexists(folder):
                raise UsageError(f"output folder {folder} exists: another process has made it meanwhile")
        try:
            _clear_unless(draft, resume)
            yield draft
            if resume is not None:
                (draft / PLAN).unlink(missing_ok=True)
            for parent, _, _ in os.walk(draft, topdown=False):
                sync_path(Path(parent))
            draft.rename(folder)
            if resume is not None:
                # Not before: a draft without its lock's file would look free to another process, which would clear it.
                (folder / LOCK).unlink(missing_ok=True)
            sync_path(folder.parent)
        except BaseException as error:
            # KeyboardInterrupt is no Exception: a resumable draft survives Ctrl-C, but not a failure.
            if resume is None or isinstance(error, Exception):
                discard(draft)
            raise


def _clear_unless(draft: Path, resume: Mapping[str, Any] | None) -> None:
    """Keep the content of a draft with the same plan; else remove it and write the new plan."""
    path = draft / PLAN
    try:
        require_plain(draft)
        if resume is not None and json.loads(read_text(path)) == resume:
            return
    except (OSError, ValueError):
        pass  # no plan: a new draft, one of a process killed early, or a foreign folder
    for old in draft.iterdir():
        if old.name != LOCK:
            remove(old)
    if resume is not None:
        replace_text(path, json.dumps(resume))


def replace_shared(path: Path, text: str, mode: int = PRIVATE_FILE) -> None:
    """Replace a small file that other processes may replace at the same time; the last one wins, whole."""
    draft = draft_of(path)
    try:
        write_file(draft, text, mode)
        os.replace(draft, path)
    except OSError:
        discard(draft)
        raise
    sync_path(path.parent)


def draft_of(path: Path) -> Path:
    """Return this process's hidden name for a new file or folder; remove drafts of dead processes of this machine."""
    import psutil

    start = f".{path.name}.{platform.node()}."
    for draft in path.parent.glob(f"{glob.escape(start)}*.writing"):
        process = draft.name.removeprefix(start).removesuffix(".writing")
        # A draft with our own number is one of a dead process whose number the system reused.
        if process.isdigit() and (int(process) == os.getpid() or not psutil.pid_exists(int(process))):
            discard(draft)
    return path.with_name(f"{start}{os.getpid()}.writing")
