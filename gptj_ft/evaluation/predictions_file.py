"""Score the outputs of any system, read from a file; write the outputs of an evaluation to a file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from gptj_ft.config.options import Recipe
from gptj_ft.data.columns import FieldReader
from gptj_ft.data.dataset import load_dataset
from gptj_ft.data.load import data_path
from gptj_ft.data.prepare import find_columns
from gptj_ft.data.readers.records import read_rows
from gptj_ft.data.readers.rows import Findings
from gptj_ft.data.readers.source import FileOptions, identify, is_prepared
from gptj_ft.errors import DataError, RowSkipped, UsageError
from gptj_ft.evaluation.answerer import scores_of
from gptj_ft.evaluation.comparison import Evaluation, ModelComparison, compare_models, finite, with_warnings
from gptj_ft.evaluation.metrics import METRICS, TASK_METRICS
from gptj_ft.evaluation.metrics.squad import unanswered
from gptj_ft.system.atomic import atomic_files

TEXT_KEYS = ("prediction", "answer", "output", "text")
REFERENCE_KEYS = ("references", "reference")
ID_KEY = "id"
EMPTY_HINT = "if the system really wrote nothing, add --allow-empty to score it as it is"
EMPTY_NOTE = (
    "{wrong:,} predictions are empty, which says that there is no answer, where there is one: they count as wrong"
)
_MAX_PLACES = 5  # in a message


@dataclass(frozen=True)
class PredictionsRequest:
    """Outputs of any system to score."""

    predictions: Path  # file of outputs
    recipe: Recipe  # metrics, and the columns of the rows
    data: str | None = None  # rows with references; None: the outputs have them
    baseline: str = "none"  # file with the outputs of another system; ``auto`` and ``none``: no comparison
    limit: int | None = None  # maximum number of rows, taken from the start; None: all
    allow_empty: bool = False  # whether to score empty outputs as they are


def score_files(request: PredictionsRequest) -> ModelComparison:
    """Score outputs in files, without a model.

    Raises:
        UsageError: no metrics are named, or the rows of both systems differ.
        DataError: outputs that do not match the rows.
    """
    recipe = request.recipe
    if not recipe.metrics:
        recipe = recipe.model_copy(update={"metrics": TASK_METRICS.get(recipe.task, ())})
    if not recipe.metrics:
        raise UsageError("which scores? name a recipe, e.g. --recipe summarization, or add --set metrics=[rouge]")
    data = data_path(request.data) if request.data else None
    before = None
    if request.baseline not in ("auto", "none"):
        before = score_predictions(Path(request.baseline), recipe, data, request.limit, request.allow_empty)
    after = score_predictions(request.predictions, recipe, data, request.limit, request.allow_empty)
    return compare_models(after, before, recipe.metrics, recipe.seed)


@dataclass(frozen=True)
class PredictionRow:
    """A prediction, or a row of the dataset."""

    place: str  # file and line
    id: str | None
    text: str  # the prediction; empty for a row of the dataset
    references: list[str] | None  # accepted texts; None: unknown


def score_predictions(
    path: Path, recipe: Recipe, data: Path | None, limit: int | None, allow_empty: bool
) -> Evaluation:
    """Score the outputs of one system.

    Args:
        path: JSON lines with a text (one of `TEXT_KEYS`) and optionally ``id`` and ``references``; or one object of
            texts by id, as SQuAD's official scripts read it.
        data: rows, matched by ``id``, or by order if all rows or all predictions lack it; None: the predictions have
            references.
        limit: maximum number of rows, taken from the start; None: all.
        allow_empty: whether predictions may be empty. They always may if some questions have no answer (SQuAD v2.0).

    Raises:
        DataError: a line without a text, an empty prediction, ids that do not match, missing references.
    """
    predictions = list(_read(path))
    notes: tuple[str, ...] = ()
    if data is not None:
        rows, notes = _rows(recipe, data)
        predictions = _matched(path, predictions, rows)
    # Only after matching: without ids, both files must have the same number of rows.
    predictions = predictions[:limit]
    if not predictions:
        raise DataError(f"{path}: there are no predictions in it")
    empty = [each for each in predictions if not each.text.strip()]
    unanswerable = [each.place for each in predictions if _has_no_answer(recipe, each)]
    if unanswerable:
        wrong = len({each.place for each in empty}.difference(unanswerable))
        notes = (*notes, EMPTY_NOTE.format(wrong=wrong)) if wrong else notes
    elif not allow_empty:
        _reject("an empty prediction", [each.place for each in empty], EMPTY_HINT)
    needed = any(METRICS[metric].needs_reference for metric in recipe.metrics)
    missing = [each.place for each in predictions if each.references is None or (needed and not each.references)]
    _reject("no references", missing, "name the rows with --data FILE, or add a list of 'references' to each line")
    answers, references = [each.text for each in predictions], [each.references or [] for each in predictions]
    figures = scores_of(recipe, answers, references)
    return with_warnings(
        Evaluation(str(path), figures, [each.place for each in predictions], answers, references, notes), recipe
    )


def _has_no_answer(recipe: Recipe, row: PredictionRow) -> bool:
    """Tell whether a row is a question without an answer."""
    references = unanswered(row.references or [], recipe.no_answer)
    return "squad" in recipe.metrics and row.references is not None and not any(map(str.strip, references))


def write_outputs(path: Path, model: Evaluation, baseline: Evaluation | None) -> None:
    """Write a new JSON Lines file: place, output, references and scores of each row.

    Raises:
        UsageError: the file exists, or cannot be written.
        ResourceError: the disk is full.
    """
    by_row = {name: figure.rows_N for name, figure in model.figures.items() if figure.rows_N is not None}
    with atomic_files(path) as (file,):
        for row, place in enumerate(model.places):
            line: dict[str, Any] = {
                "place": place,
                "prediction": model.answers[row],
                "references": model.references[row],
                "scores": {name: finite(float(values[row])) for name, values in by_row.items() if values is not None},
            }
            if baseline:
                line["baseline"] = baseline.answers[row]
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def _read(path: Path) -> Iterator[PredictionRow]:
    rows = read_rows(identify(path))
    first, second = next(rows, None), next(rows, None)
    # SQuAD's official format is one object for the whole file, so look whether there is a second row.
    if first is not None and second is None and _is_texts_by_id(first.values):
        for id, text in first.values.items():
            yield PredictionRow(f"{first.source} ({id})", id, text, None)
        return
    for row in chain(filter(None, (first, second)), rows):
        text, references = (
            next((row.values[key] for key in keys if key in row.values), None) for keys in (TEXT_KEYS, REFERENCE_KEYS)
        )
        if not isinstance(text, str):
            raise DataError(f'{row.where}: no text in any of {", ".join(TEXT_KEYS)}; a line is {{"prediction": "..."}}')
        references = [references] if isinstance(references, str) else references
        if not isinstance(references, list | None) or not all(isinstance(each, str) for each in references or ()):
            raise DataError(f"{row.where}: references must be a list of texts")
        yield PredictionRow(row.where, _id_of(row.values), text, references)


def _is_texts_by_id(values: Mapping[str, Any]) -> bool:
    """Tell whether an object is a whole SQuAD prediction file (texts by id) rather than one prediction."""
    keys = {*TEXT_KEYS, *REFERENCE_KEYS, ID_KEY}
    return not keys & values.keys() and all(isinstance(value, str) for value in values.values())


def _rows(recipe: Recipe, data: Path) -> tuple[list[PredictionRow], tuple[str, ...]]:
    """Read the rows of a dataset with their references; rows that the recipe skips have no references."""
    if is_prepared(data):
        table = load_dataset(data).rows
        columns = (table[name] for name in ("source", "line", "references"))
        return [
            PredictionRow(f"{file}:{line}", None, "", list(of)) for file, line, of in zip(*columns, strict=True)
        ], ()
    findings, rows, skipped = Findings(recipe.max_bad_rows), list[PredictionRow](), Counter[str]()
    source = identify(data, FileOptions.of(recipe))
    reader = FieldReader(find_columns(source, recipe), recipe)
    for row in read_rows(source, findings):
        try:
            references: list[str] | None = reader.read(row.values).references
        except RowSkipped as reason:
            skipped[str(reason)] += 1
            # Keep the row, so that predictions matched by order stay aligned; `_matched` drops it.
            references = None
        rows.append(PredictionRow(row.where, _id_of(row.values), "", references))
    return rows, tuple(f"{count:,} rows were left out: {reason}" for reason, count in skipped.items())


def _matched(path: Path, predictions: Sequence[PredictionRow], rows: Sequence[PredictionRow]) -> list[PredictionRow]:
    """Match predictions to rows, in the order of the rows; drop the predictions of skipped rows."""
    if all(each.id is not None for each in (*predictions, *rows)):
        by_id, row_by_id = _by_id(predictions), _by_id(rows)
        unknown = [each.place for id, each in by_id.items() if id not in row_by_id]
        _reject("an id that no row of the data has", unknown, "are these predictions of other rows?")
        missing = [each.place for id, each in row_by_id.items() if id not in by_id]
        _reject("no prediction of the row", missing, f"{path} must have one for each row")
        pairs = [(by_id[id], row) for id, row in row_by_id.items()]
    elif any(each.id is not None for each in predictions) and any(each.id is not None for each in rows):
        first = next(each.place for each in (*predictions, *rows) if each.id is None)
        raise DataError(f"{first} has no id, but other lines have: add it, or remove all ids to match by order")
    elif len(predictions) == len(rows):
        pairs = list(zip(predictions, rows, strict=True))
    else:
        raise DataError(
            f"{path} has {len(predictions):,} predictions, the data {len(rows):,} rows: without an 'id' in both, "
            "there must be one prediction for each row, in the same order"
        )
    return [replace(row, text=each.text) for each, row in pairs if row.references is not None]


def _by_id(lines: Sequence[PredictionRow]) -> dict[str, PredictionRow]:
    by_id: dict[str, PredictionRow] = {}
    repeated = []
    for line in lines:
        assert line.id is not None
        if line.id in by_id:
            repeated.append(line.place)
        by_id[line.id] = line
    _reject("a repeated id", repeated, "each id must occur once")
    return by_id


def _id_of(values: Mapping[str, Any]) -> str | None:
    return str(values[ID_KEY]) if values.get(ID_KEY) is not None else None


def _reject(problem: str, places: Sequence[str], hint: str) -> None:
    """Raise a `DataError` if there are places with the problem."""
    if places:
        more = f" and {len(places) - _MAX_PLACES:,} more" if len(places) > _MAX_PLACES else ""
        raise DataError(f"{problem}: {', '.join(places[:_MAX_PLACES])}{more}; {hint}")
