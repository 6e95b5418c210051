"""Survive closed standard streams: a closed terminal or pipe does not fail a command. Read text from a pipe."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from gptj_ft.errors import DataError

# Errors of a write that has no reader: closed pipe, terminal, descriptor, terminal device.
GONE = {errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO}


class LastingStream:
    """Wrap a text stream and discard its output when its reader is gone; a full disk is still an error."""

    def __init__(self, inner: TextIO) -> None:
        self._inner = inner

    def write(self, text: str) -> int:
        with self._lasting():
            return self._inner.write(text)
        # Reached only after an error that `_lasting` has suppressed.
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
            # Redirect the descriptor: flushing the rest of the buffer at exit would fail otherwise.
            with suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._inner.fileno())
                os.close(nowhere)


@contextmanager
def lasting_streams() -> Iterator[None]:
    """Wrap standard output and error in `LastingStream` inside the block."""
    open_missing()
    # An answer may have letters that Latin-1 lacks. Another handler than "strict" was chosen, and stays.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, LastingStream(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before


def input_lines() -> Iterator[str]:
    """Yield the lines of standard input.

    Raises:
        DataError: they are not text.
    """
    try:
        for line in sys.stdin:
            line.encode()  # a locale such as C hides undecodable bytes in lone surrogates
            yield line
    except UnicodeError as error:
        encoding = (sys.stdin.encoding or "utf-8").upper()
        raise DataError(
            f"standard input is not {encoding} text: convert it, as `iconv -f latin1 -t {encoding}` does"
        ) from error


def read_input() -> str:
    """Read the text on standard input, see `input_lines`."""
    return "".join(input_lines())


def open_missing() -> None:
    """Open the standard streams that the process was started without.

    Otherwise the next opened file, perhaps of a run, would get descriptor 2, and error messages would go into it.
    """
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))
