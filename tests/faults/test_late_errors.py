"""Transfers that fail in the background end the operation that started them, not a later one."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from threading import Event, current_thread, main_thread
from typing import Any

import pytest
import torch
from support.os_calls import wrap_calls
from support.small_run import new_run, small_session

from gptj_ft.config.run_folder import Run
from gptj_ft.errors import DataError, Interrupted, ResourceError
from gptj_ft.streaming.stores.base import Span
from gptj_ft.streaming.stores.folder import FolderStore
from gptj_ft.training.loop import Session, train
from gptj_ft.training.reporter import Progress, Reporter, StepReport
from gptj_ft.training.restore import open_offloaded, open_state
from gptj_ft.training.setup import TrainSetup


class BadDisk:
    """Fail every write and flush in the background, once it is armed; flushes not before they are released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_armed, self.released = False, Event()
        wrap_calls(monkeypatch, ["pwritev", "fsync"], self._guard)

    def _guard(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*arguments: Any) -> Any:
            if not self.is_armed or current_thread() is main_thread():
                return operation(*arguments)
            if operation.__name__ == "fsync":
                self.released.wait(10)
            elif not self.released.is_set():
                return operation(*arguments)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        return guarded


class StopAfterFirstStep(Reporter):
    """Stop the run; with a disk that fails, the flushes of the first step fail after it."""

    def __init__(self, disk: BadDisk | None = None) -> None:
        self._disk = disk

    def on_start(self, progress: Progress) -> None:
        if self._disk is not None:
            self._disk.is_armed = True

    def on_step(self, step: StepReport, progress: Progress) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        if self._disk is not None:
            self._disk.released.set()


def stopped_run(session: TrainSetup, folder: Path, disk: BadDisk | None = None) -> Run:
    """Train a step, and stop."""
    run = new_run(folder)
    run.start_record(session.recipe)
    with pytest.raises(Interrupted, match="everything is saved"):
        train(session, run, StopAfterFirstStep(disk), Session(owns_process=True))
    return run


def test_stopped_run_is_not_called_saved_after_a_failed_write(tmp_path: Path, monkeypatch) -> None:
    session, disk = small_session(tmp_path / "model"), BadDisk(monkeypatch)
    with pytest.raises(ResourceError, match="cannot write"):
        stopped_run(session, tmp_path, disk)


def test_checkpoint_is_not_restored_after_a_failed_write(tmp_path: Path, monkeypatch) -> None:
    session = small_session(tmp_path / "model", weights="device", optimizer_state="disk")
    split = replace(session.plan.placement, in_memory=(1,), memory="device")
    session = replace(session, plan=replace(session.plan, placement=split))
    run, disk = stopped_run(session, tmp_path), BadDisk(monkeypatch)
    disk.is_armed = True
    disk.released.set()
    with pytest.raises(ResourceError, match="cannot write the state"):
        open_state(session, run)


@pytest.mark.parametrize("place", ["device", "host"])
def test_frozen_weights_are_not_open_after_a_failed_read(place: str, tmp_path: Path, monkeypatch) -> None:
    session = small_session(tmp_path / "model", method="lora", weights=place, optimizer_state=place)

    original, last = FolderStore.read, len(session.plan.workload.layers) - 1

    def read(self: FolderStore, span: Span, out: torch.Tensor) -> Future[torch.Tensor]:
        if span.layer != last:
            return original(self, span, out)
        failed: Future[torch.Tensor] = Future()
        failed.set_exception(DataError("a shard is damaged"))
        return failed

    monkeypatch.setattr(FolderStore, "read", read)
    with pytest.raises(DataError, match="a shard is damaged"):
        open_offloaded(session, new_run(tmp_path), session.plan.placement)
