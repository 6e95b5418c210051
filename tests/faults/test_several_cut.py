"""Cut a rank off at a disk operation or at a gather, resume, and compare the result.

Ranks are threads, so that a death takes tenths of a second. `test_several_killed` kills processes.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.os_calls import wrap_calls
from support.small_run import (
    OPERATIONS,
    PowerCut,
    assert_same_weights,
    losses_of,
    new_run,
    small_session,
    train,
    weights_of,
)
from support.thread_group import Hub, Member, together

from gptj_ft.config.run_folder import Run, steps_done
from gptj_ft.distributed import training
from gptj_ft.distributed.worker import worker_run
from gptj_ft.training.loop import train as train_run

SHARES: dict[str, dict[str, Any]] = {
    "layers on disk": {"share": "layers"},
    "layers in memory": {"share": "layers", "weights": "device", "optimizer_state": "device", "save_every": 1},
    "rows on disk": {"share": "rows"},
}
SIZE = 2


class Deaths:
    """Count the disk operations and gathers of each rank; each dies before its n-th operation."""

    def __init__(self, patch: pytest.MonkeyPatch, machines: Path, last: Mapping[int, int]) -> None:
        self.done = Counter[int]()
        self._last, self._machines = last, machines
        wrap_calls(patch, OPERATIONS, self._guard)
        wrap_calls(patch, ["unlink"], partial(self._guard, counts=False))

    def deed(self, rank: int, counts: bool = True) -> None:
        self.done[rank] += counts
        if self.done[rank] > self._last.get(rank, 10**9):
            raise PowerCut

    def _guard(self, operation: Callable[..., Any], counts: bool = True) -> Callable[..., Any]:
        def guarded(target: int | str | Path, *arguments: Any, **settings: Any) -> Any:
            path = Path(os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else target)
            if path.is_relative_to(self._machines):
                self.deed(int(path.relative_to(self._machines).parts[0]), counts)
            return operation(target, *arguments, **settings)

        return guarded


class Mortal(Member):
    """A rank that may die before or after it sends its part of a gather."""

    def __init__(self, hub: Hub, rank: int, deaths: Deaths) -> None:
        super().__init__(hub, rank)
        self._deaths = deaths

    def gather(self, topic: str, facts: Mapping[str, Any], among: Sequence[int] = ()) -> list[dict[str, Any]]:
        self._deaths.deed(self.rank)
        found = super().gather(topic, facts, among)
        self._deaths.deed(self.rank)
        return found


def machines_with_a_run(model: Path, machines: Path, options: Mapping[str, Any]) -> Path:
    """Start a run on machines without a shared disk, each a folder with the number of the rank."""
    for rank in range(SIZE):
        folder = machines / str(rank)
        folder.mkdir(parents=True)
        Run(folder).start_record(small_session(model, lanes=SIZE, **options).recipe)
    return machines


def train_apart(model: Path, machines: Path, options: Mapping[str, Any], deaths: Deaths | None = None) -> None:
    """Start or resume the run on its machines, each a thread."""

    def work(member: Member) -> None:
        folder = machines / str(member.rank)
        setup = small_session(model, group=member, lanes=SIZE, **options)
        train_run(setup, worker_run(folder, setup, writes=True) if member.rank else Run(folder))

    together(SIZE, work, partial(Mortal, deaths=deaths) if deaths else Member)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    small_session(folder)
    return folder


@pytest.mark.sampled(3)
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize(
    "trials", [2, pytest.param(10, marks=pytest.mark.thorough), pytest.param(400, marks=pytest.mark.slow)]
)
def test_killed_rank_loses_at_most_one_step(model, tmp_path, monkeypatch, share, trials) -> None:
    options, straight = SHARES[share], new_run(tmp_path)
    train(small_session(model, lanes=SIZE, **{**options, "share": "auto"}), straight)
    with pytest.MonkeyPatch.context() as patch:
        machines = machines_with_a_run(model, tmp_path / "counted", options)
        counted = Deaths(patch, machines, {})
        train_apart(model, machines, options, counted)
    monkeypatch.setattr(training, "COMMIT_SECONDS", 0.5)
    numbers = [range(counted.done[rank]) for rank in range(SIZE)]
    of_one = [{rank: last} for rank in range(SIZE) for last in numbers[rank]]
    of_both = [dict(enumerate(pair)) for pair in zip(*numbers, strict=False)]
    every = of_one + of_both
    for last in every[:: max(1, len(every) // trials)]:
        machines = machines_with_a_run(model, tmp_path / "machines", options)
        with pytest.MonkeyPatch.context() as patch:
            deaths = Deaths(patch, machines, last)
            # One run has some deeds more than another, as its threads meet.
            with suppress(PowerCut) if is_last(last, numbers) else pytest.raises(PowerCut):
                train_apart(model, machines, options, deaths)
        runs = [Run(machines / str(rank)) for rank in range(SIZE)]
        logged = max((line["step"] for run in runs for line in run.metrics()), default=0)
        if not runs[0].model.is_dir():  # with the model, the run has ended, and checkpoints are no longer needed
            assert max(map(steps_done, runs)) >= logged - 1, last
            train_apart(model, machines, options)
        assert_same_weights(weights_of(runs[0].model), weights_of(straight.model), last)
        assert losses_of(runs[0]) == losses_of(straight), last
        shutil.rmtree(machines)


def is_last(last: Mapping[int, int], numbers: Sequence[range]) -> bool:
    """Tell whether the last operations are so late that a run may end before them."""
    return all(number >= len(numbers[rank]) - 10 for rank, number in last.items())
