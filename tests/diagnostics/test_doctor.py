"""Test the command `doctor`: planted faults are found, every part runs, and the report is anonymous."""

from __future__ import annotations

import getpass
import json
import math
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gptj_ft.diagnostics import checkup, facts, parity, streams, trial
from gptj_ft.diagnostics.checkup import QUICK, Checkup, run_part, verdict, without_private
from gptj_ft.diagnostics.parity import Mismatch, Skipped
from gptj_ft.diagnostics.trial import SmallModel
from gptj_ft.errors import Interrupted, ResourceError
from gptj_ft.streaming.stores.base import LayerStore, Span
from gptj_ft.streaming.stores.disk import DiskStore
from gptj_ft.system.accelerator import runs_on

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> SmallModel:
    return Checkup(CPU, QUICK, tmp_path_factory.mktemp("models")).small_model()


@pytest.mark.thorough
def test_cpu_passes_with_an_anonymous_report(shell, own_home: Path, monkeypatch) -> None:
    monkeypatch.setenv("MY_SECRET", "s3cr3t-value")
    done = shell("doctor --device cpu --json")
    assert (done.code, done.err) == (0, "")
    found = done.json
    assert (found["works"], found["exit_code"], len(found["verdict"])) == (True, 0, 4)
    states = {part["name"]: part["state"] for part in found["parts"]}
    assert {name for name, state in states.items() if state == "passed"} == {
        "transformers", "placements", "rates", "forecast"
    }  # fmt: skip
    assert set(states.values()) == {"passed", "skipped"}
    assert found["facts"]["versions"]["torch"] == torch.__version__
    assert all(found["facts"].values()), "a fact could not be had"
    assert not Path("doctor.json").exists()
    private = [Path.cwd(), own_home, Path.home(), tempfile.gettempdir(), socket.gethostname(), "s3cr3t-value"]
    assert not [text for text in map(str, private) if f'"{text}' in done.out or f"{text}/" in done.out]
    assert getpass.getuser() not in done.out.replace('"root"', "")


@pytest.fixture
def passing(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replace the parts by ones that pass immediately."""
    found = {
        "transformers": {}, "placements": {},
        "rates": {"compute": {"fp32": 1e11, "bf16": 2e10}, "disk": {"read": 1e9, "write": 1e9}},
        "forecast": {"problem": "", "needs": {"memory": 6e9}, "tokens_per_second": 3.0, "tokens_per_step": 2048,
                     "precision": "fp32"},
    }  # fmt: skip
    parts = {name: (name, lambda name=name: found[name]) for name in found}
    monkeypatch.setattr(Checkup, "parts", lambda self: parts)
    return parts


def test_report_replaces_only_another_report(shell, passing, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        done = shell("doctor --device cpu")
        assert (done.code, len(done.out.splitlines())) == (0, 4)
        assert json.loads(Path("doctor.json").read_text())["verdict"] == done.out.splitlines()
    Path("doctor.json").write_text('{"mine": 1}')
    done = shell("doctor --device cpu")
    assert (done.code, "choose another --output" in done.err) == (2, True)
    assert shell("doctor --device cpu --quiet --output other.json").out.startswith("works on ")
    assert Path("doctor.json").read_text() == '{"mine": 1}'
    monkeypatch.setattr("gptj_ft.api.doctor", None)  # nothing is measured for a report that cannot be written
    done = shell("doctor --device cpu --output none/there.json")
    assert (done.code, "there is no folder none" in done.err) == (2, True)


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (Mismatch("bf16: the loss differs"), 1, "transformers: bf16: the loss differs (failed, too: forecast)"),
        (RuntimeError("CUDA out of memory. Tried 2 GiB\nmore"), 4, "RuntimeError: CUDA out of memory. Tried 2 GiB ("),
        (ResourceError("12 GB were taken under a cap of 8 GB"), 4, "12 GB were taken under a cap of 8 GB ("),
        (KeyError(), 1, "transformers: KeyError: ("),
    ],
)
def test_failed_part_does_not_stop_others(error: Exception, code: int, says: str, shell, passing) -> None:
    def fail() -> None:
        raise error

    passing.update(transformers=("", fail), forecast=("", fail))
    done = shell("doctor --device cpu --json")
    assert done.code == code
    found = done.json
    assert (found["works"], found["exit_code"]) == (False, code)
    assert [part["state"] for part in found["parts"]] == ["failed", "passed", "passed", "failed"]
    assert says in found["verdict"][0]
    assert found["parts"][0]["places"][-1].startswith("diagnostics/checkup.py:")
    assert len(found["verdict"]) == 4
    assert all("\n" not in line for line in found["verdict"])


def test_difference_above_rounding_is_no_failure(shell, passing) -> None:
    line = parity.judge("bf16: the loss differs from the CPU's", 3e-3, parity.LOSS_TOLERANCE["bf16"])
    passing.update(placements=("", lambda: {"differs": line}))
    done = shell("doctor --device cpu --json")
    assert (done.code, done.json["works"]) == (0, True)
    assert [part["state"] for part in done.json["parts"]] == ["passed", "differs", "passed", "passed"]
    assert "differs more than expected: placements: bf16: the loss differs" in done.json["verdict"][0]
    assert "by 0.003 (relative), 1.5 times the 0.002 expected: weights, hidden states" in done.json["verdict"][0]


@pytest.mark.parametrize("precision", parity.LOSS_TOLERANCE)
def test_differences_are_judged_by_two_limits(precision: str) -> None:
    tolerance = parity.LOSS_TOLERANCE[precision]
    assert tolerance.expected * 10 <= tolerance.wrong
    assert parity.judge("x", tolerance.expected, tolerance) == []
    assert len(parity.judge("x", tolerance.wrong, tolerance)) == 1
    for error in (tolerance.wrong * 1.01, math.nan, math.inf):
        with pytest.raises(Mismatch, match="x by "):
            parity.judge("x", error, tolerance)
    assert parity.margin(tolerance.expected / 4, tolerance) == pytest.approx(4)
    assert parity.margin(0.0, tolerance) is None


def test_stop_request_ends_the_checkup() -> None:
    def stop() -> None:
        raise Interrupted("stopped")

    with pytest.raises(Interrupted):
        run_part("rates", stop)


def test_parity_finds_wrong_loss_gradient_update(tmp_path: Path, monkeypatch) -> None:
    def planted(owner: object, name: str, wrong: object) -> str:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, wrong)
            with pytest.raises(Mismatch) as mismatch:
                parity.check_transformers(tmp_path / name, 2, families=["gptj"])
        return str(mismatch.value)

    take, reference, config = trial.take_step, parity._reference_loss, trial.optimizer_config
    assert "loss" in planted(parity, "take_step", lambda *its: (take(*its)[0] * 1.0001, 0.0))
    assert "gradient" in planted(
        parity, "_reference_loss", lambda *its: 1.01 * reference(*its) - 0.01 * reference(*its).item()
    )
    assert "weights" in planted(trial, "optimizer_config", lambda recipe: replace(config(recipe), betas=(0.5, 0.5)))


class FlippingStore(LayerStore):
    """Flip a bit of the moments of layer 1 that are written to disk."""

    def __init__(self, store: LayerStore) -> None:
        self._store, self.digest_numel = store, store.digest_numel
        self.own, self.in_host, self.commit, self.then = store.own, store.in_host, store.commit, store.then
        self.drain, self.close, self.read, self.read_rows = store.drain, store.close, store.read, store.read_rows

    def write(self, span: Span, values: torch.Tensor, digests: Sequence[str] = ()) -> Future[None]:
        if isinstance(self._store, DiskStore) and span[:2] == ("exp_avg", 1):
            values.view(torch.int32)[0] ^= 1
        return self._store.write(span, values, digests)


def test_placement_check_finds_one_wrong_bit(small_model: SmallModel) -> None:
    (first, disk, *_), _ = parity.trials(CPU, "fp32", is_thorough=False)
    groups = [[replace(each, num_steps=1) for each in (first, disk)]]
    assert parity.check_placements(small_model, groups)["equal"] == [str(each) for each in groups[0]]
    groups = [[replace(each, num_steps=2) for each in groups[0]]]
    with pytest.raises(Mismatch, match=r"fp32, weights on disk.*: "):
        parity.check_placements(small_model, groups, FlippingStore)


def test_sanitizer_races_are_counted_with_places() -> None:
    def sanitized(code: int, stderr: str) -> dict[str, Any]:
        done = subprocess.CompletedProcess([], code, "", stderr)
        return streams.run_sanitizer(Path(), CPU, "fp32", lambda *_, **settings: done)

    found = f"""{streams.RACE} on tensor with data pointer 1
  File "/home/jdoe/gptj_ft/streaming/step.py", line 12, in backward
{streams.RACE} on tensor with data pointer 2
  File "/home/jdoe/gptj_ft/streaming/step.py", line 12, in backward
"""
    assert sanitized(1, found) == {
        "possible_races": 2,
        "places": ["gptj_ft/streaming/step.py:12"],
    }
    assert sanitized(0, "") == {"possible_races": 0, "places": []}
    with pytest.raises(Skipped, match="ended with 1"):
        sanitized(1, "Torch not compiled with CUDA enabled")


def test_deterministic_mode_is_restored() -> None:
    with parity.deterministic():
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("capability", "built", "runs"),
    [
        ((8, 6), ["sm_75", "sm_80", "sm_90"], True),
        ((8, 6), ["sm_75", "sm_89"], False),
        ((6, 1), ["sm_75", "sm_80", "compute_80"], False),
        ((12, 0), ["sm_80", "compute_80"], True),
        ((12, 0), ["sm_90a", "compute_90a"], False),
        ((9, 0), ["sm_90a"], True),
        ((9, 0), ["gfx90a"], None),
    ],
)
def test_torch_build_supports_compute_capability(capability: tuple[int, int], built: list[str], runs: bool) -> None:
    assert runs_on(capability, built) is runs


def test_verdict_names_unsupported_device_first() -> None:
    known = {"device": {"name": "Tesla P40", "is_in_build": False, "built_for": ["sm_75"], "capability": "6.1"}}
    parts = [checkup.Part(name, "failed", 0.0, problem="no kernel") for name in ("rates", "overlap", "forecast")]
    first = verdict(torch.device("cuda", 0), known, parts)[0]
    assert first.startswith("does not work: torch here is built for sm_75, and Tesla P40 has compute capability 6.1")


def test_unreadable_facts_are_none(monkeypatch, tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError

    monkeypatch.setattr(facts, "_cpu", fail)
    found = facts.collect(CPU, tmp_path)
    assert found["cpu"] is None
    assert found["memory"]["total"] > 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no such file: /data/My Notes/ward 7.txt: it is gone", "no such file: ***: it is gone"),
        ("cannot read 'Smith John/notes.txt' here", "cannot read *** here"),
        ("runs/smith-1/model is no model at 1.5 GB/s, 12 tokens/s", "*** is no model at 1.5 GB/s, 12 tokens/s"),
        ("~/x and ../y/z of JDoe on LAB-7", "*** and *** of *** on ***"),
        ("the product's sum, 'fp32', is 1/2", "the product's sum, 'fp32', is 1/2"),
    ],
)
def test_messages_hide_parts_of_paths(text: str, shown: str) -> None:
    assert without_private(text, lambda: "jdoe", lambda: "lab-7") == shown


def test_messages_hide_paths_users_and_hosts(tmp_path: Path) -> None:
    text = f"cannot open {tmp_path}/x.bin of jdoe on lab-7: '/data/notes/a b.txt', 3 kB/s and 1/2"
    assert (
        without_private(text, lambda: "jdoe", lambda: "lab-7") == "cannot open *** of *** on ***: ***, 3 kB/s and 1/2"
    )
