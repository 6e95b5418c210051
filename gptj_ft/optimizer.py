"""AdamW over stores, layer by layer: updates applied just in time, exact clipping by the global norm.

The global norm is known only when every layer's gradient is. So a step leaves its update *pending*: the next pass
upwards applies it to each layer as that layer comes by, and computes with the fresh weights at once. Never stale.
Without clipping nothing has to wait, and a layer is updated as soon as backward has its gradient; unless the state is
on disk, where the stored gradients are also what makes a step survive a crash (see `checkpoint`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gptj_ft.errors import GptjFtError
from gptj_ft.recipe import Recipe
from gptj_ft.stack import LayerStack, Loaded, Visit
from gptj_ft.stores import Kind
from gptj_ft.streaming import stream


@dataclass(frozen=True)
class Update:
    """What turns a step's gradients into new weights: known once all of them are."""

    step: int
    lr: float
    clip: float


class AdamW:
    """AdamW (https://arxiv.org/abs/1711.05101) by torch's formula and kernel; decay skips biases and norms.

    The parameters live in fp32 in kind ``master``, or in ``weight`` itself where the computation is fp32.
    """

    def __init__(self, stack: LayerStack, recipe: Recipe, step: int = 0) -> None:
        self._stack, self._recipe = stack, recipe
        self.state: tuple[Kind, ...] = (stack.parameter, "exp_avg", "exp_avg_sq")
        self.kinds: tuple[Kind, ...] = tuple(dict.fromkeys(("weight", *self.state)))
        self.step = step
        self._lr = 0.0
        # Gradients that have a store wait there for the norm, and for a crash after which they are applied again.
        self._defers = "grad" in stack.stores
        self._pending: Update | None = None
        self._waiting: set[int] = set()  # layers that the pending update has not reached
        self._layer_norms: dict[int, Tensor] = {}

    def begin(self, lr: float) -> None:
        """Start a step at this learning rate."""
        self._lr = lr
        self._layer_norms = {}

    def end(self) -> float:
        """End the step once backward is through; its update becomes pending.

        Returns:
            The global gradient norm, before clipping.

        Raises:
            GptjFtError: it is not finite; nothing of this step has touched the weights (where clipping is on).
        """
        self.step += 1
        norm = math.sqrt(math.fsum(value.item() ** 2 for value in self._layer_norms.values()))
        if not math.isfinite(norm):
            first = max(layer for layer, value in self._layer_norms.items() if not math.isfinite(value.item()))
            raise GptjFtError(
                f"the gradient of step {self.step} is not finite, first in layer {first} counted from the embedding; "
                "stopped before using it: try a lower --lr, or --precision fp32, from the last checkpoint"
            )
        if self._defers:
            limit = self._recipe.clip_norm
            # torch.nn.utils.clip_grad_norm_ adds the same 1e-6.
            clip = 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))
            self._pending = Update(self.step, self._lr, clip)
            self._waiting = set(range(len(self._stack.layers)))
        return norm

    @property
    def pending(self) -> Update | None:
        """The update of the last step, for layers that it has not reached yet."""
        return self._pending

    def resume(self, update: Update | None, waiting: set[int]) -> None:
        """Take up an update again where some layers are still without it."""
        self._pending, self._waiting = update, waiting

    def flush(self) -> None:
        """Apply what is pending to every layer, and wait until the stores hold it."""
        for loaded in stream(self._stack, [self.visit_up(layer) for layer in sorted(self._waiting)]):
            self.before_forward(loaded)
        self._stack.drain()

    def visit_up(self, layer: int) -> Visit:
        if layer not in self._waiting:
            return Visit(layer)
        blanks: tuple[Kind, ...] = ("weight",) if self._stack.parameter == "master" else ()
        return Visit(layer, (*self.state, "grad"), blanks)

    def visit_turn(self, layer: int) -> Visit:
        up, down = self.visit_up(layer), self.visit_down(layer)
        reads = tuple(dict.fromkeys((*up.reads, *(kind for kind in down.reads if kind not in up.blanks))))
        return Visit(layer, reads, tuple(kind for kind in (*up.blanks, *down.blanks) if kind not in reads))

    def visit_down(self, layer: int) -> Visit:
        return Visit(layer, ("weight",) if self._defers else self.kinds, ("grad",))

    def before_forward(self, loaded: Loaded) -> None:
        if loaded.index in self._waiting:
            assert self._pending is not None
            self._apply(loaded, self._pending)
            self._waiting.remove(loaded.index)

    def after_backward(self, loaded: Loaded) -> None:
        gradient = loaded.tensors["grad"]
        self._layer_norms[loaded.index] = torch.linalg.vector_norm(gradient)
        if self._defers:
            loaded.write(("grad",))
            loaded.commit(("grad",), self.step + 1)
        else:
            self._apply(loaded, Update(self.step + 1, self._lr, 1.0))

    def _apply(self, loaded: Loaded, update: Update) -> None:
        recipe, split = self._recipe, loaded.layout.num_decayed
        parameter, first, second = (loaded.tensors[kind] for kind in self.state)
        gradient = loaded.tensors["grad"]
        if update.clip != 1.0:
            gradient.mul_(update.clip)
        step = torch.tensor(float(update.step), device=parameter.device)
        for part, decay in ((slice(0, split), recipe.weight_decay), (slice(split, None), 0.0)):
            if parameter[part].numel():
                torch._fused_adamw_(
                    [parameter[part]], [gradient[part]], [first[part]], [second[part]], [], [step],
                    lr=update.lr, beta1=recipe.betas[0], beta2=recipe.betas[1], weight_decay=decay, eps=recipe.eps,
                    amsgrad=False, maximize=False,
                )  # fmt: skip
        if self._stack.parameter == "master":
            loaded.tensors["weight"].copy_(parameter)
        loaded.write(self.kinds)
        loaded.commit(self.kinds, update.step)
