"""Runs made by the command line: some that end, and some that a full disk stops after a number of steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from conftest import write_rows

from gptj_ft.cli import app
from gptj_ft.training import loop


def make_runs(folder: Path, lines: Mapping[str, str], steps: int) -> None:
    """Make two runs of each command line, on rows written to ``folder``.

    Args:
        folder: empty folder; the home folder of the runs is ``home`` in it.
        lines: command line of each stopped run, by the name of its folder; the run that ends is ``NAME-done``.
        steps: steps after which the disk is full.
    """
    write_rows(folder / "rows.jsonl")
    original = loop.train_step

    def failing(stack, optimizer, *rest):
        if optimizer.step == steps:
            raise OSError(28, "No space left on device")
        return original(stack, optimizer, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("GPTJ_FT_HOME", str(folder / "home"))
        for stopped, line in lines.items():
            for name, step, code in ((f"{stopped}-done", original, 0), (stopped, failing, 4)):
                patch.setattr(loop, "train_step", step)
                patch.setattr("sys.argv", ["gptj-ft", *line.split(), "--json", "--output", name])
                with pytest.raises(SystemExit) as stop:
                    app.main()
                assert int(stop.value.code or 0) == code
