"""Test atomic files and folders, and the names of incomplete ones."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from gptj_ft.errors import UsageError
from gptj_ft.system import atomic
from gptj_ft.system.atomic import atomic_files, atomic_folder, replace_shared
from gptj_ft.system.files import doomed_name, hidden_name, is_leftover, leftovers_in, new_name


class Killed(BaseException):
    """Ends a block as a signal does."""


@pytest.mark.parametrize("resume", [None, {"plan": 1}])
def test_folder_is_named_at_block_end(tmp_path: Path, resume) -> None:
    folder = tmp_path / "out" / "model"
    with suppress(ZeroDivisionError), atomic_folder(folder, resume) as draft:
        (draft / "part").write_text("x")
        raise ZeroDivisionError
    assert list(folder.parent.iterdir()) == []
    with atomic_folder(folder, resume) as draft:
        (draft / "whole").write_text("x")
        assert is_leftover(draft.name)
        assert not folder.exists()
    assert [path.name for path in folder.iterdir()] == ["whole"]
    with pytest.raises(UsageError, match="exists"), atomic_folder(folder, resume):
        pass


def test_draft_resumes_only_for_same_plan(tmp_path: Path) -> None:
    folder = tmp_path / "model"

    def interrupted(plan: dict[str, int]) -> list[str]:
        with suppress(Killed), atomic_folder(folder, plan) as draft:
            found = sorted(path.name for path in draft.iterdir() if path.name.startswith("done"))
            (draft / f"done-{plan['seed']}").write_text("x")
            raise Killed
        return found

    assert [interrupted({"seed": seed}) for seed in (1, 1, 2, 1)] == [[], ["done-1"], [], []]
    assert [path.name for path in leftovers_in(tmp_path)] == [".model.converting"]


def test_several_files_appear_together(tmp_path: Path) -> None:
    paths = tmp_path / "a", tmp_path / "b"
    with suppress(ZeroDivisionError), atomic_files(*paths) as (first, _):
        first.write("x")
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    with atomic_files(*paths) as (first, second):
        first.write("1")
        second.write("2")
        assert len(list(leftovers_in(tmp_path))) == 2
    assert [path.read_text() for path in paths] == ["1", "2"]
    assert [path.stat().st_mode & 0o777 for path in paths] == [0o600, 0o600]


@pytest.mark.parametrize("links", [True, False])
def test_file_of_another_process_is_not_replaced(tmp_path: Path, links: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not links:
        monkeypatch.setattr(os, "link", without_links)
    path = tmp_path / "report.md"

    def write_both() -> None:
        with atomic_files(path) as (first,), monkeypatch.context() as patch:
            first.write("first")
            patch.setattr(os, "getpid", os.getppid)
            with atomic_files(path) as (second,):
                second.write("second")

    with pytest.raises(UsageError, match="exists already"):
        write_both()
    assert [each.name for each in tmp_path.iterdir()] == ["report.md"]
    assert path.read_text() == "second"


def test_file_of_two_processes_is_that_of_the_first_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.md"
    first, second = atomic_files(path), atomic_files(path)
    (file,) = first.__enter__()
    file.write("first")
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", os.getppid)
        (other,) = second.__enter__()
    other.write("second, not whole yet")
    first.__exit__(None, None, None)
    assert path.read_text() == "first"
    with pytest.raises(UsageError, match="exists already"):
        second.__exit__(None, None, None)
    assert [each.name for each in tmp_path.iterdir()] == ["report.md"]
    assert path.read_text() == "first"


def without_links(source: Path, target: Path) -> None:
    raise PermissionError(errno.EPERM, "no hard links")


def test_shared_file_is_whole_after_two_replacements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, write_file = tmp_path / "note", atomic.write_file

    def written_between(draft: Path, text: str, mode: int) -> None:
        write_file(draft, text, mode)
        if text == "first":
            with monkeypatch.context() as patch:
                patch.setattr(os, "getpid", os.getppid)
                replace_shared(path, "second")

    monkeypatch.setattr(atomic, "write_file", written_between)
    replace_shared(path, "first")
    assert path.read_text() == "first"
    assert [each.name for each in tmp_path.iterdir()] == ["note"]


def test_every_name_of_something_unfinished_is_known(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    states = ("starting", "unmerged", "writing", "converting", "sorted")
    names = [new_name(path), doomed_name(path), *(hidden_name(path, state) for state in states)]
    assert all(is_leftover(each.name) for each in names)
    assert not any(is_leftover(name) for name in ("model", "metrics.jsonl", "model.safetensors", "step-000120"))


def test_draft_stays_locked_until_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = []

    def sync_and_enter(path: Path) -> None:
        if is_leftover(path.name) and not refused:  # another process comes while the draft is synced
            with pytest.raises(UsageError, match="is in use") as error, atomic_folder(tmp_path / "new", {"n": 1}):
                pass
            refused.append(str(error.value))

    monkeypatch.setattr(atomic, "sync_path", sync_and_enter)
    with atomic_folder(tmp_path / "new", {"n": 1}) as draft:
        (draft / "file").write_text("whole")
    assert len(refused) == 1
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["file"]


def test_nested_folders_are_synced_before_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(atomic, "sync_path", lambda path: synced.append(path.name))
    with atomic_folder(tmp_path / "new") as draft:
        (draft / "outer" / "inner").mkdir(parents=True)
    assert synced == ["inner", "outer", draft.name, tmp_path.name]


def test_folder_made_meanwhile_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def locked_late(folder: Path, work: str) -> Iterator[None]:
        (tmp_path / "new").mkdir()  # another process had the lock until now
        yield

    monkeypatch.setattr(atomic, "locked", locked_late)
    with pytest.raises(UsageError, match="another process has made it"), atomic_folder(tmp_path / "new", {"n": 1}):
        pass
    assert (tmp_path / "new").is_dir()
