"""Run a command line in this process."""

from __future__ import annotations

import io
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import pytest

from gptj_ft.cli import app


@dataclass(frozen=True)
class Outcome:
    """Hold exit code and output."""

    code: int
    out: str
    err: str

    @property
    def said(self) -> str:
        """Return all output with line breaks removed."""
        return " ".join((self.out + self.err).split())

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Terminal(io.StringIO):
    """Stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def run_command(words: Sequence[str], stdin: TextIO | None = None) -> int:
    """Run ``gptj-ft`` with these arguments; return its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("argv", ["gptj-ft", *words]), ("stdin", stdin or sys.stdin)):
            patch.setattr(sys, name, value)
        with pytest.raises(SystemExit) as stop:
            app.main()
    return int(stop.value.code or 0)


class Shell:
    """Run commands and capture their output."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, line: str, *more: object, stdin: TextIO | None = None) -> Outcome:
        """Run ``gptj-ft`` with the words of a line plus unsplit arguments."""
        self._capsys.readouterr()
        code = run_command([*shlex.split(line), *map(str, more)], stdin)
        captured = self._capsys.readouterr()
        return Outcome(code, captured.out, captured.err)
