"""Folders of rows as tokens, in the form in which `datasets` saves and opens them (`datasets.load_from_disk`)."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any

import pyarrow

from gptj_ft.data.arrow_columns import SCHEMA
from gptj_ft.data.row_file import RowWriter
from gptj_ft.data.token_table import TokenTable
from gptj_ft.system.files import copy_file, create_folder, read_text, write_file

ROWS = "data-00000-of-00001.arrow"  # as `datasets` names the file of a data set that has one
INFO, STATE = "dataset_info.json", "state.json"
COPIED = 1000  # rows at a time


def write_table(table: TokenTable, folder: Path) -> None:
    """Write a new folder. Rows that are a whole file already are not copied: the folder gets that file.

    Raises:
        OSError: it exists, or cannot be written.
    """
    create_folder(folder)
    info = {"citation": "", "description": "", "features": _features(), "homepage": "", "license": ""}
    state: dict[str, Any] = {
        "_data_files": [{"filename": ROWS}],
        "_fingerprint": secrets.token_hex(8),  # what `datasets` knows results made from these rows by
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    for name, facts in ((INFO, info), (STATE, state)):
        write_file(folder / name, json.dumps(facts, indent=2) + "\n")
    if not table.is_whole:
        writer = RowWriter(folder / ROWS)
        for batch in table.batches(size=COPIED):
            writer.write(batch)
        writer.close()
        return
    try:
        os.link(table.files[0], folder / ROWS)  # neither is ever changed
    except OSError:  # another file system, or one without links
        copy_file(table.files[0], folder / ROWS)


def open_table(folder: Path) -> TokenTable:
    """Open a folder that `write_table` or `datasets` has written.

    Raises:
        OSError, ValueError, KeyError, TypeError: not there, or damaged.
    """
    state = json.loads(read_text(folder / STATE))
    return TokenTable.open([folder / Path(each["filename"]).name for each in state["_data_files"]]).validate()


def _features() -> dict[str, Any]:
    """Return what `datasets` says of the columns."""
    return {field.name: _feature(field.type) for field in SCHEMA}


def _feature(kind: pyarrow.DataType) -> dict[str, Any]:
    if pyarrow.types.is_list(kind):
        return {"feature": _feature(kind.value_type), "_type": "List"}
    return {"dtype": str(kind), "_type": "Value"}
