"""Test `gptj-ft runs` (list, verify, clean, export) and `finetune --resume RUN --from CHECKPOINT`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from support.cli_runner import Shell
from support.small_run import assert_same_weights, weights_of
from support.steps import scripted_losses
from support.stopped_runs import make_runs

from gptj_ft import api
from gptj_ft.config.run_folder import Run, environment_changes, record_environment
from gptj_ft.errors import DataError
from gptj_ft.streaming.stores.state_file import StateFile
from gptj_ft.system.lock import locked
from gptj_ft.training import export

OPTIONS = (
    "finetune --recipe summarization --data rows.jsonl --model tiny --lr 1e-2 --batch-size 8 --set holdout=0.1 "
    "--validate-every 2 --save-every 3 --keep best,all --max-steps 8 --weights disk --optimizer-state disk"
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that is done, and one that was stopped when 7 of its 8 steps were committed."""
    folder = tmp_path_factory.mktemp("made")
    make_runs(folder, {"runs/stopped": OPTIONS}, steps=7)
    (folder / "runs/stopped-done").rename(folder / "runs/done")
    return folder


@pytest.fixture
def runs(made: Path, tmp_path: Path) -> Path:
    """Those runs in the working folder, hard links and all."""
    subprocess.run(["cp", "-a", made / "runs", made / "rows.jsonl", tmp_path], check=True)
    return tmp_path / "runs"


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "run.lock"}


def test_runs_are_listed_with_progress(runs: Path, shell: Shell) -> None:
    done = shell("runs --json")
    assert done.code == 0
    finished, stopped = done.json["runs"]
    assert (finished["name"], finished["status"], finished["step"], finished["steps"]) == ("done", "finished", 8, 8)
    assert (stopped["name"], stopped["status"], stopped["step"], stopped["steps"]) == ("stopped", "stopped", 7, 8)
    losses = {
        line["step"]: line["validation_loss"] for line in Run(runs / "done").metrics() if "validation_loss" in line
    }
    assert (finished["loss_before"], finished["loss_after"]) == (losses[0], losses[8])
    assert (stopped["loss_before"], stopped["loss_after"]) == (losses[0], losses[6])
    assert stopped["checkpoints"] == [3, 6]
    assert all(run["recipe"] == "summarization" and run["saved_at"] > "2020" for run in (finished, stopped))
    usage = subprocess.run(["du", "-s", "-B1", runs / "stopped"], capture_output=True, text=True, check=True).stdout
    assert stopped["bytes"] == pytest.approx(int(usage.split()[0]), rel=0.1), "links are counted once"
    text = shell("runs list").out
    assert "stopped" in text
    assert f"{losses[0]:.4f} -> {losses[8]:.4f}" in text


def test_runs_anywhere_can_be_listed(runs: Path, shell: Shell, tmp_path: Path) -> None:
    runs.rename(tmp_path / "elsewhere")
    assert "no runs in runs/" in shell("runs").out
    (tmp_path / "elsewhere" / "a-link").symlink_to(tmp_path / "elsewhere" / "done")
    assert sorted(run["name"] for run in shell("runs list elsewhere --json").json["runs"]) == ["done", "stopped"]
    assert [run["name"] for run in shell("runs list elsewhere elsewhere/done --json").json["runs"]].count("done") == 1
    assert shell("runs list nowhere").code == 2


@pytest.mark.thorough
def test_run_in_training_is_only_listed(runs: Path, shell: Shell) -> None:
    before = content(runs / "stopped")
    with locked(runs / "stopped", "training"):
        stopped = shell("runs list runs/stopped --json").json["runs"][0]
        assert (stopped["status"], stopped["process"]) == ("training", os.getpid())
        for command in ("clean runs/done runs/stopped", "verify runs/stopped"):
            done = shell(f"runs {command}")
            assert (done.code, "is in use" in done.err) == (2, True)
    assert content(runs / "stopped") == before
    assert (runs / "done" / "checkpoints").exists(), "refused before anything is removed"


def test_unreadable_run_is_listed_with_reason(runs: Path, shell: Shell) -> None:
    (runs / "done" / "recipe.yaml").write_text("lr: [", encoding="utf-8")
    assert "recipe.yaml:1: not YAML" in shell("runs").out


def test_whole_runs_verify(runs: Path, shell: Shell) -> None:
    for name, files in (("done", 2 * 4 + 4), ("stopped", 4 + 4 + 2 * 4)):
        done = shell(f"runs verify runs/{name} --json")
        assert done.code == 0, done.out
        assert done.json["problems"] == []
        assert done.json["files"] == files
    assert "no problems" in shell("runs verify runs/done").out
    assert shell("runs verify rows.jsonl").code == 2


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4096)


def break_header(path: Path) -> None:
    text = bytearray(path.read_bytes())
    text[9] ^= 1
    path.write_bytes(text)


def break_text(path: Path) -> None:
    path.write_text("{", encoding="utf-8")


def break_first_line(path: Path) -> None:
    path.write_text("{\n" + path.read_text(encoding="utf-8"), encoding="utf-8")


def swap_in_an_older_layer(path: Path) -> None:
    path.unlink()
    path.hardlink_to(path.parent.parent / "checkpoints/step-000003" / path.name)


@pytest.mark.parametrize(
    ("file", "spoil"),
    [
        ("stopped/state/layer-001.safetensors", truncate),
        ("stopped/state/layer-001.safetensors", Path.unlink),
        ("stopped/state/layer-001.safetensors", break_header),
        ("stopped/state/layer-001.safetensors", swap_in_an_older_layer),
        ("stopped/state/gradient-002.safetensors", truncate),
        ("stopped/state/commit.json", break_text),
        ("stopped/checkpoints/step-000003/layer-000.safetensors", Path.unlink),
        ("stopped/checkpoints/step-000003/manifest.json", break_text),
        ("done/model/model-00002-of-00004.safetensors", truncate),
        ("done/model/model-00002-of-00004.safetensors", Path.unlink),
        ("done/model/gptj_ft.json", break_text),
        ("done/data/train/manifest.json", break_text),
        ("done/metrics.jsonl", break_first_line),
    ],
    ids=lambda value: value.replace("/", "-") if isinstance(value, str) else value.__name__,
)
def test_a_damaged_file_is_named(file: str, spoil, runs: Path, shell: Shell) -> None:
    path = runs / file
    if path.stat().st_nlink > 1:  # spoil this name only
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content)
    spoil(path)
    done = shell(f"runs verify runs/{file.partition('/')[0]} --json")
    assert done.code == 3
    (problem,) = done.json["problems"]
    assert path.name in problem or "runs/done/data/train: damaged" in problem


def test_verify_names_tensor_reads_shared_file_once(runs: Path, shell: Shell, monkeypatch) -> None:
    read = []

    def damage(self: StateFile, path: Path) -> list[str]:
        read.append(path.stat().st_ino)
        return ["exp_avg (attn.q_proj.weight)"] if path.name == "layer-001.safetensors" else []

    monkeypatch.setattr(StateFile, "damage", damage)
    done = shell("runs verify runs/stopped")
    assert done.code == 3
    lines = done.out.splitlines()
    for folder in ("state", "checkpoints/step-000003", "checkpoints/step-000006"):
        assert f"runs/stopped/{folder}/layer-001.safetensors is damaged: exp_avg (attn.q_proj.weight)" in lines
    assert lines[-1].endswith("3 problems")
    assert len(read) == len(set(read))


@pytest.mark.parametrize("file", ["state/layer-001", "state/gradient-002", "checkpoints/step-000003/layer-000"])
def test_a_flipped_bit_is_found_and_named(file: str, runs: Path, shell: Shell) -> None:
    path = runs / "stopped" / f"{file}.safetensors"
    with path.open("r+b") as opened:
        opened.seek(-8192, os.SEEK_END)
        byte = opened.read(1)
        opened.seek(-8192, os.SEEK_END)
        opened.write(bytes([byte[0] ^ 1]))
    done = shell("runs verify runs/stopped --json")
    assert done.code == 3
    assert any(path.name in problem and "is damaged: " in problem for problem in done.json["problems"])


@pytest.mark.parametrize("file", ["layer-001", "gradient-002"])
def test_flipped_bit_prevents_resume(file: str, runs: Path, shell: Shell) -> None:
    path = runs / "stopped" / "state" / f"{file}.safetensors"
    with path.open("r+b") as opened:
        opened.seek(-8192, os.SEEK_END)
        byte = opened.read(1)
        opened.seek(-8192, os.SEEK_END)
        opened.write(bytes([byte[0] ^ 1]))
    done = shell("finetune --resume runs/stopped")
    assert (done.code, f"{path.name}: " in done.err, " is damaged: " in done.err) == (3, True, True), done.err
    assert not (runs / "stopped" / "model").exists()


def test_cleaning_finished_run_keeps_model_and_metrics(runs: Path, shell: Shell) -> None:
    kept = {path: data for path, data in content(runs / "done").items() if "checkpoints" not in path.parts}
    size = shell("runs list runs/done --json").json["runs"][0]["bytes"]
    done = shell("runs clean runs/done runs/done/ --dry-run --json")
    assert (done.code, len(done.json["runs"])) == (0, 1)
    assert done.json["runs"][0]["paths"] == ["runs/done/checkpoints"]
    assert (runs / "done" / "checkpoints" / "step-000003").exists()
    assert shell("runs clean runs/done").out.startswith("runs/done: ")
    assert content(runs / "done") == kept
    after = shell("runs list runs/done --json").json["runs"][0]
    assert size - after["bytes"] == pytest.approx(done.json["runs"][0]["bytes"], abs=32768)
    assert shell("runs verify runs/done").code == 0


def test_cleaning_stopped_run_removes_only_leftovers(runs: Path, shell: Shell, made: Path) -> None:
    run = runs / "stopped"
    before = content(run)
    partial = run / "checkpoints" / "step-000009.tmp"
    partial.mkdir()
    (partial / "layer-000.safetensors").hardlink_to(run / "state" / "layer-000.safetensors")
    (partial / "layer-001.safetensors").write_bytes(b"x" * 8192)
    (run / "state" / "layer-003.new").write_bytes(b"x" * 8192)
    (run / ".model.partial-999999").mkdir()
    done = shell("runs clean runs/stopped --json")
    assert done.code == 0
    assert len(done.json["runs"][0]["paths"]) == 3
    assert done.json["runs"][0]["bytes"] == 16384, "a file that has another name frees nothing"
    assert content(run) == before
    assert shell("finetune --resume runs/stopped").code == 0
    assert_same_weights(weights_of(run / "model"), weights_of(made / "runs/done/model"))


def test_plan_counts_steps_from_the_chosen_checkpoint(runs: Path) -> None:
    for start, done in ((None, 7), ("3", 3), ("start", 0)):
        workload = api.prepare_run(resume=runs / "stopped", start=start).setup.plan.workload
        assert (workload.steps_done, workload.num_steps) == (done, 8 - done)


def test_uncommitted_state_is_cleaned(runs: Path, shell: Shell) -> None:
    run = Run(runs / "stopped")
    run.note_saved(run.checkpoint(6) / "manifest.json")
    (run.state / "commit.json").unlink()
    assert shell("runs clean runs/stopped").code == 0
    assert not (runs / "stopped" / "state").exists()
    assert (runs / "stopped" / "checkpoints" / "step-000006").exists()


def test_kept_checkpoint_exports_as_model(runs: Path, shell: Shell, tmp_path: Path) -> None:
    done = shell("runs export runs/done three --from 3 --json")
    assert done.code == 0, done.err
    assert done.json == {"model": "three", "step": 3}
    assert shell("runs export runs/done three --from 3").code == 2
    done = shell("runs export runs/done best")
    assert (done.code, "is the run's model: it is in runs/done/model" in done.err) == (2, True)
    assert shell("runs export runs/done last --from last").code == 0
    loss = json.loads((tmp_path / "last" / "gptj_ft.json").read_text())["metrics"]["validation_loss"]
    done = shell("evaluate last --data runs/done/data/validation --baseline none --set metrics=[] --json")
    assert done.json["model"]["loss"] == pytest.approx(loss, abs=1e-6)


def test_export_never_replaces_other_folders(
    shell: Shell, rows_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = shell(
        "finetune --recipe summarization --data rows.jsonl --model tiny --method lora --set lora.merge=true "
        "--batch-size 2 --max-steps 2 --save-every 1 --keep all --output runs/a"
    )
    assert done.code == 0, done.err
    for folder in ("merged", "two", "three-merged"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine").touch()
    before, synced = content(tmp_path), list[bool]()
    monkeypatch.setattr(export, "sync_path", lambda folder: synced.append((folder / "one").is_dir()))
    assert shell("runs export runs/a one --from 1").code == 0
    assert synced == [True], "the new name is flushed to disk"
    for folder in ("two", "three-merged"):
        done = shell(f"runs export runs/a {folder.removesuffix('-merged')} --from 1")
        assert (done.code, f"{folder} exists already" in done.err) == (2, True)
    assert shell("runs export runs/a runs/a/again --from 1").code == 0
    assert before.items() <= content(tmp_path).items()
    assert not (tmp_path / "three").exists()
    assert_same_weights(weights_of(tmp_path / "one-merged"), weights_of(tmp_path / "runs/a/again-merged"))


def test_run_returned_to_checkpoint_ends_equal(runs: Path, shell: Shell, made: Path) -> None:
    assert shell("finetune --from 3 --recipe summarization").code == 2
    done = shell("finetune --resume runs/stopped --from 5")
    assert (done.code, "it has step-000003, step-000006" in done.err) == (2, True)
    done = shell("finetune --resume runs/stopped --from 3")
    assert done.code == 0, done.err
    assert "back to step 3" in done.err
    assert "  step 4/8" in done.err
    assert_same_weights(weights_of(runs / "stopped/model"), weights_of(made / "runs/done/model"))


def test_moved_or_copied_run_resumes_bit_equal(runs: Path, shell: Shell, made: Path, tmp_path: Path) -> None:
    for line, place in (
        ("cp -r", "--weights disk --optimizer-state disk"),  # without the links
        ("cp -a", "--weights device --optimizer-state device"),
        ("mv", ""),
    ):
        elsewhere = tmp_path / "elsewhere" / line.replace(" ", "")
        elsewhere.parent.mkdir(exist_ok=True)
        subprocess.run([*line.split(), runs / "stopped", elsewhere], check=True)
        done = shell(f"finetune --resume {elsewhere} {place} --json")
        assert done.code == 0, done.err
        assert done.json["model"] == str(elsewhere / "model")
        assert_same_weights(weights_of(elsewhere / "model"), weights_of(made / "runs/done/model"), line)
    assert not (runs / "stopped").exists()


def test_resume_with_other_threads_warns(runs: Path, shell: Shell) -> None:
    before = torch.get_num_threads()
    try:
        done = shell(f"finetune --resume runs/stopped --set threads={before + 1}")
    finally:
        torch.set_num_threads(before)
    warning = f"may differ in their last bits: threads {before}, now {before + 1}\n"
    assert done.code == 0
    assert warning in (runs / "stopped" / "log.txt").read_text()
    assert warning.strip() in " ".join(done.err.split())


def test_resume_with_other_kernels_warns(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert environment_changes(run, "cpu", 1) is None
    record_environment(run, "cpu", 1, {})
    assert environment_changes(run, "cpu", 1) is None
    here = json.loads((tmp_path / "environment.json").read_text())
    (tmp_path / "environment.json").write_text(json.dumps({**here, "kernels": "SSE4, products of BLIS"}))
    for _ in range(2):  # nothing is written: it is said again
        warning = environment_changes(run, "cpu", 1)
        assert warning is not None
        assert f"kernels SSE4, products of BLIS, now {here['kernels']}" in warning
    del here["kernels"]  # of a run from before they were noted, whose products were another library's
    (tmp_path / "environment.json").write_text(json.dumps(here))
    assert "products of MKL, now" in (environment_changes(run, "cpu", 1) or "")


def test_kernel_warning_precedes_writing(runs: Path, shell: Shell, monkeypatch) -> None:
    noted = runs / "stopped" / "environment.json"
    noted.write_text(json.dumps({**json.loads(noted.read_text()), "kernels": "AVX2"}))
    before = noted.read_text()
    seen = []

    def move(run: Run, model: Path) -> None:
        seen.append((run.folder / "log.txt").read_text())
        raise DataError("here it ends")

    monkeypatch.setattr("gptj_ft.training.finetune.move_model", move)
    assert shell("finetune --resume runs/stopped").code == 3
    assert "kernels AVX2, now" in seen[0]
    assert noted.read_text() == before


def test_return_to_damaged_checkpoint_changes_nothing(runs: Path, shell: Shell) -> None:
    truncate(runs / "stopped" / "checkpoints" / "step-000003" / "layer-002.safetensors")
    before = content(runs / "stopped")
    done = shell("finetune --resume runs/stopped --from 3")
    assert done.code == 3
    assert "step-000003/layer-002.safetensors" in done.err
    assert "nothing was changed" in done.err
    assert content(runs / "stopped") == before


def test_lower_earlier_loss_is_reported(runs: Path, shell: Shell) -> None:
    with scripted_losses(lambda step, loss: loss + 9):
        done = shell("finetune --resume runs/stopped")
    assert "lowest validation loss after 6 steps" in done.said
    assert "gptj-ft runs export runs/stopped FOLDER --from best" in done.out
    assert shell("runs export runs/stopped best").code == 0
