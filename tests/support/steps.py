"""Inject an event while a run computes a step: a signal, a full disk, an error."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from gptj_ft.streaming.adamw import AdamW
from gptj_ft.training import compute
from gptj_ft.training.retention import CheckpointRetention


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


@contextmanager
def infinite_gradient(layer: int, steps: Container[int]) -> Iterator[None]:
    """Put an infinite value into the gradient of ``mlp.fc_in.bias`` of a layer in some steps, counted from 1."""
    original = AdamW.add_gradient

    def poisoned(self, loaded):
        if loaded.index == layer and self.step + 1 in steps:
            loaded.layout.views(loaded.gradient.flat)["mlp.fc_in.bias"][3] = math.inf
        original(self, loaded)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AdamW, "add_gradient", poisoned)
        yield


@contextmanager
def scripted_losses(change: Callable[[int, float], float]) -> Iterator[None]:
    """Replace the validation loss of a step, ``change(step, loss)``, before it decides about the best state."""
    original = CheckpointRetention.after_validation

    def changed(self, state, loss, scores):
        return original(self, state, change(state.step, loss), scores)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointRetention, "after_validation", changed)
        yield
