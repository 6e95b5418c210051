"""Simulate a full disk: flushing a file fails."""

from __future__ import annotations

import errno
import os

import pytest
from support.os_calls import Call, wrap_calls


def fill_disk(monkeypatch: pytest.MonkeyPatch, call: int | None = None) -> None:
    """Fail every fsync with "no space left", or only the n-th one."""
    calls = 0

    def fails(fsync: Call) -> Call:
        def failing(descriptor: int) -> None:
            nonlocal calls
            calls += 1
            if call in (None, calls):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            fsync(descriptor)

        return failing

    wrap_calls(monkeypatch, ["fsync"], fails)
