"""Compare losses (bit for bit), `--json` objects, help pages and old run folders with committed texts.

Everything goes through the command line and public file formats. `pytest tests/golden --update-golden` rewrites the
texts, and the losses for this kind of machine only. Tests use one thread, because results depend on their number.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors import safe_open
from support.recipe_table import RecipeTable

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
LOSSES, JSON, HELP, OLD = HERE / "losses", HERE / "json", HERE / "help", HERE / "old"
RECIPES = HERE / "recipes.json"
SHOW = "recipes-show-"
NUM_STEPS = 20
# Instruction sets order sums differently, and 20 steps amplify the difference. Measured between AVX-512 and emulated
# AVX2: up to 2.5e-7 in fp32, 2.2e-3 in bf16.
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
JSON_TOLERANCE = 1e-3  # in fp32, but with differences of losses that are close to each other
ON_DEVICE = "--device cpu --weights device --optimizer-state device --activations keep"
ON_DISK = "--device cpu --weights disk --optimizer-state disk --activations recompute --boundaries disk"


@dataclass(frozen=True)
class Machine:
    """Identify the processor kind and torch release, which decide the last bit."""

    kind: str
    torch: str

    @classmethod
    def here(cls) -> Machine:
        """Return the current machine; instruction sets disabled by the user make it an emulated one."""
        facts = Path("/proc/cpuinfo")
        text = facts.read_text(encoding="utf-8") if facts.is_file() else ""
        flags = set(re.findall(r"\w+", text.partition("flags")[2].partition("\n")[0]))
        vendor = next((name for name in ("Intel", "AMD") if name in text), platform.machine())
        instructions = torch.backends.cpu.get_cpu_capability().lower()
        if instructions == "avx512":
            instructions = next((flag for flag in ("amx_bf16", "avx512_bf16") if flag in flags), instructions)
        emulated = "-emulated" if instructions == "avx2" and "avx512f" in flags else ""
        return cls(f"{vendor}-{instructions}{emulated}".lower(), torch.__version__)

    @classmethod
    def of(cls, file: Path) -> Machine:
        return cls(**json.loads(file.read_text(encoding="utf-8")))

    def write(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"kind": self.kind, "torch": self.torch}, indent=1) + "\n", encoding="utf-8")


MACHINE = Machine.here()


@pytest.fixture
def updating(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-golden"))


@pytest.fixture(scope="module")
def lasting_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Share one home with the tiny models and tokenized rows between all tests."""
    return tmp_path_factory.mktemp("golden") / "home"


@pytest.fixture(autouse=True)
def rows(tmp_path: Path) -> None:
    """Write part of the example data to the working folder: rows.jsonl, val.jsonl."""
    lines = (EXAMPLES / "clinic_notes_train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "rows.jsonl").write_text("".join(lines[:44]), encoding="utf-8")
    (tmp_path / "val.jsonl").write_text("".join(lines[44:47]), encoding="utf-8")


def train_line(family: str, method: str, precision: str) -> str:
    model = {"gptj": "tiny", "gpt2": "tiny-gpt2"}[family]
    lora = " --set lora.dropout=0.1" if method == "lora" else ""
    return (
        f"--recipe summarization --data rows.jsonl --model {model} --set method={method}{lora} --precision {precision}"
        f" --set lr=1e-3 --max-steps {NUM_STEPS} --batch-size 3 --max-length 64 --set micro_batch_tokens=64"
    )


def digest(model: Path) -> str:
    """Return the SHA-256 over all tensors of a model folder, sorted by name: name, dtype, shape, bytes."""
    tensors = {}
    for file in model.glob("*.safetensors"):
        with safe_open(file, "pt") as stored:
            tensors.update({name: stored.get_tensor(name) for name in stored.keys()})  # noqa: SIM118
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        total.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
    return total.hexdigest()


def records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def curve(run: Path) -> str:
    """Format the losses of a run: one line per record of metrics.jsonl, then the digest of the weights."""
    names = ("step", "loss", "grad_norm", "validation_loss")
    lines = [" ".join(repr(record[name]) if name in record else "-" for name in names) for record in records(run)]
    return "\n".join([" ".join(names), *lines, f"sha256 {digest(run / 'model')}"]) + "\n"


def numbers(text: str) -> list[float]:
    """Parse the numbers of a curve, without header and digest."""
    return [math.nan if word == "-" else float(word) for line in text.splitlines()[1:-1] for word in line.split()]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("family", ["gptj", "gpt2"])
def test_golden_losses(shell, monkeypatch, lasting_home, updating, family, method, precision) -> None:
    monkeypatch.setenv("GPTJ_FT_HOME", str(lasting_home))
    name, curves = f"{family}-{method}-{precision}.txt", {}
    for place, options in (("device", ON_DEVICE), ("disk", ON_DISK)):
        line = train_line(family, method, precision)
        done = shell(f"finetune {line} --val-data val.jsonl {options} --output {place} --quiet")
        assert done.code == 0, done.said
        curves[place] = curve(Path(place))
    assert curves["device"] == curves["disk"]
    assert len(curves["disk"].splitlines()) == 1 + NUM_STEPS + 2 + 1

    kept = LOSSES / MACHINE.kind
    if updating:
        MACHINE.write(kept / "machine.json")
        (kept / name).write_text(curves["disk"], encoding="utf-8")
    for folder in sorted(file.parent for file in LOSSES.glob(f"*/{name}")):
        golden = (folder / name).read_text(encoding="utf-8")
        if Machine.of(folder / "machine.json") == MACHINE:
            assert curves["disk"] == golden
        else:
            assert numbers(curves["disk"]) == pytest.approx(numbers(golden), rel=TOLERANCE[precision], nan_ok=True)


SIX_BILLION = {
    "model_type": "gptj",
    "architectures": ["GPTJForCausalLM"],
    "n_embd": 4096,
    "n_layer": 28,
    "n_head": 16,
    "n_positions": 2048,
    "rotary_dim": 64,
    "vocab_size": 50400,
    "activation_function": "gelu_new",
    "tie_word_embeddings": False,
}
PLANS = {
    f"plan-{family}-{method}-{precision}-{place}": f"plan {train_line(family, method, precision)} {options}"
    for family in ("gptj", "gpt2")
    for method in ("full", "lora")
    for precision in ("fp32", "bf16")
    for place, options in (("device", ON_DEVICE), ("disk", ON_DISK))
} | {
    f"plan-6b-{method}-{precision}-disk": (
        f"plan --recipe summarization --model six --set method={method} --precision {precision} {ON_DISK}"
        " --device-memory 12GB --host-memory 12GB"
    )
    for method in ("full", "lora")
    for precision in ("fp32", "bf16")
}
TRAIN = train_line("gptj", "full", "fp32").replace(f"--max-steps {NUM_STEPS}", "--max-steps 4")
PRESETS = sorted(file.stem for file in (HERE.parents[1] / "recipes").glob("*.yaml"))
# Commands run in this order in one working folder. A repeated command has a suffix.
COMMANDS = {
    "recipes-list": "recipes list",
    **{f"{SHOW}{name}": f"recipes show {name}" for name in ["custom", *PRESETS]},
    f"{SHOW}custom-lora": "recipes show custom --set method=lora",
    "prepare-data": "prepare-data --recipe summarization --data rows.jsonl --model tiny --output data",
    **PLANS,
    "finetune-dry-run": f"finetune {TRAIN} --val-data val.jsonl {ON_DEVICE} --output runs/a --dry-run",
    "finetune": f"finetune {TRAIN} --val-data val.jsonl {ON_DEVICE} --save-every 2 --keep all --output runs/a",
    "search": f"search {TRAIN} --lr 1e-3,3e-3,1e-2 --val-data val.jsonl {ON_DEVICE} --output found",
    "finetune-resume-error": "finetune --resume runs/a --max-steps 6",
    "finetune-lora": (
        f"finetune {TRAIN.replace('full', 'lora')} --val-data val.jsonl {ON_DISK} --output runs/b --set lora.merge=true"
    ),
    "finetune-error": "finetune --recipe nothing",
    "evaluate": "evaluate runs/a --data val.jsonl --set generation.max_new_tokens=8 --precision fp32",
    "evaluate-lora": "evaluate runs/b --data val.jsonl --set generation.max_new_tokens=8 --precision fp32",
    "evaluate-dry-run": "evaluate runs/a --data val.jsonl --dry-run --precision fp32 --weights disk",
    "generate": 'generate --model runs/a --max-new-tokens 8 --precision fp32 "Seen for a cough."',
    "generate-samples": (
        "generate --model runs/b --max-new-tokens 8 --precision fp32 --temperature 1 --num-return 2 --seed 3 Cough."
    ),
    "generate-rows": (
        "generate --model runs/a --max-new-tokens 8 --precision fp32 --input val.jsonl --output answers.jsonl"
    ),
    "convert": "convert runs/a/model converted --to huggingface",
    "convert-check": "convert runs/a/model converted --check",
    "convert-mesh": "convert runs/a/model mesh --to mesh --mesh-shards 2",
    "runs": "runs",
    "runs-list": "runs list",
    "runs-verify": "runs verify runs/a",
    "runs-export": "runs export runs/a exported --from step-000002",
    "runs-clean": "runs clean runs/a",
    "report": "report runs/a runs/b --output page.html",
    "watch": "watch runs/a",
    "models": "models",
    "models-list": "models list",
    "models-remove": "models remove MODEL",
    "cache-list": "cache list",
    "cache-clear": "cache clear",
    "download-error": "download --offline",
}
# Values that depend on machine, time or file system: only their type is compared.
VOLATILE = re.compile(
    r"(.*_)?seconds|.*_per_second|.*_gflops|[mh]fu|stall|memory_bytes|have|started|ended|saved_at|.*_bytes"
)
# What a plan counts is the same everywhere, except for what there is of it; rates are fixed by conftest. A replay's
# seconds are, too, but for the order in which fractions are summed, and kernels that a processor does without.
VOLATILE_IN_PLANS = re.compile(r"have|load|timeline")
PLAN_TOLERANCE = 0.01
# Their numbers, or those of adapters in them, were recorded on another processor than those of machine.json.
FROM_ELSEWHERE = ("finetune-lora", "evaluate-lora", "search", "runs", "runs-list")
SIZES_ON_DISK = re.compile(r"bytes|.*_bytes")


def is_volatile(name: str, key: str) -> bool:
    if name.startswith("plan") or name.endswith("dry-run"):
        return VOLATILE_IN_PLANS.fullmatch(key) is not None
    on_disk = name.split("-")[0] in ("runs", "cache", "models") and SIZES_ON_DISK.fullmatch(key)
    return bool(on_disk or VOLATILE.fullmatch(key))


def normalised(value: Any, name: str, places: dict[str, str]) -> Any:
    """Replace paths, and values that differ between any two calls, by placeholders."""
    if isinstance(value, dict):
        return {
            key: f"<{type(each).__name__}>" if is_volatile(name, key) else normalised(each, name, places)
            for key, each in value.items()
        }
    if isinstance(value, list):
        return [normalised(each, name, places) for each in value]
    if isinstance(value, str):
        for path, word in places.items():
            value = value.replace(path, word)
        value = re.sub(r"\b[0-9a-f]{32}\b", "DIGEST", value)  # of where the rows are, among others
    return value


def differences(ours: Any, golden: Any, rel: float, at: str) -> Iterator[str]:
    """Yield the differences of two objects.

    With a relative tolerance, fractions may differ by it and generated texts may differ freely: a random
    model's likeliest tokens are nearly tied.
    """
    if isinstance(ours, dict) and isinstance(golden, dict):
        if list(ours) != list(golden):
            yield f"{at}: keys {list(ours)}, golden {list(golden)}"
        for key in ours.keys() & golden.keys() - ({"text", "texts"} if rel else set()):
            yield from differences(ours[key], golden[key], rel, f"{at}.{key}")
    elif isinstance(ours, list) and isinstance(golden, list) and len(ours) == len(golden):
        for i, (our, theirs) in enumerate(zip(ours, golden, strict=True)):
            yield from differences(our, theirs, rel, f"{at}[{i}]")
    elif isinstance(ours, float) and isinstance(golden, float) and math.isclose(ours, golden, rel_tol=rel):
        pass
    elif type(ours) is not type(golden) or ours != golden:
        yield f"{at}: {ours!r}, golden {golden!r}"


@pytest.fixture
def free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix the free memory and the bf16 unit: a plan sizes its buffers by them."""
    memory = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(available=64 * 10**9))
    monkeypatch.setattr("gptj_ft.system.cgroup.memory_limits", list)
    monkeypatch.setattr("gptj_ft.planning.memory.bf16_unit", lambda: "AVX-512")
    monkeypatch.setattr("gptj_ft.planning.machine_profile.emulates_bf16", lambda: False)


@pytest.mark.usefixtures("free_memory")
@pytest.mark.parametrize("plans_apart", [8, pytest.param(1, marks=pytest.mark.thorough)], ids=["few plans", "all"])
def test_golden_json(shell, tmp_path, own_home, updating, plans_apart) -> None:
    (tmp_path / "six").mkdir()
    (tmp_path / "six" / "config.json").write_text(json.dumps(SIX_BILLION), encoding="utf-8")
    places = {str(own_home): "HOME", str(tmp_path): "FOLDER"}
    found, recipes = [], RecipeTable(RECIPES)
    left_out = {name for number, name in enumerate(PLANS) if number % plans_apart and not updating}
    for name, line in COMMANDS.items():
        if name in left_out:
            continue
        words = line.replace("MODEL", " ".join(each.name for each in (own_home / "models").glob("tiny-gpt2-*")))
        codes = {0, 4} if "-6b-" in name else {2} if name.endswith("-error") else {0}
        done = shell(f"{words} --json")
        assert done.code in codes, (line, done.said)
        ours = normalised(done.json, name, places)
        if "-6b-" in name:  # whether six billion parameters fit depends on the disk, and in a container on its memory
            if done.json["needs"][0]["have"] < 12 * 10**9:
                continue
            ours = {key: value for key, value in ours.items() if key not in ("error", "exit_code")}
        if updating:
            MACHINE.write(HERE / "machine.json")
        if name.startswith(SHOW):
            recipe = name.removeprefix(SHOW)
            if updating:
                recipes[recipe] = ours
            golden = recipes[recipe]
        else:
            file = JSON / f"{name}.json"
            if updating:
                file.parent.mkdir(exist_ok=True)
                file.write_text(json.dumps(ours, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            golden = json.loads(file.read_text(encoding="utf-8"))
        is_exact = Machine.of(HERE / "machine.json") == MACHINE and name not in FROM_ELSEWHERE
        tolerance = PLAN_TOLERANCE if name.startswith("plan") else 0.0 if is_exact else JSON_TOLERANCE
        found += differences(ours, golden, tolerance, name)
    assert not found, "\n".join(found)
    assert {*(file.stem for file in JSON.iterdir()), *(SHOW + name for name in recipes)} == COMMANDS.keys()


def pages(shell) -> Iterator[tuple[str, str]]:
    """Yield every command with its help page, following the help of its group."""
    waiting = [""]
    while waiting:
        command = waiting.pop(0)
        text = shell(f"{command} --help").out
        yield command, text
        if "COMMAND [ARGS]" in text:
            for heading, lines in re.findall(r"^(\w[\w ]*):\n((?:  .*\n)+)", text, re.MULTILINE):
                if heading not in ("Options", "Arguments", "Example", "Examples"):
                    waiting += [f"{command} {each}".strip() for each in re.findall(r"^  ([a-z-]+)", lines, re.M)]


def test_golden_help(shell, monkeypatch, updating) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    texts = {}
    for command, text in pages(shell):
        name = "-".join(["gptj-ft", *command.split()])
        texts[f"{name}.txt"] = text
        if "--help-all" in text:
            texts[f"{name}-all.txt"] = shell(f"{command} --help-all").out
        if "  --json " in text and command not in (
            "doctor",
            "predict",
            "prove",
        ):  # see test_doctor, test_labelled, test_proof
            assert any(each.startswith("-".join(command.split())) for each in COMMANDS), f"{command} --json is untested"
    if updating:
        HELP.mkdir(exist_ok=True)
        for file in HELP.iterdir():
            file.unlink()
        for name, text in texts.items():
            (HELP / name).write_text(text, encoding="utf-8")
    assert len(texts) > 25
    assert texts == {file.name: file.read_text(encoding="utf-8") for file in HELP.iterdir()}


@pytest.fixture
def old_folders(tmp_path: Path) -> Path:
    """Folders that other commits wrote, unpacked: a model, runs of 8 steps from it, and the same ones stopped.

    All of commit 221bc31, and those named *-now of commit 8dbdbb0, whose runs have digests. Twelve rows of the example
    data, three a step, one thread, fp32; full: everything on disk; lora: everything in memory.
    """
    folder = tmp_path / "old"
    for file in OLD.glob("*/*.tar.gz"):
        with tarfile.open(file) as archive:
            archive.extractall(folder, filter="data")
    return folder


def point_to_base(folders: Path) -> None:
    """Update the path of the runs' base model, as the error message suggests."""
    for file in (*folders.glob("*/recipe.yaml"), *folders.glob("*/model/adapter_config.json")):
        text = file.read_text(encoding="utf-8")
        assert "/tmp/old/model" in text
        file.write_text(text.replace("/tmp/old/model", str(folders / "model")), encoding="utf-8")


def test_old_models_open(shell, old_folders) -> None:
    gone = shell(f"evaluate {old_folders}/lora")
    assert gone.code == 2
    assert "is an adapter for /tmp/old/model, which does not exist" in gone.said
    assert "base_model_name_or_path" in gone.said
    gone = shell(f"runs verify {old_folders}/lora")
    assert gone.code == 2
    assert "if the model has moved, write its folder under `model:`" in gone.said

    point_to_base(old_folders)
    lines = (EXAMPLES / "clinic_notes_train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    Path("val.jsonl").write_text("".join(lines[12:14]), encoding="utf-8")
    for name in ("full", "lora"):
        run = old_folders / name
        untrained, *_, trained = records(run)
        scores = shell(
            f"evaluate {run} --data val.jsonl --set generation.max_new_tokens=2 --precision fp32 --json"
        ).json
        assert scores["model"]["loss"] == pytest.approx(trained["validation_loss"], rel=1e-6)
        assert scores["baseline"]["loss"] == pytest.approx(untrained["validation_loss"], rel=1e-6)
        assert shell(f"generate --model {run} --max-new-tokens 4 --json Cough.").json["text"]
        assert "earlier version" in " ".join(shell(f"runs verify {run} --json").json["notes"])
    assert shell(f"generate --model {old_folders}/model --recipe summarization --max-new-tokens 4 Cough.").code == 0
    listed = shell(f"runs list {old_folders} --json").json["runs"]
    assert {each["name"]: (each["status"], each["step"]) for each in listed} == {
        "full": ("finished", 8),
        "full-stopped": ("stopped", 0),  # its commit record has no digest, and is not believed
        "full-now": ("stopped", 3),
        "lora": ("finished", 8),
        "lora-stopped": ("stopped", 4),
        "lora-now": ("stopped", 3),
    }


@pytest.mark.parametrize("name", ["full", "lora"])
def test_old_stopped_runs_are_rejected(shell, old_folders, name) -> None:
    point_to_base(old_folders)
    done = shell(f"finetune --resume {old_folders}/{name}-stopped")
    assert done.code == 3
    assert "run.json is missing" in done.said
    assert "started by an earlier version of gptj-ft has no such file; finish it with that version" in done.said


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["full", "lora"])
def test_old_stopped_runs_resume_to_golden_losses(shell, old_folders, name) -> None:
    point_to_base(old_folders)
    stopped, whole = old_folders / f"{name}-now", old_folders / name
    assert shell(f"runs verify {stopped}").code == 0
    done = shell(f"finetune --resume {stopped} --quiet")
    assert done.code == 0, done.said
    if Machine.of(HERE / "machine.json") == MACHINE:
        assert curve(stopped) == curve(whole)
    else:
        assert numbers(curve(stopped)) == pytest.approx(numbers(curve(whole)), rel=TOLERANCE["fp32"], nan_ok=True)
    assert shell(f"runs verify {stopped}").code == 0
