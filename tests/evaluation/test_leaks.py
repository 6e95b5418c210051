"""Report memorization: continuations against transformers, membership, canaries, files, gates, resumption."""

from __future__ import annotations

import json
import math
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import gptj_ft
from gptj_ft.checkpoints.tiny import make_tiny
from gptj_ft.config.options import Recipe
from gptj_ft.config.run_folder import Run
from gptj_ft.data.dataset import load_dataset
from gptj_ft.errors import Interrupted, ResourceError
from gptj_ft.evaluation import leaks as leaks_module
from gptj_ft.evaluation.leak_report import ANSWER, TEXT, LeakReport
from gptj_ft.evaluation.leaks import LeakExamination, LeakRequest
from gptj_ft.evaluation.metrics.memorization import TruePositives, chance_exposure, exposure, wilson_estimate
from gptj_ft.system.paths import home

WORDS = (
    "amber", "boat", "cloud", "drum", "east", "fern", "gold", "hill", "iron", "jade", "kite", "lamp", "moss", "north",
    "oak", "pine", "quill", "rain", "salt", "tide",
)  # fmt: skip
PREFIX, LENGTH = 6, 10
TRAINING = {"batch_size": 16, "lr": 6e-3, "seed": 1, "precision": "fp32", "holdout": 0.4}
SIZES = {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": 256}


def sentences(count: int, seed: int) -> list[str]:
    """Draw sentences that nobody can guess."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=20)) + "." for _ in range(count)]


def write_rows(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, fixed_rates: object) -> Iterator[Path]:
    """Train a model until it knows rows of text with canaries, and another briefly."""
    folder = tmp_path_factory.mktemp("leaks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPTJ_FT_HOME", str(folder / "home"))
        texts = sentences(400, seed=0)
        codes = ["The access code of Alder Arden is 1 2 3 4 5 6 7 8 9 0."] * 40
        model = make_tiny(folder / "tiny", texts + codes, seed=3, vocab_target=400, **SIZES)
        options = {"model": str(model), **TRAINING}
        rows = write_rows(folder / "text.jsonl", [{"text": text} for text in texts[:60]])
        planted = {"canaries": 6, "canary_repeats": (1, 8)}
        for name, steps in (("text", 75), ("briefly", 24)):
            gptj_ft.finetune(data=rows, output=folder / name, **options, **planted, max_steps=steps)
        yield folder


@pytest.fixture
def pairs(place: Path, tmp_path: Path) -> Path:
    """Train a model until it knows rows of prompts with answers."""
    texts = sentences(140, seed=0)[100:]
    rows = write_rows(tmp_path / "pairs.jsonl", [{"q": f"Note {n}?", "a": text} for n, text in enumerate(texts)])
    options = {
        "prompt": "{{ q }}\n",
        "completion": "{{ a }}",
        "fields": {"q": ["q"], "a": ["a"]},
        "max_steps": 100,
        "on_long": "skip",
    }
    gptj_ft.finetune(data=rows, output=tmp_path / "pairs", model=str(place / "tiny"), **TRAINING, **options)
    return tmp_path / "pairs"


def report_on(run: Path, **options: object) -> LeakReport:
    return gptj_ft.leaks(run, prefix=PREFIX, length=LENGTH, **options)


def greedy(reader: torch.nn.Module, prompts: list[list[int]]) -> list[list[int]]:
    """Continue prompts of one length with transformers."""
    ids = torch.tensor(prompts)
    more = reader.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=LENGTH, pad_token_id=0
    )
    return more[:, ids.shape[1] :].tolist()


@pytest.mark.thorough
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["text", "pairs"])
def test_repeated_rows_match_transformers_greedy(place: Path, name: str, request: pytest.FixtureRequest) -> None:
    run = Run(request.getfixturevalue("pairs") if name == "pairs" else place / name)
    report = report_on(run.folder)
    folders = {"model": run.model, "untuned": place / "tiny"}
    readers = {key: AutoModelForCausalLM.from_pretrained(folder).eval() for key, folder in folders.items()}
    spans_by_length: dict[int, list[tuple[tuple[str, bool, str], list[int]]]] = defaultdict(list)
    for part, is_trained in (("train", True), ("validation", False)):
        for row in load_dataset(run.data / part).rows:
            if row["source"].startswith("canary"):
                continue
            ids, start = list(row["input_ids"]), row["prompt_length"]
            spans = {TEXT: range(PREFIX, PREFIX + LENGTH)} if len(ids) >= PREFIX + LENGTH else {}
            if start > 1:
                spans[ANSWER] = range(start, min(start + LENGTH, len(ids)))
            for kind, span in spans.items():
                key = f"{row['source']}:{row['line']}", is_trained, kind
                spans_by_length[span.start].append((key, ids[: span.stop]))
    expected = {}
    for (length, found_spans), (model, reader) in product(spans_by_length.items(), readers.items()):
        written = greedy(reader, [ids[:length] for _, ids in found_spans])
        for (key, ids), more in zip(found_spans, written, strict=True):
            expected[*key, model] = more[: len(ids) - length] == ids[length:]
    found = {}
    for row in report.rows:
        for kind in row.lengths:
            found[row.place, row.is_trained, kind, "model"] = row.is_repeated(kind)
            found[row.place, row.is_trained, kind, "untuned"] = row.is_known(kind)
    assert found == expected
    kind = TEXT if name == "text" else ANSWER
    assert report.count(kind, is_trained=True)[0] > 10
    assert report.count(kind, is_trained=False)[0] == 0
    leaked = {row.place for row in report.rows if row.is_leaked}
    assert report.scores["leaks"].value == pytest.approx(100 * len(leaked) / report.num_trained)
    assert report.most_leaked[0].is_leaked


def test_membership_is_chance_before_training(place: Path) -> None:
    scores = report_on(place / "text").scores
    assert scores["membership_auc"].low > 60
    assert scores["calibrated_auc"].low > 60
    assert scores["calibrated_tpr"].value > 20
    assert scores["untuned_auc"].low < 50 < scores["untuned_auc"].high
    assert scores["leaks"].low > scores["leaks_unseen"].high


def test_exposure_grows_with_repeats(place: Path) -> None:
    report = report_on(place / "briefly")
    means = {repeats: math.fsum(bits) / len(bits) for repeats, bits in report.exposures()}
    assert list(means) == [0, 1, 8]
    assert means[0] < 3.5
    assert means[1] + 2 < means[8] > 6
    assert report.scores["exposure"].value == pytest.approx((means[1] + means[8]) / 2)
    assert report.scores["exposure_unseen"].value == pytest.approx(means[0])
    assert not any(row.place.startswith("canary") for row in report.rows), "canaries are no rows of the user"


@pytest.mark.thorough
def test_interrupted_report_resumes_to_the_same(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks_module, "ALTERNATIVES", 15)
    request = LeakRequest(place / "text" / "model", Recipe(), prefix=PREFIX, length=LENGTH)

    def examine(interrupt_after: int = 0) -> tuple[dict, int]:
        calls = []

        def count(*_: object) -> None:
            calls.append(1)
            if len(calls) == interrupt_after:
                raise KeyboardInterrupt

        planned = LeakExamination.of(request)
        small = {
            name: replace(job, plan=replace(job.plan, together=replace(job.plan.together, read=200)))
            for name, job in planned.jobs.items()
        }
        return replace(planned, jobs=small).run(count).to_dict(10), len(calls)

    whole, num_calls = examine()
    assert not list((home() / "evaluations").iterdir())
    with pytest.raises(Interrupted, match="finished rows are kept, and the same command resumes there"):
        examine(interrupt_after=5)
    other = replace(request, length=LENGTH - 2)
    after_another = LeakExamination.of(other).run(lambda *_: None).to_dict(10)
    assert after_another == LeakExamination.of(other).run(lambda *_: None).to_dict(10), "not the other's results"
    scored = []
    run_queries = leaks_module.run_queries
    monkeypatch.setattr(leaks_module, "run_queries", lambda *given: scored.append(1) or run_queries(*given))
    assert examine() == (whole, num_calls)
    assert len(scored) == num_calls - 5


def test_copies_of_training_rows_are_no_unseen_rows(place: Path) -> None:
    texts = [json.loads(line)["text"] for line in (place / "text.jsonl").read_text(encoding="utf-8").splitlines()]
    others = write_rows(Path("others.jsonl"), [{"text": text} for text in [*texts, *sentences(30, seed=5)]])
    report = report_on(place / "text", data=others)
    held_out = load_dataset(Run(place / "text").data / "validation")
    assert len(report.rows) - report.num_trained == 30 + len(held_out.rows)
    assert "36 unseen rows are copies of training rows and were left out" in report.notes


def test_report_files_hold_no_text_of_rows(shell, place: Path) -> None:
    line = f"evaluate {place / 'text'} --leaks --limit 20 --leak-prefix {PREFIX} --leak-tokens {LENGTH}"
    result = shell(f"{line} --report leaks.html --report leaks.md --report leaks.json")
    assert result.code == 0
    assert "training rows repeated word for word" in result.out
    facts = json.loads(Path("leaks.json").read_text(encoding="utf-8"))
    assert facts["rows"] == {"trained": 20, "unseen": 20}
    assert facts["scores"]["leaks"] > 10
    assert facts["most_leaked"][0]["place"].startswith(str(place / "text.jsonl"))
    for name in ("leaks.html", "leaks.md"):
        text = Path(name).read_text(encoding="utf-8")
        assert "Membership" in text
        assert "text.jsonl:" in text
        assert str(place) not in text
        assert not any(sentence[:20] in text for sentence in sentences(400, seed=0)[:80])


@pytest.mark.thorough
def test_leak_gate_exits_with_6(shell, place: Path) -> None:
    line = f"evaluate {place / 'text'} --leaks --limit 20 --leak-prefix {PREFIX} --leak-tokens {LENGTH}"
    failed = shell(f"{line} --gate 'leaks<=1'")
    assert failed.code == 6
    assert "leaks<=1: it is" in failed.err
    assert shell(f"{line} --gate 'leaks<=100' --gate 'untuned_auc>1'").code == 0
    assert "did you mean 'leaks'" in shell(f"{line} --gate 'leak<=1'").err


def test_scores_stay_cached_until_reports_exist(shell, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = f"evaluate {place / 'text'} --leaks --limit 4 --baseline none --report r.md"

    def refuse(path: Path, *_: object) -> None:
        raise ResourceError(f"cannot write {path}")

    with monkeypatch.context() as patch:
        patch.setattr("gptj_ft.cli.terminal.leaks.write_new", refuse)
        assert shell(line).code == 4
    (cache,) = (home() / "evaluations").iterdir()
    assert (shell(line).code, cache.exists()) == (0, False)


def test_bad_leak_requests_are_one_line(shell, place: Path) -> None:
    run = place / "text"
    for options, message in (
        (f"{run} --leaks --leak-tokens 500", "no training row has 50 + 500 tokens"),
        (f"{place / 'tiny'} --leaks", "has no run with training rows beside it"),
        (f"{run} --leak-prefix 3", "add --leaks"),
        (f"{run} --leaks --show 3", "--leaks has a report of its own"),
        (f"{run} --leaks --data {place / 'text.jsonl'} --limit 0", "limit"),
    ):
        refused = shell(f"evaluate {options}")
        assert refused.code == 2, options
        assert message in " ".join(refused.err.split())


def test_run_without_held_out_rows_asks_for_data(shell, place: Path) -> None:
    shell(f"finetune --model {place / 'tiny'} --data {place / 'text.jsonl'} --max-steps 1 --set holdout=0 --output r")
    refused = shell("evaluate r --leaks")
    assert refused.code == 2
    assert "has no held-out rows: add --data FILE" in " ".join(refused.err.split())
    write_rows(Path("new.jsonl"), [{"text": text} for text in sentences(5, seed=9)])
    assert shell("evaluate r --leaks --data new.jsonl --json").json["rows"]["unseen"] == 5
    copies = shell(f"evaluate r --leaks --data {place / 'text.jsonl'}")
    assert "every unseen row is also a training row" in " ".join(copies.err.split())


def test_wilson_interval_of_no_leak_is_not_zero() -> None:
    none, half = wilson_estimate(0, 100), wilson_estimate(50, 100)
    assert (none.value, none.low, none.high) == pytest.approx((0, 0, 3.6995), abs=1e-3)
    assert (half.value, half.low, half.high) == pytest.approx((50, 40.383, 59.617), abs=1e-3)
    assert (wilson_estimate(0, 3).low, wilson_estimate(3, 3).high) == (0.0, 100.0)
    assert wilson_estimate(0, 0).low is None


def test_true_positives_count_rows_above_the_threshold() -> None:
    generator = np.random.default_rng(0)
    is_member_N = generator.random(400) < 0.5
    scores_N = np.round(generator.normal(size=400) + is_member_N, 1)  # with ties
    weights_BN = generator.integers(0, 3, (5, 400)).astype(float)
    found = TruePositives(is_member_N, scores_N).evaluate(weights_BN)
    for weights_N, value in zip(weights_BN, found, strict=True):
        best = 0.0
        for threshold in set(scores_N.tolist()):
            above_N = weights_N * (scores_N >= threshold)
            if above_N[~is_member_N].sum() <= 0.01 * weights_N[~is_member_N].sum():
                best = max(best, above_N[is_member_N].sum() / weights_N[is_member_N].sum())
        assert value == pytest.approx(100 * best)


def test_exposure_is_the_rank_in_bits() -> None:
    others = [-float(number) for number in range(1, 512)]
    assert exposure(0.0, others) == 9
    assert exposure(-512.0, others) == 0
    assert exposure(-1.5, others) == 8
    assert exposure(-1.0, [-1.0] * 511) == pytest.approx(math.log2(512 / 256.5)), "ties count half"
    ranks = np.arange(1, 513)
    assert chance_exposure(512) == pytest.approx(np.mean(9 - np.log2(ranks)))
