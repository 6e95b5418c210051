"""Test the command `prove`: equal bits, detected differences, and cleanup."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.fork_server import ForkServer

from gptj_ft.cli.html.proof_page import sections, write_proof
from gptj_ft.diagnostics import proof
from gptj_ft.diagnostics.proof import Memory, Proof, ProofRequest, ProofRun, run_proof
from gptj_ft.errors import GptjFtError, ResourceError

PAGES = {"prove.html", "prove.md", "prove.json"}
RUN = ProofRun((3.0, 2.5, 2.25), (1.0, 0.5, 0.25), "ab" * 32, (9.0, 4.0, 6.0), (8,) * 3, (6,) * 3, Memory(7), 20.0)
DONE = Proof(
    size="tiny", precision="fp32", parameters=1000, state_bytes=10_000, tokens_per_step=100, limit=2**30,
    not_caged="", is_without_swap=True, num_limited=0, killed_in=3, committed=2, lost_seconds=2.0, streamed=RUN,
    reference=RUN, is_in_ram=True, difference="", disk_bytes=5000, forecast={"seconds": 30.0, "disk_bytes": 6000},
    machine={}, seconds=25.0,
)  # fmt: skip


@pytest.mark.thorough
@pytest.mark.usefixtures("measured_home")
def test_killed_run_equals_run_in_ram(shell) -> None:
    done = shell("prove --size tiny --output proof --json")
    assert done.code == 0, done.said
    found = done.json
    assert (found["holds"], found["is_in_ram"], found["difference"]) == (True, True, "")
    assert found["verdict"].startswith(f"proven: {found['parameters']:,} parameters trained from disk")
    streamed, reference = found["streamed"], found["reference"]
    assert len(streamed["losses"]) == len(set(streamed["losses"])) == proof.PROOF_SIZES["tiny"].num_steps
    assert all(streamed[key] == reference[key] for key in ("losses", "norms", "weights_sha256"))
    assert re.fullmatch("[0-9a-f]{64}", streamed["weights_sha256"])
    assert found["killed_in"] - found["committed"] in (1, 2)  # the step before may be on its way to the disk
    assert found["killed_in"] > proof.PROOF_SIZES["tiny"].num_steps // 2
    assert min(streamed["bytes_written"][1:]) > 0 == max(reference["bytes_written"])
    if not found["not_caged"]:
        assert 0 < streamed["memory"]["group"] <= found["limit"]
    assert {path.name for path in Path("proof").iterdir()} == PAGES, "working files remain"
    assert json.loads(Path("proof/prove.json").read_text())["streamed"]["losses"] == streamed["losses"]
    assert shell("prove --size tiny --output proof").code == 2


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (
            replace(RUN, losses=(3.0, 2.5, 2.2500000000000004)),
            "the loss of step 3 is 2.25 instead of 2.250000",
        ),
        (replace(RUN, norms=(1.0, 0.5000000000000001, 0.25)), "the gradient norm of step 2 is 0.5 instead of 0.500000"),
        (replace(RUN, weights_sha256="cd" * 32), "the weights differ"),
        (RUN, ""),
    ],
)
def test_one_different_bit_is_a_difference(other: ProofRun, says: str) -> None:
    found = RUN.difference(other)
    assert found.startswith(says)
    assert bool(found) == bool(says)


def test_failed_proof_writes_pages_and_exits_1(shell, monkeypatch) -> None:
    failed = replace(DONE, difference="the weights differ")

    def run_proof(request: ProofRequest, reporter: object = None) -> Proof:
        request.folder.mkdir()
        return failed

    monkeypatch.setattr(proof, "run_proof", run_proof)
    done = shell("prove --output here --quiet")
    assert done.code == 1
    assert done.out == f"{failed.verdict}\n"
    assert done.out.startswith("not proven: ")
    assert "not proven" in Path("here/prove.html").read_text()


def test_page_without_cgroup_shows_measured_memory(tmp_path: Path) -> None:
    memory = replace(RUN, memory=Memory(3 * 2**29, 2**28))
    found = replace(DONE, not_caged="no control groups are mounted", streamed=memory)
    says = sections(found)["Measurements"]["memory"]
    assert says.startswith("memory not limited (no control groups are mounted): at most 1.5 GiB resident; ")
    assert "grew by 0.25 GiB" in says
    assert "without a memory limit" in found.verdict
    pages = write_proof(found, tmp_path)
    assert all("memory not limited" in path.read_text() for path in pages[:2])


def test_small_disk_fails_before_writing(shell, set_free_space) -> None:
    set_free_space(10**9)
    done = shell("prove --size 124M --output none")
    assert done.code == 4
    assert "of disk, 1.0 GB are free in" in done.err
    assert not Path("none").exists()


def test_small_memory_limit_names_the_minimum(shell) -> None:
    done = shell("prove --size 124M --memory 600MiB --output none")
    assert done.code == 4
    assert "add --memory with at least 1." in done.err
    assert not Path("none").exists()


@pytest.mark.thorough
@pytest.mark.usefixtures("measured_home")
def test_ctrl_c_leaves_no_process_or_file(server: ForkServer, tmp_path: Path) -> None:
    with server.running("prove --size tiny --output none --steps 1000", tmp_path) as process:
        metrics = tmp_path / "none" / "work" / "streamed" / "metrics.jsonl"
        while not metrics.is_file() and not process.has_ended():
            time.sleep(0.05)
        children = psutil.Process(process.pid).children(recursive=True)
        assert process.end(signal.SIGINT) == 130
    assert "the proof is incomplete and its files are removed" in (tmp_path / "output.txt").read_text(encoding="utf-8")
    assert not (tmp_path / "none").exists()
    assert children
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)


@dataclass(frozen=True)
class FakeCgroup:
    """Stand-in for a control group that replaces the command by a Python script."""

    script: str
    num_killed: int = 0
    peak_bytes: int | None = None
    page_cache_bytes: int = 0
    limit: int = 2**30

    def command(self, words: Sequence[str]) -> list[str]:
        return [sys.executable, "-c", self.script]

    @contextmanager
    def enter(self, limit: int, name: str) -> Iterator[Any]:
        yield self


def test_kernel_kill_means_too_little_memory(tmp_path: Path) -> None:
    group = FakeCgroup("import os; os.kill(os.getpid(), 9)", num_killed=1)
    with pytest.raises(ResourceError, match="needs more than the 1 GiB of its control group"):
        run_proof(ProofRequest("tiny", tmp_path / "none"), limit_memory=group.enter)
    assert not (tmp_path / "none").exists()


def test_failed_run_reports_its_last_line(tmp_path: Path) -> None:
    group = FakeCgroup("import sys; print('first'); print('no_such'); sys.exit(2)")
    with pytest.raises(GptjFtError, match="failed with exit code 2: no_such"):
        run_proof(ProofRequest("tiny", tmp_path / "none"), limit_memory=group.enter)
