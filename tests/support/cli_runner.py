"""Run a command line in this process."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import Any

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


class Shell:
    """Run commands."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, line: str, *more: object) -> Outcome:
        """Run ``gptj-ft`` with the words of a line plus unsplit arguments."""
        self._monkeypatch.setattr("sys.argv", ["gptj-ft", *shlex.split(line), *map(str, more)])
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            app.main()
        captured = self._capsys.readouterr()
        return Outcome(int(stop.value.code or 0), captured.out, captured.err)
