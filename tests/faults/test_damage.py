"""Damage files of runs, caches and models: rejected by name or rebuilt, never a silently different result."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from support.cli_runner import Shell
from support.fork_server import ForkServer
from support.small_run import assert_same_weights, weights_of
from support.stopped_runs import make_runs

from gptj_ft.checkpoints.metadata import read_metadata
from gptj_ft.config.run_folder import Run
from gptj_ft.evaluation.row_job import ResultCache
from gptj_ft.system.digests import read_sealed, sealed
from gptj_ft.system.paths import newest_run

OPTIONS = (
    "finetune --recipe summarization --data rows.jsonl --model tiny --lr 1e-2 --batch-size 8 --max-length 64 "
    "--set holdout=0.1 --precision fp32 --max-steps 4 --save-every 2"
)
PLACES = {
    "disk": "--weights disk --optimizer-state disk --keep all",
    "host": "--weights host --optimizer-state host",
    "lora": "--weights host --optimizer-state disk --method lora",
}
# Made for `test_800_damages_change_no_result_silently` only.
MORE_PLACES = {"int8": "--weights disk --optimizer-state disk --precision bf16 --set moments=int8 --set gradients=bf16"}


def make(folder: Path, places: Mapping[str, str] = PLACES) -> None:
    """Create, for each placement, a run stopped after 3 of 4 steps and the same run completed."""
    make_runs(folder, {place: f"{OPTIONS} {options}" for place, options in places.items()}, steps=3)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    make(folder)
    return folder


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy those runs to the working folder; their model and cache stay in the original home."""
    names = [name for place in PLACES for name in (place, f"{place}-done")]
    subprocess.run(["cp", "-a", *(made / name for name in names), made / "rows.jsonl", tmp_path], check=True)
    monkeypatch.setenv("GPTJ_FT_HOME", str(made / "home"))
    return tmp_path


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in ("run.lock", "log.txt", "environment.json")
    }


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.unlink()  # the same file may have other names
    path.write_bytes(data)


def change_digit(path: Path, key: str, value: object) -> None:
    values = json.loads(path.read_text())
    part = values
    *parents, last = key.split("/")
    for parent in parents:
        part = part[parent]
    assert last in part
    part[last] = value
    path.write_text(json.dumps(values))


# Damage to a stopped run, and words of the error message.
DAMAGE = {
    "no commit": ("disk", lambda run: (run / "state/commit.json").unlink(), "state/commit.json is missing"),
    "no state": ("disk", lambda run: shutil.rmtree(run / "state"), "state/commit.json is missing"),
    "empty commit": ("disk", lambda run: (run / "state/commit.json").write_text("{}"), "commit.json has no checksum"),
    "no checkpoints": ("host", lambda run: shutil.rmtree(run / "checkpoints"), "step-000003/manifest.json is missing"),
    "no record": ("lora", lambda run: (run / "run.json").unlink(), "run.json is missing"),
    "no base": ("lora", lambda run: (run / "base.json").unlink(), "base.json is missing"),
    "learning rate of a commit": (
        "disk", lambda run: change_digit(run / "state/commit.json", "update/lr", 4.1e-5), "commit.json is damaged",
    ),
    "facts of a manifest": (
        "host",
        lambda run: change_digit(run / "checkpoints/step-000003/manifest.json", "facts/updates_before", 4),
        "manifest.json is damaged",
    ),
    "brackets": ("disk", lambda run: (run / "state/commit.json").write_text("[" * 100_000), "commit.json cannot be"),
    "recipe": (
        "disk",
        lambda run: (run / "recipe.yaml").write_text((run / "recipe.yaml").read_text().replace("lr: 0.01", "lr: 0.02")),
        "recipe.yaml: lr is 0.02, but the run started with 0.01",
    ),
    "a token": (
        "host", lambda run: flip(run / "data/train/rows.arrow", 2000), "data/train: damaged prepared",
    ),
    "counts of rows": (
        "host", lambda run: change_digit(run / "data/train/manifest.json", "windows", 35), "train/manifest.json is d",
    ),
    "digests of the base": (
        "lora", lambda run: change_digit(run / "base.json", "config.json", {"bytes": 1}), "base.json is damaged",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_run_is_rejected_and_unchanged(name: str, here: Path, shell: Shell) -> None:
    place, damage, words = DAMAGE[name]
    damage(here / place)
    before = content(here / place)
    for command in (f"finetune --resume {place}", f"runs verify {place}"):
        done = shell(command)
        assert (done.code, words in done.said) == (3, True), done.said
    assert content(here / place) == before


@pytest.mark.thorough
def test_run_without_state_restarts_on_request(here: Path, shell: Shell) -> None:
    for place in ("disk", "host"):
        shutil.rmtree(here / place / ("state" if place == "disk" else "checkpoints"))
        shutil.rmtree(here / place / "checkpoints", ignore_errors=True)
        assert shell(f"runs clean {place}").code == 3
        done = shell(f"finetune --resume {place} --from start")
        assert (done.code, "validation loss after 0 steps" in done.err) == (0, True), done.err
        assert_same_weights(weights_of(here / place / "model"), weights_of(here / f"{place}-done" / "model"))
        assert [line["step"] for line in Run(here / place).metrics()] == [0, 1, 2, 3, 4, 4]


def test_moved_base_model_must_be_identical(here: Path, shell: Shell) -> None:
    base = Path(Run(here / "lora").recipe().model or "")
    shutil.copytree(base, here / "moved")
    shutil.copytree(base, here / "other")
    shard = here / "other" / "model-00002-of-00004.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(shard).items()}, shard, {"format": "pt"})
    recipe = here / "lora" / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace(str(base), "/gone"))
    done = shell("finetune --resume lora")
    assert (done.code, "add --model PATH" in done.err) == (2, True)
    done = shell("finetune --resume lora --model other")
    assert (done.code, f"{shard.name} has changed since the run began" in done.err) == (3, True)
    assert shell("finetune --resume lora --model moved").code == 0
    assert Run(here / "lora").recipe().model == str(here / "moved")
    assert (
        content(here / "lora" / "model")["adapter_model.safetensors"]
        == content(here / "lora-done" / "model")["adapter_model.safetensors"]
    )


def test_damaged_metrics_line_is_kept_and_reported(here: Path, shell: Shell) -> None:
    file = here / "disk" / "metrics.jsonl"
    lines = file.read_bytes().split(b"\n")
    for damaged in (b"[1,2]", lines[2].replace(b'"loss": ', b'"loss": 1'), b"\xff\xfe", b"{", b'{"step": 2}'):
        file.write_bytes(b"\n".join([*lines[:2], damaged, *lines[3:]]))
        assert shell("runs verify disk").out.startswith("disk/metrics.jsonl:3: damaged line after step 1")
        assert shell("report disk").code == 0
        (here / "disk" / "report.html").unlink()
    done = shell("finetune --resume disk")
    assert done.code == 0, done.err
    assert "disk/metrics.jsonl:3: damaged line after step 1" in done.err
    assert "disk/metrics.jsonl: no line for step 2 (1 of " in done.err
    assert file.read_bytes().split(b"\n")[2] == damaged
    assert_same_weights(weights_of(here / "disk/model"), weights_of(here / "disk-done/model"))


@pytest.mark.parametrize(
    ("left", "message"),
    [([1, 2, 3, 40], "steps 4 to 39 (36 of 40)"), ([], "steps 1 to 30 (30 of 30)"),
     ([*range(2, 31)], "step 1 (1 of 30)"),
     ([*range(1, 40, 2)], "steps 2, 4, 6, 8, 10, 12, 14, 16, 18, ... (19 of 39)"), ([*range(1, 31)], "")],
)  # fmt: skip
def test_missing_steps_are_named(tmp_path: Path, left: list[int], message: str) -> None:
    run = Run(tmp_path)
    lines = [json.dumps({"step": step, "loss": 1.0}) + "\n" for step in left]
    run.metrics_file.write_text("".join(lines))
    assert run.metrics_problems(30) == [f"{run.metrics_file}: no line for {message}"][: bool(message)]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "name", ["model-00002-of-00004.safetensors", "config.json", "gptj_ft.json", "tokenizer.json", "digests.json"]
)
def test_altered_tuned_model_is_rejected(name: str, here: Path, shell: Shell) -> None:
    model = here / "disk-done" / "model"
    whole = content(model)
    flip(model / name, len(whole[name]) - 20)
    for command in ("runs verify disk-done", "generate --model disk-done hello", "evaluate disk-done --limit 1"):
        done = shell(command)
        assert (done.code, f"disk-done/model/{name} " in done.said) == (3, True), (command, done.said)
    (model / name).write_bytes(whole[name])
    assert shell("runs verify disk-done").code == 0


def test_adapter_requires_its_base_model(here: Path, shell: Shell) -> None:
    base = Path(Run(here / "lora-done").recipe().model or "")
    other = here / "other"
    shutil.copytree(base, other)
    shard = other / "model-00002-of-00004.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(shard).items()}, shard, {"format": "pt"})
    model = here / "lora-done" / "model"
    config = json.loads((model / "adapter_config.json").read_text())
    (model / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": str(other)}))
    for command in (
        "generate --model lora-done hi",
        "evaluate lora-done --limit 1",
        "convert --merge lora-done",
    ):
        done = shell(command)
        assert (done.code, "is not the base model of the adapter in" in done.err) == (3, True), done.err


def test_damaged_cache_is_rebuilt(here: Path, shell: Shell, made: Path, monkeypatch) -> None:
    shutil.copytree(made / "home", here / "home")
    monkeypatch.setenv("GPTJ_FT_HOME", str(here / "home"))
    line = "prepare-data --recipe summarization --data rows.jsonl --model tiny --max-length 64 --output"
    assert shell(f"{line} whole").code == 0
    for name in ("rows.arrow", "manifest.json"):
        for file in (here / "home" / "data").glob(f"*/{name}"):
            flip(file, file.stat().st_size // 2)
        assert shell(f"{line} {name}").code == 0
        rows = [(here / folder / "rows.arrow").read_bytes() for folder in ("whole", name)]
        assert rows[0] == rows[1]


def test_damaged_evaluation_line_is_recomputed(own_home: Path) -> None:
    journal = ResultCache({"a": 1})
    journal.add("loss", {0: 1.25, 1: 2.5})
    journal.add("loss", {2: 3.75})
    whole = journal.path.read_bytes()
    for old, new in ((b"2.5", b"2.6"), (b"2.5", b"\xff"), (b'{"', b"[["), (b"loss", b"losz"), (b"{", b"[" * 100_000)):
        journal.path.write_bytes(whole.replace(old, new, 1))
        assert ResultCache({"a": 1}).of("loss") == {2: 3.75}
        assert not ResultCache({"a": 1}).of("losz")


@pytest.mark.parametrize("text", ["x" * 5000, "\0", "/nowhere"])
def test_damaged_latest_run_note_is_ignored(text: str, own_home: Path) -> None:
    own_home.mkdir()
    (own_home / "newest-run").write_text(text)
    assert newest_run() is None


def test_near_checkpoint_folder_names_are_ignored(here: Path) -> None:
    for name in ("step-²", "step-", "step-000002.tmp", "step-٣", f"step-{'9' * 200}"):
        (here / "disk" / "checkpoints" / name).mkdir()
        (here / "disk" / "checkpoints" / name / "manifest.json").write_text("{}")
    assert list(Run(here / "disk").whole_checkpoints()) == [2]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dtype", "float22"),
        ("layer_norm_epsilon", "x"),
        ("n_layer", 10**9),
        ("n_layer", 900),
        ("n_head", True),
        ("n_inner", "x"),
    ],
)
def test_invalid_config_values_are_named(key: str, value: object, here: Path, shell: Shell) -> None:
    model = here / "disk-done" / "model"
    values = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**values, key: value}))
    (model / "digests.json").unlink()
    done = shell("generate --model disk-done hi")
    assert (done.code, key in done.err) == (3, True), done.err


def test_sealed_file_rejects_any_change(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text(json.dumps(sealed({"a": [1.5, "é"], "b": None})))
    assert read_sealed(path) == {"a": [1.5, "é"], "b": None}
    os.truncate(path, 5)


# Attacks, trials of each, and the command on the damaged files: resume a run, use a cache, prompt a model.
CAMPAIGN = {"disk": 190, "host": 130, "lora": 110, "int8": 150, "cache": 60, "disk-done": 90, "lora-done": 70}
ODD_VALUES = (None, "x", -1, 0, 10**9, float("nan"), 1e308, [], {}, [[1]], True, "\u0000")


@dataclass
class Trial:
    """Record one damage: the file, the change, the outcome."""

    number: int
    attack: str
    damage: str = ""
    output: str = ""
    codes: tuple[int, ...] = ()
    outcome: object = None


class Damager:
    """Damage one file of a folder; the trial number is the seed."""

    def __init__(self, number: int) -> None:
        self._random = random.Random(number)

    def damage(self, folder: Path) -> str:
        """Damage a file; return a description of the change."""
        files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in UNREAD]
        path = self._random.choice([path for path in files if path.stat().st_size])
        data = path.read_bytes()
        is_text = path.suffix in (".json", ".jsonl", ".yaml")
        kinds = [self.flip, self.cut, self.zero, *((self.digit, self.digit, self.value) if is_text else (self.header,))]
        kind = self._random.choice(kinds)
        if (damaged := kind(data)) == data:
            kind, damaged = self.flip, self.flip(data)
        path.unlink()  # the same file may have other names
        path.write_bytes(damaged)
        return f"{kind.__name__} in {path.relative_to(folder)}"

    def flip(self, data: bytes) -> bytes:
        at = self._random.randrange(len(data))
        return data[:at] + bytes([data[at] ^ 1 << self._random.randrange(8)]) + data[at + 1 :]

    def header(self, data: bytes) -> bytes:
        at = self._random.randrange(min(len(data), 600))
        return data[:at] + bytes([data[at] ^ 1 << self._random.randrange(8)]) + data[at + 1 :]

    def cut(self, data: bytes) -> bytes:
        return data[: self._random.randrange(len(data))]

    def zero(self, data: bytes) -> bytes:
        at = self._random.randrange(len(data))
        size = min(self._random.choice((1, 16, 512, 4096)), len(data) - at)
        return data[:at] + bytes(size) + data[at + size :]

    def digit(self, data: bytes) -> bytes:
        places = [at for at, byte in enumerate(data) if chr(byte) in "0123456789"]
        if not places:
            return data
        at = self._random.choice(places)
        return data[:at] + self._random.choice([b"0", b"1", b"4", b"9"]) + data[at + 1 :]

    def value(self, data: bytes) -> bytes:
        try:
            values = json.loads(data)
        except ValueError:  # lines, or YAML
            lines = data.split(b"\n")
            lines[self._random.randrange(len(lines))] = json.dumps(self._random.choice(ODD_VALUES)).encode()
            return b"\n".join(lines)
        part: Any = values
        while True:
            key = self._random.choice(list(part) if isinstance(part, dict) else list(range(len(part))))
            if not isinstance(part[key], dict | list) or not part[key] or self._random.random() < 0.3:
                break
            part = part[key]
        part[key] = self._random.choice(ODD_VALUES)
        return json.dumps(values).encode()


UNREAD = {"run.lock", "log.txt", "README.md", "environment.json", "report.html"}


class Campaign:
    """Run commands on damaged copies of the runs, in forks of one process."""

    def __init__(self, made: Path, work: Path) -> None:
        self._made, self._work, self._server = made, work, ForkServer()
        self._machine: bytes | None = None
        self.expected = {
            (attack, way): self.run(Trial(way - 2, attack)).outcome for attack in CAMPAIGN for way in range(2)
        }

    def run(self, trial: Trial) -> Trial:
        """Run a trial. Negative numbers damage nothing; odd numbers write with the model, even ones read."""
        folder, attack = self._work / "trial", trial.attack
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "home").mkdir(parents=True)
        if attack == "cache":
            subprocess.run(["cp", "-a", self._made / "home" / "models", folder / "home"], check=True)
            subprocess.run(["cp", "-a", self._made / "home" / "data", folder / "home"], check=True)
            shutil.copy(self._made / "rows.jsonl", folder)
        else:
            subprocess.run(["cp", "-a", self._made / attack, folder / "run"], check=True)
        if self._machine:
            (folder / "home" / "machine.json").write_bytes(self._machine)
        if trial.number >= 0:
            part = {"cache": "home/data", "disk-done": "run/model", "lora-done": "run/model"}.get(attack, "run")
            trial.damage = Damager(trial.number).damage(folder / part)
        if attack == "cache":
            codes = [self._server.run(f"{OPTIONS} --output run".replace("-steps 4", "-steps 1"), folder)[0]]
        else:
            is_asked = attack.endswith("done")
            asked = "generate --model run --max-new-tokens 6 --json printer" if trial.number % 2 else EVALUATE
            commands = ("runs verify run", asked if is_asked else "finetune --resume run")
            codes = [self._server.run(command, folder)[0] for command in commands]
        trial.output, trial.codes = (folder / "output.txt").read_text(encoding="utf-8"), tuple(codes)
        self._machine = self._machine or (folder / "home" / "machine.json").read_bytes()
        if codes[-1] == 0:
            trial.outcome = self._outcome(folder, trial)
        return trial

    def _outcome(self, folder: Path, trial: Trial) -> object:
        if trial.attack.endswith("done"):
            answer = json.loads(trial.output[trial.output.rindex("\n{") if "\n{" in trial.output else 0 :])
            return answer.get("text") or (answer["model"]["loss"], answer["model"]["scores"])
        run = Run(folder / "run")
        losses = [(line["step"], line.get("loss"), line.get("validation_loss")) for line in run.metrics()]
        files = {path.name: path.read_bytes() for path in run.model.iterdir() if path.suffix == ".safetensors"}
        return losses, files, read_metadata(run.model)

    def close(self) -> None:
        self._server.close()


EVALUATE = "evaluate run --limit 2 --baseline none --set metrics=[] --json"


def compare_models(trial: Trial, expected: object) -> str:
    """Classify a trial: ``same``, ``told``, ``refused``; in capitals if it must not happen."""
    if "Traceback" in trial.output or trial.codes[-1] not in (0, 2, 3, 4) or trial.codes[0] not in (0, 2, 3):
        return "TRACEBACK"
    if trial.codes[-1]:
        if trial.attack == "cache":
            return "REFUSED"
        return "refused" if trial.codes[0] else "NOT VERIFIED"
    if trial.outcome == expected:
        return "same"
    # Only people read the metrics of finished steps; they are warned.
    is_run = trial.attack in PLACES | MORE_PLACES
    is_told = is_run and trial.outcome[1:] == expected[1:] and "metrics.jsonl" in trial.output
    return "told" if is_told and trial.codes[0] else "SILENT"


@pytest.mark.slow
def test_800_damages_change_no_result_silently(tmp_path: Path) -> None:
    made = tmp_path / "made"
    made.mkdir()
    make(made, PLACES | MORE_PLACES)
    campaign = Campaign(made, tmp_path)
    counts: Counter[tuple[str, str]] = Counter()
    failures = []
    numbers = itertools.count(int(os.environ.get("DAMAGE_SEED", "0")))
    for attack, trials in CAMPAIGN.items():
        for trial in (campaign.run(Trial(next(numbers), attack)) for _ in range(trials)):
            result = compare_models(trial, campaign.expected[attack, trial.number % 2])
            counts[attack, result] += 1
            if result.isupper():
                what = f"{result}: {trial.number}, {attack}: {trial.damage}, {trial.codes}"
                failures.append(f"{what}\n{trial.output[-900:]}")
                print(failures[-1], flush=True)
    campaign.close()
    print(dict(counts))
    assert not failures, "\n\n".join(failures)
