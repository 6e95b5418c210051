"""Power cuts: a run on disk, cut off at its n-th disk operation, must end as if nothing had happened."""

from __future__ import annotations

import errno
import io
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from gptj_ft import machine
from gptj_ft.data.batches import Rows
from gptj_ft.errors import GptjFtError, ResourceError
from gptj_ft.recipe import Recipe
from gptj_ft.run import Run
from gptj_ft.session import Session, make_session
from gptj_ft.trainer import train

OPERATIONS = ("pwritev", "fsync", "replace", "rename", "link")
SILENT = Console(file=io.StringIO())


class PowerCut(BaseException):
    """Nothing of the process runs on after this."""


class Power:
    """Counts disk operations, and fails each from the n-th on: a process that is dead writes nothing more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, last: int | None = None) -> None:
        self.count, self._last = 0, last
        for name in OPERATIONS:
            monkeypatch.setattr(os, name, self._guard(getattr(os, name)))
        monkeypatch.setattr(os, "unlink", self._guard(os.unlink, counts=False))

    def _guard(self, operation, counts: bool = True):
        def guarded(*arguments, **settings):
            self.count += counts
            if self._last is not None and self.count > self._last:
                raise PowerCut
            return operation(*arguments, **settings)

        return guarded


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    from conftest import random_gptj

    folder = tmp_path_factory.mktemp("model")
    random_gptj(vocab_size=40, n_positions=32, n_embd=16, n_layer=2, n_head=2, rotary_dim=4).save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(1, 40, (9,), generator=generator).tolist() for _ in range(6)]
    recipe = Recipe(
        weights="disk",
        optimizer_state="disk",
        batch_size=2,
        max_length=32,
        lr=1e-2,
        max_steps=3,
        read_ahead=1,
        device="cpu",
    )
    session = make_session(recipe, folder, Rows(documents, [3] * 6), Rows([], []), "", folder)
    # The tokenizer is not under test here; the exporter copies whatever the model has.
    return replace(session, num_steps=3)


@pytest.fixture(scope="module")
def straight(session: Session, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    run = new_run(tmp_path_factory.mktemp("straight"))
    train(session, run, SILENT, quiet=True)
    return weights_of(run)


def new_run(folder: Path) -> Run:
    run = Run(folder / "run")
    run.folder.mkdir()
    return run


def weights_of(run: Run) -> dict[str, torch.Tensor]:
    return {name: tensor for shard in run.model.glob("*.safetensors") for name, tensor in load_file(shard).items()}


def count_operations(session: Session, folder: Path) -> int:
    with pytest.MonkeyPatch.context() as patch:
        power = Power(patch)
        train(session, new_run(folder), SILENT, quiet=True)
        return power.count


def cut_and_resume(session: Session, run: Run, cuts: list[int]) -> None:
    """Cut the power at the n-th operation of each session in turn, then let the run end."""
    for last in cuts:
        with pytest.MonkeyPatch.context() as patch:
            Power(patch, last)
            with pytest.raises(PowerCut):
                train(session, run, SILENT, quiet=True)
    if not run.model.exists():  # the last operations come after the model is there
        train(session, run, SILENT, quiet=True)


@pytest.mark.parametrize("part", range(4))
def test_a_power_cut_at_any_disk_operation_loses_nothing_but_the_step_in_flight(
    part: int, session: Session, straight, tmp_path: Path
) -> None:
    total = count_operations(session, tmp_path)
    shutil.rmtree(tmp_path / "run")
    assert total > 100
    for last in range(part, total, 12):  # the parts take every third operation; `slow` takes them all
        check(session, straight, tmp_path, [last])


@pytest.mark.slow
def test_a_power_cut_at_every_single_disk_operation(session: Session, straight, tmp_path: Path) -> None:
    total = count_operations(session, tmp_path)
    shutil.rmtree(tmp_path / "run")
    for last in range(total):
        check(session, straight, tmp_path, [last])


def test_power_cuts_while_resuming_from_power_cuts(session: Session, straight, tmp_path: Path) -> None:
    for cuts in ([70, 1], [70, 9, 9], [90, 30, 2, 50], [100, 25, 25, 25]):
        check(session, straight, tmp_path, cuts)


def check(session: Session, straight, folder: Path, cuts: list[int]) -> None:
    run = new_run(folder)
    cut_and_resume(session, run, cuts)
    ours = weights_of(run)
    assert ours.keys() == straight.keys()
    for name, tensor in straight.items():
        assert torch.equal(ours[name], tensor), (cuts, name)
    shutil.rmtree(run.folder)


class OneFault:
    """Makes the n-th write or fsync fail, that one alone: a disk that was full for a moment, or had one bad block."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int, code: int) -> None:
        self.count = 0
        for name in ("pwritev", "fsync"):
            monkeypatch.setattr(os, name, self._guard(getattr(os, name), number, code))

    def _guard(self, operation, number: int, code: int):
        def guarded(*arguments, **settings):
            self.count += 1
            if self.count == number:
                raise OSError(code, os.strerror(code))
            return operation(*arguments, **settings)

        return guarded


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_one_failed_write_anywhere_stops_with_exit_4_and_resumes_to_the_same_weights(
    code: int, session: Session, straight, tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        total = count_faultable(patch, session, tmp_path)
    for number in range(1, total, 3):
        run = new_run(tmp_path)
        with pytest.MonkeyPatch.context() as patch:
            OneFault(patch, number, code)
            with pytest.raises(GptjFtError) as stopped:
                train(session, run, SILENT, quiet=True)
        assert stopped.value.exit_code == 4 or "cannot write" in str(stopped.value), (number, stopped.value)
        cut_and_resume(session, run, [])
        ours = weights_of(run)
        assert all(torch.equal(ours[name], tensor) for name, tensor in straight.items()), number
        shutil.rmtree(run.folder)


def count_faultable(patch: pytest.MonkeyPatch, session: Session, folder: Path) -> int:
    fault = OneFault(patch, 0, 0)
    train(session, new_run(folder), SILENT, quiet=True)
    shutil.rmtree(folder / "run")
    return fault.count


def test_a_state_that_cannot_be_read_stops_with_exit_4(session: Session, tmp_path: Path, monkeypatch) -> None:
    def bad_block(*arguments: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", bad_block)
    with pytest.raises(ResourceError, match="cannot read the state of the run"):
        train(session, new_run(tmp_path), SILENT, quiet=True)


def test_resuming_asks_for_no_room_that_the_run_has_already_taken(
    session: Session, tmp_path: Path, monkeypatch
) -> None:
    run = new_run(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        Power(patch, 120)
        with pytest.raises(PowerCut):
            train(session, run, SILENT, quiet=True)
    assert sum(path.stat().st_size for path in run.state.iterdir()) > 0.6 * session.plan.disk_bytes
    monkeypatch.setattr(machine, "free_disk", lambda folder: session.plan.disk_bytes // 2)
    rows = session.train, session.validation
    with pytest.raises(ResourceError, match="of disk"):
        make_session(session.recipe, session.model, *rows, "", tmp_path / "another")
    make_session(session.recipe, session.model, *rows, "", run.folder)
