"""Run a layer once on the meta device: its kernels, the memory that its graph keeps, its peak memory.

This works for any architecture: the layer's own code runs under autograd.
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

from gptj_ft.models.batch import NO_TARGET, HeadRows, PackedBatch
from gptj_ft.models.dropout import Dropout
from gptj_ft.models.functional import FunctionalLayer
from gptj_ft.models.layout import Layout
from gptj_ft.streaming.loaded_layer import sum_into
from gptj_ft.system.accelerator import META

ALLOCATION_BYTES = 512  # an accelerator's allocator rounds up to multiples of it
ATTENTION = "_varlen_attn"
PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "baddbmm"}


@dataclass(frozen=True)
class KernelCost:
    """FLOPs of a kernel, and the bytes that it reads and writes in memory."""

    flops: float
    num_bytes: int
    is_attention: bool = False


@dataclass(frozen=True)
class LayerCost:
    """Cost of a layer on one micro-batch; memory without weights, inputs and the flat gradient."""

    forward: tuple[tuple[KernelCost, ...], ...]  # the layer polls between these pieces
    backward: tuple[KernelCost, ...]
    kept_bytes: int  # kept by the graph until backward, without the output
    forward_bytes: int  # peak of a forward pass without a graph
    graph_bytes: int  # the same with a graph
    backward_bytes: int  # peak of a backward pass, graph and output included


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count the kernels that run inside, and the memory that they allocate.

    Args:
        documents: lengths of the batch's documents, for attention.
    """

    def __init__(self, documents: Sequence[int] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: list[list[KernelCost]] = [[]]  # in pieces
        self.bytes = self.peak = 0  # allocated
        self._documents = documents
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # Once each: `addmm` may write into one of its inputs.
        inputs = [*dict.fromkeys(x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))]
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        for output in outputs:
            self._take(output, inputs)
        name = func._schema.name.partition("::")[2]
        # Views and these operations start no kernel.
        if not func.is_view and not name.startswith(("empty", "detach", "_unsafe_view", "new_empty")):
            moved = sum(x.nbytes for x in [*inputs, *outputs])
            self.kernels[-1].append(KernelCost(self._flops(name, inputs, args), moved, name.startswith(ATTENTION)))
        return result

    def poll(self) -> None:
        """Start the next piece."""
        self.kernels.append([])

    def _take(self, output: Tensor, inputs: Sequence[Tensor]) -> None:
        storage = output.untyped_storage()
        key = storage._cdata
        # Views and in-place results share the storage of an input: no allocation.
        if key in self._known or any(x.untyped_storage()._cdata == key for x in inputs):
            return
        size = -(-storage.nbytes() // ALLOCATION_BYTES) * ALLOCATION_BYTES
        self._known.add(key)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
        # A storage is freed with its last tensor. At exit the meter may be gone already.
        weakref.finalize(storage, self._release, key, size).atexit = False

    def _release(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.bytes -= size

    def _flops(self, name: str, inputs: Sequence[Tensor], args: Sequence[Any]) -> float:
        if name in PRODUCTS:
            # `addmm` and `baddbmm` have the bias before the factors.
            left, right = [x for x in args if isinstance(x, Tensor)][-2:]
            return 2.0 * left.numel() * right.shape[-1]
        if name.startswith(ATTENTION):
            # Two FLOPs per pair and product: forward has two products, backward five and the output's gradient first.
            is_backward = name.endswith("backward")
            query = inputs[1 if is_backward else 0]
            # The only list of numbers is the window: keys before and after a query, -1 for all.
            before = next((arg[0] for arg in args if isinstance(arg, (list, tuple))), -1)
            pairs = sum(_causal_pairs(length, before + 1 or length) for length in self._documents)
            return (10.0 if is_backward else 4.0) * pairs * query.shape[-1] * query.shape[-2]
        return 0.0


class _FusedAttention(torch.autograd.Function):
    """Imitate an accelerator's attention kernel: it keeps inputs, outputs and their norms, but no scores."""

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


def _causal_pairs(length: int, window: int) -> int:
    """Count the pairs of a query and a visible key in a document."""
    window = min(window, length)
    return window * (window + 1) // 2 + (length - window) * window


def _attention(query: Tensor, factor: float) -> KernelCost:
    """Return the kernel of causal attention over one document, [groups, heads of a group, tokens, width]."""
    groups, heads, tokens, width = query.shape
    flops = factor * _causal_pairs(tokens, tokens) * groups * heads * width
    return KernelCost(flops, int(factor) * query.nbytes, is_attention=True)


class _FuseAttention(TorchFunctionMode):
    """Replace `torch.nn.functional.scaled_dot_product_attention` by one kernel, as on an accelerator."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return _FusedAttention.apply(self._meter, *args[:3])  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class LayerInput:
    """Shape of a layer's input: a micro-batch of documents."""

    documents: tuple[int, ...]  # tokens of each
    width: int
    dtype: torch.dtype

    @classmethod
    def of_rows(cls, tokens: int, row: int, width: int, dtype: torch.dtype) -> LayerInput:
        """Return a micro-batch of rows of one length, and a shorter row for the rest."""
        row = max(1, min(tokens, row))
        number, rest = divmod(tokens, row)
        return cls((row,) * number + ((rest,) if rest else ()), width, dtype)

    @property
    def tokens(self) -> int:
        return sum(self.documents)

    def batch(self, drops: bool = False) -> PackedBatch:
        """Return the micro-batch without data and targets.

        Args:
            drops: the layer has dropout, so the documents have seeds.
        """
        ends = tuple(accumulate(self.documents, initial=0))
        if drops:  # seeds are hashed on the CPU, and their keys moved
            ids = torch.full((self.tokens,), NO_TARGET)
            return PackedBatch(ids, ids, ids, ends, seeds=tuple(range(len(self.documents)))).to(META)
        ids = torch.empty(self.tokens, dtype=torch.int64, device=META)
        return PackedBatch(ids, ids, ids, ends)


@lru_cache(maxsize=64)  # suggestions ask for the same ones again
def measure_block(layer: nn.Module, trained: Layout, shape: LayerInput, is_above_trained: bool = True) -> LayerCost:
    """Measure a block as `step.forward` and `step.backward` run it.

    Args:
        layer: block on the meta device.
        trained: its trained parameters.
        is_above_trained: backward computes the gradient of its input.
    """
    batch = shape.batch(drops=has_dropout(layer))
    gradient = torch.empty(shape.tokens, shape.width, dtype=shape.dtype, device=META)
    x = torch.empty(shape.tokens, shape.width, dtype=shape.dtype, device=META, requires_grad=is_above_trained)
    parameters, run = parameters_of(layer, trained, shape.dtype), FunctionalLayer(layer).run
    _ = batch.cu_seqlens_T, batch.noise  # cached here, so that the meter does not count them
    with Meter(shape.documents) as forward, _FuseAttention(forward), torch.no_grad():
        run(parameters, x, batch, forward.poll)
    pieces = tuple(tuple(piece) for piece in forward.kernels)
    with Meter(shape.documents) as meter, _FuseAttention(meter):
        output = run(parameters, x, batch, meter.poll)
        if not output.requires_grad:
            return LayerCost(pieces, (), 0, forward.peak, forward.peak, forward.peak)
        # Still allocated after forward: the graph's saved tensors, and the output.
        kept, graph = meter.bytes - rounded(output), meter.peak
        meter.kernels, meter.peak = [[]], meter.bytes
        torch.autograd.backward(output, gradient)
    return LayerCost(pieces, tuple(meter.kernels[0]), kept, forward.peak, graph, meter.peak)


def has_dropout(layer: nn.Module) -> bool:
    """Tell whether a layer draws noise in training."""
    return any(isinstance(module, Dropout) and module.rate for module in layer.modules())


def measure_blocks(
    layers: Sequence[nn.Module], layouts: Sequence[Layout], shape: LayerInput, lowest_trained: int
) -> list[LayerCost]:
    """Measure the blocks of a model, equal ones once.

    Args:
        layers: all layers on the meta device, embedding and head included.
        layouts: trained parameters of each layer.
        lowest_trained: the layer at which backward ends.
    """
    firsts = first_alike(layers, layouts, lowest_trained)
    return [measure_block(layers[index], layouts[index], shape, index > lowest_trained) for index in firsts]


def first_alike(layers: Sequence[nn.Module], layouts: Sequence[Layout], lowest_trained: int) -> list[int]:
    """Return for each block the index of the first block with the same class, shapes, layout and backward."""
    alike: dict[Any, int] = {}
    firsts = []
    for index in range(1, len(layers) - 1):
        shapes = tuple((name, parameter.shape) for name, parameter in layers[index].named_parameters())
        windows = tuple(getattr(module, "window", None) for module in layers[index].modules())
        kind = type(layers[index]), shapes, windows, layouts[index], index > lowest_trained
        firsts.append(alike.setdefault(kind, index))
    return firsts


def embedding_cost(trained: Layout, shape: LayerInput) -> LayerCost:
    """Return the cost of the embedding: it reads rows, and backward makes gradients of whole tables."""
    # Not measured: the meter would count the whole table as read.
    hidden = shape.tokens * shape.width * shape.dtype.itemsize
    tables = sum(table.numel() for table in trained.shapes.values())
    size = tables * shape.dtype.itemsize
    added = KernelCost(0.0, size + 2 * tables * torch.float32.itemsize)
    backward = (KernelCost(0.0, hidden + size), added) if tables else ()
    return LayerCost(((KernelCost(0.0, 2 * hidden),),), backward, 0, 2 * hidden, 2 * hidden, 2 * hidden + size)


@lru_cache(maxsize=64)
def measure_head(
    layer: nn.Module, trained: Layout, shape: LayerInput, has_z_loss: bool, is_above_trained: bool = True
) -> LayerCost:
    """Measure the head on a chunk of targets as `step.head_gradients` runs it; its memory on the second chunk."""
    hidden = torch.empty(shape.tokens, shape.width, dtype=shape.dtype, device=META)
    positions = torch.empty(shape.tokens, dtype=torch.int64, device=META)
    parameters, run = parameters_of(layer, trained, shape.dtype), FunctionalLayer(layer).run
    with Meter() as meter:
        # Twice: tensors of a chunk live until those of the next chunk replace them.
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
    """Return the bytes that an allocator takes for a tensor."""
    return -(-tensor.nbytes // ALLOCATION_BYTES) * ALLOCATION_BYTES


def parameters_of(
    layer: nn.Module, trained: Layout, dtype: torch.dtype, device: torch.device = META
) -> dict[str, Tensor]:
    """Return a layer's parameters without data; the trained ones are leaves whose gradients are summed in fp32."""
    names = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    parameters: dict[str, Tensor] = {}
    for name, whole in names.items():
        is_trained = name in trained.used_shapes
        parameters[name] = leaf = torch.empty(whole.shape, dtype=dtype, device=device, requires_grad=is_trained)
        if is_trained:
            sum_into(leaf, torch.empty(whole.shape, device=device))
    return parameters
