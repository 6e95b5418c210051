"""Drive a tiny run from Python: session, folder, weights and power cuts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import random_gptj
from safetensors.torch import load_file
from support.os_calls import wrap_calls

from gptj_ft.config.resolve import build
from gptj_ft.config.run_folder import Run
from gptj_ft.data.batches import Rows
from gptj_ft.distributed.training import DistributedTraining
from gptj_ft.system.group import ALONE, Group
from gptj_ft.training.loop import Session, TrainResult
from gptj_ft.training.loop import train as train_run
from gptj_ft.training.setup import TrainSetup, make_setup

OPERATIONS = ("pwritev", "fsync", "replace", "rename", "link")


def small_session(folder: Path, num_steps: int = 3, group: Group = ALONE, **options: object) -> TrainSetup:
    """Return a session on six short random rows and two validation rows; everything on disk by default."""
    if not (folder / "config.json").is_file():
        random_gptj(vocab_size=40, n_positions=32, n_embd=16, n_layer=2, n_head=2, rotary_dim=4).save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(1, 40, (9,), generator=generator).tolist() for _ in range(8)]
    places = {"weights": "disk", "optimizer_state": "disk"}
    recipe = build(
        {"batch_size": 2, "max_length": 32, "lr": 1e-2, "device": "cpu", "max_steps": num_steps, **places, **options}
    )
    rows, validation = Rows(documents[:6], [3] * 6), Rows(documents[6:], [3] * 2)
    return make_setup(recipe, folder, rows, validation, "", folder, parallel=DistributedTraining(group))


def with_options(session: TrainSetup, **options: object) -> TrainSetup:
    """Return the session with other options that change no number."""
    return replace(session, recipe=session.recipe.model_copy(update=options))


def new_run(folder: Path) -> Run:
    run = Run(folder / "run")
    run.folder.mkdir()
    return run


def train(session: TrainSetup, run: Run) -> TrainResult:
    if not run.record_file.is_file():
        run.start_record(session.recipe)
    return train_run(session, run, session=Session(owns_process=True))


def weights_of(model: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for shard in sorted(model.glob("*.safetensors")) for name, tensor in load_file(shard).items()}


def assert_same_weights(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], *context: object) -> None:
    assert ours.keys() == theirs.keys(), context
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), (*context, name)


class PowerCut(BaseException):
    """Signal the cut; the process must not do anything afterwards."""


class Power:
    """Count disk operations and fail each from the n-th on, like a dead process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, last: int | None = None) -> None:
        self.count, self._last = 0, last
        wrap_calls(monkeypatch, OPERATIONS, self._guard)
        wrap_calls(monkeypatch, ["unlink"], partial(self._guard, counts=False))

    def _guard(self, operation, counts: bool = True):
        def guarded(*arguments, **settings):
            self.count += counts
            if self._last is not None and self.count > self._last:
                raise PowerCut
            return operation(*arguments, **settings)

        return guarded


def cut_and_resume(session: TrainSetup, run: Run, cuts: Sequence[int]) -> None:
    """Cut the power at the n-th operation of each session in turn, then complete the run."""
    for last in cuts:
        with pytest.MonkeyPatch.context() as patch:
            power = Power(patch, last)
            try:
                train(session, run)
            except PowerCut:
                continue
            # Thread timing changes the number of operations: a cut near the end may come too late.
            assert power.count <= last, "the run goes on after the cut"
            break
    if not run.model.exists():  # the last operations come after the model is there
        train(session, run)


def losses_of(run: Run) -> list[tuple[object, ...]]:
    """Return the time-independent numbers of a run's metrics."""
    return [(line["step"], line.get("loss"), line.get("validation_loss")) for line in run.metrics()]
