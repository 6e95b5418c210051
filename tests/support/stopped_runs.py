"""Create runs by the command line: complete ones, and ones stopped by a full disk."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

import pytest
from conftest import write_rows
from support.cli_runner import run_command
from support.steps import failing


def make_runs(folder: Path, lines: Mapping[str, str], steps: int) -> None:
    """Make two runs of each command line, on rows written to ``folder``.

    Args:
        folder: empty folder; the home folder of the runs is ``home`` in it.
        lines: command line of each stopped run, by the name of its folder; the run that ends is ``NAME-done``.
        steps: steps after which the disk is full.
    """
    write_rows(folder / "rows.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("GPTJ_FT_HOME", str(folder / "home"))
        for stopped, line in lines.items():
            for name, disk, code in ((f"{stopped}-done", nullcontext(), 0), (stopped, failing(steps + 1), 4)):
                with disk:
                    assert run_command([*line.split(), "--json", "--output", name]) == code
