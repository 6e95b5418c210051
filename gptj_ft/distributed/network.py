"""The network between machines: its rate as sold, or measured."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from statistics import median

import torch

from gptj_ft.errors import UsageError
from gptj_ft.planning.probe import LONGEST_TRANSFER
from gptj_ft.system.group import Group

LATENCY = 2e-4  # assumed seconds per message: a LAN, and two threads that wake up
PAYLOAD = 0.94  # share of a link's rate without the headers of 1,500-byte packets
BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
MOST_BYTES, FIRST_BYTES = 64 * 2**20, 2**20  # of a measurement
SMALL_MESSAGES = 20
AUTO_RATE = "auto"  # --network auto: measure


@dataclass(frozen=True)
class Network:
    """A network whose machines have links of one rate."""

    bits: float  # bits/s of a link, each way
    latency: float = LATENCY  # seconds per message

    @classmethod
    def parse(cls, text: str) -> Network:
        """Parse a rate such as ``10Gbit`` or ``100Mbit``."""
        match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([kmg]bit)(/s)?", text.strip(), re.IGNORECASE)
        if match is None or not float(match[1]):
            raise UsageError(
                f"--network '{text}' is no rate: it is a number with kbit, Mbit or Gbit, such as 10Gbit or 100Mbit"
            )
        return cls(float(match[1]) * BITS[match[2].lower()])

    @property
    def rate(self) -> float:
        """Bytes/s of payload."""
        return PAYLOAD * self.bits / 8


def bits_text(bits: float) -> str:
    """Format a rate as networks are sold."""
    return f"{bits / 1e9:.3g}Gbit" if bits >= 1e9 else f"{bits / 1e6:.3g}Mbit"


def measure_network(group: Group) -> Network:
    """Measure the links between neighbouring ranks, all at once and both ways; return the slowest rate and latency.

    All ranks call it.
    """
    if group.size == 1:
        raise UsageError(
            "--network auto measures the network between processes, and there is one: start it on every machine, by "
            "torchrun ... -m gptj_ft plan --network auto, or name a rate, such as --network 10Gbit"
        )
    group.barrier("network")  # a rank that failed earlier is detected here, not in a transfer
    latency = median(_exchange_seconds(group, 8) for _ in range(SMALL_MESSAGES))
    # All ranks agree on the slowest, so that all go on with the same number of bytes.
    seconds, size = _slowest(group, _exchange_seconds(group, FIRST_BYTES)), FIRST_BYTES
    if (more := int(min(MOST_BYTES, LONGEST_TRANSFER / seconds * FIRST_BYTES))) > size:
        size, seconds = more, _slowest(group, _exchange_seconds(group, more))
    return Network(8 * size / seconds / PAYLOAD, _slowest(group, latency))


def _exchange_seconds(group: Group, size: int) -> float:
    """Send bytes to the next rank while as many arrive from the previous one; return the seconds."""
    out, received = torch.ones(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
    start = time.perf_counter()
    both = [group.recv((group.rank - 1) % group.size, received), group.send((group.rank + 1) % group.size, out)]
    for transfer in both:
        transfer.wait()
    return time.perf_counter() - start


def _slowest(group: Group, seconds: float) -> float:
    return float(max(each["seconds"] for each in group.gather("link", {"seconds": seconds})))
