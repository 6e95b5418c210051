"""The virtual machine: engines, streams, hazards and stores."""

from __future__ import annotations

import pytest
import torch

from gptj_ft.planning.probe import DiskRates
from gptj_ft.planning.virtual_machine import Clock, CopyEngines, Hazards, Processor, VirtualQueue, VirtualStore, Work
from gptj_ft.streaming.stores.base import Span


def link(clock: Clock) -> CopyEngines:
    return CopyEngines(clock, 10.0, 5.0, DiskRates(read=4.0, write=2.0, mixed=1.0))


def store(clock: Clock, over: CopyEngines, hazards: Hazards, part: int = 0) -> VirtualStore:
    return VirtualStore(VirtualQueue(clock, 1), over, hazards, part, list)


def bytes_of(number: int) -> torch.Tensor:
    return torch.empty(number, dtype=torch.uint8, device="meta")


def test_link_directions_work_at_the_same_time() -> None:
    clock = Clock()
    over = link(clock)
    host = store(clock, over, Hazards(100))
    one, other = bytes_of(20), bytes_of(20)
    incoming, outgoing = host.read(Span("weight", 1), one), host.write(Span("weight", 2), other)
    assert not incoming.done()
    incoming.result()
    assert clock.now == pytest.approx(2.0, abs=1e-3)
    outgoing.result()
    assert clock.now == pytest.approx(4.0, abs=1e-3), "at the same time, not one after the other"
    assert over.engines["in"].busy_seconds == pytest.approx(2.0, abs=1e-3)


def test_transfer_waits_for_kernels_using_its_memory() -> None:
    clock, hazards = Clock(), Hazards(10)
    processor = Processor(clock, lambda: "link")
    host, slot = store(clock, link(clock), hazards), bytes_of(20)
    hazards.note(slot[:10], processor.submit("compute", 7.0), writes=False)
    outgoing = host.write(Span("weight", 1), slot[:10])
    outgoing.result()
    assert clock.now == pytest.approx(2.0, abs=1e-3), "readers do not wait for readers"
    host.read(Span("weight", 2), slot[10:]).result()
    assert clock.now == pytest.approx(3.0, abs=1e-3), "another part of the buffer"
    host.read(Span("weight", 2), slot[:10]).result()
    assert clock.now == pytest.approx(8.0, abs=1e-3)


def test_read_waits_for_the_layers_commit() -> None:
    clock = Clock()
    host = store(clock, link(clock), Hazards(10))
    gradient, one, other = bytes_of(30), bytes_of(10), bytes_of(10)
    host.write(Span("grad", 1), gradient)
    host.commit(1, 1)
    host.read(Span("grad", 2), one).result()
    assert clock.now == pytest.approx(1.0, abs=1e-3)
    host.read(Span("grad", 1), other).result()
    assert clock.now == pytest.approx(7.0, abs=1e-3)


def test_disk_moves_chunks_and_slows_when_mixed() -> None:
    clock = Clock()
    over = link(clock)
    disk = store(clock, over, Hazards(10), part=4)
    one = bytes_of(8)
    disk.read(Span("weight", 1), one).result()
    assert clock.now == pytest.approx(2.8, abs=1e-3), "two parts: one second of disk and 0.4 of link each"
    assert over.engines["disk"].busy_seconds == pytest.approx(2.0)
    ended: list[int] = []
    for number, direction in enumerate(("in", "out", "in")):  # the second begins while a read waits
        over.use_disk(direction, 4, lambda number=number: ended.append(number))
    clock.advance(10.0)
    assert ended == [0, 1, 2]
    assert over.engines["disk"].busy_seconds - 2.0 == pytest.approx(4 / 4 + 4 / 1 + 4 / 4)


def test_concurrent_update_prolongs_the_product() -> None:
    clock = Clock()
    processor = Processor(clock, lambda: "program")
    product = processor.submit("compute", 10.0)
    clock.advance(2.0)
    update = processor.submit("update", 3.0)
    update.result()
    assert clock.now == pytest.approx(5.0)
    product.result()
    assert clock.now == pytest.approx(13.0)
    assert processor.busy_seconds == pytest.approx(13.0)


def test_work_ends_after_its_submission_unless_the_device_is_behind() -> None:
    clock = Clock()
    processor = Processor(clock, lambda: "program")
    first = processor.submit("compute", 1.0, issued=4.0)
    first.result()
    assert clock.now == pytest.approx(4.0), "the program submits its kernels one by one"
    product = processor.submit("compute", 10.0, issued=5.0)
    clock.advance(1.0)
    behind = processor.submit("compute", 1.0, issued=9.0)
    behind.result()
    assert product.ended
    assert clock.now == pytest.approx(15.0), "submitted meanwhile"


def test_idle_time_names_the_busy_engine() -> None:
    clock = Clock()
    over = link(clock)
    processor, host = Processor(clock, over.blocker), store(clock, over, Hazards(10))
    incoming = host.read(Span("weight", 1), bytes_of(50))
    processor.submit("compute", 1.0)
    assert isinstance(incoming, Work)
    processor.submit("compute", 1.0, after=[incoming]).result()
    assert processor.idle["link"] == pytest.approx(4.0, abs=1e-3)
