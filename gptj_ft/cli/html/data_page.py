"""Write the report on prepared rows as JSON or as one HTML page.

Both hold the same facts. They hold no text of a row unless ``--show`` asks for examples.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gptj_ft.cli.data_facts import data_facts, data_rows, epoch_rows, example_facts, repair_rows, without_folders
from gptj_ft.cli.html import fill_template, to_json, write_new
from gptj_ft.cli.html.names import file_names, place_name
from gptj_ft.config.options import Recipe
from gptj_ft.training.prepare_command import Preparation

DATA_SUFFIXES = (".json", ".html")
PERSONAL = "personal data"  # in the text of a warning


def write_preparation(path: Path, done: Preparation, num_examples: int) -> None:
    """Write the report on prepared rows, with ``num_examples`` rows as examples."""
    shown = example_facts(done.prepared, done.tokenizer.decode, num_examples)
    facts = {**done.origin, **data_facts(done.prepared, done.recipe), **({"examples": shown} if shown else {})}
    write_new(path, data_report(path.suffix.lower(), facts, done.recipe))


def data_report(suffix: str, facts: Mapping[str, Any], recipe: Recipe) -> str:
    """Return the report in the format of its suffix, see `DATA_SUFFIXES`; the page names files without folders."""
    if suffix == ".json":
        return to_json(facts)
    folders = sorted({str(Path(file).parent) for file in facts["files"]} - {"."}, key=len, reverse=True)
    digests = {"SHA-256 of the data": facts["data_sha256"], "SHA-256 of the tokenizer": facts["tokenizer_sha256"]}
    page = {
        "sentence": summary_of(facts),
        "file_names": file_names(facts["files"]),
        "fixes": without_folders(repair_rows(facts["fixes"]), folders) if "fixes" in facts else [],
        "data": without_folders(data_rows(facts), folders),
        "lengths": facts["lengths"],
        "max_length": facts["settings"]["max_length"],
        "rows_cut": facts["rows_cut"],
        "epoch": epoch_rows(facts, recipe),
        "examples": [{**each, "place": place_name(each["place"])} for each in facts.get("examples", ())],
        "settings": [*facts["settings"].items(), *digests.items()],
    }
    return fill_template("rows.html", page)


def summary_of(facts: Mapping[str, Any]) -> str:
    """Summarize the preparation in one sentence."""
    read, kept = facts["rows_read"], facts["rows_kept"]
    parts = [f"{kept:,} row{'s' * (kept != 1)}" if kept == read else f"{kept:,} of {read:,} rows kept"]
    if facts["rows_cut"]:
        parts.append(f"{facts['rows_cut']:,} shortened")
    personal = sum(rows["count"] for warning, rows in facts["warnings"].items() if PERSONAL in warning)
    if personal:
        parts.append(f"{personal:,} with possible personal data")
    other = len([warning for warning in facts["warnings"] if PERSONAL not in warning])
    if other:
        parts.append(f"{other} other warning{'s' * (other > 1)}" if personal else f"{other} warning{'s' * (other > 1)}")
    return ", ".join(parts)
