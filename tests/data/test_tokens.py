"""Test that tokenizing a text in parts gives the tokens of the whole."""

from __future__ import annotations

import json
from itertools import chain, product
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.tiny_tokenizer import TEXT, encode, make_tokenizer
from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors

from gptj_ft.config.options import Recipe
from gptj_ft.config.resolve import resolve
from gptj_ft.data.prepare import TokenizeJob, tokenize_rows
from gptj_ft.data.tokenization import (
    WordCache,
    _token_bytes,
    is_before_blank,
    splits_before_blanks,
    token_spans,
    tokenize,
)
from gptj_ft.errors import RowSkipped

# Blanks of all kinds (U+001C is one for Python only), what may be one token with them, and what is several.


@pytest.fixture(scope="module")
def tokenizer():
    blanks = (map("".join, product(" \n\t\r\u00a0", repeat=length)) for length in (2, 3, 4))
    return make_tokenizer(900, TEXT + "a".join(chain(*blanks)))  # a token goes across blanks wherever it may


LETTERS = st.sampled_from([*"ab 's\n\t\r.,1é🙂\x1c\x85\u00a0\u2003\u3000", "<|endoftext|>", "'ll "])
TEXTS = st.lists(LETTERS, max_size=40).map("".join)


@settings(max_examples=300, deadline=None)
@given(text=TEXTS)
def test_splitting_before_blanks_keeps_tokens(tokenizer, text: str) -> None:
    assert splits_before_blanks(tokenizer)
    (whole,) = tokenize(tokenizer, [text])
    for at in range(len(text) + 1):
        if is_before_blank(text, at):
            assert [*tokenize(tokenizer, [text[:at]])[0], *tokenize(tokenizer, [text[at:]])[0]] == whole


@settings(max_examples=300, deadline=None)
@given(texts=st.lists(TEXTS, min_size=1, max_size=4))
def test_cached_words_give_the_tokenizers_tokens(tokenizer, texts: list[str]) -> None:
    words = WordCache(tokenizer)
    wanted = tokenize(tokenizer, texts)
    for _ in range(2):  # those of the second time are in the table
        assert list(map(list, words(texts))) == wanted


def test_only_ordinary_words_are_cached(tokenizer) -> None:
    uncached: list[str] = []
    words = WordCache(tokenizer, tokenize=lambda _, texts: [uncached.append(text) or [] for text in texts])
    words(["The lift  stops.\n\nIts door stays open: \u201cnow\u201d. ", "\n \n a\tb", "", "naïve 🙂"])
    assert not uncached
    words(["a\0 b", "a\t b", "\u6587" * 400, "so far"])
    assert uncached == ["a\0 b", "a\t b", "\u6587" * 400]


def test_word_cache_has_a_limit(tokenizer) -> None:
    words, texts = WordCache(tokenizer, most_words=3), ["a b c d e", "d e f " + 99 * "g" + " h"]
    assert list(map(list, words(texts))) == tokenize(tokenizer, texts)
    assert len(words) <= 3


@settings(max_examples=200, deadline=None)
@given(text=TEXTS)
def test_token_spans_match_the_tokenizers_offsets(tokenizer, text: str) -> None:
    (ids,) = tokenize(tokenizer, [text])
    assert len(_token_bytes(tokenizer))
    encoding = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
    assert [*token_spans(tokenizer, text, ids)] == encoding.offsets


def test_tokenizer_without_blanks_uses_its_offsets(tokenizer) -> None:
    class Other:
        backend_tokenizer = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        split_special_tokens = True

    Other.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    assert token_spans(Other, "The lift", tokenize(Other, ["The lift"])[0])[-1][1] == 8
    assert not len(_token_bytes(Other))


@settings(max_examples=100, deadline=None)
@given(document=TEXTS, cut=st.sampled_from(["end", "start", "middle"]), room=st.integers(12, 40))
def test_shortened_prompt_has_its_texts_tokens(tokenizer, document: str, cut: str, room: int) -> None:
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
        lambda backend: setattr(backend.model, "dropout", 0.1),
    ],
)
def test_tokenizer_crossing_blanks_is_not_split(tokenizer, change) -> None:
    class Other:
        backend_tokenizer = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())

    assert splits_before_blanks(Other)
    change(Other.backend_tokenizer)
    assert not splits_before_blanks(Other)


def test_questions_sharing_a_passage_are_prepared_alike(tokenizer, tmp_path: Path) -> None:
    passage = "Building " + "and ".join(f"level {n} has a lift " for n in range(30)).strip()
    rows = [{"context": passage, "question": f"What has level {n}?", "answers": "a lift"} for n in range(3)]
    rows += [{"context": "Short.", "question": "What?", "answers": "Short"}, rows[0] | {"context": passage + "\n"}]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    recipe = resolve({"recipe": "qa", "max_length": 512}, environment={}).recipe
    prepared = tokenize_rows(TokenizeJob.of(recipe, tokenizer, file, 10**6))
    for row, ids in zip(rows, prepared.rows["input_ids"], strict=True):
        values = {**row, "answer": row["answers"]}
        assert ids == encode(recipe, tokenizer, values).documents[0]
