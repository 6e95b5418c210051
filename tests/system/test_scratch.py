"""Test that scratch folders of killed processes go, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gptj_ft.errors import DataError
from gptj_ft.system import paths, scratch
from gptj_ft.system.files import appending
from gptj_ft.system.jsonl import JsonLines
from gptj_ft.system.lock import LOCK, locked
from gptj_ft.system.scratch import remove_abandoned, scratch_folder


def test_killed_process_leaves_no_scratch_folder(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    if not (child := os.fork()):
        with scratch_folder(tmp_path) as folder:
            (folder / "text").write_text("private")
            os.write(writer, b".")
            os.kill(os.getpid(), 9)
    os.read(reader, 1)
    os.waitpid(child, 0)
    assert [path.name for path in next(tmp_path.iterdir()).iterdir()] == ["text"], "killed"
    with scratch_folder(tmp_path) as folder:
        assert list(tmp_path.iterdir()) == [folder]
        assert folder.stat().st_mode & 0o777 == 0o700
        remove_abandoned(tmp_path)
        assert folder.is_dir(), "in use"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("is_early", [True, False], ids=["before the lock", "while it waits for the lock"])
def test_folder_that_another_process_removes_is_made_again(is_early: bool, tmp_path: Path, monkeypatch) -> None:
    """Another process looks for abandoned folders between creation and lock."""
    made, lock = list[Path](), scratch._lock

    def lock_late(folder: Path, waits: bool) -> int | None:
        made.append(folder)
        if len(made) > 1:
            return lock(folder, waits)
        if is_early:
            folder.rmdir()
            return lock(folder, waits)
        descriptor = lock(folder, waits)
        folder.rmdir()
        return descriptor

    monkeypatch.setattr(scratch, "_lock", lock_late)
    with scratch_folder(tmp_path) as folder:
        (folder / "file").write_text("written")
        assert made == [made[0], folder]
    assert not list(tmp_path.iterdir())


def test_foreign_folders_are_never_scratch(tmp_path: Path) -> None:
    kept = [tmp_path / name for name in ("gptj-ft-scratch-backup01-old", "gptj-ft-scratch-abcd_123", "gptj-ft-mine")]
    for path in kept:
        path.mkdir(0o755)  # scratch folders are private
    (outside := tmp_path / "outside").mkdir(0o700)
    (link := tmp_path / "gptj-ft-scratch-abcd_124").symlink_to(outside)
    (tmp_path / "gptj-ft-scratch-abcd_125").write_text("a file")
    before = set(tmp_path.iterdir())
    remove_abandoned(tmp_path)
    assert set(tmp_path.iterdir()) == before
    assert link.is_symlink()
    remove_abandoned(tmp_path / "missing")


WRITES = {
    LOCK: lambda path: locked(path.parent, "training").__enter__(),
    "log.txt": appending,
    "metrics.jsonl": lambda path: JsonLines(path).append({"step": 1}),
}


@pytest.mark.parametrize("name", WRITES)
def test_hard_linked_file_is_not_written(tmp_path: Path, name: str) -> None:
    (tmp_path / "run").mkdir()
    (outside := tmp_path / "outside").write_text("kept\n")
    os.link(outside, path := tmp_path / "run" / name)
    with pytest.raises(DataError, match=rf"{name} is hard-linked: .*cp -p .*/{name} copy && mv copy .*/{name}$"):
        WRITES[name](path)
    assert outside.read_text() == "kept\n"


@pytest.mark.parametrize(
    ("mode", "message"),
    [(0o755, ""), (0o775, "can be written by its group"), (0o757, "by every user"), (0o1777, "")],
)
def test_home_others_write_is_warned_of(
    shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, message: str
) -> None:
    monkeypatch.setenv("GPTJ_FT_HOME", str(tmp_path / "home"))
    assert paths.home_warning() is None, "there is none yet"
    paths.make_home().chmod(mode)
    done = shell("models")
    assert (done.code, message in done.said, done.err.count("warning")) == (0, True, bool(message))
