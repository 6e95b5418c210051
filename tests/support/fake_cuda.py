"""Make `torch.cuda` report devices that the machine does not have."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gptj_ft.system import accelerator


def pretend_cuda(patch: pytest.MonkeyPatch, count: int, current: int = 0, **more: Callable[..., object]) -> list[str]:
    """Make `torch.cuda` report some devices; ``more`` replaces further functions of the module.

    Returns:
        A list that receives the settings of the allocator.
    """
    facts = {"is_available": lambda: True, "device_count": lambda: count, "current_device": lambda: current}
    build = {"get_arch_list": list, "set_device": lambda device: None}
    for name, function in {**facts, **build, **more}.items():
        patch.setattr(torch.cuda, name, function)
    settings: list[str] = []
    plain = accelerator.allocate

    def allocate(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return plain(numel, dtype, torch.device("cpu"))

    patch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    patch.setattr(accelerator, "allocate", allocate)
    return settings
