"""Read words with a label each: rows of two lists, split between words if they are too long."""

from __future__ import annotations

import ast
import json
import re
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

from gptj_ft.data.columns import FieldTexts
from gptj_ft.data.dataset import content_hash
from gptj_ft.data.encoder import EncodedDocument, EncodedRow, RowCounts, Setting, TaskReader
from gptj_ft.data.labelled.assembly import add_special_tokens, num_special_tokens
from gptj_ft.data.labelled.label_order import renumbered
from gptj_ft.data.readers.rows import Occurrences, Row
from gptj_ft.data.table import TokenTable
from gptj_ft.data.template import fields_of
from gptj_ft.data.tokenization import NoTokenizer
from gptj_ft.data.wordpiece import splits_at_blanks
from gptj_ft.errors import DataError, RowSkipped, UsageError
from gptj_ft.system.plain_text import shortened

LONGEST_LIST = 1_000_000  # characters of a list written as text
_ITEM = r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[\w.+-]+)"""
_NUMPY = re.compile(rf"\[\s*{_ITEM}(?:\s+{_ITEM})+\]")  # as numpy prints arrays: a blank at the start only


def parsed_list(text: str) -> list[Any] | None:
    """Parse a list written as JSON, or as Python or numpy print it; ``None`` if the text is not a list.

    >>> parsed_list('["a", 1]'), parsed_list(" ['a', 'b'] "), parsed_list("['a' 'b']"), parsed_list("[a]")
    (['a', 1], ['a', 'b'], ['a', 'b'], None)
    """
    text = text.strip()
    if text.startswith("[") and text.endswith("]") and len(text) < LONGEST_LIST:
        if _NUMPY.fullmatch(text):  # Python would join the texts
            text = f"[{','.join(re.findall(_ITEM, text))}]"
        for parse in (json.loads, ast.literal_eval):
            try:
                value = parse(text)
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                continue
            if isinstance(value, list):
                return value
    return None


class _Read(NamedTuple):
    words: list[str]
    names: list[str]


class WordReader(TaskReader):
    """Read words and their labels; the head labels each word at its first token.

    BERT's words are tokenized one by one; those of byte-level tokenizers with a blank before them. A word without
    tokens, e.g. a control character, becomes the unknown token, so that every word has its label.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        recipe = setting.recipe
        self._words = only_field(recipe.prompt, "prompt", "{{ tokens }}")
        self._labels = only_field(recipe.completion, "completion", "{{ tags }}")
        self._before = "" if splits_at_blanks(setting.tokenizer) else " "
        self._frame = setting.frame
        assert not isinstance(setting.tokenizer, NoTokenizer), "frame_of would have failed"
        self._unknown = int(setting.tokenizer.unk_token_id or 0)
        self._room = recipe.max_length - num_special_tokens(self._frame, is_pair=False)
        if self._room < 1:
            raise UsageError(f"max_length: {recipe.max_length} tokens leave no room for a word")

    def read(self, row: Row) -> tuple[list[str], _Read]:
        columns = self.setting.columns
        words = _texts(columns[self._words], row.values.get(columns[self._words]))
        if not words:
            raise RowSkipped("no words")
        names: list[str] = []
        if self.setting.needs_target:
            labels = _texts(columns[self._labels], row.values.get(columns[self._labels]))
            if len(labels) != len(words):
                raise RowSkipped("not as many labels as words")
            known: dict[str, str] = {}
            for label in labels:
                if label not in known:
                    known[label] = self.setting.labels.name_of(label)
            names = [known[label] for label in labels]
        text = " ".join(words)
        self.setting.checks.check_row(row, FieldTexts({self._words: text}, []), text, " ".join(names))
        return [self._before + word for word in words], _Read(words, names)

    def row_of(self, row: Row, read: _Read, tokens: list[Any]) -> EncodedRow:
        pieces = [ids if len(ids) else array("i", [self._unknown]) for ids in tokens]
        # One word may have more tokens than fit. Its first token carries the label.
        pieces, tokens_cut = [ids[: self._room] for ids in pieces], sum(max(len(ids) - self._room, 0) for ids in pieces)
        spans = self._spans([len(ids) for ids in pieces])
        recipe = self.setting.recipe
        if len(spans) > 1 and recipe.on_long == "shorten":
            tokens_cut += sum(map(len, pieces[spans[0][1] :]))
            del spans[1:]
        targets = [self.setting.labels.add(name, row.where) for name in read.names[: spans[-1][1]]]
        documents = [self._document(read, pieces, targets, *span) for span in spans]
        group = content_hash("\0".join(read.words).encode())
        return EncodedRow(documents, group, "", (" ".join(read.names),) if read.names else (), tokens_cut)

    def finish(self, table: TokenTable, counts: RowCounts) -> TokenTable:
        if not self.setting.needs_target:
            return table
        self.setting.labels.check(counts.numbers["target_tokens"], unit="words")
        return renumbered(table, self.setting.labels.renumbering())

    def warnings(self) -> dict[str, Occurrences]:
        return self.setting.labels.warnings("words") if self.setting.needs_target else {}

    def _spans(self, lengths: Sequence[int]) -> list[tuple[int, int]]:
        """Return the words of each document, (first, end): as many as fit.

        Raises:
            RowSkipped: the row is too long and may not be split.
        """
        spans, start, used = list[tuple[int, int]](), 0, 0
        for number, length in enumerate(lengths):
            if used + length > self._room:
                spans.append((start, number))
                start, used = number, 0
            used += length
        spans.append((start, len(lengths)))
        if len(spans) > 1 and self.setting.recipe.on_long == "skip":
            raise RowSkipped("longer than max_length")
        if len(spans) > 1 and self.setting.recipe.on_long == "error":
            raise DataError(
                f"{sum(lengths)} tokens, max_length leaves room for {self._room}; raise it, or set on_long to split, "
                "shorten or skip"
            )
        return spans

    def _document(
        self, read: _Read, pieces: Sequence[Sequence[int]], targets: Sequence[int], first: int, end: int
    ) -> EncodedDocument:
        flat, marks = list[int](), list[int]()
        for ids in pieces[first:end]:
            marks.append(len(self._frame.first) + len(flat))
            flat.extend(ids)
        ids, _ = add_special_tokens(self._frame, flat, None)
        return EncodedDocument(ids, (), marks, targets[first:end] or [0] * len(marks), texts=read.words[first:end])


def only_field(template: str, option: str, example: str) -> str:
    """Return the only field of a template.

    Args:
        option: name of the option, for the message.
        example: a correct template, for the message.
    """
    fields = fields_of(template)
    if len(fields) != 1:
        raise UsageError(f"{option}: this task needs a single field, a list, e.g. {example}")
    return fields[0]


def _texts(column: str, cell: Any) -> list[str]:
    """Return the texts of a list; a text is parsed as a list, or split at blanks.

    Raises:
        RowSkipped: there is no list, or it has items other than texts and numbers.
    """
    items = (parsed_list(cell) or cell.split()) if isinstance(cell, str) else cell
    if not isinstance(items, list):
        raise RowSkipped(f"no list in column '{shortened(column)}'")
    if not all(isinstance(item, str | int | float) for item in items):
        raise RowSkipped(f"column '{shortened(column)}': the list has items that are not words")
    texts = [str(item) for item in items]
    try:
        # The tokenizer would reject unpaired surrogates too, but without naming row and column.
        "".join(texts).encode()
    except UnicodeEncodeError:
        raise RowSkipped(f"column '{shortened(column)}': unpaired surrogate (invalid Unicode)") from None
    return texts
