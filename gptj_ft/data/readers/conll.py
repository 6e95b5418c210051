"""Read files of words and their tags: one word a line, a blank line between sentences."""

from __future__ import annotations

from collections.abc import Iterator

from gptj_ft.data.readers.rows import Findings, Row, numbered_lines, too_long
from gptj_ft.data.readers.source import File

DOCUMENT = "-DOCSTART-"  # a word that only says that a document begins
COMMENT = "# "  # as those of WNUT and MultiCoNER have it before a sentence


def read_conll(file: File, findings: Findings) -> Iterator[Row]:
    """Read sentences as ``tokens`` and ``tags``: the first column of each line and its last, if there are several.

    Columns are separated by tabs, or else by blanks. Lines that begin a document and comments before a sentence are
    left out.
    """
    words, tags, start, size, columns = list[str](), list[str](), 0, 0, 0

    def sentence() -> Row:
        return Row(str(file.path), start, {"tokens": words, **({"tags": tags} if columns > 1 else {})})

    for number, line in numbered_lines(file, findings):
        text = line.strip()
        if not text:
            if words:
                yield sentence()
            words, tags, size = [], [], 0
            continue
        cells = text.split("\t") if "\t" in text else text.split()
        if not words and (cells[0] == DOCUMENT or (text.startswith(COMMENT) and "\t" not in text and len(cells) > 2)):
            continue
        if not words:
            start, columns = number, len(cells)
        if len(cells) != columns:
            findings.add(file, number, f"{len(cells)} columns, the line of the sentence's first word has {columns}")
            continue
        size += len(line)
        if size > file.options.max_record:
            raise too_long(file, start)
        words.append(cells[0])
        tags.append(cells[-1])
    if words:
        yield sentence()
