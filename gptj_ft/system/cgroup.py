"""Memory limits of control groups (cgroups): read those of this process, set one for another, without swap.

A limit counts RAM and page cache together. Both versions of Linux control groups are supported
(https://docs.kernel.org/admin-guide/cgroup-v2.html, section Memory; cgroup-v1/memory.html).
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

PROC_SELF = Path("/proc/self")
EXIT_SECONDS = 10.0  # for the kernel to release a killed process
# The shell joins the group before it becomes the command, so no thread of ours runs between fork and join.
JOIN_AND_RUN = 'echo $$ > "$0" && exec "$@"'
MEMORY_LIMIT = {1: "memory.limit_in_bytes", 2: "memory.max"}
# Swap is off: memory above the limit is refused, not swapped out. Kernels without swap accounting lack these files.
NO_SWAP = {
    1: {"memory.memsw.limit_in_bytes": "{limit}", "memory.swappiness": "0"},
    2: {"memory.swap.max": "0", "memory.oom.group": "1"},
}
# Page cache in memory.stat, with that of all groups below: the kernel drops it before it refuses memory.
PAGE_CACHE = {1: ("total_inactive_file", "total_active_file"), 2: ("inactive_file", "active_file")}
# Above memory.high the kernel does not kill, but slows a group down until it hardly runs.
UPPER_LIMITS = {1: (MEMORY_LIMIT[1],), 2: (MEMORY_LIMIT[2], "memory.high")}
MEMORY_USED = {1: "memory.usage_in_bytes", 2: "memory.current"}
UNLIMITED = 1 << 60  # bytes; version 1 has a number near 2^63 where there is no limit


class NoCgroup(Exception):
    """No memory-limited control group can be made; the message says why."""


@dataclass(frozen=True)
class Cgroup:
    """Control group with a memory limit."""

    folder: Path
    version: int  # of control groups, 1 or 2
    limit: int  # bytes

    def command(self, words: Sequence[str]) -> list[str]:
        """Return a command that runs another one, and all its child processes, in the group."""
        return ["/bin/sh", "-c", JOIN_AND_RUN, str(self.folder / "cgroup.procs"), *words]

    @property
    def peak_bytes(self) -> int | None:
        """Peak memory of the group with page cache; ``None`` on kernels that do not record it."""
        return _number(self.folder / ("memory.max_usage_in_bytes" if self.version == 1 else "memory.peak"))

    @property
    def page_cache_bytes(self) -> int:
        return self._counts("memory.stat").get("cache" if self.version == 1 else "file", 0)

    @property
    def is_without_swap(self) -> bool:
        """Whether the group cannot swap: because of its limit, or because this machine has no swap."""
        # memsw limits RAM and swap together: equal to the limit of RAM, it leaves no room for swap.
        name, limit = ("memory.memsw.limit_in_bytes", self.limit) if self.version == 1 else ("memory.swap.max", 0)
        return _number(self.folder / name) == limit or psutil.swap_memory().total == 0

    @property
    def num_limited(self) -> int:
        """How often the group reached its limit, so that the kernel dropped page cache."""
        if self.version == 1:
            return _number(self.folder / "memory.failcnt") or 0
        return self._counts("memory.events").get("max", 0)

    @property
    def num_killed(self) -> int:
        """Number of processes that the kernel killed because they needed more than the limit."""
        return self._counts("memory.oom_control" if self.version == 1 else "memory.events").get("oom_kill", 0)

    def _counts(self, name: str) -> Mapping[str, int]:
        return _counts(self.folder / name)


@dataclass(frozen=True)
class MemoryLimit:
    """Memory limit of a control group, and what its processes may still take."""

    limit: int  # bytes
    free: int  # bytes, page cache that the kernel can drop included


def memory_limits(proc: Path = PROC_SELF) -> list[MemoryLimit]:
    """Return the limits of this process's control group and of all groups above it; empty without any.

    Args:
        proc: folder of this process under ``/proc``.
    """
    try:
        version, folder, top = _own_group(proc)
    except NoCgroup:
        return []
    limits = []
    for group in (folder, *folder.parents):
        found = [number for name in UPPER_LIMITS[version] if (number := _number(group / name)) is not None]
        limit, used = min(found, default=UNLIMITED), _number(group / MEMORY_USED[version])
        if used is not None and limit < UNLIMITED:
            counts = _counts(group / "memory.stat")
            used -= sum(counts.get(name, 0) for name in PAGE_CACHE[version])
            limits.append(MemoryLimit(limit, max(0, limit - max(0, used))))
        if group == top:
            break
    return limits


@contextmanager
def limited_memory(
    limit: int, name: str, proc: Path = PROC_SELF, exit_seconds: float = EXIT_SECONDS
) -> Iterator[Cgroup]:
    """Make a control group, and remove it at the end when its processes have ended.

    Args:
        limit: bytes.
        name: unique name of the group.
        proc: folder of this process under ``/proc``.
        exit_seconds: time for the last process to exit.

    Raises:
        NoCgroup: no such group can be made.
    """
    version, parent = _parent(proc)
    group = Cgroup(parent / name, version, limit)
    try:
        group.folder.mkdir()
    except OSError as error:
        raise NoCgroup(f"no control group may be made: {error.strerror}") from error
    try:
        try:
            (group.folder / MEMORY_LIMIT[version]).write_text(str(limit), encoding="ascii")
        except OSError as error:
            raise NoCgroup(f"the memory of a control group may not be limited: {error.strerror}") from error
        # Only now: the kernel rejects a memsw below the limit of RAM, which is unlimited at first.
        for file, value in NO_SWAP[version].items():
            with suppress(OSError):
                (group.folder / file).write_text(value.format(limit=limit), encoding="ascii")
        # Version 2 may forbid moving a process into a group that it allowed us to make.
        if subprocess.run(group.command(["true"]), stderr=subprocess.DEVNULL, check=False).returncode:
            raise NoCgroup("no process may be put into a control group")
        yield group
    finally:
        _remove(group.folder, exit_seconds)


def _remove(folder: Path, seconds: float) -> None:
    """Remove a control group whose last process may still be exiting."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            return folder.rmdir()
        except OSError:
            time.sleep(0.05)
    # An empty group costs nothing and disappears when the machine restarts.


def _parent(proc: Path) -> tuple[int, Path]:
    """Return the version of the memory controller, and the folder in which a group can be made."""
    version, own, top = _own_group(proc)
    return version, own if version == 1 else _delegating(own, top)


def _own_group(proc: Path) -> tuple[int, Path, Path]:
    """Return the version of the memory controller, this process's group, and the topmost group that it can see."""
    try:
        groups, mounts = _groups(proc / "cgroup"), _mounts(proc / "mountinfo")
    except OSError as error:
        raise NoCgroup("this system has no control groups") from error
    # On a hybrid system both are mounted, and version 1 has the memory controller.
    for root, mount, kind, options in mounts:
        if kind == "cgroup" and "memory" in options:
            return 1, _folder(mount, root, groups.get("memory", "/")), mount
    for root, mount, kind, _ in mounts:
        if kind == "cgroup2":
            return 2, _folder(mount, root, groups.get("", "/")), mount
    raise NoCgroup("no control groups are mounted")


def _delegating(own: Path, top: Path) -> Path:
    """Return the version-2 group of this process, or the one above, whichever can have limited children."""
    if _delegates_memory(own):
        return own
    # Version 2 forbids limited children below a group that has processes: make a sibling of our own group instead.
    if own == top or not _delegates_memory(own.parent):
        raise NoCgroup("its control group may not have limited ones below it")
    if _number(own / MEMORY_LIMIT[2]) is not None:  # a batch system's limit must not be escaped
        raise NoCgroup("its control group has a limit already, and may not have limited ones below it")
    return own.parent


def _delegates_memory(group: Path) -> bool:
    try:
        return "memory" in (group / "cgroup.subtree_control").read_text(encoding="ascii").split()
    except OSError:
        return False


def _groups(file: Path) -> dict[str, str]:
    """Read this process's group for each controller; the key of version 2 is empty."""
    groups: dict[str, str] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        groups |= dict.fromkeys(controllers.split(","), path)
    return groups


def _mounts(file: Path) -> list[tuple[str, Path, str, list[str]]]:
    """Read root, mount point, type and options of each mounted file system (proc_pid_mountinfo(5))."""
    mounts = []
    for line in file.read_text(encoding="utf-8").splitlines():
        # The number of optional fields before the hyphen varies, so count from both ends.
        fields, _, more = line.partition(" - ")
        kind, _, options = more.split(" ", 2)
        root, point = fields.split(" ")[3:5]
        mounts.append((root, Path(point.replace("\\040", " ")), kind, options.split(",")))
    return mounts


def _folder(mount: Path, root: str, group: str) -> Path:
    """Return the folder of a group, or the mount point if a container sees only part of the tree."""
    below = group.removeprefix(root) if root != "/" else group
    folder = mount / below.lstrip("/")
    return folder if folder.is_dir() and ".." not in folder.parts else mount


def _counts(file: Path) -> dict[str, int]:
    """Read lines of a name and a number; empty if the file is missing."""
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    return {words[0]: int(words[1]) for line in lines if len(words := line.split()) == 2}


def _number(file: Path) -> int | None:
    """Read a number; ``None`` if the file is missing or says ``max``."""
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
