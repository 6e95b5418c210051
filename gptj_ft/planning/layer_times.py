"""Time the layers of a model on a CPU, at the size of a run's micro-batches.

A product's rate depends on its tokens, on its type and on which gradient it computes, and what is between products can
take as long again. So a plan adds up no rates where it can run the layers: one of each kind, forward and backward, as a
step does, with two numbers of tokens around those of the run's micro-batches. With any other number they take what is
on the line through both: a part for each micro-batch, such as sums of gradients, and a part for each token.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptj_ft.models.batch import HeadRows, PackedBatch, pack
from gptj_ft.models.dropout import Dropout
from gptj_ft.models.functional import FunctionalLayer
from gptj_ft.models.layout import Layout
from gptj_ft.planning.layer_cost import LayerInput, first_alike, parameters_of
from gptj_ft.planning.workload import LayerTimes, ModelTimes, SecondsByTokens, Workload
from gptj_ft.system.accelerator import CPU

FEWEST_TOKENS, ALWAYS_TOKENS = 16, 512  # of a micro-batch that is timed; so many are, however long they take
LONGEST = 1.0  # seconds of a layer, forward and backward, from which on fewer tokens are timed
TURNS, ENOUGH_SECONDS = 3, 1.5  # in which types are timed; none begins after so many seconds
TURN_SECONDS, MOST_RUNS = 0.01, 20  # of a layer in a turn
NEVER_TWICE = 1.5  # seconds of a layer that pays for no warming up
BYTES_PER_ELEMENT = 4 + 4 + 4  # while a layer is timed: a weight, its gradient, and what is added to that


class Seconds(NamedTuple):
    """Seconds of a layer on some tokens: forward without a graph; what training takes beside one such pass."""

    forward: float
    backward: float


@dataclass(frozen=True)
class LayerKind:
    """A layer whose time is that of all that are like it, on documents of some lengths.

    Attributes:
        layer: one of them, on the ``meta`` device.
        trained: layout of its trained parameters.
        given: its micro-batch.
        is_above_trained: whether the gradient of its input is needed.
        is_head: whether it gives logits for each row, and their loss.
    """

    layer: nn.Module
    trained: Layout
    given: LayerInput
    is_above_trained: bool
    is_head: bool = False

    @property
    def is_trained(self) -> bool:
        """Whether it has a backward pass."""
        return self.is_above_trained or self.trained.numel > 0

    @property
    def name(self) -> str:
        """A name for all that take as long: what is computed, of which shape, and what of it is trained."""
        facts = [f"{path} {type(module).__name__} {_numbers_of(module)}" for path, module in self.layer.named_modules()]
        facts += [f"{name} {tuple(whole.shape)}" for name, whole in self.layer.named_parameters()]
        facts += [*sorted(self.trained.used_shapes), str(self.is_above_trained), str(self.is_head)]
        what = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
        given = self.given
        return f"{what}, {given.dtype}, {len(given.documents)} documents, {given.tokens} tokens"

    def seconds(self, is_first: bool) -> Seconds:
        """Return the least seconds of some runs: what else a machine does only adds. The first run warms up."""
        parameters, runs = self._parameters(), list[Seconds]()
        run = self._head_runs(parameters) if self.is_head else self._block_runs(parameters)
        if is_first and sum(first := next(run)) > NEVER_TWICE:  # pays for threads, and kernels made for its shapes
            return first
        while not runs or (sum(map(sum, runs)) < TURN_SECONDS and len(runs) < MOST_RUNS):
            runs.append(next(run))
        return min(runs, key=sum)

    def _parameters(self) -> dict[str, Tensor]:
        parameters = parameters_of(self.layer, self.trained, self.given.dtype, CPU)
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.fill_(0.01)  # any number that is none of the slow, smallest ones
                if parameter.grad is not None:
                    parameter.grad.zero_()
        return parameters

    def _block_runs(self, parameters: Mapping[str, Tensor]) -> Iterator[Seconds]:
        run, given = FunctionalLayer(self.layer).run, self.given
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(given.tokens, given.width, generator=generator).to(given.dtype)
        gradient = 1e-3 * hidden
        while True:
            batch, start = self._batch(), time.perf_counter()
            with torch.no_grad():
                run(parameters, hidden, batch, _no_poll)
            middle = time.perf_counter()
            output = run(parameters, hidden.detach().requires_grad_(self.is_above_trained), batch, _no_poll)
            if not output.requires_grad:
                yield Seconds(middle - start, 0.0)
                continue
            torch.autograd.backward(output, gradient)
            yield _seconds(start, middle)

    def _head_runs(self, parameters: Mapping[str, Tensor]) -> Iterator[Seconds]:
        run, given = FunctionalLayer(self.layer).run, self.given
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(given.tokens, given.width, generator=generator).to(given.dtype)
        targets = torch.zeros(given.tokens, dtype=torch.int64)
        while True:
            start = time.perf_counter()
            with torch.no_grad():
                F.cross_entropy(run(parameters, hidden, HeadRows()), targets)
            middle = time.perf_counter()
            x = hidden.detach().requires_grad_(self.is_above_trained)
            loss = F.cross_entropy(run(parameters, x, HeadRows()), targets, reduction="sum")
            if not loss.requires_grad:
                yield Seconds(middle - start, 0.0)
                continue
            torch.autograd.backward(loss)
            yield _seconds(start, middle)

    def _batch(self) -> PackedBatch:
        """Return the micro-batch, as new as each of a step is to its first layer."""
        batch = pack([[0] * length for length in self.given.documents])
        drops = any(isinstance(module, Dropout) and module.rate for module in self.layer.modules())
        if not drops:
            return batch
        return PackedBatch(
            batch.tokens_T, batch.positions_T, batch.targets_T, batch.cu_seqlens,
            seeds=tuple(range(len(self.given.documents))),
        )  # fmt: skip


def time_kinds(kinds: Sequence[LayerKind]) -> list[Seconds]:
    """Time layers in turns, so that what else a machine does for a while slows down all of them."""
    turns, start = list[list[Seconds]](), time.perf_counter()
    while not turns or (len(turns) < TURNS and time.perf_counter() - start < ENOUGH_SECONDS):
        turns.append([kind.seconds(is_first=not turns) for kind in kinds])
    return [min(of_kind, key=sum) for of_kind in zip(*turns, strict=True)]


@dataclass(frozen=True)
class Timing:
    """What has to be timed for a workload in a type.

    Attributes:
        load: workload, with its layers.
        dtype: data type of the computation.
        product: FLOP/s of a large product in it, about.
    """

    load: Workload
    dtype: torch.dtype
    product: float

    @property
    def kinds(self) -> list[LayerKind]:
        """Layers to time, each with two numbers of tokens."""
        workload = self.load
        firsts = sorted(set(first_alike(workload.layers, workload.layouts, workload.lowest_trained)))
        kinds = [self._block(index, tokens) for index in firsts for tokens in self._sizes(index)]
        return kinds + [self._head(targets) for targets in self._head_sizes]

    def times(self, found: Mapping[str, Seconds]) -> ModelTimes:
        """Return the times of all layers, given those of the kinds by their names."""
        workload = self.load
        nothing = LayerTimes(SecondsByTokens(0.0, 0.0), SecondsByTokens(0.0, 0.0))
        firsts = first_alike(workload.layers, workload.layouts, workload.lowest_trained)
        by_first = {
            index: _through(self._sizes(index), [found[self._block(index, n).name] for n in self._sizes(index)])
            for index in set(firsts)
        }
        sizes = self._head_sizes
        head = _through(sizes, [found[self._head(n).name] for n in sizes]) if sizes else nothing
        return ModelTimes((nothing, *(by_first[index] for index in firsts), head))

    def _sizes(self, index: int) -> tuple[int, int]:
        """Return the numbers of tokens with which a block is timed."""
        workload = self.load
        flops = sum(layout.num_parameters for layout in workload.whole_layers[index]) * (4.0 + 4.0)
        least = max(ALWAYS_TOKENS, LONGEST * self.product / max(1.0, flops))
        return _around(min(workload.step.micro_batch_mean, least))

    @property
    def _head_sizes(self) -> tuple[int, ...]:
        """Return the numbers of targets with which the head is timed; of one that is no table of tokens, none."""
        workload = self.load
        tables = [
            shape[0] for layout in workload.whole_layers[0] for shape in layout.shapes.values() if len(shape) == 2
        ]
        if not workload.step.targets or workload.vocabulary not in tables:
            return ()
        return _around(min(workload.head_chunk, workload.step.targets / workload.step.num_micro_batches))

    def _block(self, index: int, tokens: int) -> LayerKind:
        workload = self.load
        return LayerKind(
            workload.layers[index],
            workload.layouts[index],
            LayerInput(workload.documents_of(tokens), workload.width, self.dtype),
            workload.num_trained > 0 and index > workload.lowest_trained,
        )

    def _head(self, targets: int) -> LayerKind:
        workload = self.load
        top = len(workload.layers) - 1
        given = LayerInput((targets,), workload.width, self.dtype)
        return LayerKind(
            workload.layers[top], workload.layouts[top], given, top > workload.lowest_trained, is_head=True
        )


def _around(number: float) -> tuple[int, int]:
    """Return the two powers of 2 that a number is between.

    >>> _around(220), _around(256), _around(3)
    ((128, 256), (128, 256), (8, 16))
    """
    upper = 2 ** math.ceil(math.log2(max(FEWEST_TOKENS, number)))
    return upper // 2, upper


def _through(sizes: Sequence[int], found: Sequence[Seconds]) -> LayerTimes:
    """Return the lines through two points."""
    few, many = sizes
    return LayerTimes(*(_line(few, low, many, high) for low, high in zip(*found, strict=True)))


def _line(few: int, low: float, many: int, high: float) -> SecondsByTokens:
    """Return a line through two points; no part of it is negative, whatever has disturbed them.

    >>> _line(128, 2.0, 256, 3.0), _line(1, 1.0, 2, 3.0), _line(1, 3.0, 2, 2.0)
    (Line(fixed=1.0, per_token=0.0078125), Line(fixed=0.0, per_token=1.5), Line(fixed=2.0, per_token=0.0))
    """
    per_token = min(max(0.0, high - low) / (many - few), high / many)
    return SecondsByTokens(high - per_token * many, per_token)


def _seconds(start: float, middle: float) -> Seconds:
    return Seconds(middle - start, max(0.0, time.perf_counter() - middle - (middle - start)))


def _numbers_of(module: nn.Module) -> list[Any]:
    """Return the attributes of a module beside tensors and modules, without the number of its layer."""
    own = vars(module).items()
    return [
        (name, value)
        for name, value in sorted(own)
        if not name.startswith("_") and name not in ("index", "site") and isinstance(value, str | int | float)
    ]


def _no_poll() -> None:
    pass
