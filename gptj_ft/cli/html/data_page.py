"""Write a report on prepared rows: JSON for programs, one HTML page for people.

Both hold the same facts. No text of a row is among them unless examples are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gptj_ft.cli.html import fill_template, to_json, write_new
from gptj_ft.cli.html.names import file_names, place_name
from gptj_ft.config.options import Recipe
from gptj_ft.data.batches import Rows, steps_per_epoch
from gptj_ft.data.dataset import Prepared
from gptj_ft.data.lengths import Lengths, bins_of
from gptj_ft.data.loss_mask import spans_of
from gptj_ft.data.readers.rows import format_places
from gptj_ft.data.split import split
from gptj_ft.system.plain_text import shortened
from gptj_ft.training.prepare_data import Preparation

DATA_SUFFIXES = (".json", ".html")
PERSONAL = "personal data"  # in the text of a warning
# What counts are called on a page; others by their own names.
COUNTED = {
    "rows_read": "rows in the files",
    "rows_kept": "rows kept",
    "rows_cut": "rows shortened to fit max_length",
    "tokens_cut": "tokens that were cut off them",
    "windows": "documents the model is given (a long text makes several)",
    "tokens": "tokens, each row's end included",
    "target_tokens": "tokens trained on: the answers, or what has a label",
    "longest": "tokens of the longest document",
    "steps_per_epoch": "steps in one pass over the rows",
    "steps": "steps in all",
}


def write_preparation(path: Path, done: Preparation, num_examples: int) -> None:
    """Write the report on prepared rows, with some of them if they are asked for."""
    shown = examples_of(done.prepared, done.tokenizer.decode, num_examples)
    examples = {"examples": shown} if shown else {}
    facts = {**done.origin, **data_facts(done.prepared, done.recipe), **examples}
    write_new(path, data_report(path.suffix.lower(), facts))


def data_facts(prepared: Prepared, recipe: Recipe) -> dict[str, Any]:
    """Collect the facts of prepared rows: their report, lengths, the cost of padding, and the split."""
    lengths = Lengths.of(prepared, recipe.packing)
    whole = {"whole row": lengths.prompts + lengths.answers}
    has_parts = recipe.prompt and recipe.task == "language-model"
    parts = {"prompt": lengths.prompts, "answer": lengths.answers} if has_parts else {}
    train, held = split(prepared, 0.0 if recipe.val_data else recipe.holdout, recipe.seed)
    num_rows = len(Rows.of(train.rows, recipe.packing, recipe.max_length))
    return {
        **prepared.report.to_dict(),
        "lengths": {
            name: {
                "shortest": int(of.min()),
                "mean": float(of.mean()),
                "longest": int(of.max()),
                "bins": [asdict(each) for each in bins_of(of)],
            }
            for name, of in {**whole, **parts}.items()
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


def examples_of(prepared: Prepared, decode: Callable[[list[int]], str], count: int) -> list[dict[str, Any]]:
    """Return the first rows as the model will see them: their place, what is given and what is trained on."""
    rows = prepared.rows.select(range(min(count, len(prepared.rows))))
    return [
        {
            "place": f"{row['source']}:{row['line']}",
            "parts": [{"text": text, "is_trained_on": is_trained_on} for text, is_trained_on in spans_of(row, decode)],
        }
        for row in rows
    ]


def data_report(suffix: str, facts: Mapping[str, Any]) -> str:
    """Return a report in the form that its suffix names: see `DATA_SUFFIXES`.

    Counts that the page has no place for are listed by their names, so that none is left out. Files and models stand
    there without the folders that they lie in.
    """
    if suffix == ".json":
        return to_json(facts)
    counts = {
        COUNTED.get(name, name.replace("_", " ")): value
        for name, value in facts.items()
        if isinstance(value, int | float) and name != "version"
    }
    folders = sorted({str(Path(file).parent) for file in facts["files"]} - {"."}, key=len, reverse=True)
    named = {name: _without(facts.get(name), folders) for name in ("fixes", "notes", "rows_skipped", "warnings")}
    if "examples" in facts:
        named["examples"] = [{**example, "place": place_name(example["place"])} for example in facts["examples"]]
    named["columns"] = {field: shortened(column) for field, column in facts["columns"].items()}
    own = {
        "counts": counts,
        "file_names": file_names(facts["files"]),
        "sentence": sentence_on(facts),
        "in_words": format_places,
    }
    return fill_template("rows.html", {**facts, **named, **own})


def _without(value: Any, folders: Sequence[str]) -> Any:
    """Return facts with the names of files without their folders."""
    if isinstance(value, str):
        for folder in folders:
            value = value.replace(f"{folder}/", "")
        return value
    if isinstance(value, Mapping):
        return {
            _without(key, folders): list(map(place_name, each)) if key == "first" else _without(each, folders)
            for key, each in value.items()
        }
    return [_without(each, folders) for each in value] if isinstance(value, list | tuple) else value


def sentence_on(facts: Mapping[str, Any]) -> str:
    """Return in a sentence what became of the rows."""
    read, kept = facts["rows_read"], facts["rows_kept"]
    parts = [f"{kept:,} row{'s' * (kept != 1)}" if kept == read else f"{kept:,} of {read:,} rows kept"]
    if facts["rows_cut"]:
        parts.append(f"{facts['rows_cut']:,} shortened")
    personal = sum(found["count"] for what, found in facts["warnings"].items() if PERSONAL in what)
    if personal:
        parts.append(f"{personal:,} with what looks like personal data")
    other = len([what for what in facts["warnings"] if PERSONAL not in what])
    if other:
        parts.append(f"{other} other warning{'s' * (other > 1)}" if personal else f"{other} warning{'s' * (other > 1)}")
    return ", ".join(parts)
