"""Test words with a label each: lists in columns and CoNLL files, first tokens as marks, rows split between words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.tiny_tokenizer import make_tokenizer
from support.tiny_wordpiece import SPECIAL, make_wordpiece
from transformers import BertTokenizer

from gptj_ft.config.options import Recipe
from gptj_ft.data.checks.tokens import check_tokens
from gptj_ft.data.dataset import Prepared
from gptj_ft.data.load import read_or_prepare
from gptj_ft.data.prepare import TokenizeJob, tokenize_rows
from gptj_ft.data.readers.source import FileOptions, identify_file
from gptj_ft.data.tokenization import tokenize
from gptj_ft.errors import DataError, UsageError

TASK: dict[str, Any] = {"task": "token-labels", "prompt": "{{ tokens }}", "completion": "{{ tags }}", "max_length": 64}
CLS, SEP, UNK = (SPECIAL.index(token) for token in ("[CLS]", "[SEP]", "[UNK]"))


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_wordpiece(tmp_path_factory.mktemp("bert"))


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def prepared(tokenizer: Any, rows: list[dict[str, Any]] | Path, **options: Any) -> Prepared:
    path = Path("rows.jsonl")
    if isinstance(rows, Path):
        path = rows
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    asked = {name: options.pop(name) for name in ("labels", "needs_target") if name in options and name != "labels"}
    recipe = Recipe(**{**TASK, **options})
    done = tokenize_rows(TokenizeJob.of(recipe, tokenizer, path, 1000, **asked))
    check_tokens(done, Path("rows"), 1000, recipe.max_length)
    assert done.rows.num_targets() == done.report.target_tokens
    return done


WORDS = ["The", "patients", "came", "from", "riverville", "(", "café", ")", "x1y2", "."]
TAGS = ["O", "O", "O", "O", "B-LOC", "I-LOC", "I-LOC", "O", "B-ID", "O"]


def test_tokens_and_first_pieces_match_transformers(bert: Any) -> None:
    row = list(prepared(bert, [{"tokens": WORDS, "tags": TAGS}]).rows)[0:1][0]
    theirs = BertTokenizer(vocab=bert.get_vocab())(WORDS, is_split_into_words=True)
    assert row["input_ids"] == theirs["input_ids"]
    of = theirs.word_ids()
    assert row["marks"] == [of.index(word) for word in range(len(WORDS))]
    names = ("B-ID", "B-LOC", "I-LOC", "O")
    assert [names[target] for target in row["targets"]] == TAGS
    assert (row["texts"], row["label"], row["references"]) == (WORDS, "", [" ".join(TAGS)])
    assert len(row["input_ids"]) > len(WORDS) + 2, "some words have several pieces"


def test_byte_level_words_include_leading_blank() -> None:
    tokenizer = make_tokenizer()
    (row,) = prepared(tokenizer, [{"tokens": WORDS, "tags": TAGS}]).rows
    assert tokenizer.decode(row["input_ids"]) == " " + " ".join(WORDS)
    pieces = [tokenizer.decode(row["input_ids"][mark : mark + 1]) for mark in row["marks"]]
    assert all(f" {word}".startswith(piece) for word, piece in zip(WORDS[:4], pieces, strict=False))


def test_names_and_numbers_are_labels(bert: Any) -> None:
    rows = [{"tokens": ["the", "river"], "tags": [0, 2]}, {"tokens": "a cough", "tags": "[0, 10]"}]
    done = prepared(bert, rows)
    assert (done.report.labels, done.report.label_counts) == (("0", "2", "10"), (2, 1, 1))
    assert [row["targets"] for row in done.rows] == [[0, 1], [0, 2]]
    done = prepared(bert, rows, labels={"0": "O", "2": "B-LOC", "10": "B-ILL"})
    assert done.report.labels == ("O", "B-LOC", "B-ILL")
    assert [row["targets"] for row in done.rows] == [[0, 1], [0, 2]]


def test_lists_printed_by_numpy_are_read(bert: Any) -> None:
    rows = [
        {"tokens": "['EU' 'rejects'\n 'German' \"don't, x\"]", "tags": "['B-ORG' 'O' 'B-MISC' 'O']"},
        {"tokens": "[ 3 10.5]", "tags": "[1 0]"}, {"tokens": "[ 1 2 ]", "tags": "['O' 'O' 'O' 'O']"},
        {"tokens": "['a' 'b' ... 'c']", "tags": "[0 0 0 0]"},
    ]  # fmt: skip
    done = prepared(bert, rows)
    assert [row["texts"] for row in done.rows] == [
        ["EU", "rejects", "German", "don't, x"],
        ["3", "10.5"],
        ["[", "1", "2", "]"],
    ]
    assert done.report.labels == ("0", "1", "B-MISC", "B-ORG", "O")
    assert list(done.report.rows_skipped) == ["column 'tokens': the list has items that are not words"]


def test_long_rows_split_at_words(bert: Any) -> None:
    rows = [{"tokens": ["the", "riverville", "came"] * 4, "tags": ["O", "B-LOC", "O"] * 4}]
    done = prepared(bert, rows, max_length=12)
    parts = list(done.rows)
    assert [word for row in parts for word in row["texts"]] == rows[0]["tokens"]
    assert [row["continues"] for row in parts] == [False] + [True] * (len(parts) - 1)
    assert len({row["group"] for row in parts}) == 1
    for row in parts:
        ids = row["input_ids"]
        assert (ids[0], ids[-1]) == (CLS, SEP)
        assert len(ids) <= 12
        assert ids[1:-1] == [token for each in tokenize(bert, row["texts"]) for token in each]
        assert len(row["targets"]) == len(row["marks"]) == len(row["texts"])
    longer = len(tokenize(bert, [parts[1]["texts"][0]])[0])
    assert len(parts[0]["input_ids"]) + longer > 12, "as many words as fit"
    assert (done.report.rows_kept, done.report.windows, done.report.tokens_cut) == (1, len(parts), 0)


def test_long_rows_follow_the_length_policy(bert: Any) -> None:
    rows = [{"tokens": ["the", "a"], "tags": ["O", "B"]}, {"tokens": ["the"] * 9, "tags": ["O"] * 9}]
    done = prepared(bert, rows, on_long="shorten", max_length=6)
    assert [len(row["texts"]) for row in done.rows] == [2, 4]
    assert (done.report.rows_cut, done.report.tokens_cut) == (1, 5)
    assert prepared(bert, rows, on_long="skip", max_length=6).report.rows_kept == 1
    with pytest.raises(DataError, match=r"rows\.jsonl:2: 9 tokens, max_length leaves room for 4"):
        prepared(bert, rows, on_long="error", max_length=6)


def test_tokenless_word_becomes_unknown(bert: Any) -> None:
    rows = [{"tokens": ["the", "\u200b", "", "q" * 90], "tags": ["O", "B", "O", "B"]}]
    (row, last) = prepared(bert, rows, max_length=20).rows
    assert row["input_ids"][2:4] == [UNK, UNK]
    assert row["marks"] == [1, 2, 3]
    assert (last["marks"], len(last["input_ids"])) == ([1], 20)


def test_unusable_rows_say_why(bert: Any) -> None:
    rows = [
        {"tokens": ["the", "a"], "tags": ["O", "B"]}, {"tokens": ["the"], "tags": ["O", "B"]},
        {"tokens": [], "tags": []}, {"tokens": 5, "tags": ["O"]}, {"tokens": [["a"]], "tags": ["O"]},
        {"tokens": ["the"]},
    ]  # fmt: skip
    assert {why: of.first for why, of in prepared(bert, rows).report.rows_skipped.items()} == {
        "not as many labels as words": ["rows.jsonl:2"],
        "no words": ["rows.jsonl:3"],
        "no list in column 'tokens'": ["rows.jsonl:4"],
        "column 'tokens': the list has items that are not words": ["rows.jsonl:5"],
        "no list in column 'tags'": ["rows.jsonl:6"],
    }
    with pytest.raises(DataError, match="of the 4 words all have the label 'O'"):
        prepared(bert, [{"tokens": ["the", "a"], "tags": ["O", "O"]}] * 2)
    with pytest.raises(UsageError, match="prompt: this task needs a single field"):
        prepared(bert, rows, prompt="{{ tokens }} {{ tags }}")


def test_prediction_rows_need_no_labels(bert: Any) -> None:
    done = prepared(bert, [{"tokens": "the river"}, {"tokens": ["a", "cough"]}], needs_target=False)
    assert [(row["texts"], row["targets"]) for row in done.rows] == [
        (["the", "river"], [0, 0]),
        (["a", "cough"], [0, 0]),
    ]


CONLL = """-DOCSTART- -X- O O

EU NNP I-NP I-ORG
rejects VBZ I-VP O

Peter NNP I-NP I-PER


# the first of three comments
Bonn\tNNP\tI-NP\tI-LOC
"""


@pytest.mark.parametrize("name", ["eng.testa", "train.txt", "data.conll", "train.iob"])
def test_conll_sentences_use_the_last_column(name: str, bert: Any) -> None:
    Path(name).write_text(CONLL, encoding="utf-8")
    done = prepared(bert, Path(name))
    assert [(row["line"], row["texts"]) for row in done.rows] == [
        (3, ["EU", "rejects"]),
        (6, ["Peter"]),
        (10, ["Bonn"]),
    ]
    assert done.report.labels == ("I-LOC", "I-ORG", "I-PER", "O")
    assert done.report.columns == {"tokens": "tokens", "tags": "tags"}
    again = read_or_prepare(TokenizeJob.of(Recipe(**TASK), bert, Path(name), 1000))
    assert list(again.rows) == list(done.rows)


def test_a_line_with_other_columns_is_named(bert: Any) -> None:
    Path("data.conll").write_text("EU NNP O\nrejects O\n\nB X B\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"data\.conll:2: 2 columns, but the sentence's first line has 3"):
        prepared(bert, Path("data.conll"))


def test_words_without_tags_can_be_predicted(bert: Any) -> None:
    Path("data.conll").write_text("EU\nrejects\n\nBonn\n", encoding="utf-8")
    done = prepared(bert, Path("data.conll"), needs_target=False)
    assert [row["texts"] for row in done.rows] == [["EU", "rejects"], ["Bonn"]]


@pytest.mark.parametrize(
    ("text", "format_"),
    [
        ("Anna lives in Paris .\n", "txt"),
        ("EU rejects it\nPeter reads two books\nBonn\n", "txt"),
        ("Thank you\nThank you\nSee you in Bonn\n", "txt"),
        ("EU\nrejects\n\nBonn\n", "conll"),
        ("EU org\nrejects o\nit o\n", "conll"),
        ("EU NNP B-ORG\nrejects VBZ O\n", "conll"),
        ("EU\tnnp\torg\nrejects\tv\to\n", "conll"),
    ],
)
def test_text_of_sentences_is_not_conll(text: str, format_: str, tmp_path: Path) -> None:
    for encoding in ("utf-8", "utf-16"):
        path = tmp_path / f"{encoding}.txt"
        path.write_text(text, encoding=encoding)
        assert identify_file(path, FileOptions(task="token-labels")).format == format_


def test_text_file_is_not_conll_elsewhere(bert: Any) -> None:
    Path("rows.txt").write_text("EU NNP O\n", encoding="utf-8")
    recipe = Recipe(task="classification", prompt="{{ text }}", completion="{{ label }}", on_long="skip")
    done = tokenize_rows(TokenizeJob.of(recipe, bert, Path("rows.txt"), 1000, needs_target=False, labels=("a", "b")))
    assert done.report.columns == {"text": "text"}
