"""Evaluate a model and its baseline on lm-eval's tasks, with the intervals of other evaluations.

https://github.com/EleutherAI/lm-evaluation-harness. Needs the extra ``harness``; values are lm-eval's own.
"""

from __future__ import annotations

import logging
import math
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gptj_ft.checkpoints.adapter import tokenizer_folder
from gptj_ft.config.options import Recipe
from gptj_ft.data.tokenization import load_tokenizer
from gptj_ft.errors import DataError, NetworkError, UsageError, did_you_mean
from gptj_ft.evaluation.comparison import Evaluation, ModelComparison, same_rows
from gptj_ft.evaluation.metrics import Statistic
from gptj_ft.evaluation.metrics.statistic import Estimate, PairedEstimates, Ratio, Vector, estimate_scores
from gptj_ft.evaluation.row_job import ResultCache
from gptj_ft.evaluation.text_evaluation import evaluation_settings
from gptj_ft.generation.generator import InferenceSetup, check_writes
from gptj_ft.generation.hf_model import StreamedModel
from gptj_ft.generation.workers import NO_WORKERS, Workers
from gptj_ft.planning.inference_plan import InferencePlan
from gptj_ft.system.hub import open_network
from gptj_ft.system.paths import home

MISSING = "--tasks needs EleutherAI's lm-eval: pip install 'gptj-ft[harness]'"
SEED = 1234  # lm-eval's own, of the examples before questions
_Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class TaskSelection:
    """Selected tasks and their settings.

    Attributes:
        names: names of tasks, groups or tags.
        include_path: a folder with more of them.
        num_fewshot: examples before each question; ``None``: as the task says.
    """

    names: Sequence[str]
    include_path: Path | None = None
    num_fewshot: int | None = None


@dataclass(frozen=True)
class LoadedTasks:
    """Loaded tasks with their rows, as lm-eval's evaluator takes them, and the names that they were asked for by."""

    names: Sequence[str]
    tasks: Mapping[str, Any]
    whole: Any

    @property
    def score_names(self) -> list[str]:
        """Names of the scores of the loaded tasks."""
        own = [
            score_name(name, metric, each.name)
            for name, task in self.tasks.items()
            for metric in task.aggregation()
            for each in task._filters
        ]
        groups = [
            score_name(group.name, each.metric, filter_name)
            for group in self.whole["groups"].values()
            for each in group.aggregate_metric_list or ()
            for filter_name in each.filter_list
            or dict.fromkeys(own.name for task in group.get_all_tasks() for own in task._filters)
        ]
        return [*own, *groups]


def score_name(task: str, metric: str, filter_name: str) -> str:
    """Name a score: ``task.metric``, and the filter unless it is the default."""
    return f"{task}.{metric}" + ("" if filter_name == "none" else f".{filter_name}")


def load_tasks(chosen: TaskSelection, offline: bool) -> LoadedTasks:
    """Load tasks and their rows.

    Args:
        chosen: names and settings of the tasks.
        offline: whether only rows that were fetched before are used.

    Raises:
        UsageError: lm-eval is not installed, or knows no such task.
        NetworkError: the rows are not there and cannot be fetched.
        DataError: a task that cannot be read.
    """
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise UsageError(MISSING) from error
    if chosen.include_path is not None and not chosen.include_path.is_dir():
        raise UsageError(f"--include-path {chosen.include_path}: no such folder")
    with _quiet(), nullcontext() if offline else _rows_from_the_hub():
        manager = _manager(TaskManager, chosen)
        try:
            whole = manager.load(list(chosen.names))
        except Exception as error:  # whatever a task's own code, or the library that fetches its rows, may raise
            raise _unloadable(error) from error
    for task in whole["tasks"].values():
        if chosen.num_fewshot is not None and task.get_config("num_fewshot") != 0:  # 0 is meant, as lm-eval has it
            task.set_config(key="num_fewshot", value=chosen.num_fewshot)
        elif task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=SEED)
    return LoadedTasks(chosen.names, whole["tasks"], whole)


@contextmanager
def _rows_from_the_hub() -> Iterator[None]:
    """Allow the `datasets` package, which fetches the rows of tasks, to use the network."""
    import datasets

    before = datasets.config.HF_HUB_OFFLINE
    with open_network() as is_open:
        datasets.config.HF_HUB_OFFLINE = not is_open
        try:
            yield
        finally:
            datasets.config.HF_HUB_OFFLINE = before


def _manager(make: Callable[..., Any], chosen: TaskSelection) -> Any:
    """Build the task manager; lm-eval's thousands of tasks are indexed only if one of them is named."""
    path = str(chosen.include_path) if chosen.include_path else None
    if path is not None:
        own = make(include_path=path, include_defaults=False)
        if all(own.match_tasks([name]) for name in chosen.names):
            return own
    everything = make(include_path=path)
    for name in chosen.names:
        if not everything.match_tasks([name]):
            raise UsageError(
                f"--tasks {name}: lm-eval knows no such task{did_you_mean(name, everything.all_tasks)}; "
                "--include-path FOLDER names a folder with tasks of your own"
            )
    return everything


def _unloadable(error: Exception) -> Exception:
    first = (str(error) or type(error).__name__).partition("\n")[0]
    if isinstance(error, ConnectionError) or "offline" in first.lower() or "couldn't reach" in first.lower():
        return NetworkError(f"the rows of a task cannot be fetched: {first}; once fetched, --offline will do")
    return DataError(f"a task cannot be loaded: {first}")


@dataclass(frozen=True)
class TasksPlan:
    """A planned evaluation on tasks.

    Attributes:
        setup: model and options.
        tasks: tasks with their rows.
        limit: most questions of each task, the first ones; ``None``: all.
        plan: memory and token budget.
        journals: caches of the answers.
    """

    setup: InferenceSetup
    tasks: LoadedTasks
    limit: int | None
    plan: InferencePlan
    journals: list[ResultCache] = field(default_factory=list)

    def run(self, progress: _Progress | None = None) -> Evaluation:
        """Evaluate the model with lm-eval, resuming from cached answers.

        Raises:
            UsageError, DataError: requests that cannot be answered.
        """
        from lm_eval import __version__
        from lm_eval.evaluator import evaluate

        from gptj_ft.evaluation.lm_eval.model import KeptResults, StreamedLM

        setup, together = self.setup, self.plan.together
        facts = {**evaluation_settings(setup.folder, setup.recipe), "dtype": self.plan.precision,
                 "lm_eval": __version__, "device": setup.device.type, "together": together.written}  # fmt: skip
        findings = KeptResults(facts, self.journals, progress)
        with setup.open(self.plan.weights) as opened, _quiet():
            tokenizer = load_tokenizer(tokenizer_folder(setup.folder))
            model = StreamedModel(*opened, together.computed)
            lm = StreamedLM(model, tokenizer, together, findings, setup.recipe.seed)
            random.seed(0)
            np.random.seed(SEED)  # what samples examples for questions, in some tasks
            for task in self.tasks.tasks.values():
                task._instances = None
            try:
                found = evaluate(lm=lm, task_dict=self.tasks.whole, limit=self.limit, bootstrap_iters=0)
            except ValueError as error:
                if isinstance(error, UsageError | DataError):
                    raise
                raise UsageError(f"lm-eval: {str(error).partition(chr(10))[0]}") from error
        assert found is not None
        return _evaluation(str(setup.folder), found, self.tasks)

    def close(self) -> None:
        """Remove the caches of answers, once the results are saved."""
        for journal in self.journals:
            journal.close()


def plan_on_tasks(
    folder: Path, recipe: Recipe, tasks: LoadedTasks, limit: int | None, workers: Workers = NO_WORKERS
) -> TasksPlan:
    """Plan for requests as long as the context, since their length is not known before tokenization.

    Raises:
        ResourceError: it does not fit.
    """
    setup = InferenceSetup.of(folder, recipe, workers=workers)
    check_writes(setup)
    longest = [setup.context]
    return TasksPlan(setup, tasks, limit, setup.plan(home(), documents=longest, prompts=longest))


def compare_on_tasks(model: Evaluation, baseline: Evaluation | None, seed: int) -> ModelComparison:
    """Compare two evaluations of the same tasks, task by task, or estimate one alone."""
    same_rows(model, baseline)
    tasks = [place.rpartition(" ")[0] for place in model.places]
    other = baseline.figures if baseline else {}
    scores, before, differences = dict[str, Estimate](), dict[str, Estimate](), dict[str, Estimate]()
    for task in dict.fromkeys([*tasks, *(name.partition(".")[0] for name in model.figures)]):
        own, theirs = (
            {n: f for n, f in figures.items() if n.partition(".")[0] == task} for figures in (model.figures, other)
        )
        part = np.array([each == task for each in tasks], np.float64)
        found = estimate_scores(own, theirs, model.rows, seed, part if part.any() else None)
        scores, before = {**scores, **found.scores}, {**before, **found.baseline}
        differences = {**differences, **found.differences}
    return ModelComparison(model, baseline, PairedEstimates(scores, before, differences), {}, None)


@dataclass(frozen=True)
class ResampledStatistic:
    """A statistic computed by a task's own aggregation function.

    Attributes:
        items: per-row values of the task's metric.
        rows: indices of the items among all rows.
        aggregate: task's function from items to the score.
    """

    items: Sequence[Any]
    rows: NDArray[np.int64]
    aggregate: Callable[[list[Any]], float]

    def evaluate(self, weights_BN: Vector) -> Vector:
        return np.array([self._of(counts_N[self.rows]) for counts_N in weights_BN])

    @property
    def rows_N(self) -> None:
        return None

    def _of(self, counts: Vector) -> float:
        chosen = [item for item, count in zip(self.items, counts, strict=True) for _ in range(int(count))]
        if not _are_numbers(self.items) and len(chosen) == len(self.items) and (counts != 1).any():
            return math.nan  # of texts, a function that is too slow for a thousand samples
        return float(self.aggregate(chosen)) if chosen else math.nan


@dataclass(frozen=True)
class FixedStatistic:
    """A statistic without per-row parts: the score of a group of tasks."""

    value: float
    rows_N: None = None

    def evaluate(self, weights_BN: Vector) -> Vector:
        is_whole_B = (weights_BN == 1).all(1)
        return np.where(is_whole_B, self.value, np.nan)


def _evaluation(model: str, found: Mapping[str, Any], loaded: LoadedTasks) -> Evaluation:
    samples: dict[str, dict[str, list[Mapping[str, Any]]]] = {}  # by task and by what picked the answers
    for name in loaded.tasks:
        for sample in found["samples"][name]:
            samples.setdefault(name, {}).setdefault(sample["filter"], []).append(sample)
    # Each filter has the same rows; what was written is shown as the first one took it.
    shown = [(name, sample) for name, by_filter in samples.items() for sample in next(iter(by_filter.values()))]
    figures: dict[str, Statistic] = {}
    for name, by_filter in samples.items():
        first = next(row for row, (task, _) in enumerate(shown) if task == name)
        for filter_name, own in by_filter.items():
            for metric in dict.fromkeys(metric for sample in own for metric in sample["metrics"]):
                rows = [first + row for row, sample in enumerate(own) if metric in sample["metrics"]]
                items = [sample[metric] for sample in own if metric in sample["metrics"]]
                aggregate = loaded.tasks[name].aggregation().get(metric, _mean)
                figures[score_name(name, metric, filter_name)] = _figure(items, np.array(rows), aggregate, len(shown))
    for name, values in found.get("groups", {}).items():
        for key, value in values.items():
            metric, comma, filter_name = key.partition(",")
            if comma and not metric.endswith("_stderr") and isinstance(value, float):
                figures[score_name(name, metric, filter_name)] = FixedStatistic(value)
    return Evaluation(
        model,
        figures,
        places=[f"{name} {sample['doc_id']}" for name, sample in shown],
        answers=[_answer(sample) for _, sample in shown],
        references=[[str(sample["target"])] for _, sample in shown],
    )


def _figure(items: list[Any], rows: NDArray[np.int64], aggregate: Callable[[Any], float], num_rows: int) -> Statistic:
    if getattr(aggregate, "__name__", "") in ("mean", "_mean") and all(isinstance(x, int | float) for x in items):
        above_N, below_N = np.zeros(num_rows), np.zeros(num_rows)
        above_N[rows], below_N[rows] = items, 1.0
        return Ratio(above_N, below_N)
    return ResampledStatistic(items, rows, aggregate)


def _mean(items: Sequence[float]) -> float:
    return sum(items) / len(items)


def _are_numbers(items: Sequence[Any]) -> bool:
    def is_number(item: Any) -> bool:
        return isinstance(item, int | float) or (isinstance(item, tuple) and all(map(is_number, item)))

    return all(map(is_number, items))


def _answer(sample: Mapping[str, Any]) -> str:
    """Return the generated text, or the log-likelihood of each choice."""
    found = sample["filtered_resps"]
    if found and isinstance(found[0], str):
        return str(found[0])
    return ", ".join(f"{each[0] if isinstance(each, tuple | list) else each:.4f}" for each in found)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence lm-eval and the progress bars of its libraries."""
    from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    logger, bars, had_bars = (
        logging.getLogger("lm_eval"),
        os.environ.get("TQDM_DISABLE"),
        not are_progress_bars_disabled(),
    )
    level = logger.level
    logger.setLevel(logging.ERROR)
    os.environ["TQDM_DISABLE"] = "1"
    disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        if had_bars:
            enable_progress_bars()
        if bars is None:
            del os.environ["TQDM_DISABLE"]
        else:
            os.environ["TQDM_DISABLE"] = bars
