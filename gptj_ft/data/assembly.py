"""Rows -> texts to be tokenised -> the rows of a table."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow

from gptj_ft.data.columns import SCHEMA, array_of
from gptj_ft.data.fields import LABEL, FieldReader, FieldTexts
from gptj_ft.data.placeholders import parse_template
from gptj_ft.data.prepared import group_of, number_of
from gptj_ft.data.rows import Row
from gptj_ft.data.tally import Tally
from gptj_ft.data.template import Part, assemble, eos_of, from_tokens, parts
from gptj_ft.data.tokens import TextBatch, Tokenized, is_before_blank, splits_before_blanks
from gptj_ft.errors import DataError, RowSkipped
from gptj_ft.recipe import Recipe

if TYPE_CHECKING:
    from gptj_ft.data.tokenizer import RowTokenizer

WORTH_SHARING = 200  # characters
TOKENS, TRAINED = "input_ids", "trained"  # columns of rows that come as tokens


class Texts(NamedTuple):
    """A row that can be tokenised."""

    row: Row
    found: FieldTexts
    parts: list[Part]  # empty if it came as tokens


def texts_of(tally: Tally, chunk: list[Row], recipe: Recipe, reader: FieldReader | None) -> list[Texts]:
    """Put rows into the templates; count those that cannot be. Rows that come as tokens have no texts."""
    good = []
    for row in chunk:
        if reader is None:
            good.append(Texts(row, FieldTexts({}, []), []))
            continue
        try:
            found = reader.read(row.values)
            texts = parts(recipe, found.values)
        except RowSkipped as reason:
            tally.skip(row.where, str(reason))
        else:
            prompt = texts[0][0] if len(texts) == 2 else "".join(text for text, _ in texts[:-1])
            tally.checks.look(row, found, prompt, texts[-1][0])
            good.append(Texts(row, found, texts))
    return good


@dataclass(frozen=True)
class Ends:
    """What all prompts begin and end with, in characters, that is tokens of its own: it is tokenised once for all.

    Attributes:
        head: characters that they begin with.
        tail: characters that they end with, where these follow what is no blank.
    """

    head: int = 0
    tail: int = 0

    @classmethod
    def of(cls, recipe: Recipe) -> Ends:
        """Look at a template."""
        pieces = parse_template(recipe.prompt).pieces
        if not pieces:
            return cls()
        (first, is_field), (last, ends_with_field) = pieces[0], pieces[-1]
        head = 0 if is_field else len(first.rstrip())
        tail = "" if ends_with_field or len(pieces) == 1 else last
        return cls(head if is_before_blank(first, head) else 0, len(tail))


def batch_of(rows: Sequence[Texts], recipe: Recipe, tokenizer: RowTokenizer, long: int) -> TextBatch:
    """Return the texts of rows, to be tokenised together.

    What many prompts have in common is tokenised once, where that cannot change a token: the ends of the template,
    and a passage that several questions are about, which stand one after another.

    Args:
        rows: with their texts.
        recipe: its templates.
        tokenizer: a fast one.
        long: characters from which on a text may have to be shortened.
    """
    batch = TextBatch(tokenizer, long)
    if not splits_before_blanks(tokenizer):
        for each in rows:
            for text, _ in each.parts:
                batch.add(text)
        return batch
    ends = Ends.of(recipe)
    for each, passage in zip(rows, _shared_passages(rows, recipe.shorten or ""), strict=True):
        if len(each.parts) != 2:
            for text, _ in each.parts:
                batch.add(text)
            continue
        (prompt, _), (completion, _) = each.parts
        head = prompt.find(passage) + len(passage) if passage else 0
        head = head if head and is_before_blank(prompt, head) else 0
        tail = ends.tail if is_before_blank(prompt, len(prompt) - ends.tail) else 0
        # Of a text that may have to be shortened it is worth more to know where its tokens are.
        if head or len(prompt) <= long:
            batch.add(prompt, head or ends.head, tail)
        else:
            batch.add(prompt)
        batch.add(completion)
    return batch


def _shared_passages(rows: Sequence[Texts], field: str) -> Iterator[str]:
    """Yield each row's value of a field if it is long, and a neighbour has the same; else nothing."""
    passages = ["", *(str(each.found.values.get(field, "")) for each in rows), ""]
    for before, passage, after in zip(passages, passages[1:], passages[2:], strict=False):
        yield passage if len(passage) >= WORTH_SHARING and passage in (before, after) else ""


def assembled(
    tally: Tally, recipe: Recipe, tokenizer: RowTokenizer, good: Sequence[Texts], tokens: Tokenized
) -> pyarrow.RecordBatch:
    """Return the documents of rows; count those that are left out."""
    eos, cuttable, at = eos_of(tokenizer), 0 if recipe.prompt else 1, 0
    documents: list[tuple[Any, ...]] = []
    for row, found, texts in good:
        first, at = at, at + len(texts)
        try:
            if texts:
                encoding = tokens.encodings.get(first + cuttable)
                ids = tokens.ids[first:at]
                encoded = assemble(recipe, tokenizer, eos, found.values, texts, ids, found.answer_at, encoding)
                group = group_of(recipe, found.values)
            else:
                given = _tokens_of(row)
                encoded = from_tokens(recipe, given, row.values.get(TRAINED))
                group = number_of(array("q", given).tobytes())
        except RowSkipped as reason:
            tally.skip(row.where, str(reason))
            continue
        except DataError as error:
            raise DataError(f"{row.where}: {error}") from error
        tally.keep(row, encoded)
        rest = (encoded.prompt_length, encoded.untrained, found.references, row.source, row.line, group)
        label = found.values.get(LABEL, "")
        for document in encoded.documents:
            documents.append((document, *rest, label, document is not encoded.documents[0]))
    columns = list(zip(*documents, strict=True)) or [()] * len(SCHEMA)
    arrays = [array_of(field.type, values) for field, values in zip(SCHEMA, columns, strict=True)]
    return pyarrow.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def _tokens_of(row: Row) -> list[int]:
    """Return the tokens of a row that comes as tokens.

    Raises:
        RowSkipped: they are none.
    """
    tokens = row.values.get(TOKENS)
    if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token < 2**31 for token in tokens):
        raise RowSkipped("input_ids is no list of token ids")
    return tokens
