"""Test memory-limited control groups: enforced limits, swap, removal, those that this process is in."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from gptj_ft.system.cgroup import Cgroup, MemoryLimit, NoCgroup, limited_memory, memory_limits

LIMIT = 64 * 2**20
TAKE = "held = bytearray({size}); print(len(held))"


@pytest.fixture
def group() -> Iterator[Cgroup]:
    try:
        with limited_memory(LIMIT, f"gptj-ft-test-{id(object())}") as made:
            yield made
    except NoCgroup as reason:
        pytest.skip(f"no control group may be made here: {reason}")


def run_in(group: Cgroup, size: int) -> int:
    return subprocess.run(group.command([sys.executable, "-c", TAKE.format(size=size)]), check=False).returncode


def test_kernel_kills_processes_above_the_limit(group: Cgroup) -> None:
    assert (run_in(group, LIMIT // 2), group.num_killed) == (0, 0)
    assert group.peak_bytes is None or LIMIT // 2 < group.peak_bytes <= LIMIT
    assert (run_in(group, 2 * LIMIT) != 0, group.num_killed) == (True, 1)


def test_group_is_removed_at_the_end() -> None:
    try:
        with limited_memory(LIMIT, "gptj-ft-test-gone") as group:
            run_in(group, 1)
    except NoCgroup as reason:
        pytest.skip(f"no control group may be made here: {reason}")
    assert not group.folder.exists()


def described(folder: Path, group: str, mount: str) -> Path:
    """Write the files of a process under /proc, and make the folders that they name."""
    own = folder / "self"
    own.mkdir()
    (own / "cgroup").write_text(f"{group}\n")
    (own / "mountinfo").write_text(f"30 24 0:26 / {folder}/tree rw,nosuid - {mount}\n")
    tree = folder / "tree" / group.rpartition(":")[2].lstrip("/")
    tree.mkdir(parents=True)
    return own


def test_version_2_makes_a_sibling_group(tmp_path: Path, monkeypatch) -> None:
    own = described(tmp_path, "0::/user.slice/session-3.scope", "cgroup2 cgroup2 rw")
    slice_ = tmp_path / "tree" / "user.slice"
    (slice_ / "cgroup.subtree_control").write_text("cpu memory pids\n")
    (slice_ / "session-3.scope" / "memory.max").write_text("max\n")
    with limited_memory(3 * 2**30, "proof", own, exit_seconds=0.0) as group:
        assert group.folder == slice_ / "proof"
        written = {file.name: file.read_text() for file in group.folder.iterdir()}
        assert written.pop("cgroup.procs").strip().isdigit(), "no process has tried to join"
        assert written == {"memory.max": str(3 * 2**30), "memory.swap.max": "0", "memory.oom.group": "1"}
        assert group.is_without_swap
        (group.folder / "memory.swap.max").write_text("max\n")
        monkeypatch.setattr("psutil.swap_memory", lambda: SimpleNamespace(total=2**30))
        assert not group.is_without_swap
        (group.folder / "memory.events").write_text("low 0\nhigh 0\nmax 7\noom 2\noom_kill 1\n")
        (group.folder / "memory.stat").write_text("anon 5\nfile 4096\n")
        assert (group.num_limited, group.num_killed, group.page_cache_bytes, group.peak_bytes) == (7, 1, 4096, None)
        (group.folder / "memory.peak").write_text("123\n")
        assert group.peak_bytes == 123


def test_group_that_rejects_processes_is_not_used(tmp_path: Path, monkeypatch) -> None:
    own = described(tmp_path, "0::/user.slice/session-3.scope", "cgroup2 cgroup2 rw")
    (tmp_path / "tree" / "user.slice" / "cgroup.subtree_control").write_text("memory\n")
    (tmp_path / "tree" / "user.slice" / "session-3.scope" / "memory.max").write_text("max\n")
    monkeypatch.setattr("gptj_ft.system.cgroup.JOIN_AND_RUN", "exit 1")
    with pytest.raises(NoCgroup, match="no process may be put"), limited_memory(LIMIT, "proof", own, 0.0):
        pass


@pytest.mark.parametrize(
    ("control", "limit", "reason"),
    [
        ("cpu pids", "max", "may not have limited ones below it"),
        ("memory", "1000000000", "has a limit already"),  # set by a batch system
    ],
)
def test_limited_group_is_not_escaped(tmp_path: Path, control: str, limit: str, reason: str) -> None:
    own = described(tmp_path, "0::/job/step", "cgroup2 cgroup2 rw")
    (tmp_path / "tree" / "job" / "cgroup.subtree_control").write_text(control)
    (tmp_path / "tree" / "job" / "step" / "memory.max").write_text(limit)
    with pytest.raises(NoCgroup, match=reason), limited_memory(LIMIT, "proof", own):
        pass
    assert {path.name for path in (tmp_path / "tree" / "job").iterdir()} == {"cgroup.subtree_control", "step"}


@pytest.mark.parametrize(
    ("group", "mount", "names", "cache"),
    [
        ("0::/job/step", "cgroup2 cgroup2 rw", ("memory.max", "memory.current"), ("inactive_file", "active_file")),
        (
            "4:memory:/job/step",
            "cgroup cgroup rw,memory",
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            ("total_inactive_file", "total_active_file"),
        ),
    ],
)
def test_limits_of_all_groups_above_count(tmp_path: Path, group: str, mount: str, names, cache) -> None:
    own = described(tmp_path, group, mount)
    no_limit = "max" if "cgroup2" in mount else str(2**63 - 4096)
    for folder, limit, used in (("", no_limit, 90), ("job", "1000", 800), ("job/step", "600", 500)):
        (tmp_path / "tree" / folder / names[0]).write_text(f"{limit}\n")
        (tmp_path / "tree" / folder / names[1]).write_text(f"{used}\n")
    (tmp_path / "tree" / "job" / "memory.stat").write_text(f"rss 7\n{cache[0]} 100\n{cache[1]} 20\n")
    assert memory_limits(own) == [MemoryLimit(600, free=100), MemoryLimit(1000, free=1000 - 800 + 120)]
    if "cgroup2" in mount:
        (tmp_path / "tree" / "job/step" / "memory.high").write_text("550\n")
        assert memory_limits(own)[0] == MemoryLimit(550, free=50)
    assert memory_limits(tmp_path / "no-such-system") == []


@pytest.mark.thorough
def test_free_memory_is_within_the_group_of_the_process(group: Cgroup) -> None:
    code = "import torch; from gptj_ft.system.machine import free_memory as f; print(f(torch.device('cpu')))"
    with limited_memory(2 * 2**30, f"gptj-ft-test-{id(object())}") as roomy:
        words = roomy.command([sys.executable, "-c", code])
        free = int(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    assert 0 < free <= 2 * 2**30 - 50 * 2**20, "the interpreter and torch take some"


def test_missing_control_groups_give_a_reason(tmp_path: Path) -> None:
    with pytest.raises(NoCgroup, match="has no control groups"), limited_memory(LIMIT, "proof", tmp_path):
        pass
    own = described(tmp_path, "0::/", "ext4 /dev/sda rw")
    with pytest.raises(NoCgroup, match="are mounted"), limited_memory(LIMIT, "proof", own):
        pass
