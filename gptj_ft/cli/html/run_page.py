"""Write a page on a run (data, curves, scores, commands), or compare several runs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

from gptj_ft.checkpoints.metadata import read_metadata
from gptj_ft.cli.html import fill_template, write_new
from gptj_ft.cli.html.differences import marked
from gptj_ft.cli.html.evaluation_page import change_in, recorded_facts, samples_in, strip_of
from gptj_ft.cli.html.history import History
from gptj_ft.cli.html.names import file_names, last_part, model_name, portable, subject_of
from gptj_ft.cli.html.refresh import LIVE, PAGE, is_made_by, refresh_facts
from gptj_ft.cli.html.run_charts import compared_charts, compared_machines, learning_charts, machine_charts
from gptj_ft.config import yaml
from gptj_ft.config.options import Recipe
from gptj_ft.config.run_folder import Run, read_environment
from gptj_ft.data.dataset import Prepared, load_dataset
from gptj_ft.data.lengths import bins_of
from gptj_ft.data.readers.source import is_prepared
from gptj_ft.errors import DataError, GptjFtError, UsageError
from gptj_ft.system.atomic import replace_shared
from gptj_ft.system.digests import read_json
from gptj_ft.system.files import disk_errors, read_text
from gptj_ft.system.lock import holder
from gptj_ft.system.plain_text import one_line
from gptj_ft.system.units import clock, gigabytes
from gptj_ft.training.reporter import RECENT_STEPS
from gptj_ft.training.runs import Summary, summarize_run

SAMPLES = 5  # rows with the largest gains, and with the largest losses
TRAINING = "training"  # activity of the process that trains a run
PLACES = ("weights", "optimizer_state", "precision")  # may be auto; the overview has the choice


def write_page(run: Run, say: Callable[[str], None]) -> None:
    """Write the report of a finished run; report errors instead of raising them."""
    try:
        write_run_page(run)
    except GptjFtError as error:
        say(f"could not write the report: {error}")


def write_run_page(run: Run, show_text: bool = False, path: Path | None = None) -> Path:
    """Write the report of a run, and return its path.

    Args:
        run: run, finished or not.
        show_text: include texts of rows.
        path: new file; default: ``report.html`` in the run folder, replacing an older one.

    Raises:
        UsageError: not a run folder; the file exists, or the run writes it.
        DataError: a file of the run is damaged.
    """
    own, text = run.folder / PAGE, run_page(run, show_text)
    if path is not None:
        write_new(path, text)
        return path
    if is_made_by(LIVE, own) and is_training(run):
        raise UsageError(
            f"{run.folder} is training and rewrites its {PAGE}, which shows answers: name another page with --output "
            "FILE.html"
        )
    with disk_errors(own):
        replace_shared(own, text)
    return own


def run_page(run: Run, show_text: bool = False, refresh: Mapping[str, Any] | None = None) -> str:
    """Return the page on a run; ``refresh``: see `refresh_facts`."""
    with _readable([run]):
        return fill_template("run.html", {**_facts_of(run, show_text), **(refresh or refresh_facts())})


def write_comparison(runs: Sequence[Run], path: Path) -> None:
    """Write a new page that compares runs.

    Raises:
        UsageError: a folder is not a run, or the page exists.
        DataError: a file of a run is damaged.
    """
    write_new(path, comparison_page(runs, ["report", *(str(run.folder) for run in runs), "--output", str(path)]))


def comparison_page(runs: Sequence[Run], command: Sequence[str], refresh: Mapping[str, Any] | None = None) -> str:
    """Return the page that compares runs.

    Args:
        runs: finished or not.
        command: arguments of the program that write the page.
        refresh: see `refresh_facts`.
    """
    with _readable(runs):
        facts = {**_compared(runs), "command": portable(command), **(refresh or refresh_facts())}
        return fill_template("runs.html", facts)


def is_training(run: Run) -> bool:
    """Tell whether a process trains a run."""
    worker = holder(run.folder)
    return worker is not None and worker.work == TRAINING


def _compared(runs: Sequence[Run]) -> dict[str, Any]:
    names = [run.folder.resolve().name for run in runs]
    histories = [(name, History.of(run.iter_metrics())) for name, run in zip(names, runs, strict=True)]
    overviews = [_overview(run) for run in runs]
    evaluations = [recorded_facts(run.folder) for run in runs]
    return {
        "sentence": _sentence_on(runs, names),
        "names": names,
        **_compared_changes(names, evaluations),
        "charts": compared_charts(histories),
        "engine": compared_machines(histories),
        "options": _differing_options(runs),
        "overviews": [
            (name, *(overview.get(name, "") for overview in overviews))
            for name in dict.fromkeys(name for overview in overviews for name in overview)
        ],
    }


@contextmanager
def _readable(runs: Sequence[Run]) -> Iterator[None]:
    """Translate errors caused by unexpected values in files of the runs."""
    try:
        yield
    except GptjFtError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError, RecursionError) as error:
        names = " or ".join(str(run.folder) for run in runs)
        raise DataError(
            f"a JSON file of {names} has unexpected content ({type(error).__name__}: {one_line(str(error))}): find it "
            "with `gptj-ft runs verify`, or remove evaluation.json to get a page without scores"
        ) from error


def _facts_of(run: Run, show_text: bool) -> dict[str, Any]:
    recipe, history, environment = run.recipe(), History.of(run.iter_metrics()), read_environment(run)
    evaluation = recorded_facts(run.folder)
    parts, problem = _rows_of(run)
    names = _names(recipe, parts)
    train = parts.get("train")
    return {
        "subject": subject_of(recipe, run),
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
        "charts": learning_charts(history),
        "engine": machine_charts(history),
        "evaluation": evaluation,
        "samples": marked(samples_in(evaluation, SAMPLES)) if evaluation and show_text else [],
        "environment": {name: value for name, value in environment.items() if name != "command"},
        "commands": _commands(run, names, evaluation),
        "recipe": _recipe_text(run, names),
    }  # fmt: skip


def _rows_of(run: Run) -> tuple[dict[str, Prepared], str]:
    """Return the rows of a run by part, or an error message: rows of an older version may be unreadable."""
    try:
        return {
            name: load_dataset(run.data / name) for name in ("train", "validation") if is_prepared(run.data / name)
        }, ""
    except (UsageError, DataError) as error:
        return {}, str(error).replace(f"{run.folder}/", "")


def _headline(run: Run, evaluation: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the verdict, or the progress of a run without an evaluation."""
    if evaluation:
        return dict(evaluation["headline"])
    summary = summarize_run(run)
    of = f" of {summary.steps:,}" if summary.steps else ""
    progress = "trained" if summary.status == "finished" else f"{summary.status} at step {summary.step:,}{of}"
    before, after = summary.loss_before, summary.loss_after
    losses = f"validation loss {before:.4f} -> {after:.4f}" if before is not None and after is not None else ""
    return {"verdict": "", "words": progress, "figures": losses}


def _names(recipe: Recipe, parts: Mapping[str, Prepared]) -> dict[str, str]:
    """Map the paths of a recipe to names for the page."""
    files = {
        "data": file_names(parts["train"].report.files) if "train" in parts else "",
        "val_data": file_names(parts["validation"].report.files) if "validation" in parts else "",
    }
    paths = {key: getattr(recipe, key) for key in ("data", "val_data", "model", "output")}
    return {str(value): files.get(key) or last_part(str(value)) for key, value in paths.items() if value}


def _recipe_text(run: Run, names: Mapping[str, str]) -> str:
    """Return the saved recipe without local folders."""

    def renamed(line: re.Match[str]) -> str:
        value = yaml.parse(line["value"], "recipe.yaml")
        return f"{line['key']}: {names.get(value, last_part(value)) if isinstance(value, str) else line['value']}"

    text = read_text(run.recipe_file)
    return re.sub(r"(?m)^(?P<key>data|val_data|model|output): (?P<value>.*?)(?=  #|$)", renamed, text)


def _digests(parts: Mapping[str, Prepared]) -> list[str]:
    """Return a sentence for each digest of the data."""
    digests = {name: part.report.data_sha256 for name, part in parts.items()}
    if len(digests) > 1 and len(set(digests.values())) == 1:
        return [f"SHA-256 of the data: {digests['train']}; the validation rows were held out from it"]
    return [f"SHA-256 of the {name} data: {digest}" for name, digest in digests.items()]


def _overview(run: Run) -> dict[str, str]:
    """Return the facts of a run: label -> text."""
    recipe, summary, lines = run.recipe(), summarize_run(run), [line for line in run.metrics() if "loss" in line]
    tuning = read_metadata(run.model) if summary.status == "finished" else None
    chosen = read_environment(run)
    places = recipe.weights, recipe.optimizer_state
    unknown = "chosen by the run, not recorded"
    placement = unknown if "auto" in places else "weights on {}, optimizer state on {}".format(*places)
    precision = unknown if recipe.precision == "auto" else recipe.precision
    manifest = run.data / "train" / "manifest.json"
    files = file_names(read_json(manifest)["files"]) if manifest.is_file() else model_name(str(recipe.data))
    left = None
    if lines and summary.steps and summary.status == TRAINING:
        left = (summary.steps - summary.step) * fmean(line["seconds"] for line in lines[-RECENT_STEPS:])
    facts = {
        "Run": run.folder.resolve().name,
        "Recipe": recipe.recipe,
        "Model": model_name(recipe.model or (tuning.base_model if tuning else "") or "downloaded model"),
        "Data": files,
        "Status": f"{summary.status}, step {summary.step:,} of {summary.steps or '?'}",
        **({"Time left": clock(left)} if left is not None else {}),
        "Validation loss": _losses(summary),
        "Placement": str(chosen.get("placement", placement)),
        "Precision": str(chosen.get("precision", precision)),
    }
    if lines:
        seconds, targets = sum(line["seconds"] for line in lines), sum(line["target_tokens"] for line in lines)
        moved = [sum(line[name] for line in lines) for name in ("bytes_read", "bytes_written")]
        facts |= {
            "Time of steps": clock(seconds),
            "Tokens trained on": f"{targets:,}, {targets / seconds:,.1f} per second",
            "Peak memory": gigabytes(max(line["memory_bytes"] for line in lines)),
        }
        if skipped := sum(line.get("skipped", False) for line in lines):
            facts["Skipped steps"] = f"{skipped:,} (gradients overflowed fp16)"
        if any(moved):
            facts["Moved by the stores"] = "{} read, {} written".format(*map(gigabytes, moved))
    return facts


def _losses(summary: Summary) -> str:
    before, after = (f"{loss:.4f}" if loss is not None else "?" for loss in (summary.loss_before, summary.loss_after))
    return "none" if summary.loss_before is None else f"{before} before, {after} after (lower is better)"


def _compared_changes(names: Sequence[str], evaluations: Sequence[Mapping[str, Any] | None]) -> dict[str, Any]:
    """Return the change of each run's main score, on a common scale if the score is the same."""
    compared = {
        name: (evaluation["comparison"], evaluation["main"])
        for name, evaluation in zip(names, evaluations, strict=True)
        if evaluation and evaluation["main"] in evaluation["comparison"].differences
    }
    scores = {main for _, main in compared.values()}
    is_one = len(scores) == 1
    reach = max(change_in(*each).reach for each in compared.values()) if is_one else None
    strips = [
        {**strip_of(*each, reach), "name": name if is_one else f"{name}: {each[1]}"} for name, each in compared.items()
    ]
    scores_text = min(scores) if is_one else "each run's main score"
    scale = "all on one scale" if is_one else "each line on its own scale"
    return {
        "changes": [strip for strip in strips if strip["svg"]],
        "changes_caption": f"Change of {scores_text} against the baseline, with 95 % intervals, {scale}",
    }


def _sentence_on(runs: Sequence[Run], names: Sequence[str]) -> tuple[str, str]:
    """Return the run with the lowest validation loss and a sentence; the name is empty if losses are not comparable."""
    losses = [summarize_run(run).loss_after for run in runs]
    known = [loss for loss in losses if loss is not None]
    if len(known) < len(runs):
        return "", f"{len(runs)} runs, not all validated"
    rows = [_validation_rows(run) for run in runs]
    if any(each is None or each != rows[0] for each in rows):
        return "", f"{len(runs)} runs, validated on different rows: their losses cannot be compared"
    best = losses.index(min(known))
    return names[best], f"has the lowest validation loss of {len(runs)} runs, {losses[best]:.4f}"


def _validation_rows(run: Run) -> tuple[str, ...] | None:
    """Return digests and counts that are equal exactly if runs were validated on the same tokens."""
    manifest = run.data / "validation" / "manifest.json"
    if not manifest.is_file():
        return None
    report = read_json(manifest)
    keys = ("data_sha256", "tokenizer_sha256", "settings_sha256", "windows", "tokens", "target_tokens")
    return tuple(str(report.get(key)) for key in keys)


def _differing_options(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """Return the names and values of options that differ between runs."""
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
        (name, *(str(recipe.get(name)) for recipe in recipes))
        for name in names
        if name not in ("output", *PLACES) and len({str(recipe.get(name)) for recipe in recipes}) > 1
    ]


def _commands(run: Run, names: Mapping[str, str], evaluation: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """Return captions and commands to repeat the run."""
    commands = []
    if typed := read_environment(run).get("command"):
        commands.append(("Train again, as typed:", portable(typed[1:], names)))
    commands.append(
        (
            "Or save the recipe below as recipe.yaml and train from it, independent of later defaults:",
            "gptj-ft finetune --config recipe.yaml --output NEW",
        )
    )
    if evaluation:
        commands.append(("Evaluate the tuned model as above:", portable(shlex.split(evaluation["command"])[1:], names)))
    else:
        command = portable(["evaluate", str(run.folder)])
        commands.append(("Compare the tuned model with its base model:", command))
    return commands
