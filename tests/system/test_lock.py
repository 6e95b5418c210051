"""Test that a run folder is used by one process at a time."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
from support.fork_server import ForkServer, Running

from gptj_ft.config.run_folder import Run
from gptj_ft.errors import UsageError
from gptj_ft.system.lock import holder, locked

LONG = "finetune --recipe summarization --data rows.jsonl --model tiny --max-steps 100000 --output busy"


@pytest.fixture
def training(rows_file: Path, server: ForkServer, tmp_path: Path) -> Iterator[Running]:
    """Train in the folder ``busy`` until the process is killed."""
    with server.running(f"{LONG} --weights disk --optimizer-state disk", tmp_path) as process:
        deadline = time.monotonic() + 240
        while not any("loss" in line for line in Run(tmp_path / "busy").metrics()):
            assert not process.has_ended()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield process


def test_lock_lasts_until_process_dies(training, shell, tmp_path: Path) -> None:
    name = f"process {training.pid} on host {platform.node()} is training it"
    done = shell("finetune --resume busy")
    assert done.code == 2
    assert "busy is in use" in done.err
    assert name in done.err
    assert "Ctrl-C" in done.err
    assert str(holder(tmp_path / "busy")) == name
    training.kill()
    assert holder(tmp_path / "busy") is None
    assert shell("finetune --resume busy --dry-run").code == 0, "a killed process leaves no lock"


@pytest.mark.thorough
def test_killed_start_leaves_no_obstacle(rows_file: Path, shell, tmp_path: Path) -> None:
    left = tmp_path / "runs" / ".new.starting"
    (left / "data" / ".train.writing").mkdir(parents=True)
    (left / "recipe.yaml").write_text("lr: 3")
    start = "finetune --recipe summarization --data rows.jsonl --model tiny --max-steps 1 --lr 0.1 --output runs/new"
    with locked(left, "training"):
        done = shell(start)
    assert (done.code, f"process {os.getpid()} on host" in done.err) == (2, True)
    assert not (tmp_path / "runs" / "new").exists()
    assert shell(start).code == 0
    assert Run(tmp_path / "runs" / "new").recipe().lr == 0.1
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["new"]


def test_a_look_at_the_lock_refuses_nobody(tmp_path: Path) -> None:
    assert holder(tmp_path) is None
    looker = subprocess.Popen(
        [sys.executable, "-c", "from pathlib import Path; from gptj_ft.system.lock import holder\n"
         "while True: holder(Path())"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    try:
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            with locked(tmp_path, "training"):
                pass
    finally:
        looker.kill()
        looker.wait()


def test_the_lock_ends_with_an_exception(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), locked(tmp_path, "training"):
        raise ZeroDivisionError
    with locked(tmp_path, "training"), pytest.raises(UsageError, match="is in use: process"), locked(tmp_path, "x"):
        pass


def test_lock_of_a_folder_that_was_renamed_meanwhile_is_refused(tmp_path: Path) -> None:
    folder, errors = tmp_path / "draft", list[BaseException]()
    folder.mkdir()

    def wait() -> None:
        try:
            with locked(folder, "waiting for"):
                pass
        except UsageError as error:
            errors.append(error)

    with locked(folder, "filling"):
        waiting = Thread(target=wait)
        waiting.start()
        time.sleep(0.1)  # it has opened the file, and tries for half a second
        folder.rename(tmp_path / "done")
    waiting.join()
    assert [str(error) for error in errors] == [
        f"another process has finished or removed {folder} meanwhile; try again"
    ]
