"""Share a run between ranks, each with a simulated device of its own; for a process of its own.

``python -m support.simulated_several [--all | --few]`` prints a JSON line for each case, as `support.simulated` does:
those of a group must give the same digest, whether one rank does it or several, which are threads of this process.
Without options it takes the cases of `make thorough`, and then one for each of the `FAULTS`, with that planted; with
``--few`` those of `make test`.

Ranks share no memory of a device or of the host, and what the wire reads is an access like any other.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from support import simulated
from support.accelerator import NAME, SCHEDULES, Schedule
from support.accelerator.memory import find_locked
from support.accelerator.simulation import Operation, Stream, now
from support.accelerator.tensor import SimTensor, operation
from support.simulated import PLACES, Case, memory
from support.thread_group import Hub, Member, together
from torch import Tensor

# How a run is shared: the number of ranks, and options. Those with the same lanes give the same numbers.
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "layers": (2, {"share": "layers"}),
    "alone, two lanes": (1, {"lanes": 2}),
    "rows": (2, {"share": "rows", "lanes": 2}),
    "2 x 2": (4, {"share": "layers", "replicas": 2, "lanes": 2}),
    "direct": (2, {"share": "layers"}),
    "direct 2 x 2": (4, {"share": "layers", "replicas": 2, "lanes": 2}),
}
DTYPES = ("fp32", "bf16")
DIRECT = 1000  # number of the first wire of devices
FEW: tuple[tuple[str, str, Schedule], ...] = (("layers", "disk", "random"), ("direct", "device", "late"))
CASES: tuple[tuple[str, str, Schedule], ...] = (
    *FEW,
    ("alone", "device", "late"),
    ("alone, two lanes", "device", "late"),
    ("rows", "host", "late"),
    ("2 x 2", "disk", "random"),
)


class SimulatedMember(Member):
    """A rank whose sends read their tensor on an unsynchronized stream."""

    def send(self, to: int, values: Tensor, tag: int = 0) -> Any:
        locked = find_locked(values)
        if locked is not None:
            region, low = locked
            reads = ((region, low, low + values.nbytes, False),)
            Stream(torch.device(NAME, self.rank), name="wire").put(Operation("send", accesses=reads))
        return super().send(to, values, tag)


class DirectMember(Member):
    """A rank that sends device memory on streams of their own, as NCCL does.

    A transfer waits for the current stream at its start; `wait` makes the current stream wait for it. A receive looks
    for its send only in `wait`, because the sender may be late. Without tags, transfers of one pass and direction match
    in order.
    """

    def __init__(self, hub: Hub, rank: int) -> None:
        super().__init__(hub, rank)
        self.asked, self.taken = Counter[tuple[int, int]](), Counter[tuple[int, int]]()

    def wire(self, device: torch.device) -> torch.device:
        return device

    def send(self, to: int, values: Tensor, tag: int = 0) -> Any:
        if not isinstance(values, SimTensor):
            return super().send(to, values, tag)
        sent = list[Tensor]()
        reads = operation("send", [values], [], lambda: sent.append(values.data_cpu.clone()))
        transfer = OnStream(values)
        self.hub.wires[self.rank, to, DIRECT + tag % 2].put((transfer.stream.put(reads), sent))  # type: ignore[arg-type]
        return transfer

    def recv(self, source: int, out: Tensor, tag: int = 0) -> Any:
        if not isinstance(out, SimTensor):
            return super().recv(source, out, tag)
        return Arriving(out, self, source, tag % 2)


class OnStream:
    """A transfer on a device stream; keeps its tensor alive."""

    def __init__(self, values: SimTensor) -> None:
        self.values, self.stream = values, Stream(values.device)
        self.stream.wait_stream(now().stream(values.block.device_index))

    def wait(self) -> None:
        now().stream(self.values.block.device_index).wait_stream(self.stream)


class Arriving(OnStream):
    """A receive into device memory."""

    def __init__(self, out: SimTensor, member: DirectMember, source: int, way: int) -> None:
        super().__init__(out)
        self._member, self._source, self._way = member, source, way
        member.asked[source, way] += 1
        self._number = member.asked[source, way]

    def wait(self) -> None:
        member = self._member
        member.taken[self._source, self._way] += 1
        assert member.taken[self._source, self._way] == self._number, "it is waited for in another order"
        wire: Any = member.hub.wires[self._source, member.rank, DIRECT + self._way]
        read, sent = wire.get(timeout=60)
        writes = operation("receive", [], [self.values], lambda: self.values.data_cpu.copy_(sent.pop()))
        writes.waits_for = read
        self.stream.put(writes)
        super().wait()


@dataclass(frozen=True)
class SharedRun:
    """Three training steps with validation before and after, and export."""

    ranks: int
    state: str  # place of weights, optimizer state and boundaries
    dtype: str
    options: dict[str, Any] = field(default_factory=dict)  # of the split
    member: type[Member] = SimulatedMember  # transport

    def __call__(self, device: torch.device) -> Any:
        """Train; return the digests of the tuned model and all losses."""
        from support.small_run import new_run, small_session

        from gptj_ft.config.run_folder import Run
        from gptj_ft.distributed.worker import worker_run
        from gptj_ft.training.loop import train

        with tempfile.TemporaryDirectory(dir=memory()) as tmp:
            options = {
                "weights": self.state, "optimizer_state": self.state, "boundaries": self.state,
                "precision": self.dtype, "batch_size": 4, "micro_batch_tokens": 9, **self.options,
            }  # fmt: skip
            run = new_run(Path(tmp))
            alone = small_session(Path(tmp), device=str(device), **options)
            run.start_record(alone.recipe)

            def take_part(member: Member) -> None:
                # torch's Python backends know one device: its thread for backward would compute on the first.
                with torch.autograd.set_multithreading_enabled(False):
                    setup = small_session(Path(tmp), group=member, device=device.type, **options)
                    assert setup.device == torch.device(NAME, member.rank)
                    train(setup, worker_run(run.folder, setup) if member.rank else Run(run.folder))

            if self.ranks == 1:
                train(alone, run)
            else:
                together(self.ranks, take_part, self.member)
            weights = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in
                       sorted(run.model.glob("*.safetensors"))}  # fmt: skip
            assert weights
            kept = ("step", "loss", "grad_norm", "validation_loss")
            return weights, [{key: line[key] for key in kept if key in line} for line in run.metrics()]


def case_of(way: str, state: str, schedule: Schedule, dtype: str = "fp32") -> Case:
    ranks, options = WAYS[way]
    group = f"{dtype}, {options.get('lanes', 1)} lanes"
    member = DirectMember if "direct" in way else SimulatedMember
    run = SharedRun(ranks, state, dtype, options, member)
    return Case("shared", group, f"{way}, {state}", schedule, run, ranks)


def every_case() -> Iterator[Case]:
    """Yield every split, placement and schedule; a single rank needs one, because `support.simulated` has the rest."""
    for dtype in DTYPES:
        for way, (ranks, _) in WAYS.items():
            places, schedules = (PLACES, SCHEDULES) if ranks > 1 else (PLACES[:1], SCHEDULES[:1])
            yield from (case_of(way, state, schedule, dtype) for state in places for schedule in schedules)


def _hasty(send: Callable[..., bool]) -> Callable[..., bool]:
    def send_at_once(self: Any, layer: int, values: Tensor) -> bool:
        return send(self, layer, values.detach().to("cpu", non_blocking=True))

    return send_at_once


def _forgetful(send: Callable[..., bool]) -> Callable[..., bool]:
    def send_and_forget(self: Any, layer: int, values: Tensor) -> bool:
        is_gone = send(self, layer, values)
        self._sending.clear()
        return is_gone

    return send_and_forget


# What is planted in `PipelineChannel.send`, and the case that should find it.
FAULT_OF_FEW = "what is sent is let go before it has left"
FAULTS = {
    "a hidden state is sent before its copy has ended": (_hasty, case_of("layers", "device", "late")),
    FAULT_OF_FEW: (_forgetful, case_of("direct", "device", "late")),
}


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="every type, place and schedule")
    parser.add_argument("--few", action="store_true", help="two cases and a fault of direct transfers")
    chosen = parser.parse_args(arguments)
    faulthandler.enable()
    simulated.prepare()
    cases, faults = [case_of(*each) for each in CASES], list(FAULTS)
    if chosen.all:
        cases, faults = list(every_case()), []
    elif chosen.few:
        cases, faults = [case_of(*each) for each in FEW], [FAULT_OF_FEW]
    for case in cases:
        found = simulated.run_case(case)
        through_host = sum(count for (_, _, where), count in now().waits.items() if "pipeline.py" in where)
        print(json.dumps({**found, "through_host": through_host}), flush=True)
    from gptj_ft.distributed.pipeline import PipelineChannel

    for fault in faults:
        changed, case = FAULTS[fault]
        with patch.object(PipelineChannel, "send", changed(PipelineChannel.send)):
            print(json.dumps({"fault": fault, **simulated.run_case(case)}), flush=True)
    simulated.clean_up()
    os._exit(0)  # threads of a device that is not there need not be waited for


if __name__ == "__main__":
    main(sys.argv[1:])
