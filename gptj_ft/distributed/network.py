"""Measure the network between the processes of a run."""

from __future__ import annotations

import time
from statistics import median

import torch

from gptj_ft.distributed.scale_out import PAYLOAD, Network
from gptj_ft.errors import UsageError
from gptj_ft.planning.probe import LONGEST_TRANSFER
from gptj_ft.system.group import Group

MOST_BYTES, FIRST_BYTES = 64 * 2**20, 2**20  # sent to one neighbour while as much comes from the other
SMALL_MESSAGES = 20
AUTO_RATE = "auto"  # in the place of a rate: it is measured


def measure_network(group: Group) -> Network:
    """Measure the links between neighbours, all at once and both ways; all processes take part and find the slowest.

    Raises:
        UsageError: there is one process.
        PeerFailed: another process has failed.
    """
    if group.size == 1:
        raise UsageError(
            "--network auto measures the network between processes, and there is one: start it on every machine, by "
            "torchrun ... -m gptj_ft plan --network auto, or name a rate, such as --network 10Gbit"
        )
    group.barrier("network")  # one that fails before is noticed here at once
    latency = median(_exchange(group, 8) for _ in range(SMALL_MESSAGES))
    seconds, size = _slowest(group, _exchange(group, FIRST_BYTES)), FIRST_BYTES
    if (more := int(min(MOST_BYTES, LONGEST_TRANSFER / seconds * FIRST_BYTES))) > size:
        size, seconds = more, _slowest(group, _exchange(group, more))
    return Network(8 * size / seconds / PAYLOAD, _slowest(group, latency))


def _exchange(group: Group, size: int) -> float:
    """Send bytes to the next process and take as many from the one before; return the seconds."""
    out, coming = torch.ones(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
    start = time.perf_counter()
    both = [
        group.recv((group.rank - 1) % group.size, coming),
        group.send((group.rank + 1) % group.size, out),
    ]
    for each in both:
        each.wait()
    return time.perf_counter() - start


def _slowest(group: Group, seconds: float) -> float:
    return float(max(each["seconds"] for each in group.gather("link", {"seconds": seconds})))
