"""Inject an event while a run computes a step or exports: a signal, a full disk, an error."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import pytest

from gptj_ft.errors import ResourceError
from gptj_ft.streaming.adamw import AdamW
from gptj_ft.training import compute, export
from gptj_ft.training.retention import CheckpointRetention


@contextmanager
def around_steps(call: Callable[..., Any]) -> Iterator[None]:
    """Replace each optimizer step by ``call(train_step, stack, optimizer, ...)``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compute, "train_step", partial(call, compute.train_step))
        yield


def before_steps(action: Callable[[int], object]) -> AbstractContextManager[None]:
    """Call a function with the number of each optimizer step, from 1, before the step."""

    def watched(train_step, stack, optimizer, *rest):
        action(optimizer.step + 1)
        return train_step(stack, optimizer, *rest)

    return around_steps(watched)


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
def full_disk_at_export() -> Iterator[None]:
    """Fail to write the model of a run, as on a full disk."""

    def full(*arguments: object) -> None:
        raise ResourceError("no space left")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "write_outcome", full)
        yield


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
