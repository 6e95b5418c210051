"""Append to JSON-lines files durably, and resume them: a crash loses at most the line that it truncates."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptj_ft.errors import DataError
from gptj_ft.system.digests import sealed, unsealed
from gptj_ft.system.files import disk_errors, hidden_name, open_file, read_bytes, sync_path, write_file


@dataclass(frozen=True)
class JsonLines:
    """A file of JSON objects, one per line."""

    path: Path  # may not exist yet
    is_sealed: bool = False  # each object contains its own checksum

    def append(self, *values: Mapping[str, Any]) -> None:
        """Append objects durably, replacing a last line that a crash has truncated."""
        text = memoryview(b"".join(_line(sealed(each) if self.is_sealed else each) for each in values))
        with disk_errors(self.path, "make room, then repeat the command to continue"):
            descriptor = open_file(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            try:
                size = os.fstat(descriptor).st_size
                if size and os.pread(descriptor, 1, size - 1) != b"\n":  # a crash truncated the last line
                    os.ftruncate(descriptor, read_bytes(self.path).rfind(b"\n") + 1)
                # write may be partial on a nearly full disk
                while text:
                    text = text[os.write(descriptor, text) :]
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def read(self) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
        """Yield each complete line with its object, or with ``None`` if it is damaged."""
        try:
            # Text after the last line break is a line that a crash truncated: `append` will replace it.
            lines = read_bytes(self.path).split(b"\n")[:-1] if self.path.is_file() else []
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {error.strerror}") from error
        for line in lines:
            try:
                values = dict(json.loads(line))
                yield line, unsealed(values, self.path) if self.is_sealed else values
            except (ValueError, TypeError, RecursionError):
                yield line, None

    def replace(self, lines: Iterable[bytes]) -> None:
        """Replace all lines atomically."""
        new = hidden_name(self.path, "sorted")
        with disk_errors(self.path):
            write_file(new, b"".join(line + b"\n" for line in lines))
            new.replace(self.path)
            sync_path(self.path.parent)


def _line(value: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # a lone surrogate, which only an escape sequence can write
        return json.dumps(value).encode() + b"\n"
