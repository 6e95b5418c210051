"""Label the rows of a file with a tuned head; the output file resumes after an interruption."""

from __future__ import annotations

import csv
import io
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gptj_ft.checkpoints.metadata import template_of
from gptj_ft.config.options import Recipe
from gptj_ft.data.batches import Rows
from gptj_ft.data.dataset import Prepared
from gptj_ft.data.readers.records import read_rows
from gptj_ft.data.readers.rows import Findings, Occurrences
from gptj_ft.data.readers.source import FileOptions, identify
from gptj_ft.data.table import TokenTable
from gptj_ft.data.template import fields_of
from gptj_ft.errors import DataError, UsageError, did_you_mean
from gptj_ft.evaluation.label_evaluation import check_head, outputs_of, read_labelled, row_outputs, split_rows
from gptj_ft.evaluation.readout import RowAnswer, readout_of
from gptj_ft.evaluation.row_job import ROW, OutputFile
from gptj_ft.generation.generator import InferenceSetup
from gptj_ft.models.registry import Architecture
from gptj_ft.planning.inference_plan import InferencePlan
from gptj_ft.planning.resources import check_lengths
from gptj_ft.streaming.objective import objective_of
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.system.files import discard, replace_text

FILE_AND_LINE = ("file", "line")
FORMS = (".jsonl", ".csv", ".json")
ID = "id"  # column with the name of a question
KEPT = "kept_"  # before the name of a column that has that of a part of the answer
MOST_COLUMNS = 100  # of probabilities in a table
_READ = "read"  # setting: tokens that share a pass over the weights


@dataclass(frozen=True)
class LabelJob:
    """Rows to label, planned and not begun.

    Attributes:
        setup: model and options.
        prepared: rows.
        output: file of answers, ``.jsonl``, ``.csv``, or ``.json`` for answers by id.
        kept: values of columns that are passed through, of each row.
        settings: options that the answers depend on.
        plan: memory and token budget.
    """

    setup: InferenceSetup
    prepared: Prepared
    output: Path
    kept: Sequence[Mapping[str, Any]]
    settings: Mapping[str, Any]
    plan: InferencePlan

    @property
    def lines(self) -> Path:
        """The JSON lines that are written: the output, or what it is made of in the end."""
        return self.output if self.form == ".jsonl" else self.output.with_name(f"{self.output.name}.partial.jsonl")

    @property
    def form(self) -> str:
        """One of `FORMS`."""
        return self.output.suffix.lower()


@dataclass(frozen=True)
class LabelResult:
    """Counts of a file that has been labelled.

    Attributes:
        rows: rows labelled.
        found: rows that were in the output before.
        windowed: rows longer than the model reads at once, which were read in several windows.
        cut: rows longer than that, which were cut.
        skipped: rows left out, by reason.
    """

    rows: int
    found: int
    windowed: int
    cut: int
    skipped: Mapping[str, Occurrences]


def plan_labels(setup: InferenceSetup, source: Path, output: Path, keep: Sequence[str] = ()) -> LabelJob:
    """Read the rows of a file and plan the passes over them, or resume an earlier one.

    Args:
        setup: model and options.
        source: file of rows, of any form that training takes; they need no labels.
        output: new file, or one that was begun: ``.jsonl``, ``.csv``, or ``.json`` as SQuAD's scripts take it.
        keep: columns that are passed through.

    Raises:
        UsageError: the model has no head, there is no such column, or the rows have no ids for ``.json``.
        DataError: rows that cannot be read.
        ResourceError: it does not fit.
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
    prepared = read_labelled(setup, source, needs_target=False)
    kept = _kept_columns(recipe, source, (ID,) if form == ".json" else keep, prepared.rows)
    if form == ".json":
        _check_ids(source, kept)
        if null_odds_file(output).exists() and OutputFile.setting_of(output, "model") is None:
            raise UsageError(f"{null_odds_file(output)} is there already, and not of this command; name a new --output")
    job = LabelJob(setup, prepared, output, kept, {}, setup.plan(output.absolute().parent))
    before = OutputFile.setting_of(output, _READ)
    plan = setup.plan(output.absolute().parent, None, documents=prepared.rows.lengths().tolist())
    if isinstance(before, int):
        plan = replace(plan, together=replace(plan.together, read=before))
    settings = {
        "model": str(setup.folder.resolve()), "rows": prepared.report.data_sha256, _READ: plan.together.read,
        "keep": list(keep), "precision": str(setup.dtype).removeprefix("torch."), **template_of(recipe),
    }  # fmt: skip
    return replace(job, settings=settings, plan=plan)


def run_labels(job: LabelJob, progress: Callable[[int, int], None] | None = None) -> LabelResult:
    """Label the rows of a job, resuming where it was interrupted.

    Args:
        job: rows, model and output.
        progress: callback for (rows done, rows); default: none.

    Raises:
        UsageError: the output is of something else.
        Interrupted: a signal; what was written is kept.
        ResourceError: the disk is full.
    """
    continues, report = list(job.prepared.rows["continues"]), job.prepared.report
    starts = [number for number, is_more in enumerate(continues) if not is_more]
    with OutputFile(job.lines, job.settings, job.output) as file:
        if job.form != ".jsonl" and job.output.exists():
            found = len(starts)
        else:
            found = len(file.done)
            _label(job, file, starts, progress)
            if job.form == ".csv":
                replace_text(job.output, _table(job.lines))
            elif job.form == ".json":
                _write_by_id(job)
        if job.form != ".jsonl":
            discard(job.lines)
    windowed = sum(start + 1 < len(continues) and continues[start + 1] for start in starts)
    return LabelResult(len(starts), found, windowed, report.rows_cut, report.rows_skipped)


def _label(job: LabelJob, file: OutputFile, starts: Sequence[int], progress: Callable[[int, int], None] | None) -> None:
    """Label the rows that are not in a file yet; each row's first document is given."""
    row_of = {start: row for row, start in enumerate(starts)}
    with job.setup.open(job.plan.weights) as (architecture, offloaded):
        for part in split_rows(job.prepared.rows, job.plan.together.read):
            first, count = row_of[part.start], sum(number in row_of for number in part)
            if not file.done >= set(range(first, first + count)):
                lines = _answers(job, part, first, architecture, offloaded)
                file.append((first + place, line) for place, line in enumerate(lines))
            if progress:
                progress(first + count, len(starts))
    file.finish()


def label_texts(setup: InferenceSetup, texts: Sequence[Mapping[str, Any]]) -> list[RowAnswer]:
    """Label texts that are in no file.

    Args:
        setup: model and options.
        texts: values by field of the model's templates.

    Raises:
        UsageError: the model has no head.
        DataError: a text cannot be read.
    """
    recipe = setup.recipe
    check_head(setup.folder, recipe, setup.architecture)
    for number, text in enumerate(texts, 1):
        if not all(str(value).strip() for value in text.values()):
            which = f"text {number} of {len(texts)}" if len(texts) > 1 else "the text"
            raise DataError(f"{which} is empty: there is nothing to label")
    columns = {field: column_of(recipe, field) for field in {field for text in texts for field in text}}
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "rows.jsonl"
        rows = [{columns[field]: value for field, value in text.items()} for text in texts]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        uncached = replace(setup, recipe=recipe.model_copy(update={"cache": False}))
        try:
            prepared = read_labelled(uncached, path, needs_target=False)
        except DataError as error:
            said = str(error).replace(f"{path}: ", "")
            raise DataError(said.replace(f"{path}:", "text ")) from error  # a line of the file is a text
    plan = setup.plan(Path.cwd(), None, documents=prepared.rows.lengths().tolist())
    rows_of_text = Rows.of(prepared.rows)
    with setup.open(plan.weights) as (architecture, offloaded):
        outputs = outputs_of(offloaded, rows_of_text, objective_of(recipe), plan.together)
        readout = readout_of(recipe, architecture.labels)
        answers = [readout.read(row) for row in row_outputs(prepared.rows, rows_of_text, outputs)]
    if len(answers) != len(texts):
        why = "; ".join(prepared.report.rows_skipped)
        raise DataError(f"{len(texts) - len(answers)} of {len(texts)} texts cannot be labelled: {why}")
    return answers


def text_fields(recipe: Recipe) -> tuple[str, str]:
    """Return the fields that a text and a second one are put into; the second is empty where there is none."""
    first = fields_of(recipe.prompt)
    second = fields_of(recipe.pair) if recipe.pair else ()
    return (first[0] if first else "text", second[0] if second else "")


def column_of(recipe: Recipe, field: str) -> str:
    """Return the name of a column that a field is taken from."""
    return recipe.map.get(field) or next(iter(recipe.fields.get(field, ())), field)


def _answers(
    job: LabelJob, part: range, first: int, architecture: Architecture, offloaded: OffloadedModel
) -> Iterator[dict[str, Any]]:
    """Yield the line of each row of some documents, from the first row's number on."""
    table, recipe = job.prepared.rows.select(part), job.setup.recipe
    rows, readout = Rows.of(table), readout_of(recipe, architecture.labels)
    outputs = outputs_of(offloaded, rows, objective_of(recipe), job.plan.together)
    several = len(job.prepared.report.files) > 1
    for number, row in enumerate(row_outputs(table, rows, outputs), first):
        source, _, line = row.place.rpartition(":")
        head: dict[str, Any] = {"line": int(line), **({"file": source} if several else {})}
        facts = readout.read(row).facts
        taken, kept = {ROW, *FILE_AND_LINE, *facts}, job.kept[number] if job.kept else {}
        yield {**head, **{KEPT * (name in taken) + name: value for name, value in kept.items()}, **facts}


def _kept_columns(recipe: Recipe, source: Path, keep: Sequence[str], table: TokenTable) -> list[dict[str, Any]]:
    """Read the columns that are passed through, of each row that is labelled.

    Raises:
        UsageError: there is no such column, or a row of several on a line was left out, and none knows which.
    """
    if not keep:
        return []
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    seen: dict[str, None] = {}
    for row in read_rows(identify(source, FileOptions.of(recipe)), Findings(recipe.max_bad_rows)):
        seen |= dict.fromkeys(row.values)
        found.setdefault((row.source, row.line), []).append({name: row.values.get(name) for name in keep})
    for name in keep:
        if name not in seen:
            raise UsageError(f"--keep {name}: no such column{did_you_mean(name, seen)}; there are {', '.join(seen)}")
    columns = zip(table["source"], table["line"], table["continues"], strict=True)
    places = [(file, line) for file, line, continues in columns if not continues]
    for (file, line), count in Counter(places).items():
        if count != len(found[file, line]) != 1:  # all questions of an article of SQuAD may be on one
            raise UsageError(
                f"{file}:{line}: {len(found[file, line])} rows are on this line, and some of them are left out: which "
                "column is whose cannot be told; write a row a line"
            )
    kept = {place: iter(rows) for place, rows in found.items()}
    return [next(kept[place]) for place in places]


def _check_ids(source: Path, kept: Sequence[Mapping[str, Any]]) -> None:
    """Check that each question has an id of its own.

    Raises:
        UsageError: one has not.
    """
    ids = Counter(str(row[ID]) if isinstance(row[ID], str | int) else "" for row in kept)
    again = next((name for name, count in ids.items() if not name or count > 1), None)
    if again is not None:
        what = f"{ids[again]} questions have the id {again!r}" if again else f"{ids['']} questions have no id"
        raise UsageError(f"{source}: {what}, by which .json names answers: name a .jsonl or .csv")


def null_odds_file(output: Path) -> Path:
    """Return the file beside answers by id that has the odds that there is no answer, as `--na-prob-file` takes it."""
    return output.with_name(f"{output.stem}.null_odds.json")


def _write_by_id(job: LabelJob) -> None:
    """Write answers by id, and where there may be none, the odds of that first: it is done when the answers are there.

    This is the form of SQuAD's official scripts (https://rajpurkar.github.io/SQuAD-explorer).
    """
    lines = [json.loads(line) for line in job.lines.read_text(encoding="utf-8").splitlines()]
    odds = {str(line[ID]): line["null_odds"] for line in lines if "null_odds" in line}
    answers = {str(line[ID]): line["answer"] for line in lines}
    for path, values in ((null_odds_file(job.output), odds), (job.output, answers)):
        if values:
            replace_text(path, json.dumps(values, indent=4, ensure_ascii=False) + "\n")


def _table(lines: Path) -> str:
    """Return JSON lines as CSV: probabilities in columns of their own, lists as texts."""
    rows: list[dict[str, Any]] = []
    for line in lines.read_text(encoding="utf-8").splitlines():
        values = json.loads(line)
        values.pop("candidates", None)
        probabilities = values.pop("probabilities", {})
        if len(probabilities) <= MOST_COLUMNS:
            values |= {f"probability of {name}": each for name, each in probabilities.items()}
        if "tokens" in values:
            values["tokens"] = " ".join(token["label"] for token in values["tokens"])
        rows.append({name: _cell(value) for name, value in values.items()})
    text = io.StringIO()
    names = dict.fromkeys(name for row in rows for name in row)
    writer = csv.DictWriter(text, list(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _cell(value: Any) -> Any:
    if isinstance(value, list):
        return "; ".join(map(str, value))
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value
