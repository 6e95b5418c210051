"""Build a BERT tokenizer with a vocabulary of a few words and all letters."""

from __future__ import annotations

import string
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from gptj_ft.data.tokenization import load_tokenizer

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = "the a of and in to is was where did patient come came from with cough rest village river lift stops good bad"
ENDS = "ing ed s er es ly ion"


def write_vocabulary(folder: Path, is_cased: bool = False) -> Path:
    """Write ``vocab.txt`` into a folder and return the folder; a cased vocabulary has upper-case words, too."""
    words = WORDS.split()
    if is_cased:
        words += [word.capitalize() for word in words]
    letters = [*(string.ascii_letters if is_cased else string.ascii_lowercase), *string.digits]
    pieces = [*words, *letters, *string.punctuation, "é", "猫", *(f"##{each}" for each in [*ENDS.split(), *letters])]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(dict.fromkeys([*SPECIAL, *pieces])) + "\n", encoding="utf-8")
    return folder


def make_wordpiece(folder: Path, is_cased: bool = False) -> PreTrainedTokenizerFast:
    """Write the vocabulary into a folder and load its tokenizer."""
    return load_tokenizer(write_vocabulary(folder, is_cased))
