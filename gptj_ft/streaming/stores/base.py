"""Contract of the stores that hold layers' tensors in three places. A store moves bytes and computes nothing.

A layer's tensors of one *kind* (its weights, say, or its first moments) lie in one flat tensor, at the same offsets
in every place, because a BLAS may round differently by alignment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol, TypeVar

from torch import Tensor

from gptj_ft.models.layout import Kind
from gptj_ft.system.accelerator import StreamEvent, Transfer

T = TypeVar("T")

CHUNK_NUMEL = 1 << 22  # elements moved, checked and updated at once: 16 MiB in fp32


class LayerStore(Protocol):
    """Holds some kinds of every layer, in whole or in spans of elements. Transfers are asynchronous.

    A read sees what was committed before it was asked for; what is written after that commit it may see or not.

    Attributes:
        digest_numel: elements of each part of a tensor of which a digest is kept; 0: there are no digests.
    """

    digest_numel: int

    def own(self, kind: Kind, layer: int) -> Tensor | None:
        """Return the store's own flat tensor on the device, to be used and changed in place; ``None``: it has none."""

    def in_host(self, kind: Kind, layer: int) -> Tensor | None:
        """Return the store's own flat tensor in host memory, while nothing is on its way; ``None``: it has none."""

    def read(
        self, kind: Kind, layer: int, out: Tensor, start: int = 0, after: Sequence[Transfer] = ()
    ) -> Future[Tensor]:
        """Read as many elements of a flat tensor as ``out`` holds; not for a store with resident tensors.

        Args:
            kind: kind of the tensor.
            layer: number of the layer.
            out: flat; where they go on the device.
            start: the first element.
            after: transfers that still use ``out`` and must end first.
        """

    def read_rows(
        self, kind: Kind, layer: int, name: str, rows: Sequence[int], out: Tensor, after: Sequence[StreamEvent] = ()
    ) -> None:
        """Read rows of a frozen matrix, and wait for them; not for a store with resident tensors.

        Args:
            kind: kind of the tensor.
            layer: number of the layer.
            name: name of the matrix in the layer.
            rows: indices of the rows.
            out: target on the device, [rows, width].
            after: work of streams that still use ``out``.
        """

    def write(
        self, kind: Kind, layer: int, values: Tensor, start: int = 0, after: Sequence[Transfer] = (),
        digests: Sequence[str] = (),
    ) -> Future[None]:  # fmt: skip
        """Keep new values from element ``start`` on; they are there after ``after``, and change after this.

        Args:
            kind: kind of the tensor.
            layer: number of the layer.
            values: flat.
            start: the first element.
            after: transfers that must end first.
            digests: digests of the parts, of who had them in a processor's cache; default: computed here, if kept.
        """

    def commit(self, layer: int, step: int) -> None:
        """Commit a layer: every kind of it has been written, and together they are its state after ``step``."""

    def then(self, task: Callable[[], None]) -> Future[None]:
        """Run a task after everything written so far, and before anything written later."""

    def drain(self) -> None:
        """Wait for every transfer; raise the first error."""

    def close(self) -> None:
        """End every transfer and give the memory back."""


def chunks(numel: int, chunk_numel: int) -> list[slice]:
    """Cut a flat tensor into parts, the last of which may be smaller."""
    return [slice(start, min(start + chunk_numel, numel)) for start in range(0, numel, chunk_numel)]


def finished(value: T) -> Future[T]:
    """Return a future that already holds its value."""
    future: Future[T] = Future()
    future.set_result(value)
    return future
