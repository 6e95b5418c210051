"""A store that holds nothing and counts: for forecasts, and for tests of what happens when a store fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Literal, NamedTuple, cast

from torch import Tensor

from gptj_ft.models.layout import Kind
from gptj_ft.streaming.stores.base import finished
from gptj_ft.system.accelerator import StreamEvent, Transfer


class Request(NamedTuple):
    """A request to a store: what was asked for, of which layer, how many bytes."""

    operation: Literal["read", "write", "commit"]
    kind: Kind | None
    layer: int
    num_bytes: int


class CountingStore:
    """Note every request; reads leave their target as it is.

    Args:
        fails: called with each request; an exception that it returns is what the request fails with.

    Attributes:
        requests: all requests so far, in order.
    """

    def __init__(self, fails: Callable[[Request], BaseException | None] = lambda _: None) -> None:
        self.requests: list[Request] = []
        self.digest_numel = 0
        self._fails, self._done = fails, finished(None)  # one for all: a forecast makes very many requests

    def own(self, kind: Kind, layer: int) -> Tensor | None:
        return None

    def in_host(self, kind: Kind, layer: int) -> Tensor | None:
        return None

    def read(
        self, kind: Kind, layer: int, out: Tensor, start: int = 0, after: Sequence[Transfer] = ()
    ) -> Future[Tensor]:
        error = self._note(Request("read", kind, layer, out.nbytes))
        return cast("Future[Tensor]", self._done) if error is None else failed(error)

    def read_rows(
        self, kind: Kind, layer: int, name: str, rows: Sequence[int], out: Tensor, after: Sequence[StreamEvent] = ()
    ) -> None:
        if error := self._note(Request("read", kind, layer, out.nbytes)):
            raise error

    def write(
        self, kind: Kind, layer: int, values: Tensor, start: int = 0, after: Sequence[Transfer] = (),
        digests: Sequence[str] = (),
    ) -> Future[None]:  # fmt: skip
        error = self._note(Request("write", kind, layer, values.nbytes))
        return self._done if error is None else failed(error)

    def commit(self, layer: int, step: int) -> None:
        if error := self._note(Request("commit", None, layer, 0)):
            raise error

    def then(self, task: Callable[[], None]) -> Future[None]:
        task()
        return finished(None)

    def drain(self) -> None:
        pass

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
