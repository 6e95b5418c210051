"""Scatter read-only work: answers, labels, scores and files equal those of a single process."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from conftest import NOTES
from support.thread_group import Member, together

from gptj_ft import api
from gptj_ft.checkpoints.metadata import ModelMetadata, template_of
from gptj_ft.checkpoints.model_folder import METADATA_FILE
from gptj_ft.checkpoints.tiny import make_tiny
from gptj_ft.config.options import Recipe
from gptj_ft.config.presets import load_preset
from gptj_ft.config.resolve import build
from gptj_ft.distributed import exchange, scatter, serving
from gptj_ft.distributed.scatter import balance, end_serving, serve
from gptj_ft.distributed.serving import ServingRanks, serve_models
from gptj_ft.errors import NotFinite, ResourceError, UsageError
from gptj_ft.evaluation import text_evaluation
from gptj_ft.evaluation.comparison import Evaluation
from gptj_ft.evaluation.evaluate import EvaluateRequest, PairedEvaluation
from gptj_ft.evaluation.row_job import OutputFile
from gptj_ft.generation import decoding
from gptj_ft.generation.generator import GenerationSetup, InferenceSetup
from gptj_ft.models.batch import pack
from gptj_ft.planning import inference_plan
from gptj_ft.system.group import ALONE, Group
from gptj_ft.training.reporter import Reporter

T = TypeVar("T")
SHORT = {"max_length": 96, "device": "cpu", "precision": "fp32", "micro_batch_tokens": 64}


@pytest.fixture
def one_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one thread generate at a time: unlike processes, threads share torch's random generators."""
    lock, generate = threading.Lock(), decoding._continue

    def one_by_one(*arguments: Any) -> Any:
        with lock:
            return generate(*arguments)

    monkeypatch.setattr(decoding, "_continue", one_by_one)


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide the few rows of a test into several batches and passes."""
    for name in ("BATCH_TOKENS", "PASS_TOKENS"):
        monkeypatch.setattr(inference_plan, name, 200)


def led(size: int, lead: Callable[[Group], T]) -> T:
    """Run a function on rank 0 while the other ranks, each a thread, serve."""
    if size == 1:
        return lead(ALONE)

    def work(member: Member) -> T | None:
        if member.rank:
            serve_models(member)
            return None
        found = lead(member)
        ServingRanks(member).dismiss()
        return found

    found = together(size, work)[0]
    assert found is not None
    return found


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    notes = [(note.format(n=n) * (1 + n % 3), summary.format(n=n)) for n in range(6) for note, summary in NOTES]
    lines = [{"note": note, "summary": summary, "label": ("a", "b")[n % 2]} for n, (note, summary) in enumerate(notes)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def writer(folder: Path, preset: str, **options: Any) -> Path:
    """Make a small tuned model of a preset."""
    generation = {"max_new_tokens": 6, "temperature": 0.0, **options.pop("generation", {})}
    recipe = build({**load_preset(preset), "generation": generation, **SHORT, "recipe": preset, **options})
    make_tiny(folder, [text for pair in NOTES for text in pair] * 20, seed=0, n_positions=128, initializer_range=0.3)
    tuning = ModelMetadata("base", template_of(recipe), {}, {})
    (folder / METADATA_FILE).write_text(json.dumps(tuning.to_dict()), encoding="utf-8")
    return folder


def recipe_of(folder: Path, **options: Any) -> Recipe:
    return api.model_options(folder, {**SHORT, **options}).recipe


def evaluated(folder: Path, rows: Path, group: Group, **options: Any) -> Evaluation:
    request = EvaluateRequest(folder, recipe_of(folder, **options), "none", str(rows), None, ServingRanks(group))
    return PairedEvaluation.of(request).run(lambda *_: None).model


def facts_of(found: Evaluation) -> Any:
    by_row = {name: None if each.rows_N is None else each.rows_N.tolist() for name, each in found.figures.items()}
    return found.scores, by_row, found.answers, found.places, found.notes


def test_units_are_balanced_by_size() -> None:
    assert balance([5, 5, 5, 5], 2) == [0, 1, 0, 1]
    assert balance([1, 9, 2, 6], 2) == [1, 0, 1, 1]
    assert balance([], 3) == []


def test_long_results_keep_unit_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scatter, "LINE_BYTES", 240)
    units = [{"at": n, "values": np.arange(5 * n, dtype=np.float32) / 3} for n in range(7)]

    def compute(share: Any) -> Iterator[Any]:
        yield from ((unit["at"], unit["values"].dtype.str, unit["values"] * 2) for unit in share)

    def work(member: Member) -> list[Any]:
        if member.rank:
            serve(member, {"double": compute})
            return []
        found = [scatter.scatter(member, "double", units, [1 + n % 3 for n in range(7)], compute) for _ in range(2)]
        end_serving(member)
        return found

    for found in together(3, work)[0]:
        assert [(at, dtype) for at, dtype, _ in found] == [(n, "<f4") for n in range(7)]
        assert all((values == unit["values"] * 2).all() for (*_, values), unit in zip(found, units, strict=True))


def test_batch_keeps_its_branches() -> None:
    batch = pack([[1, 2], [5, 6, 7, 8]], parents=[[-1, 0], [-1, 0, 1, 1]])
    restored = scatter.batch_of(scatter._unit_of(batch), torch.device("cpu"))
    assert restored.parents_T is not None
    assert restored.parents_T.tolist() == [-1, 0, -1, 2, 3, 3]
    assert restored.positions_T.tolist() == [0, 1, 0, 1, 2, 2]


@pytest.mark.thorough
@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("preset", ["summarization", "classification"])
def test_scattered_evaluation_keeps_bits(tmp_path, rows, preset) -> None:
    """Cover losses, written answers and likeliest labels."""
    labels = {"labels": {"a": "yes", "b": "no"}, "metrics": ["accuracy"]} if preset == "classification" else {}
    more = {"prompt": "{{ note }}", "completion": " {{ label }}", **labels} if labels else {}
    folder = writer(tmp_path / "tuned", preset, task="language-model", **more)
    alone = facts_of(led(1, lambda group: evaluated(folder, rows, group)))
    assert any(alone[2])
    for size in (2, 3):
        assert facts_of(led(size, lambda group: evaluated(folder, rows, group))) == alone


@pytest.mark.thorough
@pytest.mark.usefixtures("small_batches")
def test_interrupted_evaluation_resumes_on_more_ranks(tmp_path, rows, own_home, monkeypatch) -> None:
    folder = writer(tmp_path / "tuned", "summarization")
    alone = facts_of(led(1, lambda group: evaluated(folder, rows, group)))
    note, calls = text_evaluation.EvaluationPlan._note_losses, []

    def interrupted(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise NotFinite("stopped")
        note(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(text_evaluation.EvaluationPlan, "_note_losses", interrupted)
        with pytest.raises(NotFinite):
            led(2, lambda group: evaluated(folder, rows, group))
    assert len(list((own_home / "evaluations").iterdir())) == 1
    assert facts_of(led(3, lambda group: evaluated(folder, rows, group))) == alone


@pytest.mark.thorough
@pytest.mark.sampled(2)
@pytest.mark.usefixtures("one_sampler", "small_batches")
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_scattered_answers_keep_bytes(tmp_path, rows, temperature) -> None:
    folder = writer(tmp_path / "tuned", "summarization", generation={"temperature": temperature})
    num_return = 2 if temperature else 1

    def answered(group: Group, output: Path) -> bytes:
        setup = GenerationSetup.of(folder, recipe_of(folder), workers=ServingRanks(group))
        job = api.plan_file(rows, output, setup, num_return)
        api.run_file(setup, job, Reporter())
        return output.read_bytes()

    alone = answered(ALONE, tmp_path / "1.jsonl")
    assert led(2, lambda group: answered(group, tmp_path / "2.jsonl")) == alone
    begun = tmp_path / "2.jsonl"
    begun.write_bytes(b"".join(alone.splitlines(keepends=True)[3:8]))
    assert led(3, lambda group: answered(group, begun)) == alone, "what was begun is gone on with"


def test_write_error_ends_all_ranks(tmp_path, rows, monkeypatch) -> None:
    folder, append = writer(tmp_path / "tuned", "summarization"), OutputFile.append

    def full(self: OutputFile, lines: Any) -> None:
        if lines := list(lines):
            raise ResourceError("the disk is full")
        append(self, lines)

    def answered(group: Group) -> None:
        setup = GenerationSetup.of(folder, recipe_of(folder), workers=ServingRanks(group))
        api.run_file(setup, api.plan_file(rows, tmp_path / "out.jsonl", setup), Reporter())

    monkeypatch.setattr(OutputFile, "append", full)
    with pytest.raises(ResourceError, match="the disk is full"):
        led(2, answered)


@pytest.mark.parametrize(
    ("function", "key", "message"),
    [
        ("tuned_fingerprint", "config.json", "is not the one of process 1"),
        ("local_environment", "threads", "process 2 has threads"),
    ],
)
def test_other_model_or_threads_are_rejected(tmp_path, rows, monkeypatch, function, key, message) -> None:
    folder = writer(tmp_path / "tuned", "summarization")
    answers = iter([{key: 1}, {key: 2}])
    monkeypatch.setattr(serving, function, lambda *_: next(answers))
    with pytest.raises(UsageError, match=message):
        led(2, lambda group: evaluated(folder, rows, group))


def test_single_process_scatters_nothing(tmp_path, rows, monkeypatch) -> None:
    folder = writer(tmp_path / "tuned", "summarization")
    for module, name in ((exchange, "scatter_batches"), (exchange, "scatter"), (scatter, "gather_texts")):
        monkeypatch.setattr(module, name, None)
    assert evaluated(folder, rows, ALONE).rows == 18


@pytest.mark.usefixtures("small_batches")
def test_scattered_labels_keep_bytes(tmp_path, rows) -> None:
    folder = labeller(tmp_path, rows)

    def labelled(group: Group, output: Path) -> bytes:
        setup = InferenceSetup.of(folder, recipe_of(folder, max_length=32), workers=ServingRanks(group))
        api.run_predictions(api.plan_predictions(rows, output, setup, ["label"]), Reporter())
        return output.read_bytes()

    alone = labelled(ALONE, tmp_path / "1.csv")
    for size in (2, 3):
        assert led(size, lambda group, size=size: labelled(group, tmp_path / f"{size}.csv")) == alone
    scores = [facts_of(led(size, lambda group: evaluated(folder, rows, group, max_length=32))) for size in (1, 2)]
    assert scores[0] == scores[1]


def labeller(folder: Path, rows: Path) -> Path:
    """Train a classification head for one step."""
    options = {"task": "classification", "prompt": "{{ note }}", "completion": "{{ label }}", "model": "tiny-bert"}
    fields = {"fields": {"note": ("note",), "label": ("label",)}, "on_long": "shorten", "max_length": 32}
    done = api.finetune(
        **{**SHORT, **options, **fields}, data=rows, max_steps=1, batch_size=4, dropout=0.0, output=folder / "run"
    )
    return Path(done.model)


@pytest.mark.thorough
def test_nproc_predictions_keep_bytes(tmp_path, rows, shell, server) -> None:
    words = f"predict --model {labeller(tmp_path, rows)} --input {rows} --precision fp32 --set micro_batch_tokens=64"
    assert shell(f"{words} --output 1.jsonl").code == 0
    (tmp_path / "random.py").write_text("raise SystemExit('imported from the working directory')")
    assert server.run(f"{words} --output 2.jsonl --set threads=1 --nproc 2 --json", tmp_path)[0] == 0
    assert json.loads((tmp_path / "output.txt").read_text(encoding="utf-8"))["rows"] == 18, "nothing else is printed"
    assert Path("2.jsonl").read_bytes() == Path("1.jsonl").read_bytes()
    assert Path("2.jsonl").stat().st_mode == Path("1.jsonl").stat().st_mode


@pytest.mark.slow
def test_only_rank_zero_prints(tmp_path, rows, server) -> None:
    """Check a sampled answer file, an error, and a signal to all ranks, as torchrun sends it."""
    writer(tmp_path / "tuned", "summarization")
    options = "--model tuned --temperature 1.5 --num-return 2 --set device=cpu --precision fp32 --quiet"
    for output, size in (("1.jsonl", 1), ("2.jsonl", 2)):
        codes, _ = server.run_together(f"generate --input {rows} --output {output} {options}", tmp_path, size)
        assert codes == [0] * size
    assert (tmp_path / "2.jsonl").read_bytes() == (tmp_path / "1.jsonl").read_bytes()
    printed = tmp_path / "output.txt"
    assert printed.read_text() == "1.jsonl\n2.jsonl\n"
    printed.unlink()
    codes, _ = server.run_together(f"generate --input {rows} --output 2.jsonl {options} --seed 7", tmp_path, 2)
    assert codes == [2, 2]
    assert printed.read_text().count("2.jsonl exists and was made with other seed") == 1
    assert len(printed.read_text().splitlines()) == 1
    printed.unlink()
    rows.write_bytes(rows.read_bytes() * 40)
    stop = [(2.0, signal.SIGTERM, rank) for rank in range(2)]
    long = "--precision fp32 --set generation.max_new_tokens=60 --set generation.min_new_tokens=60 --max-length 128"
    codes, _ = server.run_together(f"evaluate tuned --data {rows} --baseline none --quiet {long}", tmp_path, 2, *stop)
    assert codes == [130, 130]
    assert len(printed.read_text().splitlines()) == 1
