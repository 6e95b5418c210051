"""Search of learning rates: survivors equal runs of their own, kills change nothing, bad input is refused."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import write_rows
from support.small_run import assert_same_weights, losses_of, weights_of

from gptj_ft import api
from gptj_ft.config.run_folder import Run
from gptj_ft.data.batches import Rows
from gptj_ft.data.dataset import load_dataset
from gptj_ft.errors import DataError, Interrupted, NotFinite, OutOfTime, ResourceError, UsageError
from gptj_ft.models.batch import PackedBatch
from gptj_ft.streaming.scoring import TokenScores
from gptj_ft.system.digests import write_sealed
from gptj_ft.system.lock import locked
from gptj_ft.training import row_scores
from gptj_ft.training import search as module
from gptj_ft.training.halving import Budget, plain_counts, rungs_of
from gptj_ft.training.reporter import Reporter
from gptj_ft.training.search import SearchPlan, SearchResult, check_time, read_search, resume_search, started_runs
from gptj_ft.training.search_space import Candidate, candidates_of, parse_over

STEPS, RATES = 6, [1e-3, 1e-2, 3e-2]
OPTIONS: dict[str, Any] = {
    "data": "rows.jsonl", "model": "tiny", "batch_size": 2, "max_steps": STEPS, "holdout": 0.2, "precision": "fp32",
}  # fmt: skip
LABELLED = {**OPTIONS, "model": "tiny-bert", "map": {"text": "note", "label": "kind"}, "dropout": 0.1}


def recipe_of(options: dict[str, Any]) -> str:
    return "classification" if options["model"] == "tiny-bert" else "summarization"


def run_search(folder: str, options: dict[str, Any] = OPTIONS, **more: Any) -> SearchResult:
    return api.search(recipe_of(options), **{"lr": RATES, **options, "output": folder, **more})


@pytest.fixture(autouse=True)
def rows(tmp_path: Path) -> None:
    lines = write_rows(tmp_path / "rows.jsonl").read_text().splitlines()
    kinds = [{**json.loads(line), "kind": f"k{n % 3}"} for n, line in enumerate(lines)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, kinds)) + "\n")


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("options", "over"),
    [
        (OPTIONS, {"lr": RATES}),
        ({**OPTIONS, "weights": "disk", "optimizer_state": "disk"}, {"lr": RATES}),
        (LABELLED, {"lr": RATES[::-1]}),
        (LABELLED, {"class_weights": ["none", "balanced"], "weight_decay": [0.0, 0.5]}),
    ],
)
def test_survivor_equals_a_run_of_its_own(options: dict[str, Any], over: dict[str, list[Any]]) -> None:
    options = {**options, "validate_every": 1}
    result = run_search("s", options, lr=None, over=over)
    best = next(each for each in result.plan.candidates if each.name == result.best)
    own = api.finetune(recipe_of(options), **{**options, **best.values, "output": "own"})
    assert_same_weights(weights_of(Path(result.model)), weights_of(Path(own.model)))
    assert validations_of(result.run) == validations_of(own.run)
    assert losses_of(Run(Path(result.run))) == losses_of(Run(Path(own.run)))
    again = api.finetune(config=result.config, output="again")
    assert_same_weights(weights_of(Path(result.model)), weights_of(Path(again.model)))


@pytest.mark.thorough
def test_first_validation_is_shared() -> None:
    result = run_search("s", LABELLED, by="accuracy")
    first = [validations_of(f"s/{each.folder}")[0] for each in result.plan.candidates]
    assert first[0]["step"] == 0
    assert first == [first[0]] * 3
    weighted = run_search("w", LABELLED, lr=None, over={"class_weights": ["none", "balanced"]})
    one, other = (validations_of(f"w/{each.folder}")[0]["validation_loss"] for each in weighted.plan.candidates)
    assert one != other


def validations_of(run: str) -> list[dict[str, Any]]:
    return [line for line in Run(Path(run)).metrics() if "validation_loss" in line]


@pytest.mark.thorough
def test_dropped_candidates_leave_no_state() -> None:
    result = run_search("s")
    assert [len(each.standings) for each in result.decisions] == [3, 2]
    dropped = [f"lr-{standing.candidate[3:]}" for step, standing in result.standings if step < STEPS]
    assert len(dropped) == 1
    for name in dropped:
        run = Run(Path("s") / name)
        assert not run.state.exists()
        assert not run.checkpoints.exists()
        assert not run.model.exists()
        rung = next(
            step for step, each in result.standings if Candidate({"lr": float(name[3:])}).name == each.candidate
        )
        assert [line["step"] for line in run.metrics() if "validation_loss" in line][-1] == rung < STEPS


@pytest.mark.thorough
def test_row_losses_sum_to_the_validation_loss() -> None:
    for folder, options in (("text", OPTIONS), ("label", LABELLED)):
        result = run_search(folder, {**options, "validate_every": 1})
        lines = Run(Path(result.run)).metrics()
        losses = {line["step"]: line["validation_loss"] for line in lines if "validation_loss" in line}
        assert [decision.step for decision in result.decisions] == [1, 6]
        for decision in result.decisions:
            score = next(each.score for each in decision.standings if each.candidate == result.best)
            assert score == pytest.approx(losses[decision.step], rel=1e-5)


def test_row_losses_are_in_the_order_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def score(_: object, batches: Sequence[PackedBatch], queries: object) -> Iterator[TokenScores]:
        for batch in batches:  # each token of row n is n + 1: so is the loss of each of its targets
            ends = list(itertools.pairwise(batch.cu_seqlens))
            losses = torch.cat([batch.tokens_T[start : end - 1] for start, end in ends]).float()
            yield TokenScores(-losses[:, None], losses[:, None] > 0)

    monkeypatch.setattr(row_scores, "score_tokens", score)
    lengths = (3, 9, 2, 8, 4)
    rows = Rows([[row + 1] * length for row, length in enumerate(lengths)], [1] * len(lengths))
    offloaded: Any = SimpleNamespace(device=torch.device("cpu"), budget=SimpleNamespace(pass_tokens=1000))
    total, scores = row_scores._score_texts(rows, offloaded, 10)
    expected = [((row + 1.0) * (length - 1), length - 1, length - 1) for row, length in enumerate(lengths)]
    assert list(zip(scores.losses, scores.weights, scores.right, strict=True)) == expected
    assert (total.total, total.weight) == (sum(loss for loss, *_ in expected), sum(count for _, count, _ in expected))


class KillAt(Reporter):
    """Kill the process at an event, by number or by a text in it; -1: never, and count the events."""

    def __init__(self, event: int | str = -1) -> None:
        self.event, self.count = event, 0

    def _event(self, *arguments: object) -> None:
        self.count += 1
        if self.count == self.event or (isinstance(self.event, str) and self.event in str(arguments)):
            os.kill(os.getpid(), signal.SIGKILL)

    on_activity = on_message = on_step = on_validation = _event  # type: ignore[assignment]


def killed(event: int | str, **options: Any) -> bool:
    """Run a search in a child that is killed at an event; return False if it ended before."""
    if (child := os.fork()) == 0:
        try:
            run_search(reporter=KillAt(event), **options)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.thorough
def test_kill_between_score_and_export() -> None:
    assert killed("all steps are done", folder="s", options=TWINS)
    assert list(Path("s/scores").glob("*-step-000006.json"))
    assert not list(Path("s").glob("*/model"))
    run_search("s", TWINS)
    assert len(list(Path("s").glob("*/model"))) == 2


def test_repeated_command_applies_saving_options() -> None:
    assert killed("step 2", folder="s", options=TWINS)
    result = run_search("s", {**TWINS, "save_every": 2, "keep": "all"})
    assert {each.name for each in Path(result.run, "checkpoints").iterdir()} == {"step-000002", "step-000004"}
    with pytest.raises(UsageError, match="only max_time may be added"):
        api.search(resume="s", threads=1)


@pytest.mark.thorough
def test_search_that_learns_nothing_drops_nobody_in_time() -> None:
    options = {**OPTIONS, "lr": [1e-9, 2e-9, 3e-9]}
    cheap = run_search("cheap", options)
    assert [len(each.standings) for each in cheap.decisions] == [3, 2]
    (warning,) = cheap.warnings
    assert "after step 1 the best candidate was hardly better than the untuned model" in warning
    long = run_search("long", {**options, "max_time": "10h"})
    assert [len(each.standings) for each in long.decisions] == [3, 3]
    assert long.warnings == []
    again = resume_search(Path("cheap")).run()
    assert (again.warnings, choice_of(again)) == (cheap.warnings, choice_of(cheap))
    learning = run_search("learning", OPTIONS)
    assert learning.warnings == []


@pytest.mark.thorough
def test_doubtful_choice_is_said(shell: Any) -> None:
    run_search("s", {**OPTIONS, "lr": [1e-9, 2e-9, 3e-9]})
    shown = shell("search --resume s")
    assert "hardly better than the untuned model" in " ".join(shown.out.split())
    assert "--max-time" in shown.out
    assert shell("search --resume s --json").json["warnings"]


@pytest.mark.thorough
def test_inseparable_finalists_are_both_kept() -> None:
    result = run_search("s", TWINS)
    assert [each.fate for _, each in result.standings] == ["best", "kept"]
    assert len(list(Path("s").glob("*/model"))) == 2


@pytest.mark.thorough
def test_nothing_is_computed_twice() -> None:
    class Steps(Reporter):
        count = num_scored = 0

        def on_step(self, *_: object) -> None:
            self.count += 1

        def on_activity(self, text: str) -> None:
            self.num_scored += text.startswith("scoring")

    for folder, options in (("one", OPTIONS), ("two", TWINS)):
        steps = Steps()
        result = run_search(folder, options, reporter=steps)
        assert steps.count == result.num_steps
        scored = [len(each.standings) for each in result.decisions]
        assert len(list(Path(folder, "scores").iterdir())) == 1 + sum(scored), "the untuned model once"
        assert steps.num_scored == sum(scored[:-1]), "the last validation scores the rows, too"


def choice_of(result: SearchResult) -> tuple[Any, ...]:
    return result.best, [(step, each) for step, each in result.standings]


# Inseparable, and with time to finish: both are compared at the end.
TWINS = {**LABELLED, "lr": [1e-3, 1.01e-3], "max_time": "10h"}


@pytest.mark.thorough
@pytest.mark.parametrize("options", [OPTIONS, LABELLED, TWINS])
def test_killed_search_comes_to_the_same_choice(options: dict[str, Any]) -> None:
    counter = KillAt()
    whole = run_search("whole", options, reporter=counter)
    assert counter.count > 20
    # Twice in each search: early and late.
    for first in range(3, counter.count, counter.count // 2):
        folder = f"killed-{first}"
        assert killed(first, folder=folder, options=options)
        killed(first // 2 + 4, folder=folder, options=options)
        result = run_search(folder, options)
        assert choice_of(result) == choice_of(whole)
        assert_same_weights(weights_of(Path(result.model)), weights_of(Path(whole.model)))
        shutil.rmtree(folder)


@pytest.mark.thorough
def test_kill_before_the_files_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module.PreparedSearch, "_discard_dropped", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(Interrupted, match="search --resume s"):
            run_search("s")
    assert len(read_search(Path("s"))[1]) == 1
    run_search("s")
    assert len(list(Path("s").glob("*/model"))) == 2
    assert not list(Path("s").glob("*/checkpoints"))


@pytest.mark.thorough
def test_finished_search_returns_its_result() -> None:
    first = run_search("s")
    before = {path: path.stat().st_mtime_ns for path in Path("s").rglob("*.safetensors")}
    again = api.search(resume="s")
    assert choice_of(again) == choice_of(first)
    assert {path: path.stat().st_mtime_ns for path in Path("s").rglob("*.safetensors")} == before


@pytest.mark.thorough
def test_same_command_resumes_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {key: value for key, value in OPTIONS.items() if key != "output"}
    with monkeypatch.context() as patch:
        patch.setattr("gptj_ft.training.deadline.Deadline.allows", lambda *_: False)
        with pytest.raises(OutOfTime, match="resume with\ngptj-ft search --resume runs/search-1"):
            api.search("summarization", lr=RATES, **options)
    assert api.search("summarization", lr=RATES, **options).folder == "runs/search-1"
    assert api.search("summarization", lr=RATES, **options).folder == "runs/search-2"


@pytest.mark.thorough
def test_diverging_candidate_is_dropped_and_named(shell) -> None:
    result = run_search("s", lr=[1e-2, 1e30, 1e31], clip_norm=None)
    assert result.decisions[-1].leader.score == validations_of(result.run)[-1]["validation_loss"]
    assert result.best == "lr=0.01"
    _, last = result.standings[-1]
    assert (last.candidate, last.fate) == ("lr=1e+31", "diverged")
    assert "not finite" in last.reason
    assert not (Path("s") / "lr-1e-30" / "checkpoints").exists()
    watched = shell("watch s --json")
    assert (watched.code, watched.json["runs"]) == (0, ["s/lr-0.01", "s/lr-1e-30", "s/lr-1e-31"])
    assert started_runs(Path("s"))[0] == Path(result.run)
    with pytest.raises(UsageError, match="elsewhere is not the folder of a search"):
        started_runs(Path("elsewhere"))


def test_search_of_divergence_alone_fails_and_frees_its_files() -> None:
    options = {**OPTIONS, "weights": "disk", "optimizer_state": "disk"}
    for _ in range(2):
        with pytest.raises(NotFinite, match=r"no candidate is left; lr=1e\+30: .*not finite") as caught:
            run_search("s", options, lr=[1e30, 1e31], clip_norm=None)
        assert "fp16" not in str(caught.value)
        assert sum(path.stat().st_size for path in Path("s").rglob("*") if path.is_file()) < 300_000
    assert read_search(Path("s"))[1][-1].kept == []


@pytest.mark.thorough
def test_score_decides_by_name() -> None:
    result = run_search("s", LABELLED, by="macro_f1")
    table = load_dataset(Path("s/data/validation"))
    assert result.plan.by == "macro_f1"
    saved = json.loads(next(Path("s/scores").glob("*-step-000001.json")).read_text())
    assert len(saved["losses"]) == len(table.rows)
    evaluated = api.evaluate(result.run, baseline="none").comparison.scores["macro_f1"].value
    assert result.decisions[-1].leader.score == pytest.approx(evaluated)


def test_several_options_give_the_product() -> None:
    recipe = api.resolved_options("summarization", {}).recipe
    candidates = candidates_of(recipe, parse_over(["lr=1e-5,3e-5", "warmup=0,0.1", "clip_norm=null,1"]))
    assert len(candidates) == 8
    assert candidates[0].name == "lr=1e-05, warmup=0, clip_norm=null"
    assert candidates[0].folder == "lr-1e-05_warmup-0_clip_norm-null"
    assert candidates[-1].recipe(recipe).clip_norm == 1.0


def test_default_rates_surround_the_recipe() -> None:
    recipe = api.resolved_options("summarization", {"lr": 2e-5}).recipe
    assert [each.values["lr"] for each in candidates_of(recipe, {})] == [2e-6, 6e-6, 2e-5, 6e-5, 2e-4, 6e-4]


@pytest.mark.parametrize(
    ("over", "words"),
    [
        ("learning_rate=1,2", "use 'lr'"),
        ("warmpu=1,2", "did you mean 'warmup'"),
        ("max_length=64,128", "share their rows, and max_length changes these"),
        ("prompt=a,b", "share their rows"),
        ("seed=0,1", "not an option to search"),
        ("batch_size=4,8", "not an option to search"),
        ("lr=1e-5", "at least two candidates"),
        ("lr=1e-5,0.00001", "are the same run"),
        ("lr=1e-5,-1", "--over: lr"),
        ("lr=1e-5,fast", "--over: lr"),
        ("lr", "expects key=a,b,c"),
        ("lora.alpha=8,16", "no effect without --method lora"),
    ],
)
def test_bad_candidates_are_refused(over: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        run_search("s", lr=None, over=parse_over([over]))
    assert "\n" not in str(caught.value)
    assert not Path("s").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"holdout": 0.0}, "add --val-data FILE, or --set holdout"),
        ({"by": "rougeL"}, "no such score"),
        ({"by": "los"}, "did you mean 'loss'"),
        ({"patience": 2, "validate_every": 1}, "patience"),
        ({"export": "best", "validate_every": 1}, "leave out --export best"),
        ({"max_time": "1s", "max_steps": 10**6}, "need about .* more than --max-time 1 s: use .*--max-time [0-9]+m"),
    ],
)
def test_bad_search_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        run_search("s", **options)
    assert "\n" not in str(caught.value)
    assert not Path("s").exists()


@pytest.mark.thorough
def test_wrong_folders_are_refused() -> None:
    run_search("s")
    with pytest.raises(UsageError, match="has a search with other options"):
        run_search("s", lr=[1e-3, 2e-3])
    with pytest.raises(UsageError, match="is not a search"):
        run_search("home")
    with pytest.raises(UsageError, match="not the folder of a search"):
        api.search(resume="home")
    with locked(Path("s"), "searching"), pytest.raises(UsageError, match=r"s is in use: .* is searching it"):
        api.search(resume="s")
    (Path("s") / "search.json").write_text((Path("s") / "search.json").read_text().replace("0.01", "0.02"))
    with pytest.raises(DataError, match="checksum"):
        api.search(resume="s")


def test_too_little_time_names_what_fits() -> None:
    recipe = api.resolved_options("summarization", {}).recipe
    budget = Budget(1.0, 0.0, 0.0, 0.0, 60.0)
    plan = SearchPlan("", recipe, candidates_of(recipe, {}), "loss", rungs_of(180, 6), 250.0, budget)
    with pytest.raises(UsageError) as caught:
        check_time(plan)
    assert str(caught.value) == (
        "6 candidates of 180 steps need about 8 min, more than --max-time 4 min: use --max-steps 91, or --max-time 9m"
    )
    for steps in (91, 92):
        rungs = rungs_of(steps, 6)
        assert (budget.seconds(rungs, plain_counts(6, len(rungs))) <= 250.0) == (steps == 91)


def test_small_disk_is_refused() -> None:
    with pytest.raises(ResourceError, match=r"3 candidates keep their states at the first rung, .* use 2 candidates"):
        run_search("s", disk_space="9MB", weights="device", optimizer_state="device")
    assert not Path("s").exists()


@pytest.mark.thorough
def test_candidate_finished_by_hand_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module.PreparedSearch, "_save", lambda self, decisions: stop(self, decisions))
        with pytest.raises(Interrupted):
            run_search("s")
    api.finetune(resume="s/lr-0.01")
    with pytest.raises(UsageError, match=r"s/lr-0\.01 was trained to its end outside this search: remove it"):
        run_search("s")
    shutil.rmtree("s/lr-0.01")
    assert choice_of(run_search("s")) == choice_of(run_search("t"))


def stop(search: module.PreparedSearch, decisions: Any) -> None:
    """Stop a search after its first decision, as a kill would."""
    write_sealed(search.folder / "search.json", {**search.plan.to_dict(), "decisions": []})
    if decisions:
        for path in Path("s/scores").glob("lr-0.01-*"):
            path.unlink()
        raise KeyboardInterrupt


def test_one_value_is_no_list() -> None:
    with pytest.raises(UsageError, match=r"lr is one value, 0\.001: a search needs a list of them"):
        run_search("s", lr=0.001)


@pytest.mark.thorough
def test_command_line_end_to_end(shell: Any) -> None:
    line = (
        "search --recipe summarization --data rows.jsonl --model tiny --batch-size 2 --max-steps 6 --precision fp32 "
        "--set holdout=0.2 --lr 1e-3,1e-2,3e-2 --output s"
    )
    plan = shell(f"{line} --dry-run --json").json
    assert plan["rungs"] == [1, 6]
    assert plan["plan"]["seconds_per_step"] > 0
    assert plan["most_candidates"] == [3, 2]
    assert not Path("s").exists()
    found = shell(f"{line} --json").json
    assert found["candidates"][0]["state"] == "best"
    assert Path(found["page"]).is_file()
    assert {"lr-0.001", "lr-0.01", "lr-0.03"} <= set(
        Path(found["page"]).read_text().replace("<", " ").replace(">", " ").split()
    )
    shown = shell("search --resume s")
    assert "not separable, dropped by the budget" in shown.out or "worse by more than its interval" in shown.out
    refused = shell("search --resume s --lr 1e-5,1e-4")
    assert refused.code == 2
    assert "takes the options of the search from its folder" in refused.said
