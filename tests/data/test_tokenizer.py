import json
import os
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from support.awkward_text import AWKWARD
from support.tiny_tokenizer import make_tokenizer
from transformers import AutoTokenizer

from gptj_ft.data.tokenization import load_tokenizer, tokenize, tokenizer_digest
from gptj_ft.errors import UsageError


def test_saved_tokenizer_keeps_its_digest(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.eos_token_id == tokenizer.eos_token_id
    assert tokenizer_digest(loaded) == tokenizer_digest(tokenizer)


def test_special_token_in_text_stays_text(tmp_path):
    make_tokenizer().save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    text = "it ends with <|endoftext|> here"
    (ids,) = tokenize(tokenizer, [text])
    assert tokenizer.eos_token_id not in ids
    assert tokenizer.decode(ids) == text
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    assert offsets["input_ids"] == ids


def test_digest_distinguishes_tokenizers_ignoring_truncation():
    tokenizer = make_tokenizer()
    digest = tokenizer_digest(tokenizer)
    tokenizer.backend_tokenizer.enable_truncation(7)
    assert tokenizer_digest(tokenizer) == digest
    assert tokenizer_digest(make_tokenizer(vocab_size=300)) != digest


def test_tokenizer_loads_like_transformers(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([f"<|extratoken_{n}|>" for n in range(1, 4)])  # as GPT-J's has
    tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": "GPT2Tokenizer"}))
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert "GPT2" not in type(ours).__name__
    assert "GPT2" in type(theirs).__name__
    text = " It's  <|extratoken_2|>\n<|endoftext|> naïve 🙂1234 "
    assert tokenize(ours, [text]) == [theirs(text, split_special_tokens=True)["input_ids"]]
    assert ours.get_vocab() == theirs.get_vocab()
    assert (ours.eos_token_id, len(ours)) == (theirs.eos_token_id, len(theirs))


def test_bare_gpt2_vocabulary_and_merges_suffice(tmp_path):
    saved = json.loads(make_tokenizer().backend_tokenizer.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(saved["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in saved["merges"]))
    assert load_tokenizer(tmp_path).eos_token == "<|endoftext|>"


def test_folder_without_tokenizer_names_missing_files(tmp_path):
    with pytest.raises(UsageError, match=r"no tokenizer: neither tokenizer\.json nor vocab\.json with merges\.txt"):
        load_tokenizer(tmp_path)
    with pytest.raises(UsageError, match="no such folder"):
        load_tokenizer(Path(tmp_path / "absent"))


def test_a_broken_tokenizer_is_a_usage_error(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UsageError, match="cannot read the tokenizer in"):
        load_tokenizer(tmp_path)


def gpt2_folder():
    folder = Path(os.environ.get("GPTJ_FT_TEST_DATA") or Path(__file__).parents[3] / "shared" / "data")
    if not (folder / "tokenizers/gpt2/vocab.json").is_file():
        pytest.skip(f"GPT-2's tokenizer not found: {folder / 'tokenizers/gpt2'} (set GPTJ_FT_TEST_DATA)")
    return folder / "tokenizers/gpt2"


class ReferenceBPE:
    """Byte-level BPE as in GPT-2's `encoder.py` (https://github.com/openai/gpt-2), from its two files alone."""

    PATTERN = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")

    def __init__(self, folder):
        self._ids = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
        merges = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")[1:]
        self._ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges) if merge}
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in printable]
        self._letters = {byte: chr(byte) for byte in printable} | {b: chr(256 + n) for n, b in enumerate(others)}

    def encode(self, text):
        words = ("".join(self._letters[byte] for byte in word.encode()) for word in self.PATTERN.findall(text))
        return [self._ids[part] for word in words for part in self._merged(word)]

    @cache  # noqa: B019
    def _merged(self, word):
        parts = list(word)
        while len(parts) > 1:
            rank, pair = min((self._ranks.get(pair, len(self._ranks)), pair) for pair in pairwise(parts))
            if rank == len(self._ranks):
                break
            joined, at = [], 0
            while at < len(parts):
                matches = tuple(parts[at : at + 2]) == pair
                joined.append("".join(pair) if matches else parts[at])
                at += 2 if matches else 1
            parts = joined
        return parts


@pytest.fixture(scope="module")
def reference():
    return load_tokenizer(gpt2_folder()), ReferenceBPE(gpt2_folder()).encode


@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_text_matches_reference_tokens(name, reference):
    tokenizer, encode = reference
    text = AWKWARD[name]
    (ids,) = tokenize(tokenizer, [text])
    assert ids == encode(text)
    assert tokenizer.eos_token_id not in ids
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


@settings(max_examples=200, derandomize=True, database=None, deadline=None)
@given(text=st.one_of(st.text(max_size=40), st.lists(st.sampled_from(list(AWKWARD.values())), max_size=3).map("".join)))
def test_any_text_matches_reference_tokens(text, reference):
    tokenizer, encode = reference
    assert tokenize(tokenizer, [text]) == [encode(text)]
