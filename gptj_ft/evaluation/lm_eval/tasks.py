"""Evaluate a model on tasks of lm-eval, with confidence intervals; the scores are lm-eval's own.

https://github.com/EleutherAI/lm-evaluation-harness. Needs the extra ``harness``.
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
from gptj_ft.evaluation.row_job import Progress, ResultCache
from gptj_ft.evaluation.text_evaluation import evaluation_settings
from gptj_ft.generation.generator import InferenceSetup, check_writes
from gptj_ft.generation.hf_model import StreamedModel
from gptj_ft.generation.workers import NO_WORKERS, Workers
from gptj_ft.planning.inference_plan import InferencePlan
from gptj_ft.system.hub import open_network
from gptj_ft.system.paths import home

MISSING = "--tasks needs EleutherAI's lm-eval: pip install 'gptj-ft[harness]'"
SEED = 1234  # lm-eval's seed of the few-shot examples


@dataclass(frozen=True)
class TaskSelection:
    """Selected tasks and their settings."""

    names: Sequence[str]  # names of tasks, groups or tags
    include_path: Path | None = None  # folder with more tasks
    num_fewshot: int | None = None  # examples before each question; None: the task's own number


@dataclass(frozen=True)
class LoadedTasks:
    """Loaded tasks with their rows."""

    names: Sequence[str]  # as selected
    tasks: Mapping[str, Any]  # by name
    whole: Any  # tasks and groups, as lm-eval's evaluator takes them

    @property
    def score_names(self) -> list[str]:
        """Names of the scores of all tasks and groups."""
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
    """Return the name of a score: ``task.metric``, or ``task.metric.filter`` if the task has named filters."""
    return f"{task}.{metric}" + ("" if filter_name == "none" else f".{filter_name}")


def load_tasks(chosen: TaskSelection, offline: bool) -> LoadedTasks:
    """Load tasks and their rows.

    Args:
        offline: whether to use only rows that were downloaded before.

    Raises:
        NetworkError: the rows cannot be downloaded.
        DataError: a task cannot be read.
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
        except Exception as error:  # a task's own code and the library that downloads its rows may raise anything
            raise _unloadable(error) from error
    for task in whole["tasks"].values():
        if chosen.num_fewshot is not None and task.get_config("num_fewshot") != 0:  # lm-eval keeps a 0
            task.set_config(key="num_fewshot", value=chosen.num_fewshot)
        elif task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=SEED)
    return LoadedTasks(chosen.names, whole["tasks"], whole)


@contextmanager
def _rows_from_the_hub() -> Iterator[None]:
    """Allow the `datasets` package, which downloads the rows of tasks, to use the network."""
    import datasets

    before = datasets.config.HF_HUB_OFFLINE
    with open_network() as is_open:
        datasets.config.HF_HUB_OFFLINE = not is_open
        try:
            yield
        finally:
            datasets.config.HF_HUB_OFFLINE = before


def _manager(make: Callable[..., Any], chosen: TaskSelection) -> Any:
    """Build the task manager. Indexing lm-eval's thousands of tasks is slow, so do it only if one of them is named."""
    path = str(chosen.include_path) if chosen.include_path else None
    if path is not None:
        # Try the user's folder alone first.
        own = make(include_path=path, include_defaults=False)
        if all(own.match_tasks([name]) for name in chosen.names):
            return own
    everything = make(include_path=path)
    for name in chosen.names:
        if not everything.match_tasks([name]):
            raise UsageError(
                f"--tasks {name}: lm-eval has no such task{did_you_mean(name, everything.all_tasks)}; "
                "--include-path FOLDER adds a folder with tasks of your own"
            )
    return everything


def _unloadable(error: Exception) -> Exception:
    first = (str(error) or type(error).__name__).partition("\n")[0]
    if isinstance(error, ConnectionError) or "offline" in first.lower() or "couldn't reach" in first.lower():
        return NetworkError(f"the rows of a task cannot be downloaded: {first}; --offline uses rows downloaded before")
    return DataError(f"a task cannot be loaded: {first}")


@dataclass(frozen=True)
class TasksPlan:
    """A planned evaluation on tasks."""

    setup: InferenceSetup
    tasks: LoadedTasks
    limit: int | None  # maximum number of questions per task, taken from the start; None: all
    plan: InferencePlan
    caches: list[ResultCache] = field(default_factory=list)

    def run(self, progress: Progress | None = None) -> Evaluation:
        """Evaluate the model with lm-eval, resuming from cached answers.

        Raises:
            UsageError, DataError: requests that cannot be answered.
        """
        from lm_eval import __version__
        from lm_eval.evaluator import evaluate

        from gptj_ft.evaluation.lm_eval.model import KeptResults, StreamedLM

        setup, budget = self.setup, self.plan.together
        facts = {**evaluation_settings(setup.folder, setup.recipe), "dtype": self.plan.precision,
                 "lm_eval": __version__, "device": setup.device.type, "together": budget.written}  # fmt: skip
        results = KeptResults(facts, self.caches, progress)
        with setup.open(self.plan.weights) as opened, _quiet():
            tokenizer = load_tokenizer(tokenizer_folder(setup.folder))
            model = StreamedModel(*opened, budget.computed)
            lm = StreamedLM(model, tokenizer, budget, results, setup.recipe.seed)
            # The seeds of lm-eval's own `simple_evaluate`.
            random.seed(0)
            np.random.seed(SEED)  # some tasks sample few-shot examples from it
            # A task keeps the requests of its last evaluation, the baseline's.
            for task in self.tasks.tasks.values():
                task._instances = None
            try:
                outcome = evaluate(lm=lm, task_dict=self.tasks.whole, limit=self.limit, bootstrap_iters=0)
            except ValueError as error:
                if isinstance(error, UsageError | DataError):
                    raise
                raise UsageError(f"lm-eval: {str(error).partition(chr(10))[0]}") from error
        assert outcome is not None
        return _evaluation(str(setup.folder), outcome, self.tasks)

    def close(self) -> None:
        """Delete the caches of answers."""
        for cache in self.caches:
            cache.close()


def plan_on_tasks(
    folder: Path, recipe: Recipe, tasks: LoadedTasks, limit: int | None, workers: Workers = NO_WORKERS
) -> TasksPlan:
    """Plan an evaluation on tasks, for requests as long as the context: lm-eval builds the requests only later.

    Raises:
        ResourceError: the model does not fit in memory.
    """
    setup = InferenceSetup.of(folder, recipe, workers=workers)
    check_writes(setup)
    longest = [setup.context]
    return TasksPlan(setup, tasks, limit, setup.plan(home(), documents=longest, prompts=longest))


def compare_on_tasks(model: Evaluation, baseline: Evaluation | None, seed: int) -> ModelComparison:
    """Compare two evaluations of the same tasks, task by task, or estimate the scores of one alone."""
    same_rows(model, baseline)
    tasks = [place.rpartition(" ")[0] for place in model.places]
    other = baseline.figures if baseline else {}
    scores, before, differences = dict[str, Estimate](), dict[str, Estimate](), dict[str, Estimate]()
    for task in dict.fromkeys([*tasks, *(name.partition(".")[0] for name in model.figures)]):
        own, theirs = (
            {n: f for n, f in figures.items() if n.partition(".")[0] == task} for figures in (model.figures, other)
        )
        part = np.array([each == task for each in tasks], np.float64)
        # A group of tasks has no rows of its own: its score is fixed, so that any rows will do.
        estimates = estimate_scores(own, theirs, model.rows, seed, part if part.any() else None)
        scores, before = {**scores, **estimates.scores}, {**before, **estimates.baseline}
        differences = {**differences, **estimates.differences}
    return ModelComparison(model, baseline, PairedEstimates(scores, before, differences), {}, None)


@dataclass(frozen=True)
class ResampledStatistic:
    """A statistic computed by a task's own aggregation function."""

    items: Sequence[Any]  # values of the task's metric for single rows
    rows: NDArray[np.int64]  # row of each item
    aggregate: Callable[[list[Any]], float]  # the task's function from items to the score

    def evaluate(self, weights_BN: Vector) -> Vector:
        return np.array([self._of(counts_N[self.rows]) for counts_N in weights_BN])

    @property
    def rows_N(self) -> None:
        return None

    def _of(self, counts: Vector) -> float:
        chosen = [item for item, count in zip(self.items, counts, strict=True) for _ in range(int(count))]
        if not _are_numbers(self.items) and len(chosen) == len(self.items) and (counts != 1).any():
            return math.nan  # aggregating texts is too slow for a thousand samples: no interval
        return float(self.aggregate(chosen)) if chosen else math.nan


@dataclass(frozen=True)
class FixedStatistic:
    """The score of a group of tasks, which has no parts per row."""

    value: float
    rows_N: None = None

    def evaluate(self, weights_BN: Vector) -> Vector:
        # lm-eval gives the score of all rows only: it is unknown for any sample of them.
        is_whole_B = (weights_BN == 1).all(1)
        return np.where(is_whole_B, self.value, np.nan)


def _evaluation(model: str, outcome: Mapping[str, Any], loaded: LoadedTasks) -> Evaluation:
    samples: dict[str, dict[str, list[Mapping[str, Any]]]] = {}  # by task and filter
    for name in loaded.tasks:
        for sample in outcome["samples"][name]:
            samples.setdefault(name, {}).setdefault(sample["filter"], []).append(sample)
    # All filters of a task have the same rows. Show the answers of the first.
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
    for name, values in outcome.get("groups", {}).items():
        for key, value in values.items():
            metric, comma, filter_name = key.partition(",")
            # Keys are "metric,filter"; others, such as "alias", are no scores.
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
    responses = sample["filtered_resps"]
    if responses and isinstance(responses[0], str):
        return str(responses[0])
    return ", ".join(f"{each[0] if isinstance(each, tuple | list) else each:.4f}" for each in responses)


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
