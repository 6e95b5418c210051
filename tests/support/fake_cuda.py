"""Make `torch.cuda` report devices that the machine does not have."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch


def pretend_cuda(patch: pytest.MonkeyPatch, count: int, current: int = 0, **more: Callable[..., object]) -> None:
    """Make `torch.cuda` report some devices; ``more`` replaces further functions of the module."""
    facts = {"is_available": lambda: True, "device_count": lambda: count, "current_device": lambda: current}
    build = {"get_arch_list": list, "set_device": lambda device: None}
    for name, function in {**facts, **build, **more}.items():
        patch.setattr(torch.cuda, name, function)
