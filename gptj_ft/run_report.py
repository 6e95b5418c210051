"""A run as a page: what was trained on what, how it went, what came of it, how to repeat it. And runs side by side."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from markupsafe import Markup

from gptj_ft.data.lengths import bins_of
from gptj_ft.data.prepared import Prepared, is_prepared, load
from gptj_ft.data.targets import lengths_of
from gptj_ft.durable import new_files, replace_text
from gptj_ft.errors import ResourceError
from gptj_ft.evaluation_report import evaluation_of, samples_in, table_in
from gptj_ft.machine import gigabytes
from gptj_ft.pages import to_page
from gptj_ft.pages.charts import Axis, Line, Span, bar_chart, intervals_chart, line_chart
from gptj_ft.run import Run, read_json
from gptj_ft.runs import Summary, summarize
from gptj_ft.screen import clock
from gptj_ft.tuning import read_tuning

Points = list[tuple[float, float]]
SMOOTHED = 30  # steps from which on a mean is drawn
SAMPLES = 5  # of the greatest gains, and as many of the greatest losses
# Of a step: title, axis, value.
CURVES: Sequence[tuple[str, str, Callable[[Mapping[str, Any]], float]]] = (
    ("Learning rate", "learning rate", lambda line: line["lr"]),
    ("Gradient norm, before clipping", "norm", lambda line: line["grad_norm"]),
    ("Throughput", "target tokens / s", lambda line: line["target_tokens_per_second"]),
    ("Waiting for the stores", "% of the step", lambda line: 100 * line["stall"]),
)


def write_report(run: Run, show_text: bool = False) -> Path:
    """Write ``report.html`` into a run folder; replaced if it is there.

    Args:
        run: finished or not.
        show_text: whether texts of rows may be in it.

    Raises:
        UsageError: this is no run.
        ResourceError: it cannot be written.
    """
    path = run.folder / "report.html"
    try:
        replace_text(path, to_page("run", facts_of(run, show_text)).encode(errors="backslashreplace").decode())
    except OSError as error:
        raise ResourceError(f"cannot write {path}: {error.strerror}") from error
    return path


def write_comparison(runs: Sequence[Run], path: Path) -> None:
    """Write a new page of several runs side by side.

    Raises:
        UsageError: one is no run; the page exists, or cannot be written.
        ResourceError: the disk is full.
    """
    names = [run.folder.resolve().name for run in runs]
    lines = [run.metrics() for run in runs]
    facts = {
        "runs": [_overview(run) for run in runs],
        "charts": _compared_charts(names, lines),
        "options": _differing_options(runs),
        "command": shlex.join(["gptj-ft", "report", *(str(run.folder) for run in runs), "--output", str(path)]),
    }
    with new_files(path) as (file,):
        file.write(to_page("runs", facts).encode(errors="backslashreplace").decode())


def facts_of(run: Run, show_text: bool) -> dict[str, Any]:
    """Return what there is to say of a run."""
    recipe, lines = run.recipe(), run.metrics()
    environment = read_json(run.folder / "environment.json") if (run.folder / "environment.json").is_file() else {}
    evaluation = evaluation_of(run.folder)
    parts = {name: load(run.data / name) for name in ("train", "validation") if is_prepared(run.data / name)}
    return {
        "name": run.folder.resolve().name,
        "overview": _overview(run),
        "about": recipe.about,
        "source": recipe.source,
        "data": _data(parts),
        "charts": [*_charts(lines), *_length_charts(parts)],
        "evaluation": _evaluation(evaluation) if evaluation else None,
        "samples": samples_in(evaluation, SAMPLES) if evaluation and show_text else [],
        "has_samples": evaluation is not None,
        "environment": {name: value for name, value in environment.items() if name != "command"},
        "commands": _commands(run, environment, evaluation),
        "recipe": run.recipe_file.read_text(encoding="utf-8"),
    }


def _overview(run: Run) -> dict[str, str]:
    """Return a run at a glance: name of a fact -> text."""
    recipe, found, lines = run.recipe(), summarize(run), [line for line in run.metrics() if "loss" in line]
    tuning = read_tuning(run.model) if found.status == "finished" else None
    facts = {
        "Run": run.folder.resolve().name,
        "Recipe": recipe.recipe,
        "Model": recipe.model or (tuning.base_model if tuning else "") or "the downloaded one",
        "Data": str(recipe.data),
        "Status": f"{found.status}, step {found.step:,} of {found.steps or '?'}",
        "Validation loss": _losses(found),
        "Placement": f"weights {recipe.weights}, optimizer state {recipe.optimizer_state}; {recipe.precision}",
    }
    if lines:
        seconds, targets = sum(line["seconds"] for line in lines), sum(line["target_tokens"] for line in lines)
        moved = (sum(line[name] for line in lines) for name in ("bytes_read", "bytes_written"))
        facts |= {
            "Time of steps": clock(seconds),
            "Target tokens": f"{targets:,}, {targets / seconds:,.1f} a second",
            "Peak memory": gigabytes(max(line["memory_bytes"] for line in lines)),
            "Moved by the stores": "{} read, {} written".format(*map(gigabytes, moved)),
        }
    return facts


def _losses(found: Summary) -> str:
    before, after = (f"{loss:.4f}" if loss is not None else "?" for loss in (found.loss_before, found.loss_after))
    return "none" if found.loss_before is None else f"{before} before, {after} after"


def _data(parts: Mapping[str, Prepared]) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "files": ", ".join(part.report.files),
            "documents": len(part.rows),
            "tokens": part.report.tokens,
            "target_tokens": part.report.target_tokens,
            "longest": part.report.longest,
            "sha256": part.report.data_sha256,
        }
        for name, part in parts.items()
    ]


def _charts(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    steps = [line for line in lines if "loss" in line]
    loss: Points = [(line["step"], line["loss"]) for line in steps]
    validation: Points = [(line["step"], line["validation_loss"]) for line in lines if "validation_loss" in line]
    losses = [Line("training", loss), Line("validation", validation)]
    if len(loss) >= SMOOTHED:
        losses = [Line("training, mean", _smoothed(loss)), losses[1], Line("training", loss, is_faint=True)]
    charts = [_chart("Loss", "nats per target token", losses)]
    for name in sorted({name for line in lines for name in line.get("scores", {})}):
        points = [(line["step"], line["scores"][name]) for line in lines if name in line.get("scores", {})]
        charts.append(_chart(f"{name} of the sample", name, [Line(name, points)]))
    for title, unit, value in CURVES:
        points = [(line["step"], value(line)) for line in steps]
        charts.append(_chart(title, unit, [Line(title, points)], from_zero=True))
    memory = [Line("process", [(line["step"], line["memory_bytes"] / 1e9) for line in steps])]
    if any(line["device_memory_bytes"] for line in steps):
        memory.append(Line("device", [(line["step"], line["device_memory_bytes"] / 1e9) for line in steps]))
    traffic = [
        Line(name, [(line["step"], line[f"bytes_{name}"] / 1e9) for line in steps]) for name in ("read", "written")
    ]
    charts.append(_chart("Peak memory", "GB", memory, from_zero=True))
    charts.append(_chart("Moved by the stores in a step", "GB", traffic, from_zero=True))
    return [chart for chart in charts if chart["svg"]]


def _chart(title: str, unit: str, lines: Sequence[Line], from_zero: bool = False) -> dict[str, Any]:
    return {"title": title, "svg": Markup(line_chart(title, Axis("step"), Axis(unit, from_zero), lines))}


def _length_charts(parts: Mapping[str, Prepared]) -> list[dict[str, Any]]:
    if "train" not in parts:
        return []
    bins = [(f"{each.first:,}", float(each.rows)) for each in bins_of(lengths_of(parts["train"].rows))]
    return [{"title": "Lengths of rows trained on", "svg": Markup(bar_chart("Lengths", "tokens, from", "rows", bins))}]


def _compared_charts(names: Sequence[str], runs: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    def of(value: Callable[[Mapping[str, Any]], float], key: str) -> list[Line]:
        return [
            Line(name, [(line["step"], value(line)) for line in lines if key in line])
            for name, lines in zip(names, runs, strict=True)
        ]

    charts = [
        _chart("Validation loss", "nats per target token", of(lambda line: line["validation_loss"], "validation_loss")),
        _chart("Training loss", "nats per target token", of(lambda line: line["loss"], "loss")),
        *(_chart(title, unit, of(value, "loss"), from_zero=True) for title, unit, value in CURVES),
        _chart("Peak memory", "GB", of(lambda line: line["memory_bytes"] / 1e9, "loss"), from_zero=True),
    ]
    return [chart for chart in charts if chart["svg"]]


def _differing_options(runs: Sequence[Run]) -> list[dict[str, Any]]:
    recipes = [run.recipe().to_dict() for run in runs]
    names = dict.fromkeys(name for recipe in recipes for name in recipe)
    return [
        {"name": name, "values": [str(recipe.get(name)) for recipe in recipes]}
        for name in names
        if name != "output" and len({str(recipe.get(name)) for recipe in recipes}) > 1
    ]


def _evaluation(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    model, baseline = evaluation["model"], evaluation["baseline"]
    systems = [*(["baseline"] if baseline else []), "model"]
    rows = []
    for name in model["scores"]:
        if name in ("loss",) or name.endswith("perplexity"):
            continue
        found = [each for each in (baseline, model) if each]
        spans = [Span(each["scores"][name], *each["intervals"][name]) for each in found if name in each["scores"]]
        rows.append((name, spans))
    by_row = evaluation["by_row"]
    return {
        "rows": model["rows"],
        "table": table_in(evaluation),
        "baseline": baseline["model"] if baseline else None,
        "by_row": by_row,
        "by_row_svg": Markup(
            bar_chart("Rows", by_row["score"], "rows", [(name, by_row[name]) for name in ("worse", "same", "better")])
        )
        if by_row
        else "",
        "svg": Markup(intervals_chart("Scores", "score, with its 95 % interval", systems, rows)),
        "notes": model["notes"],
    }


def _commands(run: Run, environment: Mapping[str, Any], evaluation: Mapping[str, Any] | None) -> list[str]:
    commands = [f"gptj-ft finetune --config {shlex.quote(str(run.recipe_file))} --output NEW"]
    if environment.get("command"):
        commands.insert(0, shlex.join(["gptj-ft", *environment["command"][1:]]))
    return [*commands, evaluation["command"] if evaluation else f"gptj-ft evaluate {shlex.quote(str(run.folder))}"]


def _smoothed(points: Points) -> Points:
    """Return the mean of each point and those before it, a twentieth of all."""
    width = max(2, len(points) // 20)
    sums = list(accumulate((y for _, y in points), initial=0.0))
    starts = [max(0, at + 1 - width) for at in range(len(points))]
    return [(points[at][0], (sums[at + 1] - sums[start]) / (at + 1 - start)) for at, start in enumerate(starts)]
