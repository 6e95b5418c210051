"""Read CNN/DailyMail stories, and the files that PreSumm makes of them."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

from gptj_ft.data.readers.rows import Findings, Row, numbered_lines, too_long
from gptj_ft.data.readers.source import File, opened_file
from gptj_ft.errors import DataError

HIGHLIGHT = "@highlight"


def read_story(file: File, findings: Findings) -> Iterator[Row]:
    """Read a story: its paragraphs, and its summary sentences, each after an ``@highlight`` line."""
    article, highlights, size, is_next = list[str](), list[str](), 0, False
    for _, line in numbered_lines(file, findings):
        text = line.strip()
        size += len(line)
        if size > file.options.max_record:
            raise too_long(file, 1)
        if text == HIGHLIGHT:
            is_next = True
        elif text:
            (highlights if is_next else article).append(text)
    yield Row(str(file.path), 1, {"article": "\n".join(article), "highlights": highlights})


def read_presumm(file: File, findings: Findings) -> Iterator[Row]:
    """Read the tokenized documents that PreSumm saves with ``torch.save``; no pickled code is run."""
    import torch

    try:
        with opened_file(file) as opened:
            documents = torch.load(opened, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, AttributeError) as error:
        reason = str(error).split("\n")[0]
        raise DataError(f"{file.path}: not a PreSumm file: {reason}") from error
    if not isinstance(documents, list) or not all(isinstance(each, dict) for each in documents):
        raise DataError(f"{file.path}: not a PreSumm file, which is a list of documents")
    for number, values in enumerate(documents, 1):
        yield Row(str(file.path), number, {str(name): value for name, value in values.items()})
