"""Test selection of summary sentences: BERTSUM's labels (against PreSumm's rules, restated), filters, segments and
limits.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.real_data import real_data
from support.tiny_tokenizer import make_tokenizer
from support.tiny_wordpiece import SPECIAL, make_wordpiece

from gptj_ft.config.options import Recipe
from gptj_ft.config.resolve import resolve
from gptj_ft.data.checks.tokens import check_tokens
from gptj_ft.data.dataset import Prepared
from gptj_ft.data.labelled.sentences import MAX_SENTENCES, oracle_sentences, split_sentences
from gptj_ft.data.prepare import TokenizeJob, tokenize_rows
from gptj_ft.data.readers.source import FileOptions, identify
from gptj_ft.data.tokenization import load_tokenizer, tokenize
from gptj_ft.errors import DataError, UsageError

CLS, SEP = (SPECIAL.index(token) for token in ("[CLS]", "[SEP]"))
TASK: dict[str, Any] = {
    "task": "sentences", "prompt": "{{ document }}", "completion": "{{ summary }}", "max_length": 200,
    "on_long": "shorten",
}  # fmt: skip
SENTENCES = [
    "The patient came from the village with a cough .",
    "It rains .",
    "The lift stops in the village by the river and is bad .",
    "The patient was good in the village and came to rest .",
    "The river is where it was and the lift is where it was .",
]
SUMMARY = ["The patient came with a cough .", "The lift stops in the village ."]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_wordpiece(tmp_path_factory.mktemp("bert"))


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def prepared(tokenizer: Any, rows: list[dict[str, Any]] | Path, needs_target: bool = True, **options: Any) -> Prepared:
    path = Path("rows.jsonl")
    if isinstance(rows, Path):
        path = rows
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    recipe = Recipe(**{**TASK, **options})
    done = tokenize_rows(TokenizeJob.of(recipe, tokenizer, path, 1000, needs_target=needs_target))
    check_tokens(done, Path("rows"), 1000, recipe.max_length)
    assert done.rows.num_targets() == done.report.target_tokens
    return done


def test_presumm_sample_matches_presumm() -> None:
    """Sentences kept, tokens before the cut, sentences after it, labels left: from PreSumm's code on the same file."""
    tokenizer = load_tokenizer(real_data("tokenizers/bert-base-uncased/vocab.txt").parent)
    file = real_data("summarization/cnndm-sample/cnndm_sample.train.0.json")
    found = []
    for length in (2048, 512):
        recipe = resolve({"recipe": "bertsum", "max_length": length}, environment={}).recipe
        done = tokenize_rows(TokenizeJob.of(recipe, tokenizer, file, 30522))
        assert not done.report.rows_skipped
        found.append(list(done.rows))
    assert [(len(row["marks"]), len(row["input_ids"])) for row in found[0]] == [
        (65, 1402), (48, 830), (47, 1059), (40, 1209), (11, 268), (26, 807)
    ]  # fmt: skip
    cut = [(len(row["marks"]), [n for n, label in enumerate(row["targets"]) if label]) for row in found[1]]
    assert cut == [(21, [1]), (29, [2, 13, 17]), (23, [4, 9, 17]), (17, [3]), (11, [1, 2, 3]), (16, [5, 9, 14])]
    for row in found[1]:
        ids = row["input_ids"]
        assert len(ids) <= 512
        assert ids[-1] == 102
        # As in PreSumm a sentence may begin at the very last token, in place of which the last [SEP] stands.
        assert [mark for mark in row["marks"] if mark < 511] == [at for at, token in enumerate(ids) if token == 101]
        assert row["borders"] == row["marks"][1:]
        assert len(row["texts"]) == len(row["marks"])


def test_short_sentences_are_dropped_types_alternate(bert: Any) -> None:
    (row,) = prepared(bert, [{"document": SENTENCES, "summary": SUMMARY}]).rows
    kept = [text for text in SENTENCES if text != "It rains ."]
    assert row["texts"] == kept
    assert row["input_ids"] == [token for text in kept for token in (CLS, *tokenize(bert, [text])[0], SEP)]
    assert [row["input_ids"][mark] for mark in row["marks"]] == [CLS] * 4
    assert row["borders"] == row["marks"][1:]
    assert row["targets"] == [1, 1, 0, 0]
    assert row["references"] == ["\n".join(SUMMARY)]


def test_document_forms_are_equivalent(bert: Any) -> None:
    forms = [
        {"document": [sentence.split() for sentence in SENTENCES], "summary": [text.split() for text in SUMMARY]},
        {"document": SENTENCES, "summary": SUMMARY},
        {"document": "\n".join(SENTENCES), "summary": "\n".join(SUMMARY)},
        {"document": " ".join(SENTENCES), "summary": "<q>".join(SUMMARY)},
    ]
    rows = list(prepared(bert, forms).rows)
    for row in rows:
        assert {**row, "line": 0} == {**rows[0], "line": 0}


def test_presumm_words_are_not_split_at_punctuation(bert: Any) -> None:
    words = ["the", "--river", "café", "was", "good", "and", "bad"]
    rows = [
        {"document": [words] * 3, "summary": [words]},
        {"document": [" ".join(words)] * 3, "summary": " ".join(words)},
    ]
    first, second = prepared(bert, rows).rows
    assert first["input_ids"] != second["input_ids"]
    vocabulary = bert.get_vocab()
    assert first["input_ids"][2:4] == [vocabulary["-"], bert.unk_token_id] or "##-" not in vocabulary


def test_long_document_keeps_its_last_token(bert: Any) -> None:
    rows = [{"document": SENTENCES, "summary": SUMMARY}]
    (whole,) = prepared(bert, rows).rows
    (row,) = prepared(bert, rows, max_length=30).rows
    assert row["input_ids"] == [*whole["input_ids"][:29], SEP]
    count = sum(mark < 30 for mark in whole["marks"])
    assert 0 < count < len(whole["marks"])
    assert (row["marks"], row["targets"], row["texts"]) == tuple(
        whole[name][:count] for name in ("marks", "targets", "texts")
    )
    assert row["borders"] == row["marks"][1:]
    with pytest.raises(DataError, match="none of the 1 rows can be trained on: longer than max_length"):
        prepared(bert, rows, max_length=30, on_long="skip")
    with pytest.raises(DataError, match=r"rows\.jsonl:1: \d+ tokens, max_length is 30"):
        prepared(bert, rows, max_length=30, on_long="error")
    with pytest.raises(UsageError, match="on_long: task=sentences does not support 'split'"):
        prepared(bert, rows, on_long="split")


def test_short_documents_are_skipped_in_training_only(bert: Any) -> None:
    rows = [
        {"document": SENTENCES, "summary": SUMMARY}, {"document": SENTENCES[:2], "summary": SUMMARY},
        {"document": SENTENCES, "summary": "the"}, {"document": "", "summary": SUMMARY},
        {"document": SENTENCES}, {"document": [5], "summary": SUMMARY},
        {"document": [*SENTENCES, "\ud83d"], "summary": SUMMARY},
    ]  # fmt: skip
    done = prepared(bert, rows)
    assert {why: of.first for why, of in done.report.rows_skipped.items()} == {
        "fewer than 3 sentences of more than 5 words": ["rows.jsonl:2"],
        "a summary of fewer than 3 tokens": ["rows.jsonl:3"],
        "no value for column 'document'": ["rows.jsonl:4"],
        "no value for column 'summary'": ["rows.jsonl:5"],
        "column 'document': the list has items that are not sentences": ["rows.jsonl:6"],
        "column 'document': unpaired surrogate (invalid Unicode)": ["rows.jsonl:7"],
    }
    done = prepared(bert, [{"document": SENTENCES[:2]}, {"document": ["It rains ."]}], needs_target=False)
    assert [(row["texts"], row["targets"]) for row in done.rows] == [([SENTENCES[0]], [0]), (["It rains ."], [0])]


def test_document_is_cut_to_100_sentences(bert: Any) -> None:
    rows = [{"document": ["the river " * 150, *SENTENCES * 40], "summary": SUMMARY}]
    (row,) = prepared(bert, rows, max_length=5000).rows
    assert len(row["texts"]) == 100
    assert len(row["texts"][0].split()) == 200


def test_story_has_article_and_highlights(bert: Any) -> None:
    text = "\n\n".join([*SENTENCES, "@highlight", SUMMARY[0], "@highlight", SUMMARY[1]]) + "\n"
    Path("stories").mkdir()
    Path("stories/one.story").write_text(text, encoding="utf-8")
    (row,) = prepared(bert, Path("stories"), fields={"document": ["article"], "summary": ["highlights"]}).rows
    (wanted,) = prepared(bert, [{"document": SENTENCES, "summary": SUMMARY}]).rows
    assert {**row, "source": "", "line": 0} == {**wanted, "source": "", "line": 0}


@pytest.mark.parametrize("is_zip", [False, True])
def test_presumm_files_keep_their_tokens(is_zip: bool, bert: Any) -> None:
    ids = [CLS, 5, 6, SEP, CLS, 7, SEP, CLS, 8, 9, SEP]
    row = {
        "src": ids, "tgt": [1, 2], "src_sent_labels": [1, 0, 1], "segs": [0] * 4 + [1] * 3 + [0] * 4, "clss": [0, 4, 7],
        "src_txt": ["a b", "c", "d e"], "tgt_txt": "x y<q>z",
    }  # fmt: skip
    broken = [{**row, "src_txt": ["a", "b", "\ud83d"]}, {**row, "tgt_txt": "\ud83d"}]
    torch.save([row, row, *broken], "cnndm.train.0.bert.pt", _use_new_zipfile_serialization=is_zip)
    fields = {"document": ["src_txt"], "summary": ["tgt_txt"]}
    done = prepared(bert, Path("cnndm.train.0.bert.pt"), fields=fields)
    first, second = done.rows
    assert (first["input_ids"], first["marks"], first["borders"], first["targets"]) == (
        ids,
        [0, 4, 7],
        [4, 7],
        [1, 0, 1],
    )
    assert (first["texts"], first["references"], second["line"]) == (["a b", "c", "d e"], ["x y\nz"], 2)
    assert [of.count for of in done.report.rows_skipped.values()] == [2]


class _Evil:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("touched"),)


def test_malicious_presumm_file_is_not_run(bert: Any) -> None:
    torch.save([{"src": _Evil()}], "evil.bert.pt")
    with pytest.raises(DataError, match=r"evil\.bert\.pt: not a PreSumm file"):
        prepared(bert, Path("evil.bert.pt"))
    assert not Path("touched").exists()
    torch.save({"weights": torch.ones(2)}, "model.pt")
    with pytest.raises(DataError, match=r"model\.pt: not a PreSumm file, which is a list"):
        prepared(bert, Path("model.pt"))


def test_weight_files_are_rows_of_no_task() -> None:
    Path("folder").mkdir()
    torch.save([], "folder/model.pt")
    Path("folder/rows.jsonl").write_text("{}\n")
    assert [file.format for file in identify(Path("folder")).files] == ["jsonl"]
    assert [file.format for file in identify(Path("folder"), FileOptions(task="sentences")).files] == [
        "presumm",
        "jsonl",
    ]


def test_tokenizer_without_markers_is_rejected() -> None:
    with pytest.raises(UsageError, match=r"has no \[CLS\] and \[SEP\], which task=sentences needs"):
        prepared(make_tokenizer(), [{"document": SENTENCES, "summary": SUMMARY}])


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One. Two! Three? 4 is it.", ["One.", "Two!", "Three?", "4 is it."]),
        ("Mr. A. B. Smith of St. Ives came. He left.", ["Mr. A. B. Smith of St. Ives came.", "He left."]),
        ("“It is.” “No.” He (said. So) it.", ["“It is.”", "“No.”", "He (said.", "So) it."]),
        ("It cost 3.5 dollars a.m. or so\n\nand more", ["It cost 3.5 dollars a.m. or so", "and more"]),
        ("", []),
    ],
)
def test_texts_split_at_sentence_ends(text: str, sentences: list[str]) -> None:
    assert split_sentences(text) == sentences


def rouge_sum(chosen: list[str], summary: str) -> float:
    """Return ROUGE-1 F + ROUGE-2 F of some sentences, with n-grams as sets."""
    total = 0.0
    for size in (1, 2):

        def grams(text: str, size: int = size) -> set[str]:
            words = re.sub("[^A-Za-z0-9 ]", "", text).split()
            return {" ".join(words[at : at + size]) for at in range(len(words) - size + 1)}

        found, expected = set().union(*map(grams, chosen)), grams(summary)
        precision = len(found & expected) / len(found) if found else 0.0
        recall = len(found & expected) / len(expected) if expected else 0.0
        total += 2 * precision * recall / (precision + recall + 1e-8)
    return total


def greedy(sentences: list[str], summary: str, most: int) -> list[int]:
    """Select sentences, computing every candidate's score from scratch in every round."""
    chosen: list[int] = []
    for _ in range(most):
        now = rouge_sum([sentences[number] for number in chosen], summary)
        totals = {
            number: rouge_sum([sentences[each] for each in [*chosen, number]], summary)
            for number in range(len(sentences))
            if number not in chosen
        }
        if not totals or max(totals.values()) <= now:
            break
        chosen.append(max(totals, key=totals.__getitem__))
    return sorted(chosen)


WORDS = ["cat", "Cat", "sat", "mat", "don't", "-", "3.5", "35", "on", "the"]
TEXT = st.lists(st.sampled_from(WORDS), max_size=6).map(" ".join)


@given(st.lists(TEXT, max_size=8), TEXT, st.integers(1, 4))
def test_oracle_equals_a_naive_greedy_search(sentences: list[str], summary: str, most: int) -> None:
    assert oracle_sentences(sentences, summary, most) == greedy(sentences, summary, most)


def test_oracle_stops_when_the_score_drops() -> None:
    # The first: 2 of 2 words, 1 of 1 bigram: 2. Another one adds words that are not the summary's.
    assert oracle_sentences(["a dog barks", "the cat", "the cat"], "the cat") == [1]


def test_oracle_respects_limit_and_may_be_empty() -> None:
    assert oracle_sentences(["a b", ""], "c d") == oracle_sentences([], "c") == oracle_sentences(["a"], "") == []
    assert oracle_sentences(["a", "b", "c", "d"], "d c b a", most=2) == [0, 1]


def test_only_letters_digits_blanks_make_words() -> None:
    assert oracle_sentences(["it s", "its"], "it's") == [1]
    assert oracle_sentences(["The", "the"], "the") == [1]
    assert oracle_sentences(["x", "one\ntwo"], "one\ttwo") == [1], "white space of any kind separates"


def test_bigrams_cross_only_summary_sentences() -> None:
    assert oracle_sentences(["b", "a", "b c"], ["a b", "c d"], most=1) == [2]
    # The unigrams of both are the summary's; only the second has the bigram between its sentences.
    assert oracle_sentences(["c b", "b c"], ["a b", "c d"], most=1) == [1]


def test_only_first_hundred_sentences_are_candidates() -> None:
    sentences = ["x"] * MAX_SENTENCES + ["a b"]
    assert oracle_sentences(sentences, "a b") == []
    assert oracle_sentences(sentences[1:], "a b") == [MAX_SENTENCES - 1]


def test_oracle_matches_presumm_on_cnn_dailymail() -> None:
    stories = json.loads(real_data("summarization/cnndm-sample/cnndm_sample.train.0.json").read_text(encoding="utf-8"))
    documents = [[" ".join(words) for words in story["src"]] for story in stories]
    summaries = [[" ".join(words) for words in story["tgt"]] for story in stories]
    assert [len(document) for document in documents] == [71, 59, 55, 40, 11, 31]
    start = time.perf_counter()
    found = [oracle_sentences(*pair) for pair in zip(documents, summaries, strict=True)]
    assert (time.perf_counter() - start) / len(found) < 0.1
    assert found == [[1, 15, 26], [7, 20, 25], [9, 14, 22], [3, 18], [1, 2, 3], [10, 14, 19]]
    assert found == [oracle_sentences(*pair) for pair in zip(documents, map(" ".join, summaries), strict=True)]


def test_oracle_is_fast_for_long_articles() -> None:
    sentences = [" ".join(f"w{(row * 7 + place * 3) % 500}" for place in range(25)) for row in range(70)]
    summary = " ".join(f"w{place}" for place in range(60))
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        oracle_sentences(sentences, summary)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.05  # about 0.002 on a quiet machine
