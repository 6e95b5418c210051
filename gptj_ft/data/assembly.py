"""Rows -> texts to be tokenised -> the rows of a table."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow

from gptj_ft.config.options import Recipe
from gptj_ft.data.arrow_columns import SCHEMA, array_of
from gptj_ft.data.columns import LABEL, FieldReader, FieldTexts
from gptj_ft.data.dataset import group_of, number_of
from gptj_ft.data.readers.rows import Row
from gptj_ft.data.row_counts import Tally
from gptj_ft.data.template import Part, assemble, eos_of, from_tokens, parts
from gptj_ft.data.tokenization import Tokens
from gptj_ft.errors import DataError, RowSkipped

if TYPE_CHECKING:
    from gptj_ft.data.tokenizer import RowTokenizer

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


def assembled(
    tally: Tally, recipe: Recipe, tokenizer: RowTokenizer, good: Sequence[Texts], tokens: Sequence[Tokens]
) -> pyarrow.RecordBatch:
    """Return the documents of rows, given the tokens of all their texts; count those that are left out."""
    eos, at = eos_of(tokenizer) if tokens else 0, 0
    documents: list[tuple[Any, ...]] = []
    for row, found, texts in good:
        first, at = at, at + len(texts)
        try:
            if texts:
                encoded = assemble(recipe, tokenizer, eos, found.values, texts, tokens[first:at], found.answer_at)
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
    if not tokens:
        raise RowSkipped("no tokens")
    return tokens
