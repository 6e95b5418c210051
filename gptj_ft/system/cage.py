"""Limit the memory of a process by a control group of the kernel: RAM and page cache together, without swap.

Both versions of Linux' control groups are served (https://docs.kernel.org/admin-guide/cgroup-v2.html, section Memory;
cgroup-v1/memory.html). A group is made below the one that this process is in, or in version 2, where a group with
processes in it cannot have others below it that are limited, beside it. What may not be written is left as it is.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

OWN = Path("/proc/self")
EXIT_SECONDS = 10.0  # until the kernel has let go of a process that was killed
# What a process writes before it becomes the command: no thread of ours runs between its start and its cage.
ENTER = 'echo $$ > "$0" && exec "$@"'
# What is limited and read, in version 1 and 2. Swap off: what does not fit is refused, and not written elsewhere.
V1_LIMIT = "memory.limit_in_bytes"
V1_SWAP = {"memory.memsw.limit_in_bytes": "{limit}", "memory.swappiness": "0"}
V2_LIMIT = "memory.max"
V2_SWAP = {"memory.swap.max": "0", "memory.oom.group": "1"}


class NotCaged(Exception):
    """No control group may be made here; the message is the reason."""


@dataclass(frozen=True)
class Cage:
    """Control group with a limit of memory.

    Attributes:
        folder: folder of the group.
        version: version of control groups, 1 or 2.
        limit: bytes.
    """

    folder: Path
    version: int
    limit: int

    def command(self, words: Sequence[str]) -> list[str]:
        """Return a command that runs in the group, all its processes with it."""
        return ["/bin/sh", "-c", ENTER, str(self.folder / "cgroup.procs"), *words]

    @property
    def peak_bytes(self) -> int | None:
        """Most memory that the group had, page cache included; ``None``: this kernel does not say."""
        return _number(self.folder / ("memory.max_usage_in_bytes" if self.version == 1 else "memory.peak"))

    @property
    def page_cache_bytes(self) -> int:
        """Page cache that the group has now."""
        return self._counts("memory.stat").get("cache" if self.version == 1 else "file", 0)

    @property
    def is_without_swap(self) -> bool:
        """Whether nothing of the group can be swapped out: by its limit, or for want of swap on this machine."""
        name, limit = ("memory.memsw.limit_in_bytes", self.limit) if self.version == 1 else ("memory.swap.max", 0)
        return _number(self.folder / name) == limit or psutil.swap_memory().total == 0

    @property
    def num_limited(self) -> int:
        """How often the group was at its limit, so that page cache had to go."""
        if self.version == 1:
            return _number(self.folder / "memory.failcnt") or 0
        return self._counts("memory.events").get("max", 0)

    @property
    def num_killed(self) -> int:
        """How many of its processes the kernel has killed, because they needed more than the limit."""
        return self._counts("memory.oom_control" if self.version == 1 else "memory.events").get("oom_kill", 0)

    def _counts(self, name: str) -> Mapping[str, int]:
        try:
            lines = (self.folder / name).read_text(encoding="ascii").splitlines()
        except OSError:
            return {}
        return {words[0]: int(words[1]) for line in lines if len(words := line.split()) == 2}


@contextmanager
def caged(limit: int, name: str, own: Path = OWN) -> Iterator[Cage]:
    """Make a control group, and remove it at the end, when its processes have ended.

    Args:
        limit: bytes of memory.
        name: name of the group; none beside it may have it.
        own: folder that tells what this process is in, and what is mounted where.

    Raises:
        NotCaged: none may be made.
    """
    version, parent = _parent(own)
    cage = Cage(parent / name, version, limit)
    try:
        cage.folder.mkdir()
    except OSError as error:
        raise NotCaged(f"no control group may be made: {error.strerror}") from error
    try:
        _limit(cage)
        if subprocess.run(cage.command(["true"]), stderr=subprocess.DEVNULL, check=False).returncode:
            raise NotCaged("no process may be put into a control group")
        yield cage
    finally:
        _remove(cage.folder)


def _limit(cage: Cage) -> None:
    """Write the limits; those of swap, where the kernel has them.

    Raises:
        NotCaged: the limit of memory cannot be written.
    """
    memory, swap = (V1_LIMIT, V1_SWAP) if cage.version == 1 else (V2_LIMIT, V2_SWAP)
    try:
        (cage.folder / memory).write_text(str(cage.limit), encoding="ascii")
    except OSError as error:
        raise NotCaged(f"the memory of a control group may not be limited: {error.strerror}") from error
    for name, value in swap.items():
        with suppress(OSError):
            (cage.folder / name).write_text(value.format(limit=cage.limit), encoding="ascii")


def _remove(folder: Path) -> None:
    """Remove a control group, whose last process may still be ending."""
    until = time.monotonic() + EXIT_SECONDS
    while True:
        try:
            return folder.rmdir()
        except OSError:
            if time.monotonic() > until:
                return  # empty groups cost nothing, and go with the machine's next start
            time.sleep(0.05)


def _parent(own: Path) -> tuple[int, Path]:
    """Return the version of the groups that limit memory here, and the folder in which one can be made.

    Raises:
        NotCaged: there is none.
    """
    try:
        groups = _groups(own / "cgroup")
        mounts = _mounts(own / "mountinfo")
    except OSError as error:
        raise NotCaged("this system has no control groups") from error
    for root, point, kind, options in mounts:
        if kind == "cgroup" and "memory" in options:
            return 1, _inside(point, root, groups.get("memory", "/"))
    for root, point, kind, _ in mounts:
        if kind == "cgroup2":
            return 2, _delegating(_inside(point, root, groups.get("", "/")), point)
    raise NotCaged("no control groups are mounted")


def _delegating(here: Path, top: Path) -> Path:
    """Return the group of version 2, here or one above, in which others can be limited.

    Raises:
        NotCaged: neither gives its children control of memory; or this process has a limit, which it does not leave.
    """
    if _hands_on_memory(here):
        return here
    if here == top or not _hands_on_memory(here.parent):
        raise NotCaged("its control group may not have limited ones below it")
    if _number(here / V2_LIMIT) is not None:
        raise NotCaged("its control group has a limit already, and may not have limited ones below it")
    return here.parent


def _hands_on_memory(group: Path) -> bool:
    try:
        return "memory" in (group / "cgroup.subtree_control").read_text(encoding="ascii").split()
    except OSError:
        return False


def _groups(file: Path) -> dict[str, str]:
    """Return this process's group by controller; that of version 2 under an empty name."""
    found: dict[str, str] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        found |= dict.fromkeys(controllers.split(","), path)
    return found


def _mounts(file: Path) -> list[tuple[str, Path, str, list[str]]]:
    """Return root, mount point, type and options of each mounted file system (proc_pid_mountinfo(5))."""
    found = []
    for line in file.read_text(encoding="utf-8").splitlines():
        fields, _, more = line.partition(" - ")
        kind, _, options = more.split(" ", 2)
        root, point = fields.split(" ")[3:5]
        found.append((root, Path(point.replace("\\040", " ")), kind, options.split(",")))
    return found


def _inside(point: Path, root: str, group: str) -> Path:
    """Return the folder of a group; where a container sees but a part of the tree, the top of that."""
    below = group.removeprefix(root) if root != "/" else group
    folder = point / below.lstrip("/")
    return folder if folder.is_dir() and ".." not in folder.parts else point


def _number(file: Path) -> int | None:
    """Return the number in a file; ``None``: there is none, as where it says ``max``."""
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
