"""Load BERT's tokenizer: from its vocabulary alone, or from tokenizer.json as its class reads that."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from gptj_ft.errors import UsageError, listed
from gptj_ft.system.files import read_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

VOCABULARY = "vocab.txt"
CLASSES = ("BertTokenizer", "BertTokenizerFast")
CONTINUATION = "##"  # before what goes on with a word
# The tokens that frame texts, by the name that they have in tokenizer_config.json.
SPECIAL = {
    "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "mask_token": "[MASK]"
}  # fmt: skip
NEEDED = ("unk_token", "cls_token", "sep_token")


def read_vocabulary(path: Path) -> dict[str, int]:
    """Read a vocabulary: a token a line, its id the number of the line.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     (path := Path(folder) / "vocab.txt").write_bytes("[PAD]\\r\\nthe\\r\\n##\u2028\\r\\n".encode()) and None
    ...     list(read_vocabulary(path))
    ['[PAD]', 'the', '##\\u2028']
    """
    lines = re.split("\r\n|\r|\n", read_text(path))  # `splitlines` would split tokens of the vocabulary, too
    return {token: number for number, token in enumerate(lines[:-1] if lines[-1] == "" else lines)}


def is_cased(vocabulary: Mapping[str, int]) -> bool:
    """Tell whether a vocabulary has upper-case words; one of lower-case words knows none."""
    return any(token != token.lower() for token in vocabulary if not (token.startswith("[") and token.endswith("]")))


def load_wordpiece(folder: Path, config: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """Make BERT's tokenizer of a folder with a vocabulary and no tokenizer.json.

    Args:
        folder: folder with ``vocab.txt``.
        config: its tokenizer_config.json; a vocabulary with upper-case words is cased where that does not say.

    Raises:
        UsageError: the vocabulary lacks a token that frames texts.
    """
    # It comes without torch, which transformers' own class of BERT loads.
    from transformers import PreTrainedTokenizerFast

    vocabulary = read_vocabulary(folder / VOCABULARY)
    special = {role: _content(config.get(role)) or token for role, token in SPECIAL.items()}
    if missing := [special[role] for role in NEEDED if special[role] not in vocabulary]:
        raise UsageError(
            f"{folder / VOCABULARY} is no vocabulary of BERT's: it lacks {listed(missing)}\n"
            "it has a token a line; a tokenizer_config.json beside it may give these tokens other names"
        )
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token=special["unk_token"]))
    is_lower = config.get("do_lower_case")
    backend.normalizer = _normalizer({"do_lower_case": not is_cased(vocabulary) if is_lower is None else is_lower})
    backend.normalizer = normalizer_as_said(backend.normalizer, config)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix=CONTINUATION)
    cls, sep = special["cls_token"], special["sep_token"]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{cls}:0 $A:0 {sep}:0",
        pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
        special_tokens=[(cls, vocabulary[cls]), (sep, vocabulary[sep])],
    )
    known = {role: token for role, token in special.items() if token in vocabulary}
    return PreTrainedTokenizerFast(tokenizer_object=backend, name_or_path=str(folder), **known)


def normalizer_as_said(normalizer: Any, config: Mapping[str, Any]) -> Any:
    """Return BERT's normalizer as tokenizer_config.json has it, which stands above tokenizer.json.

    Args:
        normalizer: normalizer of tokenizer.json.
        config: tokenizer_config.json, in which ``null`` says nothing but of accents.
    """
    if not isinstance(normalizer, normalizers.BertNormalizer):
        return normalizer
    said = {"do_lower_case": normalizer.lowercase, "tokenize_chinese_chars": normalizer.handle_chinese_chars}
    said |= {name: config[name] for name in said if isinstance(config.get(name), bool)}
    return _normalizer({**said, "strip_accents": config.get("strip_accents", normalizer.strip_accents)})


def splits_at_blanks(tokenizer: Any) -> bool:
    """Tell whether no token of a WordPiece tokenizer goes across a blank, and none depends on what is beyond one."""
    backend = tokenizer.backend_tokenizer
    return (
        isinstance(backend.model, models.WordPiece)
        and isinstance(backend.pre_tokenizer, pre_tokenizers.BertPreTokenizer)
        and (backend.normalizer is None or isinstance(backend.normalizer, normalizers.BertNormalizer))
        and not any(
            token.lstrip or token.rstrip or any(map(str.isspace, token.content))
            for token in backend.get_added_tokens_decoder().values()
        )
    )


def _normalizer(said: Mapping[str, Any]) -> normalizers.BertNormalizer:
    return normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=said.get("tokenize_chinese_chars", True),
        strip_accents=said.get("strip_accents"),
        lowercase=said["do_lower_case"],
    )


def _content(token: Any) -> str:
    """Return the text of a special token, which old files write as an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""
