"""Locate published data sets outside the project."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def real_data(name: str) -> Path:
    """Return a file of the data folder; skip the test if it is missing."""
    folder = Path(os.environ.get("GPTJ_FT_TEST_DATA") or Path(__file__).parents[3] / "shared" / "data")
    if not (folder / name).exists():
        pytest.skip(f"real data not found: {folder / name} (set GPTJ_FT_TEST_DATA)")
    return folder / name
