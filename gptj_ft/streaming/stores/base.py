"""Base class of the stores that hold layers' tensors on the device, in host memory or on disk.

A store moves bytes and computes nothing. All tensors of one *kind* in a layer (its weights, say, or its first moments)
lie in one flat tensor. Their offsets are the same in every store, because a BLAS may round differently by alignment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

from torch import Tensor

from gptj_ft.models.layout import Kind
from gptj_ft.system.accelerator import Transfer

T = TypeVar("T")

CHUNK_NUMEL = 1 << 22  # elements moved, checked and updated at once: 16 MiB in fp32


class Span(NamedTuple):
    """Elements of a layer's flat tensor of one kind. The transferred tensor has their number."""

    kind: Kind
    layer: int
    start: int = 0
    after: Sequence[Transfer] = ()  # transfers that must end before this one touches the tensor


class LayerStore:
    """Store of some kinds of every layer. Transfers are asynchronous.

    A read returns the state committed before the call. It may or may not see later writes.
    """

    digest_numel: int = 0  # elements per digest; 0: the store keeps no digests

    def keeps(self, layer: int) -> bool:
        """Tell whether a store that is split by layer keeps this one in memory."""
        return False

    def part(self, layer: int) -> LayerStore:
        """Return the store that holds a layer: this one, unless it is split by layer."""
        return self

    def own(self, kind: Kind, layer: int) -> Tensor | None:
        """Return the store's flat tensor on the device, to use and change in place; None: read and write instead."""
        return None

    def in_host(self, kind: Kind, layer: int) -> Tensor | None:
        """Return the store's flat tensor in host memory, valid while no transfer is pending; None: not in memory."""
        return None

    def bytes_moved(self, span: Span, out: Tensor) -> int:
        """Return the bytes that a read moves."""
        return out.nbytes

    def read(self, span: Span, out: Tensor) -> Future[Tensor]:
        """Read as many elements as ``out`` holds into this flat device tensor."""
        raise AssertionError("internal error: read from a store of resident tensors")

    def read_rows(self, span: Span, name: str, rows: Sequence[int], out: Tensor) -> None:
        """Read rows of a frozen matrix and wait for them.

        Args:
            span: kind and layer of the matrix, and work that still uses ``out``.
            name: name of the matrix in the layer.
            out: target on the device, [rows, width].
        """
        raise AssertionError("internal error: the whole matrix is loaded")

    def write(self, span: Span, values: Tensor, digests: Sequence[str] = ()) -> Future[None]:
        """Write flat values from element ``span.start`` on.

        Args:
            values: flat; they are complete after ``span.after``, and must not change until the future is done.
            digests: digests of the values, if the caller has computed them already.
        """
        raise AssertionError("internal error: write to a read-only store")

    def commit(self, layer: int, step: int) -> None:
        """Commit a layer: every kind has been written, and together they are the layer's state after ``step``."""

    def then(self, task: Callable[[], None]) -> Future[None]:
        """Run a task after all writes so far, and before all later ones."""
        task()
        return finished(None)

    def drain(self) -> None:
        """Wait for every write and commit; raise the first error."""

    def close(self) -> None:
        """Stop the transfers and free the memory."""


def chunks(numel: int, chunk_numel: int) -> list[slice]:
    """Cut a flat tensor into parts, the last of which may be smaller."""
    return [slice(start, min(start + chunk_numel, numel)) for start in range(0, numel, chunk_numel)]


class FinishedFuture(Future[T]):
    """A future with a result from the start. It takes no lock: a forecast asks millions of times."""

    def __init__(self, value: T) -> None:
        super().__init__()
        self.set_result(value)
        self._value = value

    def done(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> T:
        return self._value

    def exception(self, timeout: float | None = None) -> None:
        return None


def finished(value: T) -> Future[T]:
    """Return a future that already holds its value."""
    return FinishedFuture(value)
