"""The command that measures: `evaluate`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gptj_ft.cli.commands.generate import for_model
from gptj_ft.cli.options import (
    MORE,
    Assignments,
    Config,
    Device,
    DeviceMemory,
    HelpAll,
    HostMemory,
    Json,
    Map,
    MaxLength,
    Offline,
    Precision,
    Quiet,
    TunedRecipeName,
    Weights,
    complete_model,
    option_of,
)
from gptj_ft.cli.terminal.output import MEASURED, Output, as_tuple, fetched_rows
from gptj_ft.config.options import Recipe
from gptj_ft.config.resolve import resolve
from gptj_ft.errors import GateError, UsageError
from gptj_ft.system.plain_text import command_line, without_secrets
from gptj_ft.system.signals import stop_says

if TYPE_CHECKING:
    from gptj_ft.evaluation.comparison import Gate, ModelComparison
    from gptj_ft.evaluation.lm_eval.tasks import TaskSelection


MEASURING = "reading the rows, and measuring this machine, once, up to 10 s"
FLAGS = ("recipe", "map", "max_length", "seed", "device", "precision", "weights", "device_memory", "host_memory")


def evaluate(
    model: Annotated[
        str | None, typer.Argument(help="model or run; default: the newest run", autocompletion=complete_model)
    ] = None,
    data: Annotated[str | None, option_of("data", "rows to measure on; default: those that the run held out")] = None,
    recipe: TunedRecipeName = None,
    map: Map = None,
    baseline: Annotated[
        str, typer.Option("--baseline", help="model to compare with; auto: what it was tuned from; none")
    ] = "auto",
    predictions: Annotated[
        Path | None,
        typer.Option(
            "--predictions",
            metavar="FILE.jsonl",
            help="score these outputs of any system instead of a model's: lines of id and prediction, or SQuAD's form, "
            "{id: text}; --baseline may be such a file, too",
        ),
    ] = None,
    allow_empty: Annotated[
        bool, typer.Option("--allow-empty", help="score empty predictions as they are", rich_help_panel=MORE)
    ] = False,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="use the first rows only")] = None,
    show: Annotated[int, typer.Option("--show", min=0, help="print this many answers beside what was expected")] = 0,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE.jsonl", help="write a line for each row: answer, scores")
    ] = None,
    reports: Annotated[
        list[Path] | None, typer.Option("--report", metavar="FILE", help="write all of it down: .json, .md or .html")
    ] = None,
    gates: Annotated[
        list[str] | None,
        typer.Option("--gate", metavar="SCORE>=N", help="exit with 6 if the score is not so, e.g. 'rougeL>=30'"),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            "--tasks", metavar="T1,T2", help="measure by tasks of EleutherAI's lm-eval instead", rich_help_panel=MORE
        ),
    ] = None,
    include_path: Annotated[
        Path | None,
        typer.Option(
            "--include-path", metavar="FOLDER", help="with --tasks: more of them, as YAML files", rich_help_panel=MORE
        ),
    ] = None,
    num_fewshot: Annotated[
        int | None,
        typer.Option("--num-fewshot", min=0, help="with --tasks: examples before each question", rich_help_panel=MORE),
    ] = None,
    max_length: MaxLength = None,
    seed: Annotated[int | None, option_of("seed", "of the intervals, which are drawn by lot", more=True)] = None,
    device: Device = None,
    precision: Precision = None,
    weights: Weights = None,
    device_memory: DeviceMemory = None,
    host_memory: HostMemory = None,
    config: Config = None,
    assignments: Assignments = None,
    offline: Offline = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show what it will take and stop")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
    help_all: HelpAll = False,
) -> None:
    """Measure a model beside the one it was tuned from.

    Loss, perplexity and the scores of the recipe. Each score has its 95 % interval, and the change has one, too. An
    evaluation that was stopped goes on when it is started again.
    """
    given = locals()
    flags = {name: given[name] for name in FLAGS}
    out = Output(as_json, quiet)
    with out.activity():
        from gptj_ft.cli.html.evaluation_page import check_report_path
        from gptj_ft.evaluation.comparison import parse_gates
        from gptj_ft.evaluation.metrics import score_names
        from gptj_ft.evaluation.metrics.language_model import NAMES
        from gptj_ft.system.atomic import require_new

    for path in reports or ():
        check_report_path(path)
    if output is not None:
        require_new(output)
    if predictions is None and allow_empty:
        raise UsageError("--allow-empty is about the predictions of other systems: add --predictions FILE.jsonl")
    if tasks is not None and (predictions is not None or data):
        raise UsageError("--tasks have rows of their own: leave out --data and --predictions")
    if tasks is None and (include_path is not None or num_fewshot is not None):
        raise UsageError("--include-path and --num-fewshot are about lm-eval's tasks: add --tasks T1,T2")
    if predictions is not None and dry_run:
        raise UsageError("--dry-run shows what reading a model takes; --predictions reads none: leave one out")
    rows = fetched_rows(data, offline, out) if data else None
    wishes = Wishes(output, reports or [], show, out, shlex.join(["gptj-ft", *without_secrets(sys.argv[1:])]))
    if predictions is not None:
        options = resolve(flags, config, as_tuple(assignments)).recipe
        asked = parse_gates(gates or (), score_names(options.metrics))
        _conclude(_score(predictions, options, rows, baseline, (limit, allow_empty)), asked, wishes)
        return
    from gptj_ft.checkpoints.base_model import default_model, find_model

    folder = find_model(model) if model else default_model("evaluate")
    options = for_model(folder, flags, config, assignments).recipe
    if tasks is not None:
        pass
        from gptj_ft.evaluation.lm_eval.tasks import TaskSelection

        names = [name.strip() for name in tasks.split(",") if name.strip()]
        chosen = TaskSelection(names, include_path, num_fewshot, limit)
        judged = measure_tasks((folder, baseline), options, chosen, gates or (), (out, dry_run, offline))
        if judged is not None:
            _conclude(*judged, wishes)
        return
    asked = parse_gates(gates or (), [*NAMES, *score_names(options.metrics)])
    verdict = _measure(folder, options, (rows, limit), baseline, (out, dry_run))
    if verdict is not None:
        next_ = [*_record(folder, verdict, wishes), command_line("generate", "--model", folder) + ' "prompt"']
        _conclude(verdict, asked, wishes, next_)


@dataclass(frozen=True)
class Wishes:
    """What is to become of a verdict: a line for each row, reports, rows shown, where; and what was typed."""

    output: Path | None
    reports: list[Path]
    show: int
    out: Output
    command: str


def _conclude(verdict: ModelComparison, asked: Sequence[Gate], wishes: Wishes, next_: Sequence[str] = ()) -> None:
    """Show a verdict and what to type next, and write it down.

    Raises:
        GateError: a score is not what was asked for.
    """
    from gptj_ft.cli.html.evaluation_page import facts_of, scores_text, show_verdict, write_report
    from gptj_ft.evaluation.comparison import failed_gates
    from gptj_ft.evaluation.predictions import write_outputs

    not_reached = failed_gates(asked, verdict)
    facts = facts_of(verdict, wishes.command, wishes.show)
    json_facts = {**verdict.to_dict(wishes.show > 0), "gates_missed": not_reached}
    if wishes.output is not None:
        write_outputs(wishes.output, verdict.model, verdict.baseline)
    for path in wishes.reports:
        write_report(path, facts, json_facts)
    written = [path for path in (wishes.output, *wishes.reports) if path is not None]
    wishes.out.finish(json_facts, scores_text(facts), lambda console: show_verdict(console, facts, written, next_))
    if not_reached and wishes.out.as_json:  # said in the one object that is printed
        raise typer.Exit(GateError.exit_code)
    if not_reached:
        raise GateError("not reached: " + "; ".join(not_reached))


def _measure(
    folder: Path, options: Recipe, rows: tuple[str | None, int | None], baseline: str, shown: tuple[Output, bool]
) -> ModelComparison | None:
    """Measure a model and its baseline on rows, or so many of them; nothing for ``shown``'s second, a dry run."""
    from gptj_ft.cli.terminal.screen import whole
    from gptj_ft.cli.terminal.tables import show_reading
    from gptj_ft.data.load import data_path
    from gptj_ft.evaluation.comparison import compare_models
    from gptj_ft.evaluation.evaluate import choose_baseline, default_rows, evaluate_model, fitted, plan_evaluation
    from gptj_ft.planning.machine_profile import are_known
    from gptj_ft.system.machine import choose_device
    from gptj_ft.system.paths import home

    (named, limit), (out, dry_run) = rows, shown
    data = data_path(named) if named else default_rows(folder)
    other = choose_baseline(folder, baseline)
    missing = "none: what this model was tuned from is not there; --baseline names one"
    models = {"baseline": other, "model": folder} if other is not None else {"model": folder}
    asked = options.max_length
    device = choose_device(options.device)
    with out.activity("reading the rows" if are_known(device, home()) else MEASURING):
        options = fitted(options, models.values(), data)
        planned = {name: plan_evaluation(each, options, data, limit) for name, each in models.items()}
    most = max((each.plan for each in planned.values()), key=lambda plan: plan.device_bytes + plan.host_bytes)
    about = [
        ("model", whole(str(folder))),
        ("baseline", whole(str(other)) if other else missing if baseline == "auto" else "none"),
        ("rows", whole(str(data)) + (f", the first {limit:,}" if limit else "")),
        ("measured", ", ".join(("loss and perplexity", *options.metrics))),
    ]
    if options.max_length < asked:
        cut = f"max_length is {options.max_length:,}, the context of the model, and not {asked:,}: rows are cut to that"
        about.append(("note", cut))
        planned = {name: each.with_note(cut) for name, each in planned.items()}
    if dry_run:
        out.finish(most.to_dict(), "", lambda console: show_reading(console, "The evaluation", about, most))
        return None
    show_reading(out.notes, "The evaluation", about, most)
    found = {}
    for name, each in planned.items():
        with stop_says(lambda: MEASURED), out.bar(name, "rows") as advance:
            found[name] = evaluate_model(each, advance)
    verdict = compare_models(found["model"], found.get("baseline"), options.metrics, options.seed)
    for each in planned.values():
        each.journal.close()
    return verdict


def _record(folder: Path, verdict: ModelComparison, wishes: Wishes) -> tuple[str, ...]:
    """Put the verdict into the report of the run that the model is of, if it is of one; return how to see it."""
    from gptj_ft.cli.commands.finetune import write_page
    from gptj_ft.cli.html.evaluation_page import record
    from gptj_ft.config.run_folder import Run

    run = Run(folder.resolve().parent)
    if not run.recipe_file.is_file() or run.model != folder.resolve():
        return ()
    record(run.folder, verdict, wishes.command)
    write_page(str(run.folder), wishes.out.notes)
    return (command_line("report", folder.parent, "--show-text"),)


def _score(
    predictions: Path, options: Recipe, rows: str | None, baseline: str, settings: tuple[int | None, bool]
) -> ModelComparison:
    from gptj_ft.data.load import data_path
    from gptj_ft.evaluation.comparison import compare_models
    from gptj_ft.evaluation.predictions import score_predictions

    if not options.metrics:
        raise UsageError("which scores? name a recipe, e.g. --recipe summarization, or add --set metrics=[rouge]")
    data = data_path(rows) if rows else None
    before = None
    if baseline not in ("auto", "none"):
        before = score_predictions(Path(baseline), options, data, *settings)
    after = score_predictions(predictions, options, data, *settings)
    return compare_models(after, before, options.metrics, options.seed)


def measure_tasks(
    models: tuple[Path, str],
    options: Recipe,
    chosen: TaskSelection,
    gates: Sequence[str],
    shown: tuple[Output, bool, bool],
) -> tuple[ModelComparison, list[Gate]] | None:
    """Measure a model, and what it was tuned from, by tasks; nothing on a dry run.

    Args:
        models: the model's folder, and what --baseline says.
        options: how the models are read.
        chosen: the tasks.
        gates: scores that are asked for.
        shown: where, whether it is a dry run, and whether there is to be no network.
    """
    from gptj_ft.cli.terminal.screen import whole
    from gptj_ft.cli.terminal.tables import show_reading
    from gptj_ft.evaluation.comparison import parse_gates
    from gptj_ft.evaluation.evaluate import choose_baseline
    from gptj_ft.evaluation.lm_eval.tasks import ask, compare_on_tasks, load_tasks, plan_tasks

    (folder, baseline), (out, dry_run, offline) = models, shown
    loaded = load_tasks(chosen, offline)
    asked = parse_gates(gates, loaded.score_names)
    other = choose_baseline(folder, baseline)
    named = {"baseline": other, "model": folder} if other is not None else {"model": folder}
    planned = {name: plan_tasks(each, options) for name, each in named.items()}
    most = max((each.plan for each in planned.values()), key=lambda plan: plan.device_bytes + plan.host_bytes)
    about = [
        ("model", whole(str(folder))),
        ("baseline", whole(str(other)) if other else "none"),
        ("tasks", ", ".join(chosen.names)),
    ]
    if dry_run:
        out.finish(most.to_dict(), "", lambda console: show_reading(console, "The evaluation", about, most))
        return None
    show_reading(out.notes, "The evaluation", about, most)
    found, journals = {}, []
    for name, each in planned.items():
        with stop_says(lambda: MEASURED), out.bar(name, "questions") as advance:
            found[name], own = ask(each, loaded, chosen.limit, advance)
        journals += own
    verdict = compare_on_tasks(found["model"], found.get("baseline"), options.seed)
    for journal in journals:
        journal.close()
    return verdict, asked
