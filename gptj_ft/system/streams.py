"""Survive standard streams that go away: a closed terminal, or a pipe whose reader has ended, fails no command."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

# What a write answers when nobody is there to read it: a pipe, a terminal, a descriptor, a terminal's device.
GONE = {errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO}


class LastingStream:
    """Text stream that discards its output once nobody reads it; a full disk is still an error.

    Args:
        inner: the stream.
    """

    def __init__(self, inner: TextIO) -> None:
        self._inner = inner

    def write(self, text: str) -> int:
        with self._lasting():
            return self._inner.write(text)
        return len(text)

    def flush(self) -> None:
        with self._lasting():
            self._inner.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @contextmanager
    def _lasting(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in GONE:
                raise
            # What its buffer still holds must have somewhere to go, or the end of the process would fail on it.
            with suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._inner.fileno())
                os.close(nowhere)


@contextmanager
def lasting_streams() -> Iterator[None]:
    """Wrap standard output and error in `LastingStream` inside the block."""
    open_missing()
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, LastingStream(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before


def open_missing() -> None:
    """Open the standard streams that the process was started without.

    Else the next file opened, a part of a run perhaps, would have their numbers, and be written into by whoever
    believes that 2 is the terminal.
    """
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))
