"""Start runs by launchers: each gives the bits of a single process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.small_run import assert_same_weights, weights_of

from gptj_ft.system import paths
from gptj_ft.system.digests import read_json

OPTIONS = (
    "finetune --recipe summarization --data rows.jsonl --model tiny --lr 1e-2 --batch-size 4 --set holdout=0.2 "
    "--max-steps 3 --precision fp32 --set micro_batch_tokens=48 --set share=layers --set threads=1 --quiet "
    "--output"
)
SLURM = {
    "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "localhost", "SLURM_NODEID": "0",
    "SLURM_JOB_NAME": "interactive",
}  # fmt: skip

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make rows and a run of a single process."""
    folder = tmp_path_factory.mktemp("launched")
    lines = [f'{{"note": "Room {n} is cold and dark at night.", "summary": "Room {n} is cold."}}\n' for n in range(20)]
    (folder / "rows.jsonl").write_text("".join(lines), encoding="utf-8")
    end(start([sys.executable, "-m", "gptj_ft"], folder, "alone", {}))
    return folder


def start(launcher: list[str], folder: Path, output: str, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    home = {"GPTJ_FT_HOME": str(folder / "home"), "PYTHONPATH": str(Path(paths.__file__).parents[2])}
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return subprocess.Popen(
        [*launcher, *OPTIONS.split(), output],
        cwd=folder, env={**inherited, **home, **environment}, stdin=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip


def end(*processes: subprocess.Popen[bytes]) -> None:
    assert [process.wait(120) for process in processes] == [0] * len(processes)


def assert_shared(folder: Path, output: str) -> None:
    facts = read_json(folder / output / "environment.json")
    assert (facts["processes"], facts["threads"]) == ("2, sharing layers", 1)
    log = (folder / output / "log.txt").read_text(encoding="utf-8")
    assert "hidden states go from process to process through host memory (gloo)" in log
    assert_same_weights(weights_of(folder / output / "model"), weights_of(folder / "alone" / "model"))


def test_accelerate_keeps_single_process_bits(folder: Path) -> None:
    launcher = shutil.which("accelerate", path=str(Path(sys.executable).parent))
    if launcher is None:
        pytest.skip("accelerate has no command beside this Python")
    launch = f"{launcher} launch --multi_gpu --num_processes 2 --num_machines 1 --main_process_port 0"
    end(start([*f"{launch} --mixed_precision no --dynamo_backend no -m gptj_ft".split()], folder, "accelerate", {}))
    assert_shared(folder, "accelerate")


def test_slurm_step_keeps_single_process_bits(folder: Path) -> None:
    ranks = [{**SLURM, "SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in "01"]
    end(*(start([sys.executable, "-m", "gptj_ft"], folder, "slurm", each) for each in ranks))
    assert_shared(folder, "slurm")
