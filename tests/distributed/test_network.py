"""Parse network rates, and measure the slowest link."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from support.thread_group import Member, together
from torch import Tensor

from gptj_ft.distributed.network import Network, measure_network
from gptj_ft.distributed.training import DistributedTraining
from gptj_ft.errors import UsageError
from gptj_ft.system.group import ALONE, PendingTransfer

RATE, LATENCY = 2e8, 0.004  # bytes/s and seconds, of the one slow link


class SlowMember(Member):
    """A rank whose receives are slow if it is rank 1."""

    def recv(self, source: int, out: Tensor, tag: int = 0) -> PendingTransfer:
        transfer = super().recv(source, out, tag)
        return SlowTransfer(transfer, out.nbytes) if self.rank == 1 else transfer


class SlowTransfer:
    """A transfer at `RATE`."""

    def __init__(self, transfer: PendingTransfer, num_bytes: int) -> None:
        self._transfer, self._num_bytes = transfer, num_bytes

    def wait(self) -> None:
        time.sleep(LATENCY + self._num_bytes / RATE)
        self._transfer.wait()


def test_slowest_link_is_measured() -> None:
    members = list[Member]()
    found = together(3, lambda member: members.append(member) or measure_network(member), SlowMember)
    assert found[0] == found[1] == found[2]
    # No better than the slow link is; how much worse depends on what else the machine does.
    assert found[0].rate < RATE
    assert found[0].latency > LATENCY
    assert max(member.bytes_sent for member in members) < 66 * 2**20


def test_single_process_has_no_network(shell) -> None:
    with pytest.raises(UsageError, match="--network auto measures the network between processes, and there is one"):
        measure_network(ALONE)
    refused = shell("plan --recipe summarization --model tiny --network auto")
    assert refused.code == 2
    assert "or name a rate, such as --network 10Gbit" in " ".join(refused.err.split())


def test_plan_nproc_needs_auto_network(shell) -> None:
    refused = shell("plan --recipe summarization --model tiny --nproc 2")
    assert (refused.code, "needs --network auto" in refused.err) == (2, True)


@pytest.mark.parametrize(("bits", "text"), [(1e9, "0.85 s, longer than computing it;"), (1e11, "0.0085 s;")])
def test_traffic_uses_measured_rate(bits: float, text: str) -> None:
    setup: Any = SimpleNamespace(plan=SimpleNamespace(costs=SimpleNamespace(seconds_per_step=0.5)))
    said = DistributedTraining(network=Network(bits), step_bytes=(1e8, 5e7)).traffic(setup)
    assert said is not None
    assert said.startswith(f"a process sends 0.1 GB and gets 50.0 MB a step at most: {text} measured")
    assert DistributedTraining().traffic(setup) is None
