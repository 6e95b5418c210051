"""A GPU that is not there: tensors of a device named ``sim``, whose work is queued on streams and done late.

Every aten operation on a ``sim`` tensor is put into the queue of the thread's current stream. When it is done is up to
a policy: at once, at random, or as late as events, streams and the program's own waits allow. Whatever is missing an
event shows as other numbers, and, by happens-before analysis over byte ranges, as a *race* even where the numbers
happen to agree. Memory that the program lets go of is used again at once by the stream that it was allocated on, as
CUDA's caching allocator does it. Host memory that is not locked in RAM is copied while the program waits.

Beside races there is a list of the places where the program waits for the device (implicit synchronisation), and of
the copies from and to host memory that is not locked.

Needs torch >= 2.9 (PrivateUse1 backends in Python), no compiler, no GPU. Sources of the program are read by an import
hook that puts this device in the place of CUDA, see `patched`; so it is for a process of its own.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import random
import re
import sys
import threading
import weakref
from collections import Counter, defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import torch
import torch._meta_registrations
from torch.utils._pytree import tree_map

NAME = "sim"
aten = torch.ops.aten
LOCK = threading.RLock()


# ---------------------------------------------------------------- clocks, streams, events


def merge(into: dict[int, int], other: dict[int, int]) -> None:
    for key, value in other.items():
        if into.get(key, 0) < value:
            into[key] = value


class Entry:
    """An operation in a stream's queue: what it does, the event it waits for, and what memory it touches."""

    __slots__ = ("accesses", "clock", "done", "fn", "label", "seq", "stream", "wait")

    def __init__(self, stream, label, fn, wait=None):
        self.stream, self.label, self.fn, self.wait = stream, label, fn, wait
        self.done, self.accesses = False, ()


class World:
    """Everything that is simulated; one at a time."""

    def __init__(self, policy: str = "lazy", seed: int = 0, total: int = 80 << 30, package: str = "gptj_ft"):
        self.policy, self.total, self.package = policy, total, package
        self.is_late = policy == "lazy"
        self.random = random.Random(seed)
        self.streams: list[SimStream] = []
        self.local = threading.local()
        self.default: SimStream
        self.pools: dict[tuple[int, int], list[Region]] = defaultdict(list)
        self.pinned: dict[int, int] = {}
        self.races: Counter[tuple[str, str]] = Counter()
        self.examples: dict[tuple[str, str], str] = {}
        self.syncs: Counter[tuple[str, str, str]] = Counter()
        self.unpinned: Counter[tuple[str, str]] = Counter()
        self.current = self.peak = self.reserved = 0

    def stream(self):
        return getattr(self.local, "stream", None) or self.default

    def clock(self) -> dict[int, int]:
        if not hasattr(self.local, "clock"):
            self.local.clock = {}
        return self.local.clock


W: World = None  # type: ignore[assignment]


def start(**options: Any) -> World:
    """Begin a new simulation."""
    global W
    W = World(**options)
    W.default = SimStream(None, name="default")
    return W


def site(depth: int = 40) -> str:
    """Return where the program is: the innermost frames that are the program's own."""
    frame, found = sys._getframe(2), []
    while frame is not None and len(found) < 3:
        name = frame.f_code.co_filename
        if W.package in name:
            found.append(f"{name.split(W.package + '/')[-1]}:{frame.f_lineno}")
        frame = frame.f_back
    if not found:
        found = [threading.current_thread().name]
    return " < ".join(found)


class SimStream:
    def __init__(self, device=None, name=None, priority=0):
        with LOCK:
            self.id, self.queue, self.seq, self.clock = len(W.streams), [], 0, {}
            self.device = torch.device(NAME, 0)
            self.name = name or f"{threading.current_thread().name}"
            self.last = None
            self.world = W
            W.streams.append(self)

    def put(self, entry: Entry) -> Entry:
        with LOCK:
            merge(self.clock, W.clock())
            self.seq += 1
            self.clock[self.id] = self.seq
            entry.seq, entry.clock = self.seq, dict(self.clock)
            for access in entry.accesses:
                access[0].note(access, entry)
            self.queue.append(entry)
            self.last = entry
            step()
            return entry

    def run_until(self, entry: Entry | None) -> None:
        with LOCK:
            while self.queue and not (entry is not None and entry.done):
                first = self.queue[0]
                if first.wait is not None and not first.wait.done:
                    first.wait.stream.run_until(first.wait)
                if not self.queue or self.queue[0] is not first:
                    continue
                self.queue.pop(0)
                if first.fn is not None:
                    with torch.inference_mode(False), torch.no_grad():  # whoever comes by here
                        first.fn()
                first.fn, first.done = None, True

    def ready(self) -> bool:
        return bool(self.queue) and (self.queue[0].wait is None or self.queue[0].wait.done)

    def synchronize(self) -> None:
        note_sync("stream.synchronize")
        with LOCK:
            self.run_until(None)
            merge(W.clock(), self.clock)

    def wait_event(self, event: SimEvent) -> None:
        with LOCK:
            if event.entry is None:
                return
            merge(self.clock, event.clock)
            self.put(Entry(self, "wait", None, event.entry))

    def wait_stream(self, other: SimStream) -> None:
        self.wait_event(other.record_event())

    def record_event(self, event=None):
        event = event or SimEvent()
        event.record(self)
        return event

    def query(self) -> bool:
        with LOCK:
            return not self.queue


class SimEvent:
    def __init__(self, enable_timing=False, blocking=False, interprocess=False):
        self.entry, self.clock = None, {}

    def record(self, stream=None):
        with LOCK:
            stream = stream or W.stream()
            self.entry = stream.put(Entry(stream, "record", None))
            self.clock = dict(stream.clock)

    def query(self) -> bool:
        with LOCK:
            done = self.entry is None or self.entry.done
            if done and self.entry is not None:
                merge(W.clock(), self.clock)
            return done

    def synchronize(self) -> None:
        note_sync("event.synchronize")
        with LOCK:
            if self.entry is not None:
                self.entry.stream.run_until(self.entry)
                merge(W.clock(), self.clock)

    def wait(self, stream=None):
        (stream or W.stream()).wait_event(self)

    def elapsed_time(self, other) -> float:
        assert self.entry.done, "event not ready"
        assert other.entry.done, "event not ready"
        return 0.0


def step() -> None:
    """Do some of what is queued, by the policy; called whenever something was queued."""
    policy = W.policy
    if policy == "lazy":
        return
    if policy == "eager":
        again = True
        while again:
            again = False
            for stream in W.streams:
                while stream.ready():
                    stream.run_until(stream.queue[0])
                    again = True
        return
    if policy.startswith("eager-but-"):  # everything at once, but the default stream or the others late
        late_default = policy.endswith("default")
        for stream in W.streams:
            if (stream is W.default) == late_default:
                continue
            while stream.ready():
                stream.run_until(stream.queue[0])
        return
    if policy == "random":
        while W.random.random() < 0.5:
            stream = W.random.choice(W.streams)
            for _ in range(W.random.randint(1, 6)):
                if stream.ready():
                    stream.run_until(stream.queue[0])


def note_sync(what: str) -> None:
    W.syncs[what, threading.current_thread().name.rstrip("0123456789_"), site()] += 1


# ---------------------------------------------------------------- device memory


class Region:
    """Some device memory, which several blocks have one after the other."""

    def __init__(self, size: int):
        self.size = size
        self.bytes = torch.full((size,), 0xFF, dtype=torch.uint8)  # NaN, in every float type
        self.accesses: list[tuple[int, int, bool, int, int, str]] = []
        self.world = W

    def note(self, access, entry) -> None:
        _, low, high, writes = access
        if self.world is not W:  # of a tensor that outlived a simulation: what is cached, say
            self.world, self.accesses = W, []
        stream, clock, kept = entry.stream.id, entry.clock, []
        where = None
        for old in self.accesses:
            o_low, o_high, o_writes, o_stream, o_seq, o_where = old
            before = clock.get(o_stream, 0) >= o_seq
            if o_low < high and low < o_high and (writes or o_writes) and not before:
                where = where or f"{entry.label} at {site()}"
                key = (o_where, where)
                W.races[key] += 1
                W.examples.setdefault(
                    key,
                    f"{'write' if o_writes else 'read'} on stream {W.streams[o_stream].name} vs "
                    f"{'write' if writes else 'read'} on stream {entry.stream.name}",
                )
            if before and (writes and low <= o_low and o_high <= high):
                continue
            if before and o_low >= low and o_high <= high and o_writes == writes and o_stream == stream:
                continue
            kept.append(old)
        kept.append((low, high, writes, stream, entry.seq, f"{entry.label} at {site()}"))
        self.accesses = kept


class Block:
    """What a tensor and its views lie in; goes back to its stream's pool when the last of them is let go."""

    def __init__(self, nbytes: int):
        self.nbytes = -(-max(nbytes, 1) // 512) * 512
        size = 1 << (self.nbytes - 1).bit_length()
        stream = W.stream()
        with LOCK:
            pool = W.pools[stream.id, size]
            if pool:
                region = pool.pop()
            else:
                region = Region(size)
                W.reserved += size
            W.current += self.nbytes
            W.peak = max(W.peak, W.current)
            if W.current > W.total:
                raise torch.OutOfMemoryError(f"simulated device is out of memory: {W.current} of {W.total} bytes")
        self.region = region
        weakref.finalize(self, _give_back, W, region, stream.id, size, self.nbytes)


def _give_back(world, region, stream, size, nbytes) -> None:
    with LOCK:
        world.current -= nbytes
        world.pools[stream, size].append(region)


class SimStorage:
    def __init__(self, block):
        self._block = block

    def data_ptr(self) -> int:
        return id(self._block)

    def nbytes(self) -> int:
        return self._block.nbytes


class SimTensor(torch.Tensor):
    """A tensor on the simulated device. ``_cpu`` has its numbers, once they have been computed."""

    @staticmethod
    def __new__(cls, cpu, block):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            cpu.shape,
            strides=cpu.stride(),
            storage_offset=cpu.storage_offset(),
            dtype=cpu.dtype,
            device=torch.device(NAME, 0),
        )

    def __init__(self, cpu, block):
        self._cpu, self._block = cpu, block

    def data_ptr(self):
        return id(self._block) + self._cpu.storage_offset() * self._cpu.element_size()

    def untyped_storage(self):
        return SimStorage(self._block)

    def __repr__(self, **_):
        return f"SimTensor({tuple(self.shape)}, {self.dtype})"

    def tolist(self):
        return self.cpu().tolist()

    def record_stream(self, stream):
        raise NotImplementedError("record_stream")

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return dispatch(func, args, kwargs or {})


def new(shape, stride, dtype) -> SimTensor:
    """Allocate a tensor on the current stream."""
    item = torch.empty((), dtype=dtype).element_size()
    extent = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    with torch.inference_mode(False):
        block = Block(extent * item)
        cpu = torch.empty(0, dtype=dtype).set_(block.region.bytes.untyped_storage(), 0, shape, stride)
    return SimTensor(cpu, block)


def access(tensor: SimTensor, writes: bool):
    cpu = tensor._cpu
    if cpu.numel() == 0:
        return None
    item = cpu.element_size()
    low = cpu.storage_offset() * item
    high = low + (1 + sum((n - 1) * s for n, s in zip(cpu.shape, cpu.stride(), strict=True))) * item
    return (tensor._block.region, low, high, writes)


# ---------------------------------------------------------------- operations

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


def dispatch(func, args, kwargs):
    if func in (aten.copy_.default,):
        return copy_(*args, **kwargs)
    if func in (aten._to_copy.default,):
        return to_copy(*args, **kwargs)
    if func in (aten.is_pinned.default,):
        return False
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
    tensors, cpus = [], []

    def collect(x):
        if isinstance(x, SimTensor):
            tensors.append(x)
        elif isinstance(x, torch.Tensor):
            cpus.append(x)
        return x

    tree_map(collect, (args, kwargs))
    returns = func._schema.returns
    if func.name().startswith("torch_attn") and tensors[0].dtype not in (torch.bfloat16, torch.float16):
        raise RuntimeError("FlashAttention only supports fp16 and bf16")
    is_view = returns and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    if is_view or func is aten._unsafe_view.default:
        return view(func, args, kwargs, tensors)
    if func in INDEXED and cpus:  # CUDA takes indices from the host, and waits for their copy
        note_sync(f"{func.name()}: index tensor from the host")
        args = tree_map(lambda x: x.to(f"{NAME}:0") if type(x) is torch.Tensor and x.ndim else x, args)
        return dispatch(func, args, kwargs)
    wrong = [x for x in cpus if x.ndim]
    if wrong:
        raise RuntimeError(
            f"{func.name()}: Expected all tensors to be on the same device, but found {NAME}:0 and cpu "
            f"{[tuple(x.shape) for x in wrong]} at {site()}"
        )
    if func in NEEDS_DATA or (
        func in INDEXED and any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    ):
        note_sync(func.name())
        stream = W.stream()
        stream.put(entry_of(func, tensors, [], stream))
        with LOCK:
            stream.run_until(None)
            merge(W.clock(), stream.clock)
        if is_mutating(func):
            return in_place(func, args, kwargs, tensors)
        return wrap_new(func(*plain(args), **plain(kwargs)))
    if any(r.alias_info is not None and r.alias_info.is_write for r in returns) or is_mutating(func):
        return in_place(func, args, kwargs, tensors)
    return functional(func, args, kwargs, tensors)


def is_mutating(func) -> bool:
    return any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)


def plain(tree):
    """Return the same with the numbers of device tensors in their place, and copies of scalars of the host."""

    def one(x):
        if isinstance(x, SimTensor):
            return x._cpu
        return x.clone() if type(x) is torch.Tensor and x.ndim == 0 and not x.is_meta else x

    return tree_map(one, tree)


def to_device_kwargs(kwargs):
    return {key: torch.device("cpu") if key == "device" else value for key, value in kwargs.items()}


def _tensors(tree):
    found = []
    tree_map(lambda x: found.append(x) if isinstance(x, torch.Tensor) else None, tree)
    return found


def wrap_new(result):
    def wrap(x):
        if not isinstance(x, torch.Tensor):
            return x
        out = new(x.shape, x.stride(), x.dtype)
        out._cpu.copy_(x)
        return out

    return tree_map(wrap, result)


def view(func, args, kwargs, tensors):
    base = tensors[0]
    with torch.inference_mode(False):
        result = func(*plain(args), **plain(kwargs))
    with torch.inference_mode(base.is_inference()):  # a view is of the kind of what it is a view of
        return tree_map(lambda x: SimTensor(x, base._block) if isinstance(x, torch.Tensor) else x, result)


def entry_of(func, reads, writes, stream, fn=None):
    entry = Entry(stream, func.name() if hasattr(func, "name") else func, fn)
    found = [access(x, False) for x in reads] + [access(x, True) for x in writes]
    entry.accesses = tuple(a for a in found if a)
    return entry


ONLY_SCALED = {aten._fused_adamw_.default, aten._fused_adam_.default}  # which say that they write gradients


def in_place(func, args, kwargs, tensors):
    written, outs = [], []
    for schema, value in zip(func._schema.arguments, args, strict=False):
        if func in ONLY_SCALED and schema.name == "grads" and kwargs.get("grad_scale") is None:
            continue
        if schema.alias_info is not None and schema.alias_info.is_write:
            written += [x for x in _tensors(value) if isinstance(x, SimTensor)]
            outs.append(value)
    for schema in func._schema.arguments:
        if schema.name in kwargs and schema.alias_info is not None and schema.alias_info.is_write:
            written += [x for x in _tensors(kwargs[schema.name]) if isinstance(x, SimTensor)]
            outs.append(kwargs[schema.name])
    stream = W.stream()
    call_args, call_kwargs = plain(args), to_device_kwargs(plain(kwargs))

    def fn():
        with torch.no_grad():
            func(*call_args, **call_kwargs)

    entry = entry_of(func, [x for x in tensors if not any(x is w for w in written)], written, stream, fn)
    stream.put(entry)
    if not func._schema.returns:
        return None
    return outs[0] if len(func._schema.returns) == 1 else tuple(outs)


def functional(func, args, kwargs, tensors):
    def as_meta(x):
        if isinstance(x, SimTensor):
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        return x

    meta_kwargs = {k: torch.device("meta") if k == "device" else tree_map(as_meta, v) for k, v in kwargs.items()}
    shapes = func(*tree_map(as_meta, args), **meta_kwargs)
    outs = tree_map(lambda x: new(x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x, shapes)
    targets = [x._cpu for x in _tensors(outs)]
    call_args, call_kwargs = plain(args), to_device_kwargs(plain(kwargs))

    def fn():
        with torch.no_grad():
            found = _tensors(EMULATED.get(func.name(), func)(*call_args, **call_kwargs))
        for target, value in zip(targets, found, strict=True):
            target.copy_(value)

    stream = W.stream()
    stream.put(entry_of(func, tensors, _tensors(outs), stream, fn))
    return outs


# ---------------------------------------------------------------- kernels that a CPU has not


def _scores(q, k, start, end, scale):
    one, two = (x[start:end].float().transpose(0, 1) for x in (q, k))
    mask = torch.ones(end - start, end - start, dtype=torch.bool).triu(1)
    return one, two, (one @ two.transpose(1, 2) * scale).masked_fill(mask, float("-inf"))


def _varlen(q, k, v, ends, ends_k, max_q, max_k, is_causal=False, scale=None, *rest):
    """Attend document by document, in fp32."""
    scale, outs, logsums = q.shape[-1] ** -0.5 if scale is None else scale, [], []
    for start, end in pairwise(ends.tolist()):
        scores = _scores(q, k, start, end, scale)[2]
        logsums.append(scores.logsumexp(-1))
        outs.append((scores.softmax(-1) @ v[start:end].float().transpose(0, 1)).transpose(0, 1))
    return torch.cat(outs).to(q.dtype), torch.cat(logsums, dim=1), torch.zeros(2, dtype=torch.uint64)


def _varlen_backward(grad, q, k, v, out, lse, ends, ends_k, max_q, max_k, is_causal, rng, scale=None, *rest):
    scale, grads = q.shape[-1] ** -0.5 if scale is None else scale, []
    for start, end in pairwise(ends.tolist()):
        one, two, scores = _scores(q, k, start, end, scale)
        weights, above = scores.softmax(-1), grad[start:end].float().transpose(0, 1)
        of_weights = above @ v[start:end].float().transpose(0, 1).transpose(1, 2)
        of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * scale
        found = of_scores @ two, of_scores.transpose(1, 2) @ one, weights.transpose(1, 2) @ above
        grads.append([x.transpose(0, 1) for x in found])
    return tuple(torch.cat(parts).to(q.dtype) for parts in zip(*grads, strict=True))


def _layer_norm_backward(grad, x, shape, mean, rstd, weight, bias, mask):
    """Statistics are fp32 on a GPU whatever the inputs are; a CPU wants them in the type of the weights."""
    kind = x.dtype if weight is None else weight.dtype
    return aten.native_layer_norm_backward.default(grad, x, shape, mean.to(kind), rstd.to(kind), weight, bias, mask)


EMULATED = {
    "torch_attn::_varlen_attn": _varlen,
    "torch_attn::_varlen_attn_backward": _varlen_backward,
    "aten::native_layer_norm_backward": _layer_norm_backward,
}


# ---------------------------------------------------------------- copies


def is_pinned(x: torch.Tensor) -> bool:
    at = x.data_ptr()
    return any(low <= at and at + x.nbytes <= low + size for low, size in W.pinned.items())


def copy_(target, source, non_blocking=False):
    stream = W.stream()
    to_sim, from_sim = isinstance(target, SimTensor), isinstance(source, SimTensor)
    if to_sim and from_sim:
        t, s = target._cpu, source._cpu
        stream.put(entry_of("copy_ d2d", [source], [target], stream, lambda: t.copy_(s)))
        return target
    host, device = (source, target) if to_sim else (target, source)
    kind = "copy_ h2d" if to_sim else "copy_ d2h"
    if host.ndim == 0 and to_sim:
        host = host.clone()  # by value
        pinned = True
    else:
        pinned = is_pinned(host)
    if not pinned and host.nbytes >= 1 << 16:
        W.unpinned[kind, site()] += host.nbytes
    is_async = non_blocking and pinned
    if to_sim and not pinned:
        if non_blocking:
            note_sync(f"{kind} non_blocking from pageable memory, {host.nbytes} bytes")
        source_now = host.detach().clone()  # the driver's staging buffer
    else:
        source_now = host
    cpu = device._cpu

    def fn():
        if to_sim:
            cpu.copy_(source_now)
        else:
            host.copy_(cpu)

    stream.put(entry_of(kind, [] if to_sim else [device], [device] if to_sim else [], stream, fn))
    if not is_async and not (to_sim and host.ndim == 0):
        note_sync(f"{kind} blocking, {'pinned' if pinned else 'pageable'}")
        with LOCK:
            stream.run_until(None)
            merge(W.clock(), stream.clock)
    return target


def to_copy(x, *, dtype=None, layout=None, device=None, pin_memory=None, non_blocking=False, memory_format=None):
    dtype = dtype or x.dtype
    goes_to = torch.device(device) if device is not None else torch.device(NAME, 0)
    if goes_to.type == NAME:
        like = torch.empty_strided(x.shape, x.stride(), dtype=dtype, device="meta")
        like = torch.empty_like(like, memory_format=memory_format or torch.preserve_format)
        out = new(like.shape, like.stride(), dtype)
        return copy_(out, x, non_blocking)
    like = torch.empty_like(torch.empty_strided(x.shape, x.stride(), device="meta"))
    out = torch.empty_strided(like.shape, like.stride(), dtype=x.dtype)
    copy_(out, x, non_blocking)
    return out.to(dtype)


def _empty(size, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    dtype = dtype or torch.get_default_dtype()
    like = torch.empty(size, dtype=dtype, device="meta", memory_format=memory_format)
    return new(like.shape, like.stride(), dtype)


def _empty_strided(size, stride, dtype=None, layout=None, device=None, pin_memory=None):
    return new(tuple(size), tuple(stride), dtype or torch.get_default_dtype())


def _made(op):
    """Return a kernel for what makes a tensor of a size that it finds out itself."""

    def kernel(*args, dtype=None, layout=None, device=None, pin_memory=None, **kwargs):
        value = op(*args, dtype=dtype, device="cpu", **kwargs)
        out, stream = new(value.shape, value.stride(), value.dtype), W.stream()
        target = out._cpu
        stream.put(entry_of(op, [], [out], stream, lambda: target.copy_(value)))
        return out

    return kernel


MADE = ("arange", "arange.start", "arange.start_step", "eye", "eye.m", "linspace", "randperm")


def _copy_from(source, target, non_blocking=False):
    copy_(target, source, non_blocking)
    return target


# ---------------------------------------------------------------- the module that stands for torch.cuda


class CudaRt:
    @staticmethod
    def cudaHostRegister(address, size, flags):
        W.pinned[address] = size
        return 0

    @staticmethod
    def cudaHostUnregister(address):
        del W.pinned[address]
        return 0


class Module:
    Stream, Event = SimStream, SimEvent

    def __getattr__(self, name):
        raise AttributeError(f"torch.{NAME}.{name} is not simulated")

    def is_initialized(self):
        return True

    def is_available(self):
        return True

    def current_device(self):
        return 0

    def device_count(self):
        return 1

    def _is_in_bad_fork(self):
        return False

    def manual_seed(self, seed):
        return None

    def manual_seed_all(self, seed):
        return None

    def set_device(self, device):
        if isinstance(device, torch.device) and device.index is None:  # what torch.cuda.set_device does
            raise ValueError(f"Expected a torch.device with a specified index or an integer, but got:{device}")

    def current_stream(self, device=None):
        return W.stream()

    def set_stream(self, stream):
        W.local.stream = stream

    @contextlib.contextmanager
    def stream(self, stream):
        before = getattr(W.local, "stream", None)
        W.local.stream = stream
        try:
            yield
        finally:
            W.local.stream = before

    def synchronize(self, device=None):
        note_sync("device.synchronize")
        for stream in list(W.streams):
            with LOCK:
                stream.run_until(None)
                merge(W.clock(), stream.clock)

    def cudart(self):
        return CudaRt

    def mem_get_info(self, device=None):
        return W.total - W.current, W.total

    def max_memory_allocated(self, device=None):
        return W.peak

    def max_memory_reserved(self, device=None):
        return W.reserved

    def reset_peak_memory_stats(self, device=None):
        W.peak = W.current

    def empty_cache(self):
        return None

    def get_device_properties(self, device=None):
        return None

    def is_bf16_supported(self, including_emulation=False):
        return True

    def get_device_name(self, device=None):
        return "simulated"

    def get_rng_state(self, device=None):
        return torch.empty(0, dtype=torch.uint8)

    def set_rng_state(self, state, device=None):
        return None

    def get_amp_supported_dtype(self):
        return [torch.bfloat16]


_installed: list[Any] = []


def install() -> None:
    """Register the device with torch, and have futures hand on what a thread knows of the device."""
    if _installed:
        return
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(NAME, backend_module=Module())
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", _empty, "PrivateUse1")
    library.impl("empty_strided", _empty_strided, "PrivateUse1")
    library.impl("_copy_from", _copy_from, "PrivateUse1")
    for name in MADE:
        packet, _, overload = name.partition(".")
        library.impl(name, _made(getattr(getattr(aten, packet), overload or "default")), "PrivateUse1")
    _installed.append(library)
    _carry_clocks()


def _carry_clocks() -> None:
    set_result, set_exception, submit = Future.set_result, Future.set_exception, ThreadPoolExecutor.submit
    result, exception, done = Future.result, Future.exception, Future.done

    def at_end(plain_set):
        def patched(self, value):
            if W is not None:
                self._clock = dict(W.clock())
            return plain_set(self, value)

        return patched

    def after(plain_get, counts=lambda found: True):
        def patched(self, *args, **kwargs):
            found = plain_get(self, *args, **kwargs)
            if W is not None and counts(found) and hasattr(self, "_clock"):
                merge(W.clock(), self._clock)
            return found

        return patched

    def patched_submit(self, fn, /, *args, **kwargs):
        if W is None:
            return submit(self, fn, *args, **kwargs)
        clock = dict(W.clock())

        def run(*a, **k):
            merge(W.clock(), clock)
            return fn(*a, **k)

        return submit(self, run, *args, **kwargs)

    Future.set_result, Future.set_exception = at_end(set_result), at_end(set_exception)
    Future.result, Future.exception = after(result), after(exception)
    known_done = after(done, bool)
    # Late transfers are never done before somebody waits for them: what relies on luck is found.
    Future.done = lambda self: False if W is not None and W.is_late and not _is_library() else known_done(self)
    ThreadPoolExecutor.submit = patched_submit


# ---------------------------------------------------------------- the program, with this device in CUDA's place


def _is_library() -> bool:
    """Tell whether `Future.done` was called by anything but the program."""
    return W.package not in sys._getframe(2).f_code.co_filename


class _Loader(importlib.machinery.SourceFileLoader):
    def get_data(self, path):
        data = super().get_data(path)
        if not path.endswith(".py"):
            return data
        return rewrite(data.decode()).encode()

    def get_code(self, fullname):  # no cached bytecode
        return compile(self.get_data(self.path), self.path, "exec", dont_inherit=True)


def rewrite(text: str) -> str:
    """Put this device in the place of CUDA, line by line: file and line numbers stay."""
    text = re.sub(r'(["\'])cuda\1', f'"{NAME}"', text)
    text = re.sub(r"\btorch\.cuda\b", f"torch.{NAME}", text)
    return re.sub(r"fork_rng\(\[device\] if device\.type == \"sim\" else \[\]\)", "fork_rng([])", text)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, packages):
        self.packages = packages

    def find_spec(self, fullname, path=None, target=None):
        if fullname.split(".")[0] not in self.packages:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec and spec.origin and spec.origin.endswith(".py"):
            spec.loader = _Loader(fullname, spec.origin)
            return spec
        return None


def patched(*packages: str) -> None:
    """From now on, import these packages with this device in the place of CUDA."""
    install()


def report(limit: int = 30) -> str:
    """Say what was found."""
    lines = [f"races: {len(W.races)} pairs of places, {sum(W.races.values())} times"]
    for (a, b), count in W.races.most_common(limit):
        lines += [f"  {count:5d} x {W.examples[a, b]}", f"        {a}", f"        {b}"]
    lines.append(f"waits of the program for the device: {sum(W.syncs.values())}")
    lines += [
        f"  {count:5d} x {what} [{thread}] {where}" for (what, thread, where), count in W.syncs.most_common(limit)
    ]
    lines.append("copies from or to memory that is not locked, of 64 KiB and more:")
    lines += [f"  {size:10d} bytes {kind} {where}" for (kind, where), size in W.unpinned.most_common(limit)]
    return "\n".join(lines)
