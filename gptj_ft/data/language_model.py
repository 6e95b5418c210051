"""Read rows of language modelling: texts rendered by the templates, or token ids."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any, NamedTuple

from gptj_ft.data.columns import LABEL, FieldReader, FieldTexts
from gptj_ft.data.dataset import content_hash, document_hash
from gptj_ft.data.encode import Encoded, TextPart, assemble, eos_of, from_tokens, parts
from gptj_ft.data.encoder import EncodedDocument, EncodedRow, Setting, TaskReader
from gptj_ft.data.readers.rows import Row
from gptj_ft.data.tokenization import Tokens
from gptj_ft.errors import RowSkipped

UNKNOWN_IDS = "token ids that the model has and its tokenizer lacks, e.g. separators of other systems"
TOKENS, TRAINED = "input_ids", "trained"  # columns of tokenized rows


class _Read(NamedTuple):
    fields: FieldTexts
    parts: list[TextPart]


class PromptReader(TaskReader):
    """Read prompts and completions."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._fields = FieldReader(setting.columns, setting.recipe)
        self._eos = eos_of(setting.tokenizer)  # a missing EOS fails before any row is read

    def read(self, row: Row) -> tuple[list[str], _Read]:
        fields = self._fields.read(row.values)
        texts = parts(self.setting.recipe, fields.values)
        # Of a conversation, everything before the last answer counts as its prompt.
        prompt = texts[0][0] if len(texts) == 2 else "".join(text for text, _ in texts[:-1])
        self.setting.checks.check_row(row, fields, prompt, texts[-1][0])
        return [text for text, _ in texts], _Read(fields, texts)

    def row_of(self, row: Row, read: _Read, tokens: list[Tokens]) -> EncodedRow:
        recipe, values = self.setting.recipe, read.fields.values
        encoded = assemble(recipe, self.setting.tokenizer, self._eos, values, read.parts, tokens, read.fields.answer_at)
        return _row(encoded, document_hash(recipe, values), values.get(LABEL, ""), read.fields.references)


class TokenReader(TaskReader):
    """Read rows of token ids."""

    reads_tokens = True

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        vocabulary: Mapping[str, int] = setting.tokenizer.get_vocab()
        self._largest_known = max(vocabulary.values(), default=2**31)

    def tokenizer(self) -> Any:
        return lambda texts: []

    def read(self, row: Row) -> tuple[list[str], None]:
        return [], None

    def row_of(self, row: Row, read: None, tokens: list[Tokens]) -> EncodedRow:
        ids = row.values.get(TOKENS)
        if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < 2**31 for token in ids):
            raise RowSkipped("input_ids is not a list of token ids")
        if not ids:
            raise RowSkipped("no tokens")
        encoded = from_tokens(self.setting.recipe, ids, row.values.get(TRAINED))
        if max(encoded.documents[0]) > self._largest_known:
            self.setting.checks.add(UNKNOWN_IDS, row.where)
        return _row(encoded, content_hash(array("q", ids).tobytes()))


def _row(encoded: Encoded, group: int, label: str = "", references: list[str] | None = None) -> EncodedRow:
    documents = [
        EncodedDocument(ids, targets=(), prompt_length=encoded.prompt_length, masked_spans=encoded.masked_spans)
        for ids in encoded.documents
    ]
    return EncodedRow(documents, group, label, references or [], encoded.tokens_cut)
