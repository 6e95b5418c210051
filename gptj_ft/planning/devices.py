"""List accelerators by name with their published rates, to plan for a device that is not in this machine.

Matrix products: tensor cores, dense, bf16 (fp16 on devices without bf16), sums in fp32. Memory and link: peak rates,
the link per direction. A run reaches a share of them, see `ReachedShares`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from gptj_ft.errors import UsageError
from gptj_ft.planning.probe import ComputeRates

GIB = 2**30
TERA, GIGA = 1e12, 1e9
USABLE_SHARE = 0.93  # of a card's memory; the rest goes to error correction, driver and desktop


@dataclass(frozen=True)
class ReachedShares:
    """Shares of the published rates that runs reach. Assumptions, until `gptj-ft doctor` has measured many devices."""

    products: float = 0.70  # large matrix products
    narrow: float = 0.25  # products of width 512
    attention: float = 0.35  # causal
    memory: float = 0.85
    link: float = 0.80


REACHED = ReachedShares()

AMPERE = "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf"
ADA = "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
BLACKWELL = "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf"
LINKS = MappingProxyType({
    "PCIe 3.0 x16": 15.75, "PCIe 4.0 x8": 15.75, "PCIe 4.0 x16": 31.5, "PCIe 5.0 x16": 63.0,
})  # fmt: skip
"""GB/s per direction."""


@dataclass(frozen=True)
class PublishedDevice:
    """An accelerator as its maker describes it."""

    name: str  # with the size of the memory
    half_tflops: float  # matrix products in bf16 (or fp16), dense, sums in fp32
    fp32_tflops: float
    memory_gib: int
    memory_rate: float  # GB/s
    link: str
    has_bf16: bool
    source: str  # URL of the numbers
    is_derived: bool = False  # half_tflops scaled from the family's published chips by cores and clock

    @property
    def memory_bytes(self) -> int:
        """Bytes that a run can use."""
        return int(USABLE_SHARE * self.memory_gib * GIB)

    @property
    def half(self) -> torch.dtype:
        """Its 16-bit type."""
        return torch.bfloat16 if self.has_bf16 else torch.float16

    def rates(self) -> ComputeRates:
        """Return the rates that a run should reach."""
        half, fp32, memory = self.half_tflops * TERA, self.fp32_tflops * TERA, REACHED.memory * self.memory_rate * GIGA
        link = REACHED.link * LINKS[self.link] * GIGA
        return ComputeRates(
            fp32=REACHED.products * fp32,
            bf16=REACHED.products * half,
            fp32_narrow=REACHED.narrow * fp32,
            bf16_narrow=REACHED.narrow * half,
            memory=memory,
            near_memory=memory,
            attention=REACHED.attention * half,
            to_device=link,
            from_device=link,
        )


def _devices() -> Mapping[str, PublishedDevice]:
    x16, data_center = "PCIe 4.0 x16", "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center"
    volta = "https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf"
    hopper = "https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet"
    a100 = f"{data_center}/a100/pdf/nvidia-a100-datasheet-nvidia-us-2188504-web.pdf"
    every = (
        PublishedDevice("RTX 3060 12GB", 25.5, 12.7, 12, 360, x16, True, AMPERE, is_derived=True),
        PublishedDevice("RTX 3090 24GB", 71, 35.6, 24, 936, x16, True, AMPERE),
        PublishedDevice("RTX 4060 8GB", 30.2, 15.1, 8, 272, "PCIe 4.0 x8", True, ADA, is_derived=True),
        PublishedDevice("RTX 4060 Ti 16GB", 44.1, 22.1, 16, 288, "PCIe 4.0 x8", True, ADA, is_derived=True),
        PublishedDevice("RTX 4070 12GB", 58.3, 29.1, 12, 504, x16, True, ADA, is_derived=True),
        PublishedDevice("RTX 4090 24GB", 165.2, 82.6, 24, 1008, x16, True, ADA),
        PublishedDevice("RTX 5090 32GB", 209.5, 104.8, 32, 1792, "PCIe 5.0 x16", True, BLACKWELL),
        PublishedDevice(
            "T4 16GB", 65, 8.1, 16, 300, "PCIe 3.0 x16", False,
            f"{data_center}/tesla-t4/t4-tensor-core-datasheet-951643.pdf",
        ),
        PublishedDevice("V100 16GB", 112, 14, 16, 900, "PCIe 3.0 x16", False, volta),
        PublishedDevice("V100 32GB", 112, 14, 32, 900, "PCIe 3.0 x16", False, volta),
        PublishedDevice("A10 24GB", 125, 31.2, 24, 600, x16, True, f"{data_center}/a10/pdf/a10-datasheet.pdf"),
        PublishedDevice(
            "L4 24GB", 121, 30.3, 24, 300, x16, True,
            "https://resources.nvidia.com/en-us-data-center-overview/l4-gpu-datasheet",
        ),
        PublishedDevice("A100 40GB", 312, 19.5, 40, 1555, x16, True, a100),
        PublishedDevice("A100 80GB", 312, 19.5, 80, 1935, x16, True, a100),
        PublishedDevice("H100 80GB", 989, 67, 80, 3350, "PCIe 5.0 x16", True, hopper),
        PublishedDevice(
            "H200 141GB", 989, 67, 141, 4800, "PCIe 5.0 x16", True, "https://www.nvidia.com/en-us/data-center/h200/"
        ),
    )  # fmt: skip
    return MappingProxyType({device.name: device for device in every})


DEVICES = _devices()


def is_published_name(name: str) -> bool:
    """Tell whether a name is a card's: torch's names have no digits except a device number (``cuda:1``)."""
    return re.fullmatch(r"[a-z_]+(:\d+)?", name) is None


def find_device(name: str) -> PublishedDevice:
    """Find a device by name; case, spaces, the maker's name and the size of the memory are optional."""
    wanted = _plain(name)
    exact = [device for device in DEVICES.values() if wanted in (_plain(device.name), _plain(_model(device)))]
    if len(exact) == 1:
        return exact[0]
    near = [device.name for device in exact] or difflib.get_close_matches(
        wanted, [_plain(each) for each in DEVICES], n=3, cutoff=0.4
    )
    by_plain = {_plain(each): each for each in DEVICES}
    names = ", ".join(f"'{by_plain.get(each, each)}'" for each in near)
    problem = "names several devices" if exact else "is not a device that is known by name"
    raise UsageError(
        f"--device '{name}' {problem}" + (f": did you mean {names}?" if names else "; see docs/devices.md")
    )


def _model(device: PublishedDevice) -> str:
    return device.name.rpartition(" ")[0]


def _plain(name: str) -> str:
    words = re.sub(r"nvidia|geforce|tesla|rtx|gib|gb", "", name.lower())
    return re.sub(r"[^a-z0-9]", "", words)
