"""The simulator has teeth: a wait, an event or a mark that is taken out of the accelerator path is found."""

from __future__ import annotations

from typing import Any

import pytest
from support.fork_server import ForkServer

MUTATIONS = "support.accelerator.mutations"


def missed(found: list[dict[str, Any]]) -> list[str]:
    return [
        f"{each['path']}:{each['line']} {each['function']} {each['what']}: {each['before']}"
        for each in found
        if not each["found_by"] and not each["changes_nothing"]
    ]


@pytest.mark.thorough
def test_sampled_missing_waits_are_found(server: ForkServer) -> None:
    found = server.run_module(MUTATIONS, "--only", "block_reader", "--cases", "2")
    assert len(found) >= 2
    assert missed(found) == []


@pytest.mark.thorough
def test_missing_waits_for_commits_are_found(server: ForkServer) -> None:
    found = server.run_module(MUTATIONS, "--only", "last commit", "--cases", "16")
    assert len(found) == 2
    assert missed(found) == []


@pytest.mark.slow
def test_every_missing_wait_is_found(server: ForkServer) -> None:
    found = server.run_module(MUTATIONS)
    assert len(found) >= 60
    assert missed(found) == []
