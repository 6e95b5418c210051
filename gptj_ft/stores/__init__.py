"""Where a layer's tensors live: one contract, three places. A store moves bytes and computes nothing.

A layer's tensors of one *kind* (its weights, say, or its first moments) lie in one flat tensor, at the same offsets
in every place, because a BLAS may round differently by alignment.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from gptj_ft.linear import TiedLinear

T = TypeVar("T")
Kind = Literal["weight", "master", "exp_avg", "exp_avg_sq", "grad", "frozen", "boundary"]
MOMENTS: tuple[Kind, Kind] = ("exp_avg", "exp_avg_sq")

PARAMETER_ALIGNMENT = 32  # elements: 64 bytes in bf16, a cache line and the widest vector register
PART_NUMEL = 1 << 22  # elements moved, checked and updated at once: 16 MiB in fp32
FLAT_ALIGNMENT = 2048  # elements: a 4096-byte page in bf16, so that kinds in a file start on page boundaries
LENDER = 0  # the layer that others may borrow parameters of: the embedding


class Loan(NamedTuple):
    """A parameter of the first layer that another one computes with, too."""

    source: str
    """Its name in the first layer."""
    shape: torch.Size


@dataclass(frozen=True)
class Layout:
    """Where each parameter of a layer lies in the layer's flat tensors, in elements.

    Matrices come first: weight decay applies to ``flat[:num_decayed]`` and to nothing else (biases, norms, padding).
    What a layer borrows is no part of its tensors: it has its place, its update and its checksum in the layer it is of.
    """

    shapes: Mapping[str, torch.Size]
    offsets: Mapping[str, int]
    num_decayed: int
    numel: int
    borrowed: Mapping[str, Loan] = field(default_factory=dict)
    copied: frozenset[str] = frozenset()
    """Those of the shapes that are another layer's, too: what nobody changes may be here a second time."""

    @classmethod
    def of(cls, layer: nn.Module, names: Container[str] | None = None, copies: bool = False) -> Layout:
        """Lay out a layer's parameters.

        Args:
            layer: it.
            names: those that it is about; none: all.
            copies: whether what the layer borrows has a place among its own.
        """
        loans = {name: loan for name, loan in loans_of(layer).items() if names is None or name in names}
        shapes = {
            name: parameter.shape for name, parameter in layer.named_parameters() if names is None or name in names
        }
        if copies:
            shapes |= {name: loan.shape for name, loan in loans.items()}
        offsets, offset, num_decayed = {}, 0, 0
        adjacent = getattr(layer, "adjacent", ())
        # stable: keeps the layer's order
        for name in sorted(shapes, key=lambda name: (len(shapes[name]) < 2, name not in adjacent)):
            offsets[name] = offset
            offset = _round_up(offset + shapes[name].numel(), PARAMETER_ALIGNMENT)
            if len(shapes[name]) >= 2:
                num_decayed = offset
        numel = _round_up(offset, FLAT_ALIGNMENT)
        return cls(shapes, offsets, num_decayed, numel, {} if copies else loans, frozenset(loans if copies else ()))

    @cached_property
    def num_parameters(self) -> int:
        return sum(shape.numel() for name, shape in self.shapes.items() if name not in self.copied)

    @cached_property
    def used_shapes(self) -> dict[str, torch.Size]:
        """Shapes of all parameters that the layer computes with, those that it borrows included."""
        return {**self.shapes, **{name: loan.shape for name, loan in self.borrowed.items()}}

    @cached_property
    def num_used(self) -> int:
        return sum(shape.numel() for shape in self.used_shapes.values())

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return each parameter as a view of a flat tensor."""
        return {
            name: flat[self.offsets[name] : self.offsets[name] + shape.numel()].view(shape)
            for name, shape in self.shapes.items()
        }


def loans_of(layer: nn.Module) -> dict[str, Loan]:
    """Return what a layer computes with that is a parameter of the first one."""
    return {
        f"{path}.weight": Loan(module.source, module.weight.shape)
        for path, module in layer.named_modules()
        if isinstance(module, TiedLinear)
    }


class Transfer(Protocol):
    """Bytes on their way, or other work that one may have to wait for: a `Future`, or a `cuda.Mark`."""

    def result(self) -> Any:
        """Wait for the end; raise what went wrong."""

    def done(self) -> bool:
        """Tell whether it has ended."""

    def exception(self) -> BaseException | None:
        """Return what went wrong, if it has ended."""


class LayerStore(Protocol):
    """Holds some kinds of every layer, in whole or in spans of elements. Transfers are asynchronous.

    A read sees what was committed before it was asked for; what is written after that commit it may see or not.
    """

    resident: bool
    """Whether `read` returns the store's own tensor, on the device, to be used and changed in place."""

    def read(
        self, kind: Kind, layer: int, out: Tensor | None, start: int = 0, after: Sequence[Transfer] = ()
    ) -> Future[Tensor]:
        """Fetch a flat tensor, or as many elements of it as ``out`` holds.

        Args:
            kind: what to read.
            layer: its layer.
            out: where it goes on the device; resident stores ignore it and return the whole.
            start: the first element.
            after: transfers that still use ``out`` and must end first.
        """

    def read_rows(self, kind: Kind, layer: int, name: str, rows: Sequence[int], out: Tensor) -> None:
        """Fetch some rows of a matrix that nobody writes, and wait for them; not where it is resident.

        Args:
            kind: what to read.
            layer: its layer.
            name: of the matrix in the layer.
            rows: which.
            out: where they go on the device, [rows, width].
        """

    def write(
        self, kind: Kind, layer: int, values: Tensor, start: int = 0, after: Sequence[Transfer] = ()
    ) -> Future[None]:
        """Keep new values from element ``start`` on; they are there after ``after``, and change after this."""

    def commit(self, layer: int, step: int) -> None:
        """Every kind of the layer has been written: together they are its state after ``step``."""

    def then(self, task: Callable[[], None]) -> Future[None]:
        """Run a task after everything written so far, and before anything written later."""

    def drain(self) -> None:
        """Wait for every transfer; raise what any of them raised."""

    def close(self) -> None:
        """End every transfer and give the memory back."""


def parts(numel: int, part_numel: int) -> list[slice]:
    """Cut a flat tensor into parts, the last of which may be smaller."""
    return [slice(start, min(start + part_numel, numel)) for start in range(0, numel, part_numel)]


def allocate(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a flat tensor that starts on a page boundary in every place; zeros on the CPU."""
    if device.type != "cpu":
        return torch.zeros(numel, dtype=dtype, device=device)
    return torch.frombuffer(pages(numel * dtype.itemsize), dtype=dtype, count=numel)


def pages(num_bytes: int) -> mmap.mmap:
    """Return memory of so many bytes, one at least, that starts on a page boundary; zeros."""
    buffer = mmap.mmap(-1, max(num_bytes, 1))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        buffer.madvise(mmap.MADV_HUGEPAGE)  # fewer page faults and TLB misses on gigabytes
    return buffer


def finished(value: T) -> Future[T]:
    """Return a future that already holds its value."""
    future: Future[T] = Future()
    future.set_result(value)
    return future


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
