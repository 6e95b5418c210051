"""A store without data that records requests: for forecasts, and for tests of failing stores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Literal, NamedTuple, cast

from torch import Tensor

from gptj_ft.models.layout import Kind
from gptj_ft.streaming.stores.base import LayerStore, Span, finished


class Request(NamedTuple):
    """A request to a store."""

    operation: Literal["read", "write", "commit"]
    kind: Kind | None
    layer: int
    num_bytes: int


class CountingStore(LayerStore):
    """Record every request; leave the targets of reads unchanged.

    Args:
        fails: called with each request; the exception that it returns is the request's result.
        size_of: gives the bytes of a read; default: those of its target.
    """

    def __init__(
        self,
        fails: Callable[[Request], BaseException | None] = lambda _: None,
        size_of: Callable[[Span, Tensor], int] = lambda _, out: out.nbytes,
    ) -> None:
        self.requests: list[Request] = []  # in the order of the calls
        self._size_of = size_of
        self._fails, self._done = fails, finished(None)  # shared: a forecast makes very many requests

    def read(self, span: Span, out: Tensor) -> Future[Tensor]:
        error = self._note(Request("read", span.kind, span.layer, self._size_of(span, out)))
        return cast("Future[Tensor]", self._done) if error is None else failed(error)

    def read_rows(self, span: Span, name: str, rows: Sequence[int], out: Tensor) -> None:
        if error := self._note(Request("read", span.kind, span.layer, out.nbytes)):
            raise error

    def write(self, span: Span, values: Tensor, digests: Sequence[str] = ()) -> Future[None]:
        error = self._note(Request("write", span.kind, span.layer, values.nbytes))
        return self._done if error is None else failed(error)

    def commit(self, layer: int, step: int) -> None:
        if error := self._note(Request("commit", None, layer, 0)):
            raise error

    def close(self) -> None:
        self.requests.clear()

    def _note(self, request: Request) -> BaseException | None:
        self.requests.append(request)
        return self._fails(request)


def failed(error: BaseException) -> Future[Any]:
    """Return a future that raises."""
    future: Future[Any] = Future()
    future.set_exception(error)
    return future
