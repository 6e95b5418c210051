"""AdamW for offloaded layers, with exact clipping by the global gradient norm.

Clipping needs the gradients of all layers before the first update. So a step stores its gradients and leaves its update
*pending*. The next forward pass applies it to each layer right before the layer runs: no layer ever computes with stale
weights. Without clipping, backward updates each layer as soon as its gradient is complete, with two exceptions:

* State on disk: a step survives a crash only if its gradients are stored (see `checkpoint`).
* fp16: if the gradient of one layer is not finite, no layer may be updated (see `loss_scale`).

A step commits when all its gradients are stored. After a crash the run repeats the pending update, layer by layer, from
the committed state. It gets the same bits: the random bits of stochastic rounding depend on step, layer and position.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.linalg import vector_norm

from gptj_ft.errors import GptjFtError
from gptj_ft.models.layer_sampling import EVERY_LAYER
from gptj_ft.models.layout import MOMENTS, Kind
from gptj_ft.streaming import split_master
from gptj_ft.streaming.loaded_layer import LoadedLayer
from gptj_ft.streaming.loss_scale import LossScale
from gptj_ft.streaming.moments import form_of, items_of
from gptj_ft.streaming.moments.form import NOISE, Noise
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.streaming.prefetch import Prefetcher
from gptj_ft.streaming.schedule import LayerTask, PendingUpdates, flush_tasks
from gptj_ft.streaming.split_master import LOW_BITS
from gptj_ft.streaming.stores.base import chunks
from gptj_ft.streaming.update_check import UnchangedParameters
from gptj_ft.streaming.update_pump import Updated
from gptj_ft.system.memory import allocate

UNCORRECTED = 10**9  # step number at which Adam's bias correction is 1
# Elements that a CPU updates at once. An update makes up to a dozen passes over a block, which stays in the caches
# meanwhile. Measured with bf16 moments, per element and core: 1.5 ns; with whole chunks 2.3 ns; with a quarter of this
# 2.3 ns, for the calls. A multiple of any vector width, so that the bits do not depend on it.
BLOCK_NUMEL = 1 << 18
# On a CPU, the norm of a gradient of so many elements is taken row by row. In one go, torch adds small squares to a
# large sum in fp32, where they vanish: the norm of 28 million elements comes out 0.2 % too small, of 134 million 1.4 %.
# By rows, the error is 2e-7, it takes no longer, and the number of threads does not change its bits.
NORM_ROW, LONG_GRADIENT = 1 << 16, 1 << 18


@dataclass(frozen=True)
class Update:
    """Scalars of one step's update, complete once every gradient is."""

    step: int
    lr: float
    clip: float  # factor that clips the gradient
    scale: float = 1.0  # loss scale that the stored gradients contain
    num_skipped: int = 0  # skipped steps so far, including this one; Adam's bias correction does not count them
    is_skipped: bool = False  # this step is skipped: its layers get its number, but keep their values

    @property
    def number(self) -> int:
        """Applied updates, including this one."""
        return self.step - self.num_skipped


@dataclass(frozen=True)
class AdamWConfig:
    """Hyperparameters of `AdamW` that are constant during a run."""

    betas: tuple[float, float]
    eps: float
    weight_decay: float  # for matrices; not for biases and norms
    clip_norm: float | None  # limit of the global gradient norm; None: no clipping
    seed: int  # of the stochastic rounding of narrow moments
    layer_decay: float = 1.0  # ratio of a layer's learning rate to the next higher layer's; the head has the full rate
    corrects_bias: bool = True  # divide the moments by 1 - beta ** step (https://arxiv.org/abs/1412.6980)
    block_numel: int = BLOCK_NUMEL  # elements that a CPU updates at once


class AdamW:
    """AdamW (https://arxiv.org/abs/1711.05101) with torch's formula and kernel.

    It updates the fp32 parameters: kind ``master``, stored or split, or ``weight`` if the computation is in fp32.

    Args:
        num_deferred: leading blocks whose updates are deferred, see `PendingUpdates`.
        updates_before: updates in the initial moments, from another run; for the bias correction.
    """

    def __init__(
        self, model: OffloadedModel, config: AdamWConfig, step: int = 0, num_deferred: int = 0, updates_before: int = 0
    ) -> None:
        self._model, self._config, self._updates_before = model, config, updates_before
        self.updates = PendingUpdates.of(model, step, num_deferred)
        self._lr = 0.0
        self._update: Update | None = None
        self._torn: set[int] = set()  # layers whose stored state is partly updated, or a step ahead of the others
        self._layer_norms: dict[int, Tensor] = {}
        self._scratch: dict[str, Tensor] = {}
        # A CPU adds what fits its cache; an accelerator a whole chunk, as each addition costs it a kernel launch.
        largest = min(model.budget.update_numel, max(layout.numel for layout in model.layouts))
        self._num_tiles = 1 if model.device.type == "cpu" else -(-largest // NOISE) + 1
        self._unchanged: UnchangedParameters | None = None
        # Of the next step's loss; fp16 only.
        self.loss_scale = LossScale() if model.compute_dtype == torch.float16 else None
        # Applied updates of each layer of the model, the pending one included; None: the same number for all.
        self.layer_updates = None if model.choice == EVERY_LAYER else (0,) * len(model.layers)
        assert self.updates.waits or not self.loss_scale, "internal error: fp16 updates wait for every gradient"

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
        """Update of the last step, for the layers that still lack it."""
        return self._update

    def begin_step(self, lr: float) -> None:
        """Start a step with this learning rate."""
        self._lr = lr
        self._layer_norms = {}
        if self.num_updates == 0:
            layers = list(filter(self.updates.trains, self._model.trained))
            self._unchanged = UnchangedParameters(self._model.layouts, layers)

    def finish_step(self) -> float:
        """End the step after backward; its update becomes pending.

        Returns:
            The global gradient norm before clipping; not finite if fp16 overflows and the step is skipped.

        Raises:
            GptjFtError: the norm is not finite; in fp16, at a loss scale of 1 or less. With clipping, no weight has
                changed in this step.
        """
        trained = set(filter(self.updates.trains, range(len(self._model.layers))))
        self.updates.step += 1
        # Layers that backward has updated at once are no longer ahead: the step counts as done.
        self._torn.clear()
        layer_norms = self._norms_of_all()
        before = self.loss_scale
        scale = before.scale if before else 1.0
        # Unscale before clipping, as `torch.amp.GradScaler` does. The squares of fp16 gradients cannot overflow an fp32
        # sum: if the norm is not finite, an element of the gradient is not.
        norm = math.sqrt(math.fsum(value**2 for value in layer_norms.values())) / scale
        is_skipped = before is not None and not math.isfinite(norm)
        if before is not None:
            self.loss_scale = before.after_step(is_skipped)
        if not math.isfinite(norm) and (self.loss_scale is None or self.loss_scale.scale < 1.0):
            tried = "" if before is None else f" in fp16 with any loss scale down to {scale:g}"
            # Backward runs top down, so the highest layer is where it began.
            first = max(layer for layer, value in layer_norms.items() if not math.isfinite(value))
            raise GptjFtError(
                f"the gradient of step {self.step} is not finite{tried}, first in layer {first} counted from the "
                "embedding; stopped before using it"
            )
        if self.updates.waits:
            limit = self._config.clip_norm
            # The same 1e-6 as in torch.nn.utils.clip_grad_norm_.
            clip = 1.0 if limit is None or is_skipped else min(1.0, limit / (norm + 1e-6))
            self._update = Update(self.step, self._lr, clip, scale, self.step - self.num_updates, is_skipped)
            self.updates.layers = trained & set(self._model.trained)
        if self.layer_updates is not None and not is_skipped:
            self.layer_updates = tuple(number + (i in trained) for i, number in enumerate(self.layer_updates))
        return norm

    def _norms_of_all(self) -> dict[int, float]:
        """Return the gradient norm of each trained layer."""
        norms = list(self._layer_norms.values())
        values = torch.stack(norms).tolist() if norms else []  # one wait for the device for all layers
        return self._model.exchange.merge_norms(dict(zip(self._layer_norms, values, strict=True)))

    @property
    def is_whole(self) -> bool:
        """Whether `flush` would complete ``step``: no layer is partly updated or a step ahead."""
        return not self._torn

    def resume(self, update: Update | None, pending_layers: set[int]) -> None:
        """Resume an update that some layers lack."""
        self._update, self.updates.layers = update, pending_layers
        if update is not None and update.number == 1 and not update.is_skipped:
            self._unchanged = UnchangedParameters(self._model.layouts, pending_layers)

    def take_unchanged(self) -> UnchangedParameters | None:
        """Return the parameters that the first update left unchanged, once it has reached every layer; else None."""
        is_complete = self.num_updates > 1 or (self.num_updates == 1 and not self.updates.layers)
        if not is_complete or self._unchanged is None:
            return None
        unchanged, self._unchanged = self._unchanged, None
        return unchanged

    def flush(self) -> None:
        """Apply the pending update to every layer, and wait until the stores have written it."""
        for _ in Prefetcher(self._model, flush_tasks(self.updates), self):
            pass
        self._model.drain()

    def apply(self, task: LayerTask, span: slice, tensors: Mapping[Kind, Tensor], updated: Updated) -> None:
        # An update at once runs in backward, before `finish_step` counts its step.
        update = self._update if self.updates.waits else Update(self.step + 1, self._lr, 1.0)
        assert update is not None
        if task.writes:
            # From the first chunk to the commit, the layer's new state is incomplete. A run must not save then.
            self._torn.add(task.layer)
        numel = span.stop - span.start
        for block in chunks(numel, self._config.block_numel if self._model.device.type == "cpu" else numel):
            part = {kind: tensor[items_of(block, tensor.dtype)] for kind, tensor in tensors.items()}
            parameter = self._parameter(part)
            if update.is_skipped:  # write the old values: the layer's file still gets this step's number
                for kind in MOMENTS:
                    updated(kind, part[kind])
            else:
                span_of_block = slice(span.start + block.start, span.start + block.stop)
                self._apply(update, task, span_of_block, {**part, self._model.parameter: parameter}, updated)
            if LOW_BITS in part:
                split_master.split(parameter, part["weight"], part[LOW_BITS])
            elif "master" in part:
                split_master.store(parameter, "weight", part["weight"])
            for kind in ("weight", "master", LOW_BITS):
                if kind in part:
                    updated(kind, part[kind])

    def _parameter(self, tensors: Mapping[Kind, Tensor]) -> Tensor:
        """Return the fp32 parameters of a block; a split master is restored in scratch memory."""
        if LOW_BITS not in tensors:
            return tensors[self._model.parameter]
        weight = tensors["weight"]
        return split_master.join(weight, tensors[LOW_BITS], self._scratch_for("master", len(weight)))

    def _apply(
        self, update: Update, task: LayerTask, span: slice, tensors: Mapping[Kind, Tensor], updated: Updated
    ) -> None:
        config, parameter = self._config, tensors[self._model.parameter]
        gradient = tensors["grad"]
        if gradient.dtype != torch.float32:
            gradient = self._scratch_for("grad", len(gradient)).copy_(gradient)
        if (factor := update.clip / update.scale) != 1.0:  # unscaled and clipped in one pass
            gradient = torch.mul(gradient, factor, out=self._scratch_for("grad", len(gradient)))
        form = form_of(tensors["exp_avg"].dtype)
        first, second = (form.load(kind, tensors[kind], self._scratch_for) for kind in MOMENTS)
        number = self._updates_before + self._number_of(update, task.layer) if config.corrects_bias else UNCORRECTED
        step = self._scratch_for("step", 1)[0].fill_(number)
        lr = update.lr * config.layer_decay ** (len(self._model.layers) - 1 - task.layer)
        before = parameter.clone() if self._unchanged and update.number == 1 and task.writes and update.lr > 0 else None
        # Layouts put the decayed parameters first: `split` is their end in this chunk.
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
            key = (config.seed, update.number, task.layer, kind)
            form.store(kind, exact, tensors[kind], Noise(key, span.start, self._num_tiles), self._scratch_for)
            updated(kind, tensors[kind])

    def _number_of(self, update: Update, layer: int) -> int:
        """Return the number of a layer's update, from 1: as in torch, steps that do not train it do not count."""
        if self.layer_updates is None:
            return update.number
        # `finish_step` counts an update. One at once, in backward, comes before it.
        return self.layer_updates[layer] + (not self.updates.waits)

    def applied(self, task: LayerTask) -> None:
        if task.writes:
            waits = self.updates.waits
            self._model.transfers.commit(self._model.updated_kinds, task.layer, self.step if waits else self.step + 1)
            self.updates.layers.discard(task.layer)
            if waits:  # otherwise the layer is a step ahead of the others until `finish_step`
                self._torn.discard(task.layer)

    def add_gradient(self, layer: LoadedLayer) -> None:
        norm, earlier = norm_of(layer.gradient.flat), self._layer_norms.get(layer.index)
        self._layer_norms[layer.index] = norm if earlier is None else torch.hypot(earlier, norm)  # tiles add up
        layer.use_gradient(self.step + 1)

    def _scratch_for(self, name: str, numel: int) -> Tensor:
        if name not in self._scratch or len(self._scratch[name]) < numel:
            self._scratch[name] = allocate(numel, torch.float32, self._model.device)
        return self._scratch[name][:numel]


def norm_of(gradient: Tensor) -> Tensor:
    """Return the norm of a flat gradient, accurate for any number of elements."""
    norm: Tensor
    if gradient.device.type != "cpu" or len(gradient) < LONG_GRADIENT:  # accelerators sum in trees
        norm = vector_norm(gradient)
        return norm
    whole = len(gradient) // NORM_ROW * NORM_ROW
    rows = vector_norm(gradient[:whole].view(-1, NORM_ROW), dim=1)
    norm = vector_norm(torch.cat([rows, vector_norm(gradient[whole:]).view(1)]))
    return norm
