"""Facts of prepared rows, laid out once: pairs of a label and a text for the terminal and the HTML page.

The JSON report holds `data_facts` as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gptj_ft.config.options import Recipe
from gptj_ft.data.batches import Rows, steps_per_epoch
from gptj_ft.data.dataset import Prepared
from gptj_ft.data.lengths import Lengths, bins_of
from gptj_ft.data.loss_mask import spans_of
from gptj_ft.data.readers.rows import format_places
from gptj_ft.data.split import split
from gptj_ft.errors import listed
from gptj_ft.system.plain_text import shortened

Pairs = list[tuple[str, str]]
FILES_SHOWN = 3
LABELS_SHOWN = 12


def data_facts(prepared: Prepared, recipe: Recipe) -> dict[str, Any]:
    """Collect the facts of prepared rows: their report, token lengths, the cost of padding, and the split."""
    lengths = Lengths.of(prepared, recipe.packing)
    train, held = split(prepared, 0.0 if recipe.val_data else recipe.holdout, recipe.seed)
    num_rows = len(Rows.of(train.rows, recipe.packing, recipe.max_length))
    return {
        **prepared.report.to_dict(),
        "lengths": {
            name: {
                "shortest": int(tokens.min()),
                "mean": float(tokens.mean()),
                "longest": int(tokens.max()),
                "bins": [asdict(each) for each in bins_of(tokens)],
            }
            for name, tokens in tokens_by_part(lengths, recipe).items()
        },
        "padding": {
            "share_of_window": lengths.share_of_window,
            "batch_size": recipe.batch_size,
            "times_the_tokens": lengths.padding(recipe.batch_size, recipe.seed),
        },
        "splits": {
            name: {
                "documents": len(part.rows),
                "tokens": part.report.tokens,
                "target_tokens": part.report.target_tokens,
            }
            for name, part in (("train", train), ("validation", held))
            if part is not None
        },
        "steps_per_epoch": steps_per_epoch(num_rows, recipe.batch_size),
        "steps": recipe.num_steps(num_rows),
    }


def tokens_by_part(lengths: Lengths, recipe: Recipe) -> dict[str, NDArray[np.integer]]:
    """Return the tokens of each row, by part of the row; prompt and answer where a template separates them."""
    whole = {"whole row": lengths.prompts + lengths.answers}
    has_parts = recipe.prompt and recipe.task == "language-model"
    return whole | ({"prompt": lengths.prompts, "answer": lengths.answers} if has_parts else {})


def data_rows(report: Mapping[str, Any]) -> Pairs:
    """Lay out the report on prepared rows, see `Report.to_dict`: files, columns, and the fate of every row."""
    files, settings = report["files"], report["settings"]
    is_text = "task" not in settings  # a language model learns tokens, other tasks learn labels
    trained = "of them trained on" if is_text else "places labelled"
    skipped = report["rows_read"] - report["rows_kept"]
    more = f" and {len(files) - FILES_SHOWN:,} more" if len(files) > FILES_SHOWN else ""
    columns = (_column(field, column, settings.get("task")) for field, column in report["columns"].items())
    rows = [
        ("files" if len(files) > 1 else "file", ", ".join(files[:FILES_SHOWN]) + more),
        ("rows", f"{report['rows_read']:,} read = {report['rows_kept']:,} kept + {skipped:,} skipped"),
        ("columns", ", ".join(columns)),
        (
            "tokens",
            f"{report['tokens']:,}, {report['target_tokens']:,} {trained}; longest row {report['longest']:,}",
        ),
    ]
    if report["labels"]:
        counts = zip(report["labels"], report["label_counts"], strict=False)
        rows.append(("labels", listed((f"{shortened(name)} {count:,}" for name, count in counts), LABELS_SHOWN)))
    if report["rows_cut"]:
        field = settings["shorten"] or ("oldest messages" if is_text else "")
        part = f" of '{field}'" if field else ""
        reason = f"to fit in max_length {settings['max_length']:,}"
        shown = format_places(report["cut_places"], report["rows_cut"])
        text = f"{report['rows_cut']:,} rows by {report['tokens_cut']:,} tokens{part}, {reason}"
        rows.append(("shortened", text + (f" ({shown})" if shown else "")))
    if report["windows"] > report["rows_kept"]:
        has_template = "chat_template" in settings
        unit = "rows, one per answer" if has_template else f"windows of at most {settings['max_length']:,} tokens"
        rows.append(("split", f"into {report['windows']:,} {unit}"))
    rows += _occurrences("skipped", report["rows_skipped"])
    rows += _occurrences("warning", report["warnings"])
    return [*rows, *(("note", note) for note in report["notes"])]


def _column(field: str, column: str, task: str | None) -> str:
    first, several, _ = column.partition("+")
    if not several:
        return f"{field} = column '{shortened(column)}'"
    if field == "label" and task == "multi-label":
        return f"{field} = columns '{shortened(column)}' (1 in a column: the row has its label)"
    trained = f"'{shortened(first)}' is the target where it has a text; all are right answers"
    return f"{field} = columns '{shortened(column)}' ({trained})"


def _occurrences(label: str, occurrences: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for reason, rows in occurrences.items():
        unit = "row" if rows["count"] == 1 else "rows"
        yield label, f"{rows['count']:,} {unit}: {reason} ({format_places(rows['first'], rows['count'])})"


def repair_rows(report: Mapping[str, Any]) -> Pairs:
    """Lay out the report of ``--fix``, see `RepairReport.to_dict`."""
    read, written = report["rows_read"], report["rows_written"]
    counts = f"{read:,} read = {written:,} written + {read - written:,} dropped; {report['rows_changed']:,} changed"
    cells = [(fix, count) for fix, count in report["cells"].items() if count]
    return [
        ("file", report["file"]),
        ("rows", counts),
        *(("fixed", f"{count:,} {'cell' if count == 1 else 'cells'}: {fix}") for fix, count in cells),
        *_occurrences("dropped", report["rows_dropped"]),
        ("changes", f"listed in {report['diff']}"),
    ]


def epoch_rows(facts: Mapping[str, Any], recipe: Recipe) -> Pairs:
    """Lay out the cost of padding, the split and the number of steps, see `data_facts`."""
    padding, splits = facts["padding"], facts["splits"]
    pads = f"padding batches of {padding['batch_size']:,} would compute {padding['times_the_tokens']:.2f} times as many"
    rows = [
        ("window", f"a row fills {padding['share_of_window']:.0%} of max_length on average"),
        ("padding", f"none (for comparison: {pads} tokens)"),
    ]
    for name, part in splits.items():
        unit = "row" if part["documents"] == 1 else "rows"
        counts = f"{part['documents']:,} {unit}, {part['tokens']:,} tokens, {part['target_tokens']:,} of them targets"
        rows.append((name, counts + (", held out" if name == "validation" else "")))
    steps = facts["steps"]
    warmup = f", {recipe.num_warmup_steps(steps):,} of them warm-up" if isinstance(recipe.schedule, str) else ""
    times = 2 + (steps - 1) // recipe.validate_every if recipe.validate_every else 2
    validated = f"; {times} validations" if "validation" in splits or recipe.val_data else ""
    rows.append(("steps", f"{facts['steps_per_epoch']:,} per epoch, {steps:,} in total{warmup}{validated}"))
    return rows


def example_facts(prepared: Prepared, decode: Callable[[list[int]], str], count: int) -> list[dict[str, Any]]:
    """Return rows as the model reads them: place, whether truncated, and texts, with training targets marked.

    These are the first rows; of every four, one is a truncated row if there are any.
    """
    count, cut = min(count, len(prepared.rows)), set(prepared.report.cut_places)
    where = zip(prepared.rows["source"], prepared.rows["line"], strict=True) if cut else ()
    first_cut = (number for number, (source, line) in enumerate(where) if f"{source}:{line}" in cut)
    chosen = list(islice(first_cut, count // 4))
    shown = sorted([*chosen, *islice((number for number in range(count) if number not in chosen), count - len(chosen))])
    return [
        {
            "place": (place := f"{row['source']}:{row['line']}"),
            "is_cut": place in cut,
            "parts": [{"text": text, "is_trained_on": is_trained_on} for text, is_trained_on in spans_of(row, decode)],
        }
        for row in prepared.rows.select(shown)
    ]


def without_folders(rows: Pairs, folders: Sequence[str]) -> Pairs:
    """Remove the names of folders from texts, so that a page can be shared."""
    for folder in folders:
        rows = [(label, text.replace(f"{folder}/", "")) for label, text in rows]
    return rows
