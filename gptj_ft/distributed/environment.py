"""Check that all ranks of a run have the same versions and settings."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from typing import Any

import torch

from gptj_ft import __version__
from gptj_ft.errors import UsageError
from gptj_ft.system.group import Group
from gptj_ft.system.machine import cpu_kernels


def local_environment() -> dict[str, Any]:
    """Return the versions and settings of this process that decide bits or the messages between ranks."""
    return {
        "gptj-ft": __version__,
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "instructions": cpu_kernels(),
        "threads": torch.get_num_threads(),
        "command": " ".join(sys.argv[1:]),
    }


def check_same_environment(messages: Sequence[dict[str, Any]], threads: int | None = None) -> None:
    """Check that the environment of every rank equals that of rank 0.

    Args:
        messages: one of each rank, with its `local_environment` as ``facts``.
        threads: CPU threads that the recipe sets on every rank.
    """
    first = dict(messages[0]["facts"])
    if threads is not None:
        del first["threads"]  # the recipe overrides the current number
    for rank, message in enumerate(messages[1:], start=2):
        for name, value in first.items():
            if (other := message["facts"].get(name)) != value:
                fix = f"; use --set threads={min(value, other)}" if name == "threads" and other else ""
                raise UsageError(
                    f"process {rank} has {name} {other!r}, process 1 has {value!r}: it must be the same on all "
                    f"machines{fix}"
                )


def thread_warning(group: Group) -> str:
    """Warn that each of several ranks has fewer CPU threads than a single process would have; usually empty."""
    alone, now = group.threads_alone, torch.get_num_threads()
    if alone in (None, now):
        return ""
    return (
        f"each of {group.size} processes computes with {now} thread{'s' if now > 1 else ''}, one alone with {alone}: "
        f"the last bits of results may differ, unless both use --set threads={now}"
    )
