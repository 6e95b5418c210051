"""Test whole runs from the command line: all commands, interruption and resume, rejected input."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from conftest import GPT2_SHAPES, random_gpt2
from safetensors.torch import load_file, save_file
from support.fork_server import ForkServer
from support.hub_server import serve, set_hub_constants
from support.small_run import small_session
from support.steps import failing, full_disk_at_export, infinite_gradient, interrupting
from transformers import AutoModelForCausalLM, AutoTokenizer

from gptj_ft import api
from gptj_ft.cli.terminal.tables import cautions
from gptj_ft.config import run_folder
from gptj_ft.config.resolve import build, dump_recipe, resolve
from gptj_ft.config.run_folder import Run
from gptj_ft.data.readers.source import identify
from gptj_ft.errors import DataError, ResourceError, UsageError
from gptj_ft.evaluation.metrics.language_model import LOSS_SCORES
from gptj_ft.system.files import is_leftover
from gptj_ft.system.lock import locked
from gptj_ft.training.finetune import options_on_resume, prepare_new_run, resume_run, train_run
from gptj_ft.training.reporter import Reporter
from gptj_ft.training.verify import verify

TINY = "finetune --recipe summarization --data rows.jsonl --model tiny --lr 1e-2 --batch-size 8 --set holdout=0.1"


def weights_of(model: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for shard in sorted(model.glob("*.safetensors")) for name, tensor in load_file(shard).items()}


def assert_same_weights(a: Path, b: Path) -> None:
    ours, theirs = weights_of(a), weights_of(b)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tiny", ["tiny", "tiny-gpt2"])
def test_the_six_commands_end_to_end(
    tiny: str, shell, rows_file: Path, own_home: Path, tmp_path: Path, monkeypatch
) -> None:
    from gptj_ft.checkpoints.base_model import tiny_model
    from gptj_ft.config.options import Recipe

    # A tiny model stands on a server that speaks the Hub's protocol, as EleutherAI/gpt-j-6b.
    published = tiny_model(Recipe(model=tiny), identify(rows_file))
    published = published.rename(tmp_path / "published")
    set_hub_constants(monkeypatch, HF_HUB_OFFLINE=False)
    with serve(published) as server:
        done = shell(f"download --endpoint {server.url} --json")
    assert done.code == 0, done.err
    assert (own_home / "models" / "EleutherAI--gpt-j-6b" / "config.json").is_file()

    done = shell("convert --json")
    assert done.code == 0, done.err
    model = Path(done.json["folder"])
    assert model == own_home / "models" / "gpt-j-6b"
    assert_same_weights(published, model)

    done = shell("prepare-data --recipe summarization --data rows.jsonl --output prepared --json")
    assert done.code == 0, done.err
    report = done.json
    assert report["rows_read"] == report["rows_kept"] == 40
    assert report["columns"] == {"document": "note", "summary": "short_summary"}

    done = shell("finetune --recipe summarization --data prepared --lr 1e-2 --epochs 8 --batch-size 8 --json")
    assert done.code == 0, done.err
    result = done.json
    assert Path(result["run"]) == Path("runs/summarization-1")
    assert result["loss_after"] < result["loss_before"] - 2

    done = shell("evaluate --data rows.jsonl --limit 10 --json")
    assert done.code == 0, done.err
    tuned, baseline = done.json["model"], done.json["baseline"]
    assert baseline["model"] == str(model.resolve())
    assert tuned["rows"] == baseline["rows"] == 10
    assert tuned["loss"] < baseline["loss"] - 2
    assert tuned["perplexity"] == pytest.approx(torch.tensor(tuned["loss"]).exp().item(), rel=1e-4)
    assert tuned["scores"]["rougeL"] > baseline["scores"]["rougeL"] + 20
    assert "answers" not in tuned, "texts are private unless asked for"

    done = shell("generate --max-new-tokens 12 --json", "The printer on floor 3 is out of paper.")
    assert done.code == 0, done.err
    text = done.json["text"]
    assert text

    # transformers opens the tuned model and, given the same prompt, writes the same.
    folder = Path(result["model"])
    theirs, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    prompt = "Summarize the following text.\n\nThe printer on floor 3 is out of paper.\n\nSummary:"
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    output = theirs.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert tokenizer.decode(output, skip_special_tokens=True).strip() == text

    remembered = json.loads((folder / "gptj_ft.json").read_text(encoding="utf-8"))
    assert remembered["template"]["prompt"].startswith("Summarize the following text.")
    assert remembered["metrics"]["validation_loss"] == result["loss_after"]


def test_finished_run_leaves_only_its_records(shell, rows_file: Path) -> None:
    assert shell(f"{TINY} --max-steps 3 --output out --weights disk --optimizer-state disk").code == 0
    run = Run(Path("out"))
    assert {path.name for path in run.folder.iterdir()} == {
        "recipe.yaml", "run.json", "base.json", "environment.json", "metrics.jsonl", "log.txt", "run.lock", "data",
        "model", "report.html",
    }  # fmt: skip
    assert run.recipe().lr == 1e-2
    steps = [line for line in run.metrics() if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert all(line["target_tokens"] > 0 and line["memory_bytes"] > 0 for line in steps)
    assert "# command line" in run.recipe_file.read_text(encoding="utf-8")
    environment = json.loads((run.folder / "environment.json").read_text(encoding="utf-8"))
    assert environment["placement"] == "weights on disk, optimizer state on disk"
    assert environment["precision"] == run.recipe().precision
    page = (run.folder / "report.html").read_text(encoding="utf-8")
    assert environment["placement"] in page
    assert str(rows_file.resolve().parent) not in page, "a page to be handed on"
    assert "held out from it" in page


@pytest.mark.sampled(2)
@pytest.mark.parametrize("place", ["device", "disk"])
def test_metrics_and_summary_contain_rates(place: str, shell, rows_file: Path) -> None:
    done = shell(
        f"{TINY} --max-steps 3 --output out --weights {place} --optimizer-state {place} --json"
        " --set activations=recompute"
    )
    assert done.code == 0, done.err
    lines = [line for line in Run(Path("out")).metrics() if "loss" in line]
    for line in lines:
        assert line["tokens_per_second"] == pytest.approx(line["tokens"] / line["seconds"])
        assert line["target_tokens_per_second"] == pytest.approx(line["target_tokens"] / line["seconds"])
        assert line["stall"] == pytest.approx(line["waited_seconds"] / line["seconds"])
        assert 0 < line["model_gflops"] < line["hardware_gflops"] < 4 / 3 * line["model_gflops"] * 1.001
        assert 0 < line["mfu"] < line["hfu"] < 2
        assert 10**8 < line["memory_bytes"] < 10**10
        assert line["device_memory_bytes"] == 0
    tally, meters = done.json["tally"], done.json["meters"]
    assert tally["target_tokens"] == sum(line["target_tokens"] for line in lines)
    assert tally["memory_bytes"] == max(line["memory_bytes"] for line in lines)
    assert meters["tokens_per_second"] == pytest.approx(tally["tokens"] / tally["seconds"])


def test_output_is_plain_and_ends_with_command(shell, rows_file: Path) -> None:
    done = shell(f"{TINY} --batch-size 50 --max-steps 2 --output 'an other'")
    names = [line[2:].split("  ")[0] for line in done.out.splitlines() if re.match("  [a-z]", line)]
    assert names == ["validation loss", "time", "tuned model", "report"]
    assert "lower is better (unreliable: only 4 rows)" in " ".join(done.out.split())
    assert "next: gptj-ft evaluate 'an other'   # on the 4 held-out rows" in done.out
    for text in ("GFLOP", "matmul", "moved", "measured", "FLOPs"):
        assert text not in done.said, text
    assert "GFLOP" in Path("an other/log.txt").read_text(encoding="utf-8")
    for warning in (*cautions(36, 4, 50), "only 36 training rows: with fewer than about 100"):
        assert warning in done.said
    prepared = shell("prepare-data --recipe summarization --data rows.jsonl --model tiny").said
    (counts,) = re.findall(r"rows 40 read = 40 kept .* tokens ([\d,]+, [\d,]+ of them trained on; longest)", prepared)
    assert f" tokens {counts} " in done.said, "the same rows are counted here as there, held out or not"
    measured = shell("evaluate 'an other' --limit 2 --baseline none --set generation.max_new_tokens=2")
    assert (measured.code, "an other/data/validation" in measured.said) == (0, True), measured.err


class Activities(Reporter):
    def __init__(self) -> None:
        self.told: list[str] = []

    def on_activity(self, text: str) -> None:
        self.told.append(text)


def test_start_reports_reading_and_measuring(rows_file: Path) -> None:
    options = {"recipe": "summarization", "data": "rows.jsonl", "model": "tiny"}
    for planning in ("measuring this machine, once, up to 10 s", "planning"):
        reporter = Activities()
        prepare_new_run(resolve(options, environment={}), reporter)
        assert reporter.told == ["reading the rows", planning]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"class_weights": "balanced"}, "class_weights has no effect with task=language-model, only with classificat"),
        ({"task": "regression", "z_loss": 1e-4}, "z_loss has no effect with task=regression, only with language-mod"),
        ({"replicas": 2}, "replicas has no effect, because this run has one process"),
        ({"mirror": True}, "mirror has no effect, because this run has one process"),
        ({"task": "classification", "class_weights": "balanced", "z_loss": 1e-4, "replicas": 1}, "no data: add"),
    ],
)
def test_typed_option_without_effect_is_refused(options: dict[str, object], said: str, tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("\n".join(f"{key}: {value}" for key, value in options.items()), encoding="utf-8")
    with pytest.raises(UsageError, match=said):
        api.prepare_run(**options)
    with pytest.raises(UsageError, match=said if said.startswith("no data") else f"c.yaml: {said}"):
        api.prepare_run(config=config)
    if "one process" not in said:
        with pytest.raises(UsageError, match=said if said.startswith("no data") else f"command line: {said}"):
            api.prepare_search(**options)


def test_packing_of_prompted_rows_is_noted(rows_file: Path) -> None:
    options = {"recipe": "summarization", "data": "rows.jsonl", "model": "tiny", "max_steps": 1}
    for packing in ("off", "apart"):
        told: list[str] = []
        reporter = Reporter()
        reporter.on_message = told.append
        prepare_new_run(resolve({**options, "packing": packing}, environment={}), reporter)
        assert ("packing=apart has no effect" in "".join(told)) == (packing == "apart")


@pytest.mark.thorough
def test_run_without_a_name_takes_the_next_free_one(rows_file: Path) -> None:
    options = {"recipe": "summarization", "data": "rows.jsonl", "model": "tiny", "max_steps": 1}
    planned = [prepare_new_run(resolve(options, environment={})) for _ in range(3)]
    for prepared in planned[:2]:
        train_run(prepared)
    making = Path("runs/.summarization-3.starting")  # by another process
    making.mkdir()
    with locked(making, "training"):
        train_run(planned[2])
    for number in (1, 2, 4):
        run = Run(Path(f"runs/summarization-{number}"))
        assert (run.recipe().output, verify(run).problems) == (str(run.folder), [])
    named = [prepare_new_run(resolve({**options, "output": "runs/mine"}, environment={})) for _ in range(2)]
    train_run(named[0])
    with pytest.raises(UsageError, match="another process has made runs/mine meanwhile; repeat the command"):
        train_run(named[1])
    assert not [path for path in Path("runs").iterdir() if is_leftover(path.name) and path != making]


def test_few_rows_and_large_batches_warn() -> None:
    assert cautions(100, 20, 100) == cautions(100, 0, 8) == []
    few, little, large = cautions(99, 19, 100)
    assert few.startswith("only 99 training rows")
    assert little.startswith("only 19 validation rows")
    assert large.startswith("batch_size 100 exceeds the 99 training rows")


def timeless(lines: list[dict[str, object]]) -> list[dict[str, object]]:
    """Keep what two runs of the same numbers share."""
    numbers = ("step", "loss", "z_loss", "lr", "grad_norm", "tokens", "target_tokens", "validation_loss")
    return [{key: value for key, value in line.items() if key in numbers} for line in lines]


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    ("model", "place", "clip"),
    [("tiny", place, clip) for place in ("disk", "host", "device") for clip in ("null", "1.0")]
    + [("tiny-gpt2", "disk", "1.0"), ("tiny-gpt2", "host", "null")],
)
def test_stopped_run_resumes_bit_equal(model: str, place: str, clip: str, shell, rows_file: Path) -> None:
    options = f"{TINY} --model {model} --epochs 2 --set clip_norm={clip} --weights {place} --optimizer-state {place}"
    assert shell(f"{options} --output straight").code == 0

    with interrupting(2, 5, 6):
        done = shell(f"{options} --output stopped")
        assert done.code == 130
        assert "finetune --resume stopped" in done.err
        for before, step in ((2, 5), (5, 6)):
            assert shell("finetune --resume stopped --dry-run --json").json["num_steps"] == 10 - before
            done = shell("finetune --resume stopped --host-memory 900GB")
            assert done.code == 130, done.err
            assert f"stopped after step {step} of 10" in done.err
    done = shell("finetune --resume stopped --json")
    assert done.code == 0, done.err
    assert_same_weights(Path("straight/model"), Path("stopped/model"))
    straight, stopped = Run(Path("straight")).metrics(), Run(Path("stopped")).metrics()
    assert timeless(straight) == timeless(stopped)


# 60 s until the first step, 100 s a step; where the state is not on disk, 60 s more to save it. A tenth is kept free.
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("place", "stops"), [("device", (3, 7, 8)), ("disk", (4, 8, 9))])
def test_run_out_of_time_exits_and_resumes(
    place: str, stops: tuple[int, int, int], shell, rows_file: Path, monkeypatch
) -> None:
    options = f"{TINY} --epochs 2 --weights {place} --optimizer-state {place}"
    assert shell(f"{options} --output straight").code == 0
    clock = FakeClock(monkeypatch)
    # The limit holds for each session and may be changed; none is so short that it takes no step.
    for line, step in zip(
        (f"{options} --output timed --max-time 8m", "finetune --resume timed", "finetune --resume timed --max-time 1s"),
        stops,
        strict=True,
    ):
        began = clock.elapsed
        done = shell(line)
        assert done.code == 7, done.err
        assert f"stopped after step {step} of 10: another might not end" in done.err
        assert "gptj-ft finetune --resume timed" in done.err
        assert clock.elapsed - began <= 480
    assert shell("finetune --resume timed").code == 0
    assert_same_weights(Path("straight/model"), Path("timed/model"))
    assert timeless(Run(Path("straight")).metrics()) == timeless(Run(Path("timed")).metrics())


def test_last_step_needs_time_for_export(shell, rows_file: Path, monkeypatch) -> None:
    FakeClock(monkeypatch)
    # 260 s until the second step is done; then 100 for the last, 90 to flush, validate and export, and a tenth of it.
    done = shell(f"{TINY} --max-steps 3 --output out --max-time 440s")
    assert (done.code, "stopped after step 2 of 3" in done.err) == (7, True)
    assert shell("finetune --resume out").code == 0


class FakeClock:
    """Time passes with steps, flushes, validations, checkpoints and the export, and with nothing else."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from gptj_ft.streaming.adamw import AdamW
        from gptj_ft.training import checkpoint, compute, loop
        from gptj_ft.training.validation import Validator

        self.elapsed = 0.0
        takes = {"step": 100.0, "flush": 30.0, "validation": 30.0, "save": 30.0, "export": 30.0}
        for owner, name, function in (
            (time, "monotonic", lambda: self.elapsed),
            (loop, "forecast_seconds", lambda session: takes),
            (compute, "train_step", self._slow(compute.train_step, 100)),
            (Validator, "validate", self._slow(Validator.validate, 30)),
            (checkpoint, "save_checkpoint", self._slow(checkpoint.save_checkpoint, 30)),
            (loop, "export_model", self._slow(loop.export_model, 30)),
            (AdamW, "flush", self._slow(AdamW.flush, 30)),
        ):
            monkeypatch.setattr(owner, name, function)

    def _slow(self, operation, seconds: float):
        def slow(*arguments, **settings):
            self.elapsed += seconds
            return operation(*arguments, **settings)

        return slow


@pytest.mark.sampled(2)
@pytest.mark.parametrize("moments", ["fp32", "int8"])
def test_resume_with_other_placement_is_bit_equal(moments: str, shell, rows_file: Path) -> None:
    options = f"{TINY} --epochs 1 --set save_every=2 --set moments={moments}"
    assert shell(f"{options} --output straight --weights device --optimizer-state device").code == 0

    with failing(4):
        done = shell(f"{options} --output cut --weights device --optimizer-state device")
    assert done.code == 4, done.err
    done = shell("finetune --resume cut --weights disk --optimizer-state host --set read_ahead=2")
    assert done.code == 0, done.err
    assert_same_weights(Path("straight/model"), Path("cut/model"))


def kill_when(condition, server: ForkServer, options: str, folder: Path) -> None:
    """Start a run in a process of its own, and kill it as soon as a condition holds."""
    with server.running(f"{options} --output killed", folder) as process:
        deadline = time.monotonic() + 240
        while not condition(folder / "killed"):
            assert not process.has_ended(), "the run ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.001)
    assert not (folder / "killed" / "model").exists()


def num_steps_done(run: Path) -> int:
    return sum("loss" in line for line in Run(run).metrics())


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("place", "moments", "condition"),
    [
        ("disk", "fp32", lambda run: num_steps_done(run) >= 4),
        ("disk", "int8", lambda run: num_steps_done(run) >= 4),
        ("device", "fp32", lambda run: list(run.glob("checkpoints/step-*/manifest.json"))),
    ],
)
def test_killed_run_resumes_bit_equal(
    place: str, moments: str, condition, shell, server: ForkServer, rows_file: Path, tmp_path: Path
) -> None:
    options = (
        f"{TINY} --epochs 2 --set save_every=3 --weights {place} --optimizer-state {place} --set moments={moments}"
    )
    assert shell(f"{options} --output straight").code == 0
    kill_when(condition, server, options, tmp_path)
    before = num_steps_done(tmp_path / "killed")
    done = shell("finetune --resume killed")
    assert done.code == 0, done.err
    assert_same_weights(Path("straight/model"), Path("killed/model"))
    assert num_steps_done(Path("killed")) == 10
    if place == "disk":
        # The line of a step is written just before its commit, so the step in flight may be done again, none before.
        first = int(done.err.partition("  step ")[2].partition("/")[0])
        assert first in (before, before + 1), "a committed step was lost"


@pytest.mark.slow
@pytest.mark.parametrize("place", ["device", "host"])
def test_disk_run_resumes_in_memory_bit_equal(
    place: str, shell, server: ForkServer, rows_file: Path, tmp_path: Path
) -> None:
    options = f"{TINY} --epochs 5"
    assert shell(f"{options} --weights {place} --optimizer-state {place} --output straight").code == 0
    kill_when(
        lambda run: num_steps_done(run) >= 4, server, f"{options} --weights disk --optimizer-state disk", tmp_path
    )
    done = shell(f"finetune --resume killed --weights {place} --optimizer-state {place}")
    assert done.code == 0, done.err
    assert_same_weights(Path("straight/model"), Path("killed/model"))


def test_run_killed_before_checkpoint_restarts(shell, rows_file: Path) -> None:
    with failing(1):
        assert shell(f"{TINY} --max-steps 2 --output out").code == 4
    rows_file.unlink()  # the run needs nothing but its folder and the model
    assert shell("finetune --resume out").code == 0
    assert shell(f"{TINY} --max-steps 2 --output again").code == 2


def test_resume_refuses_what_would_change_the_numbers(shell, rows_file: Path) -> None:
    assert shell(f"{TINY} --max-steps 1 --output out").code == 0
    done = shell("finetune --resume out")
    assert (done.code, "is finished" in done.err) == (2, True)
    (Path("out") / "model" / "config.json").unlink()
    done = shell("finetune --resume out --lr 3")
    assert (done.code, "lr is 0.01 in this run" in done.err) == (2, True)
    done = shell("finetune --resume rows.jsonl")
    assert (done.code, "is not a run folder" in done.err) == (2, True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("method=lora lora.rank=4 lora.merge=true generation.num_beams=2", ""),
        ("lora.rank=8", "lora.rank is 4 in this run; 8 would change its result"),
        ("generation.temperature=0", "generation.temperature is 0.5 in this run; 0.0 would change"),
        ("method=full", "method is 'lora' in this run; 'full' would change"),
        ("output=./out", ""),
        ("output=other", "output: a resumed run stays in its folder, out"),
    ],
)
def test_resume_compares_only_named_options(options: str, said: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    saved = build(
        {"method": "lora", "lora": {"rank": 4, "merge": True}, "generation": {"temperature": 0.5, "num_beams": 2}}
    )
    Path("out").mkdir()
    Run(Path("out")).recipe_file.write_text(dump_recipe(saved, {}), encoding="utf-8")
    # An accepted change fails at the next thing that is missing.
    with pytest.raises(UsageError if said else DataError, match=said or "run.json is missing"):
        resume_run(Path("out"), options_on_resume({}, None, options.split()))


def test_full_disk_while_logging_is_reported(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(run_folder, "appending", Mock(side_effect=OSError(errno.ENOSPC, "full")))
    with pytest.raises(ResourceError, match=r"no space left on the disk while writing .*log\.txt; make room"):
        Run(tmp_path).log("a line")


def test_failed_export_loses_no_model(shell, rows_file: Path) -> None:
    with full_disk_at_export():
        done = shell(f"{TINY} --max-steps 2 --output out")
    assert done.code == 4
    assert "finetune --resume out" in done.err
    done = shell("finetune --resume out --json")
    assert done.code == 0, done.err
    assert shell(f"{TINY} --max-steps 2 --output straight --json").json["loss_after"] == done.json["loss_after"]
    assert_same_weights(Path("straight/model"), Path("out/model"))


def spoiled_model(rows_file: Path, **changes: float) -> Path:
    """A tiny model with some of its tensors scaled; the keys are the ends of their names, dots as underscores."""
    from gptj_ft.checkpoints.base_model import tiny_model
    from gptj_ft.config.options import Recipe

    model = tiny_model(Recipe(), identify(rows_file))
    for shard in model.glob("*.safetensors"):
        tensors = load_file(shard)
        for name, tensor in tensors.items():
            for end, factor in changes.items():
                if name.replace(".", "_").endswith(end):
                    tensor.mul_(factor)
        save_file(tensors, shard, metadata={"format": "pt"})
    return model


@pytest.mark.sampled(3)
@pytest.mark.parametrize("options", ["", "--set holdout=0", "--set holdout=0 --set clip_norm=null"])
def test_nonfinite_base_weight_is_named(options: str, shell, rows_file: Path) -> None:
    model = spoiled_model(rows_file, h_1_mlp_fc_in_bias=float("nan"))
    done = shell(
        f"finetune --recipe summarization --data rows.jsonl --batch-size 8 --output out {options} --model", model
    )
    assert done.code == 3, done.err
    assert "transformer.h.1.mlp.fc_in.bias has values that are not finite" in done.err
    assert not any("loss" in line for line in Run(Path("out")).metrics()), "a step was taken"


def test_overflowing_base_module_is_named(shell, rows_file: Path) -> None:
    model = spoiled_model(rows_file, h_1_mlp_fc_in_weight=1e25, h_1_mlp_fc_out_weight=1e25)
    done = shell("finetune --recipe summarization --data rows.jsonl --output out --model", model)
    assert done.code == 1, done.err
    assert "validation loss before anything was trained is not finite, first in layer 2" in done.err
    assert "the output of transformer.h.1.mlp.fc_out" in done.err


@pytest.mark.sampled(2)
@pytest.mark.parametrize("place", ["device", "disk"])
def test_nonfinite_loss_changes_no_weight(place: str, shell, rows_file: Path) -> None:
    far = f"{TINY.replace('1e-2', '1e30')} --set warmup=0 --max-steps 3"
    done = shell(f"{far} --weights {place} --optimizer-state {place} --set clip_norm=null --output out")
    assert done.code == 1, done.err
    *_, first, second = done.err.strip().splitlines()
    assert first.startswith("gptj-ft: the loss after step 1 is not finite, first in layer 1 counted from the embedding")
    assert "the output of transformer.h.0." in first
    assert "a lower --lr or --set clip_norm=1.0" in second
    assert [line["step"] for line in Run(Path("out")).metrics() if "loss" in line] == [1]
    assert "NaN" not in Path("out/metrics.jsonl").read_text(encoding="utf-8")
    if place == "disk":  # the commit of step 1 is whole: from there it comes to the same
        again = shell("finetune --resume out")
        assert (again.code, first in again.err) == (1, True), again.err


def test_nonfinite_gradient_tensors_are_named(shell, rows_file: Path) -> None:
    with infinite_gradient(layer=2, steps=[2]):
        done = shell(f"{TINY} --max-steps 3 --output out --weights disk --optimizer-state disk")
    assert done.code == 1
    assert "the gradient of step 2 is not finite, first in layer 2" in done.err
    assert "in transformer.h.1.mlp.fc_in.bias" in done.err
    assert shell("finetune --resume out --json").code == 0
    straight = shell(f"{TINY} --max-steps 3 --output straight --weights disk --optimizer-state disk")
    assert straight.code == 0
    assert_same_weights(Path("straight/model"), Path("out/model"))


def test_damaged_checkpoint_prevents_resume(shell, rows_file: Path) -> None:
    with interrupting(1, by=signal.SIGTERM):
        assert shell(f"{TINY} --output out").code == 130
    (layer,) = Path("out").glob("checkpoints/*/layer-001.safetensors")
    os.truncate(layer, layer.stat().st_size - 4096)
    done = shell("finetune --resume out")
    assert done.code == 3
    assert "layer-001.safetensors is cut short" in done.err


@pytest.mark.thorough
def test_evaluation_while_training_changes_no_number(shell, rows_file: Path) -> None:
    assert shell(f"{TINY} --max-steps 4 --output plain").code == 0
    assert shell(f"{TINY} --max-steps 4 --output watched --set validate_every=1 --set save_every=1").code == 0
    assert_same_weights(Path("plain/model"), Path("watched/model"))


@pytest.mark.thorough
@pytest.mark.sampled(2)
@pytest.mark.parametrize("recipe", ["qa", "continuous-pretraining"])
def test_other_recipes_train_and_evaluate(recipe: str, shell) -> None:
    examples = Path(__file__).parents[2] / "examples"
    file = {"qa": examples / "clinic_qa.json", "continuous-pretraining": examples / "field_notes.txt"}[recipe]
    options = "--model tiny --max-steps 2 --batch-size 4 --max-length 128 --output out"
    done = shell(f"finetune --recipe {recipe} {options} --json --data", file)
    assert done.code == 0, done.err
    assert done.json["loss_after"] < done.json["loss_before"]
    done = shell("evaluate out --limit 3 --json")
    assert done.code == 0, done.err
    expected = {"qa": {"exact_match", "f1", "strict_match"}, "continuous-pretraining": set()}[recipe]
    assert set(done.json["model"]["scores"]) == {*expected, *LOSS_SCORES}
    if recipe == "qa":
        done = shell("generate --model out --json", "Who came?", "--field", "context=The vet came on Monday.")
        assert done.code == 0, done.err
        done = shell("generate --model out", "Who came?")
        assert (done.code, "--field context=" in done.err) == (2, True)


def test_validation_reads_one_pass_of_rows(tmp_path: Path, monkeypatch) -> None:
    from gptj_ft.data.batches import Rows
    from gptj_ft.streaming.open import open_for_inference
    from gptj_ft.training import row_scores

    class Read(list):
        """Rows that know how many of their tokens were read."""

        tokens = 0

        def __getitem__(self, number):
            Read.tokens += len(super().__getitem__(number))
            return super().__getitem__(number)

    session = small_session(tmp_path)
    generator = torch.Generator().manual_seed(2)
    documents = Read(torch.randint(1, 40, (5 + n % 9,), generator=generator).tolist() for n in range(60))
    rows = Rows(documents, [2] * 60, known_lengths=[5 + n % 9 for n in range(60)])
    most, measured = [], row_scores.evaluate_losses

    def watch(stack, batches, *objective):
        most.append((Read.tokens, sum(len(batch.tokens_T) for batch in batches)))
        return measured(stack, batches, *objective)

    monkeypatch.setattr(row_scores, "evaluate_losses", watch)
    with open_for_inference(tmp_path, session.device, torch.float32, "disk") as (_, stack):
        losses = []
        for pass_tokens in (30, 90, 10**6):
            most.clear()
            Read.tokens, computed = 0, 0
            stack.budget = replace(stack.budget, pass_tokens=pass_tokens)
            losses.append(row_scores.validate(stack, rows, 20, span_tokens=100))
            for read, tokens in most:
                assert tokens <= max(pass_tokens, 20)
                assert read <= computed + 100, "more rows were read than the next pass needs"
                computed += tokens
            assert computed == sum(rows.lengths)
    assert losses[0] == losses[1] == losses[2]


def test_validation_target_after_last_position_works(shell, tmp_path: Path) -> None:
    model = random_gpt2(**GPT2_SHAPES["gpt2"])
    model.save_pretrained("model")
    ids = torch.randint(0, 101, (8, model.config.n_positions + 1), generator=torch.Generator().manual_seed(3))
    for name, rows in (("train.jsonl", ids[:6]), ("validation.jsonl", ids[6:])):
        Path(name).write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows.tolist()))
    done = shell(
        "finetune --recipe continuous-pretraining --data train.jsonl --val-data validation.jsonl --model model "
        f"--max-length {model.config.n_positions} --max-steps 1 --set schedule=cosine --precision fp32 --output run"
    )
    assert done.code == 0, done.err
    with torch.no_grad():
        logits = model(ids[6:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[6:, 1:].flatten())
    assert Run(Path("run")).metrics()[0]["validation_loss"] == pytest.approx(float(expected), rel=1e-5)
