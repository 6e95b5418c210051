"""The tokenizer of a model folder, and what identifies it."""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from gptj_ft.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# What decides which ids a text becomes; truncation, padding and post-processing are not used here.
_PARTS = ("normalizer", "pre_tokenizer", "model", "added_tokens")


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Load a folder's fast tokenizer; never from the network.

    Raises:
        UsageError: no tokenizer files in it, or none that can be read; says what is missing.
    """
    from transformers import AutoTokenizer, GPT2TokenizerFast

    if not folder.is_dir():
        raise UsageError(f"no such folder: {folder}")
    present = {path.name for path in folder.iterdir()}
    bare_bpe = {"vocab.json", "merges.txt"} <= present
    if not bare_bpe and "tokenizer.json" not in present:
        raise UsageError(
            f"{folder} has no tokenizer: neither tokenizer.json nor vocab.json with merges.txt\n"
            "copy these files from the original model (for GPT-J: `gptj-ft download` has them)"
        )
    # Without one of these AutoTokenizer cannot know the class; bare vocabulary and merges are GPT-2's, as GPT-J's are.
    known_class = present & {"tokenizer_config.json", "config.json", "tokenizer.json"}
    loader = AutoTokenizer if known_class else GPT2TokenizerFast
    try:
        tokenizer = loader.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # The Rust library raises bare Exception on a broken tokenizer.json.
        reason = str(error).strip().split("\n")[0]
        raise UsageError(f"cannot read the tokenizer in {folder}: {reason}") from error
    if not tokenizer.is_fast:
        raise UsageError(f"{folder}: {type(tokenizer).__name__} is not a fast tokenizer; it needs a tokenizer.json")
    # "<|endoftext|>" in somebody's text is text: a document must not end because its author wrote of one.
    tokenizer.split_special_tokens = True
    return tokenizer


@lru_cache(maxsize=4)
def tokenizer_digest(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return what tells two tokenizers apart: a SHA-256 of vocabulary, merges, text splitting and the EOS id."""
    saved = json.loads(tokenizer.backend_tokenizer.to_str())
    parts = {name: saved.get(name) for name in _PARTS} | {"eos": tokenizer.eos_token_id}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
