"""Launches of a step do not grow with the number of its documents."""

from __future__ import annotations

from typing import Any

import pytest
from support.fork_server import ForkServer


@pytest.fixture(scope="module")
def counts(server: ForkServer) -> dict[str, list[dict[str, Any]]]:
    """Launches of small models on one micro-batch of 4 and of 16 documents, by model."""
    return {line["model"]: line["counts"] for line in server.run_module("support.launches", "--small")}


@pytest.mark.thorough
@pytest.mark.parametrize("model", ["gptj fp32", "gemma2 bf16", "bert bf16"])
def test_launches_ignore_number_of_documents(model: str, counts: dict[str, list[dict[str, Any]]]) -> None:
    few, many = counts[model]
    assert few["micro_batches"] == many["micro_batches"] == 1
    assert few["launches"] == many["launches"] > 100
    assert few["copies"] == many["copies"]
