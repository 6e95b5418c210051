"""Read rows of language modelling: texts rendered by the templates, or token ids."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from gptj_ft.data.chat import MESSAGES, Conversation, drop_oldest, is_chat
from gptj_ft.data.chat_template import (
    SPLIT,
    TOOLS,
    ChatTemplate,
    EncodedText,
    RenderedChat,
    as_conversation,
    trained_borders,
)
from gptj_ft.data.columns import LABEL, FieldReader, FieldTexts, recipe_fields
from gptj_ft.data.dataset import content_hash, document_hash
from gptj_ft.data.encode import (
    Encoded,
    TextPart,
    assemble,
    eos_of,
    from_tokens,
    parts,
    refuse_if_not_to_be_shortened,
    shorten_text,
    start_of,
)
from gptj_ft.data.encoder import EncodedDocument, EncodedRow, Setting, TaskReader
from gptj_ft.data.readers.rows import Row
from gptj_ft.data.tokenization import Tokens, no_tokenizer
from gptj_ft.errors import RowSkipped

UNKNOWN_IDS = "token ids that the model has and its tokenizer lacks, e.g. separators of other systems"
PASSED_OVER = "input_ids are trained, not the text next to them; to train the text: --map FIELD=COLUMN"
TOKENS, TRAINED = "input_ids", "trained"  # columns of tokenized rows
LABELS, MASK, NO_TARGET = "labels", "attention_mask", -100  # columns of transformers; a label that is no target


class _Read(NamedTuple):
    fields: FieldTexts
    parts: list[TextPart]


class PromptReader(TaskReader):
    """Read prompts and completions."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._fields = FieldReader(setting.columns, setting.recipe)
        self._start = start_of(setting.recipe, setting.tokenizer)
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
        encoded = assemble(
            recipe, self.setting.tokenizer, self._eos, values, read.parts, tokens, read.fields.answer_at, self._start
        )
        return _row(encoded, document_hash(recipe, values), values.get(LABEL, ""), read.fields.references)


class _Chat(NamedTuple):
    fields: FieldTexts
    rows: list[RenderedChat]


class ChatReader(TaskReader):
    """Read conversations, or prompts and completions as such, by a model's chat template."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._fields = FieldReader(setting.columns, setting.recipe)
        template = ChatTemplate.of(setting.recipe, setting.tokenizer)
        if template is None:
            raise no_tokenizer(Path(setting.tokenizer.name_or_path))
        self._template = template

    def tokenizer(self) -> Any:
        return self._template.encode

    def read(self, row: Row) -> tuple[list[str], _Chat]:
        recipe = self.setting.recipe
        fields = self._fields.read(row.values)
        if is_chat(recipe):
            conversation = fields.values[MESSAGES]
        else:
            (prompt, _), (completion, _) = parts(recipe, fields.values)
            conversation = as_conversation(prompt, completion)
        rows = self._template.rows_of(conversation, fields.values.get(TOOLS))
        start = rows[-1].trained[-1][0]
        self.setting.checks.check_row(row, fields, rows[-1].text[:start], rows[-1].answer)
        if len(rows) > 1:
            self.setting.checks.add(SPLIT, row.where)
        return [each.text for each in rows], _Chat(fields, rows)

    def row_of(self, row: Row, read: _Chat, tokens: list[EncodedText]) -> EncodedRow:
        recipe, fields = self.setting.recipe, read.fields
        num_cut, documents, references = 0, [], []
        for chat, written in zip(read.rows, tokens, strict=True):
            fitting = written
            if len(written.ids) > recipe.max_length:
                refuse_if_not_to_be_shortened(recipe, len(written.ids))
                chat, fitting = self._fit(chat, fields)
                num_cut += len(written.ids) - len(fitting.ids)
            borders = trained_borders(fitting, chat.trained)
            # Tokens after the last target have no effect.
            documents.append(
                EncodedDocument(
                    fitting.ids[: borders[-1]], targets=(), prompt_length=borders[0], masked_spans=borders[1:-1]
                )
            )
            references.append([chat.answer])
        group = document_hash(recipe, fields.values)
        if len(documents) > 1:
            return EncodedRow(documents, group, tokens_cut=num_cut, references_of=references)
        return EncodedRow(documents, group, fields.values.get(LABEL, ""), fields.references, num_cut)

    def _fit(self, chat: RenderedChat, fields: FieldTexts) -> tuple[RenderedChat, EncodedText]:
        """Drop the oldest messages, or shorten the prompt's field, until the row has at most ``max_length`` tokens."""
        recipe, tools = self.setting.recipe, fields.values.get(TOOLS)

        def write(conversation: Conversation) -> tuple[RenderedChat, EncodedText]:
            rendered = self._template.rows_of(conversation, tools)[-1]
            return rendered, self._template.encode([rendered.text])[0]

        if is_chat(recipe):
            for fewer in drop_oldest(chat.messages):
                fitting = write(fewer)
                if len(fitting[1].ids) <= recipe.max_length:
                    return fitting
            raise RowSkipped("too long: no room for the last question and its answer")

        def with_prompt(text: str) -> tuple[RenderedChat, EncodedText]:
            return write(as_conversation(text, chat.messages[-1]["content"]))

        def excess(text: str) -> int:
            return len(with_prompt(text)[1].ids) - recipe.max_length

        return with_prompt(shorten_text(recipe, self.setting.tokenizer, fields.values, excess, fields.answer_at))


class TokenReader(TaskReader):
    """Read rows of token ids."""

    reads_tokens = True

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        vocabulary: Mapping[str, int] = setting.tokenizer.get_vocab()
        self._largest_known = max(vocabulary.values(), default=2**31)
        fields = setting.recipe.fields
        self._texts = {name for field in recipe_fields(setting.recipe) for name in fields.get(field, (field,))}

    def tokenizer(self) -> Any:
        return lambda texts: []

    def read(self, row: Row) -> tuple[list[str], None]:
        if any(isinstance(row.values[name], str) for name in self._texts & row.values.keys()):
            self.setting.checks.add(PASSED_OVER, row.where)
        return [], None

    def row_of(self, row: Row, read: None, tokens: list[Tokens]) -> EncodedRow:
        ids = row.values.get(TOKENS)
        if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < 2**31 for token in ids):
            raise RowSkipped("input_ids is not a list of token ids")
        if not ids:
            raise RowSkipped("no tokens")
        trained = row.values.get(TRAINED)
        if trained is None and not row.values.keys().isdisjoint((LABELS, MASK)):
            ids, trained = _without_padding(ids, row.values.get(LABELS), row.values.get(MASK))
        encoded = from_tokens(self.setting.recipe, ids, trained)
        if max(encoded.documents[0]) > self._largest_known:
            self.setting.checks.add(UNKNOWN_IDS, row.where)
        return _row(encoded, content_hash(array("q", ids).tobytes()))


def _without_padding(ids: list[int], labels: Any, mask: Any) -> tuple[list[int], list[int] | None]:
    """Return the tokens that `transformers` would read, and the bounds of its targets; ``None``: all tokens.

    Args:
        labels: each target's token, and -100 for other tokens; no list: all tokens are targets.
        mask: 0 for padding, 1 for other tokens; ``None``: there is no padding.

    Raises:
        RowSkipped: the lists do not fit the tokens.
    """
    mask = [1] * len(ids) if mask is None else mask
    if not isinstance(mask, list) or len(mask) != len(ids) or any(each not in (0, 1) for each in mask):
        raise RowSkipped("attention_mask is not a list of 0 or 1 for each token")
    read = [index for index, is_read in enumerate(mask) if is_read]
    if not read:
        raise RowSkipped("no tokens")
    ids = [ids[index] for index in read]
    if not isinstance(labels, list):  # e.g. the class of a text
        return ids, None
    if len(labels) != len(mask):
        raise RowSkipped("labels are not a list with a label for each token")
    labels = [labels[index] for index in read]
    if any(label not in (NO_TARGET, token) for label, token in zip(labels, ids, strict=True)):
        raise RowSkipped("a label is neither its token of input_ids nor -100")
    is_target = [False, *(label != NO_TARGET for label in labels), False]
    return ids, [index for index, (before, after) in enumerate(pairwise(is_target)) if before != after]


def _row(encoded: Encoded, group: int, label: str = "", references: list[str] | None = None) -> EncodedRow:
    documents = [
        EncodedDocument(ids, targets=(), prompt_length=encoded.prompt_length, masked_spans=encoded.masked_spans)
        for ids in encoded.documents
    ]
    return EncodedRow(documents, group, label, references or [], encoded.tokens_cut)
