"""Read files of words and tags: one word per line, a blank line between sentences."""

from __future__ import annotations

from collections.abc import Iterator

from gptj_ft.data.readers.rows import Findings, Row, numbered_lines, too_long
from gptj_ft.data.readers.source import File

DOCUMENT = "-DOCSTART-"  # marks the start of a document
COMMENT = "# "  # before a sentence, in WNUT and MultiCoNER


def read_conll(file: File, findings: Findings) -> Iterator[Row]:
    """Read sentences as ``tokens`` and ``tags``: the first and the last column of each line.

    Columns are separated by tabs, else by blanks. Document starts and comments are skipped.
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
        # A "#" alone with its tag is a word. Comments have more cells, and no tab.
        if not words and (cells[0] == DOCUMENT or (text.startswith(COMMENT) and "\t" not in text and len(cells) > 2)):
            continue
        if not words:
            start, columns = number, len(cells)
        if len(cells) != columns:
            findings.add(file, number, f"{len(cells)} columns, but the sentence's first line has {columns}")
            continue
        size += len(line)
        if size > file.options.max_record:
            raise too_long(file, start)
        words.append(cells[0])
        tags.append(cells[-1])
    if words:
        yield sentence()
