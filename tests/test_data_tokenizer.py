import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from gptj_ft.data.template import tokenize
from gptj_ft.data.tokenizer import load_tokenizer, tokenizer_digest
from gptj_ft.errors import UsageError

TEXT = (
    "Summarize the following text. Answer the question from the passage. The patient came with a cough and was given "
    "water, rest and a second visit. Where did the patient come from? From the village by the river. Summary: Passage: "
    "\n\n\n\n \n\n\n"
)


def make_tokenizer(vocab_size=400, text=TEXT, eos="<|endoftext|>"):
    """A byte-level BPE, as GPT-J's is, trained on a few words: merges inside words, none across blanks."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[eos] if eos else [],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text] * 2, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos)


def test_a_saved_tokenizer_loads_with_the_same_digest(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.eos_token_id == tokenizer.eos_token_id
    assert tokenizer_digest(loaded) == tokenizer_digest(tokenizer)


def test_what_looks_like_a_special_token_in_a_text_is_text(tmp_path):
    make_tokenizer().save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    text = "it ends with <|endoftext|> here"
    (ids,) = tokenize(tokenizer, [text])
    assert tokenizer.eos_token_id not in ids
    assert tokenizer.decode(ids) == text
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    assert offsets["input_ids"] == ids


def test_digest_tells_tokenizers_apart_but_ignores_truncation():
    tokenizer = make_tokenizer()
    digest = tokenizer_digest(tokenizer)
    tokenizer.backend_tokenizer.enable_truncation(7)
    assert tokenizer_digest(tokenizer) == digest
    assert tokenizer_digest(make_tokenizer(vocab_size=300)) != digest


def test_bare_gpt2_vocabulary_and_merges_are_enough(tmp_path):
    saved = json.loads(make_tokenizer().backend_tokenizer.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(saved["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in saved["merges"]))
    assert load_tokenizer(tmp_path).eos_token == "<|endoftext|>"


def test_a_folder_without_tokenizer_says_which_files_are_missing(tmp_path):
    with pytest.raises(UsageError, match=r"no tokenizer: neither tokenizer\.json nor vocab\.json with merges\.txt"):
        load_tokenizer(tmp_path)
    with pytest.raises(UsageError, match="no such folder"):
        load_tokenizer(Path(tmp_path / "absent"))


def test_a_broken_tokenizer_is_a_usage_error(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UsageError, match="cannot read the tokenizer in"):
        load_tokenizer(tmp_path)
