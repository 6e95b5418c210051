"""AdamW over stores, layer by layer: updates applied just in time, exact clipping by the global norm.

The global norm is known only when every layer's gradient is. So a step leaves its update *pending*: the next pass
upwards applies it to each layer as that layer comes by, and computes with the fresh weights at once. Never stale.
Without clipping nothing has to wait, and a layer is updated as soon as backward has its gradient; unless the state is
on disk, where the stored gradients are also what makes a step survive a crash (see `checkpoint`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from gptj_ft.config.options import Recipe
from gptj_ft.errors import GptjFtError
from gptj_ft.models.layout import MOMENTS, Kind
from gptj_ft.streaming.layer_load import LayerLoad, LayerTask
from gptj_ft.streaming.model import OffloadedModel
from gptj_ft.streaming.step import stream
from gptj_ft.streaming.update_check import UnchangedParameters
from gptj_ft.system.memory import allocate

NOISE = (1 << 20) + 7  # places; not a divisor of anything, so that parts and steps meet it differently


@dataclass(frozen=True)
class Update:
    """What turns a step's gradients into new weights: known once all of them are."""

    step: int
    lr: float
    clip: float


class AdamW:
    """AdamW (https://arxiv.org/abs/1711.05101) by torch's formula and kernel; decay skips biases and norms.

    The parameters live in fp32 in kind ``master``, or in ``weight`` itself where the computation is fp32.

    Args:
        stack: the model.
        recipe: its betas, eps, decay, clipping.
        step: steps that the model has behind it.
        late: the first so many blocks get their pending update in both passes: in forward to compute with, in backward
            to keep. Forward has a third of the arithmetic and would have most of the traffic; so it writes nothing of
            them. The update is cheap and gives the same bits twice.
        updates_before: how many the moments have seen before the run's first step; their bias is corrected accordingly.
    """

    def __init__(
        self, model: OffloadedModel, recipe: Recipe, step: int = 0, late: int = 0, updates_before: int = 0
    ) -> None:
        self._model, self._recipe, self._updates_before = model, recipe, updates_before
        # Where there is no master, the weights are the parameters.
        self.kinds: tuple[Kind, ...] = tuple(dict.fromkeys(("weight", model.parameter, *MOMENTS)))
        self.step = step
        self._lr = 0.0
        # Gradients that have a store wait there for the norm, and for a crash after which they are applied again.
        self._defers = "grad" in model.stores
        # Not the last block: backward begins with what forward has left of it. And nothing that is changed in place.
        can_be_late = not any(model.stores[kind].resident for kind in self.kinds)
        self._late = range(1, 1 + (min(late, len(model.layers) - 3) if can_be_late else 0))
        self._pending: Update | None = None
        self._pending_layers: set[int] = set()  # layers that the pending update has not reached
        self._torn: set[int] = set()  # layers whose state in the stores is, for a while, of no step
        self._layer_norms: dict[int, Tensor] = {}
        self._scratch: dict[Kind, Tensor] = {}
        self._unchanged = UnchangedParameters(model.layouts, model.trained) if step == 0 else None

    def begin_step(self, lr: float) -> None:
        """Start a step at this learning rate."""
        self._lr = lr
        self._layer_norms = {}

    def finish_step(self) -> float:
        """End the step once backward is through; its update becomes pending.

        Returns:
            The global gradient norm, before clipping.

        Raises:
            GptjFtError: it is not finite; nothing of this step has touched the weights (where clipping is on).
        """
        self.step += 1
        self._torn.clear()
        norm = math.sqrt(math.fsum(value.item() ** 2 for value in self._layer_norms.values()))
        if not math.isfinite(norm):
            first = max(layer for layer, value in self._layer_norms.items() if not math.isfinite(value.item()))
            raise GptjFtError(
                f"the gradient of step {self.step} is not finite, first in layer {first} counted from the embedding; "
                "stopped before using it"
            )
        if self._defers:
            limit = self._recipe.clip_norm
            # torch.nn.utils.clip_grad_norm_ adds the same 1e-6.
            clip = 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))
            self._pending = Update(self.step, self._lr, clip)
            self._pending_layers = set(self._model.trained)
        return norm

    @property
    def pending(self) -> Update | None:
        """The update of the last step, for layers that it has not reached yet."""
        return self._pending

    @property
    def is_whole(self) -> bool:
        """Whether a `flush` gives the state after ``step``: not while a layer is half updated, or ahead of others."""
        return not self._torn

    def resume(self, update: Update | None, pending_layers: set[int]) -> None:
        """Take up an update again where some layers are still without it."""
        self._pending, self._pending_layers = update, pending_layers
        if update is not None and update.step == 1:
            self._unchanged = UnchangedParameters(self._model.layouts, pending_layers)

    def take_unchanged(self) -> UnchangedParameters | None:
        """Return, once, what the first update has moved; ``None`` before it has reached every layer."""
        is_through = self.step > 1 or (self.step == 1 and not self._pending_layers)
        if not is_through or self._unchanged is None:
            return None
        movement, self._unchanged = self._unchanged, None
        return movement

    def flush(self) -> None:
        """Apply what is pending to every layer, and wait until the stores hold it."""
        visits = [
            LayerTask(layer, updates=True, computes=False, version=self.step - 1)
            for layer in sorted(self._pending_layers)
        ]
        for _ in stream(self._model, visits, self):
            pass
        self._model.drain()

    def forward_task(self, layer: int) -> LayerTask:
        if layer in self._pending_layers:
            return LayerTask(layer, updates=True, keeps=layer not in self._late, version=self.step - 1)
        return LayerTask(layer, version=self.step)

    def backward_task(self, layer: int) -> LayerTask:
        if layer in self._pending_layers and layer in self._late:
            return LayerTask(layer, updates=True, version=self.step - 1, downwards=True)
        return LayerTask(layer, version=self.step, downwards=True)

    def apply(self, visit: LayerTask, span: slice, tensors: Mapping[Kind, Tensor]) -> None:
        update = self._pending if self._defers else Update(self.step + 1, self._lr, 1.0)
        assert update is not None
        if visit.keeps:
            self._torn.add(visit.layer)
        recipe, parameter = self._recipe, tensors[self._model.parameter]
        gradient = self._in_fp32("grad", tensors["grad"])
        if update.clip != 1.0:
            gradient = torch.mul(gradient, update.clip, out=self._scratch_for("grad", len(gradient)))
        first, second = (self._in_fp32(kind, tensors[kind]) for kind in MOMENTS)
        step = torch.full((), float(self._updates_before + update.step), device=parameter.device)
        before = parameter.clone() if self._unchanged and update.step == 1 and visit.keeps and update.lr > 0 else None
        split = min(max(self._model.layouts[visit.layer].num_decayed - span.start, 0), len(parameter))
        for part, decay in ((slice(0, split), recipe.weight_decay), (slice(split, None), 0.0)):
            if parameter[part].numel():
                torch._fused_adamw_(
                    [parameter[part]], [gradient[part]], [first[part]], [second[part]], [], [step],
                    lr=update.lr, beta1=recipe.betas[0], beta2=recipe.betas[1], weight_decay=decay, eps=recipe.eps,
                    amsgrad=False, maximize=False,
                )  # fmt: skip
        if before is not None and self._unchanged is not None:
            self._unchanged.observe(visit.layer, span, before, parameter, gradient)
        for kind, exact in zip(MOMENTS, (first, second), strict=True):
            if exact is not tensors[kind]:
                key = (recipe.seed, update.step, visit.layer, kind)
                round_stochastically(exact, tensors[kind], key, span.start)
        if self._model.parameter == "master":
            tensors["weight"].copy_(parameter)

    def applied(self, visit: LayerTask) -> None:
        if visit.keeps:
            self._model.commit(self.kinds, visit.layer, self.step if self._defers else self.step + 1)
            self._pending_layers.discard(visit.layer)
            if self._defers:  # otherwise it is a step ahead, until the others are, too
                self._torn.discard(visit.layer)

    def add_gradient(self, loaded: LayerLoad) -> None:
        self._layer_norms[loaded.index] = torch.linalg.vector_norm(loaded.tensors["grad"])
        if self._defers:
            loaded.send_gradient(self.step + 1)
        else:
            loaded.update()

    def _in_fp32(self, kind: Kind, values: Tensor) -> Tensor:
        if values.dtype == torch.float32:
            return values
        return self._scratch_for(kind, len(values)).copy_(values)

    def _scratch_for(self, kind: Kind, numel: int) -> Tensor:
        if kind not in self._scratch or len(self._scratch[kind]) < numel:
            self._scratch[kind] = allocate(numel, torch.float32, self._model.device)
        return self._scratch[kind][:numel]


def round_stochastically(exact: Tensor, rounded: Tensor, key: tuple[object, ...], start: int) -> None:
    """Round fp32 to bf16, up or down with the probability that makes the mean right.

    Rounding to nearest would lose every change of a moment below half a unit in the last place: for a decay of 0.999
    that is nearly all of them.

    Args:
        exact: flat, fp32; overwritten.
        rounded: bf16, of the same length.
        key: what makes this rounding unlike any other; the same key gives the same bits.
        start: number of the first element, where these are part of a longer tensor.
    """
    noise = _noise(exact.device)
    offset = (int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little") + start) % NOISE
    bits = exact.view(torch.int32)
    for start in range(-offset, len(bits), NOISE):
        part = bits[max(start, 0) : start + NOISE]
        part += noise[max(-start, 0) : max(-start, 0) + len(part)]
    bits &= -65536  # the upper 16 bits of an fp32 number are a bf16 number
    rounded.copy_(exact)


@lru_cache
def _noise(device: torch.device) -> Tensor:
    """16 random bits for each of `NOISE` places; every rounding starts at a place of its own."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 1 << 16, (NOISE,), dtype=torch.int32, generator=generator).to(device)
