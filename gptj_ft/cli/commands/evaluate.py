"""The command `evaluate`: measure a model and compare it with the one it was tuned from."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from gptj_ft.cli.options import (
    INFERENCE_OPTIONS,
    TUNED_RECIPE,
    Assignments,
    Config,
    Json,
    Nproc,
    Offline,
    Quiet,
    SetOptions,
    complete_model,
    flag,
    is_assigned,
    option_of,
    takes_options,
)
from gptj_ft.cli.terminal.output import Output
from gptj_ft.config.resolve import resolve
from gptj_ft.errors import UsageError
from gptj_ft.system.plain_text import without_secrets


@takes_options(
    "recipe",
    "map",
    "max_length",
    "seed",
    *INFERENCE_OPTIONS,
    meanings={"recipe": TUNED_RECIPE, "seed": "seed of the bootstrap intervals"},
)
def evaluate(
    *,
    model: Annotated[
        str | None, typer.Argument(help="model or run; default: the newest run", autocompletion=complete_model)
    ] = None,
    data: Annotated[str | None, option_of("data", "rows to measure on; default: the held-out rows of the run")] = None,
    options: SetOptions,
    baseline: Annotated[str, flag("model to compare with; auto: the model it was tuned from; none")] = "auto",
    predictions: Annotated[
        Path | None,
        flag(
            "score the outputs of any system instead of a model: JSON lines of id and prediction, or SQuAD's format, "
            "{id: text}; --baseline takes such a file, too",
            metavar="FILE.jsonl",
        ),
    ] = None,
    allow_empty: Annotated[bool, flag("score empty predictions as they are", "--allow-empty", more=True)] = False,
    limit: Annotated[
        int | None,
        flag("use only the first rows; with --leaks: at most this many trained and unseen rows [default: 1000]", min=1),
    ] = None,
    show: Annotated[int, flag("print this many answers with the references", min=0)] = 0,
    output: Annotated[Path | None, flag("write one line per row: answer, scores", metavar="FILE.jsonl")] = None,
    reports: Annotated[
        list[Path] | None, flag("write a report: .json, .md or .html", "--report", metavar="FILE")
    ] = None,
    gates: Annotated[
        list[str] | None,
        flag("exit with 6 if the score misses this, e.g. 'rougeL>=30' or 'loss<=2'", "--gate", metavar="SCORE>=N"),
    ] = None,
    tasks: Annotated[
        str | None, flag("measure on tasks of EleutherAI's lm-eval instead", metavar="T1,T2", more=True)
    ] = None,
    include_path: Annotated[
        Path | None, flag("with --tasks: folder of more tasks, as YAML files", metavar="FOLDER", more=True)
    ] = None,
    num_fewshot: Annotated[int | None, flag("with --tasks: examples before each question", min=0, more=True)] = None,
    leaks: Annotated[
        bool, flag("report how much of its training rows the model gives away, instead of its scores", "--leaks")
    ] = False,
    leak_prefix: Annotated[
        int | None, flag("with --leaks: tokens given before a continuation [default: 50]", min=1, more=True)
    ] = None,
    leak_tokens: Annotated[
        int | None, flag("with --leaks: tokens that the model has to repeat [default: 50]", min=1, more=True)
    ] = None,
    config: Config = None,
    assignments: Assignments = None,
    offline: Offline = False,
    dry_run: Annotated[bool, flag("show the plan and stop", "--dry-run")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
    nproc: Nproc = None,
) -> None:
    """Measure a model and compare it with its base model.

    Prints loss, perplexity and the scores of the recipe, with 95 % confidence intervals of the scores and their
    changes. The same command resumes an interrupted evaluation.
    """
    from gptj_ft.cli.several import leading

    with leading(nproc) as workers:
        has_rows = data is not None or is_assigned("data", assignments)
        _check_kind(predictions, tasks, has_rows, allow_empty, include_path is not None or num_fewshot is not None)
        _check_leaks(leaks, predictions or tasks or output, show, leak_prefix or leak_tokens)
        if predictions is not None and (model is not None or is_assigned("model", assignments)):
            raise UsageError("--predictions are the outputs of any system, without a model: leave out the model")
        if predictions is not None and (dry_run or nproc not in (None, 1)):
            option = "--dry-run" if dry_run else "--nproc"
            raise UsageError(f"{option} is for evaluating a model, and --predictions reads none: leave one out")
        out = Output(as_json, quiet)
        with out.activity():
            from gptj_ft import api
            from gptj_ft.cli.terminal.evaluation import EvaluationOutput, evaluate_model
            from gptj_ft.cli.terminal.leaks import examine_leaks
            from gptj_ft.cli.terminal.progress import TerminalReporter
            from gptj_ft.evaluation.comparison import parse_gates
            from gptj_ft.evaluation.evaluate import EvaluateRequest, TasksRequest
            from gptj_ft.evaluation.leaks import LeakRequest
            from gptj_ft.evaluation.lm_eval.tasks import TaskSelection, load_tasks
            from gptj_ft.evaluation.metrics import score_names
            from gptj_ft.evaluation.metrics.language_model import LOSS_SCORES

        command = shlex.join(["gptj-ft", *without_secrets(sys.argv[1:])])
        target = EvaluationOutput(out, output, reports or [], show, command)
        target.check_files()
        settings = {**options, "config": config}
        named = None if tasks is not None else api.named_rows(data, settings, assignments)
        with TerminalReporter(out.notes) as reporter:
            rows = api.fetched_rows(named, offline, reporter) if named else None
        if predictions is not None:
            resolved = resolve(options, config, assignments)
            parsed = parse_gates(gates or (), score_names(resolved.recipe.metrics))
            comparison = api.evaluate_predictions(
                predictions, rows, resolved, baseline=baseline, limit=limit, allow_empty=allow_empty
            )
            target.conclude(comparison, parsed)
            return
        folder = api.named_model(model, "evaluate", settings, assignments)
        recipe = api.model_options(folder, settings, assignments=assignments).recipe
        if leaks:
            wanted = LeakRequest(folder, recipe, baseline, rows, limit, leak_prefix, leak_tokens, workers)
            examine_leaks(wanted, gates or (), target, dry_run)
            return
        request: EvaluateRequest | TasksRequest = EvaluateRequest(folder, recipe, baseline, rows, limit, workers)
        names: Sequence[str] = [*LOSS_SCORES, *score_names(recipe.metrics, recipe.task)]
        if tasks is not None:
            task_names = [name.strip() for name in tasks.split(",") if name.strip()]
            loaded = load_tasks(TaskSelection(task_names, include_path, num_fewshot), offline)
            request, names = TasksRequest(folder, recipe, loaded, baseline, limit, workers), loaded.score_names
        evaluate_model(request, parse_gates(gates or (), names), target, dry_run)


def _check_leaks(leaks: bool, other: Path | str | None, show: int, length: int | None) -> None:
    """Check that the options fit a leak report."""
    if leaks and (other is not None or show):
        raise UsageError("--leaks has a report of its own: leave out --predictions, --tasks, --output and --show")
    if not leaks and length is not None:
        raise UsageError("--leak-prefix and --leak-tokens are for a leak report: add --leaks")


def _check_kind(
    predictions: Path | None, tasks: str | None, has_rows: bool, allow_empty: bool, is_about_tasks: bool
) -> None:
    """Check that the options fit the subject: a model on rows, a model on tasks, or the outputs of another system."""
    if predictions is None and allow_empty:
        raise UsageError("--allow-empty is for the predictions of other systems: add --predictions FILE.jsonl")
    if tasks is not None and (predictions is not None or has_rows):
        raise UsageError("--tasks have their own rows: leave out --data and --predictions")
    if tasks is None and is_about_tasks:
        raise UsageError("--include-path and --num-fewshot are for lm-eval's tasks: add --tasks T1,T2")
