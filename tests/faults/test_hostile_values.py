"""Replace values in the files of a run, with correct checksums: one line and an exit code, no hang."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.cli_runner import Shell
from support.stopped_runs import make_runs

from gptj_ft.system.digests import KEY, sealed

OPTIONS = (
    "finetune --recipe summarization --data rows.jsonl --model tiny --lr 1e-2 --batch-size 8 --max-length 64 "
    "--set holdout=0.1 --max-steps 3 --save-every 1 --validate-every 1"
)
RUNS = {
    "disk": "--precision fp32 --weights disk --optimizer-state disk --keep all,best --set patience=9",
    "host": "--precision fp16 --weights host --optimizer-state host --keep all",
    "sampled": "--precision fp32 --weights disk --optimizer-state disk --method sampled --set sampled.layers=1",
}
HOSTILE = (
    10**9, 10**18, -1, 2**63, 10**400, 1e308, -0.5, math.nan, math.inf, "x", "\x1b[2J\x07", "9" * 100_000, "../x", "",
    None, True, [], [1], [[]], {}, {"a": 1}, {"step": 10**12},
)  # fmt: skip
LIMIT_SECONDS = 30
CHECKED = ("metrics.jsonl", "commit.json", "run.json", "base.json", "environment.json", "manifest.json")
COMMANDS = (
    "runs verify {run}", "runs list {run} --json", "report {run}", "runs export {run} --output exported",
    "finetune --resume {run} --quiet",
)  # fmt: skip


def json_files(run: Path) -> list[Path]:
    return sorted(path for path in run.rglob("*.json*") if path.suffix in (".json", ".jsonl") and path.is_file())


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in a JSON value, objects and lists too."""
    if path:
        yield path
    for key, each in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        if key != KEY:
            yield from leaves(each, (*path, key))


def replace_value(file: Path, random: Random) -> str:
    """Replace one value of a file, or add one, with a correct checksum; describe the change."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.suffix == ".jsonl" else [file.read_text()]
    number = random.randrange(len(lines))
    path, value = random.choice([*leaves(json.loads(lines[number])), ("surplus",)]), random.choice(HOSTILE)
    set_value(file, number, path, value)
    return f"{file}:{number + 1} {path} = {str(value)[:40]!r}"


def set_value(file: Path, number: int, path: tuple[Any, ...], value: Any) -> None:
    lines = file.read_text(encoding="utf-8").splitlines() if file.suffix == ".jsonl" else [file.read_text()]
    values = json.loads(lines[number])
    *parents, last = path
    part = values
    for key in parents:
        part = part[key]
    part[last] = value
    if KEY in values:
        values = sealed({name: each for name, each in values.items() if name != KEY})
    lines[number] = json.dumps(values)
    file.unlink()
    file.write_text("\n".join([*lines, ""]) if file.suffix == ".jsonl" else lines[0], encoding="utf-8")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make runs that stopped after two of three steps."""
    folder = tmp_path_factory.mktemp("made")
    make_runs(folder, {name: f"{OPTIONS} {options}" for name, options in RUNS.items()}, steps=2)
    return folder


# Values that hung `runs verify`, or ended it or a resume with a traceback.
FOUND = [
    ("disk", "metrics.jsonl", ("step",), 10**12, "damaged line"),
    ("disk", "metrics.jsonl", ("memory_bytes",), None, "damaged line"),
    ("disk", "metrics.jsonl", ("seconds",), "x", "damaged line"),
    ("disk", "state/commit.json", ("step",), 10**12, "commit.json is damaged: step: "),
    ("disk", "state/commit.json", ("facts", "updates_before"), 10**400, "damaged: facts.updates_before: "),
    ("disk", "state/commit.json", ("facts", "best"), 1, "damaged: facts.best: "),
    ("disk", "state/commit.json", ("facts", "best", "step"), [], "damaged: facts.best.step: "),
    ("disk", "state/commit.json", ("update",), {"a": 1}, "damaged: update."),
    ("disk", "state/commit.json", ("update", "num_skipped"), "x", "damaged: update.num_skipped: "),
    ("host", "checkpoints/step-000002/manifest.json", ("facts", "loss_scale"), 1e308, "damaged: facts.loss_scale: "),
    ("host", "checkpoints/step-000002/manifest.json", ("facts", "loss_scale", "growth_tracker"), "9", "growth_tracker"),
    ("sampled", "state/commit.json", ("facts", "layer_updates"), None, "damaged: facts.layer_updates: "),
    ("sampled", "state/commit.json", ("facts", "layer_updates"), [1, 1, 1], "damaged: facts.layer_updates: "),
    ("sampled", "state/commit.json", ("facts", "layer_updates", 0), 9, "damaged: facts.layer_updates: "),
    ("disk", "state/commit.json", ("facts", "layer_updates"), [1, 1, 1, 1], "damaged: facts.layer_updates: "),
    ("host", "run.json", ("saved",), "../../x", "run.json is damaged: saved: "),
    ("host", "base.json", ("config.json",), [], "base.json is damaged: config.json: "),
    ("host", "data/train/manifest.json", ("windows",), -1, "manifest.json is damaged: windows: "),
    ("host", "data/train/manifest.json", ("settings", "max_length"), "x", "damaged: settings.max_length: "),
    ("host", "data/train/manifest.json", ("rows_skipped",), {"a": {"count": [], "first": []}}, "skipped.a.count: "),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "file", "path", "value", "said"), FOUND)
def test_hostile_values_are_named_in_a_line(
    name: str, file: str, path: Any, value: Any, said: str, made: Path, tmp_path: Path, monkeypatch: Any, shell: Shell
) -> None:
    monkeypatch.setenv("GPTJ_FT_HOME", str(made / "home"))
    monkeypatch.chdir(tmp_path)
    shutil.copytree(made / name, name)
    set_value(Path(name) / file, -1, path, value)
    for command in ("runs verify", "finetune --resume"):
        outcome = shell(f"{command} {name}")
        assert (outcome.code, said in outcome.said) == (3, True), outcome.said
        assert len(outcome.said) < 3000


@pytest.mark.parametrize("undefined", [math.nan, None])  # of an earlier version, of this one
def test_scores_of_no_items_are_not_damage(
    undefined: float | None, made: Path, tmp_path: Path, monkeypatch: Any, shell: Shell
) -> None:
    monkeypatch.setenv("GPTJ_FT_HOME", str(made / "home"))
    monkeypatch.chdir(tmp_path)
    shutil.copytree(made / "disk", "disk")
    set_value(Path("disk/metrics.jsonl"), -1, ("scores",), {"f1": undefined, "perplexity": math.inf})
    for command in ("runs verify", "report", "finetune --resume"):
        outcome = shell(f"{command} disk")
        assert outcome.code == 0, outcome.said


@pytest.mark.parametrize("value", ["x", [], -1, 10**400])
def test_listed_runs_have_checked_sizes(value: Any, made: Path, tmp_path: Path, monkeypatch: Any, shell: Shell) -> None:
    monkeypatch.setenv("GPTJ_FT_HOME", str(made / "home"))
    monkeypatch.chdir(tmp_path)
    shutil.copytree(made / "host", "host")
    set_value(Path("host/data/train/manifest.json"), -1, ("windows",), value)
    (listed,) = shell("runs list host --json").json["runs"]
    assert listed["steps"] is None
    assert "manifest.json is damaged: windows: " in listed["problem"]


@pytest.mark.parametrize(
    ("option", "value"),
    [("threads", 10**9), ("replicas", 10**18), ("epochs", 1e308), ("max_steps", 10**12), ("max_length", 2**40)],
)
def test_hostile_option_of_run_is_named(
    option: str, value: float, made: Path, tmp_path: Path, monkeypatch: Any, shell: Shell
) -> None:
    monkeypatch.setenv("GPTJ_FT_HOME", str(made / "home"))
    monkeypatch.chdir(tmp_path)
    shutil.copytree(made / "host", "host")
    file = Path("host/recipe.yaml")
    lines = [line for line in file.read_text().splitlines() if not line.startswith(f"{option}:")]
    file.unlink()
    file.write_text("\n".join([*lines, f"{option}: {value}", ""]))
    done = shell("finetune --resume host")
    assert (done.code, f"recipe: {option}: Input should be less than" in done.said) == (2, True), done.said
    assert f"{option}: Input should be" in shell("runs list host --json").json["runs"][0]["problem"]


@pytest.mark.slow
def test_random_hostile_values_end_in_a_line(made: Path, tmp_path: Path, monkeypatch: Any, shell: Shell) -> None:
    monkeypatch.setenv("GPTJ_FT_HOME", str(made / "home"))
    monkeypatch.chdir(tmp_path)
    for number in range(200):
        random = Random(number)
        name = random.choice(["disk", "host", "disk-done", "host-done"])
        shutil.rmtree(name, ignore_errors=True)
        shutil.copytree(made / name, name)
        files = [path for path in json_files(Path(name)) if path.name in CHECKED]
        change = replace_value(random.choice(files), random)
        for command in COMMANDS:
            began = time.monotonic()
            outcome = shell(command.format(run=name))
            assert outcome.code in range(8), change
            assert "\x1b" not in outcome.out + outcome.err, change
            assert time.monotonic() - began < LIMIT_SECONDS, change
