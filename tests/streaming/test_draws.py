"""Random numbers are the same in every version, on every machine, with every release of the libraries.

The values below are from the first version with this test. A change would alter the numbers of resumed runs.
"""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from support.small_stack import new_memory

from gptj_ft.data.batches import rows_of_step
from gptj_ft.data.split import _choose, _mixed
from gptj_ft.models.dropout import Dropout, NoiseSpan, row_keys, seed_of
from gptj_ft.models.dropout import Noise as DropoutNoise
from gptj_ft.models.lora import initialise
from gptj_ft.streaming.moments import FORMS
from gptj_ft.streaming.moments.form import Noise

ROWS = [[0, 4, 7, 1], [5, 6, 3, 8], [2], [0, 6, 2, 1]]
MIXED = [6804994740500709941, 1177590300488444974, 17621990229112936777]
HELD = [1, 8, 9, 13, 20, 29, 31, 36]
ROUNDED = "748965f7f6253ded"
SEED = 20264839925883621
SPANS = (NoiseSpan(5, 1, 3, 4),)
DROPPED, HASHED = [895, 959], [679, 531]
FIRST = [-0.0075829, 0.2000428, -0.0455447, 0.237025, 0.0101791, 0.1113995]


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def test_row_order_is_stable_across_versions() -> None:
    assert [rows_of_step(step, 9, 4, seed=3) for step in range(4)] == ROWS


def test_validation_split_is_stable_across_versions() -> None:
    groups, labels = np.arange(1000, 1040), np.zeros(40, np.int64)
    assert np.flatnonzero(_choose(groups, labels, 8, seed=5, keeps_one=False)).tolist() == HELD
    assert _mixed(groups[:3], seed=5).tolist() == MIXED, "every bit counts where there are millions of rows"


def test_stochastic_rounding_is_that_of_every_version() -> None:
    exact = torch.arange(3_000_000, dtype=torch.float32) / 1024  # exact on every processor
    rounded = torch.empty(len(exact), dtype=torch.bfloat16)
    FORMS["bf16"].store("exp_avg", exact, rounded, Noise((0, 7, 2, "exp_avg"), 1 << 20), new_memory)
    assert digest(rounded.view(torch.int16).numpy().tobytes()) == ROUNDED


def test_seeds_and_initial_adapters_are_stable() -> None:
    matrix = torch.empty(4, 6)
    initialise("attn.q_proj.lora_A", matrix, (0, 1))
    assert seed_of((0, 12, 3)) == SEED
    assert matrix[0].tolist() == pytest.approx(FIRST, abs=1e-6)


@pytest.mark.parametrize("is_hashed", [False, True])
def test_dropout_masks_are_stable_across_versions(is_hashed: bool) -> None:
    noise = DropoutNoise(SPANS, row_keys(SPANS) if is_hashed else None)  # as on an accelerator
    mask = Dropout(0.3, 13, "mlp").mask(noise, (10,), torch.device("cpu"))
    assert [int("".join(str(int(kept)) for kept in row), 2) for row in mask] == (HASHED if is_hashed else DROPPED)
