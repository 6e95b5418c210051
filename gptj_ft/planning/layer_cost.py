"""Run a layer once on the ``meta`` device: what it computes, what its graph keeps, how much memory it takes at once.

Nothing here is known of any architecture: kernels, bytes and lifetimes are those of its own code under autograd.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gptj_ft.models.batch import HeadRows, PackedBatch
from gptj_ft.models.functional import FunctionalLayer
from gptj_ft.models.layout import Layout
from gptj_ft.streaming.step import sum_into
from gptj_ft.system.accelerator import META

ALLOCATION_BYTES = 512  # an accelerator's allocator rounds up to multiples of it
ATTENTION = "_varlen_attn"
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}


@dataclass(frozen=True)
class KernelCost:
    """A kernel: its FLOPs, of a product or of attention, and the bytes that it reads and writes in memory."""

    flops: float
    num_bytes: int
    is_attention: bool = False


@dataclass(frozen=True)
class LayerCost:
    """What a layer costs on one micro-batch.

    Attributes:
        forward: its kernels, in the pieces between the layer's polls.
        backward: kernels of its backward pass.
        kept_bytes: memory that its graph keeps until backward, beside its weights, inputs and outputs.
        forward_bytes: most memory at once in a forward pass without a graph, beside weights and inputs.
        graph_bytes: the same with a graph.
        backward_bytes: most memory at once in a backward pass, what the graph has kept and the outputs included, beside
            weights, inputs, the outputs' gradient and the flat gradient of its parameters.
    """

    forward: tuple[tuple[KernelCost, ...], ...]
    backward: tuple[KernelCost, ...]
    kept_bytes: int
    forward_bytes: int
    graph_bytes: int
    backward_bytes: int


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count the kernels that run inside, and the memory that they take.

    Args:
        documents: lengths of the documents of a batch, for attention.

    Attributes:
        kernels: those that have run, in pieces.
        bytes, peak: memory taken inside: now, and at most.
    """

    def __init__(self, documents: Sequence[int] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: list[list[KernelCost]] = [[]]
        self.bytes = self.peak = 0
        self._pairs = sum(length * (length + 1) // 2 for length in documents)
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        for output in outputs:
            self._take(output, inputs)
        name = func._schema.name.partition("::")[2]
        if not func.is_view and not name.startswith(("empty", "detach", "_unsafe_view", "new_empty")):
            moved = sum(x.nbytes for x in [*inputs, *outputs])
            self.kernels[-1].append(KernelCost(self._flops(name, inputs), moved, name.startswith(ATTENTION)))
        return result

    def poll(self) -> None:
        """Begin the next piece."""
        self.kernels.append([])

    def _take(self, output: Tensor, inputs: Sequence[Tensor]) -> None:
        storage = output.untyped_storage()
        key = storage._cdata
        if key in self._known or any(x.untyped_storage()._cdata == key for x in inputs):
            return
        size = -(-storage.nbytes() // ALLOCATION_BYTES) * ALLOCATION_BYTES
        self._known.add(key)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
        weakref.finalize(storage, self._release, key, size).atexit = False

    def _release(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.bytes -= size

    def _flops(self, name: str, inputs: Sequence[Tensor]) -> float:
        if name in PRODUCTS:
            left, right = inputs[-2:]
            return 2.0 * left.numel() * right.shape[-1]
        if name.startswith(ATTENTION):
            is_backward = name.endswith("backward")
            query = inputs[1 if is_backward else 0]
            return (10.0 if is_backward else 4.0) * self._pairs * query.shape[-1] * query.shape[-2]
        return 0.0


class _FusedAttention(torch.autograd.Function):
    """Stand in for an accelerator's attention kernel: it keeps no scores, only its inputs, outputs and their norms."""

    @staticmethod
    def forward(ctx: Any, meter: Meter, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out, norms = torch.empty_like(query), torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
        ctx.meter = meter
        ctx.save_for_backward(query, key, value, out, norms)
        meter.kernels[-1].append(_attention(query, 4.0))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, key, value, *_ = ctx.saved_tensors
        ctx.meter.kernels[-1].append(_attention(query, 10.0))
        return None, torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _attention(query: Tensor, factor: float) -> KernelCost:
    """Return the kernel of causal attention in one document, [1, heads, tokens, width]."""
    pairs = query.shape[-2] * (query.shape[-2] + 1) // 2
    return KernelCost(factor * pairs * query.shape[1] * query.shape[-1], int(factor) * query.nbytes, is_attention=True)


class _StandIn(TorchFunctionMode):
    """Have `torch.nn.functional.scaled_dot_product_attention` be one kernel, as it is on an accelerator."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return _FusedAttention.apply(self._meter, *args[:3])  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class LayerInput:
    """What a layer gets: a micro-batch of documents of these lengths, in a width and a type.

    Attributes:
        documents: tokens of each document.
        width: width of the hidden states.
        dtype: data type of the computation.
    """

    documents: tuple[int, ...]
    width: int
    dtype: torch.dtype

    @property
    def tokens(self) -> int:
        return sum(self.documents)

    def batch(self) -> PackedBatch:
        """Return the micro-batch, without data."""
        ids = torch.empty(self.tokens, dtype=torch.int64, device=META)
        return PackedBatch(ids, ids, ids, tuple(accumulate(self.documents, initial=0)))


@lru_cache(maxsize=64)  # advice asks for the same ones again
def measure_block(layer: nn.Module, trained: Layout, given: LayerInput, is_above_trained: bool = True) -> LayerCost:
    """Measure a block on the ``meta`` device, as `step.forward` and `step.backward` run it.

    Args:
        layer: block on the ``meta`` device.
        trained: layout of its trained parameters.
        given: its input.
        is_above_trained: whether the gradient of its input is needed.
    """
    batch = given.batch()
    gradient = torch.empty(given.tokens, given.width, dtype=given.dtype, device=META)
    x = torch.empty(given.tokens, given.width, dtype=given.dtype, device=META, requires_grad=is_above_trained)
    parameters, run = parameters_of(layer, trained, given.dtype), FunctionalLayer(layer).run
    _ = batch.cu_seqlens_T
    with Meter(given.documents) as forward, _StandIn(forward), torch.no_grad():
        run(parameters, x, batch, forward.poll)
    pieces = tuple(tuple(piece) for piece in forward.kernels)
    with Meter(given.documents) as meter, _StandIn(meter):
        output = run(parameters, x, batch, meter.poll)
        if not output.requires_grad:
            return LayerCost(pieces, (), 0, forward.peak, forward.peak, forward.peak)
        kept, graph = meter.bytes - rounded(output), meter.peak
        meter.kernels, meter.peak = [[]], meter.bytes
        torch.autograd.backward(output, gradient)
    return LayerCost(pieces, tuple(meter.kernels[0]), kept, forward.peak, graph, meter.peak)


def measure_blocks(
    layers: Sequence[nn.Module], layouts: Sequence[Layout], given: LayerInput, lowest_trained: int
) -> list[LayerCost]:
    """Measure the blocks of a model; those that are alike, once.

    Args:
        layers: all layers on the ``meta`` device, embedding and head included.
        layouts: layout of the trained parameters of each.
        given: input of each block.
        lowest_trained: the layer at which backward ends.
    """
    firsts = first_alike(layers, layouts, lowest_trained)
    return [measure_block(layers[index], layouts[index], given, index > lowest_trained) for index in firsts]


def first_alike(layers: Sequence[nn.Module], layouts: Sequence[Layout], lowest_trained: int) -> list[int]:
    """Return for each block the number of the first that is like it; arguments as of `measure_blocks`."""
    alike: dict[Any, int] = {}
    firsts = []
    for index in range(1, len(layers) - 1):
        shapes = tuple((name, parameter.shape) for name, parameter in layers[index].named_parameters())
        kind = type(layers[index]), shapes, layouts[index], index > lowest_trained
        firsts.append(alike.setdefault(kind, index))
    return firsts


def embedding_cost(trained: Layout, given: LayerInput) -> LayerCost:
    """Return the cost of the embedding, which reads rows, and in backward makes whole tables of gradients.

    It is not run: that would count the whole table as read.
    """
    hidden = given.tokens * given.width * given.dtype.itemsize
    tables = sum(shape.numel() for shape in trained.shapes.values())
    size = tables * given.dtype.itemsize
    added = KernelCost(0.0, size + 2 * tables * torch.float32.itemsize)
    backward = (KernelCost(0.0, hidden + size), added) if tables else ()
    return LayerCost(((KernelCost(0.0, 2 * hidden),),), backward, 0, 2 * hidden, 2 * hidden, 2 * hidden + size)


@lru_cache(maxsize=64)
def measure_head(
    layer: nn.Module, trained: Layout, given: LayerInput, has_z_loss: bool, is_above_trained: bool = True
) -> LayerCost:
    """Measure the head on one chunk of targets, as `step.head_gradients` runs it; memory, on the second of two chunks.

    Args: as of `measure_block`.
    """
    hidden = torch.empty(given.tokens, given.width, dtype=given.dtype, device=META)
    positions = torch.empty(given.tokens, dtype=torch.int64, device=META)
    parameters, run = parameters_of(layer, trained, given.dtype), FunctionalLayer(layer).run
    with Meter() as meter:
        for _ in range(2):
            meter.kernels = [[]]
            x = hidden[positions].requires_grad_(is_above_trained)
            logits = run(parameters, x, HeadRows())
            loss = F.cross_entropy(logits, positions, reduction="sum")
            if has_z_loss:
                loss = loss + logits.logsumexp(-1).square().sum()
            meter.poll()
            if loss.requires_grad:
                torch.autograd.backward(loss)
    forward, backward = meter.kernels
    return LayerCost((tuple(forward),), tuple(backward), 0, meter.peak, meter.peak, meter.peak)


def rounded(tensor: Tensor) -> int:
    """Return the bytes that an allocator gives for a tensor."""
    return -(-tensor.nbytes // ALLOCATION_BYTES) * ALLOCATION_BYTES


def parameters_of(
    layer: nn.Module, trained: Layout, dtype: torch.dtype, device: torch.device = META
) -> dict[str, Tensor]:
    """Return a layer's parameters, without data; leaves if trained, with gradients summed in fp32."""
    names = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    parameters: dict[str, Tensor] = {}
    for name, whole in names.items():
        is_trained = name in trained.used_shapes
        parameters[name] = leaf = torch.empty(whole.shape, dtype=dtype, device=device, requires_grad=is_trained)
        if is_trained:
            sum_into(leaf, torch.empty(whole.shape, device=device))
    return parameters
