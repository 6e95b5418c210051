"""Measured rates of the machine: small real measurements, the cache, and the choice of the data type."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from conftest import random_model
from support.os_calls import wrap_calls
from support.rates import FakeMachine, set_rates
from support.steps import failing
from support.thread_group import Hub, Member

from gptj_ft.checkpoints.architecture import read_architecture
from gptj_ft.config.options import Recipe
from gptj_ft.config.resolve import build
from gptj_ft.data.readers.source import identify
from gptj_ft.errors import ResourceError
from gptj_ft.models.layout import Layout
from gptj_ft.models.products import ONEDNN
from gptj_ft.planning import layer_times, machine_profile, probe
from gptj_ft.planning.layer_cost import Meter
from gptj_ft.planning.layer_times import LayerKind, Seconds
from gptj_ft.planning.machine_profile import choose_dtype, compute_rates, disk_rates, reason_for, with_times
from gptj_ft.planning.probe import (
    ASSUMED_DISK,
    DiskRates,
    Rates,
    fill_write_cache,
    matmul_rate,
    measure_disk,
    submission_rate,
)
from gptj_ft.planning.resources import Target, inference_dtype
from gptj_ft.planning.workload import StepTokens, Workload
from gptj_ft.system.direct_io import write_bytes
from gptj_ft.system.dtypes import PRECISIONS
from gptj_ft.system.group import ALONE, Group
from gptj_ft.system.paths import home

CPU = torch.device("cpu")
MB = 2**20


METER_OTHERS = probe.meter_others  # before the tests' rates replace it


def without_layers(dtype: torch.dtype) -> Workload:
    """Return a workload without layers to time."""
    return Workload([], 64, dtype, StepTokens(64, 64, 64, 64), None)


@pytest.fixture
def machine(fixed_rates: Rates) -> FakeMachine:
    return FakeMachine(fixed_rates)


def test_measured_disk_has_no_leftover_files(tmp_path: Path) -> None:
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
def test_failing_disk_has_no_leftover_files(operation: str, tmp_path: Path, monkeypatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    wrap_calls(monkeypatch, [operation], lambda _: fail)
    with pytest.raises((OSError, ResourceError)):
        measure_disk(tmp_path, file_bytes=2 * MB, chunk_bytes=MB)
    assert not list(tmp_path.iterdir())


def test_slow_disk_is_measured_briefly(tmp_path: Path, monkeypatch) -> None:
    written: list[int] = []

    def counted(descriptor: int, view: memoryview, offset: int) -> None:
        written.append(len(view))
        write_bytes(descriptor, view, offset)

    monkeypatch.setattr(probe, "write_bytes", counted)
    monkeypatch.setattr(probe, "update_delay", lambda *_: 0.0)
    measure_disk(tmp_path, file_bytes=64 * MB, chunk_bytes=MB, longest=0.0)
    assert written == [MB] * 4, "one chunk each: new file, overwritten, second file, overwritten during reads"


def test_full_write_cache_is_measured_and_kept(fixed_rates: Rates, tmp_path: Path) -> None:
    machine = FakeMachine(fixed_rates)
    machine.others = 0.9
    assert disk_rates(tmp_path, machine=machine, again=True, filled=120.0).filled == 120.0
    assert list(machine.counts) == ["filled", "disk"], "first filled, then measured"
    assert disk_rates(tmp_path, machine=machine).filled == 120.0, "a short measurement would see the cache again"
    assert machine.counts["disk"] == 1
    assert disk_rates(tmp_path, machine=machine, again=True).filled == 0.0


def test_write_cache_is_filled_for_a_time(tmp_path: Path, monkeypatch) -> None:
    written = list[tuple[int, int]]()
    monkeypatch.setattr(probe, "write_bytes", lambda _, view, offset: written.append((offset, len(view))))
    start = time.perf_counter()
    fill_write_cache(tmp_path, 0.2, file_bytes=4 * MB, chunk_bytes=MB)
    assert 0.2 <= time.perf_counter() - start < 5
    assert set(written) == {(number * MB, MB) for number in range(4)}, "again and again the same file"
    assert not list(tmp_path.iterdir())


def test_plan_says_how_long_the_disk_was_filled(shell, tmp_path: Path, monkeypatch) -> None:
    filled = list[float]()
    monkeypatch.setattr(probe, "fill_write_cache", lambda _, seconds: filled.append(seconds))
    random_model("narrow").save_pretrained(tmp_path / "model")
    assert "after 2 min of writing" in shell("plan --model model --fill-disk-cache 2m").said
    assert "after 2 min of writing" in shell("plan --model model").said
    assert filled == [120.0]
    assert shell("plan --model model --fill-disk-cache soon").code == 2


def test_halved_update_rate_delays_by_half() -> None:
    per_second = iter([10.0, 5.0])
    delay = probe.update_delay(lambda _: time.sleep(0.05), 100, 10, lambda: next(per_second))
    assert 0.5 * 0.05 / 10 <= delay < 0.5 * 0.5 / 10


def test_quiet_machine_repeats_busy_measurements(fixed_rates: Rates, tmp_path: Path) -> None:
    machine = FakeMachine(replace(fixed_rates, compute=replace(fixed_rates.compute, load=0.9)))
    for load, count in ((0.9, 1), (0.8, 1), (0.1, 2)):
        machine.load = load
        machine.others = load
        compute_rates(CPU, machine=machine)
        assert machine.counts["compute"] == count, load
        disk_rates(tmp_path, machine=machine)
        assert machine.counts["disk"] == count, load


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="no /proc")
def test_work_of_other_programs_is_metered() -> None:
    spin = "import time\nwhile time.process_time() < 0.2: pass"
    start, share = time.perf_counter(), METER_OTHERS()
    subprocess.run([sys.executable, "-S", "-c", spin], check=True)
    assert share() * (time.perf_counter() - start) * (os.cpu_count() or 1) > 0.15


@pytest.mark.thorough
def test_submission_rate_counts_the_kernels_of_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = list[int]()

    def two_seconds(work: Callable[[], object], device: torch.device) -> float:
        with Meter() as meter:
            work()
        trained.append(sum(map(len, meter.kernels)))
        return 2.0

    monkeypatch.setattr(probe, "_wall_seconds", two_seconds)
    assert submission_rate(torch.device("meta"), torch.bfloat16) == trained[0] / 2.0
    assert 500 < trained[0] < 2000, "forward, backward and sums of an adapter, 50 times"


def test_matmul_rate_counts_two_flops_per_weight() -> None:
    # 0.625 seconds stop at the first size, of 16 tokens; otherwise the tokens grow to 1,024.
    assert matmul_rate(CPU, torch.float32, width=8, inner=4, timed=lambda *_: 0.625) == 2 * 16 * 8 * 4 / 0.625
    fast = matmul_rate(CPU, torch.float32, width=8, inner=4, timed=lambda *_: 1e-6)
    assert fast == pytest.approx(2 * 1024 * 8 * 4 / 1e-6)
    assert matmul_rate(CPU, torch.bfloat16, width=64, inner=64) > 0


def test_machine_is_measured_once(machine: FakeMachine, tmp_path: Path, fixed_rates: Rates) -> None:
    for _ in range(3):
        assert machine_profile.rates(CPU, tmp_path / "runs" / "new-run", machine=machine) == fixed_rates
    assert machine.counts == {"compute": 1, "disk": 1}
    assert (home() / "machine.json").is_file()
    assert machine_profile.rates(CPU, tmp_path, again=True, machine=machine) == fixed_rates
    assert machine.counts == {"compute": 2, "disk": 2}


def test_each_environment_is_measured_separately(machine: FakeMachine, tmp_path: Path, monkeypatch) -> None:
    def known() -> tuple[int, int]:
        compute_rates(CPU, machine=machine)
        disk_rates(tmp_path, machine=machine)
        return machine.counts["compute"], machine.counts["disk"]

    disk = shutil._ntuple_diskusage(10**13, 0, 10**13)
    changes: list[tuple[object, str, object, tuple[int, int]]] = [
        (torch, "get_num_threads", lambda: 77, (2, 1)),
        (torch, "__version__", "99.0", (3, 1)),
        (machine_profile, "cpu_name", lambda: "another", (4, 1)),
        (shutil, "disk_usage", lambda folder: disk, (4, 2)),
    ]
    assert known() == (1, 1)
    for module, name, value, counts in changes:
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            assert known() == counts, name
    assert known() == (4, 2), "earlier measurements were lost"


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
def test_damaged_cache_is_measured_again(
    damage: Callable[[str], str], machine: FakeMachine, fixed_rates: Rates
) -> None:
    compute_rates(CPU, machine=machine)
    file = home() / "machine.json"
    text = file.read_text(encoding="utf-8")
    assert damage(text) != text
    file.write_text(damage(text), encoding="utf-8")
    assert compute_rates(CPU, machine=machine) == fixed_rates.compute
    assert compute_rates(CPU, machine=machine) == fixed_rates.compute
    assert machine.counts["compute"] == 2


def test_unwritable_home_costs_one_measurement(
    machine: FakeMachine, tmp_path: Path, fixed_rates: Rates, monkeypatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("GPTJ_FT_HOME", str(tmp_path / "file" / "home"))
    for _ in range(2):
        assert machine_profile.rates(CPU, tmp_path, machine=machine) == fixed_rates
    assert machine.counts == {"compute": 1, "disk": 1}
    monkeypatch.setenv("GPTJ_FT_HOME", str(tmp_path / "another-home"))
    (tmp_path / "another-home" / "machine.json").mkdir(parents=True)
    machine_profile.rates(CPU, tmp_path, machine=machine)
    assert len([*(tmp_path / "another-home").iterdir()]) == 1, "the draft stays"
    monkeypatch.setenv("GPTJ_FT_HOME", str(tmp_path / "third-home"))
    assert not machine_profile.is_known(CPU), "another home knows the unsaved rates of the first"


def test_full_disk_gets_uncached_assumed_rates(machine: FakeMachine, tmp_path: Path, fixed_rates: Rates) -> None:
    machine.free = 1000 * MB
    assumed = machine_profile.rates(CPU, tmp_path, machine=machine)
    assert assumed == Rates(fixed_rates.compute, ASSUMED_DISK, on_cpu=True)
    assert assumed.is_disk_assumed
    assert not machine.counts["disk"]
    (tmp_path / "file").write_text("not a folder")
    assert disk_rates(tmp_path / "file" / "run", machine=UnwritableMachine(fixed_rates)) == ASSUMED_DISK
    machine.free = 10**13
    assert disk_rates(tmp_path, machine=machine) == fixed_rates.disk != ASSUMED_DISK


class UnwritableMachine(FakeMachine):
    def disk(self, folder: Path) -> DiskRates:
        return measure_disk(folder)


@pytest.mark.parametrize(("gain", "expected"), [(0.15, "fp32"), (1.25, "fp32"), (1.35, "bf16"), (9.0, "bf16")])
def test_auto_precision_is_bf16_if_faster(gain: float, expected: str, fixed_rates: Rates) -> None:
    machine = with_gain(fixed_rates, gain)
    assert choose_dtype("auto", CPU, machine) == PRECISIONS[expected]
    chosen = without_layers(PRECISIONS[expected])
    found = with_times(replace(chosen, dtype=torch.float16), "auto", CPU, 10**12, machine)
    assert found == replace(chosen, products=ONEDNN), "nothing was timed"
    assert f"bf16 products are {gain:.2g} times as fast" in reason_for("auto", chosen, machine.rates.compute)


@pytest.mark.parametrize(("gain", "expected"), [(1.25, "fp32"), (6.0, "fp16")])
def test_auto_precision_is_fp16_without_bf16(gain: float, expected: str, fixed_rates: Rates) -> None:
    machine = with_gain(fixed_rates, gain)
    machine.has_bf16 = False
    assert choose_dtype("auto", CPU, machine) == PRECISIONS[expected]
    if expected == "fp16":
        reason = reason_for("auto", without_layers(torch.float16), machine.rates.compute)
        assert reason.startswith("fp16 products are 6 times as fast here")
    assert choose_dtype("bf16", CPU, machine) == torch.bfloat16, "emulated, because it is explicit"


def with_gain(rates: Rates, gain: float) -> FakeMachine:
    """Return a machine that is this much faster in 16 bits."""
    return FakeMachine(replace(rates, compute=replace(rates.compute, bf16=gain * rates.compute.fp32)))


def test_explicit_precision_needs_no_measurement(machine: FakeMachine, fixed_rates: Rates) -> None:
    assert choose_dtype("bf16", CPU, machine) == torch.bfloat16
    assert choose_dtype("fp32", CPU, machine) == torch.float32
    assert not machine.counts
    assert reason_for("bf16", without_layers(torch.bfloat16), fixed_rates.compute) == "as asked for"


@pytest.fixture
def fast_bf16(fixed_rates: Rates, monkeypatch: pytest.MonkeyPatch) -> None:
    set_rates(monkeypatch, with_gain(fixed_rates, 5).rates)


def test_commands_compute_in_the_faster_type(shell, rows_file: Path, fast_bf16: None, monkeypatch) -> None:
    from gptj_ft.checkpoints.base_model import tiny_model
    from gptj_ft.generation import generator

    options = "--recipe summarization --data rows.jsonl"
    planned = shell(f"plan {options} --model tiny --json").json
    assert (planned["precision"], planned["reason"]) == ("bf16", "its layers are 5 times as fast in bf16 here")
    folder, used = tiny_model(Recipe(), identify(rows_file)), []

    def spy(folder: Path, device: torch.device, dtype: torch.dtype, *_: object) -> None:
        used.append(dtype)
        raise ResourceError("seen enough")

    monkeypatch.setattr(generator, "open_for_inference", spy)
    assert shell(f"evaluate {folder} {options} --baseline none").code == 4
    assert shell(f"generate text --model {folder}").code == 4
    assert used == [torch.bfloat16, torch.bfloat16]


def test_resumed_run_keeps_its_data_type(
    shell, rows_file: Path, fast_bf16: None, fixed_rates: Rates, monkeypatch
) -> None:
    line = "finetune --recipe summarization --data rows.jsonl --model tiny --max-steps 1 --output run"
    with failing(1):
        assert shell(line).code == 4
    text = Path("run/recipe.yaml").read_text(encoding="utf-8")
    assert "precision: bf16  # chosen by measuring" in text
    assert yaml.safe_load(text)["precision"] == "bf16"
    set_rates(monkeypatch, fixed_rates)
    (home() / "machine.json").unlink()
    done = shell("finetune --resume run --dry-run --json")
    assert (done.json["precision"], done.json["reason"]) == ("bf16", "as asked for")


@pytest.mark.thorough
def test_plan_measure_replaces_the_cached_rates(shell, rows_file: Path, fixed_rates: Rates, monkeypatch) -> None:
    line = "plan --recipe summarization --data rows.jsonl --model tiny --weights disk --optimizer-state disk --json"
    assert shell(line).json["rates"]["disk"]["read"] == fixed_rates.disk.read
    set_rates(monkeypatch, replace(fixed_rates, disk=DiskRates(1e3, 1e3, 1e3)))
    before = shell(line).json
    after = shell(f"{line} --measure").json
    assert before["rates"]["disk"]["read"] == fixed_rates.disk.read
    assert after["rates"]["disk"]["read"] == 1e3
    assert after["seconds_per_step"] > 1000 * before["seconds_per_step"]
    assert shell(line).json["rates"] == after["rates"]
    known = json.loads((home() / "machine.json").read_text(encoding="utf-8"))
    assert [len(known[part]) for part in ("compute", "disk")] == [1, 1]


def test_processes_plan_with_shares_of_the_disk(tmp_path) -> None:
    alone, shared = (Target.local(Recipe(device="cpu"), tmp_path, group) for group in (ALONE, Member(Hub(2), 0)))
    for read, written in ((3e9, 0.0), (0.0, 2e9), (3e9, 2e9)):
        expected = 2 * alone.rates.disk.seconds(read, written)
        assert shared.rates.disk.seconds(read, written) == pytest.approx(expected)
    assert shared.rates.disk.cpu_seconds(3e9, 2e9) == alone.rates.disk.cpu_seconds(3e9, 2e9)


@pytest.mark.parametrize("options", [{}, {"threads": 1}])
def test_several_processes_choose_the_type_of_one(options, fixed_rates: Rates, tmp_path: Path, monkeypatch) -> None:
    """In one thread bf16 is faster, in two it is not."""

    def timed(kinds: Sequence[LayerKind]) -> list[Seconds]:
        fast = torch.bfloat16 if torch.get_num_threads() == 1 else torch.float32
        return [Seconds(1.0 if kind.shape.dtype == fast else 2.0, 2.0) for kind in kinds]

    monkeypatch.setattr(layer_times, "time_kinds", timed)
    random_model("narrow").save_pretrained(tmp_path / "model")
    architecture = read_architecture(tmp_path / "model")
    workload, before = without_layers(torch.float32), torch.get_num_threads()
    layers = architecture.layers()
    workload = replace(workload, layers=layers, layouts=[Layout.of(layer) for layer in layers])
    recipe, types = build({"device": "cpu", **options}), []
    try:
        for threads, group in ((2, Group()), (1, Group())):
            group.threads_alone = 2 if threads == 1 else None
            torch.set_num_threads(int(options.get("threads", threads)))
            target = Target.local(recipe, tmp_path, group)
            types += [target.settled(workload, recipe).dtype, inference_dtype(recipe, architecture, CPU, group)]
            assert torch.get_num_threads() == options.get("threads", threads)
    finally:
        torch.set_num_threads(before)
    assert types == [torch.bfloat16 if options else torch.float32] * 4
