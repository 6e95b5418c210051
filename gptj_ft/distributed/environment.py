"""Check that the processes of a run are alike: for the same bits, and to understand each other."""

from __future__ import annotations

import platform
import sys
from typing import Any

import torch

from gptj_ft import __version__
from gptj_ft.errors import UsageError
from gptj_ft.system.group import Group
from gptj_ft.system.machine import cpu_kernels


def facts_here() -> dict[str, Any]:
    """Return the facts that must be the same in all processes, for the same bits or a common language."""
    return {
        "gptj-ft": __version__,
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "instructions": cpu_kernels(),
        "threads": torch.get_num_threads(),
        "command": " ".join(sys.argv[1:]),
    }


def check_alike(said: list[dict[str, Any]], threads: int | None = None) -> None:
    """Check that the facts of all processes are those of the first.

    Args:
        said: facts of each.
        threads: CPU threads that all of them will have, whatever they have now; ``None``: those that they have now.

    Raises:
        UsageError: one is not.
    """
    first = dict(said[0]["facts"])
    if threads is not None:
        del first["threads"]
    for rank, each in enumerate(said[1:], start=2):
        for name, value in first.items():
            if (other := each["facts"].get(name)) != value:
                how = f": --set threads={min(value, other)} makes it so" if name == "threads" and other else ""
                raise UsageError(
                    f"process {rank} has {name} {other!r}, process 1 has {value!r}: it must be the same on all "
                    f"machines{how}"
                )


def threads_note(group: Group) -> str:
    """Say that each of several processes has fewer CPU threads than one alone would have; mostly nothing."""
    alone, now = group.threads_alone, torch.get_num_threads()
    if alone in (None, now):
        return ""
    return (
        f"each of {group.size} processes computes with {now} thread{'s' if now > 1 else ''}, one alone with {alone}: "
        f"results may differ from its in their last bits, unless both have --set threads={now}"
    )
