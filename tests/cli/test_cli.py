"""Bad input: exit codes, short error messages, and no partial output."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from gptj_ft.checkpoints.base_model import tiny_model
from gptj_ft.cli.app import _run
from gptj_ft.config.options import Recipe
from gptj_ft.data.readers.source import identify
from gptj_ft.system.signals import StopRequest

FINETUNE = "finetune --recipe summarization --model tiny --max-steps 1"


@pytest.fixture
def model(rows_file: Path, tmp_path: Path) -> Path:
    """A model folder that may be damaged."""
    return Path(shutil.copytree(tiny_model(Recipe(), identify(rows_file)), tmp_path / "model"))


def test_missing_input_error_names_next_command(shell, rows_file: Path) -> None:
    for line, hint in (
        ("convert", "gptj-ft download"),
        ("finetune --recipe summarization --data rows.jsonl", "gptj-ft download"),
        ("generate prompt", "gptj-ft download"),
        ("evaluate --data rows.jsonl", "gptj-ft download"),
        ("finetune", "--data"),
        ("generate --input rows.jsonl", "--input and --output go together"),
        ("evaluate --num-fewshot 2", "add --tasks"),
        ("evaluate --tasks some --data rows.jsonl", "leave out --data"),
        ("evaluate --tasks some --set data=rows.jsonl", "leave out --data"),
        ("evaluate --predictions rows.jsonl --dry-run", "leave one out"),
        ("evaluate some --predictions rows.jsonl", "leave out the model"),
        ("evaluate --set model=some --predictions rows.jsonl", "leave out the model"),
        ("predict x --set data=rows.jsonl", "name those to label with --input"),
        ("predict x --set model=some", "no model 'some'"),
    ):
        done = shell(line)
        assert done.code == 2, line
        assert hint in done.err
        assert len(done.err.strip().splitlines()) <= 2


BAD_DATA = {
    "missing": (None, 2, "no such file"),
    "empty": (b"", 3, "empty"),
    "not-json": (b'{"note": "a b", "short_summary": "c"}\n{"note": \n', 3, "bad.jsonl:2"),
    "missing-column": (b'{"body_text": "a", "title": "b"}\n', 3, "body_text, title"),
    "no-row-left": (b'{"note": "a", "short_summary": " "}\n', 3, "none of the 1 rows"),
    "not-utf8": (b'{"note": "\x81\x8d", "short_summary": "c"}\n', 3, "bad.jsonl:1"),
    "not-objects": (b"[1, 2]\n", 3, "bad.jsonl:1"),
}


@pytest.mark.parametrize("kind", BAD_DATA)
def test_bad_rows_are_rejected_before_writing(kind: str, shell, tmp_path: Path) -> None:
    content, code, message = BAD_DATA[kind]
    if content is not None:
        Path("bad.jsonl").write_bytes(content)
    done = shell(f"{FINETUNE} --data bad.jsonl --output out")
    assert done.code == code, done.err
    assert message in done.err
    assert len(done.err.strip().splitlines()) <= 2
    assert not Path("out").exists()
    assert not Path("runs").exists()


def test_a_model_folder_without_config_is_refused(shell, model: Path, rows_file: Path) -> None:
    (model / "config.json").unlink()
    for line in (
        f"convert {model} out",
        f"evaluate {model} --data rows.jsonl --recipe summarization",
        f"generate x --model {model}",
    ):
        done = shell(line)
        assert (done.code, "no config.json" in done.err) == (2, True), done.err
    assert not Path("out").exists()


@pytest.mark.parametrize("family", ["mpt", None])
def test_unsupported_family_is_rejected_before_reading(family: str | None, shell, rows_file: Path) -> None:
    Path("other").mkdir()
    Path("other/config.json").write_text(json.dumps({"model_type": family} if family else {"hidden_size": 9}))
    Path("other/tokenizer.json").write_text("{}")
    for line in (
        "finetune --recipe summarization --data rows.jsonl --model other",
        "prepare-data --recipe summarization --data rows.jsonl --model other",
        "plan --recipe summarization --model other",
        "evaluate other --data rows.jsonl --recipe summarization",
        "generate x --model other",
        "convert other out",
    ):
        done = shell(line)
        assert (done.code, done.out) == (2, ""), (line, done.err)
        what = f"this is a {family} model" if family else "it names no model_type"
        assert f"other/config.json: {what}; supported: gptj, gpt2, " in done.err, line
        assert "for other models there are" in done.err
        assert "did you mean" not in done.err


def test_missing_model_error_depends_on_its_name(shell, tmp_path: Path) -> None:
    for run in ("qa-1", "qa-2"):
        (tmp_path / "runs" / run).mkdir(parents=True)
        (tmp_path / "runs" / run / "recipe.yaml").touch()
    (tmp_path / "m").mkdir()
    (tmp_path / "m/weights.bin").touch()
    for name, said in (
        ("runs/nope", "no such run 'runs/nope'; there are: runs/qa-1, runs/qa-2"),
        ("runs/qa-1", "runs/qa-1 has no tuned model yet; to finish that run: gptj-ft finetune --resume runs/qa-1"),
        ("m/nowhere.gguf", "no model 'm/nowhere.gguf': neither a folder nor"),
        ("m/weights.bin", "m/weights.bin is a file; a model is a folder"),
        ("m/nothere", "no model 'm/nothere': neither a folder nor"),
        ("./m/nothere", "no model './m/nothere': neither a folder nor"),
    ):
        for line in (f"evaluate {name}", f"generate x --model {name}"):
            done = shell(line)
            assert (done.code, said in done.err, "gptj-ft download" in done.err) == (2, True, False), done.err
    assert "type `gptj-ft download EleutherAI/gpt-j-6b`" in shell("generate x --model EleutherAI/gpt-j-6b").err


def test_evaluation_cuts_rows_to_model_context(shell, model: Path, rows_file: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "n_positions": 64}))
    line = f"evaluate {model} --data rows.jsonl --recipe summarization --limit 2 --set generation.max_new_tokens=2"
    note = "max_length is 64, the context of the model, and not 1,024: rows are cut to that"
    assert note in shell(f"{line} --dry-run").said
    done = shell(line)
    assert (done.code, done.said.count(note)) == (0, 2), done.err
    assert "rows are cut" not in shell(f"{line} --set max_length=50 --dry-run").said


def test_truncated_shard_is_rejected_before_work(shell, model: Path, rows_file: Path) -> None:
    shard = sorted(model.glob("*.safetensors"))[1]
    os.truncate(shard, shard.stat().st_size - 10)
    for line in (
        f"convert {model} out",
        f"finetune --recipe summarization --data rows.jsonl --model {model} --output out",
    ):
        done = shell(line)
        assert (done.code, shard.name in done.err) == (3, True), done.err
        assert not Path("out").exists()


def test_wrong_tensor_shape_error_names_both_shapes(shell, model: Path, rows_file: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "n_inner": 100}))
    done = shell(f"finetune --recipe summarization --data rows.jsonl --model {model} --output out")
    assert done.code == 3
    assert "mlp.fc_in.weight" in done.err
    assert "[384, 96]" in done.err
    assert "[100, 96]" in done.err
    assert not Path("out").exists()


def test_unknown_name_suggests_nearest_match(shell, rows_file: Path) -> None:
    done = shell("finetune --recipe sumarization --data rows.jsonl --model tiny")
    assert (done.code, "did you mean 'summarization'" in done.err) == (2, True)
    done = shell("finetune --recipe qa --data rows.jsonl --model tini")
    assert (done.code, "did you mean 'tiny'" in done.err) == (2, True)
    done = shell("finetune --recip qa")
    assert (done.code, "--recipe" in done.err) == (2, True)
    done = shell("recipes show summarisation")
    assert (done.code, "did you mean 'summarization'" in done.err) == (2, True)


def test_existing_output_folder_is_untouched(shell, model: Path, rows_file: Path) -> None:
    Path("out").mkdir()
    Path("out/precious").write_text("x")
    for line in (
        f"{FINETUNE} --data rows.jsonl --output out",
        f"convert {model} out",
        "prepare-data --data rows.jsonl --recipe summarization --model tiny --output out",
    ):
        done = shell(line)
        assert (done.code, "out" in done.err, "exists" in done.err) == (2, True, True), done.err
    assert [path.name for path in Path("out").iterdir()] == ["precious"]


def test_an_unwritable_output_folder_is_refused(shell, model: Path, rows_file: Path) -> None:
    Path("file").write_text("not a folder")
    for line in (
        f"{FINETUNE} --data rows.jsonl --output file/out",
        f"convert {model} file/out",
        "prepare-data --data rows.jsonl --recipe summarization --model tiny --output file/out",
    ):
        done = shell(line)
        assert (done.code, "file/out" in done.err) == (2, True), done.err
    assert Path("file").read_text() == "not a folder"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("place", ["device", "disk"])
def test_every_suggested_option_makes_it_fit(place: str, shell, rows_file: Path, monkeypatch) -> None:
    from gptj_ft.system import machine

    line = f"{FINETUNE} --data rows.jsonl --output out --weights {place} --optimizer-state {place}"
    needed = [10**12]
    monkeypatch.setattr(machine, "free_memory", lambda device: needed[-1] - 1)  # one byte too few for the last plan
    while (done := shell(f"{line} --set activations=recompute --dry-run --json")).code == 0:
        needed.append(done.json["needs"][0]["need"])  # a tighter plan, until none is left
    assert (done.code, len(needed) > 2 or place == "device") == (4, True)
    done = shell(line)
    assert done.code == 4
    assert " GB is free; try --" in done.err
    for options in done.err.strip().partition("; try ")[2].split(", or "):
        fitting = shell(f"{line} {options} --dry-run --json")
        assert (fitting.code, fitting.json["needs"][0]["need"] < needed[-1]) == (0, True), options
    needed.append(3 * 10**8)
    assert "helps most, but is not enough" in shell(line).err
    assert not Path("out").exists()


def test_caps_are_flags_and_obeyed(shell, rows_file: Path) -> None:
    line = f"{FINETUNE} --data rows.jsonl --output out"
    for cap, resource in (("--device-memory", "memory"), ("--host-memory", "memory"), ("--disk-space", "disk")):
        done = shell(f"{line} {cap} 1MiB")
        assert (done.code, f"of {resource}, 1.0 MB is allowed" in done.err) == (4, True), done.err
        assert f"try a larger {cap}" in done.err
    done = shell(f"{line} --device-memory 8apples")
    assert (done.code, "device_memory: expected a size: bytes, or a number with MB" in done.err) == (2, True), done.err
    assert not Path("out").exists()
    plan = shell("plan --recipe summarization --model tiny --data rows.jsonl --host-memory 5GB --disk-space 3GB --json")
    assert [need["have"] for need in plan.json["needs"]] == [5 * 10**9, 3 * 10**9]


def test_a_full_disk_is_foreseen(shell, rows_file: Path, set_free_space) -> None:
    set_free_space(10**6)
    done = shell(f"{FINETUNE} --data rows.jsonl --output out")
    assert (done.code, "of disk" in done.err) == (4, True)
    assert not Path("out").exists()


def test_dry_run_writes_nothing(shell, rows_file: Path) -> None:
    before = sorted(path.name for path in Path().iterdir())
    done = shell(f"{FINETUNE} --data rows.jsonl --dry-run --json")
    assert done.code == 0, done.err
    assert done.json["num_steps"] == 1
    assert done.json["placement"] == {
        "weights": "device",
        "optimizer_state": "device",
        "boundaries": "device",
        "frozen": None,
    }
    assert sorted(path.name for path in Path().iterdir() if path.name != "home") == [n for n in before if n != "home"]
    planned = shell("plan --recipe summarization --model tiny --max-steps 1 --data rows.jsonl --json").json
    assert planned["device_bytes"] == done.json["device_bytes"]


def test_plan_needs_no_rows(shell, model: Path) -> None:
    done = shell(f"plan --recipe summarization --model {model} --json")
    assert done.code == 0, done.err
    assert done.json["num_steps"] is None
    assert "unknown without data" in shell(f"plan --recipe summarization --model {model}").out


def test_json_is_one_object_even_on_failure(shell, rows_file: Path) -> None:
    for line in ("recipes list --json", "recipes show qa --json", f"{FINETUNE} --data rows.jsonl --json"):
        done = shell(line)
        assert done.code == 0, done.err
        assert isinstance(done.json, dict)
    done = shell(f"{FINETUNE} --data nothing.jsonl --json")
    assert done.json["exit_code"] == done.code == 2
    assert "nothing.jsonl" in done.json["error"]


def test_options_come_from_the_environment_too(shell, rows_file: Path, monkeypatch) -> None:
    monkeypatch.setenv("GPTJ_FT_BATCH_SIZE", "10")
    done = shell(
        "finetune --recipe summarization --model tiny --data rows.jsonl --set holdout=0 --epochs 1 --dry-run --json"
    )
    assert done.json["num_steps"] == 4


def test_only_download_may_use_the_hub(shell, monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert shell("recipes list").code == 0
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_unexpected_error_is_json_if_asked_for(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def broken() -> None:
        raise ValueError("a bug")

    monkeypatch.setattr("gptj_ft.cli.app.command", broken)
    monkeypatch.setattr("sys.argv", ["gptj-ft", "runs", "--json"])
    with pytest.raises(ValueError, match="a bug"), StopRequest(on_first=lambda: None) as stop:
        _run(stop)
    assert json.loads(capsys.readouterr().out) == {"error": "ValueError: a bug", "exit_code": 1}
