"""Load BERT's tokenizer: from vocab.txt, or from tokenizer.json with the settings of tokenizer_config.json.

`tokenizers` does the work. Its own vocabulary reader is not used, as it strips white space from tokens, nor the BERT
class of `transformers`, as it imports torch.
"""

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
CONTINUATION = "##"  # prefix of tokens inside a word
SPECIAL = {  # name in tokenizer_config.json -> default token
    "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "mask_token": "[MASK]"
}  # fmt: skip
NEEDED = ("unk_token", "cls_token", "sep_token")


def read_vocabulary(path: Path) -> dict[str, int]:
    """Read a vocabulary: one token per line; its id is the line number.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     (path := Path(folder) / "vocab.txt").write_bytes("[PAD]\\r\\nthe\\r\\n##\u2028\\r\\n".encode()) and None
    ...     list(read_vocabulary(path))
    ['[PAD]', 'the', '##\\u2028']
    """
    lines = re.split("\r\n|\r|\n", read_text(path))  # `splitlines` would also split at U+2028, a token
    return {token: number for number, token in enumerate(lines[:-1] if lines[-1] == "" else lines)}


def is_cased(vocabulary: Mapping[str, int]) -> bool:
    """Tell whether a vocabulary has words with upper-case letters."""
    # Uncased vocabularies have upper-case special tokens, such as [CLS].
    return any(token != token.lower() for token in vocabulary if not (token.startswith("[") and token.endswith("]")))


def load_wordpiece(folder: Path, config: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """Build BERT's tokenizer from ``vocab.txt``, without tokenizer.json.

    Args:
        config: tokenizer_config.json; if it does not say, a vocabulary with upper-case words is cased.
    """
    # This class does not import torch.
    from transformers import PreTrainedTokenizerFast

    vocabulary = read_vocabulary(folder / VOCABULARY)
    special = {role: _content(config.get(role)) or token for role, token in SPECIAL.items()}
    if missing := [special[role] for role in NEEDED if special[role] not in vocabulary]:
        raise UsageError(
            f"{folder / VOCABULARY} is not a BERT vocabulary: it lacks {listed(missing)}\n"
            "it must have one token per line; tokenizer_config.json may give these tokens other names"
        )
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token=special["unk_token"]))
    is_lower = config.get("do_lower_case")
    backend.normalizer = _normalizer({"do_lower_case": not is_cased(vocabulary) if is_lower is None else is_lower})
    backend.normalizer = normalizer_of(backend.normalizer, config)
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


def normalizer_of(normalizer: Any, config: Mapping[str, Any]) -> Any:
    """Apply the settings of tokenizer_config.json to the BERT normalizer of tokenizer.json.

    In the settings, ``null`` has a meaning only for ``strip_accents``.
    """
    if not isinstance(normalizer, normalizers.BertNormalizer):
        return normalizer
    options = {"do_lower_case": normalizer.lowercase, "tokenize_chinese_chars": normalizer.handle_chinese_chars}
    # tokenizer_config.json overrides tokenizer.json, as in transformers.
    options |= {name: config[name] for name in options if isinstance(config.get(name), bool)}
    return _normalizer({**options, "strip_accents": config.get("strip_accents", normalizer.strip_accents)})


def splits_at_blanks(tokenizer: Any) -> bool:
    """Tell whether each word between blanks gets the same WordPiece tokens by itself."""
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


def _normalizer(options: Mapping[str, Any]) -> normalizers.BertNormalizer:
    return normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=options.get("tokenize_chinese_chars", True),
        strip_accents=options.get("strip_accents"),
        lowercase=options["do_lower_case"],
    )


def _content(token: Any) -> str:
    """Return a special token's text; old files store it as an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""
