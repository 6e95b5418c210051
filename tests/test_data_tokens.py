"""Texts tokenised in parts get the tokens that they have as a whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_data_tokenizer import make_tokenizer
from tokenizers import Tokenizer, normalizers, pre_tokenizers

from gptj_ft.data.assembly import Texts, batch_of
from gptj_ft.data.fields import FieldTexts
from gptj_ft.data.placeholders import render
from gptj_ft.data.prepare import prepare
from gptj_ft.data.rows import Row
from gptj_ft.data.shorten import Offsets
from gptj_ft.data.template import encode
from gptj_ft.data.tokens import TextBatch, encoding_of, is_before_blank, splits_before_blanks, tokenize
from gptj_ft.errors import RowSkipped
from gptj_ft.recipe import Recipe, resolve

# Blanks of all kinds (U+001C is one for Python only), what may be one token with them, and what is several.


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


LETTERS = st.sampled_from([*"ab 's\n\t\r.,1é🙂\x1c\x85\u00a0\u2003\u3000", "<|endoftext|>", "'ll "])
TEXTS = st.lists(LETTERS, max_size=40).map("".join)


@settings(max_examples=300, deadline=None)
@given(text=TEXTS)
def test_where_a_blank_follows_a_text_has_the_tokens_of_its_parts(tokenizer, text: str) -> None:
    assert splits_before_blanks(tokenizer)
    (whole,) = tokenize(tokenizer, [text])
    for at in range(len(text) + 1):
        if is_before_blank(text, at):
            assert [*tokenize(tokenizer, [text[:at]])[0], *tokenize(tokenizer, [text[at:]])[0]] == whole


def test_a_batch_gives_each_text_its_own_tokens(tokenizer) -> None:
    passage = "The lift to level 3 stops, and its door stays open." * 9
    texts = [(f"{passage}\n\nQuestion: {n}?\n\nAnswer:", len(passage), n % 2 * 9) for n in range(4)]
    texts += [("short", 0, 0), (passage * 3, 0, 0), (f"{passage}\n\nAnswer:", len(passage), 9), ("The end", 3, 4)]
    batch = TextBatch(tokenizer, long=1000)
    for text in texts:
        batch.add(*text)
    found = batch.tokenize()
    assert found.ids == tokenize(tokenizer, [text for text, *_ in texts])
    assert [*found.encodings] == [5]
    assert found.encodings[5].ids == found.ids[5]


TEMPLATES = [
    "Read this.\n\n{{ a }}\n\nSummary:",
    "{{ a }}\n\nSummary:",
    "Read. {{ a }}",
    "Read{{ a }}:",
    " {{ a }} {{ a }} ",
]


@settings(max_examples=200, deadline=None)
@given(values=st.lists(TEXTS, min_size=1, max_size=4), template=st.sampled_from(TEMPLATES), long=st.integers(0, 60))
def test_rows_in_a_template_are_tokenised_as_each_alone(tokenizer, values, template: str, long: int) -> None:
    recipe = Recipe(prompt=template, completion=" {{ b }}", fields={}, shorten="a")
    texts = [render(template, {"a": value}) for value in values]
    rows = [
        Texts(Row("", 1, {}), FieldTexts({"a": value}, []), [(text, False), (" yes", True)])
        for value, text in zip(values, texts, strict=True)
    ]
    assert batch_of(rows, recipe, tokenizer, long).tokenize().ids[::2] == tokenize(tokenizer, texts)


@settings(max_examples=100, deadline=None)
@given(text=TEXTS, first=st.integers(0, 5))
def test_places_of_tokens_asked_for_one_by_one_are_those_of_all(tokenizer, text: str, first: int) -> None:
    encoding = encoding_of(tokenizer, text)
    assert [*Offsets(encoding)] == encoding.offsets
    assert [*Offsets(encoding, min(first, len(encoding)))] == encoding.offsets[first:]


@settings(max_examples=100, deadline=None)
@given(document=TEXTS, cut=st.sampled_from(["end", "start", "middle"]), room=st.integers(12, 40))
def test_a_shortened_prompt_has_the_tokens_of_its_text(tokenizer, document: str, cut: str, room: int) -> None:
    recipe = Recipe(
        prompt="Read.\n{{ a }}\n\nSummary:", completion=" {{ b }}", fields={}, shorten="a", cut=cut, max_length=room
    )
    try:
        encoded = encode(recipe, tokenizer, {"a": f"The {document} lift {document} stops.", "b": "yes"})
    except RowSkipped:
        assume(False)
    prompt = encoded.documents[0][: encoded.prompt_length]
    assert prompt == tokenize(tokenizer, [tokenizer.decode(prompt, clean_up_tokenization_spaces=False)])[0]


@pytest.mark.parametrize(
    "change",
    [
        lambda backend: setattr(backend, "normalizer", normalizers.NFC()),
        lambda backend: setattr(backend, "pre_tokenizer", pre_tokenizers.Whitespace()),
        lambda backend: setattr(backend, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
        lambda backend: setattr(backend, "pre_tokenizer", pre_tokenizers.ByteLevel(False, use_regex=False)),
        lambda backend: backend.add_tokens(["two words"]),
    ],
)
def test_a_tokenizer_that_looks_across_blanks_is_not_taken_apart(tokenizer, change) -> None:
    class Other:
        backend_tokenizer = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())

    assert splits_before_blanks(Other)
    change(Other.backend_tokenizer)
    assert not splits_before_blanks(Other)


def test_questions_about_one_passage_are_prepared_as_each_alone(tokenizer, tmp_path: Path) -> None:
    passage = "Building " + "and ".join(f"level {n} has a lift " for n in range(30)).strip()
    rows = [{"context": passage, "question": f"What has level {n}?", "answers": "a lift"} for n in range(3)]
    rows += [{"context": "Short.", "question": "What?", "answers": "Short"}, rows[0] | {"context": passage + "\n"}]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    recipe = resolve({"recipe": "qa", "max_length": 512}, environment={}).recipe
    prepared = prepare(recipe, tokenizer, file, 10**6)
    for row, ids in zip(rows, prepared.rows["input_ids"], strict=True):
        values = {**row, "answer": row["answers"]}
        assert ids == encode(recipe, tokenizer, values).documents[0]
