"""Locate the first tensor that is not finite after a failure; detect a finite loss that explodes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from gptj_ft.errors import DataError, GptjFtError, NotFinite, listed
from gptj_ft.models.lora import name_of
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.streaming.open import flat_views
from gptj_ft.training.setup import TrainSetup

GROWTH = 1.0  # nats
WORSE_THAN_GUESSING_STEPS = 3
ABOVE_BEST_STEPS = 15
BEST_OF_STEPS = 50


class LossWatch:
    """Notices, once, that a loss has exploded though it is finite.

    Steps differ: a batch of one short row may well have ten times the loss of the one before. So a step alone says
    nothing, and a mean little. What says something is that *every one* of several steps in a row is worse:

    * three of them by a nat than the run's first step and than guessing among all tokens, ln(vocabulary); or
    * fifteen of them than the best that the run has been at, the lowest median of up to 50 steps before them, by a nat
      and by as much as the loss usually changes from one step to the next.

    On losses drawn from normal, exponential and two-valued distributions this stays quiet for thousands of steps; with
    fewer steps in a row, or with their mean, it does not. A jump from 2.5 to 7.5 is told after fifteen steps.

    Args:
        vocabulary: number of tokens.
        earlier: losses of the run's steps in earlier sessions, which said then what was to be said.
    """

    def __init__(self, vocabulary: int, earlier: Iterable[float] = ()) -> None:
        self._guessing, self._best = math.log(vocabulary), math.inf
        self._recent: deque[float] = deque(maxlen=BEST_OF_STEPS + ABOVE_BEST_STEPS)
        self._has_warned = False
        for loss in earlier:
            self.after_step(loss)

    def after_step(self, loss: float) -> str | None:
        """Take note of a step's loss, unless it overflowed fp16; return the warning if there is one."""
        if not math.isfinite(loss):
            return None
        if not self._recent:
            self._guessing = max(self._guessing, loss)
        self._recent.append(loss)
        losses = list(self._recent)
        before, last = losses[:-ABOVE_BEST_STEPS], losses[-ABOVE_BEST_STEPS:]
        if len(before) >= 5:
            self._best = min(self._best, median(before))
        limit = self._best + max(GROWTH, median(abs(a - b) for a, b in pairwise(losses)) if before else 0.0)
        if (
            len(losses) >= WORSE_THAN_GUESSING_STEPS
            and min(last[-WORSE_THAN_GUESSING_STEPS:]) > self._guessing + GROWTH
        ):
            return self._warn(f"the loss is {loss:.2f}, more than that of guessing")
        if min(last) > limit:
            return self._warn(f"the loss was {self._best:.2f} and is {loss:.2f}")
        return None

    def after_validation(self, loss: float, before: float | None) -> str | None:
        """Compare a validation loss with that before training; return the warning if there is one."""
        if before is not None and loss > before + GROWTH:
            return self._warn(f"the validation loss was {before:.2f} before training and is {loss:.2f}")
        return None

    def _warn(self, what: str) -> str | None:
        if self._has_warned:
            return None
        self._has_warned = True
        return f"{what}: the run gets worse, not better; start a new one with a lower --lr, or a longer --set warmup=N"


class NonFiniteTensor(Exception):
    """The first thing in a forward pass that is not finite."""

    def __init__(self, layer: int, name: str, is_weight: bool) -> None:
        super().__init__(layer, name)
        self.layer, self.name, self.is_weight = layer, name, is_weight


def explain_loss(
    what: str, step: int, setup: TrainSetup, offloaded: OffloadedModel, forward: Callable[[], object]
) -> GptjFtError:
    """Return the error for a loss that is not finite.

    Args:
        what: "loss" or "validation loss".
        step: optimizer steps done before it.
        setup: recipe and model of the run.
        offloaded: model with the weights it was computed with.
        forward: callback that computes it once more.
    """
    found = find_in_forward(setup, offloaded, forward)
    if found and found.is_weight and step == 0:
        if setup.dtype == torch.float16:
            return DataError(f"{setup.model}: {found.name} has values that fp16 does not hold: try --precision fp32")
        return DataError(f"{setup.model}: {found.name} has values that are not finite: this model cannot be trained")
    place = f", first in layer {found.layer} counted from the embedding, in {found.name}" if found else ""
    when = f"after step {step}" if step else "before anything was trained"
    if step == 0:
        help_ = "try another --model" + (", or --precision fp32" if setup.dtype != torch.float32 else "")
    else:
        help_ = advice(setup)
    return NotFinite(f"the {what} {when} is not finite{place}\n{help_}")


def explain_gradient(error: GptjFtError, setup: TrainSetup, offloaded: OffloadedModel) -> GptjFtError:
    """Return the error of an optimizer that was given a gradient that is not finite, with the tensors it is in."""
    names = find_in_gradients(setup, offloaded)
    where = f"; in {listed(names, 3)}" if names else ""
    return NotFinite(f"{error}{where}\n{advice(setup)}")


def advice(setup: TrainSetup) -> str:
    """Suggest remedies for a run whose numbers have grown out of bounds."""
    knobs = ["a lower --lr"]
    if setup.recipe.clip_norm is None:
        knobs.append("--set clip_norm=1.0")
    if setup.dtype != torch.float32:
        knobs.append("--precision fp32")
    return f"resumed, this run would get here again: start a new one with {' or '.join(knobs)}"


def find_in_forward(
    setup: TrainSetup, offloaded: OffloadedModel, forward: Callable[[], object]
) -> NonFiniteTensor | None:
    """Return the first module whose weights or output are not finite in a forward pass."""

    def watch(layer: int, local: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def look(module: nn.Module, inputs: Any, output: Tensor) -> None:
            # Of a layer as a whole, every weight, because it may use some without calling the module they are in.
            for name, weight in module.named_parameters(recurse=not local):
                if not is_finite(weight):
                    called = _name(setup, offloaded, layer, f"{local}.{name}".lstrip("."))
                    raise NonFiniteTensor(layer, called, is_weight=True)
            if not is_finite(output):
                own = [name for name, _ in module.named_parameters(recurse=False)]
                name = _name(setup, offloaded, layer, f"{local}.{own[0]}").rpartition(".")[0] if own else "its last sum"
                raise NonFiniteTensor(layer, f"the output of {name}" if own else name, is_weight=False)

        return look

    with ExitStack() as hooks:
        for layer, module in enumerate(offloaded.layers):
            for local, part in module.named_modules():
                hooks.enter_context(part.register_forward_hook(watch(layer, local)))
        try:
            forward()
        except NonFiniteTensor as found:
            return found
    return None


def find_in_gradients(setup: TrainSetup, offloaded: OffloadedModel) -> list[str]:
    """Return the tensors whose gradients are not finite, in the layer that backward came to first; none if not kept."""
    if "grad" not in offloaded.stores:
        return []
    for layer in reversed(offloaded.trained):
        gradients = flat_views(offloaded, "grad", layer)
        if names := [name for name, gradient in gradients.items() if not is_finite(gradient)]:
            return [_name(setup, offloaded, layer, name) for name in names]
    return []


def is_finite(values: Tensor) -> bool:
    """Tell whether every element is; without a copy, since a layer may be as large as what is left of the memory."""
    return not values.numel() or bool(torch.stack(values.detach().aminmax()).isfinite().all())


def _name(setup: TrainSetup, offloaded: OffloadedModel, layer: int, local: str) -> str:
    return name_of(setup.architecture.family, layer, local, len(offloaded.layers))
