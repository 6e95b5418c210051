"""Implement tensors of a simulated device: each aten operation is queued on the thread's current stream.

An operation gets output shapes from the meta kernel and memory from the simulated allocator at once; CPU kernels
compute its data when the schedule runs it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch._meta_registrations
from support.accelerator.copies import copy, to_copy
from support.accelerator.kernels import EMULATED, draws, seen_keys
from support.accelerator.memory import NAN_BYTE, Access, Block, hull
from support.accelerator.simulation import NAME, Operation, now, show, site

aten = torch.ops.aten
META = torch.device("meta")
CPU = torch.device("cpu")

# Their result, or its shape, is needed by the program: it waits.
NEEDS_DATA = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_consecutive.default,
    aten.unique_dim.default,
    aten.equal.default,
    aten.repeat_interleave.Tensor,
    aten._is_all_true.default,
    aten.is_nonzero.default,
}
INDEXED = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten._unsafe_index.Tensor,
}
ONLY_SCALED = {aten._fused_adamw_.default, aten._fused_adam_.default}  # their schemas name the gradients as written
LOOK_UPS = ("aten::embedding", "aten::index.Tensor", "aten::index_select", "aten::gather")
PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm.dtype_out", "aten::bmm", "aten::baddbmm")


class SimStorage:
    """Provide the storage attributes that a program may read."""

    def __init__(self, block: Block) -> None:
        self._block = block

    def data_ptr(self) -> int:
        return id(self._block)

    def nbytes(self) -> int:
        return self._block.num_bytes


class SimTensor(torch.Tensor):
    """A tensor on the simulated device."""

    data_cpu: torch.Tensor  # values, once computed; on ``meta`` in ghost mode
    block: Block

    @staticmethod
    def __new__(cls, data: torch.Tensor, block: Block) -> SimTensor:
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, strides=data.stride(), storage_offset=data.storage_offset(), dtype=data.dtype,
            device=torch.device(NAME, block.device_index),
        )  # fmt: skip

    def __init__(self, data: torch.Tensor, block: Block) -> None:
        self.data_cpu, self.block = data, block

    def data_ptr(self) -> int:
        return id(self.block) + self.data_cpu.storage_offset() * self.data_cpu.element_size()

    def untyped_storage(self) -> SimStorage:  # type: ignore[override]
        return SimStorage(self.block)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"SimTensor({tuple(self.shape)}, {self.dtype}, {self.device})"

    def tolist(self) -> Any:
        host = self.cpu()
        return torch.ones(host.shape).tolist() if host.is_meta else host.tolist()

    def record_stream(self, stream: Any) -> None:
        raise NotImplementedError("record_stream is not simulated")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


def new(shape: Any, stride: Any, dtype: torch.dtype, index: int, poison: bool = False) -> SimTensor:
    """Allocate a tensor on the current stream of a device; ``poison`` fills it with NaN."""
    num_bytes = hull(shape, stride) * dtype.itemsize
    with _inference(False):
        block = Block(num_bytes, index)
        memory = block.region.bytes
        if memory is not None:
            data = torch.empty(0, dtype=dtype).set_(memory.untyped_storage(), 0, shape, stride)
        else:  # a ghost keeps whole numbers, for its shapes may depend on them
            data = torch.empty_strided(shape, stride, dtype=dtype, device=META if dtype.is_floating_point else CPU)
    if poison and memory is not None and num_bytes:
        used = memory[:num_bytes]
        accesses = ((block.region, 0, num_bytes, True),)
        now().stream(index).put(Operation("allocation", lambda: used.fill_(NAN_BYTE), accesses, "alloc"))
    return SimTensor(data, block)


_AS_IT_IS = nullcontext()


def _inference(mode: bool) -> AbstractContextManager[Any]:
    """Set inference mode; torch's own context manager costs as much as a small operation even if nothing changes."""
    return _AS_IT_IS if torch.is_inference_mode_enabled() is mode else torch.inference_mode(mode)


def access(tensor: SimTensor, writes: bool) -> Access | None:
    """Return the bytes of a tensor; for a view with gaps, its hull."""
    data = tensor.data_cpu
    if data.numel() == 0:
        return None
    item, low = data.element_size(), data.storage_offset() * data.element_size()
    return tensor.block.region, low, low + hull(data.shape, data.stride()) * item, writes


def operation(label: str, reads: Any, writes: Any, run: Callable[[], object] | None, kind: str = "op") -> Operation:
    """Build an operation that reads and writes these tensors."""
    if now().ghost:
        made = Operation(label, run, (), kind)
        written = sum(map(_touched, writes))
        made.num_bytes = written + (written if label in LOOK_UPS else sum(map(_touched, reads)))
        return made
    found = [access(x, False) for x in reads] + [access(x, True) for x in writes]
    return Operation(label, run, tuple(each for each in found if each), kind)


def _touched(tensor: SimTensor) -> int:
    """Count the bytes that an operation moves; for embedding lookups only the rows."""
    data = tensor.data_cpu
    numel = hull(data.shape, data.stride()) if 0 in data.stride() else data.numel()
    return numel * data.element_size()


@dataclass(frozen=True)
class Kernel:
    """Facts from the schema of an operation, looked up once."""

    name: str
    decomposes: bool  # whether it consists of other operations
    is_view: bool  # whether its result shares the memory of its first tensor
    written: tuple[tuple[int, str], ...]  # arguments that it writes, by position and name
    num_returns: int

    @classmethod
    def of(cls, func: Any) -> Kernel:
        returns, arguments = func._schema.returns, func._schema.arguments
        return cls(
            func.name(),
            torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"),
            func is aten._unsafe_view.default
            or (bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)),
            tuple((at, a.name) for at, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write),
            len(returns),
        )


_kernels: dict[Any, Kernel] = {}
_shapes: dict[Any, Any] = {}  # shapes of the results, by operation and arguments


def mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Map a function over the leaves of nested arguments."""
    kind = type(tree)
    if kind is list or kind is tuple:
        return kind([mapped(x, change) for x in tree])
    return change(tree)


def tensors_in(*trees: Any) -> list[torch.Tensor]:
    """Return the tensors among arguments."""
    found: list[torch.Tensor] = []
    for tree in trees:
        if isinstance(tree, torch.Tensor):
            found.append(tree)
        elif isinstance(tree, (list, tuple)):
            found += tensors_in(*tree)
        elif isinstance(tree, dict):
            found += tensors_in(*tree.values())
    return found


def dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    """Queue an aten operation."""
    if func is aten.copy_.default:
        return copy(*args, **kwargs)
    if func is aten._to_copy.default:
        return to_copy(*args, **kwargs)
    if func is aten.is_pinned.default:
        return False
    kernel = _kernels.get(func)
    if kernel is None:
        kernel = _kernels[func] = Kernel.of(func)
    if kernel.decomposes:
        result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
    found = tensors_in(args, kwargs)
    tensors = [x for x in found if isinstance(x, SimTensor)]
    hosts = [x for x in found if not isinstance(x, SimTensor)] if len(tensors) < len(found) else []
    if func in INDEXED and hosts:  # CUDA takes indices from the host, and waits for their copy
        device = args[0].device
        args = mapped(args, lambda x: x.to(device) if type(x) is torch.Tensor and x.ndim else x)
        return dispatch(func, args, kwargs)
    index = _common_device(kernel, tensors, hosts)
    if kernel.name.startswith("torch_attn") and tensors[0].dtype not in (torch.bfloat16, torch.float16):
        raise RuntimeError("FlashAttention only supports fp16 and bf16 data type")
    if kernel.is_view:
        return _view(func, args, kwargs, tensors[0])
    is_masked = func in INDEXED and any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    if func in NEEDS_DATA or is_masked:
        _wait_for(kernel, tensors, index)
        if not kernel.written:
            return _computed_now(func, args, kwargs, index)
    now().check_launch()
    if kernel.written:
        return _in_place(func, kernel, args, kwargs, tensors, index)
    return _new(func, kernel, args, kwargs, tensors, index)


def _common_device(kernel: Kernel, tensors: list[SimTensor], hosts: list[torch.Tensor]) -> int:
    """Return the device of an operation; scalars may be on the host."""
    indices = {x.block.device_index for x in tensors}
    wrong = [f"cpu {tuple(x.shape)}" for x in hosts if x.ndim]
    if wrong or len(indices) > 1:
        places = ", ".join([*(f"{NAME}:{i}" for i in sorted(indices)), *wrong])
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found {places}: {kernel.name} at {show(site())}"
        )
    return indices.pop() if indices else now().device_index


def _data_of(x: Any) -> Any:
    """Return the data of a device tensor; of a host scalar a copy."""
    kind = type(x)
    if kind is SimTensor:
        return x.data_cpu
    return x.clone() if kind is torch.Tensor and x.ndim == 0 and not x.is_meta else x


def _plain(args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
    """Convert arguments for a CPU kernel."""
    named = {key: CPU if key == "device" else mapped(value, _data_of) for key, value in kwargs.items()}
    return mapped(args, _data_of), named


def _has_ghost(*trees: Any) -> bool:
    return now().ghost and any(x.is_meta for x in tensors_in(*trees))


def _wait_for(kernel: Kernel, tensors: list[SimTensor], index: int) -> None:
    simulation = now()
    simulation.note_wait(kernel.name)
    stream = simulation.stream(index)
    stream.put(operation(kernel.name, tensors, [], None))
    stream.finish()


def _computed_now(func: Any, args: Any, kwargs: Any, index: int) -> Any:
    """Compute a result that the program waits for."""
    call_args, call_kwargs = _plain(args, kwargs)
    if _has_ghost(call_args, call_kwargs):
        if func is aten._local_scalar_dense.default:
            return True if args[0].dtype == torch.bool else 1.0
        raise NotImplementedError(f"{func.name()} of a ghost at {show(site())}")

    def given(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        out = new(x.shape, x.stride(), x.dtype, index)
        out.data_cpu.copy_(x)
        return out

    return mapped(func(*call_args, **call_kwargs), given)


def _view(func: Any, args: Any, kwargs: Any, base: SimTensor) -> Any:
    call_args, call_kwargs = _plain(args, kwargs)
    with _inference(False):
        result = func(*call_args, **call_kwargs)
    with _inference(base.is_inference()):  # a view is an inference tensor if its base is one
        return mapped(result, lambda x: SimTensor(x, base.block) if isinstance(x, torch.Tensor) else x)


def _in_place(func: Any, kernel: Kernel, args: Any, kwargs: Any, tensors: list[SimTensor], index: int) -> Any:
    written, outs = list[Any](), list[Any]()
    for at, name in kernel.written:
        if at >= len(args) and name not in kwargs:
            continue
        if name == "grads" and func in ONLY_SCALED and kwargs.get("grad_scale") is None:
            continue
        value = args[at] if at < len(args) else kwargs[name]
        written += tensors_in(value)
        outs.append(value)
    call_args, call_kwargs = _plain(args, kwargs)
    call_kwargs = draws(func, call_kwargs, index)
    compute = EMULATED.get(kernel.name, func)
    run = None if _has_ghost(call_args, call_kwargs) else lambda: compute(*call_args, **call_kwargs)
    changed = set(map(id, written))
    made = operation(kernel.name, [x for x in tensors if id(x) not in changed], written, run)
    made.flops = _count_flops(kernel, args)
    now().stream(index).put(made)
    if not kernel.num_returns:
        return None
    return outs[0] if kernel.num_returns == 1 else tuple(outs)


def _shapes_of(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the form of each result, from the meta kernel."""

    def form(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return x.shape, x.stride(), x.dtype
        return (type(x), tuple(map(form, x))) if isinstance(x, (list, tuple)) else (type(x), x)

    def as_meta(x: Any) -> Any:
        if isinstance(x, SimTensor):
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=META)
        return x

    key = func, form(args), tuple((name, form(value)) for name, value in kwargs.items())
    try:
        return _shapes[key]
    except KeyError:
        pass
    meta_kwargs = {name: META if name == "device" else mapped(value, as_meta) for name, value in kwargs.items()}
    result = func(*mapped(args, as_meta), **meta_kwargs)
    found = mapped(result, lambda x: Form(x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x)
    _shapes[key] = found
    return found


@dataclass(frozen=True)
class Form:
    """Hold shape, strides and dtype of a tensor."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


def _new(func: Any, kernel: Kernel, args: Any, kwargs: Any, tensors: list[SimTensor], index: int) -> Any:
    if kwargs.get("device") is not None:
        index = now().index_of(kwargs["device"])
    forms = _shapes_of(func, args, kwargs)
    outs = mapped(forms, lambda x: new(x.shape, x.stride, x.dtype, index) if isinstance(x, Form) else x)
    made_tensors = tensors_in(outs)
    targets = [x.data_cpu for x in made_tensors]  # type: ignore[attr-defined]
    call_args, call_kwargs = _plain(args, kwargs)
    call_kwargs = draws(func, call_kwargs, index)
    compute = EMULATED.get(kernel.name, func)

    def run() -> None:
        for target, value in zip(targets, tensors_in(compute(*call_args, **call_kwargs)), strict=True):
            target.copy_(value)

    is_ghost = _has_ghost(call_args, call_kwargs, targets)
    made = operation(kernel.name, tensors, made_tensors, None if is_ghost else run)
    made.flops = _count_flops(kernel, args)
    now().stream(index).put(made)
    return outs


def _count_flops(kernel: Kernel, args: Any) -> int:
    """Count the FLOPs of products and attention; other operations are bound by memory."""
    if not now().ghost:
        return 0
    name = kernel.name
    if name.startswith("torch_attn::_varlen_attn"):
        is_backward = name.endswith("backward")
        q, ends, rule = (args[1], args[6], args[10:]) if is_backward else (args[0], args[3], args[7:])
        is_causal = seen_keys(rule[0], rule[3] if is_backward else rule[2])[1] == 0
        lengths = [b - a for a, b in pairwise(ends.data_cpu.tolist())]
        pairs = sum(length * (length + 1) // 2 if is_causal else length**2 for length in lengths)
        return int((10 if is_backward else 4) * pairs * q.shape[1] * q.shape[2])
    if name in PRODUCTS:
        a, b = [x for x in args if isinstance(x, torch.Tensor)][-2:]
        return 2 * a.numel() * int(b.shape[-1])
    return 0


# ------------------------------------------------------------------ tensors made from nothing


def _empty(size: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
           memory_format: Any = None) -> SimTensor:  # fmt: skip
    dtype = dtype or torch.get_default_dtype()
    like = torch.empty(size, dtype=dtype, device=META, memory_format=memory_format)
    return new(like.shape, like.stride(), dtype, now().index_of(device), poison=True)


def _empty_strided(size: Any, stride: Any, dtype: Any = None, layout: Any = None, device: Any = None,
                   pin_memory: Any = None) -> SimTensor:  # fmt: skip
    return new(
        tuple(size), tuple(stride), dtype or torch.get_default_dtype(), now().index_of(device), poison=True
    )  # fmt: skip


def _made(op: Any) -> Callable[..., SimTensor]:
    """Return a kernel for an operation whose output size depends on data."""

    def kernel(*args: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
               **kwargs: Any) -> SimTensor:  # fmt: skip
        index = now().index_of(device)
        now().check_launch()
        value = op(*args, dtype=dtype, device=CPU, **draws(op, kwargs, index))
        out = new(value.shape, value.stride(), value.dtype, index)
        target = out.data_cpu
        run = None if target.is_meta else lambda: target.copy_(value)
        now().stream(index).put(operation(op.name(), [], [out], run))
        return out

    return kernel


def _copy_from(source: Any, target: Any, non_blocking: bool = False) -> Any:
    return copy(target, source, non_blocking)


MADE = ("arange", "arange.start", "arange.start_step", "eye", "eye.m", "linspace", "randperm")


def register_kernels() -> torch.library.Library:
    """Register operations that torch does not dispatch to `SimTensor`; keep the result alive."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", _empty, "PrivateUse1")
    library.impl("empty_strided", _empty_strided, "PrivateUse1")
    library.impl("_copy_from", _copy_from, "PrivateUse1")
    for name in MADE:
        packet, _, overload = name.partition(".")
        library.impl(name, _made(getattr(getattr(aten, packet), overload or "default")), "PrivateUse1")
    return library
