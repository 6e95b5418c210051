"""Read questions whose answers are spans of a passage: windows over the passage, as in transformers' run_qa.

https://github.com/huggingface/transformers/blob/main/examples/pytorch/question-answering/run_qa.py
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gptj_ft.data.columns import FieldReader, FieldTexts, alternatives_of, is_unicode
from gptj_ft.data.dataset import content_hash
from gptj_ft.data.encoder import EncodedDocument, EncodedRow, Setting, TaskReader
from gptj_ft.data.labelled.assembly import (
    JOINT,
    add_special_tokens,
    check_stride,
    num_special_tokens,
    windows_of,
)
from gptj_ft.data.readers.rows import Row
from gptj_ft.data.template import fields_of, parse_template, render
from gptj_ft.data.tokenization import backend_of, tokenize
from gptj_ft.errors import DataError, RowSkipped, UsageError
from gptj_ft.system.plain_text import shortened

MISPLACED = "the answer is not at answer_start: its nearest occurrence is used"
SEARCHED = "no answer_start: the answer's first occurrence is used"
NO_SPAN = (0, 0)  # start and end at the first token


class TokenizedText(NamedTuple):
    """A text's token ids and their character spans."""

    ids: Sequence[int]
    spans: NDArray[np.int32]  # first and end character of each token, [n, 2]

    def __len__(self) -> int:
        return len(self.ids)


class _Read(NamedTuple):
    passage: str
    answer: tuple[int, int] | None  # first and end character
    references: list[str]


class SpanReader(TaskReader):
    """Read questions, passages and answers; the first of several correct answers is the target.

    A question is never truncated. A passage that is too long is split into windows that share `stride` tokens. A window
    without the whole answer has no answer. If `on_long` keeps only the first window, it must have the answer.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        recipe, frame = setting.recipe, setting.frame
        (self._passage, *more), (self._answers, *other) = fields_of(recipe.pair), fields_of(recipe.completion)
        if more or other or parse_template(recipe.pair).pieces != ((self._passage, True),):
            raise UsageError(
                "pair: for task=spans, pair must be the passage alone and completion a single field, e.g. "
                "{{ context }} and {{ answers }}"
            )
        inputs = {name: of for name, of in setting.columns.items() if name != self._answers}
        self._inputs = FieldReader(inputs, recipe)
        if not frame.exists:
            # Decoders have no separator token: a line break stands between question and passage.
            frame = frame._replace(middle=tuple(tokenize(setting.tokenizer, [JOINT])[0]))
        self._frame = frame
        self._room = recipe.max_length - num_special_tokens(frame, is_pair=True)
        check_stride(recipe.stride, recipe.max_length, frame, is_pair=True)

    def read(self, row: Row) -> tuple[list[str], _Read]:
        recipe = self.setting.recipe
        fields = self._inputs.read(row.values)
        for name in (*fields_of(recipe.prompt), self._passage):
            if not fields.values[name].strip():
                raise RowSkipped(f"the field '{name}' is empty")
        # As in run_qa: some of SQuAD's questions begin with so many blanks that they would fill the window.
        question, passage = render(recipe.prompt, fields.values).lstrip(), fields.values[self._passage]
        answer, references = None, list[str]()
        if self.setting.needs_target:
            answer, references = self._answer(row, passage)
        checked = FieldTexts({**fields.values, self._answers: references[0] if references else ""}, references)
        self.setting.checks.check_row(row, checked, f"{question}\0{passage}", "".join(references[:1]))
        return [question, passage], _Read(passage, answer, references)

    def tokenizer(self) -> Any:
        backend = backend_of(self.setting.tokenizer)

        def locate(texts: list[str]) -> list[TokenizedText]:
            distinct = list(dict.fromkeys(texts))  # many questions share a passage
            encodings = backend.encode_batch(distinct, add_special_tokens=False)
            tokenized = {
                text: TokenizedText(array("i", each.ids), np.array(each.offsets, np.int32).reshape(-1, 2))
                for text, each in zip(distinct, encodings, strict=True)
            }
            return [tokenized[text] for text in texts]

        return locate

    def row_of(self, row: Row, read: _Read, tokens: list[TokenizedText]) -> EncodedRow:
        question, passage = tokens
        if not len(question) or not len(passage):
            raise RowSkipped("no tokens")
        recipe, room = self.setting.recipe, self._room - len(question)
        spans, tokens_cut = [(0, len(passage))], 0
        if len(passage) > room:
            if recipe.on_long == "skip":
                raise RowSkipped("longer than max_length")
            if recipe.on_long == "error":
                raise DataError(
                    f"{len(question)} tokens of the question and {len(passage)} of the passage, max_length leaves room "
                    f"for {self._room}; raise it, or set on_long to split, shorten or skip"
                )
            spans = windows_of(len(passage), room, recipe.stride)
            if recipe.on_long == "shorten":
                spans, tokens_cut = spans[:1], len(passage) - room
                if read.answer is not None and not tokens_of(passage.spans[:room], *read.answer):
                    raise RowSkipped("too long: the answer is cut off")
        documents = [self._window(read, question, passage, first, end) for first, end in spans]
        # Questions about a passage stay on one side of the split: validation must not see trained passages.
        group = content_hash(read.passage.strip().encode())
        return EncodedRow(documents, group, "", read.references, tokens_cut)

    def _window(
        self, read: _Read, question: TokenizedText, passage: TokenizedText, first: int, end: int
    ) -> EncodedDocument:
        ids, borders = add_special_tokens(self._frame, question.ids, passage.ids[first:end])
        before = len(self._frame.first) + len(question) + len(self._frame.middle)
        # Tokens outside the passage have no characters: no answer may contain them.
        offsets = np.full((len(ids), 2), -1, np.int32)
        offsets[before : before + end - first] = passage.spans[first:end]
        targets = NO_SPAN
        if read.answer is not None and (span := tokens_of(passage.spans[first:end], *read.answer)):
            targets = before + span[0], before + span[1]
        return EncodedDocument(ids, borders, (), targets, (), (read.passage,), offsets.ravel().tolist())

    def _answer(self, row: Row, passage: str) -> tuple[tuple[int, int] | None, list[str]]:
        """Return the characters of the first answer, and all answers as texts.

        Raises:
            RowSkipped: there is no answer and the recipe needs one, or it is not in the passage.
        """
        column = self.setting.columns[self._answers]
        cell = row.values.get(column)
        starts: Any
        if isinstance(cell, list) and all(isinstance(each, dict) for each in cell):
            starts = [each.get("answer_start") for each in cell]
            cell = [each.get("text") for each in cell]
        else:
            starts = cell.get("answer_start") if isinstance(cell, dict) else None
        references = [text for text in alternatives_of(cell) if text.strip()]
        if not references:
            if self.setting.recipe.no_answer:
                return None, [""]
            raise RowSkipped(f"no value for column '{shortened(column)}'")
        if not all(map(is_unicode, references)):
            raise RowSkipped(f"column '{shortened(column)}': unpaired surrogate (invalid Unicode)")
        text = references[0]
        stated = starts[0] if isinstance(starts, list) and starts else starts
        if type(stated) is int and passage.startswith(text, stated) and stated >= 0:
            return (stated, stated + len(text)), references
        positions = _occurrences(passage, text)
        if not positions:
            raise RowSkipped("the answer is not in its passage")
        self.setting.checks.add(MISPLACED if type(stated) is int else SEARCHED, row.where)
        start = min(positions, key=lambda each: abs(each - stated)) if type(stated) is int else positions[0]
        return (start, start + len(text)), references


def tokens_of(spans: NDArray[np.int32], start: int, end: int) -> tuple[int, int] | None:
    """Return the first and last token of a character span; ``None`` if the tokens do not cover all of it.

    If a character has several tokens, run_qa swaps first and last; here they are ordered.

    Args:
        spans: first and end character of each token, [n, 2].
        start, end: first and end character of the span.
    """
    if spans[0, 0] > start or spans[-1, 1] < end:
        return None
    # Binary search works because both bounds ascend; tokens of one character share them.
    first = int(np.searchsorted(spans[:, 0], start, side="right")) - 1
    last = int(np.searchsorted(spans[:, 1], end, side="left"))
    return min(first, last), max(first, last)


def _occurrences(text: str, part: str) -> list[int]:
    """Return the character positions of a part in a text."""
    positions, position = list[int](), text.find(part)
    while position >= 0:
        positions.append(position)
        position = text.find(part, position + 1)
    return positions
