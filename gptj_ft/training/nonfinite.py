"""Detect an exploding loss, and locate the first tensor that is not finite."""

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
    """Warn once if the loss explodes but stays finite.

    The losses of single steps differ too much: one short row may have ten times the loss of the batch before. So every
    one of several successive steps must be worse:

    * three steps by a nat than the first step and than guessing, ln(vocabulary); or
    * fifteen steps than the best, which is the lowest median of up to 50 earlier steps, by a nat and by the median
      change from step to step.

    On losses drawn from normal, exponential and two-valued distributions this gives no warning for thousands of steps;
    fewer steps, or their mean, do. It reports a jump from 2.5 to 7.5 after fifteen steps.

    Args:
        vocabulary: number of tokens.
        earlier: losses of earlier sessions, which are not reported again.
        validations: their validation losses, not reported again either.
        before: validation loss before training.
    """

    def __init__(
        self,
        vocabulary: int,
        earlier: Iterable[float] = (),
        validations: Iterable[float] = (),
        before: float | None = None,
    ) -> None:
        self._guessing, self._best = math.log(vocabulary), math.inf
        self._recent: deque[float] = deque(maxlen=BEST_OF_STEPS + ABOVE_BEST_STEPS)
        self._has_warned = False
        for loss in earlier:
            self.after_step(loss)
        for loss in validations:
            self.after_validation(loss, before)

    def after_step(self, loss: float) -> str | None:
        """Add a step's loss, unless it overflowed fp16; return the warning, if any."""
        if not math.isfinite(loss):
            return None
        if not self._recent:
            self._guessing = max(self._guessing, loss)
        self._recent.append(loss)
        losses = list(self._recent)
        before, last = losses[:-ABOVE_BEST_STEPS], losses[-ABOVE_BEST_STEPS:]
        if len(before) >= 5:
            self._best = min(self._best, median(before))
        # Noisy losses need a larger margin than a nat: use the median change between successive steps.
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
        """Compare a validation loss with that before training; return the warning, if any."""
        if before is not None and loss > before + GROWTH:
            return self._warn(f"the validation loss was {before:.2f} before training and is {loss:.2f}")
        return None

    def _warn(self, text: str) -> str | None:
        if self._has_warned:
            return None
        self._has_warned = True
        return f"{text}: the run gets worse, not better; start a new one with a lower --lr, or a longer --set warmup=N"


class NonFiniteTensor(Exception):
    """The first tensor of a forward pass that is not finite."""

    def __init__(self, layer: int, name: str, is_weight: bool) -> None:
        super().__init__(layer, name)
        self.layer, self.name, self.is_weight = layer, name, is_weight


def explain_loss(
    loss_name: str, step: int, setup: TrainSetup, offloaded: OffloadedModel, forward: Callable[[], object]
) -> GptjFtError:
    """Return the error for a loss that is not finite.

    Args:
        loss_name: "loss" or "validation loss".
        step: optimizer steps done before it.
        offloaded: model with the weights of the failed pass.
        forward: repeats the pass.
    """
    tensor = find_in_forward(setup, offloaded, forward)
    if tensor and tensor.is_weight and step == 0:
        if setup.dtype == torch.float16:
            return DataError(f"{setup.model}: {tensor.name} has values beyond the range of fp16: try --precision fp32")
        return DataError(f"{setup.model}: {tensor.name} has values that are not finite: this model cannot be trained")
    place = f", first in layer {tensor.layer} counted from the embedding, in {tensor.name}" if tensor else ""
    when = f"after step {step}" if step else "before anything was trained"
    if step == 0:
        remedy = "try another --model" + (", or --precision fp32" if setup.dtype != torch.float32 else "")
    else:
        remedy = advice(setup)
    return NotFinite(f"the {loss_name} {when} is not finite{place}\n{remedy}")


def explain_gradient(error: GptjFtError, setup: TrainSetup, offloaded: OffloadedModel, step: int) -> GptjFtError:
    """Add the names of the tensors to the optimizer's error about a gradient that is not finite."""
    names = find_in_gradients(setup, offloaded, step)
    where = f"; in {listed(names, 3)}" if names else ""
    return NotFinite(f"{error}{where}\n{advice(setup)}")


def advice(setup: TrainSetup) -> str:
    """Suggest remedies for a diverging run."""
    knobs = ["a lower --lr"]
    if setup.recipe.clip_norm is None:
        knobs.append("--set clip_norm=1.0")
    if setup.dtype != torch.float32:
        knobs.append("--precision fp32")
    return f"resumed, this run would get here again: start a new one with {' or '.join(knobs)}"


def find_in_forward(
    setup: TrainSetup, offloaded: OffloadedModel, forward: Callable[[], object]
) -> NonFiniteTensor | None:
    """Repeat a forward pass; return the first weight or module output that is not finite."""

    def watch(layer: int, local: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def look(module: nn.Module, inputs: Any, output: Tensor) -> None:
            # A layer may use a weight without calling its module: check all weights when the layer itself is done.
            for name, weight in module.named_parameters(recurse=not local):
                if not is_finite(weight):
                    called = _name(setup, offloaded, layer, f"{local}.{name}".lstrip("."))
                    raise NonFiniteTensor(layer, called, is_weight=True)
            if not is_finite(output):
                own = [name for name, _ in module.named_parameters(recurse=False)]
                name = _name(setup, offloaded, layer, f"{local}.{own[0]}").rpartition(".")[0] if own else "its last sum"
                raise NonFiniteTensor(layer, f"the output of {name}" if own else name, is_weight=False)

        return look

    # Hooks exist only during this diagnosis; training itself uses none.
    with ExitStack() as hooks:
        for layer, module in enumerate(offloaded.layers):
            for local, part in module.named_modules():
                hooks.enter_context(part.register_forward_hook(watch(layer, local)))
        try:
            forward()
        except NonFiniteTensor as tensor:
            return tensor
    return None


def find_in_gradients(setup: TrainSetup, offloaded: OffloadedModel, step: int) -> list[str]:
    """Return the tensors whose stored gradients are not finite, in the first such layer of a step's backward."""
    if "grad" not in offloaded.stores:
        return []
    # Backward visits layers from the top: the first bad layer is the origin, lower layers inherit its values.
    for layer in reversed([each for each in offloaded.trained if offloaded.choice.trains(each, step - 1)]):
        gradients = flat_views(offloaded, "grad", layer)
        if names := [name for name, gradient in gradients.items() if not is_finite(gradient)]:
            return [_name(setup, offloaded, layer, name) for name in names]
    return []


def is_finite(values: Tensor) -> bool:
    """Tell whether all elements are finite, without a copy: a layer may be as large as the free memory."""
    # `aminmax` propagates NaN, and an infinity is one of the two.
    return not values.numel() or bool(torch.stack(values.detach().aminmax()).isfinite().all())


def _name(setup: TrainSetup, offloaded: OffloadedModel, layer: int, local: str) -> str:
    return name_of(setup.architecture.family, layer, local, len(offloaded.layers))
