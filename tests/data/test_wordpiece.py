"""Test BERT's and RoBERTa's tokenizers against transformers: token ids and special tokens around texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.awkward_text import AWKWARD
from support.real_data import real_data
from support.tiny_tokenizer import make_tokenizer
from support.tiny_wordpiece import SPECIAL, make_wordpiece, write_vocabulary
from tokenizers import processors
from transformers import AutoTokenizer, BertTokenizer, RobertaTokenizer

from gptj_ft.data.tokenization import (
    Frame,
    WordCache,
    backend_of,
    frame_of,
    has_tokenizer,
    load_tokenizer,
    tokenize,
    tokenize_by,
    tokenizer_digest,
)
from gptj_ft.data.wordpiece import is_cased, read_vocabulary
from gptj_ft.errors import UsageError

ODD = {
    **AWKWARD,
    "special tokens": "a [SEP] of [CLS][MASK] [PAD] [UNK] ##s ## [unused5] [sep]",
    "ligatures and signs": "ﬁle ½ ㎏ Ⅷ ß ŒUVRE İstanbul Σίσυφος ΟΔΟΣ ǅ",
    "blanks of all kinds": "a\u00a0b\u1680c\u2002d\u3000e\u2028f\x1cg\x85h\u180ei\u200bj",
    "combining marks after blanks": "a \u0301b\n\u0308c\u0327\u0301 e\u0301\u0323",
    "hangul and kana": "한국어 가 ｶﾞ が",
    "long words": "a" * 100 + " " + "b" * 101 + " ab",
    "private and unassigned": "\ue000a \U000e0001b \U0010ffff c\ufffdd",
    "soft signs": "co\u00adop \u200dx\u2060y _a_ a^b `c` $5 <d>",
}


def transformers_own(folder: Path, **settings: Any) -> BertTokenizer:
    return BertTokenizer(vocab=str(folder / "vocab.txt"), **settings)


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("cased", [False, True])
def test_bare_vocabulary_matches_transformers(name: str, cased: bool, tmp_path: Path) -> None:
    ours, theirs = make_wordpiece(tmp_path, cased), transformers_own(tmp_path, do_lower_case=not cased)
    text = ODD[name]
    (ids,) = tokenize(ours, [text])
    assert ids == ids_of(theirs, text) == [*tokenize_by(ours)([text])[0]]
    assert ours.get_vocab() == theirs.get_vocab()
    assert not {ours.cls_token_id, ours.sep_token_id} & set(ids)


@pytest.fixture(scope="module")
def real() -> tuple[Any, Any]:
    folder = real_data("tokenizers/bert-base-uncased/vocab.txt").parent
    return load_tokenizer(folder), transformers_own(folder)


@pytest.mark.parametrize("name", ODD)
def test_published_vocabulary_matches_transformers_on_odd_texts(name: str, real: tuple[Any, Any]) -> None:
    assert tokenize(real[0], [ODD[name]]) == [ids_of(real[1], ODD[name])]


@settings(max_examples=300, derandomize=True, database=None, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
@given(text=st.one_of(st.text(max_size=40), st.lists(st.sampled_from(list(ODD.values())), max_size=3).map("".join)))
def test_word_cache_matches_any_text(text: str, real: tuple[Any, Any]) -> None:
    table = tokenize_by(real[0])
    assert isinstance(table, WordCache)
    assert [list(ids) for ids in table([text, text])] == [ids_of(real[1], text)] * 2


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    ("name", "count"),
    [("sentiment/sst2/dev.tsv", 6_734), ("nli/mnli/dev_matched.tsv", 300), ("squad/train-v1.1-subset.json", 2_000)],
)
def test_real_texts_match_transformers_ids(name: str, count: int, real: tuple[Any, Any]) -> None:
    path = real_data(name)
    if path.suffix == ".json":
        loaded = json.loads(path.read_text(encoding="utf-8"))["data"]
        texts = [paragraph["context"] for article in loaded for paragraph in article["paragraphs"]]
    else:
        texts = path.read_text(encoding="utf-8").split("\n")
    texts = texts[:count]
    ids = [list(each) for each in tokenize_by(real[0])(texts)]
    assert ids == tokenize(real[0], texts)
    assert ids == real[1](texts, add_special_tokens=False, split_special_tokens=True)["input_ids"]


def test_bert_special_tokens_match_transformers(tmp_path: Path) -> None:
    tokenizer = make_wordpiece(tmp_path)
    frame = frame_of(tokenizer)
    cls, sep = (SPECIAL.index(token) for token in ("[CLS]", "[SEP]"))
    assert frame == Frame((cls,), (sep,), (sep,), True)
    assert frame.exists
    theirs = transformers_own(tmp_path)("the river", "a cough")
    one, other = tokenize(tokenizer, ["the river", "a cough"])
    assert [*frame.first, *one, *frame.middle, *other, *frame.last] == theirs["input_ids"]
    assert theirs["token_type_ids"] == [0] * (len(one) + 2) + [1] * (len(other) + 1)


def byte_level(folder: Path) -> Path:
    """Write a tokenizer like RoBERTa's: byte-level BPE with <s> and </s>."""
    saved = json.loads(make_tokenizer(eos=None).backend_tokenizer.to_str())["model"]
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    vocabulary = {token: number for number, token in enumerate([*special, *saved["vocab"]])}
    merges = [tuple(pair) for pair in saved["merges"]]
    RobertaTokenizer(vocab=vocabulary, merges=merges).save_pretrained(folder)
    return folder


def test_roberta_frame_has_two_separators(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(byte_level(tmp_path))
    assert frame_of(tokenizer) == Frame((0,), (2,), (2, 2), False)
    theirs = AutoTokenizer.from_pretrained(tmp_path)("the river", "a cough")["input_ids"]
    one, other = tokenize(tokenizer, ["the river", "a cough"])
    assert [0, *one, 2, 2, *other, 2] == theirs
    assert tokenize(tokenizer, ["</s>"]) != [[2]]


def test_gpt_has_no_frame_and_stable_digest() -> None:
    tokenizer = make_tokenizer()
    assert frame_of(tokenizer) == Frame((), (), (), False)
    assert not frame_of(tokenizer).exists
    digest = tokenizer_digest(tokenizer)
    framed = make_tokenizer()
    framed.backend_tokenizer.post_processor = processors.RobertaProcessing(("a", 5), ("b", 6))
    assert tokenizer_digest(framed) != digest


def test_stored_truncation_and_padding_are_disabled(tmp_path: Path) -> None:
    backend = make_wordpiece(tmp_path / "bare").backend_tokenizer
    backend.enable_truncation(4)
    backend.enable_padding(length=128)
    backend.save(str(tmp_path / "tokenizer.json"))
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]", "pad_token": "[PAD]"}
    config = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "strip_accents": None, **names}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer, bare = load_tokenizer(tmp_path), load_tokenizer(tmp_path / "bare")
    assert frame_of(tokenizer) == frame_of(bare)
    text = "the patient came from the river with a cough"
    assert tokenize(tokenizer, [text]) == tokenize(bare, [text])
    assert backend_of(tokenizer).padding is None
    assert tokenizer_digest(tokenizer) == tokenizer_digest(bare)


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"do_lower_case": False},
        {"do_lower_case": False, "strip_accents": True},
        {"tokenize_chinese_chars": False},
        {"do_lower_case": True, "strip_accents": False},
    ],
)
@pytest.mark.parametrize("has_json", [False, True])
def test_tokenizer_config_acts_as_in_transformers(said: dict[str, bool], has_json: bool, tmp_path: Path) -> None:
    bare = make_wordpiece(tmp_path, is_cased=True)
    config = {"tokenizer_class": "BertTokenizer", "do_lower_case": True} | said
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if has_json:
        bare.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in ("The Patient came", "café cafe\u0301 Élan", "a猫b猫", *ODD.values()):
        assert tokenize(ours, [text]) == [ids_of(theirs, text)], text


def test_upper_case_vocabulary_is_cased_by_default(tmp_path: Path) -> None:
    text = "The Patient"
    cased = make_wordpiece(tmp_path, is_cased=True)
    assert tokenize(cased, [text]) != tokenize(cased, [text.lower()])
    assert not is_cased(read_vocabulary(write_vocabulary(tmp_path / "other") / "vocab.txt"))
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": true, "cls_token": {"content": "[CLS]"}}')
    lower = load_tokenizer(tmp_path)
    assert tokenize(lower, [text]) == tokenize(lower, [text.lower()])
    assert tokenizer_digest(lower) != tokenizer_digest(cased)


def test_published_vocabulary_is_lower_case(real: tuple[Any, Any]) -> None:
    folder = real_data("tokenizers/bert-base-uncased/vocab.txt").parent
    assert has_tokenizer(folder)
    assert not is_cased(read_vocabulary(folder / "vocab.txt"))
    assert (len(real[0]), real[0].cls_token_id, real[0].sep_token_id, real[0].pad_token_id) == (30522, 101, 102, 0)
    assert real[0].eos_token_id is None


def test_foreign_line_ends_are_not_tokens(tmp_path: Path) -> None:
    file = write_vocabulary(tmp_path) / "vocab.txt"
    tokens = read_vocabulary(file)
    file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n"))
    assert read_vocabulary(file) == tokens


def test_foreign_word_list_names_missing_tokens(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("[UNK]\nthe\n")
    with pytest.raises(UsageError, match=r"vocab\.txt is not a BERT vocabulary: it lacks \[CLS\], \[SEP\]\n"):
        load_tokenizer(tmp_path)
    assert not has_tokenizer(tmp_path / "absent")
