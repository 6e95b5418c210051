"""Write a run as a page: data, curves, scores, how to repeat it; or several runs side by side."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

from markupsafe import Markup

from gptj_ft.checkpoints.metadata import read_metadata
from gptj_ft.cli.html import fill_template, write_new
from gptj_ft.cli.html.charts import FEWEST_JOINED, Axis, Line, line_chart, lowest_of
from gptj_ft.cli.html.evaluation_page import change_in, marked, recorded_facts, samples_in, strip_of
from gptj_ft.cli.html.names import file_names, last_part, model_name, portable
from gptj_ft.config import yaml
from gptj_ft.config.options import Recipe
from gptj_ft.config.run_folder import Run
from gptj_ft.data.dataset import Prepared, load_dataset
from gptj_ft.data.lengths import bins_of
from gptj_ft.data.readers.source import is_prepared
from gptj_ft.errors import DataError, GptjFtError, UsageError
from gptj_ft.system.digests import read_json
from gptj_ft.system.files import disk_errors, read_text, replace_text
from gptj_ft.system.plain_text import one_line
from gptj_ft.system.units import clock, gigabytes
from gptj_ft.training.runs import Summary, summarize_run

Lines = Sequence[Mapping[str, Any]]  # of metrics.jsonl
Points = list[tuple[float, float]]
SMOOTHED = 100  # steps from which on a mean is drawn: in shorter runs it would cover the line
SAMPLES = 5  # of the greatest gains, and as many of the greatest losses
PLACES = ("weights", "optimizer_state", "precision")  # may say auto; what was chosen is among the facts
NATS = "nats per target token"
DEVICE = "device"  # name of the line of its memory, which a CPU has none of
# Charts on the machine: title, axis, and of each line its name, what it shows of a step, and in which unit.
MACHINE: Sequence[tuple[str, str, Sequence[tuple[str, str, float]]]] = (
    ("Learning rate", "learning rate", [("learning rate", "lr", 1)]),
    ("Gradient norm, before clipping", "norm", [("norm", "grad_norm", 1)]),
    ("Loss scale", "factor", [("loss scale", "loss_scale", 1)]),
    ("Throughput", "target tokens / s", [("throughput", "target_tokens_per_second", 1)]),
    ("Peak memory", "GB", [("process", "memory_bytes", 1e9), (DEVICE, "device_memory_bytes", 1e9)]),
    ("Waiting for the stores", "% of the step", [("waiting", "stall", 0.01)]),
    ("Moved by the stores in a step", "GB", [("read", "bytes_read", 1e9), ("written", "bytes_written", 1e9)]),
)
NUM_WITHOUT_STORES = 5  # of these


def write_page(run: Run, say: Callable[[str], None]) -> None:
    """Write a run's report; what goes wrong with it takes nothing from a run that is done."""
    try:
        write_run_page(run)
    except GptjFtError as error:
        say(f"no report was written: {error}")


def write_run_page(run: Run, show_text: bool = False) -> Path:
    """Write ``report.html`` into a run folder; replaced if it is there.

    Args:
        run: finished or not.
        show_text: whether texts of rows may be in it.

    Raises:
        UsageError: this is no run.
        DataError: a file of it is damaged.
        ResourceError: it cannot be written.
    """
    path = run.folder / "report.html"
    with _readable([run]):
        facts = _facts_of(run, show_text)
    with disk_errors(path):
        replace_text(path, fill_template("run.html", facts))
    return path


def write_comparison(runs: Sequence[Run], path: Path) -> None:
    """Write a new page of several runs side by side.

    Raises:
        UsageError: one is no run; the page exists, or cannot be written.
        DataError: a file of one is damaged.
        ResourceError: the disk is full.
    """
    with _readable(runs):
        facts = _compared(runs, path)
    write_new(path, fill_template("runs.html", facts))


def _compared(runs: Sequence[Run], path: Path) -> dict[str, Any]:
    names = [run.folder.resolve().name for run in runs]
    lines = [(name, run.metrics()) for name, run in zip(names, runs, strict=True)]
    overviews = [_overview(run) for run in runs]
    evaluations = [recorded_facts(run.folder) for run in runs]
    return {
        "sentence": _sentence_on(runs, names),
        "names": names,
        **_compared_changes(names, evaluations),
        "charts": _compared_charts(lines),
        "engine": _compared_machines(lines),
        "options": _differing_options(runs),
        "overviews": [
            {"name": name, "values": [overview.get(name, "") for overview in overviews]}
            for name in dict.fromkeys(name for overview in overviews for name in overview)
        ],
        "command": portable(["report", *(str(run.folder) for run in runs), "--output", str(path)]),
    }


@contextmanager
def _readable(runs: Sequence[Run]) -> Iterator[None]:
    """Turn what a file of a run that holds other values than ours leads to into an error that says so."""
    try:
        yield
    except GptjFtError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        names = " or ".join(str(run.folder) for run in runs)
        raise DataError(
            f"a JSON file of {names} holds what it should not ({type(error).__name__}: {one_line(str(error))}): "
            "`gptj-ft runs verify` names damaged files; without evaluation.json there is a page, too"
        ) from error


def _facts_of(run: Run, show_text: bool) -> dict[str, Any]:
    recipe, lines, environment = run.recipe(), run.metrics(), _environment(run)
    evaluation = recorded_facts(run.folder)
    parts, problem = _rows_of(run)
    names = _names(recipe, parts)
    train = parts.get("train")
    return {
        "subject": _subject(run, recipe),
        "headline": _headline(run, evaluation),
        "overview": _overview(run),
        "about": recipe.about,
        "source": recipe.source,
        "data": [
            (
                name, file_names(part.report.files), len(part.rows), part.report.tokens, part.report.target_tokens,
                part.report.longest,
            )
            for name, part in parts.items()
        ],
        "digests": [*_digests(parts), *([f"not shown: {problem}"] if problem else [])],
        "lengths": bins_of(train.rows.lengths()) if train else [],
        "rows_cut": train.report.rows_cut if train else 0,
        "max_length": recipe.max_length,
        "charts": _learning_charts(lines),
        "engine": _machine_charts(lines),
        "evaluation": evaluation,
        "samples": marked(samples_in(evaluation, SAMPLES)) if evaluation and show_text else [],
        "environment": {name: value for name, value in environment.items() if name != "command"},
        "commands": _commands(run, names, evaluation),
        "recipe": _recipe_text(run, names),
    }  # fmt: skip


def _rows_of(run: Run) -> tuple[dict[str, Prepared], str]:
    """Return the rows of a run by part, and why there are none: they may be of an older version, and the run done."""
    try:
        return {
            name: load_dataset(run.data / name) for name in ("train", "validation") if is_prepared(run.data / name)
        }, ""
    except (UsageError, DataError) as error:
        return {}, str(error).replace(f"{run.folder}/", "")


def _environment(run: Run) -> dict[str, Any]:
    path = run.folder / "environment.json"
    return read_json(path) if path.is_file() else {}


def _subject(run: Run, recipe: Recipe) -> str:
    """Return the subject of the page: the recipe, and the run unless it has no name of its own."""
    task, name = recipe.recipe.replace("_", " ").replace("-", " "), run.folder.resolve().name
    number = re.sub(r"^run\b[-_ ]*", "", name.removeprefix(f"{recipe.recipe}-"))
    return f"{task[:1].upper()}{task[1:]}" + (f", run\N{NO-BREAK SPACE}{number}" if number else "")


def _headline(run: Run, evaluation: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the verdict, or before an evaluation how far the run is."""
    if evaluation:
        return dict(evaluation["headline"])
    found = summarize_run(run)
    of = f" of {found.steps:,}" if found.steps else ""
    progress = "trained" if found.status == "finished" else f"{found.status} at step {found.step:,}{of}"
    before, after = found.loss_before, found.loss_after
    losses = f"validation loss {before:.4f} -> {after:.4f}" if before is not None and after is not None else ""
    return {"verdict": "", "words": progress, "figures": losses}


def _names(recipe: Recipe, parts: Mapping[str, Prepared]) -> dict[str, str]:
    """Map the folders and files of a recipe to their names on the page."""
    files = {
        "data": file_names(parts["train"].report.files) if "train" in parts else "",
        "val_data": file_names(parts["validation"].report.files) if "validation" in parts else "",
    }
    given = {key: getattr(recipe, key) for key in ("data", "val_data", "model", "output")}
    return {str(value): files.get(key) or last_part(str(value)) for key, value in given.items() if value}


def _recipe_text(run: Run, names: Mapping[str, str]) -> str:
    """Return the recipe as it was saved, without the folders of whoever ran it."""

    def renamed(line: re.Match[str]) -> str:
        value = yaml.parse(line["value"], "recipe.yaml")
        return f"{line['key']}: {names.get(value, last_part(value)) if isinstance(value, str) else line['value']}"

    text = read_text(run.recipe_file)
    return re.sub(r"(?m)^(?P<key>data|val_data|model|output): (?P<value>.*?)(?=  #|$)", renamed, text)


def _digests(parts: Mapping[str, Prepared]) -> list[str]:
    """Return a sentence for each digest of the data."""
    found = {name: part.report.data_sha256 for name, part in parts.items()}
    if len(found) > 1 and len(set(found.values())) == 1:
        return [f"SHA-256 of the data: {found['train']}; the validation rows were held out from the same data"]
    return [f"SHA-256 of the {name} data: {digest}" for name, digest in found.items()]


def _overview(run: Run) -> dict[str, str]:
    """Return a run at a glance: name of a fact -> text."""
    recipe, found, lines = run.recipe(), summarize_run(run), [line for line in run.metrics() if "loss" in line]
    tuning = read_metadata(run.model) if found.status == "finished" else None
    chosen = _environment(run)
    asked = recipe.weights, recipe.optimizer_state
    not_known = "chosen by the run, not recorded"
    placement = not_known if "auto" in asked else "weights on {}, optimizer state on {}".format(*asked)
    precision = not_known if recipe.precision == "auto" else recipe.precision
    manifest = run.data / "train" / "manifest.json"
    files = file_names(read_json(manifest)["files"]) if manifest.is_file() else model_name(str(recipe.data))
    facts = {
        "Run": run.folder.resolve().name,
        "Recipe": recipe.recipe,
        "Model": model_name(recipe.model or (tuning.base_model if tuning else "") or "the downloaded one"),
        "Data": files,
        "Status": f"{found.status}, step {found.step:,} of {found.steps or '?'}",
        "Validation loss": _losses(found),
        "Placement": str(chosen.get("placement", placement)),
        "Precision": str(chosen.get("precision", precision)),
    }
    if lines:
        seconds, targets = sum(line["seconds"] for line in lines), sum(line["target_tokens"] for line in lines)
        moved = [sum(line[name] for line in lines) for name in ("bytes_read", "bytes_written")]
        facts |= {
            "Time of steps": clock(seconds),
            "Tokens trained on": f"{targets:,}, {targets / seconds:,.1f} a second",
            "Peak memory": gigabytes(max(line["memory_bytes"] for line in lines)),
        }
        if skipped := sum(line.get("skipped", False) for line in lines):
            facts["Skipped steps"] = f"{skipped:,}, whose gradients overflowed fp16"
        if any(moved):
            facts["Moved by the stores"] = "{} read, {} written".format(*map(gigabytes, moved))
    return facts


def _losses(found: Summary) -> str:
    before, after = (f"{loss:.4f}" if loss is not None else "?" for loss in (found.loss_before, found.loss_after))
    return "none" if found.loss_before is None else f"{before} before, {after} after (lower is better)"


def _series(lines: Lines, name: str, unit: float = 1, of: str = "loss") -> Points:
    """Return a figure by step, of the lines that have another: those of steps have a loss. In fp16 some overflow."""
    return [(line["step"], line[name] / unit) for line in lines if of in line and line.get(name) is not None]


def _learning_charts(lines: Lines) -> list[dict[str, Any]]:
    loss, validation = _series(lines, "loss"), _series(lines, "validation_loss", of="validation_loss")
    losses, notes = [Line("training", loss)], []
    if len(loss) >= SMOOTHED:
        losses = [Line("training", _smoothed(loss)), Line("each step", loss, is_faint=True)]
        notes.append(f"training: mean of {_width(loss)} steps; thin: each step")
    losses.append(Line("validation", validation, marks_lowest=True))
    if len(validation) >= FEWEST_JOINED:
        step, lowest = lowest_of(validation)
        notes.append(f"ring: lowest validation loss, {lowest:.4f} after step {step:,}")
    scored = [{"step": line["step"], **line["scores"]} for line in lines if "scores" in line]
    names = sorted({name for line in scored for name in line} - {"step"})
    scores = [
        _chart(f"{name} of the sample", Axis(name), [Line(name, _series(scored, name, of=name))]) for name in names
    ]
    return [_chart("Loss", Axis(NATS), losses, "; ".join(notes)), *scores]


def _machine_charts(lines: Lines) -> list[dict[str, Any]]:
    """Return charts on the machine, those of the stores if anything was moved."""
    moves = any(line["bytes_read"] or line["bytes_written"] for line in lines if "loss" in line)
    charts = []
    for title, axis, parts in MACHINE if moves else MACHINE[:NUM_WITHOUT_STORES]:
        drawn = [Line(name, _series(lines, of, unit)) for name, of, unit in parts]
        drawn = [line for line in drawn if line.name != DEVICE or any(y for _, y in line.points)]
        charts.append(_chart(title, Axis(axis, from_zero=True), drawn))
    return charts


def _compared_charts(runs: Sequence[tuple[str, Lines]]) -> list[dict[str, Any]]:
    """Return charts of what runs learned."""
    validation = [
        Line(name, _series(lines, "validation_loss", of="validation_loss"), marks_lowest=True) for name, lines in runs
    ]
    training = [Line(name, _smoothed(_series(lines, "loss"))) for name, lines in runs]
    return [
        _chart("Validation loss", Axis(NATS), validation, "ring: the lowest of a run"),
        _chart("Training loss", Axis(NATS), training, "means of a twentieth of the steps"),
    ]


def _compared_machines(runs: Sequence[tuple[str, Lines]]) -> list[dict[str, Any]]:
    charts = []
    for title, axis, ((_, of, unit), *_) in MACHINE[:NUM_WITHOUT_STORES]:
        drawn = [Line(name, _series(lines, of, unit)) for name, lines in runs]
        charts.append(_chart(title, Axis(axis, from_zero=True), drawn))
    return charts


def _chart(title: str, y: Axis, lines: Sequence[Line], note: str = "") -> dict[str, Any]:
    """Return a chart for a page, which leaves out those of nothing."""
    return {"title": title, "note": note, "svg": Markup(line_chart(title, Axis("step"), y, lines))}


def _compared_changes(names: Sequence[str], evaluations: Sequence[Mapping[str, Any] | None]) -> dict[str, Any]:
    """Return the change of each run's main score, on one scale where it is the same score."""
    found = {
        name: (evaluation["comparison"], evaluation["main"])
        for name, evaluation in zip(names, evaluations, strict=True)
        if evaluation and evaluation["main"] in evaluation["comparison"].differences
    }
    scores = {main for _, main in found.values()}
    is_one = len(scores) == 1
    reach = max(change_in(*each).reach for each in found.values()) if is_one else None
    strips = [
        {**strip_of(*each, reach), "name": name if is_one else f"{name}: {each[1]}"} for name, each in found.items()
    ]
    what, scale = (f"of {min(scores)}", "all") if is_one else ("of each run's main score", "each line")
    own = "in one scale" if is_one else "in a scale of its own"
    return {
        "changes": [strip for strip in strips if strip["svg"]],
        "changes_caption": f"Change {what} against the baseline, with 95 % intervals, {scale} {own}",
    }


def _sentence_on(runs: Sequence[Run], names: Sequence[str]) -> tuple[str, str]:
    """Name the run with the lowest validation loss, its name apart, or say why that cannot be told."""
    losses = [summarize_run(run).loss_after for run in runs]
    known = [loss for loss in losses if loss is not None]
    if len(known) < len(runs):
        return "", f"{len(runs)} runs, not all of them validated"
    rows = [_validation_rows(run) for run in runs]
    if any(each is None or each != rows[0] for each in rows):
        return "", f"{len(runs)} runs, validated on different rows: their losses cannot be compared"
    best = losses.index(min(known))
    return names[best], f"has the lowest validation loss of {len(runs)} runs, {losses[best]:.4f}"


def _validation_rows(run: Run) -> tuple[str, ...] | None:
    """Return the digests and counts that are equal where runs were validated on the same tokens."""
    manifest = run.data / "validation" / "manifest.json"
    if not manifest.is_file():
        return None
    report = read_json(manifest)
    keys = ("data_sha256", "tokenizer_sha256", "settings_sha256", "windows", "tokens", "target_tokens")
    return tuple(str(report.get(key)) for key in keys)


def _differing_options(runs: Sequence[Run]) -> list[dict[str, Any]]:
    paths = ("data", "val_data", "model")
    recipes = [
        {
            name: model_name(str(value)) if name in paths and value else value
            for name, value in run.recipe().to_dict().items()
        }
        for run in runs
    ]
    names = dict.fromkeys(name for recipe in recipes for name in recipe)
    return [
        {"name": name, "values": [str(recipe.get(name)) for recipe in recipes]}
        for name in names
        if name not in ("output", *PLACES) and len({str(recipe.get(name)) for recipe in recipes}) > 1
    ]


def _commands(run: Run, names: Mapping[str, str], evaluation: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """Return commands, each with what it is for."""
    commands = []
    if typed := _environment(run).get("command"):
        commands.append(("Train again, as it was typed:", portable(typed[1:], names)))
    commands.append(
        (
            "Or train again from the recipe below, saved as recipe.yaml, whatever the defaults are by then:",
            "gptj-ft finetune --config recipe.yaml --output NEW",
        )
    )
    if evaluation:
        commands.append(("Measure the tuned model as above:", portable(shlex.split(evaluation["command"])[1:], names)))
    else:
        command = portable(["evaluate", str(run.folder)])
        commands.append(("Measure the tuned model, beside the one it started from:", command))
    return commands


def _width(points: Sequence[tuple[float, float]]) -> int:
    return max(2, len(points) // 20)


def _smoothed(points: Points) -> Points:
    """Return the mean of each point and those around it, a twentieth of all."""
    half = _width(points) // 2
    sums = list(accumulate((y for _, y in points), initial=0.0))
    spans = [(max(0, at - half), min(len(points), at + half + 1)) for at in range(len(points))]
    return [(x, (sums[end] - sums[start]) / (end - start)) for (x, _), (start, end) in zip(points, spans, strict=True)]
