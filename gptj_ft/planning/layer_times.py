"""Time the layers of a model on a CPU, at the size of a run's micro-batches.

The rate of a matrix product depends on its tokens, its type and the gradient that it computes, and the operations
between products can take as long. So a plan runs one layer of each kind, forward and backward, with two numbers of
tokens around those of the run. Other numbers of tokens take the seconds of the line through both: a fixed part, such
as sums of gradients, and a part per token.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gptj_ft.models.batch import HeadRows, PackedBatch, pack
from gptj_ft.models.functional import FunctionalLayer
from gptj_ft.models.layout import Layout
from gptj_ft.models.products import ONEDNN, Products, set_products
from gptj_ft.planning.layer_cost import LayerInput, first_alike, has_dropout, parameters_of
from gptj_ft.planning.workload import LayerTimes, ModelTimes, SecondsByTokens, Workload
from gptj_ft.streaming.cross_entropy import summed_cross_entropy
from gptj_ft.system.accelerator import CPU

FEWEST_TOKENS, ALWAYS_TOKENS = 16, 512  # least tokens to time; tokens that are timed however long they take
LONGEST = 1.0  # seconds of a layer, forward and backward; slower ones are timed with fewer tokens
TURNS, ENOUGH_SECONDS = 3, 1.5  # turns over all layers; no turn starts after this many seconds
TURN_SECONDS, MOST_RUNS = 0.01, 20  # of a layer in a turn
NEVER_TWICE = 1.5  # seconds; slower layers run only once, without a warm-up
BYTES_PER_ELEMENT = 4 + 4 + 4  # while timing: a weight, its gradient, and one micro-batch's gradient
NOTHING = LayerTimes(SecondsByTokens(0.0, 0.0), SecondsByTokens(0.0, 0.0))


class Seconds(NamedTuple):
    """Seconds of a layer on some tokens."""

    forward: float  # without a graph
    backward: float  # training, less one such pass
    load: float = 0.0  # of the cores by other programs


@dataclass(frozen=True)
class LayerKind:
    """A layer to time on a micro-batch; equal layers have its name."""

    layer: nn.Module  # on the meta device
    trained: Layout  # its trained parameters
    shape: LayerInput
    is_above_trained: bool  # backward computes the gradient of its input
    is_head: bool = False  # computes logits for each row, and their loss
    products: Products = ONEDNN

    @property
    def is_trained(self) -> bool:
        """Whether it has a backward pass."""
        return self.is_above_trained or self.trained.numel > 0

    @property
    def name(self) -> str:
        """Identify the layers that take as long: modules, shapes, trained parameters and micro-batch."""
        facts = [f"{path} {type(module).__name__} {_settings(module)}" for path, module in self.layer.named_modules()]
        facts += [f"{name} {tuple(whole.shape)}" for name, whole in self.layer.named_parameters()]
        facts += [*sorted(self.trained.used_shapes), str(self.is_above_trained), str(self.is_head)]
        facts += [str(self.products)] if self.products != ONEDNN else []
        digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
        return f"{digest}, {self.shape.dtype}, {len(self.shape.documents)} documents, {self.shape.tokens} tokens"

    def seconds(self, is_first: bool) -> Seconds:
        """Return the least seconds of some runs: other programs only add to them. The first run warms up."""
        parameters, runs = self._parameters(), list[Seconds]()
        set_products([self.layer], self.products)
        run = self._runs(parameters)
        if is_first and sum(first := next(run)) > NEVER_TWICE:  # the warm-up starts threads and compiles kernels
            return first
        while not runs or (sum(map(sum, runs)) < TURN_SECONDS and len(runs) < MOST_RUNS):
            runs.append(next(run))
        return min(runs, key=sum)

    def _parameters(self) -> dict[str, Tensor]:
        parameters = parameters_of(self.layer, self.trained, self.shape.dtype, CPU)
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.fill_(0.01)  # not a subnormal number, which would be slow
                if parameter.grad is not None:
                    parameter.grad.zero_()
        return parameters

    def _hidden(self) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randn(self.shape.tokens, self.shape.width, generator=generator).to(self.shape.dtype)

    def _runs(self, parameters: Mapping[str, Tensor]) -> Iterator[Seconds]:
        run, hidden = FunctionalLayer(self.layer).run, self._hidden()
        targets = torch.zeros(self.shape.tokens, dtype=torch.int64)
        gradient = None if self.is_head else 1e-3 * hidden

        def compute(x: Tensor, batch: PackedBatch | HeadRows) -> Tensor:
            if self.is_head:
                return summed_cross_entropy(run(parameters, x, batch), targets)
            return run(parameters, x, batch, _no_poll)

        while True:
            batch = HeadRows() if self.is_head else self._batch()
            start = time.perf_counter()
            with torch.no_grad():
                compute(hidden, batch)
            middle = time.perf_counter()
            output = compute(hidden.detach().requires_grad_(self.is_above_trained), batch)
            if output.requires_grad:
                torch.autograd.backward(output, gradient)
            yield _seconds(start, middle, output.requires_grad)

    def _batch(self) -> PackedBatch:
        """Return a micro-batch without cached values, like the first layer of a step gets it."""
        batch = pack([[0] * length for length in self.shape.documents])
        if not has_dropout(self.layer):
            return batch
        return PackedBatch(
            batch.tokens_T, batch.positions_T, batch.targets_T, batch.cu_seqlens,
            seeds=tuple(range(len(self.shape.documents))),
        )  # fmt: skip


def time_kinds(kinds: Sequence[LayerKind]) -> list[Seconds]:
    """Time layers in turns, so that a slow phase of the machine hits all of them."""
    turns, start = list[list[Seconds]](), time.perf_counter()
    while not turns or (len(turns) < TURNS and time.perf_counter() - start < ENOUGH_SECONDS):
        turns.append([kind.seconds(is_first=not turns) for kind in kinds])
    return [min(of_kind, key=sum) for of_kind in zip(*turns, strict=True)]


@dataclass(frozen=True)
class Timing:
    """Layers to time for a workload in a data type."""

    workload: Workload
    dtype: torch.dtype
    product: float  # FLOP/s of a large matrix product
    products: Products = ONEDNN

    @property
    def kinds(self) -> list[LayerKind]:
        """Layers to time, each with two numbers of tokens."""
        kinds = [self._block(index, tokens) for index in sorted(set(self._firsts)) for tokens in self._sizes(index)]
        return kinds + [self._head(targets) for targets in self._head_sizes]

    def times(self, timed: Mapping[str, Seconds]) -> ModelTimes:
        """Return the times of all layers, given the timed ones by name."""
        firsts = self._firsts
        by_first = {
            index: through(self._sizes(index), [timed[self._block(index, n).name] for n in self._sizes(index)])
            for index in set(firsts)
        }
        sizes = self._head_sizes
        head = through(sizes, [timed[self._head(n).name] for n in sizes]) if sizes else NOTHING
        load = max((each.load for each in timed.values()), default=0.0)
        return ModelTimes((NOTHING, *(by_first[index] for index in firsts), head), load=load)

    @property
    def _firsts(self) -> list[int]:
        return first_alike(self.workload.layers, self.workload.layouts, self.workload.lowest_trained)

    def _sizes(self, index: int) -> tuple[int, int]:
        """Return the numbers of tokens with which a block is timed."""
        workload = self.workload
        flops = sum(layout.num_parameters for layout in workload.whole_layers[index]) * (4.0 + 4.0)
        affordable = max(ALWAYS_TOKENS, LONGEST * self.product / max(1.0, flops))
        return around(min(workload.step.micro_batch_mean, affordable))

    @property
    def _head_sizes(self) -> tuple[int, ...]:
        """Return the numbers of targets with which the head is timed; none if its outputs are not tokens."""
        workload = self.workload
        shapes = [shape for layout in workload.whole_layers[0] for shape in layout.shapes.values()]
        tables = [shape[0] for shape in shapes if len(shape) == 2]
        if not workload.step.targets or workload.vocabulary not in tables:
            return ()
        return around(min(workload.head_chunk, workload.step.targets / workload.step.num_micro_batches))

    def _block(self, index: int, tokens: int) -> LayerKind:
        workload = self.workload
        is_above_trained = workload.num_trained > 0 and index > workload.lowest_trained
        row = workload.rows.typical or workload.rows.longest
        shape = LayerInput.of_rows(tokens, row, workload.width, self.dtype)
        layer, trained = workload.layers[index], workload.layouts[index]
        return LayerKind(layer, trained, shape, is_above_trained, products=self.products)

    def _head(self, targets: int) -> LayerKind:
        workload, top = self.workload, len(self.workload.layers) - 1
        shape = LayerInput((targets,), workload.width, self.dtype)
        is_above_trained = top > workload.lowest_trained
        return LayerKind(workload.layers[top], workload.layouts[top], shape, is_above_trained, True, self.products)


def around(number: float) -> tuple[int, int]:
    """Return the two powers of 2 around a number.

    >>> around(220), around(256), around(3)
    ((128, 256), (128, 256), (8, 16))
    """
    upper = 2 ** math.ceil(math.log2(max(FEWEST_TOKENS, number)))
    return upper // 2, upper


def through(sizes: Sequence[int], timed: Sequence[Seconds]) -> LayerTimes:
    """Return the lines through two timed sizes."""
    few, many = sizes
    (few_forward, few_backward, _), (many_forward, many_backward, _) = timed
    return LayerTimes(_line(few, few_forward, many, many_forward), _line(few, few_backward, many, many_backward))


def _line(few: int, low: float, many: int, high: float) -> SecondsByTokens:
    """Return the line through two points, without negative parts.

    >>> _line(128, 2.0, 256, 3.0), _line(1, 1.0, 2, 3.0), _line(1, 3.0, 2, 2.0)[0]
    (SecondsByTokens(fixed=1.0, per_token=0.0078125), SecondsByTokens(fixed=0.0, per_token=1.5), 2.0)
    """
    # Not steeper than the line through the origin: the fixed part would be negative.
    per_token = min(max(0.0, high - low) / (many - few), high / many)
    return SecondsByTokens(high - per_token * many, per_token)


def _seconds(start: float, middle: float, has_backward: bool) -> Seconds:
    training = time.perf_counter() - middle
    return Seconds(middle - start, max(0.0, training - (middle - start)) if has_backward else 0.0)


def _settings(module: nn.Module) -> list[Any]:
    """Return a module's plain attributes, without the index of its layer."""
    return [
        (name, value)
        for name, value in sorted(vars(module).items())
        if not name.startswith("_") and name not in ("index", "site") and isinstance(value, str | int | float)
    ]


def _no_poll() -> None:
    pass
