"""Move tensors between leased device memory and the stores, and measure it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from gptj_ft.models.layout import Kind
from gptj_ft.streaming.buffers import Lease
from gptj_ft.streaming.stores.base import LayerStore, Span
from gptj_ft.system.accelerator import StallTimer, Stream, Transfer, has_streams, record_event, wait_for


class TransferMeter:
    """Count the bytes of transfers and the seconds that the computation waits for them."""

    def __init__(self, device: torch.device) -> None:
        self.bytes_read = 0
        self.bytes_written = 0
        self._program_seconds = 0.0
        self._stall_timer = StallTimer(device) if has_streams(device) else None

    @property
    def waited_seconds(self) -> float:
        """Seconds that the computation has stood still for the stores."""
        return self._stall_timer.seconds if self._stall_timer else self._program_seconds

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the block's seconds as waiting."""
        start = time.perf_counter()
        try:
            with self._stall_timer.waiting() if self._stall_timer else nullcontext():
                yield
        finally:
            self._program_seconds += time.perf_counter() - start

    def wait(self, transfers: Sequence[Transfer], stream: Stream) -> None:
        """Have a stream wait for transfers, and count the seconds."""
        if transfers:
            with self.waiting():
                wait_for(transfers, stream)


class Transfers:
    """Read and write a model's stores."""

    def __init__(self, stores: Mapping[Kind, LayerStore], device: torch.device, update_numel: int) -> None:
        self._stores, self._device, self._update_numel = stores, device, update_numel
        self.meter = TransferMeter(device)

    def read(self, span: Span, out: Tensor) -> Future[Tensor]:
        """Read elements from the span's store."""
        store = self._stores[span.kind]
        self.meter.bytes_read += store.bytes_moved(span, out)
        return store.read(span, out)

    def fill(self, lease: Lease, kind: Kind, layer: int, start: int = 0) -> None:
        """Read the elements of a lease, unless they are cached."""
        if not lease.is_cached:
            lease.transfers.append(self.read(Span(kind, layer, start, tuple(lease.transfers)), lease.tensor))

    def read_rows(self, layer: int, name: str, rows: Sequence[int], out: Tensor, after: Sequence[Transfer]) -> None:
        """Read rows of a frozen matrix and wait for them."""
        self.meter.bytes_read += out.nbytes
        self._stores["frozen"].read_rows(Span("frozen", layer, 0, after), name, rows, out)

    def write(self, kind: Kind, layer: int, start: int, values: Tensor, digests: Sequence[str] = ()) -> Future[None]:
        """Write elements to their store, as the current stream leaves them."""
        self.meter.bytes_written += values.nbytes
        # The event makes the store's copy wait for the kernels that compute the values.
        return self._stores[kind].write(Span(kind, layer, start, record_event(self._device)), values, digests)

    def commit(self, kinds: Sequence[Kind], layer: int, step: int) -> None:
        """Commit kinds of a layer: every one has been written, and together they are the state after ``step``."""
        for store in self._unique(kinds):
            store.commit(layer, step)

    def digests_by_chunk(self, kind: Kind, layer: int) -> bool:
        """Tell whether the store accepts a digest per chunk, computed while the chunk is in a processor's cache."""
        return self._device.type == "cpu" and self._stores[kind].part(layer).digest_numel == self._update_numel

    def drain(self) -> None:
        """Wait until every store has completed its writes."""
        with self.meter.waiting():
            for store in self._unique(self._stores):
                store.drain()

    def close(self) -> None:
        for store in self._unique(self._stores):
            store.close()

    def _unique(self, kinds: Iterator[Kind] | Sequence[Kind] | Mapping[Kind, LayerStore]) -> list[LayerStore]:
        """Return the distinct stores of the kinds: kinds in one place share a store."""
        return list({id(self._stores[kind]): self._stores[kind] for kind in kinds}.values())
