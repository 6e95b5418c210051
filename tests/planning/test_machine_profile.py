"""What the machine does in a second: measured in earnest but small, known afterwards, and what is chosen by it."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from support.rates import layers_by
from support.steps import failing
from support.thread_group import Hub, Member

from gptj_ft.config.options import Recipe
from gptj_ft.errors import ResourceError
from gptj_ft.planning import layer_times, machine_profile, probe
from gptj_ft.planning.machine_profile import choose_dtype, compute_rates, disk_rates, reason_for, with_times
from gptj_ft.planning.probe import ASSUMED_DISK, DiskRates, Rates, matmul_rate, measure_disk
from gptj_ft.planning.resources import Target
from gptj_ft.planning.workload import StepTokens, Workload
from gptj_ft.system.direct_io import write_bytes
from gptj_ft.system.dtypes import PRECISIONS
from gptj_ft.system.group import ALONE
from gptj_ft.system.paths import home

CPU = torch.device("cpu")
MB = 2**20


def without_layers(dtype: torch.dtype) -> Workload:
    """Return a workload that nobody knows the layers of."""
    return Workload([], 64, dtype, StepTokens(64, 64, 64, 64), None)


@pytest.fixture
def measured(fixed_rates: Rates, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count what is measured."""
    counts: Counter[str] = Counter()

    def counted(name: str, result: object) -> Callable[[object], object]:
        def count(_: object) -> object:
            counts[name] += 1
            return result

        return count

    monkeypatch.setattr(probe, "measure_compute", counted("compute", fixed_rates.compute))
    monkeypatch.setattr(probe, "measure_disk", counted("disk", fixed_rates.disk))
    monkeypatch.setattr(machine_profile, "_unsaved", {})
    return counts


def test_measuring_a_disk_moves_bytes_and_leaves_nothing_behind(tmp_path: Path) -> None:
    state = torch.get_rng_state()
    descriptors = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else 0
    found = measure_disk(tmp_path, file_bytes=4 * MB, chunk_bytes=MB)
    assert all(0 < rate < math.inf for rate in (found.read, found.write, found.mixed))
    assert 0 <= found.update_delay < 1e-6
    assert not list(tmp_path.iterdir())
    if descriptors:
        assert len(os.listdir("/proc/self/fd")) == descriptors
    assert torch.equal(torch.get_rng_state(), state), "a run after this would draw other numbers"


@pytest.mark.parametrize("operation", ["pwritev", "preadv", "fsync"])
def test_a_disk_that_fails_while_it_is_measured_leaves_nothing_behind(
    operation: str, tmp_path: Path, monkeypatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, operation, fail)
    with pytest.raises((OSError, ResourceError)):
        measure_disk(tmp_path, file_bytes=2 * MB, chunk_bytes=MB)
    assert not list(tmp_path.iterdir())


def test_a_slow_disk_is_not_measured_for_longer_than_it_takes_to_know(tmp_path: Path, monkeypatch) -> None:
    written: list[int] = []

    def counted(descriptor: int, view: memoryview, offset: int) -> None:
        written.append(len(view))
        write_bytes(descriptor, view, offset)

    monkeypatch.setattr(probe, "LONGEST_TRANSFER", 0.0)
    monkeypatch.setattr(probe, "write_bytes", counted)
    monkeypatch.setattr(probe, "_update_delay", lambda *_: 0.0)
    measure_disk(tmp_path, file_bytes=64 * MB, chunk_bytes=MB)
    assert written == [MB] * 4, "one chunk for each of: new, over it, new, over it beside reads"


def test_updates_that_are_half_as_fast_beside_a_transfer_are_delayed_for_half_of_its_seconds(monkeypatch) -> None:
    per_second = iter([10.0, 5.0])
    monkeypatch.setattr(probe, "_updates_per_second", lambda _: next(per_second))
    delay = probe._update_delay(lambda _: time.sleep(0.05), 100, 10)
    assert 0.5 * 0.05 / 10 <= delay < 0.5 * 0.5 / 10


def test_what_was_measured_on_a_busy_machine_is_measured_again_on_a_quiet_one(
    measured, fixed_rates, monkeypatch
) -> None:
    load = {"now": 0.9}
    monkeypatch.setattr(probe, "core_load", lambda: load["now"])
    busy = replace(fixed_rates.compute, load=0.9)
    monkeypatch.setattr(probe, "measure_compute", lambda _: measured.update(["compute"]) or busy)
    for now, count in ((0.9, 1), (0.8, 1), (0.1, 2)):
        load["now"] = now
        machine_profile.compute_rates(CPU)
        assert measured["compute"] == count, now


def test_matmul_rate_counts_two_flops_for_each_weight_and_token(monkeypatch) -> None:
    monkeypatch.setattr(probe, "timed", lambda work, device: 0.625)
    # That is long enough to stop at the first size, of 16 tokens; else it goes up to 1,024.
    assert matmul_rate(CPU, torch.float32, width=8, inner=4) == 2 * 16 * 8 * 4 / 0.625
    monkeypatch.setattr(probe, "timed", lambda work, device: 1e-6)
    assert matmul_rate(CPU, torch.float32, width=8, inner=4) == pytest.approx(2 * 1024 * 8 * 4 / 1e-6)
    monkeypatch.undo()
    assert matmul_rate(CPU, torch.bfloat16, width=64, inner=64) > 0


def test_a_machine_is_measured_once(measured: Counter[str], tmp_path: Path, fixed_rates: Rates) -> None:
    for _ in range(3):
        assert machine_profile.rates(CPU, tmp_path / "runs" / "new-run") == fixed_rates
    assert measured == {"compute": 1, "disk": 1}
    assert (home() / "machine.json").is_file()
    assert machine_profile.rates(CPU, tmp_path, again=True) == fixed_rates
    assert measured == {"compute": 2, "disk": 2}


def test_another_device_thread_count_torch_or_file_system_is_measured_for_itself(
    measured: Counter[str], tmp_path: Path, monkeypatch
) -> None:
    def known() -> Counter[str]:
        compute_rates(CPU)
        disk_rates(tmp_path)
        return Counter(measured)

    assert known() == {"compute": 1, "disk": 1}
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 77)
        assert known() == {"compute": 2, "disk": 1}
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "99.0")
        assert known() == {"compute": 3, "disk": 1}
    with monkeypatch.context() as patch:
        patch.setattr(machine_profile, "cpu_name", lambda: "another")
        assert known() == {"compute": 4, "disk": 1}
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10**13, 0, 10**13))
        assert known() == {"compute": 4, "disk": 2}
    assert known() == {"compute": 4, "disk": 2}, "what was known before was lost"


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: "\x00\xff",
        lambda text: text.replace('"fp32": 100000000000.0', '"fp32": NaN'),
        lambda text: text.replace('"fp32": 100000000000.0', '"fp32": 0.0'),
        lambda text: text.replace('"fp32": 100000000000.0', '"fp32": "fast"'),
        lambda text: text.replace('"fp32"', '"fp23"'),
        lambda text: text.replace(f'"method": {machine_profile.METHOD}', '"method": 0'),
        lambda text: '{"method": 1, "compute": [], "disk": 3}',
        lambda text: '{"method": 1, "compute": {"x": {}}, "disk": {}}',
    ],
)
def test_a_damaged_file_is_measured_anew_and_repaired(
    damage: Callable[[str], str], measured: Counter[str], fixed_rates: Rates
) -> None:
    compute_rates(CPU)
    file = home() / "machine.json"
    text = file.read_text(encoding="utf-8")
    assert damage(text) != text
    file.write_text(damage(text), encoding="utf-8")
    assert compute_rates(CPU) == fixed_rates.compute
    assert compute_rates(CPU) == fixed_rates.compute
    assert measured["compute"] == 2


def test_a_home_that_cannot_be_written_costs_one_measuring_and_no_error(
    measured: Counter[str], tmp_path: Path, fixed_rates: Rates, monkeypatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("GPTJ_FT_HOME", str(tmp_path / "file" / "home"))
    for _ in range(2):
        assert machine_profile.rates(CPU, tmp_path) == fixed_rates
    assert measured == {"compute": 1, "disk": 1}
    monkeypatch.setenv("GPTJ_FT_HOME", str(tmp_path / "another-home"))
    assert not machine_profile.is_known(CPU), "another home knows what could not be written to the first"


def test_a_full_or_unwritable_disk_is_assumed_and_that_is_not_remembered(
    measured: Counter[str], tmp_path: Path, fixed_rates: Rates, monkeypatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(machine_profile, "free_disk", lambda folder: 1000 * MB)
        assert machine_profile.rates(CPU, tmp_path) == Rates(fixed_rates.compute, ASSUMED_DISK, on_cpu=True)
        assert machine_profile.rates(CPU, tmp_path).is_disk_assumed
        assert not measured["disk"]
    with monkeypatch.context() as patch:
        patch.setattr(probe, "measure_disk", measure_disk)
        (tmp_path / "file").write_text("not a folder")
        assert disk_rates(tmp_path / "file" / "run") == ASSUMED_DISK
    assert disk_rates(tmp_path) == fixed_rates.disk != ASSUMED_DISK


@pytest.mark.parametrize(("gain", "expected"), [(0.15, "fp32"), (1.25, "fp32"), (1.35, "bf16"), (9.0, "bf16")])
def test_auto_precision_is_bf16_where_that_is_measured_to_be_worth_it(
    gain: float, expected: str, fixed_rates: Rates, monkeypatch
) -> None:
    compute = replace(fixed_rates.compute, bf16=gain * fixed_rates.compute.fp32)
    monkeypatch.setattr(probe, "measure_compute", lambda device: compute)
    assert choose_dtype("auto", CPU) == PRECISIONS[expected]
    chosen = without_layers(PRECISIONS[expected])
    assert with_times(replace(chosen, dtype=torch.float16), "auto", CPU, 10**12) == chosen
    assert f"bf16 products are {gain:.2g} times as fast" in reason_for("auto", chosen, compute)


@pytest.mark.parametrize(("gain", "expected"), [(1.25, "fp32"), (6.0, "fp16")])
def test_auto_precision_is_fp16_where_a_fast_device_has_no_bf16(
    gain: float, expected: str, fixed_rates: Rates, monkeypatch
) -> None:
    compute = replace(fixed_rates.compute, bf16=gain * fixed_rates.compute.fp32)
    monkeypatch.setattr(probe, "measure_compute", lambda device: compute)
    monkeypatch.setattr(machine_profile, "supports_bf16", lambda device: False)
    assert choose_dtype("auto", CPU) == PRECISIONS[expected]
    if expected == "fp16":
        assert reason_for("auto", without_layers(torch.float16), compute).startswith(
            "fp16 products are 6 times as fast here"
        )
    assert choose_dtype("bf16", CPU) == torch.bfloat16, "it is emulated for those who ask for it"


def test_a_precision_that_is_asked_for_is_taken_and_nothing_measured(
    measured: Counter[str], fixed_rates: Rates
) -> None:
    assert choose_dtype("bf16", CPU) == torch.bfloat16
    assert choose_dtype("fp32", CPU) == torch.float32
    assert not measured
    assert reason_for("bf16", without_layers(torch.bfloat16), fixed_rates.compute) == "as asked for"


@pytest.fixture
def fast_bf16(fixed_rates: Rates, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = replace(fixed_rates.compute, bf16=5 * fixed_rates.compute.fp32)
    monkeypatch.setattr(probe, "measure_compute", lambda device: compute)
    monkeypatch.setattr(layer_times, "time_kinds", layers_by(compute))


def test_plan_evaluate_and_generate_compute_in_the_type_that_is_faster(
    shell, rows_file: Path, fast_bf16: None, monkeypatch
) -> None:
    from gptj_ft.checkpoints.base_model import tiny_model
    from gptj_ft.generation import generator

    options = "--recipe summarization --data rows.jsonl"
    planned = shell(f"plan {options} --model tiny --json").json
    assert (planned["precision"], planned["reason"]) == ("bf16", "its layers are 5 times as fast in bf16 here")
    folder, used = tiny_model(Recipe(), rows_file), []

    def spy(folder: Path, device: torch.device, dtype: torch.dtype, *_: object) -> None:
        used.append(dtype)
        raise ResourceError("seen enough")

    monkeypatch.setattr(generator, "open_for_inference", spy)
    assert shell(f"evaluate {folder} {options} --baseline none").code == 4
    assert shell(f"generate text --model {folder}").code == 4
    assert used == [torch.bfloat16, torch.bfloat16]


def test_a_run_keeps_its_type_though_the_machine_is_measured_otherwise_when_it_is_resumed(
    shell, rows_file: Path, fast_bf16: None, fixed_rates: Rates, monkeypatch
) -> None:
    line = "finetune --recipe summarization --data rows.jsonl --model tiny --max-steps 1 --output run"
    with failing(1):
        assert shell(line).code == 4
    text = Path("run/recipe.yaml").read_text(encoding="utf-8")
    assert "precision: bf16  # chosen by measuring" in text
    assert yaml.safe_load(text)["precision"] == "bf16"
    monkeypatch.setattr(probe, "measure_compute", lambda device: fixed_rates.compute)
    monkeypatch.setattr(layer_times, "time_kinds", layers_by(fixed_rates.compute))
    (home() / "machine.json").unlink()
    done = shell("finetune --resume run --dry-run --json")
    assert (done.json["precision"], done.json["reason"]) == ("bf16", "as asked for")


def test_plan_measure_measures_again_and_the_plan_follows(
    shell, rows_file: Path, measured: Counter[str], fixed_rates: Rates, monkeypatch
) -> None:
    line = "plan --recipe summarization --data rows.jsonl --model tiny --weights disk --optimizer-state disk --json"
    assert shell(line).json["rates"]["disk"]["read"] == fixed_rates.disk.read
    monkeypatch.setattr(probe, "measure_disk", lambda folder: DiskRates(1e3, 1e3, 1e3))
    before = shell(line).json
    after = shell(f"{line} --measure").json
    assert before["rates"]["disk"]["read"] == fixed_rates.disk.read
    assert after["rates"]["disk"]["read"] == 1e3
    assert after["seconds_per_step"] > 1000 * before["seconds_per_step"]
    assert shell(line).json["rates"] == after["rates"]
    assert measured["compute"] == 2
    known = json.loads((home() / "machine.json").read_text(encoding="utf-8"))
    assert [len(known[part]) for part in ("compute", "disk")] == [1, 1]


def test_processes_of_a_machine_plan_with_their_share_of_its_disk(tmp_path) -> None:
    alone, shared = (Target.here(Recipe(device="cpu"), tmp_path, group) for group in (ALONE, Member(Hub(2), 0)))
    for read, written in ((3e9, 0.0), (0.0, 2e9), (3e9, 2e9)):
        expected = 2 * alone.rates.disk.seconds(read, written)
        assert shared.rates.disk.seconds(read, written) == pytest.approx(expected)
    assert shared.rates.disk.cpu_seconds(3e9, 2e9) == alone.rates.disk.cpu_seconds(3e9, 2e9)
