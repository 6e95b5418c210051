"""AdamW over stores, layer by layer: updates applied just in time, exact clipping by the global norm.

The global norm is known only when every layer's gradient is. So a step leaves its update *pending*: the next pass
upwards applies it to each layer as that layer comes by, and computes with the fresh weights at once. Never stale.
Without clipping nothing has to wait, and a layer is updated as soon as backward has its gradient; unless the state is
on disk, where the stored gradients are also what makes a step survive a crash (see `checkpoint`); or the computation is
in fp16, where one layer's gradient that is not finite means that no layer is updated (see `loss_scale`).
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
from gptj_ft.streaming.loaded_layer import LoadedLayer
from gptj_ft.streaming.loss_scale import LossScale
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.streaming.prefetch import Prefetcher
from gptj_ft.streaming.schedule import LayerTask, PendingUpdates, flush_tasks
from gptj_ft.streaming.stores.base import chunks
from gptj_ft.streaming.update_check import UnchangedParameters
from gptj_ft.streaming.update_pump import Updated
from gptj_ft.system.memory import allocate

UNCORRECTED = 10**9
# Elements updated at once on a CPU. An update takes up to a dozen passes over them, between which they stay in its
# caches. Measured with moments in bf16: 1.5 ns of a core an element, 2.3 with a whole chunk at once, 2.3 with a
# quarter of this, for then it is calls that take the time. A multiple of any vector's width: the bits are the same.
BLOCK_NUMEL = 1 << 18
NOISE = (1 << 20) + 7  # places; not a divisor of anything, so that parts and steps meet it differently


@dataclass(frozen=True)
class Update:
    """Scalars of an update: known once every gradient of the step is.

    Attributes:
        step: optimizer step that it is of.
        lr: learning rate.
        clip: factor of the gradient that keeps the global norm below its limit.
        scale: factor that the stored gradients have, that of the loss.
        num_skipped: steps of the run up to this one that were skipped; Adam's bias correction does not count them.
        is_skipped: whether this one is: layers pass through it, so that their state is of this step, and stay the same.
    """

    step: int
    lr: float
    clip: float
    scale: float = 1.0
    num_skipped: int = 0
    is_skipped: bool = False

    @property
    def number(self) -> int:
        """Updates that have been applied with this one."""
        return self.step - self.num_skipped


@dataclass(frozen=True)
class AdamWConfig:
    """Hyperparameters of `AdamW` that stay the same for a whole run.

    Attributes:
        betas: decay rates of the two moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay of matrices; biases and norms have none.
        clip_norm: limit of the global gradient norm; ``None``: no clipping.
        seed: seed of the stochastic rounding of moments in bf16.
        layer_decay: factor of a layer's learning rate to that of the layer above; the head has the whole rate.
        corrects_bias: whether the moments are divided by 1 - beta ** step (https://arxiv.org/abs/1412.6980).
    """

    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip_norm: float | None
    seed: int
    layer_decay: float = 1.0
    corrects_bias: bool = True


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
        loss_scale: scale of the next step's loss, and steps skipped so far; ``None`` unless the computation is in fp16.
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
        self._unchanged: UnchangedParameters | None = None
        self.loss_scale = LossScale() if model.compute_dtype == torch.float16 else None
        assert self.updates.waits or self.loss_scale is None, "an overflow is known only when every gradient is"

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.updates.step

    @property
    def num_updates(self) -> int:
        """Optimizer steps that were not skipped."""
        return self.step - (self.loss_scale.num_skipped if self.loss_scale else 0)

    @property
    def pending(self) -> Update | None:
        """The update of the last step, for layers that it has not reached yet."""
        return self._update

    def begin_step(self, lr: float) -> None:
        """Start a step at this learning rate."""
        self._lr = lr
        self._layer_norms = {}
        if self.num_updates == 0:
            self._unchanged = UnchangedParameters(self._model.layouts, self._model.trained)

    def finish_step(self) -> float:
        """End the step once backward is through; its update becomes pending.

        Returns:
            The global gradient norm, before clipping; not finite where an overflow in fp16 has the step skipped.

        Raises:
            GptjFtError: a norm that is not finite, in fp16 at a loss scale of 1 or less; with clipping on, the weights
                have not changed in this step.
        """
        self.updates.step += 1
        self._torn.clear()
        of_layers = self._norms_of_all()
        before = self.loss_scale
        scale = before.scale if before else 1.0
        # Unscaled before it is compared with the limit, as with `torch.amp.GradScaler`. Sums of squares of fp16
        # gradients are far inside fp32: a norm that is not finite is that of an element that is not.
        norm = math.sqrt(math.fsum(value**2 for value in of_layers.values())) / scale
        is_skipped = before is not None and not math.isfinite(norm)
        if before is not None:
            self.loss_scale = before.after_step(is_skipped)
        if not math.isfinite(norm) and (self.loss_scale is None or self.loss_scale.scale < 1.0):
            tried = "" if before is None else f" in fp16, whatever the loss is multiplied by, down to {scale:g}"
            first = max(layer for layer, value in of_layers.items() if not math.isfinite(value))
            raise GptjFtError(
                f"the gradient of step {self.step} is not finite{tried}, first in layer {first} counted from the "
                "embedding; stopped before using it"
            )
        if self.updates.waits:
            limit = self._config.clip_norm
            # torch.nn.utils.clip_grad_norm_ adds the same 1e-6.
            clip = 1.0 if limit is None or is_skipped else min(1.0, limit / (norm + 1e-6))
            self._update = Update(self.step, self._lr, clip, scale, self.step - self.num_updates, is_skipped)
            self.updates.layers = set(self._model.trained)
        return norm

    def _norms_of_all(self) -> dict[int, float]:
        """Return the gradient norm of each trained layer."""
        norms = list(self._layer_norms.values())
        values = torch.stack(norms).tolist() if norms else []  # one wait for the device, not one a layer
        return self._model.exchange.merge_norms(dict(zip(self._layer_norms, values, strict=True)))

    @property
    def is_whole(self) -> bool:
        """Whether `flush` leads to the state after ``step``: not while a layer is partly updated, or ahead."""
        return not self._torn

    def resume(self, update: Update | None, pending_layers: set[int]) -> None:
        """Take up an update again that some layers lack."""
        self._update, self.updates.layers = update, pending_layers
        if update is not None and update.number == 1 and not update.is_skipped:
            self._unchanged = UnchangedParameters(self._model.layouts, pending_layers)

    def take_unchanged(self) -> UnchangedParameters | None:
        """Return once the parameters that the first update left unchanged; ``None`` before it has reached all."""
        is_through = self.num_updates > 1 or (self.num_updates == 1 and not self.updates.layers)
        if not is_through or self._unchanged is None:
            return None
        unchanged, self._unchanged = self._unchanged, None
        return unchanged

    def flush(self) -> None:
        """Apply the pending update to every layer, and wait until the stores hold it."""
        for _ in Prefetcher(self._model, flush_tasks(self.updates), self):
            pass
        self._model.drain()

    def apply(self, task: LayerTask, span: slice, tensors: Mapping[Kind, Tensor], updated: Updated) -> None:
        update = self._update if self.updates.waits else Update(self.step + 1, self._lr, 1.0)
        assert update is not None
        if task.writes:
            self._torn.add(task.layer)
        numel = span.stop - span.start
        for block in chunks(numel, BLOCK_NUMEL if self._model.device.type == "cpu" else numel):
            part = {kind: tensor[block] for kind, tensor in tensors.items()}
            if update.is_skipped:
                for kind in MOMENTS:
                    updated(kind, part[kind])
            else:
                self._apply(update, task, slice(span.start + block.start, span.start + block.stop), part, updated)
            if self._model.parameter == "master":
                part["weight"].copy_(part["master"])
            for kind in ("weight", "master"):
                if kind in part:
                    updated(kind, part[kind])

    def _apply(
        self, update: Update, task: LayerTask, span: slice, tensors: Mapping[Kind, Tensor], updated: Updated
    ) -> None:
        config, parameter = self._config, tensors[self._model.parameter]
        gradient = self._in_fp32("grad", tensors["grad"])
        if (factor := update.clip / update.scale) != 1.0:  # unscaled and clipped in one pass
            gradient = torch.mul(gradient, factor, out=self._scratch_for("grad", len(gradient)))
        first, second = (self._in_fp32(kind, tensors[kind]) for kind in MOMENTS)
        # Behind so many updates the correction is 1.
        number = self._updates_before + update.number if config.corrects_bias else UNCORRECTED
        step = torch.full((), float(number), device=parameter.device)
        lr = update.lr * config.layer_decay ** (len(self._model.layers) - 1 - task.layer)
        before = parameter.clone() if self._unchanged and update.number == 1 and task.writes and update.lr > 0 else None
        split = min(max(self._model.layouts[task.layer].num_decayed - span.start, 0), len(parameter))
        for part, decay in ((slice(0, split), config.weight_decay), (slice(split, None), 0.0)):
            if parameter[part].numel():
                torch._fused_adamw_(
                    [parameter[part]], [gradient[part]], [first[part]], [second[part]], [], [step],
                    lr=lr, beta1=config.betas[0], beta2=config.betas[1], weight_decay=decay, eps=config.eps,
                    amsgrad=False, maximize=False,
                )  # fmt: skip
        if before is not None and self._unchanged is not None:
            self._unchanged.observe(task.layer, span, before, parameter, gradient)
        for kind, exact in zip(MOMENTS, (first, second), strict=True):
            if exact is not tensors[kind]:
                key = (config.seed, update.number, task.layer, kind)
                round_stochastically(exact, tensors[kind], key, span.start)
            updated(kind, tensors[kind])

    def applied(self, task: LayerTask) -> None:
        if task.writes:
            waits = self.updates.waits
            self._model.transfers.commit(self._model.updated_kinds, task.layer, self.step if waits else self.step + 1)
            self.updates.layers.discard(task.layer)
            if waits:  # otherwise it is a step ahead, until the others are, too
                self._torn.discard(task.layer)

    def add_gradient(self, layer: LoadedLayer) -> None:
        self._layer_norms[layer.index] = torch.linalg.vector_norm(layer.gradient.flat)
        layer.use_gradient(self.step + 1)

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
    """Draw 16 random bits for each of `NOISE` places; every rounding starts at a place of its own."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 1 << 16, (NOISE,), dtype=torch.int32, generator=generator).to(device)
