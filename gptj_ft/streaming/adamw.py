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

from gptj_ft.errors import GptjFtError
from gptj_ft.models.layout import MOMENTS, Kind
from gptj_ft.streaming.model import OffloadedModel
from gptj_ft.streaming.prefetch import LayerLoad, Prefetcher
from gptj_ft.streaming.schedule import LayerTask, PendingUpdates, flush_tasks
from gptj_ft.streaming.update_check import UnchangedParameters
from gptj_ft.system.memory import allocate

NOISE = (1 << 20) + 7  # places; not a divisor of anything, so that parts and steps meet it differently


@dataclass(frozen=True)
class Update:
    """Scalars of an update: known once every gradient of the step is."""

    step: int
    lr: float
    clip: float


@dataclass(frozen=True)
class AdamWConfig:
    """Hyperparameters of `AdamW` that stay the same for a whole run.

    Attributes:
        betas: decay rates of the two moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay of matrices; biases and norms have none.
        clip_norm: limit of the global gradient norm; ``None``: no clipping.
        seed: seed of the stochastic rounding of moments in bf16.
    """

    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip_norm: float | None
    seed: int


class AdamW:
    """AdamW (https://arxiv.org/abs/1711.05101) by torch's formula and kernel; decay skips biases and norms.

    The parameters live in fp32 in kind ``master``, or in ``weight`` itself where the computation is fp32.

    Args:
        model: the offloaded model.
        config: hyperparameters; the learning rate is given to each step.
        step: optimizer steps done.
        num_deferred: leading blocks whose updates are deferred, see `PendingUpdates`. The update is cheap and gives the
            same bits twice.
        updates_before: updates that the moments have seen before the run's first step; corrects their bias.

    Attributes:
        updates: layers that lack the last step's update, and when they get it.
    """

    def __init__(
        self, model: OffloadedModel, config: AdamWConfig, step: int = 0, num_deferred: int = 0, updates_before: int = 0
    ) -> None:
        self._model, self._config, self._updates_before = model, config, updates_before
        self.updates = PendingUpdates.of(model, step, num_deferred)
        self._lr = 0.0
        self._update: Update | None = None
        self._torn: set[int] = set()  # layers whose state in the stores is, for a while, of no step
        self._layer_norms: dict[int, Tensor] = {}
        self._scratch: dict[Kind, Tensor] = {}
        self._unchanged = UnchangedParameters(model.layouts, model.trained) if step == 0 else None

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.updates.step

    @property
    def pending(self) -> Update | None:
        """The update of the last step, for layers that it has not reached yet."""
        return self._update

    def begin_step(self, lr: float) -> None:
        """Start a step at this learning rate."""
        self._lr = lr
        self._layer_norms = {}

    def finish_step(self) -> float:
        """End the step once backward is through; its update becomes pending.

        Returns:
            The global gradient norm, before clipping.

        Raises:
            GptjFtError: a norm that is not finite; with clipping on, the weights have not changed in this step.
        """
        self.updates.step += 1
        self._torn.clear()
        of_layers = torch.stack(list(self._layer_norms.values())).tolist()  # one wait for the device, not one a layer
        norm = math.sqrt(math.fsum(value**2 for value in of_layers))
        if not math.isfinite(norm):
            found = zip(self._layer_norms, of_layers, strict=True)
            first = max(layer for layer, value in found if not math.isfinite(value))
            raise GptjFtError(
                f"the gradient of step {self.step} is not finite, first in layer {first} counted from the embedding; "
                "stopped before using it"
            )
        if self.updates.waits:
            limit = self._config.clip_norm
            # torch.nn.utils.clip_grad_norm_ adds the same 1e-6.
            clip = 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))
            self._update = Update(self.step, self._lr, clip)
            self.updates.layers = set(self._model.trained)
        return norm

    @property
    def is_whole(self) -> bool:
        """Whether `flush` leads to the state after ``step``: not while a layer is partly updated, or ahead."""
        return not self._torn

    def resume(self, update: Update | None, pending_layers: set[int]) -> None:
        """Take up an update again that some layers lack."""
        self._update, self.updates.layers = update, pending_layers
        if update is not None and update.step == 1:
            self._unchanged = UnchangedParameters(self._model.layouts, pending_layers)

    def take_unchanged(self) -> UnchangedParameters | None:
        """Return once the parameters that the first update left unchanged; ``None`` before it has reached all."""
        is_through = self.step > 1 or (self.step == 1 and not self.updates.layers)
        if not is_through or self._unchanged is None:
            return None
        unchanged, self._unchanged = self._unchanged, None
        return unchanged

    def flush(self) -> None:
        """Apply the pending update to every layer, and wait until the stores hold it."""
        for _ in Prefetcher(self._model, flush_tasks(self.updates), self):
            pass
        self._model.drain()

    def apply(self, task: LayerTask, span: slice, tensors: Mapping[Kind, Tensor]) -> None:
        update = self._update if self.updates.waits else Update(self.step + 1, self._lr, 1.0)
        assert update is not None
        if task.writes:
            self._torn.add(task.layer)
        config, parameter = self._config, tensors[self._model.parameter]
        gradient = self._in_fp32("grad", tensors["grad"])
        if update.clip != 1.0:
            gradient = torch.mul(gradient, update.clip, out=self._scratch_for("grad", len(gradient)))
        first, second = (self._in_fp32(kind, tensors[kind]) for kind in MOMENTS)
        step = torch.full((), float(self._updates_before + update.step), device=parameter.device)
        before = parameter.clone() if self._unchanged and update.step == 1 and task.writes and update.lr > 0 else None
        split = min(max(self._model.layouts[task.layer].num_decayed - span.start, 0), len(parameter))
        for part, decay in ((slice(0, split), config.weight_decay), (slice(split, None), 0.0)):
            if parameter[part].numel():
                torch._fused_adamw_(
                    [parameter[part]], [gradient[part]], [first[part]], [second[part]], [], [step],
                    lr=update.lr, beta1=config.betas[0], beta2=config.betas[1], weight_decay=decay, eps=config.eps,
                    amsgrad=False, maximize=False,
                )  # fmt: skip
        if before is not None and self._unchanged is not None:
            self._unchanged.observe(task.layer, span, before, parameter, gradient)
        for kind, exact in zip(MOMENTS, (first, second), strict=True):
            if exact is not tensors[kind]:
                key = (config.seed, update.step, task.layer, kind)
                round_stochastically(exact, tensors[kind], key, span.start)
        if self._model.parameter == "master":
            tensors["weight"].copy_(parameter)

    def applied(self, task: LayerTask) -> None:
        if task.writes:
            waits = self.updates.waits
            self._model.commit(self._model.updated_kinds, task.layer, self.step if waits else self.step + 1)
            self.updates.layers.discard(task.layer)
            if waits:  # otherwise it is a step ahead, until the others are, too
                self._torn.discard(task.layer)

    def add_gradient(self, load: LayerLoad) -> None:
        self._layer_norms[load.index] = torch.linalg.vector_norm(load.tensors["grad"])
        load.use_gradient(self.step + 1)

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
        key: key of the random bits; the same key gives the same bits.
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
