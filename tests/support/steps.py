"""Inject an event while a run computes a step: a signal, a full disk, an error."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from gptj_ft.training import compute


@contextmanager
def before_steps(action: Callable[[int], object]) -> Iterator[None]:
    """Call a function with the number of each optimizer step, from 1, before the step."""
    original = compute.train_step

    def watched(stack, optimizer, *rest):
        action(optimizer.step + 1)
        return original(stack, optimizer, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compute, "train_step", watched)
        yield


def interrupting(*steps: int, by: int = signal.SIGINT) -> AbstractContextManager[None]:
    """Send this process a signal during these steps."""
    return before_steps(lambda step: os.kill(os.getpid(), by) if step in steps else None)


def failing(step: int, error: BaseException | None = None) -> AbstractContextManager[None]:
    """Fail a step; by default with a full disk."""

    def fail(number: int) -> None:
        if number == step:
            raise error or OSError(28, "No space left on device")

    return before_steps(fail)
