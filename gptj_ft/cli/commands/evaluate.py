"""The command `evaluate`: measure a model beside the one it was tuned from."""

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
    Given,
    Json,
    Nproc,
    Offline,
    Quiet,
    complete_model,
    flag,
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
    meanings={"recipe": TUNED_RECIPE, "seed": "of the intervals, which are drawn by lot"},
)
def evaluate(
    *,
    model: Annotated[
        str | None, typer.Argument(help="model or run; default: the newest run", autocompletion=complete_model)
    ] = None,
    data: Annotated[str | None, option_of("data", "rows to measure on; default: those that the run held out")] = None,
    options: Given,
    baseline: Annotated[str, flag("model to compare with; auto: what it was tuned from; none")] = "auto",
    predictions: Annotated[
        Path | None,
        flag(
            "score these outputs of any system instead of a model's: lines of id and prediction, or SQuAD's form, "
            "{id: text}; --baseline may be such a file, too",
            metavar="FILE.jsonl",
        ),
    ] = None,
    allow_empty: Annotated[bool, flag("score empty predictions as they are", "--allow-empty", more=True)] = False,
    limit: Annotated[int | None, flag("use the first rows only", min=1)] = None,
    show: Annotated[int, flag("print this many answers beside what was expected", min=0)] = 0,
    output: Annotated[Path | None, flag("write a line for each row: answer, scores", metavar="FILE.jsonl")] = None,
    reports: Annotated[
        list[Path] | None, flag("write all of it down: .json, .md or .html", "--report", metavar="FILE")
    ] = None,
    gates: Annotated[
        list[str] | None, flag("exit with 6 if the score is not so, e.g. 'rougeL>=30'", "--gate", metavar="SCORE>=N")
    ] = None,
    tasks: Annotated[
        str | None, flag("measure by tasks of EleutherAI's lm-eval instead", metavar="T1,T2", more=True)
    ] = None,
    include_path: Annotated[
        Path | None, flag("with --tasks: more of them, as YAML files", metavar="FOLDER", more=True)
    ] = None,
    num_fewshot: Annotated[int | None, flag("with --tasks: examples before each question", min=0, more=True)] = None,
    config: Config = None,
    assignments: Assignments = None,
    offline: Offline = False,
    dry_run: Annotated[bool, flag("show what it will take and stop", "--dry-run")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
    nproc: Nproc = None,
) -> None:
    """Measure a model beside the one it was tuned from.

    Loss, perplexity and the scores of the recipe. Each score has its 95 % interval, and the change has one, too. An
    evaluation that was stopped goes on when it is started again.
    """
    from gptj_ft.cli.several import leading

    with leading(nproc) as workers:
        _check_kind(predictions, tasks, data, allow_empty, include_path is not None or num_fewshot is not None)
        if predictions is not None and (dry_run or nproc not in (None, 1)):
            given = "--dry-run shows what reading a model takes" if dry_run else "--nproc deals out what one computes"
            raise UsageError(f"{given}; --predictions reads none: leave one out")
        out = Output(as_json, quiet)
        with out.activity():
            from gptj_ft import api
            from gptj_ft.cli.terminal.evaluation import EvaluationOutput, evaluate_model
            from gptj_ft.cli.terminal.progress import TerminalReporter
            from gptj_ft.evaluation.comparison import parse_gates
            from gptj_ft.evaluation.evaluate import EvaluateRequest, TasksRequest
            from gptj_ft.evaluation.lm_eval.tasks import TaskSelection, load_tasks
            from gptj_ft.evaluation.metrics import score_names
            from gptj_ft.evaluation.metrics.language_model import LOSS_SCORES

        typed = shlex.join(["gptj-ft", *without_secrets(sys.argv[1:])])
        shown = EvaluationOutput(out, output, reports or [], show, typed)
        shown.check_files()
        with TerminalReporter(out.notes) as reporter:
            rows = api.fetched_rows(data, offline, reporter) if data else None
        if predictions is not None:
            resolved = resolve(options, config, assignments)
            asked = parse_gates(gates or (), score_names(resolved.recipe.metrics))
            found = api.evaluate_predictions(
                predictions, rows, resolved, baseline=baseline, limit=limit, allow_empty=allow_empty
            )
            shown.conclude(found, asked)
            return
        folder = api.named_model(model, "evaluate")
        recipe = api.model_options(folder, {**options, "config": config}, assignments=assignments).recipe
        request: EvaluateRequest | TasksRequest = EvaluateRequest(folder, recipe, baseline, rows, limit, workers)
        names: Sequence[str] = [*LOSS_SCORES, *score_names(recipe.metrics, recipe.task)]
        if tasks is not None:
            wanted = [name.strip() for name in tasks.split(",") if name.strip()]
            loaded = load_tasks(TaskSelection(wanted, include_path, num_fewshot), offline)
            request, names = TasksRequest(folder, recipe, loaded, baseline, limit, workers), loaded.score_names
        evaluate_model(request, parse_gates(gates or (), names), shown, dry_run)


def _check_kind(
    predictions: Path | None, tasks: str | None, data: str | None, allow_empty: bool, is_about_tasks: bool
) -> None:
    """Check that what is given is about what is measured: a model, the outputs of another system, or tasks."""
    if predictions is None and allow_empty:
        raise UsageError("--allow-empty is about the predictions of other systems: add --predictions FILE.jsonl")
    if tasks is not None and (predictions is not None or data):
        raise UsageError("--tasks have rows of their own: leave out --data and --predictions")
    if tasks is None and is_about_tasks:
        raise UsageError("--include-path and --num-fewshot are about lm-eval's tasks: add --tasks T1,T2")
