"""The check-up of a machine: it finds what is planted, hides no failure, and tells nothing private."""

from __future__ import annotations

import getpass
import json
import socket
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gptj_ft.errors import Interrupted, ResourceError
from gptj_ft.streaming.stores.disk import DiskStore
from gptj_ft.training.doctor import checkup, facts, parity, streams, trial
from gptj_ft.training.doctor.checkup import QUICK, Checkup, run_part, verdict, without_private
from gptj_ft.training.doctor.facts import runs_on
from gptj_ft.training.doctor.parity import Mismatch, Skipped
from gptj_ft.training.doctor.trial import SmallModel

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> SmallModel:
    return Checkup(CPU, QUICK, tmp_path_factory.mktemp("models")).small_model()


def test_a_cpu_passes_by_one_object_with_nothing_private_in_it(shell, own_home: Path, monkeypatch) -> None:
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
def passing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every part pass at once."""
    found = {
        "transformers": {}, "placements": {},
        "rates": {"compute": {"fp32": 1e11, "bf16": 2e10}, "disk": {"read": 1e9, "write": 1e9}},
        "forecast": {"problem": "", "needs": {"memory": 6e9}, "tokens_per_second": 3.0, "tokens_per_step": 2048,
                     "precision": "fp32"},
    }  # fmt: skip
    parts = {name: (name, lambda name=name: found[name]) for name in found}
    monkeypatch.setattr(Checkup, "parts", lambda self: parts)


def test_the_report_lies_beside_the_verdict_and_replaces_only_its_like(shell, passing) -> None:
    for _ in range(2):
        done = shell("doctor --device cpu")
        assert (done.code, len(done.out.splitlines())) == (0, 4)
        assert json.loads(Path("doctor.json").read_text())["verdict"] == done.out.splitlines()
    Path("doctor.json").write_text('{"mine": 1}')
    done = shell("doctor --device cpu")
    assert (done.code, "name another --output" in done.err) == (2, True)
    assert shell("doctor --device cpu --quiet --output other.json").out.startswith("works on ")
    assert Path("doctor.json").read_text() == '{"mine": 1}'
    assert shell("doctor --device cpu --output none/there.json").code == 2


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (Mismatch("bf16: the loss differs"), 1, "transformers: bf16: the loss differs (failed, too: forecast)"),
        (RuntimeError("CUDA out of memory. Tried 2 GiB\nmore"), 4, "RuntimeError: CUDA out of memory. Tried 2 GiB ("),
        (ResourceError("12 GB were taken under a cap of 8 GB"), 4, "12 GB were taken under a cap of 8 GB ("),
        (KeyError(), 1, "transformers: KeyError: ("),
    ],
)
def test_a_part_that_fails_hides_no_other(error: Exception, code: int, says: str, shell, passing, monkeypatch) -> None:
    def fail() -> None:
        raise error

    parts = Checkup(CPU, QUICK, Path()).parts()
    monkeypatch.setattr(Checkup, "parts", lambda self: {**parts, "transformers": ("", fail), "forecast": ("", fail)})
    done = shell("doctor --device cpu --json")
    assert done.code == code
    found = done.json
    assert (found["works"], found["exit_code"]) == (False, code)
    assert [part["state"] for part in found["parts"]] == ["failed", "passed", "passed", "failed"]
    assert says in found["verdict"][0]
    assert found["parts"][0]["places"][-1].startswith("training/doctor/checkup.py:")
    assert len(found["verdict"]) == 4
    assert all("\n" not in line for line in found["verdict"])


def test_a_request_to_stop_is_no_failure_of_a_part() -> None:
    def stop() -> None:
        raise Interrupted("stopped")

    with pytest.raises(Interrupted):
        run_part("rates", stop)


def test_parity_finds_a_loss_a_gradient_and_an_update_that_are_wrong(tmp_path: Path, monkeypatch) -> None:
    def planted(owner: object, name: str, wrong: object) -> str:
        with monkeypatch.context() as patch:
            patch.setattr(parity, "SHAPES", {"gptj": parity.SHAPES["gptj"]})
            patch.setattr(owner, name, wrong)
            with pytest.raises(Mismatch) as mismatch:
                parity.check_transformers(tmp_path / name, 2)
        return str(mismatch.value)

    take, reference, config = trial.take_step, parity._reference_loss, trial.optimizer_config
    assert "loss" in planted(parity, "take_step", lambda *its: (take(*its)[0] * 1.0001, 0.0))
    assert "gradient" in planted(
        parity, "_reference_loss", lambda *its: 1.01 * reference(*its) - 0.01 * reference(*its).item()
    )
    assert "weights" in planted(trial, "optimizer_config", lambda recipe: replace(config(recipe), betas=(0.5, 0.5)))


def test_placements_are_told_apart_by_a_bit(small_model: SmallModel, monkeypatch) -> None:
    (first, disk, *_), _ = parity.trials(CPU, "fp32", is_thorough=False)
    groups = [[replace(each, num_steps=1) for each in (first, disk)]]
    assert parity.check_placements(small_model, groups)["equal"] == [str(each) for each in groups[0]]
    write = DiskStore.write

    def rounded(self, span, values, *others):
        if span[:2] == ("exp_avg", 1):
            values.view(torch.int32)[0] ^= 1
        return write(self, span, values, *others)

    monkeypatch.setattr(DiskStore, "write", rounded)
    with pytest.raises(Mismatch, match=r"fp32, weights on disk.*: "):
        parity.check_placements(small_model, [[replace(each, num_steps=2) for each in groups[0]]])


def test_races_that_the_sanitizer_thinks_possible_are_counted_with_their_places(monkeypatch) -> None:
    def ending(code: int, stderr: str) -> None:
        done = subprocess.CompletedProcess([], code, "", stderr)
        monkeypatch.setattr(subprocess, "run", lambda *_, **settings: done)

    found = f"""{streams.RACE} on tensor with data pointer 1
  File "/home/jdoe/gptj_ft/streaming/step.py", line 12, in backward
{streams.RACE} on tensor with data pointer 2
  File "/home/jdoe/gptj_ft/streaming/step.py", line 12, in backward
"""
    ending(1, found)
    assert streams.run_sanitizer(Path(), CPU, "fp32") == {
        "possible_races": 2,
        "places": ["gptj_ft/streaming/step.py:12"],
    }
    ending(0, "")
    assert streams.run_sanitizer(Path(), CPU, "fp32") == {"possible_races": 0, "places": []}
    ending(1, "Torch not compiled with CUDA enabled")
    with pytest.raises(Skipped, match="ended with 1"):
        streams.run_sanitizer(Path(), CPU, "fp32")


def test_what_is_deterministic_elsewhere_is_left_as_it_was() -> None:
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
def test_a_build_runs_on_devices_it_has_code_for(capability: tuple[int, int], built: list[str], runs: bool) -> None:
    assert runs_on(capability, built) is runs


def test_a_device_that_torch_was_not_built_for_is_said_first() -> None:
    known = {"device": {"name": "Tesla P40", "is_in_build": False, "built_for": ["sm_75"], "capability": "6.1"}}
    parts = [checkup.Part(name, "failed", 0.0, problem="no kernel") for name in ("rates", "overlap", "forecast")]
    first = verdict(torch.device("cuda", 0), known, parts)[0]
    assert first.startswith("does not work: torch here is built for sm_75, and Tesla P40 has compute capability 6.1")


def test_facts_that_cannot_be_had_are_none(monkeypatch, tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError

    monkeypatch.setattr(facts, "_cpu", fail)
    found = facts.collect(CPU, tmp_path)
    assert found["cpu"] is None
    assert found["memory"]["total"] > 0
    assert not list(tmp_path.iterdir())


def test_messages_lose_the_names_of_folders_people_and_hosts(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(checkup, "getuser", lambda: "jdoe")
    monkeypatch.setattr(socket, "gethostname", lambda: "lab-7")
    text = f"cannot open {tmp_path}/x.bin of jdoe on lab-7: '/data/notes/a b.txt', 3 kB/s and 1/2"
    assert without_private(text) == "cannot open *** of *** on ***: ***, 3 kB/s and 1/2"
