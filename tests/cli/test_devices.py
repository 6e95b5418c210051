"""Missing, small and failing devices: a one-line error, its exit code, and no lost step."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from support.fake_cuda import pretend_cuda
from support.steps import failing

from gptj_ft.checkpoints.base_model import tiny_model
from gptj_ft.config.options import Recipe
from gptj_ft.data.readers.source import identify
from gptj_ft.generation import hf_model
from gptj_ft.streaming import step
from gptj_ft.system.machine import choose_device
from gptj_ft.training import finetune

ROWS = "--recipe summarization --data rows.jsonl"
TRAIN = f"finetune {ROWS} --model tiny --max-steps 3 --batch-size 4 --device cpu"
OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 7.78 GiB of which 1.00 MiB is "
    "free. Process 4711 has 7.70 GiB memory in use.\nSee documentation for Memory Management"
)
TOO_OLD = (
    "CUDA initialization: The NVIDIA driver on your system is too old (found version 11040). Please update your GPU "
    "driver by downloading and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx "
    "(Triggered internally at CUDAFunctions.cpp:119.)"
)


@pytest.fixture
def lines(rows_file: Path) -> list[str]:
    """Commands with --device, and their inputs."""
    model = tiny_model(Recipe(), identify(rows_file))
    return [
        "doctor",
        f"finetune {ROWS} --model tiny --output out",
        f"plan {ROWS} --model tiny",
        "plan --recipe summarization",
        f"evaluate {model} {ROWS}",
        f"generate prompt --model {model}",
        f"generate --input rows.jsonl --output answers.jsonl --model {model} --recipe summarization",
    ]


def check(done, code: int, says: str) -> None:
    assert (done.code, len(done.err.strip().splitlines())) == (code, 1), done.err
    assert says in done.err, done.err
    assert done.out == ""


@pytest.mark.parametrize("name", ["cuda", "cuda:7", "xpu", "mps"])
def test_every_command_names_a_missing_device(name: str, shell, lines: list[str]) -> None:
    for line in lines:
        check(
            shell(f"{line} --device {name} --quiet"), 2, f"--device {name}: torch sees no such device here; use --dev"
        )
    assert not Path("out").exists()
    assert not Path("answers.jsonl").exists()


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "", "meta"])
def test_unknown_device_error_lists_devices(name: str, shell, rows_file: Path) -> None:
    for command in ("doctor", f"finetune {ROWS} --model tiny"):
        check(shell(f"{command} --quiet --device", name), 2, f"unknown device '{name}': auto, cpu, or an accelerator")


def test_old_driver_error_is_one_line(shell, monkeypatch, caplog) -> None:
    def warn(*_: object, **__: object) -> None:
        warnings.warn(TOO_OLD, stacklevel=1)

    for module, name in ((torch.cuda, "is_available"), (torch.accelerator, "current_accelerator")):
        monkeypatch.setattr(module, name, warn)
    says = "(The NVIDIA driver on your system is too old (found version 11040)); use --device cpu, or update its driver"
    check(shell("plan --recipe summarization --quiet --device cuda"), 2, says)
    assert choose_device("auto") == torch.device("cpu")
    assert "--device auto takes the CPU: The NVIDIA driver on your system is too old" in caplog.messages[0]


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two CUDA devices of 8 GB; the second is busy."""

    def take(device: torch.device) -> None:
        if device.index == 1:
            raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable\nCUDA kernel errors might")

    pretend_cuda(monkeypatch, count=2, set_device=take, mem_get_info=lambda device: (7 * 10**9, 8 * 10**9))


def test_invalid_device_selection_is_rejected(shell, lines: list[str], card) -> None:
    for line in lines[1:]:
        check(
            shell(f"{line} --quiet --device cuda --device-memory 99GB"),
            2,
            "99.0 GB: cuda:0 has 8.0 GB; use a lower limit",
        )
    for line in lines:
        check(shell(f"{line} --quiet --device cuda:2"), 2, "this machine has no such device, only cuda:0, cuda:1")
        check(shell(f"{line} --quiet --device cuda:1"), 4, "cuda:1 cannot be used: CUDA error: all CUDA-capable")
    assert not Path("out").exists()


def test_card_without_kernels_is_rejected_before_rows_are_read(shell, lines: list[str], monkeypatch) -> None:
    def read(*_: object) -> None:
        raise AssertionError("rows were read")

    monkeypatch.setattr(finetune, "gather", read)
    pretend_cuda(
        monkeypatch, 1, mem_get_info=lambda device: (7 * 10**9, 8 * 10**9), get_arch_list=lambda: ["sm_75", "sm_86"],
        get_device_capability=lambda device: (6, 1),
    )  # fmt: skip
    for line in lines:
        says = "this build of torch has no kernels for cuda:0, whose compute capability is 6.1; use --device cpu"
        check(shell(f"{line} --quiet --device cuda"), 2, says)
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            torch.OutOfMemoryError(OUT_OF_MEMORY),
            "device memory ran out: CUDA out of memory. Tried to allocate 20.00 MiB;",
        ),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            "memory ran out: ",
        ),
        (
            torch.AcceleratorError("CUDA error: unspecified launch failure\nCompile with"),
            "check it with `gptj-ft doctor`",
        ),
    ],
)
def test_device_failure_in_training_is_resumable(error: Exception, says: str, shell, rows_file: Path) -> None:
    with failing(2, error):
        done = shell(f"{TRAIN} --output out --quiet")
    assert done.code == 4, done.err
    first, *rest = done.err.strip().splitlines()
    assert says in first
    assert "--resume out" in " ".join(rest), done.err
    assert shell("finetune --resume out --quiet").code == 0


def test_device_failure_while_reading_is_one_line(shell, lines: list[str], monkeypatch) -> None:
    def fail(*arguments: object, **named: object) -> object:
        raise torch.OutOfMemoryError(OUT_OF_MEMORY)

    for module in (step, hf_model):
        monkeypatch.setattr(module, "forward", fail)
    for line in lines[-3:]:
        done = shell(f"{line} --quiet --device cpu")
        assert done.code == 4, done.err
        assert "device memory ran out: CUDA out of memory. Tried to allocate 20.00 MiB;" in done.err.splitlines()[0]


def test_doctor_is_suggested_once_per_new_device(shell, rows_file: Path, monkeypatch) -> None:
    offer = "first run on this device: `gptj-ft doctor` checks it in two minutes"
    assert offer not in shell(f"{TRAIN} --dry-run").err
    monkeypatch.setattr(finetune, "is_accelerator", lambda device: True)
    monkeypatch.setenv("GPTJ_FT_HOME", "another-home")
    assert offer in shell(f"{TRAIN} --dry-run").err
    assert offer not in shell(f"{TRAIN} --dry-run").err
