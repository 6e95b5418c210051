"""Test the dropout seeds of a step's documents, and the repetition of steps that the device cannot do as planned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_run import new_run, small_session, train, weights_of, with_options
from support.steps import around_steps

from gptj_ft.streaming.exchange import Exchange
from gptj_ft.training.compute import batches_of_step


def test_dropout_seeds_depend_on_step_and_document(tmp_path: Path) -> None:
    setup, rows = small_session(tmp_path, dropout=0.5), [2, 0, 1]

    def seeds(step: int, tokens: int) -> list[int]:
        packed = batches_of_step(with_options(setup, micro_batch_tokens=tokens), Exchange(), rows, step)
        return [seed for batch in packed for seed in batch.seeds or ()]

    every = [seed for step in range(3) for seed in seeds(step, 100)]
    assert len(set(every)) == 3 * len(rows)
    assert seeds(1, 1) == seeds(1, 100), "packing changes a mask"


REFUSED = "cumsum_cuda_kernel does not have a deterministic implementation, but you set 'torch.use_deterministic_alg"
PLACES = {"host": {"weights": "host", "optimizer_state": "host"}, "disk": {}}


def trained(folder: Path, around: Callable[..., Any] | None = None, **options: object) -> dict[str, torch.Tensor]:
    """Return the weights of a run whose blocks keep their activations; ``around`` replaces its steps."""
    run, session = new_run(folder), small_session(folder, activations="keep", **options)
    if around is None:
        train(session, run)
    else:
        with around_steps(around):
            train(session, run)
    return weights_of(run.folder / "model")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("call", range(1, 5))  # of autograd in step 2: head, two blocks, embedding
@pytest.mark.parametrize("place", PLACES)
def test_step_that_ran_out_of_memory_is_repeated_to_the_same_bits(
    place: str, call: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("straight", "failing"):
        (tmp_path / name).mkdir()
    original, calls = torch.autograd.backward, list[int]()

    def backward(*arguments: Any, **named: Any) -> None:
        calls.append(1)
        if len(calls) == call:
            raise torch.OutOfMemoryError("CUDA out of memory")
        original(*arguments, **named)

    def fail_once(train_step: Callable[..., Any], model: Any, optimizer: Any, *rest: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            if optimizer.step == 1:
                patch.setattr(torch.autograd, "backward", backward)
            return train_step(model, optimizer, *rest)

    tuned = trained(tmp_path / "failing", fail_once, **PLACES[place])
    (said,) = [line for line in caplog.messages if "memory ran out" in line]
    assert said.startswith("device memory ran out in step 2: repeating it with the activations of 1 blocks kept")
    assert same(tuned, trained(tmp_path / "straight", **PLACES[place]))


def test_step_without_clipping_is_not_repeated(tmp_path: Path) -> None:
    """Backward has changed weights."""

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        trained(tmp_path, fail, clip_norm=None, **PLACES["host"])


def test_operation_without_deterministic_kernel_costs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("straight", "refused"):
        (tmp_path / name).mkdir()
    modes = list[bool]()

    def refuse(train_step: Callable[..., Any], model: Any, *rest: Any) -> Any:
        modes.append(model.is_deterministic)
        if model.is_deterministic:
            raise RuntimeError(REFUSED)
        return train_step(model, *rest)

    assert same(trained(tmp_path / "refused", refuse), trained(tmp_path / "straight"))
    assert modes == [True, False, False, False]
    (said,) = [line for line in caplog.messages if "deterministic" in line]
    assert said == "cumsum_cuda_kernel has no deterministic kernel on this device: equal runs will differ by rounding"
