"""Read predictions of any system and score them without a model; write the outputs of an evaluation."""

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
from gptj_ft.evaluation.metrics import METRICS
from gptj_ft.evaluation.metrics.squad import unanswered
from gptj_ft.system.atomic import atomic_files

TEXT_KEYS = ("prediction", "answer", "output", "text")
REFERENCE_KEYS = ("references", "reference")
ID_KEY = "id"
_SHOWN = 5  # places in a message


@dataclass(frozen=True)
class PredictionsRequest:
    """Outputs of any system to score.

    Attributes:
        predictions: file of outputs.
        recipe: metrics, and the columns of the rows.
        data: rows with references; ``None``: the outputs have them.
        baseline: file of outputs of another system; ``auto`` and ``none``: nothing is compared.
        limit: most rows, the first ones; ``None``: all.
        allow_empty: whether empty outputs are scored as they are.
    """

    predictions: Path
    recipe: Recipe
    data: str | None = None
    baseline: str = "none"
    limit: int | None = None
    allow_empty: bool = False


def score_files(request: PredictionsRequest) -> ModelComparison:
    """Score outputs in files, without a model.

    Raises:
        UsageError: no metrics are named, or the rows of both systems differ.
        DataError: outputs that cannot be matched with rows.
    """
    recipe = request.recipe
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
    """A prediction, or a row of the dataset.

    Attributes:
        place: file and line.
        id: identifier, or ``None``.
        text: the prediction; empty in a row.
        references: accepted texts; ``None``: not given.
    """

    place: str
    id: str | None
    text: str
    references: list[str] | None


def score_predictions(
    path: Path, recipe: Recipe, data: Path | None, limit: int | None, allow_empty: bool
) -> Evaluation:
    """Score the outputs of a system.

    Args:
        path: file of JSON lines, each with a ``prediction`` (or `TEXT_KEYS`), perhaps with an ``id`` and
            ``references``; or one object of texts by id, as SQuAD's official scripts take it.
        recipe: the metrics; the fields of the rows.
        data: the rows, which are matched by ``id`` if both have one, else by their order; ``None``: the references
            are in the predictions.
        limit: most rows, the first ones; ``None``: all.
        allow_empty: whether a prediction may be empty, and scores as such. It may be in any case where some questions
            have no answer (SQuAD v2.0), which is how a system says so.

    Raises:
        DataError: a line that is no prediction, an empty one, ids that do not match, references that are missing.
    """
    predictions = list(_read(path))
    notes: tuple[str, ...] = ()
    if data is not None:
        rows, notes = _rows(recipe, data)
        predictions = _matched(path, predictions, rows)
    predictions = predictions[:limit]
    if not predictions:
        raise DataError(f"{path}: there are no predictions in it")
    empty = [each for each in predictions if not each.text.strip()]
    unanswerable = [each.place for each in predictions if _has_no_answer(recipe, each)]
    if unanswerable:
        wrong = len({each.place for each in empty}.difference(unanswerable))
        notes = (*notes, EMPTY_NOTE.format(wrong=wrong)) if wrong else notes
    elif not allow_empty:
        _complain("an empty prediction", [each.place for each in empty], EMPTY_HINT)
    needed = any(METRICS[metric].needs_reference for metric in recipe.metrics)
    missing = [each.place for each in predictions if each.references is None or (needed and not each.references)]
    _complain("no references", missing, "name the rows with --data FILE, or add a list of 'references' to each line")
    answers, references = [each.text for each in predictions], [each.references or [] for each in predictions]
    figures = scores_of(recipe, answers, references)
    return with_warnings(
        Evaluation(str(path), figures, [each.place for each in predictions], answers, references, notes), recipe
    )


EMPTY_HINT = "if that is what the system wrote, add --allow-empty: it is scored as it is"
EMPTY_NOTE = (
    "{wrong:,} predictions are empty, which says that there is no answer, where there is one: they count as wrong"
)


def _has_no_answer(recipe: Recipe, line: PredictionRow) -> bool:
    """Tell whether a row is a question without an answer."""
    references = unanswered(line.references or [], recipe.no_answer)
    return "squad" in recipe.metrics and line.references is not None and not any(map(str.strip, references))


def write_outputs(path: Path, model: Evaluation, baseline: Evaluation | None) -> None:
    """Write a new JSONL file: place, output, references and scores of each row.

    Raises:
        UsageError: a file that exists, or cannot be written.
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
    rows = read_rows(path)
    first, others = next(rows, None), next(rows, None)
    if first is not None and others is None and _is_texts_by_id(first.values):
        for id, text in first.values.items():
            yield PredictionRow(f"{first.source} ({id})", id, text, None)
        return
    for row in chain(filter(None, (first, others)), rows):
        text, found = (
            next((row.values[key] for key in keys if key in row.values), None) for keys in (TEXT_KEYS, REFERENCE_KEYS)
        )
        if not isinstance(text, str):
            raise DataError(f'{row.where}: no text in any of {", ".join(TEXT_KEYS)}; a line is {{"prediction": "..."}}')
        references = [found] if isinstance(found, str) else found
        if not isinstance(references, list | None) or not all(isinstance(each, str) for each in references or ()):
            raise DataError(f"{row.where}: references must be a list of texts")
        yield PredictionRow(row.where, _id_of(row.values), text, references)


def _is_texts_by_id(values: Mapping[str, Any]) -> bool:
    """Tell whether an object is a SQuAD prediction file (texts by id), not one line."""
    keys = {*TEXT_KEYS, *REFERENCE_KEYS, ID_KEY}
    return not keys & values.keys() and all(isinstance(value, str) for value in values.values())


def _rows(recipe: Recipe, data: Path) -> tuple[list[PredictionRow], tuple[str, ...]]:
    """Read the rows of a dataset with their references, and notes on skipped rows."""
    if is_prepared(data):
        table = load_dataset(data).rows
        columns = (table[name] for name in ("source", "line", "references"))
        return [
            PredictionRow(f"{file}:{line}", None, "", list(of)) for file, line, of in zip(*columns, strict=True)
        ], ()
    findings, rows, left_out = Findings(recipe.max_bad_rows), list[PredictionRow](), Counter[str]()
    source = identify(data, FileOptions.of(recipe))
    reader = FieldReader(find_columns(source, recipe), recipe)
    for row in read_rows(source, findings):
        try:
            references: list[str] | None = reader.read(row.values).references
        except RowSkipped as reason:
            left_out[str(reason)] += 1
            references = None
        rows.append(PredictionRow(row.where, _id_of(row.values), "", references))
    return rows, tuple(f"{count:,} rows were left out: {reason}" for reason, count in left_out.items())


def _matched(path: Path, predictions: Sequence[PredictionRow], rows: Sequence[PredictionRow]) -> list[PredictionRow]:
    """Match predictions to rows, in the order of the rows; skipped rows have none."""
    if all(each.id is not None for each in (*predictions, *rows)):
        of_id, wanted = _by_id(predictions), _by_id(rows)
        unknown = [each.place for id, each in of_id.items() if id not in wanted]
        _complain("an id that no row of the data has", unknown, "are these predictions of other rows?")
        missing = [each.place for id, each in wanted.items() if id not in of_id]
        _complain("no prediction of the row", missing, f"{path} must have one for each row")
        pairs = [(of_id[id], row) for id, row in wanted.items()]
    elif len(predictions) == len(rows):
        pairs = list(zip(predictions, rows, strict=True))
    else:
        raise DataError(
            f"{path} has {len(predictions):,} predictions, the data {len(rows):,} rows: without an 'id' in both, "
            "there must be one prediction for each row, in the same order"
        )
    return [replace(row, text=each.text) for each, row in pairs if row.references is not None]


def _by_id(lines: Sequence[PredictionRow]) -> dict[str, PredictionRow]:
    found: dict[str, PredictionRow] = {}
    twice = []
    for line in lines:
        assert line.id is not None
        if line.id in found:
            twice.append(line.place)
        found[line.id] = line
    _complain("an id that stands there before", twice, "each must be there once")
    return found


def _id_of(values: Mapping[str, Any]) -> str | None:
    return str(values[ID_KEY]) if values.get(ID_KEY) is not None else None


def _complain(what: str, places: Sequence[str], hint: str) -> None:
    if places:
        more = f" and {len(places) - _SHOWN:,} more" if len(places) > _SHOWN else ""
        raise DataError(f"{what}: {', '.join(places[:_SHOWN])}{more}; {hint}")
