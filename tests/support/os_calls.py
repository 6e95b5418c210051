"""Replace functions of `os` during a test: count them, fail them, or watch them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest

Call = Callable[..., Any]


def wrap_calls(patch: pytest.MonkeyPatch, names: Iterable[str], wrap: Callable[[Call], Call]) -> None:
    """Replace each named function of `os` by ``wrap(function)``."""
    for name in names:
        patch.setattr(os, name, wrap(getattr(os, name)))
