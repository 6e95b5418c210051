"""Predict labels, numbers, spans or summaries with a tuned head: for the rows of a file, or for single texts.

`plan_labels` reads the rows and plans the passes over the weights; `run_labels` computes and writes one line per row.
"""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gptj_ft.checkpoints.metadata import template_of
from gptj_ft.config.options import Recipe
from gptj_ft.data.batches import Rows
from gptj_ft.data.dataset import Prepared
from gptj_ft.data.readers.cells import CELLS, GUARDED, RAW, guarded
from gptj_ft.data.readers.records import read_rows
from gptj_ft.data.readers.rows import Findings, Occurrences
from gptj_ft.data.readers.source import FileOptions, identify
from gptj_ft.data.table import TokenTable
from gptj_ft.data.template import fields_of
from gptj_ft.errors import DataError, UsageError, did_you_mean
from gptj_ft.evaluation.label_evaluation import check_head, outputs_of, read_labelled, row_outputs, split_rows
from gptj_ft.evaluation.readout import RowAnswer, readout_of
from gptj_ft.evaluation.row_job import ROW, OutputFile, Progress
from gptj_ft.generation.generator import InferenceSetup
from gptj_ft.planning.inference_plan import InferencePlan
from gptj_ft.planning.resources import check_lengths
from gptj_ft.streaming.objective import objective_of
from gptj_ft.system.files import discard, replace_text
from gptj_ft.system.scratch import scratch_folder

FILE_AND_LINE = ("file", "line")
FORMS = (".jsonl", ".csv", ".json")
ID = "id"  # column with a question's id
KEPT = "kept_"  # prefix of a kept column whose name is also a key of the answer
MOST_COLUMNS = 100  # of probabilities in a table
_READ = "read"  # setting: tokens per pass over the weights


@dataclass(frozen=True)
class LabelJob:
    """Planned labelling of a file's rows."""

    setup: InferenceSetup
    prepared: Prepared
    output: Path  # its suffix, one of `FORMS`, decides the format
    kept: Sequence[Mapping[str, Any]]  # copied columns of each row; empty: none
    settings: Mapping[str, Any]  # everything that determines the labels
    plan: InferencePlan

    @property
    def form(self) -> str:
        return self.output.suffix.lower()

    @property
    def lines(self) -> Path:
        """JSON Lines file: the output, or the temporary file that is converted to the output at the end."""
        return self.output if self.form == ".jsonl" else self.output.with_name(f"{self.output.name}.partial.jsonl")


@dataclass(frozen=True)
class LabelResult:
    """Row counts of a labelled file."""

    rows: int  # labelled rows
    resumed: int  # rows that were in the output before
    windowed: int  # rows longer than the context, read in several windows
    cut: int  # rows longer than that, truncated
    skipped: Mapping[str, Occurrences]  # rows left out, by reason


def plan_labels(
    setup: InferenceSetup, source: Path, output: Path, keep: Sequence[str] = (), raw_cells: bool = False
) -> LabelJob:
    """Read the rows of a file and plan the passes over the weights, or resume an earlier job.

    Args:
        source: rows in any format that training reads; labels are not needed.
        output: new file or an unfinished one: ``.jsonl``, ``.csv``, or ``.json`` as SQuAD's scripts read it.
        keep: columns to copy to the output.
        raw_cells: whether CSV has texts unchanged, even those that a spreadsheet program would compute.

    Raises:
        UsageError: the model has no head, a column does not exist, or rows lack ids for ``.json``.
        DataError: rows that cannot be read.
        ResourceError: the model does not fit.
    """
    recipe = setup.recipe
    check_head(setup.folder, recipe, setup.architecture)
    check_lengths(recipe, setup.architecture)
    form = output.suffix.lower()
    if form not in FORMS:
        raise UsageError(f"{output}: labels are written as JSON lines or CSV: name a file that ends in .jsonl or .csv")
    if form == ".json" and (recipe.task != "spans" or keep):
        raise UsageError(
            f"{output}: .json is for answers to questions, by id and without --keep: name a .jsonl or .csv"
        )
    if raw_cells and form != ".csv":
        raise UsageError(f"{output}: --raw-cells is for .csv, the only output with cells: leave it out")
    prepared = read_labelled(setup, source, needs_target=False)
    kept = _kept_columns(recipe, source, (ID,) if form == ".json" else keep, prepared.rows)
    if form == ".json":
        _check_ids(source, kept)
        if null_odds_file(output).exists() and OutputFile.setting_of(output, "model") is None:
            raise UsageError(f"{null_odds_file(output)} exists and was not made by this command; name a new --output")
    plan = setup.plan(output.absolute().parent, None, documents=prepared.rows.lengths().tolist())
    # A resumed job splits the rows as the first run did, however much memory is free now.
    if isinstance(read := OutputFile.setting_of(output, _READ), int):
        plan = replace(plan, together=replace(plan.together, read=read))
    settings = {
        "model": str(setup.folder.resolve()), "rows": prepared.report.data_sha256, _READ: plan.together.read,
        "keep": list(keep), "precision": str(setup.dtype).removeprefix("torch."), **template_of(recipe),
    }  # fmt: skip
    if form == ".csv":
        settings |= {CELLS: RAW if raw_cells else GUARDED}
    return LabelJob(setup, prepared, output, kept, settings, plan)


def run_labels(job: LabelJob, progress: Progress | None = None) -> LabelResult:
    """Label the rows of a job, starting after the rows that the output already has.

    Raises:
        UsageError: the output was made by another command or with other settings.
        Interrupted: a signal; finished rows are in the output.
        ResourceError: the disk is full.
    """
    continues, report = list(job.prepared.rows["continues"]), job.prepared.report
    starts = [document for document, is_more in enumerate(continues) if not is_more]  # first document of each row
    with OutputFile(job.lines, job.settings, job.output) as file:
        # CSV and JSON appear only when all rows are done: the job is finished.
        if job.form != ".jsonl" and job.output.exists():
            resumed = len(starts)
        else:
            resumed = len(file.done)
            _label_rows(job, file, starts, progress)
            if job.form == ".csv":
                replace_text(job.output, _table(job))
            elif job.form == ".json":
                _write_by_id(job)
        if job.form != ".jsonl":
            discard(job.lines)
    windowed = sum(start + 1 < len(continues) and continues[start + 1] for start in starts)
    return LabelResult(len(starts), resumed, windowed, report.rows_cut, report.rows_skipped)


def _label_rows(job: LabelJob, file: OutputFile, starts: Sequence[int], progress: Progress | None) -> None:
    row_of = {start: row for row, start in enumerate(starts)}
    parts = list(split_rows(job.prepared.rows, job.plan.together.read))
    rows_of_part = [[row_of[document] for document in part if document in row_of] for part in parts]
    several_files, sources = len(job.prepared.report.files) > 1, job.prepared.rows["source"]
    lines = job.prepared.rows["line"]
    objective = objective_of(job.setup.recipe)
    with job.setup.open(job.plan.weights) as (architecture, offloaded):
        readout = readout_of(job.setup.recipe, architecture.labels)

        def place_of(row: int) -> str:
            return f"{sources[starts[row]]}:{lines[starts[row]]}"

        def lines_of(number: int) -> Iterator[dict[str, Any]]:
            table = job.prepared.rows.select(parts[number])
            rows = Rows.of(table)
            outputs = outputs_of(offloaded, rows, objective, job.plan.together)
            for row, output in zip(rows_of_part[number], row_outputs(table, rows, outputs), strict=False):
                if output.place != place_of(row):
                    return  # a row before it is lost, and `check_complete` reports it
                yield _line(output.place, readout.read(output), job.kept[row] if job.kept else {}, several_files)

        file.write_batches(rows_of_part, len(starts), lambda numbers: map(lines_of, numbers), progress=progress)


def _line(place: str, answer: RowAnswer, kept: Mapping[str, Any], several_files: bool) -> dict[str, Any]:
    source, _, line = place.rpartition(":")
    head = {"line": int(line), **({"file": source} if several_files else {})}
    # A copied column must not overwrite a key of the answer.
    taken = {ROW, *FILE_AND_LINE, *answer.facts}
    copied = {f"{KEPT}{name}" if name in taken else name: value for name, value in kept.items()}
    return {**head, **copied, **answer.facts}


def label_texts(setup: InferenceSetup, texts: Sequence[Mapping[str, Any]]) -> list[RowAnswer]:
    """Label texts in memory.

    Args:
        texts: values by field of the model's templates.

    Raises:
        UsageError: the model has no head.
    """
    recipe = setup.recipe
    check_head(setup.folder, recipe, setup.architecture)
    for number, text in enumerate(texts, 1):
        if not all(str(value).strip() for value in text.values()):
            which = f"text {number} of {len(texts)}" if len(texts) > 1 else "the text"
            raise DataError(f"{which} is empty: there is nothing to label")
    columns = {field: column_of(recipe, field) for field in {field for text in texts for field in text}}
    with scratch_folder() as scratch:
        path = scratch / "rows.jsonl"
        rows = [{columns[field]: value for field, value in text.items()} for text in texts]
        # Through a file, because then texts take the same path as rows, with the same checks.
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        # Single texts would fill the cache with entries that are never used again.
        uncached = replace(setup, recipe=recipe.model_copy(update={"cache": False}))
        try:
            prepared = read_labelled(uncached, path, needs_target=False)
        except DataError as error:
            message = str(error).replace(f"{path}: ", "")
            raise DataError(message.replace(f"{path}:", "text ")) from error  # line n of the file is text n
    plan = setup.plan(Path.cwd(), None, documents=prepared.rows.lengths().tolist())
    documents = Rows.of(prepared.rows)
    with setup.open(plan.weights) as (architecture, offloaded):
        outputs = outputs_of(offloaded, documents, objective_of(recipe), plan.together)
        readout = readout_of(recipe, architecture.labels)
        answers = [readout.read(row) for row in row_outputs(prepared.rows, documents, outputs)]
    if len(answers) != len(texts):
        why = "; ".join(prepared.report.rows_skipped)
        raise DataError(f"{len(texts) - len(answers)} of {len(texts)} texts cannot be labelled: {why}")
    return answers


def text_fields(recipe: Recipe) -> tuple[str, str]:
    """Return the template fields of a text and of its second text; the second is empty for tasks about one text."""
    first = fields_of(recipe.prompt)
    second = fields_of(recipe.pair) if recipe.pair else ()
    return (first[0] if first else "text", second[0] if second else "")


def column_of(recipe: Recipe, field: str) -> str:
    """Return the column that fills a template field."""
    return recipe.map.get(field) or next(iter(recipe.fields.get(field, ())), field)


def _kept_columns(recipe: Recipe, source: Path, keep: Sequence[str], table: TokenTable) -> list[dict[str, Any]]:
    """Read the columns to copy, for each row that gets a label.

    Raises:
        UsageError: a column does not exist, or a line has several rows and some of them were skipped.
    """
    if not keep:
        return []
    values: dict[tuple[str, int], list[dict[str, Any]]] = {}
    columns: dict[str, None] = {}
    for row in read_rows(identify(source, FileOptions.of(recipe)), Findings(recipe.max_bad_rows)):
        columns |= dict.fromkeys(row.values)
        values.setdefault((row.source, row.line), []).append({name: row.values.get(name) for name in keep})
    for name in keep:
        if name not in columns:
            hint = did_you_mean(name, columns)
            raise UsageError(f"--keep {name}: no such column{hint}; there are {', '.join(columns)}")
    documents = zip(table["source"], table["line"], table["continues"], strict=True)
    places = [(file, line) for file, line, continues in documents if not continues]
    for (file, line), count in Counter(places).items():
        # A SQuAD article can be one line with many questions. The rows have only line numbers, so if a question of
        # the line was skipped, nothing tells which of the read rows it was.
        if count != len(values[file, line]) != 1:
            raise UsageError(
                f"{file}:{line}: {len(values[file, line])} rows are on this line and only {count} can be labelled, so "
                "--keep cannot tell which columns belong to which row; write one row per line"
            )
    kept = {place: iter(rows) for place, rows in values.items()}
    return [next(kept[place]) for place in places]


def _check_ids(source: Path, kept: Sequence[Mapping[str, Any]]) -> None:
    """Check that each question has a unique id."""
    ids = Counter(str(row[ID]) if isinstance(row[ID], str | int) else "" for row in kept)
    wrong = next((name for name, count in ids.items() if not name or count > 1), None)
    if wrong is not None:
        problem = f"{ids[wrong]} questions have the id {wrong!r}" if wrong else f"{ids['']} questions have no id"
        raise UsageError(f"{source}: {problem}, by which .json names answers: name a .jsonl or .csv")


def null_odds_file(output: Path) -> Path:
    """Return the file for the odds of "no answer", as SQuAD's ``--na-prob-file`` reads it."""
    return output.with_name(f"{output.stem}.null_odds.json")


def _write_by_id(job: LabelJob) -> None:
    """Write answers by id, the format of SQuAD's official scripts (https://rajpurkar.github.io/SQuAD-explorer)."""
    lines = _read_lines(job.lines)
    odds = {str(line[ID]): line["null_odds"] for line in lines if "null_odds" in line}
    answers = {str(line[ID]): line["answer"] for line in lines}
    # The answers last: the job counts as finished as soon as they exist.
    for path, values in ((null_odds_file(job.output), odds), (job.output, answers)):
        if values:
            replace_text(path, _escaped(json.dumps(values, indent=4, ensure_ascii=False)) + "\n")


def _table(job: LabelJob) -> str:
    """Convert JSON lines to CSV, with a column for each label's probability."""
    text_of: Callable[[str], str] = guarded if job.settings[CELLS] == GUARDED else str
    rows: list[dict[str, Any]] = []
    for values in _read_lines(job.lines):
        values.pop("candidates", None)
        probabilities = values.pop("probabilities", {})
        if len(probabilities) <= MOST_COLUMNS:
            values |= {f"probability of {name}": each for name, each in probabilities.items()}
        if "tokens" in values:
            values["tokens"] = " ".join(token["label"] for token in values["tokens"])
        cells = {text_of(name): _cell(value) for name, value in values.items()}
        rows.append({name: text_of(cell) if isinstance(cell, str) else cell for name, cell in cells.items()})
    text = io.StringIO()
    names = dict.fromkeys(name for row in rows for name in row)
    # Quote all texts: by default, `csv` leaves a cell with a lone carriage return unquoted, which breaks the row.
    writer = csv.DictWriter(text, list(names), lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
    writer.writeheader()
    writer.writerows(rows)
    return _escaped(text.getvalue())


def _read_lines(path: Path) -> list[dict[str, Any]]:
    # str.splitlines would also split at U+2028 and other line separators, which JSON allows inside a string.
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def _cell(value: Any) -> Any:
    if isinstance(value, list):
        return "; ".join(map(str, value))
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value


def _escaped(text: str) -> str:
    r"""Write lone surrogates as ``\ud83d``, as JSON does: no encoding has them."""
    return text.encode(errors="backslashreplace").decode()
