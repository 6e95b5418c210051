"""The command that measures: `evaluate`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gptj_ft.commands.answers import for_model
from gptj_ft.commands.terminal import as_tuple, bar, console_for, fetched_rows, print_json
from gptj_ft.errors import GateError, UsageError
from gptj_ft.options import Assignments, Config, Data, Device, Json, Map, Offline, Precision, RecipeName, Seed, Weights
from gptj_ft.recipe import Recipe, resolve

if TYPE_CHECKING:
    from gptj_ft.verdict import Verdict


def evaluate(
    model: Annotated[str | None, typer.Argument(help="model or run; default: the newest run")] = None,
    data: Data = None,
    recipe: RecipeName = None,
    map: Map = None,
    baseline: Annotated[
        str, typer.Option("--baseline", help="model to compare with; auto: what it was tuned from; none")
    ] = "auto",
    predictions: Annotated[
        Path | None,
        typer.Option(
            "--predictions",
            metavar="FILE.jsonl",
            help="score these outputs of any system instead of a model's; --baseline may be such a file, too",
        ),
    ] = None,
    allow_empty: Annotated[bool, typer.Option("--allow-empty", help="score empty predictions as they are")] = False,
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
    seed: Seed = None,
    device: Device = None,
    precision: Precision = None,
    weights: Weights = None,
    config: Config = None,
    assignments: Assignments = None,
    offline: Offline = False,
    as_json: Json = False,
) -> None:
    """Measure a model, and beside it the one it was tuned from: loss, perplexity and the recipe's scores.

    Each score has its 95 % interval, and the change has one, too. An evaluation that was stopped goes on when it is
    started again.
    """
    flags = {name: value for name, value in locals().items() if name in ("recipe", "map", "seed")}
    flags |= {"device": device, "precision": precision, "weights": weights}
    from gptj_ft.durable import require_new
    from gptj_ft.evaluation_report import check_report_path, facts_of, show_verdict, write_report
    from gptj_ft.metrics import score_names
    from gptj_ft.metrics.language_model import NAMES
    from gptj_ft.predictions import write_outputs
    from gptj_ft.verdict import missed, parse_gates

    for path in reports or ():
        check_report_path(path)
    if output is not None:
        require_new(output)
    if predictions is None and allow_empty:
        raise UsageError("--allow-empty is about the predictions of other systems: add --predictions FILE.jsonl")
    rows = fetched_rows(data, offline, as_json) if data else None
    command = shlex.join(["gptj-ft", *sys.argv[1:]])
    if predictions is not None:
        options = resolve(flags, config, as_tuple(assignments)).recipe
        asked = parse_gates(gates or (), score_names(options.metrics))
        verdict = _score(predictions, options, rows, baseline, (limit, allow_empty))
    else:
        from gptj_ft.home import default_model, find_model

        folder = find_model(model) if model else default_model("evaluate")
        options = for_model(folder, flags, config, assignments).recipe
        asked = parse_gates(gates or (), [*NAMES, *score_names(options.metrics)])
        verdict = _measure(folder, options, rows, baseline, limit, as_json)
        _record(folder, verdict, command)
    not_reached = missed(asked, verdict)
    facts = facts_of(verdict, command, show)
    json_facts = {**verdict.to_dict(show > 0), "gates_missed": not_reached}
    if output is not None:
        write_outputs(output, verdict.model, verdict.baseline)
    for path in reports or ():
        write_report(path, facts, json_facts)
    if as_json:
        print_json(json_facts)
        if not_reached:  # said in the one object that is printed
            raise typer.Exit(GateError.exit_code)
        return
    show_verdict(console_for(stderr=False), facts)
    if not_reached:
        raise GateError("not reached: " + "; ".join(not_reached))


def _measure(
    folder: Path, options: Recipe, rows: str | None, baseline: str, limit: int | None, as_json: bool
) -> Verdict:
    from gptj_ft.evaluate import choose_baseline, default_rows, evaluate_model
    from gptj_ft.inputs import data_path
    from gptj_ft.verdict import judge

    data = data_path(rows) if rows else default_rows(folder)
    other = choose_baseline(folder, baseline)
    if other is None and baseline == "auto" and not as_json:
        console_for().print("no baseline: what this model was tuned from is not there; --baseline names one")
    before, first = None, None
    if other is not None:
        with bar("baseline", not as_json) as advance:
            before, first = evaluate_model(other, options, data, limit, advance)
    with bar("model", not as_json) as advance:
        after, second = evaluate_model(folder, options, data, limit, advance)
    verdict = judge(after, before, options.metrics, options.seed)
    for journal in filter(None, (first, second)):
        journal.close()
    return verdict


def _record(folder: Path, verdict: Verdict, command: str) -> None:
    """Put the verdict into the report of the run that the model is of, if it is of one."""
    from gptj_ft.evaluation_report import record
    from gptj_ft.run import Run
    from gptj_ft.run_report import write_report

    run = Run(folder.resolve().parent)
    if run.recipe_file.is_file() and run.model == folder.resolve():
        record(run.folder, verdict, command)
        write_report(run)


def _score(
    predictions: Path, options: Recipe, rows: str | None, baseline: str, settings: tuple[int | None, bool]
) -> Verdict:
    from gptj_ft.inputs import data_path
    from gptj_ft.predictions import score_predictions
    from gptj_ft.verdict import judge

    if not options.metrics:
        raise UsageError("which scores? name a recipe, e.g. --recipe summarization, or add --set metrics=[rouge]")
    data = data_path(rows) if rows else None
    before = None
    if baseline not in ("auto", "none"):
        before = score_predictions(Path(baseline), options, data, *settings)
    after = score_predictions(predictions, options, data, *settings)
    return judge(after, before, options.metrics, options.seed)
