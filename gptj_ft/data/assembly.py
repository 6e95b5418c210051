"""Rows -> texts to be tokenised -> the rows of a table."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import pyarrow

from gptj_ft.data.columns import SCHEMA, array_of
from gptj_ft.data.fields import LABEL, FieldReader, FieldTexts
from gptj_ft.data.prepared import group_of, number_of
from gptj_ft.data.rows import Row
from gptj_ft.data.tally import Tally
from gptj_ft.data.template import Part, assemble, from_tokens, parts
from gptj_ft.data.tokens import Tokens, is_before_blank
from gptj_ft.errors import DataError, RowSkipped
from gptj_ft.recipe import Recipe

if TYPE_CHECKING:
    from gptj_ft.data.tokenizer import RowTokenizer

WORTH_SHARING = 200  # characters
TOKENS, TRAINED = "input_ids", "trained"  # columns of rows that come as tokens


@dataclass(frozen=True)
class Texts:
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
            tally.checks.look(row, found, "".join(text for text, _ in texts[:-1]), texts[-1][0])
            good.append(Texts(row, found, texts))
    return good


def shared_heads(rows: Sequence[Texts], field: str) -> Iterator[int]:
    """Yield how much of each row's prompt is that of its neighbours, too, in characters: as far as the same document.

    Questions about one passage stand one after another; it is tokenised once for all of them.
    """
    documents = ["", *(str(each.found.values.get(field, "")) for each in rows), ""]
    for each, before, document, after in zip(rows, documents, documents[1:], documents[2:], strict=False):
        head = 0
        if len(document) >= WORTH_SHARING and document in (before, after) and len(each.parts) == 2:
            prompt = each.parts[0][0]
            head = prompt.find(document) + len(document)
            head = head if is_before_blank(prompt, head) else 0
        yield head


def assembled(
    tally: Tally,
    recipe: Recipe,
    tokenizer: RowTokenizer,
    eos: int,
    good: list[Texts],
    tokens: list[Tokens],
) -> pyarrow.RecordBatch:
    """Return the documents of rows; count those that are left out."""
    rest, cuttable, documents = iter(tokens), 0 if recipe.prompt else 1, list[tuple[Any, ...]]()
    for each in good:
        row, found, own = each.row, each.found, list(islice(rest, len(each.parts)))
        try:
            if each.parts:
                ids, encoding = [ids for ids, _ in own], own[cuttable].encoding
                encoded = assemble(recipe, tokenizer, eos, found.values, each.parts, ids, found.answer_at, encoding)
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
        label = found.values.get(LABEL, "")
        documents += [
            (
                ids, encoded.prompt_length, encoded.untrained, found.references, row.source, row.line, group, label,
                number > 0,
            )
            for number, ids in enumerate(encoded.documents)
        ]  # fmt: skip
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
