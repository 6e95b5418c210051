"""Test the dropout seeds of a step's documents."""

from __future__ import annotations

from pathlib import Path

from support.small_run import small_session, with_options

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
