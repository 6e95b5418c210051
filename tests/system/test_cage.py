"""Control groups: what is in one is held to its limit; where none may be made, that is said."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from gptj_ft.system.cage import Cage, NotCaged, caged

LIMIT = 64 * 2**20
TAKE = "held = bytearray({size}); print(len(held))"


@pytest.fixture
def cage() -> Iterator[Cage]:
    try:
        with caged(LIMIT, f"gptj-ft-test-{id(object())}") as made:
            yield made
    except NotCaged as reason:
        pytest.skip(f"no control group may be made here: {reason}")


def run_in(cage: Cage, size: int) -> int:
    return subprocess.run(cage.command([sys.executable, "-c", TAKE.format(size=size)]), check=False).returncode


def test_a_process_gets_the_memory_of_its_cage_and_no_more(cage: Cage) -> None:
    assert (run_in(cage, LIMIT // 2), cage.num_killed) == (0, 0)
    assert cage.peak_bytes is None or LIMIT // 2 < cage.peak_bytes <= LIMIT
    assert (run_in(cage, 2 * LIMIT) != 0, cage.num_killed) == (True, 1)


def test_a_cage_is_gone_afterwards() -> None:
    try:
        with caged(LIMIT, "gptj-ft-test-gone") as cage:
            run_in(cage, 1)
    except NotCaged as reason:
        pytest.skip(f"no control group may be made here: {reason}")
    assert not cage.folder.exists()


def described(folder: Path, group: str, mount: str) -> Path:
    """Write what the kernel tells a process of its groups, and make the folders that it names."""
    own = folder / "self"
    own.mkdir()
    (own / "cgroup").write_text(f"{group}\n")
    (own / "mountinfo").write_text(f"30 24 0:26 / {folder}/tree rw,nosuid - {mount}\n")
    tree = folder / "tree" / group.rpartition(":")[2].lstrip("/")
    tree.mkdir(parents=True)
    return own


def test_version_2_makes_it_beside_a_group_that_has_processes(tmp_path: Path, monkeypatch) -> None:
    own = described(tmp_path, "0::/user.slice/session-3.scope", "cgroup2 cgroup2 rw")
    slice_ = tmp_path / "tree" / "user.slice"
    (slice_ / "cgroup.subtree_control").write_text("cpu memory pids\n")
    (slice_ / "session-3.scope" / "memory.max").write_text("max\n")
    monkeypatch.setattr("gptj_ft.system.cage._remove", lambda folder: None)  # these files are no kernel's
    with caged(3 * 2**30, "proof", own) as cage:
        assert cage.folder == slice_ / "proof"
        written = {file.name: file.read_text() for file in cage.folder.iterdir()}
        assert written.pop("cgroup.procs").strip().isdigit(), "nobody has tried to get in"
        assert written == {"memory.max": str(3 * 2**30), "memory.swap.max": "0", "memory.oom.group": "1"}
        assert cage.is_without_swap
        (cage.folder / "memory.swap.max").write_text("max\n")
        monkeypatch.setattr("psutil.swap_memory", lambda: SimpleNamespace(total=2**30))
        assert not cage.is_without_swap
        (cage.folder / "memory.events").write_text("low 0\nhigh 0\nmax 7\noom 2\noom_kill 1\n")
        (cage.folder / "memory.stat").write_text("anon 5\nfile 4096\n")
        assert (cage.num_limited, cage.num_killed, cage.page_cache_bytes, cage.peak_bytes) == (7, 1, 4096, None)
        (cage.folder / "memory.peak").write_text("123\n")
        assert cage.peak_bytes == 123


def test_a_group_that_no_process_gets_into_is_no_cage(tmp_path: Path, monkeypatch) -> None:
    own = described(tmp_path, "0::/user.slice/session-3.scope", "cgroup2 cgroup2 rw")
    (tmp_path / "tree" / "user.slice" / "cgroup.subtree_control").write_text("memory\n")
    (tmp_path / "tree" / "user.slice" / "session-3.scope" / "memory.max").write_text("max\n")
    monkeypatch.setattr("gptj_ft.system.cage.ENTER", "exit 1")
    monkeypatch.setattr("gptj_ft.system.cage._remove", lambda folder: None)
    with pytest.raises(NotCaged, match="no process may be put"), caged(LIMIT, "proof", own):
        pass


@pytest.mark.parametrize(
    ("control", "limit", "reason"),
    [
        ("cpu pids", "max", "may not have limited ones below it"),
        ("memory", "1000000000", "has a limit already"),  # of a batch system: it is not escaped
    ],
)
def test_a_group_that_may_not_be_left_is_not_left(tmp_path: Path, control: str, limit: str, reason: str) -> None:
    own = described(tmp_path, "0::/job/step", "cgroup2 cgroup2 rw")
    (tmp_path / "tree" / "job" / "cgroup.subtree_control").write_text(control)
    (tmp_path / "tree" / "job" / "step" / "memory.max").write_text(limit)
    with pytest.raises(NotCaged, match=reason), caged(LIMIT, "proof", own):
        pass
    assert {path.name for path in (tmp_path / "tree" / "job").iterdir()} == {"cgroup.subtree_control", "step"}


def test_without_control_groups_the_reason_is_said(tmp_path: Path) -> None:
    with pytest.raises(NotCaged, match="has no control groups"), caged(LIMIT, "proof", tmp_path):
        pass
    own = described(tmp_path, "0::/", "ext4 /dev/sda rw")
    with pytest.raises(NotCaged, match="are mounted"), caged(LIMIT, "proof", own):
        pass
