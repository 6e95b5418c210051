"""Python API: prepare rows, fine-tune, evaluate and generate.

The command line calls the same functions: `prepare`, `prepare_run`, `plan_evaluation`, `plan_file` and `run_file`,
`plan_predictions` and `run_predictions`, `label`.

Options are keywords named as the fields of `Recipe`; ``recipe`` names a preset. ``None`` is the value null, not an
option left out: ``clip_norm=None`` does not clip. Nothing is printed: a `Reporter` receives progress and messages,
errors are `GptjFtError`, and results are frozen dataclasses. `predict` returns a dictionary per text, see
``docs/encoders.md``.

    >>> import gptj_ft
    >>> result = gptj_ft.finetune("summarization", data="my.jsonl", model="tiny", max_steps=20)
    >>> comparison = gptj_ft.evaluate(result.run)
    >>> comparison.comparison.scores["rougeL"].value
    >>> with gptj_ft.load(result.run) as model:
    ...     print(model.generate("A long text.").texts[0])
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptj_ft.checkpoints.base_model import default_model, find_model
from gptj_ft.config.presets import load_preset
from gptj_ft.config.resolve import Resolved, check_several, resolve, typed_name
from gptj_ft.data.hub_dataset import fetch, is_reference
from gptj_ft.errors import UsageError
from gptj_ft.system.group import ALONE, Group
from gptj_ft.system.machine import bound_kernel_caches
from gptj_ft.system.signals import stop_message
from gptj_ft.training.prepare_command import Preparation, Targets, prepare_rows
from gptj_ft.training.reporter import Reporter

# Modules that import torch are imported in functions: preparing rows needs no torch.
if TYPE_CHECKING:
    import torch

    from gptj_ft.config.options import Recipe
    from gptj_ft.diagnostics.checkup import Diagnosis
    from gptj_ft.diagnostics.proof import Proof, ProofRequest
    from gptj_ft.evaluation.comparison import ModelComparison
    from gptj_ft.evaluation.evaluate import EvaluateRequest, PairedEvaluation
    from gptj_ft.evaluation.generate import BatchJob, BatchResult
    from gptj_ft.evaluation.leak_report import LeakReport
    from gptj_ft.evaluation.leaks import LeakExamination, LeakRequest
    from gptj_ft.evaluation.predict import LabelJob, LabelResult
    from gptj_ft.generation.generator import Answer, GenerationSetup, Generator, InferenceSetup
    from gptj_ft.training.finetune import PreparedRun
    from gptj_ft.training.forecast import Forecast
    from gptj_ft.training.loop import TrainResult
    from gptj_ft.training.search import PreparedSearch, SearchResult

bound_kernel_caches()  # must precede the first matrix product of torch


def prepare(
    data: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    recipe: str | Resolved | None = None,
    *,
    fixed: str | os.PathLike[str] | bool = False,
    offline: bool = False,
    reporter: Reporter | None = None,
    **options: Any,
) -> Preparation:
    """Check and tokenize rows into a folder for the ``data`` of `finetune`.

        >>> done = gptj_ft.prepare("my.csv", recipe="summarization", model="tiny")
        >>> done.prepared.report.rows_kept

    Args:
        data: file, folder or pattern of rows, or ``hub:owner/name``.
        output: new folder; default ``DATA.prepared``.
        recipe: name of a preset, or resolved options.
        fixed: repair rows first, in a new file next to ``data``; or the name of that file.
        offline: use the fetched copy of a dataset on the Hub.
        reporter: receiver of progress.
        **options: fields of `Recipe`; ``config`` is a YAML file of them.

    Raises:
        UsageError: the output exists, or an option is invalid.
        DataError: the rows cannot be used.
    """
    reporter = reporter or Reporter()
    resolved = resolved_options(recipe, {**options, "data": data})
    path = None if isinstance(fixed, bool) else Path(fixed)
    targets = Targets.of(str(data), _path(output), fixed is not False, path)
    with stop_message(targets.stopped):
        done = prepare_rows(fetched(resolved, offline, reporter), targets, reporter)
        done.write()
    return done


def prepare_run(
    recipe: str | Resolved | None = None,
    *,
    resume: str | os.PathLike[str] | None = None,
    start: str | None = None,
    offline: bool = False,
    reporter: Reporter | None = None,
    group: Group = ALONE,
    **options: Any,
) -> PreparedRun:
    """Read model and rows of a run and plan it, without writing anything. Arguments and errors: see `finetune`.

    Several processes share the run if each passes their ``group``, see `gptj_ft.distributed.launch.joined`.

    >>> run = gptj_ft.prepare_run("summarization", data="my.jsonl", model="tiny")
    >>> run.setup.plan.costs.seconds_per_step
    """
    from gptj_ft.distributed.training import DistributedTraining
    from gptj_ft.training.finetune import options_on_resume, prepare_new_run, resume_run

    reporter = reporter or Reporter()
    if start is not None and resume is None:
        raise UsageError("--from needs --resume RUN (Python: start needs resume): it names a checkpoint of that run")
    if resume is None or isinstance(recipe, Resolved):
        resolved = resolved_options(recipe, options)
    else:
        resolved = options_on_resume(*_split(options, recipe))
    if group.size == 1:
        check_several(resolved)
    if resume is not None:
        reporter.on_activity("reading the run")
        return resume_run(Path(resume), resolved, start, DistributedTraining(group), reporter)
    resolved = fetched(resolved, offline, reporter)
    return prepare_new_run(resolved, reporter, parallel=DistributedTraining(group))


def finetune(
    recipe: str | Resolved | None = None,
    *,
    resume: str | os.PathLike[str] | None = None,
    start: str | None = None,
    offline: bool = False,
    reporter: Reporter | None = None,
    **options: Any,
) -> TrainResult:
    """Train a model on rows and write the tuned model into a run folder.

    In the main thread the first Ctrl-C finishes the step, saves and raises `Interrupted`; the second stops at once.

        >>> class Losses(gptj_ft.Reporter):
        ...     def on_step(self, step, progress):
        ...         print(step.step, step.loss, f"{progress.seconds_left:.0f} s left")
        >>> result = gptj_ft.finetune("qa", data="my.jsonl", model="tiny", lr=1e-4, reporter=Losses())
        >>> result.loss_before, result.loss_after, result.model

    Args:
        recipe: name of a preset, or resolved options.
        resume: run folder to resume; needs no other option.
        start: with ``resume``: checkpoint to restart from: ``step-000120``, ``best``, ``last`` or ``start``.
        offline: use the fetched copy of a dataset on the Hub.
        reporter: receiver of progress.
        **options: fields of `Recipe`; ``config`` is a YAML file of them.

    Raises:
        UsageError: an option is invalid, or the model or run is missing.
        DataError: rows or files cannot be used.
        ResourceError: memory or disk do not suffice.
        Interrupted, OutOfTime: stopped; everything is saved.
        NotFinite: a loss or a gradient is not finite.
    """
    run = prepare_run(recipe, resume=resume, start=start, offline=offline, reporter=reporter, **options)
    return run.train(reporter)


def search(
    recipe: str | Resolved | None = None,
    *,
    lr: Sequence[float] | None = None,
    over: Mapping[str, Sequence[Any]] | None = None,
    by: str = "loss",
    resume: str | os.PathLike[str] | None = None,
    offline: bool = False,
    reporter: Reporter | None = None,
    **options: Any,
) -> SearchResult:
    """Train runs that differ in some options, drop the worse ones early, and choose the best.

        >>> result = gptj_ft.search("classification", data="my.jsonl", model="tiny-bert", lr=[1e-5, 3e-5, 1e-4])
        >>> result.best, result.model, result.config

    Args:
        recipe: name of a preset, or resolved options.
        lr: learning rates; short for ``over={"lr": ...}``.
        over: values of each option to search; default: six learning rates around the recipe's.
        by: deciding score on the validation rows.
        resume: folder of a search to resume; needs no other option.
        offline: use the fetched copy of a dataset on the Hub.
        reporter: receiver of progress.
        **options: fields of `Recipe`; ``config`` is a YAML file of them.

    Raises:
        UsageError: an option cannot be searched, or the search does not fit in ``max_time``.
        DataError, ResourceError: see `finetune`.
        Interrupted, OutOfTime: stopped; everything is saved.
        NotFinite: no candidate is left.
    """
    over = {**(over or {}), **({"lr": lr} if lr is not None else {})}
    prepared = prepare_search(recipe, over=over, by=by, resume=resume, offline=offline, reporter=reporter, **options)
    return prepared.run(reporter)


def prepare_search(
    recipe: str | Resolved | None = None,
    *,
    over: Mapping[str, Sequence[Any]] | None = None,
    by: str = "loss",
    resume: str | os.PathLike[str] | None = None,
    offline: bool = False,
    reporter: Reporter | None = None,
    **options: Any,
) -> PreparedSearch:
    """Read model and rows of a search and plan it, without writing anything. Arguments and errors: see `search`.

    >>> gptj_ft.prepare_search("classification", data="my.jsonl", model="tiny-bert").plan.rungs
    """
    from gptj_ft.training.search import prepare_search, resume_search

    reporter = reporter or Reporter()
    if resume is not None:
        if over or (not isinstance(recipe, Resolved) and (recipe or set(options) - {"max_time"})):
            raise UsageError("resume takes the options of the search from its folder; only max_time may be added")
        limit = recipe.recipe.max_time if isinstance(recipe, Resolved) else options.get("max_time")
        return resume_search(Path(resume).expanduser(), limit, reporter)
    resolved = fetched(resolved_options(recipe, options), offline, reporter)
    return prepare_search(resolved, over or {}, by, reporter)


def plan(
    recipe: str | Resolved | None = None,
    *,
    measure_again: bool = False,
    fill_disk_cache: float | str = 0.0,
    nodes: int = 1,
    network: str = "10Gbit",
    quantize: str | None = None,
    offline: bool = False,
    reporter: Reporter | None = None,
    group: Group = ALONE,
    **options: Any,
) -> Forecast:
    """Forecast memory, disk and time of a run; without ``data``, every row has the maximum length.

        >>> gptj_ft.plan("summarization", host_memory="16GB").plan.costs.seconds_per_step
        >>> gptj_ft.plan("summarization", nodes=4, network="1Gbit").to_dict()["machines"]["chosen"]

    Args:
        recipe: name of a preset, or resolved options.
        measure_again: measure device and disk even if their rates are known.
        fill_disk_cache: measure them again, the disk after so much writing: seconds, or a duration such as ``2m``.
        nodes: machines like this one that share the run; if the network is measured, at least the group's processes.
        network: network rate, such as ``100Mbit``; ``auto``: measure it between the processes of the group, which must
            all call `gptj_ft.distributed.network.measure_network`.
        quantize: plan LoRA on the model that `convert` would write with this quantization, ``nf4`` or ``int8``.
        offline: use the fetched copy of a dataset on the Hub.
        reporter: receiver of activities.
        group: processes whose network is measured.
        **options: fields of `Recipe`; ``config`` is a YAML file of them.

    Raises:
        UsageError: an option is invalid, or the model is missing.
        DataError: the rows cannot be used.
    """
    from gptj_ft.config.options import parse_duration
    from gptj_ft.distributed.network import AUTO_RATE, Network, measure_network
    from gptj_ft.distributed.scale_out import SharedForecast
    from gptj_ft.training.forecast import forecast_run

    reporter = reporter or Reporter()
    try:
        seconds = float(parse_duration(fill_disk_cache))  # type: ignore[arg-type]
    except ValueError as error:
        raise UsageError(f"--fill-disk-cache {fill_disk_cache}: {error}") from None
    if network == AUTO_RATE:
        reporter.on_activity("measuring the network")
        between, nodes = measure_network(group), max(nodes, group.size)
    else:
        between = Network.parse(network)
    resolved = fetched(resolved_options(recipe, options), offline, reporter)
    forecast = forecast_run(resolved, measure_again, seconds, quantize, reporter)
    if nodes <= 1:
        return forecast
    reporter.on_activity(f"planning for {nodes:,} machines")
    return SharedForecast.of(forecast, resolved.recipe, nodes, between)


def doctor(device: str = "auto", *, reporter: Reporter | None = None) -> Diagnosis:
    """Check that training works on this machine and a device: numbers, streams, speed, memory.

        >>> diagnosis = gptj_ft.doctor()
        >>> diagnosis.works, diagnosis.verdict

    Args:
        device: ``auto``, ``cpu``, or an accelerator: ``cuda``, ``cuda:1``, ``xpu``, ``mps``.
        reporter: receiver of activities.

    Raises:
        UsageError: no such device.
    """
    from gptj_ft.diagnostics.checkup import check_up
    from gptj_ft.system.machine import choose_device

    return check_up(choose_device(device), reporter)


def prove(request: ProofRequest, *, reporter: Reporter | None = None) -> Proof:
    """Prove on this machine that training from disk needs little memory, survives a kill and changes no bit.

        >>> proof = gptj_ft.prove(gptj_ft.ProofRequest("tiny", Path("proof")))
        >>> proof.holds, proof.verdict

    Args:
        request: size of the model, folder and settings.
        reporter: receiver of activities and messages.

    Raises:
        UsageError: the folder exists.
        ResourceError: disk or memory do not suffice.
    """
    from gptj_ft.diagnostics.proof import run_proof

    return run_proof(request, reporter)


def plan_evaluation(request: EvaluateRequest, reporter: Reporter | None = None) -> PairedEvaluation:
    """Read the rows of an evaluation and plan its passes; `evaluate` also runs it."""
    from gptj_ft.evaluation.evaluate import PairedEvaluation

    reporter = reporter or Reporter()
    reporter.on_activity("reading the rows")
    return PairedEvaluation.of(request)


def evaluate(
    model: str | os.PathLike[str] | None = None,
    data: str | os.PathLike[str] | None = None,
    *,
    baseline: str | os.PathLike[str] = "auto",
    limit: int | None = None,
    offline: bool = False,
    reporter: Reporter | None = None,
    **options: Any,
) -> ModelComparison:
    """Evaluate a model and its base model on rows: loss, perplexity and the metrics of the recipe.

        >>> result = gptj_ft.evaluate("runs/summarization-1", limit=100)
        >>> result.comparison.scores["rougeL"].value, result.comparison.scores["rougeL"].low

    Args:
        model: model or run; default: the newest run.
        data: rows; default: the run's held-out rows.
        baseline: model to compare with; ``auto``: the base model; ``none``.
        limit: maximum number of rows.
        offline: use the fetched copy of a dataset on the Hub.
        reporter: receiver of progress.
        **options: fields of `Recipe` that replace the model's own; ``config`` is a YAML file of them.

    Raises:
        UsageError: the model or the rows are missing.
        ResourceError: memory does not suffice.
        NotFinite: a loss is not finite.
        Interrupted: stopped by a signal; the same call resumes.
    """
    from gptj_ft.evaluation.evaluate import EvaluateRequest

    folder = named_model(model, "evaluate", options)
    reporter, rows = reporter or Reporter(), named_rows(data, options)
    rows = fetched_rows(rows, offline, reporter) if rows else None
    recipe = model_options(folder, options).recipe
    request = EvaluateRequest(folder, recipe, str(baseline), rows, limit)
    return plan_evaluation(request, reporter).run(reporter.on_count)


def plan_leaks(request: LeakRequest, reporter: Reporter | None = None) -> LeakExamination:
    """Read the rows of a leak report and plan its passes; `leaks` also runs it."""
    from gptj_ft.evaluation.leaks import LeakExamination

    reporter = reporter or Reporter()
    reporter.on_activity("reading the rows")
    return LeakExamination.of(request)


def leaks(
    model: str | os.PathLike[str] | None = None,
    data: str | os.PathLike[str] | None = None,
    *,
    baseline: str | os.PathLike[str] = "auto",
    limit: int | None = None,
    prefix: int | None = None,
    length: int | None = None,
    reporter: Reporter | None = None,
    **options: Any,
) -> LeakReport:
    """Report how much of its training rows a tuned model gives away, see ``docs/leaks.md``.

        >>> report = gptj_ft.leaks("runs/summarization-1")
        >>> report.scores["leaks"].value, report.scores["calibrated_auc"].value

    Args:
        model: run, or the model in its folder; default: the newest run.
        data: rows that the model has never seen; default: the run's held-out rows.
        baseline: untuned model; ``auto``: the model it was tuned from; ``none``.
        limit: maximum number of training rows, and of unseen rows; default: 1,000.
        prefix: tokens given before a continuation; default: 50.
        length: tokens of a continuation; default: 50.
        reporter: receiver of progress.
        **options: see `evaluate`.

    Raises:
        UsageError: the run's rows or unseen rows are missing, or none is long enough.
        ResourceError: memory does not suffice.
        Interrupted: stopped by a signal; the same call resumes.
    """
    from gptj_ft.evaluation.leaks import LeakRequest

    folder, reporter = named_model(model, "evaluate", options), reporter or Reporter()
    recipe = model_options(folder, options).recipe
    request = LeakRequest(folder, recipe, str(baseline), named_rows(data, options), limit, prefix, length)
    return plan_leaks(request, reporter).run(reporter.on_count)


def evaluate_tasks(
    tasks: Sequence[str],
    model: str | os.PathLike[str] | None = None,
    *,
    baseline: str | os.PathLike[str] = "auto",
    include_path: str | os.PathLike[str] | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    offline: bool = False,
    reporter: Reporter | None = None,
    **options: Any,
) -> ModelComparison:
    """Evaluate a model on tasks of EleutherAI's lm-eval.

        >>> gptj_ft.evaluate_tasks(["arc_easy"], "runs/summarization-1", limit=100)

    Args:
        tasks: names of tasks, groups or tags.
        model: model or run; default: the newest run.
        baseline: see `evaluate`.
        include_path: folder of additional tasks.
        num_fewshot: examples before each question; default: the task's.
        limit: maximum number of questions per task.
        offline: fetch no rows of tasks.
        reporter: receiver of progress.
        **options: see `evaluate`.

    Raises:
        UsageError: lm-eval is not installed, or the task is unknown.
    """
    from gptj_ft.evaluation.evaluate import PairedEvaluation, TasksRequest
    from gptj_ft.evaluation.lm_eval.tasks import TaskSelection, load_tasks

    folder = named_model(model, "evaluate", options)
    loaded = load_tasks(TaskSelection(list(tasks), _path(include_path), num_fewshot), offline)
    request = TasksRequest(folder, model_options(folder, options).recipe, loaded, str(baseline), limit)
    return PairedEvaluation.of_tasks(request).run((reporter or Reporter()).on_count)


def evaluate_predictions(
    predictions: str | os.PathLike[str],
    data: str | os.PathLike[str] | None = None,
    recipe: str | Resolved | None = None,
    *,
    baseline: str | os.PathLike[str] = "none",
    limit: int | None = None,
    allow_empty: bool = False,
    **options: Any,
) -> ModelComparison:
    """Score a file of outputs of any system, without a model.

        >>> gptj_ft.evaluate_predictions("answers.jsonl", "test.jsonl", "summarization")

    Args:
        predictions: lines of id and prediction, or ``{id: text}``.
        data: rows with references; default: the predictions contain references.
        recipe: name of a preset, or resolved options.
        baseline: file of outputs of another system; ``none``.
        limit: maximum number of rows.
        allow_empty: score empty predictions instead of rejecting them.
        **options: fields of `Recipe`.

    Raises:
        UsageError: the recipe has no metrics, or the files have different rows.
        DataError: predictions and rows do not match.
    """
    from gptj_ft.evaluation.predictions_file import PredictionsRequest, score_files

    options_ = resolved_options(recipe, options).recipe
    rows = data if isinstance(recipe, Resolved) else named_rows(data, options)
    rows = None if rows is None else str(rows)
    return score_files(PredictionsRequest(Path(predictions), options_, rows, str(baseline), limit, allow_empty))


def load(model: str | os.PathLike[str] | None = None, *, raw: bool = False, **options: Any) -> Model:
    """Open a model for generation, with its own template and settings.

        >>> with gptj_ft.load("runs/qa-1") as model:
        ...     answer = model.generate("Who came?", fields={"context": "The vet came on Monday."})
        ...     answer.texts[0]

    Args:
        model: model or run; default: the newest run, else the downloaded model.
        raw: continue prompts without a template.
        **options: fields of `Recipe` that replace the model's own; ``config`` is a YAML file of them.

    Raises:
        UsageError: the model is missing.
        DataError: the model folder is damaged.
    """
    from gptj_ft.generation.generator import GenerationSetup

    folder = named_model(model, "generate", options)
    return open_model(GenerationSetup.of(folder, model_options(folder, options, raw, writes=True).recipe))


@dataclass
class Model(AbstractContextManager["Model"]):
    """Open model; close it, or use it in a ``with`` block."""

    generator: Generator
    opened: ExitStack  # closes the stores of the weights
    is_closed: bool = False

    def generate(
        self,
        prompt: str,
        num_return: int = 1,
        fields: Mapping[str, str] | None = None,
        on_text: Callable[[str], object] | None = None,
    ) -> Answer:
        """Generate answers to a prompt. Repeating the call repeats the answers, even with sampling.

        Args:
            prompt: text for the field of the template.
            num_return: number of answers.
            fields: texts for other fields of the template.
            on_text: callback for pieces of a single answer.

        Raises:
            UsageError: the template lacks a field, the search returns fewer answers, or the model is closed.
        """
        from gptj_ft.generation.generator import check_num_return, fill_fields

        if self.is_closed:
            raise UsageError("this model is closed: open it again with load()")
        recipe = self.generator.setup.recipe
        check_num_return(recipe, num_return)
        with fixed_seed(recipe.seed, self.generator.setup.device):
            return self.generator.write(fill_fields(recipe, prompt, fields or {}), num_return, on_text)

    def close(self) -> None:
        """Close the stores of the weights."""
        self.is_closed = True
        self.opened.close()

    def __exit__(self, *error: Any) -> None:
        self.is_closed = True
        self.opened.__exit__(*error)  # passes on the error: other processes may share the model


def open_model(setup: GenerationSetup, weights: str | None = None) -> Model:
    """Open the weights of a generation setup; ``weights`` replaces the recipe's placement."""
    from gptj_ft.generation.generator import open_generator

    with ExitStack() as opened, fixed_seed(setup.recipe.seed, setup.device):
        generator = opened.enter_context(open_generator(setup, weights))
        return Model(generator, opened.pop_all())


def plan_file(
    rows: str | os.PathLike[str], output: str | os.PathLike[str], setup: GenerationSetup, num_return: int = 1
) -> BatchJob:
    """Read the rows of `generate_file` and plan its passes."""
    from gptj_ft.evaluation.generate import plan_batch
    from gptj_ft.generation.generator import check_num_return

    check_num_return(setup.recipe, num_return)
    return plan_batch(setup, Path(rows), Path(output), num_return)


def run_file(setup: GenerationSetup, job: BatchJob, reporter: Reporter) -> BatchResult:
    """Generate the answers of `plan_file`."""
    from gptj_ft.evaluation.generate import run_batch

    with open_model(setup, job.plan.weights) as opened, fixed_seed(setup.recipe.seed, setup.device):
        return run_batch(opened.generator, job, lambda done, total: reporter.on_count("answering", done, total, "rows"))


def generate_file(
    rows: str | os.PathLike[str],
    output: str | os.PathLike[str],
    model: str | os.PathLike[str] | None = None,
    *,
    num_return: int = 1,
    reporter: Reporter | None = None,
    **options: Any,
) -> BatchResult:
    """Answer every row of a file, into a file of JSON lines. The same call resumes an interrupted one.

        >>> gptj_ft.generate_file("rows.jsonl", "answers.jsonl", "runs/summarization-1").rows

    Args:
        rows: rows in any format of ``data``.
        output: JSON lines, new or incomplete.
        model: model or run; default: the newest run, else the downloaded model.
        num_return: number of answers per row.
        reporter: receiver of progress.
        **options: see `load`.

    Raises:
        DataError: too many rows cannot be used.
        ResourceError: memory does not suffice.
        Interrupted: stopped by a signal; the same call resumes.
    """
    from gptj_ft.generation.generator import GenerationSetup

    folder = named_model(model, "generate", options)
    setup = GenerationSetup.of(folder, model_options(folder, options, writes=True).recipe)
    return run_file(setup, plan_file(rows, output, setup, num_return), reporter or Reporter())


def plan_predictions(
    rows: str | os.PathLike[str],
    output: str | os.PathLike[str],
    setup: InferenceSetup,
    keep: Sequence[str] = (),
    raw_cells: bool = False,
) -> LabelJob:
    """Read the rows of `predict_file` and plan its passes."""
    from gptj_ft.evaluation.predict import plan_labels

    return plan_labels(setup, Path(rows), Path(output), keep, raw_cells)


def run_predictions(job: LabelJob, reporter: Reporter) -> LabelResult:
    """Label the rows of `plan_predictions`."""
    from gptj_ft.evaluation.predict import run_labels

    stopped = "stopped; finished rows are kept; run the same command to resume"
    with stop_message(lambda: stopped):
        return run_labels(job, lambda done, total: reporter.on_count("labelling", done, total, "rows"))


def predict_file(
    rows: str | os.PathLike[str],
    output: str | os.PathLike[str],
    model: str | os.PathLike[str] | None = None,
    *,
    keep: Sequence[str] = (),
    raw_cells: bool = False,
    reporter: Reporter | None = None,
    **options: Any,
) -> LabelResult:
    """Label every row of a file, into JSON lines or CSV. The same call resumes an interrupted one.

        >>> gptj_ft.predict_file("reviews.csv", "labels.jsonl", "runs/classification-1", keep=["id"]).rows

    Args:
        rows: rows in any format of ``data``, without labels.
        output: ``.jsonl`` or ``.csv``, new or incomplete.
        model: model or run with a task head; default: the newest run.
        keep: columns to copy to the output.
        raw_cells: whether CSV has texts unchanged; by default, a spreadsheet program computes none of them.
        reporter: receiver of progress.
        **options: fields of `Recipe` that replace the model's own; ``config`` is a YAML file of them.

    Raises:
        UsageError: the model has no head, or a column is missing.
        DataError: a row cannot be read.
        ResourceError: memory does not suffice.
        Interrupted: stopped by a signal; the same call resumes.
    """
    from gptj_ft.generation.generator import InferenceSetup

    folder = named_model(model, "predict", options)
    setup = InferenceSetup.of(folder, model_options(folder, options).recipe)
    return run_predictions(plan_predictions(rows, output, setup, keep, raw_cells), reporter or Reporter())


def predict(
    texts: Sequence[str | tuple[str, str] | Mapping[str, Any]],
    model: str | os.PathLike[str] | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Label texts: ``label`` and ``probabilities``, or ``score``, ``tokens``, ``answer`` or ``sentences``.

        >>> gptj_ft.predict(["a fine film"], "runs/classification-1")[0]["label"]

    Args:
        texts: texts; pairs for a task on two texts, such as a question and its passage; or values by template field.
        model: model or run with a task head; default: the newest run.
        **options: see `predict_file`.

    Raises:
        UsageError: the model has no head.
        DataError: a text cannot be read.
    """
    folder = named_model(model, "predict", options)
    return label(texts, folder, model_options(folder, options).recipe)


def label(
    texts: Sequence[str | tuple[str, str] | Mapping[str, Any]], folder: Path, recipe: Recipe
) -> list[dict[str, Any]]:
    """Label texts with the model in a folder, see `predict`."""
    from gptj_ft.evaluation.predict import label_texts, text_fields
    from gptj_ft.generation.generator import InferenceSetup

    if isinstance(texts, str):
        raise UsageError("texts is one text; give a list: predict([text], ...)")
    setup = InferenceSetup.of(folder, recipe)
    fields = text_fields(setup.recipe)

    def values(text: str | tuple[str, str] | Mapping[str, Any]) -> Mapping[str, Any]:
        if isinstance(text, Mapping):
            return text
        parts = (text,) if isinstance(text, str) else text
        if len(parts) != 1 + bool(fields[1]):
            expected = f"pairs of texts, {fields[0]} and {fields[1]}" if fields[1] else "one text at a time"
            raise UsageError(f"{folder} labels {expected}; on the command line, --pair TEXT is the second text")
        return dict(zip(fields, parts, strict=False))

    rows = [values(text) for text in texts]
    return [dict(answer.facts) for answer in label_texts(setup, rows)] if rows else []


def resolved_options(recipe: str | Resolved | None, options: Mapping[str, Any]) -> Resolved:
    """Resolve keywords, which take precedence over the environment, a ``config`` file and the preset ``recipe``."""
    if isinstance(recipe, Resolved):
        return recipe
    return resolve(*_split(options, recipe))


def model_options(
    folder: Path,
    options: Mapping[str, Any],
    plain: bool = False,
    assignments: Sequence[str] | None = None,
    writes: bool = False,
) -> Resolved:
    """Resolve keywords for a model; its own options rank as its preset, unless ``plain``.

    Args:
        writes: use the recipe ``chat`` for a model that has a chat template, but no options of its own.
    """
    from gptj_ft.checkpoints.metadata import read_metadata
    from gptj_ft.checkpoints.model_defaults import CHAT, chat_template_of, with_model_defaults

    metadata = None if plain else read_metadata(folder)
    base: tuple[str, Mapping[str, Any]] | None = (f"model {folder}", metadata.template) if metadata else None
    if writes and not plain and metadata is None and chat_template_of(folder):
        base = (f"recipe {CHAT}", {**load_preset(CHAT), "recipe": CHAT})
    if metadata is None and not options.get("recipe") and (preset := _preset_of(folder)):
        options = {**options, "recipe": preset}
    resolved = resolve(*_split(options), assignments, base=base)
    return replace(resolved, recipe=with_model_defaults(resolved.recipe, folder))


def _preset_of(folder: Path) -> str | None:
    """Return the preset for the task head of a foreign model, or ``None``."""
    from gptj_ft.checkpoints.architecture import read_architecture
    from gptj_ft.data.encode import PRESETS
    from gptj_ft.system.paths import is_model

    task = read_architecture(folder).task if is_model(folder) else None
    return PRESETS.get(task) if task else None


def named_model(
    model: str | os.PathLike[str] | None,
    command: str,
    options: Mapping[str, Any],
    assignments: Sequence[str] | None = None,
) -> Path:
    """Return the folder of a model or run; without a name, the default of the command.

    ``model`` in ``--set`` is such a name, too; see `typed_name`.
    """
    flag = "the model to evaluate" if command == "evaluate" else "--model MODEL"
    name = _named("model", flag, model, options, assignments)
    return find_model(name) if name else default_model(command)


def named_rows(
    data: str | os.PathLike[str] | None, options: Mapping[str, Any], assignments: Sequence[str] | None = None
) -> str | None:
    """Return the rows to measure on, if they are named: by an argument or ``--set``."""
    return _named("data", "--data FILE", data, options, assignments)


def _named(
    key: str,
    flag: str,
    given: str | os.PathLike[str] | None,
    options: Mapping[str, Any],
    assignments: Sequence[str] | None,
) -> str | None:
    flags, config = _split({**options, key: given} if given else options)
    return typed_name(key, flag, flags, config, assignments)


def fetched(resolved: Resolved, offline: bool, reporter: Reporter) -> Resolved:
    """Fetch rows on the Hub that a recipe names, and pin their commit in the recipe."""
    named = {key: getattr(resolved.recipe, key) for key in ("data", "val_data")}
    pinned = {key: fetched_rows(data, offline, reporter) for key, data in named.items() if data is not None}
    return replace(resolved, recipe=resolved.recipe.model_copy(update=pinned))


def fetched_rows(data: str, offline: bool, reporter: Reporter) -> str:
    """Fetch rows on the Hub and return their name with the commit; return other names unchanged."""
    if not is_reference(data):
        return data
    count = lambda done, total: reporter.on_count("downloading", done, total, "bytes")  # noqa: E731
    return fetch(data, offline, reporter.on_message, count)


@contextmanager
def fixed_seed(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's generators in a block, and restore them afterwards."""
    import torch

    from gptj_ft.system.accelerator import fork_rng

    with fork_rng(device):
        torch.manual_seed(seed)
        yield


def _split(options: Mapping[str, Any], recipe: str | None = None) -> tuple[dict[str, Any], Path | None]:
    """Split options into the arguments of `resolve`: flags and the ``config`` file."""
    flags = {key: str(value) if isinstance(value, os.PathLike) else value for key, value in options.items()}
    config, preset = flags.pop("config", None), recipe or flags.pop("recipe", None)
    return {**flags, **({"recipe": preset} if preset else {})}, Path(config) if config else None


def _path(name: str | os.PathLike[str] | None) -> Path | None:
    return None if name is None else Path(name)
