"""Search the best of several runs by successive halving. Read `PreparedSearch.run` first: it is the loop.

Every candidate is a run in a folder of its own, with its full schedule. It pauses at a rung and resumes from its own
checkpoint, so a candidate that reaches the end has the bits of a run of its own. The files of a search:

    search.json     options, rungs, budget, and the decision at each rung; replaced atomically
    data/           rows, shared by all candidates
    scores/         validation rows scored by the untuned model, and by each candidate at each rung
    lr-1e-05/ ...   runs
    best.yaml       recipe of the chosen run
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gptj_ft.config.options import FREE_ON_RESUME, Recipe
from gptj_ft.config.resolve import Resolved, build, check_effects, dump_recipe
from gptj_ft.config.run_folder import Run
from gptj_ft.config.saved_values import SavedRowScores, SavedSearch, checked
from gptj_ft.data.dataset import Prepared, load_dataset, save_dataset
from gptj_ft.errors import DataError, Interrupted, NotFinite, ResourceError, UsageError, did_you_mean
from gptj_ft.evaluation.comparison import finite
from gptj_ft.evaluation.metrics.statistic import Estimate, values
from gptj_ft.planning.plan import Plan
from gptj_ft.system.digests import digest_of, read_sealed, write_sealed
from gptj_ft.system.files import discard, disk_bytes, files_in, keep_folder, replace_text, sync_path
from gptj_ft.system.lock import locked
from gptj_ft.system.machine import choose_device
from gptj_ft.system.paths import RUNS, SEARCH, is_tuned, remember_run
from gptj_ft.system.plain_text import command_line, one_line
from gptj_ft.system.signals import stop_message
from gptj_ft.system.units import clock, gigabytes
from gptj_ft.training.finetune import (
    PreparedRun,
    make_run_setup,
    opened_run,
    planning_activity,
    resume_run,
    use_threads,
)
from gptj_ft.training.halving import (
    STATES,
    Budget,
    Comparison,
    Decision,
    Figures,
    Standing,
    decide,
    num_steps,
    plain_counts,
    rungs_of,
)
from gptj_ft.training.inputs import gather
from gptj_ft.training.loop import Session, Training, open_session, train_until
from gptj_ft.training.parallel import ONE_PROCESS, Validated
from gptj_ft.training.reporter import Reporter
from gptj_ft.training.retention import go_back
from gptj_ft.training.row_scores import RowScores, references_of, score_rows, searchable_scores
from gptj_ft.training.run_state import LOSS
from gptj_ft.training.runs import tidy
from gptj_ft.training.schedule import Schedule
from gptj_ft.training.search_space import Candidate, Over, candidates_of
from gptj_ft.training.trackers import check_tracker
from gptj_ft.training.validation import ValidationSample

BEST = "best.yaml"  # the last file of a search; `SEARCH` is the first
BEFORE_STATE = {"run", "data", "scores", "search"}  # stems of the files that are older than `SEARCH`
FEWEST_CANDIDATES, FEWEST_STEPS = 2, 6  # of a search worth proposing
NOT_IN_BEST = ("output", "max_time")  # options that a later run chooses itself


@dataclass(frozen=True)
class SearchPlan:
    """Everything that decides a search except its rows, as in ``search.json``."""

    request: str  # digest of the options that the user set
    recipe: Recipe  # of all candidates, except for their values
    candidates: Sequence[Candidate]
    by: str  # deciding score
    rungs: Sequence[int]  # steps after which candidates are compared
    max_time: float | None  # seconds of a session
    budget: Budget

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> SearchPlan:
        """Read the values of ``search.json``."""
        return cls(
            saved["request"], build(saved["recipe"]), [Candidate(each) for each in saved["candidates"]], saved["by"],
            saved["rungs"], saved["max_time"], Budget(**saved["budget"]),
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Return the values of ``search.json``."""
        return {
            "request": self.request,
            "recipe": self.recipe.to_dict(),
            "candidates": [dict(each.values) for each in self.candidates],
            "by": self.by,
            "rungs": list(self.rungs),
            "max_time": self.max_time,
            "budget": self.budget.to_dict(),
        }

    @property
    def num_steps(self) -> int:
        """Optimizer steps of a whole run."""
        return self.rungs[-1]

    @property
    def counts(self) -> list[int]:
        """Candidates that train to each rung, if none is clearly worse."""
        counts = [len(self.candidates)]
        while len(counts) < len(self.rungs):
            counts.append(self.budget.num_kept(self.rungs, counts, counts[-1]))
        return counts

    def facts(self) -> dict[str, Any]:
        """Return the forecast as JSON values."""
        names, counts = [each.name for each in self.candidates], self.counts
        return {
            "candidates": names,
            "by": self.by,
            "rungs": list(self.rungs),
            "most_candidates": counts,
            "steps": num_steps(self.rungs, counts),
            "steps_of_all": len(names) * self.num_steps,
            "seconds": self.budget.seconds(self.rungs, counts),
            "seconds_of_all": self.budget.seconds(self.rungs, [len(names)] * len(self.rungs)),
        }


@dataclass(frozen=True)
class SearchResult:
    """A finished search."""

    folder: str
    plan: SearchPlan
    decisions: Sequence[Decision]
    best: str  # name of the chosen candidate
    run: str  # its run folder
    model: str  # its tuned model
    config: str  # its recipe, for ``finetune --config``
    seconds: float  # wall time of this session

    @property
    def standings(self) -> list[tuple[int, Standing]]:
        """Last step and last standing of each candidate, best first."""
        last: dict[str, tuple[int, Standing]] = {}
        for decision in reversed(self.decisions):
            for standing in decision.standings:
                last.setdefault(standing.candidate, (decision.step, standing))
        return list(last.values())

    @property
    def warnings(self) -> list[str]:
        """Reasons to doubt the choice."""
        everything = self.plan.budget.seconds(self.plan.rungs, [len(self.plan.candidates)] * len(self.plan.rungs))
        return [
            f"after step {each.step} the best candidate was hardly better than the untuned model, so one that was "
            "dropped there may end better, above all a higher rate; to train all to the end, add "
            f"--max-time {math.ceil(everything / 60)}m and a new --output"
            for each in self.decisions
            if not each.has_learned and any(standing.fate in ("worse", "budget") for standing in each.standings)
        ]

    @property
    def num_steps(self) -> int:
        """Optimizer steps of all candidates."""
        return num_steps(self.plan.rungs, [len(each.standings) for each in self.decisions])

    def to_dict(self) -> dict[str, Any]:
        """Return the object of ``--json``."""
        own = {key: getattr(self, key) for key in ("folder", "best", "run", "model", "config", "seconds")}
        table = [
            {"step": step, "state": STATES[standing.fate], **_to_dict(standing)} for step, standing in self.standings
        ]
        steps = {"steps": self.num_steps, "steps_of_all": len(self.plan.candidates) * self.plan.num_steps}
        facts = {**own, "by": self.plan.by, "rungs": list(self.plan.rungs), **steps, "candidates": table}
        facts |= {"warnings": self.warnings}
        return finite(facts)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class PreparedSearch:
    """A planned search, new or to be resumed; nothing is written before `run`."""

    folder: Path
    plan: SearchPlan
    rows: tuple[Prepared, Prepared]  # training and validation rows
    first: PreparedRun | None = None  # run of the first candidate; None for a search to be resumed

    def run(self, reporter: Reporter | None = None, session: Session | None = None) -> SearchResult:
        """Train the candidates rung by rung, and choose the best.

        Raises:
            UsageError: another process runs this search.
            Interrupted, OutOfTime: stopped; everything is saved and the message says how to resume.
            NotFinite: no candidate is left.
        """
        start, reporter = time.monotonic(), reporter or Reporter()
        session = session or Session()
        session = replace(session, started=start if session.started is None else session.started)
        keep_folder(self.folder)
        with locked(self.folder, "searching"), self._resumable():
            decisions = self._begin()
            for decision in decisions:  # a kill may have come before the files were removed
                self._discard_dropped(decision)
                _check_kept(decision)
            for step in self.plan.rungs[len(decisions) :]:
                active = self._active(decisions)
                needs_rows = self._needs_rows(step, active)
                for number, candidate in enumerate(active, start=1):
                    if not self._is_at(candidate, step, needs_rows):
                        reporter.on_message(f"{candidate.name}: to step {step} ({number} of {len(active)})")
                        known = replace(session, start_validation=self._start_validation(candidate))
                        self._train(candidate, step, reporter, known, needs_rows)
                decisions = [*decisions, self._decide(step, decisions)]
                self._save(decisions)
                self._discard_dropped(decisions[-1], reporter)
                _check_kept(decisions[-1])
            return self._finish(decisions, start)

    def _begin(self) -> list[Decision]:
        """Make the files of a new search; return the decisions of an old one."""
        if (self.folder / SEARCH).is_file():
            return read_search(self.folder)[1]
        for name, rows in zip(("train", "validation"), self.rows, strict=True):
            if not (self.folder / "data" / name).exists():
                keep_folder(self.folder / "data")
                save_dataset(rows, self.folder / "data" / name)
        keep_folder(self.folder / "scores")
        self._save([])  # last: a folder without it is no search yet
        sync_path(self.folder.parent)
        return []

    def _save(self, decisions: Sequence[Decision]) -> None:
        saved = [
            {
                "step": decision.step,
                "standings": [finite(_to_dict(each)) for each in decision.standings],
                "has_learned": decision.has_learned,
            }
            for decision in decisions
        ]
        write_sealed(self.folder / SEARCH, {**self.plan.to_dict(), "decisions": saved})

    def _active(self, decisions: Sequence[Decision]) -> list[Candidate]:
        kept = decisions[-1].kept if decisions else [each.name for each in self.plan.candidates]
        return [each for each in self.plan.candidates if each.name in kept]

    def _run_of(self, candidate: Candidate) -> Run:
        return Run(self.folder / candidate.folder)

    def _scores_file(self, candidate: Candidate, step: int) -> Path:
        return self.folder / "scores" / f"{candidate.folder}-step-{step:06d}.json"

    @property
    def _start_file(self) -> Path:
        return self.folder / "scores" / "start.json"

    def _is_at(self, candidate: Candidate, step: int, needs_rows: bool) -> bool:
        """Tell whether a candidate has reached a rung, or diverged; its state was saved before its scores."""
        path, run = self._scores_file(candidate, step), self._run_of(candidate)
        if step < self.plan.num_steps or (path.is_file() and read_sealed(path).get("diverged")):
            return path.is_file()
        if is_finished := is_tuned(run.model) and (path.is_file() or not needs_rows):
            tidy(run)
        return is_finished

    def _start_validation(self, candidate: Candidate) -> Validated | None:
        """Return the validation of the initial model, if another candidate has measured the same numbers."""
        if not self._shares_start(candidate) or self.plan.recipe.sample_rows or not self._start_file.is_file():
            return None
        lines = (line for each in self.plan.candidates for line in self._run_of(each).metrics()[:1])
        line = next((line for line in lines if line["step"] == 0 and LOSS in line), None)
        if line is None:
            return None
        if "scores" not in line:
            return line[LOSS], None
        scores = {name: math.nan if value is None else value for name, value in line["scores"].items()}
        return line[LOSS], ValidationSample(scores, "", "")

    def _shares_start(self, candidate: Candidate) -> bool:
        """Tell whether the loss of the initial model is that of the other candidates."""
        return "class_weights" not in candidate.values

    def _prepare(self, candidate: Candidate, reporter: Reporter) -> PreparedRun:
        """Plan a candidate's run, or the rest of it."""
        run, plan = self._run_of(candidate), self.plan
        reporter.on_activity("planning")
        if is_tuned(run.model):
            raise UsageError(f"{run.folder} was trained to its end outside this search: remove it, and it trains again")
        if run.recipe_file.is_file():
            free = {key: getattr(plan.recipe, key) for key in FREE_ON_RESUME - {"output"}}
            options = Resolved(build({**free, "max_time": plan.max_time}), {})
            return resume_run(run.folder, options, reporter=reporter)
        recipe = candidate.recipe(plan.recipe).model_copy(update={"output": str(run.folder)})
        setup = make_run_setup(recipe, Path(recipe.model or ""), self.rows, run.folder)
        resolved = Resolved(setup.recipe, dict.fromkeys(candidate.values, "search"))
        return PreparedRun(setup, self.rows[0].report, resolved, self.rows, None)

    def _needs_rows(self, step: int, active: Sequence[Candidate]) -> bool:
        """Tell whether a rung needs scores by row: the run's own validation suffices for a last candidate."""
        is_recorded = self.plan.by == "loss" or self.plan.recipe.task != "language-model"
        return step < self.plan.num_steps or len(active) > 1 or not is_recorded

    def _train(self, candidate: Candidate, step: int, reporter: Reporter, session: Session, needs_rows: bool) -> None:
        """Train a candidate to a rung, save it, and score its validation rows."""
        path = self._scores_file(candidate, step)
        prepared = self._prepare(candidate, reporter)
        setup = prepared.setup
        session = replace(session, scores_rows=needs_rows)
        try:
            with opened_run(prepared, reporter, session) as run:
                with open_session(setup, run, reporter, session) as training:
                    train_until(training, step)
                    start = training.validator.start_scores
                    if start is not None and self._shares_start(candidate):
                        write_sealed(self._start_file, asdict(start))
                    training.flush()
                    if step < setup.num_steps:
                        training.retention.save_now(training.state)
                    if needs_rows:
                        # The last validation has scored the rows.
                        last = training.validator.row_scores if step == setup.num_steps else None
                        scores = last or self._score(training, reporter)
                        self._check_score(scores)
                        write_sealed(path, asdict(scores))
                    if step == setup.num_steps:
                        training.export()
                if step == setup.num_steps:
                    training.finish(time.monotonic())
        except NotFinite as error:
            write_sealed(path, {"diverged": one_line(str(error).partition("\n")[0])})

    def _score(self, training: Training, reporter: Reporter) -> RowScores:
        rows, step = self.rows[1].rows, training.state.step
        reporter.on_activity(f"scoring {len(rows):,} validation rows")
        try:
            losses, scores = score_rows(training.setup, rows, training.offloaded, training.stop_if_asked)
        except NotFinite as error:
            raise NotFinite(f"the loss of a validation row is not finite after step {step}") from error
        if not math.isfinite(losses.total):
            raise NotFinite(f"the loss of a validation row is not finite after step {step}")
        return scores

    def _figures(self, scores: RowScores) -> Figures:
        train, validation = self.rows
        return scores.figures(self.plan.recipe, train.report.labels, references_of(validation.rows))

    def _check_score(self, scores: RowScores) -> None:
        if self.plan.by not in (figures := self._figures(scores)):
            raise UsageError(f"--by {self.plan.by}: these rows have no such score; choose from {', '.join(figures)}")

    def _scored(self, path: Path) -> Figures | str:
        """Return the statistics of a candidate at a rung, or the reason of its divergence."""
        saved = checked(SavedRowScores, read_sealed(path), path)
        return str(saved["diverged"]) if saved.get("diverged") else self._figures(RowScores(**saved))

    def _decide(self, step: int, decisions: Sequence[Decision]) -> Decision:
        plan, active = self.plan, self._active(decisions)
        if not self._needs_rows(step, active) and not self._scores_file(active[0], step).is_file():
            return Decision(step, (Standing(active[0].name, "best", self._own_score(active[0])),))
        counts = [*(len(each.standings) for each in decisions), len(active)]
        scored = {each.name: self._scored(self._scores_file(each, step)) for each in active}
        compare = Comparison(plan.by, num_rows_of(plan.recipe, self.rows[1]), plan.recipe.seed)
        start = self._scored(self._start_file) if self._start_file.is_file() else None
        return decide(plan.rungs, counts, scored, compare, plan.budget, None if isinstance(start, str) else start)

    def _own_score(self, candidate: Candidate) -> float | None:
        """Return the deciding score of a finished run by its last validation."""
        line = next(line for line in reversed(self._run_of(candidate).metrics()) if LOSS in line)
        score = line[LOSS] if self.plan.by == "loss" else line["scores"].get(self.plan.by)
        return None if score is None else float(score)

    def _discard_dropped(self, decision: Decision, reporter: Reporter | None = None) -> None:
        """Remove state and checkpoints of the candidates dropped at a rung, and record their validation losses."""
        by_name = {each.name: each for each in self.plan.candidates}
        for standing in decision.standings:
            run = self._run_of(by_name[standing.candidate])
            if standing.candidate in decision.kept or is_tuned(run.model) or not run.recipe_file.is_file():
                continue
            freed = disk_bytes(path for folder in (*run.states, run.checkpoints) for path in files_in(folder))
            self._record_losses(by_name[standing.candidate], decision.step)
            with locked(run.folder, "cleaning"):
                go_back(run, 0)
                run.discard_state()
                discard(run.checkpoints)
            if reporter:
                reporter.on_message(f"{describe(standing, decision, self.plan.by)}; {gigabytes(freed)} freed")

    def _record_losses(self, candidate: Candidate, step: int) -> None:
        """Add the losses at the rungs to the metrics of a dropped run, for pages and lists."""
        run = self._run_of(candidate)
        known = {line["step"] for line in run.metrics() if LOSS in line}
        for rung in self.plan.rungs:
            if rung > step or rung in known:
                continue
            figures = self._scored(self._scores_file(candidate, rung))
            if not isinstance(figures, str):
                loss = values({"loss": figures["loss"]}, num_rows_of(self.plan.recipe, self.rows[1]))["loss"]
                run.append_metrics({"step": rung, LOSS: loss})

    def _finish(self, decisions: Sequence[Decision], start: float) -> SearchResult:
        best = next(each for each in self.plan.candidates if each.name == decisions[-1].leader.candidate)
        run, config = self._run_of(best), self.folder / BEST
        recipe = run.recipe()
        recipe = recipe.model_copy(update={key: Recipe.model_fields[key].default for key in NOT_IN_BEST})
        title = f"# The best of {len(self.plan.candidates)} candidates, {best.name}\n"
        replace_text(config, title + dump_recipe(recipe, dict.fromkeys(best.values, "search")))
        remember_run(run.folder)
        return SearchResult(
            str(self.folder), self.plan, decisions, best.name, str(run.folder), str(run.model), str(config),
            time.monotonic() - start,
        )  # fmt: skip

    @contextmanager
    def _resumable(self) -> Iterator[None]:
        """Name the command that resumes the search when a signal or the time limit stops it."""
        again = f"everything is saved; resume with\n{resume_command(self.folder)}"
        try:
            with stop_message(lambda: f"stopped; {again}"):
                yield
        except Interrupted as error:
            first = str(error).partition(";")[0].partition("\n")[0]
            raise type(error)(f"{first}; {again}") from None


def prepare_search(
    resolved: Resolved, over: Over, by: str = "loss", reporter: Reporter | None = None
) -> PreparedSearch:
    """Read the inputs of a search and plan it; resume it if its folder has an unfinished one with these options.

    Args:
        over: values of the options to search; empty: six learning rates around the recipe's.
        by: deciding score.

    Raises:
        UsageError: an option cannot be searched, or the search does not fit in ``max_time``.
        DataError: the rows cannot be used.
    """
    recipe, reporter = resolved.recipe, reporter or Reporter()
    check_searchable(recipe, by)
    check_effects(resolved)
    check_tracker(recipe.report_to)
    candidates = candidates_of(recipe, over)
    asked = {key: value for key, value in recipe.to_dict().items() if key not in FREE_ON_RESUME}
    request = digest_of([asked, [dict(each.values) for each in candidates], by])
    folder, is_new = choose_search_folder(recipe, request)
    if not is_new:
        reporter.on_message(f"resuming {folder}")
        changes = {key: getattr(recipe, key) for key in resolved.typed & FREE_ON_RESUME - {"output"}}
        return resume_search(folder, recipe.max_time, reporter, changes)
    use_threads(recipe, ONE_PROCESS, reporter)
    device = choose_device(recipe.device, recipe.device_memory)
    reporter.on_activity("reading the rows")
    inputs = gather(resolved)
    if inputs.note:
        reporter.on_message(inputs.note)
    if inputs.validation is None or num_rows_of(recipe, inputs.validation) < 2:
        raise UsageError("a search compares candidates on validation rows: add --val-data FILE, or --set holdout=0.1")
    base = inputs.recipe.model_copy(update={"model": str(inputs.model.resolve()), "output": None})
    reporter.on_activity(planning_activity(device, folder))
    rows = (inputs.train, inputs.validation)
    first = candidates[0].recipe(base)
    setup = make_run_setup(first, inputs.model, rows, folder / candidates[0].folder)
    # All candidates compute with the kernels and the type that were chosen for the first one.
    base = base.model_copy(update={key: getattr(setup.recipe, key) for key in ("precision", "products")})
    for candidate in candidates:
        Schedule.of(candidate.recipe(base), setup.num_steps)
    plan = SearchPlan(
        request,
        base,
        candidates,
        by,
        rungs_of(setup.num_steps, len(candidates)),
        recipe.max_time,
        budget_of(setup.plan, recipe.max_time),
    )
    check_time(plan)
    check_disk(setup.plan, len(candidates))
    own = Resolved(setup.recipe, dict.fromkeys(candidates[0].values, "search"))
    return PreparedSearch(folder, plan, rows, PreparedRun(setup, inputs.report, own, rows, None))


def resume_search(
    folder: Path,
    max_time: float | None = None,
    reporter: Reporter | None = None,
    changes: Mapping[str, Any] | None = None,
) -> PreparedSearch:
    """Read the folder of a search; resuming a finished one returns its result again.

    Args:
        max_time: seconds of this session; default: as before.
        changes: changed options, none of which decides a number, such as placement and threads.
    """
    plan, _ = read_search(folder)
    plan = replace(plan, recipe=plan.recipe.model_copy(update=dict(changes or {})))
    plan = plan if max_time is None else replace(plan, max_time=max_time)
    use_threads(plan.recipe, ONE_PROCESS, reporter or Reporter())
    train, validation = (load_dataset(folder / "data" / name) for name in ("train", "validation"))
    return PreparedSearch(folder, plan, (train, validation))


def read_search(folder: Path) -> tuple[SearchPlan, list[Decision]]:
    """Read ``search.json``.

    Raises:
        UsageError: not the folder of a search.
        DataError: the file is damaged.
    """
    path = folder / SEARCH
    if not path.is_file():
        raise UsageError(f"{folder} is not the folder of a search: it has no {SEARCH}")
    saved = checked(SavedSearch, read_sealed(path), path)
    decisions = [
        Decision(each["step"], tuple(_standing(standing) for standing in each["standings"]), each["has_learned"])
        for each in saved["decisions"]
    ]
    return SearchPlan.of(saved), decisions


def started_runs(folder: Path) -> list[Path]:
    """Return the run folders of a search's candidates that have started, best candidates of the last rung first.

    Raises:
        UsageError: not the folder of a search, or no run has started.
        DataError: ``search.json`` is damaged.
    """
    plan, decisions = read_search(folder)
    ranks = {each.candidate: rank for rank, each in enumerate(decisions[-1].standings)} if decisions else {}
    started = [each for each in plan.candidates if Run(folder / each.folder).recipe_file.is_file()]
    if not started:
        raise UsageError(f"{folder}: no run of this search has started")
    return [folder / each.folder for each in sorted(started, key=lambda each: ranks.get(each.name, len(ranks)))]


def choose_search_folder(recipe: Recipe, request: str) -> tuple[Path, bool]:
    """Return the folder of a search, and whether the search is new.

    Raises:
        UsageError: the folder exists and has another search, or none.
    """
    if recipe.output is None:
        for folder in sorted(RUNS.glob("search-*")):
            with suppress(UsageError, DataError):
                plan, _ = read_search(folder)
                if plan.request == request and not (folder / BEST).is_file():
                    return folder, False
        return next(path for n in range(1, 10**9) if not (path := RUNS / f"search-{n}").exists()), True
    folder = Path(recipe.output).expanduser()
    if (folder / SEARCH).is_file():
        if read_search(folder)[0].request != request:
            raise UsageError(
                f"{folder} has a search with other options: choose another --output, or `{resume_command(folder)}`"
            )
        return folder, False
    # A kill before the first `search.json` leaves some of these, or hidden drafts of them.
    stems = {path.name.lstrip(".").partition(".")[0] for path in folder.iterdir()} if folder.is_dir() else set()
    if stems - BEFORE_STATE or folder.is_file():
        raise UsageError(f"{folder} exists and is not a search: choose another --output")
    return folder, True


def check_searchable(recipe: Recipe, by: str) -> None:
    """Raise `UsageError` if candidates could not be compared after the same steps, or by this score."""
    names = searchable_scores(recipe.task)
    if by not in names:
        raise UsageError(f"--by {by}: no such score{did_you_mean(by, names)}; choose from {', '.join(names)}")
    if recipe.patience:
        raise UsageError("patience ends runs at different steps, and a search compares them at the same: leave it out")
    if recipe.export == "best":
        raise UsageError("a search compares the last states of its runs: leave out --export best")


def num_rows_of(recipe: Recipe, validation: Prepared) -> int:
    """Count the validation rows that are compared: documents of a language model, whole rows of a head."""
    return len(validation.rows) if recipe.task == "language-model" else len(references_of(validation.rows))


def budget_of(plan: Plan, limit: float | None) -> Budget:
    """Forecast the parts of a search from the plan of one run."""
    costs, validations = plan.costs, plan.costs.validations
    # Before and after a run come two; those between are part of the steps.
    between = max(0, validations.number - 2) * validations.seconds / (costs.num_steps or 1)
    per_rung = costs.start.seconds + validations.seconds + costs.checkpoints.seconds
    return Budget(costs.seconds_per_step + between, per_rung, validations.seconds, costs.end.seconds, limit)


def check_disk(plan: Plan, num_candidates: int) -> None:
    """Raise `ResourceError` if the disk has no room for the states of all candidates at the first rung."""
    disk = next(need for need in plan.needs if need.resource == "disk")
    # A run in memory writes a checkpoint at the rung; one on disk keeps its state.
    each = disk.need if plan.placement.is_durable else plan.costs.checkpoints.disk_bytes
    if num_candidates * each > disk.have:
        fewer = max(FEWEST_CANDIDATES, disk.have // each)
        raise ResourceError(
            f"{num_candidates} candidates keep their states at the first rung, {gigabytes(num_candidates * each)}, and "
            f"{gigabytes(disk.have)} of disk are free: use {fewer} candidates, free disk, or --method lora"
        )


def check_time(plan: SearchPlan) -> None:
    """Raise `UsageError` with the numbers that would fit, if a search exceeds ``max_time``."""
    limit, rungs, count = plan.max_time, plan.rungs, len(plan.candidates)

    def needs(count: int, steps: int) -> float:
        rungs = rungs_of(steps, count)
        return plan.budget.seconds(rungs, plain_counts(count, len(rungs)))

    if limit is None or (needed := needs(count, rungs[-1])) <= limit:
        return
    fewer = bisect_right(range(count), limit, key=lambda n: needs(max(n, 1), rungs[-1])) - 1
    shorter = bisect_right(range(rungs[-1]), limit, key=lambda n: needs(count, max(n, 1))) - 1
    ways = [
        *([f"at most {fewer} candidates"] if fewer >= FEWEST_CANDIDATES else []),
        *([f"--max-steps {shorter}"] if shorter >= FEWEST_STEPS else []),
        f"--max-time {math.ceil(needed / 60)}m",
    ]
    raise UsageError(
        f"{count} candidates of {rungs[-1]:,} steps need about {clock(needed)}, more than --max-time {clock(limit)}: "
        f"use {', or '.join(ways)}"
    )


def resume_command(folder: Path) -> str:
    """Return the command that resumes a search."""
    return command_line("search", "--resume", folder)


def describe(standing: Standing, decision: Decision, by: str) -> str:
    """Describe the end of a candidate at a rung."""
    text = f"{standing.candidate} dropped after step {decision.step}: {STATES[standing.fate]}"
    if standing.reason:
        return f"{text}: {standing.reason}"
    return f"{text} ({by} {difference_text(standing.difference)} to {decision.leader.candidate})"


def difference_text(difference: Estimate | None) -> str:
    """Format a difference with its interval."""
    if difference is None:
        return ""
    bounds = "" if difference.low is None else f" [{difference.low:+.4f}, {difference.high:+.4f}]"
    return f"{difference.value:+.4f}{bounds}"


def _to_dict(standing: Standing) -> dict[str, Any]:
    return asdict(standing)


def _standing(saved: Mapping[str, Any]) -> Standing:
    difference = Estimate(**saved["difference"]) if saved["difference"] else None
    return Standing(saved["candidate"], saved["fate"], saved["score"], difference, saved["reason"])


def _check_kept(decision: Decision) -> None:
    """Refuse to go on without candidates.

    Raises:
        NotFinite: all have diverged.
    """
    if not decision.kept:
        first = decision.leader
        raise NotFinite(f"no candidate is left; {first.candidate}: {first.reason}: search other values")
