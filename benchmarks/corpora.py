"""Write files of any size for the data benchmarks, in the formats of DialogSum, SQuAD and CNN/DailyMail.

A file that is to be longer than its source goes on with rows made of two of its rows: other texts, of the same
language and nearly the same lengths.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

ARTICLE_CHARACTERS = 4000  # of the middle one of CNN/DailyMail's articles, about


def write_dialogues(path: Path, source: Path, wanted: int) -> None:
    """Write DialogSum's format: short dialogues with summaries."""
    write_lines(path, dialogues(source, wanted))


def write_articles(path: Path, source: Path, wanted: int) -> None:
    """Write CNN/DailyMail's format: articles of some thousand characters, here made of dialogues, with highlights."""
    write_lines(path, articles(source, wanted))


def write_squad(path: Path, source: Path, wanted: int) -> None:
    """Write SQuAD's format: nested, on one line."""
    with path.open("w", encoding="utf-8") as file:
        file.write('{"version": "1.1", "data": [')
        for number, article in enumerate(passages(source, wanted)):
            file.write((", " if number else "") + json.dumps(article))
        file.write("]}")


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write JSON lines."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def dialogues(source: Path, wanted: int) -> Iterator[dict[str, str]]:
    """Yield DialogSum rows until their text has a number of characters; at least the whole file."""
    with (source / "summarization/dialogsum/train.jsonl").open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    written = 0
    for turn in count():
        for index, row in enumerate(rows):
            if turn:
                turns, others = (each["dialogue"].split("\n") for each in (row, rows[(index + 97 * turn) % len(rows)]))
                dialogue = "\n".join(turns[: (len(turns) + 1) // 2] + others[len(others) // 2 :])
                row = {**row, "fname": f"{row['fname']}_{turn}", "dialogue": dialogue}
                if written >= wanted:
                    return
            written += len(row["dialogue"]) + len(row["summary"])
            yield row


def articles(source: Path, wanted: int) -> Iterator[dict[str, str]]:
    """Yield articles until their text has a number of characters."""
    draw, parts, length = random.Random(0), list[dict[str, str]](), 0.0
    for row in dialogues(source, wanted):
        parts.append(row)
        if sum(len(part["dialogue"]) for part in parts) > length:
            highlights = "\n".join(part["summary"] for part in parts)
            yield {"article": "\n".join(part["dialogue"] for part in parts), "highlights": highlights}
            parts, length = [], draw.lognormvariate(math.log(ARTICLE_CHARACTERS), 0.45)


def passages(source: Path, wanted: int) -> Iterator[dict[str, Any]]:
    """Yield SQuAD articles until their text has a number of characters; at least the whole file.

    Those made of two have the first sentence of another passage before their own.
    """
    with (source / "squad/train-v1.1-subset.json").open(encoding="utf-8") as file:
        data = json.load(file)["data"]
    contexts, written = [paragraph["context"] for article in data for paragraph in article["paragraphs"]], 0
    for turn in count():
        number = 0
        for article in data:
            paragraphs = []
            for paragraph in article["paragraphs"]:
                number += 1
                before = contexts[(number + 97 * turn) % len(contexts)].partition(". ")[0] + ". " if turn else ""
                paragraphs.append(moved(paragraph, before, turn))
                characters = sum(len(question["question"]) for question in paragraph["qas"])
                written += characters + len(before + paragraph["context"]) * len(paragraph["qas"])
            yield {"title": article["title"], "paragraphs": paragraphs}
            if turn and written >= wanted:
                return
        if written >= wanted:
            return


def moved(paragraph: dict[str, Any], before: str, turn: int) -> dict[str, Any]:
    """Insert a text before a paragraph, and shift the offsets of its answers."""
    questions = []
    for question in paragraph["qas"]:
        answers = [{**each, "answer_start": each["answer_start"] + len(before)} for each in question["answers"]]
        questions.append({**question, "id": f"{question['id']}-{turn}", "answers": answers})
    return {"context": before + paragraph["context"], "qas": questions}


# Recipe -> the name of a file for it, and what writes one: to a path, from a folder with the sources, with so many
# characters of text, 0 for as many as the source has.
Writer = Callable[[Path, Path, int], None]
CORPORA: Mapping[str, tuple[str, Writer]] = {
    "dialogsum": ("dialogues.jsonl", write_dialogues),
    "squad": ("squad.json", write_squad),
    "cnn-dailymail": ("articles.jsonl", write_articles),
}
