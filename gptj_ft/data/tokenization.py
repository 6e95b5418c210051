"""Load tokenizers, tokenize texts in batches with a cache of words, and locate tokens in a text."""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from tokenizers import pre_tokenizers

from gptj_ft.data.untrusted_tokenizer import check_growth
from gptj_ft.data.wordpiece import CLASSES, VOCABULARY, load_wordpiece, normalizer_of, splits_at_blanks
from gptj_ft.errors import DataError, GptjFtError, UsageError, panic_in_words
from gptj_ft.system.digests import check_file
from gptj_ft.system.files import read_text, require_plain
from gptj_ft.system.paths import TOKENIZER_FILES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


# Tokenizer classes whose behaviour tokenizer.json describes completely.
GENERIC = ("GPT2Tokenizer", "GPT2TokenizerFast", "PreTrainedTokenizerFast", "TokenizersBackend")
# Parts of tokenizer.json that decide a text's token ids; truncation, padding and post-processing are not used.
_PARTS = ("normalizer", "pre_tokenizer", "model", "added_tokens")
_BYTE = re.compile("<0x[0-9A-F]{2}>")


class NoTokenizer:
    """Placeholder for a missing tokenizer: rows of tokens need none."""

    split_special_tokens, eos_token_id = True, None

    def __init__(self, folder: Path) -> None:
        self._folder, self.name_or_path = folder, str(folder)

    @property
    def backend_tokenizer(self) -> Any:
        """Raise the error that explains the missing tokenizer."""
        raise no_tokenizer(self._folder)

    def get_vocab(self) -> dict[str, int]:
        """Return an empty vocabulary."""
        return {}

    def decode(self, ids: Sequence[int], /) -> str:
        """Return the ids as text."""
        return "".join(f"[{number}]" for number in ids)


RowTokenizer: TypeAlias = "PreTrainedTokenizerFast | NoTokenizer"


def check_ids(ids: Sequence[int], vocab_size: int) -> None:
    """Raise `DataError` for a token id without a row in the model's embedding."""
    if (largest := max(ids, default=0)) >= vocab_size:
        raise DataError(
            f"token id {largest}, but the model's ids end at {vocab_size - 1}; the tokenizer is not this model's"
        )


def no_tokenizer(folder: Path) -> UsageError:
    """Return the error for a model folder without a tokenizer."""
    return UsageError(
        f"{folder} has no tokenizer: neither tokenizer.json nor vocab.json with merges.txt nor vocab.txt\n"
        "copy these files from the original model (for GPT-J, `gptj-ft download` fetches them); only tokenized rows "
        "need no tokenizer"
    )


def has_tokenizer(folder: Path) -> bool:
    """Tell whether a model folder has tokenizer files."""
    sets = (("tokenizer.json",), ("vocab.json", "merges.txt"), (VOCABULARY,))
    return any(all((folder / name).exists() for name in names) for names in sets)


def load_row_tokenizer(folder: Path) -> RowTokenizer:
    """Load a folder's tokenizer; without tokenizer files, return a `NoTokenizer`."""
    return NoTokenizer(folder) if folder.is_dir() and not has_tokenizer(folder) else load_tokenizer(folder)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Load a folder's fast tokenizer; never use the network."""
    if not folder.is_dir():
        raise UsageError(f"no such folder: {folder}")
    if not has_tokenizer(folder):
        raise no_tokenizer(folder)
    require_plain(folder)
    present = {path.name for path in folder.iterdir()}
    for name in TOKENIZER_FILES:
        check_file(folder / name)
    if "tokenizer.json" in present:
        check_growth(folder / "tokenizer.json")
    try:
        tokenizer = _read(folder, present)
    except GptjFtError:
        raise
    except Exception as error:  # The Rust library raises bare Exception on a broken tokenizer.json.
        reason = str(error).strip().split("\n")[0]
        raise UsageError(f"cannot read the tokenizer in {folder}: {reason}") from error
    except BaseException as error:
        if panic := panic_in_words(error, folder):
            raise panic from error
        raise
    if not tokenizer.is_fast:
        raise UsageError(f"{folder}: {type(tokenizer).__name__} is not a fast tokenizer; it needs a tokenizer.json")
    # "<|endoftext|>" in a user's text must stay text, not end the document.
    tokenizer.split_special_tokens = True
    return tokenizer


def _read(folder: Path, present: set[str]) -> PreTrainedTokenizerFast:
    """Read a folder's tokenizer with the class that its configuration names."""
    config = _config_of(folder)
    name = config.get("tokenizer_class")
    is_bert = name in CLASSES
    if "tokenizer.json" not in present and VOCABULARY in present and (is_bert or name is None):
        return load_wordpiece(folder, config)
    if present >= {"tokenizer.json", "tokenizer_config.json"} and (is_bert or name in GENERIC):
        # This class reads tokenizer.json without importing torch, which takes seconds.
        from transformers import PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
        if is_bert:
            backend = tokenizer.backend_tokenizer
            backend.normalizer = normalizer_of(backend.normalizer, config)
        return tokenizer
    from transformers import AutoTokenizer, GPT2TokenizerFast

    # AutoTokenizer needs one of these files to choose a class. Bare vocabulary and merges are GPT-2's or GPT-J's.
    is_known = present & {"tokenizer_config.json", "config.json", "tokenizer.json"}
    return (AutoTokenizer if is_known else GPT2TokenizerFast).from_pretrained(str(folder), local_files_only=True)


def _config_of(folder: Path) -> dict[str, Any]:
    """Read tokenizer_config.json; empty if it is missing or malformed."""
    try:
        config = json.loads(read_text(folder / "tokenizer_config.json"))
    except (ValueError, OSError):
        return {}
    return config if isinstance(config, dict) else {}


@lru_cache(maxsize=4)
def tokenizer_digest(tokenizer: RowTokenizer, start: tuple[int, ...] = ()) -> str:
    """Return the SHA-256 of vocabulary, merges, text splitting, EOS id and frame; "" for a `NoTokenizer`.

    Args:
        start: special tokens before each text, see `encode.start_of`.
    """
    if isinstance(tokenizer, NoTokenizer):
        return ""
    saved = json.loads(tokenizer.backend_tokenizer.to_str())
    parts = {name: saved.get(name) for name in _PARTS} | {"eos": tokenizer.eos_token_id}
    if (frame := frame_of(tokenizer)).exists:
        parts["frame"] = list(frame)
    if start:
        parts["start"] = list(start)
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class Frame(NamedTuple):
    """Special tokens around texts: [CLS] a [SEP], or [CLS] a [SEP] b [SEP]."""

    first: tuple[int, ...]  # before the first text
    last: tuple[int, ...]  # after the last text
    middle: tuple[int, ...]  # between two texts
    has_types: bool  # whether the second text, and everything after it, has another token type

    @property
    def exists(self) -> bool:
        """Whether both sides have such tokens; GPT's tokenizers have none, and their last token is classified."""
        return bool(self.first and self.last)


@lru_cache(maxsize=4)
def frame_of(tokenizer: RowTokenizer) -> Frame:
    """Find the special tokens that a tokenizer puts around texts; BERT's and RoBERTa's do, GPT's do not."""
    # Post-processors cannot be inspected: encode a pair and look at the special tokens in the result.
    pair = backend_of(tokenizer).encode("a", "b", add_special_tokens=True)
    text_of = pair.sequence_ids  # text of each token; None for special tokens
    if 0 not in text_of or 1 not in text_of:
        return Frame((), (), (), False)
    count = len(text_of)
    # Each text may have several tokens: search its end from the right.
    ends = text_of.index(0), count - text_of[::-1].index(0), text_of.index(1), count - text_of[::-1].index(1)
    first, middle, last = pair.ids[: ends[0]], pair.ids[ends[1] : ends[2]], pair.ids[ends[3] :]
    has_types = bool(last) and pair.type_ids[ends[2]] != pair.type_ids[ends[0]]
    return Frame(tuple(first), tuple(last), tuple(middle), has_types)


Span = tuple[int, int]
Characters = NDArray[np.int64]


def tokenize(tokenizer: RowTokenizer, batch: Sequence[str]) -> list[list[int]]:
    """Tokenize texts in one call, without special tokens."""
    backend = backend_of(tokenizer)
    try:
        if len(batch) < 2:  # not worth waking other threads
            return [backend.encode(text, add_special_tokens=False).ids for text in batch]
        # The fast variant computes no offsets.
        return [encoding.ids for encoding in backend.encode_batch_fast(list(batch), add_special_tokens=False)]
    except BaseException as error:
        if panic := panic_in_words(error, tokenizer.name_or_path):
            raise panic from error
        raise


class TokenSpans(Sequence[Span]):
    """Character spans of a text's tokens.

    Args:
        firsts, ends: first character and end of each token, in order.
    """

    def __init__(self, firsts: Characters, ends: Characters) -> None:
        self.firsts, self.ends = firsts, ends

    def __len__(self) -> int:
        return len(self.firsts)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return TokenSpans(self.firsts[number], self.ends[number])
        return int(self.firsts[number]), int(self.ends[number])


def token_spans(tokenizer: RowTokenizer, text: str, ids: Sequence[int]) -> TokenSpans:
    """Locate a text's tokens in characters. Several tokens of one character each span the whole character.

    Args:
        ids: the text's tokens, from `tokenize`.
    """
    if len(sizes := _token_bytes(tokenizer)):
        lengths = sizes[np.asarray(ids, np.int64)]
        ends, raw = np.cumsum(lengths), np.frombuffer(text.encode(), np.uint8)
        # Lengths that do not add up to the text mean an unknown token or a dropped byte: use the encoder's offsets.
        if len(ends) and ends[-1] == len(raw):
            if len(raw) == len(text):  # ASCII: bytes are characters
                return TokenSpans(ends - lengths, ends)
            character = np.cumsum((raw & 0xC0) != 0x80)  # character number of each byte, from 1
            return TokenSpans(character[ends - lengths] - 1, character[ends - 1])
    offsets = np.array(backend_of(tokenizer).encode(text, add_special_tokens=False).offsets, np.int64).reshape(-1, 2)
    return TokenSpans(offsets[:, 0], offsets[:, 1])


@lru_cache(maxsize=4)
def _token_bytes(tokenizer: RowTokenizer) -> Characters:
    """Return every token's length in bytes; empty if it is uncertain or the tokenizer drops blanks."""
    backend = backend_of(tokenizer)
    offsets = backend.encode("a b", add_special_tokens=False).offsets
    # Some tokenizers trim the leading blank from offsets: then byte lengths and offsets disagree.
    if not splits_before_blanks(tokenizer) or len(offsets) < 2 or offsets[1][0] != 1:
        return np.empty(0, np.int64)
    sizes = bytes_of_tokens(tokenizer)
    table = np.zeros(max(sizes) + 1, np.int64)
    table[list(sizes)] = list(sizes.values())
    return table


@lru_cache(maxsize=4)
def bytes_of_tokens(tokenizer: RowTokenizer) -> dict[int, int]:
    """Return the number of bytes of text that each token stands for."""
    backend = backend_of(tokenizer)
    parts = filter(None, (backend.normalizer, backend.pre_tokenizer, backend.decoder))
    # Byte-level BPE: each character of a token's name stands for one byte.
    size = len if any(b'"ByteLevel"' in part.__getstate__() for part in parts) else _sentencepiece_bytes
    sizes = {number: size(name) for name, number in backend.get_vocab(with_added_tokens=False).items()}
    # Added tokens keep their plain text: their bytes are those of UTF-8.
    return sizes | {number: len(token.content.encode()) for number, token in backend.get_added_tokens_decoder().items()}


def _sentencepiece_bytes(name: str) -> int:
    """Return the bytes of a token of SentencePiece: a byte like ``<0x0A>``, or a text with ``▁`` for blanks."""
    return 1 if _BYTE.fullmatch(name) else len(name.replace("\u2581", " ").encode())


def backend_of(tokenizer: RowTokenizer) -> Any:
    """Return the `tokenizers.Tokenizer` without truncation, padding and special tokens."""
    backend = tokenizer.backend_tokenizer
    # Each setter waits until other threads have finished encoding: call it only for a real change.
    if backend.truncation is not None:
        backend.no_truncation()
    if backend.padding is not None:
        backend.no_padding()
    if backend.encode_special_tokens != tokenizer.split_special_tokens:
        backend.encode_special_tokens = bool(tokenizer.split_special_tokens)
    return backend


def splits_before_blanks(tokenizer: RowTokenizer) -> bool:
    r"""Tell whether no token crosses the start of a run of blanks.

    This holds for GPT-2's splitting, ``'s|'t|...| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+``: a blank is
    either the first character of a piece, or the piece consists of blanks. No piece looks behind its start, and tokens
    are made within pieces.
    """
    backend = tokenizer.backend_tokenizer
    splitter = backend.pre_tokenizer
    return (
        isinstance(splitter, pre_tokenizers.ByteLevel)
        and splitter.use_regex
        and not splitter.add_prefix_space
        and backend.normalizer is None
        and not getattr(backend.model, "dropout", None)  # BPE dropout: random tokens
        and not any(
            token.lstrip or token.rstrip or any(map(str.isspace, token.content))
            for token in backend.get_added_tokens_decoder().values()
        )
    )


def is_before_blank(text: str, at: int) -> bool:
    """Tell whether a blank at this position follows a non-blank character."""
    # The splitting uses Unicode's White_Space; Python's `isspace` adds four ASCII separators.
    is_blank = 0 < at < len(text) and text[at].isspace() and text[at] not in "\x1c\x1d\x1e\x1f"
    return is_blank and not text[at - 1].isspace()


MOST_WORDS = 2**17  # in the cache, about 40 MB
_LONGEST_WORD = 64  # characters, of cached words
MEAN_WORD = 16  # characters per word; above, the script has no blanks between words, and caching does not pay

Tokens: TypeAlias = "array[int]"  # of 32 bits
Tokenize: TypeAlias = "Callable[[Sequence[str]], list[Tokens]]"


def tokenize_by(tokenizer: RowTokenizer) -> Tokenize:
    """Return a function like `tokenize`, with a word cache if the tokenizer splits texts at blanks."""
    if splits_before_blanks(tokenizer) or splits_at_blanks(tokenizer):
        return WordCache(tokenizer)
    return lambda texts: [array("i", ids) for ids in tokenize(tokenizer, texts)]


def words_of(text: str) -> list[str]:
    """Split a text before each run of blanks and line ends; the text must not contain U+0000."""
    # Mark every blank and line end, then remove the marks within runs. Four `replace` calls are faster than a pattern.
    marked = text.replace(" ", "\0 ").replace("\n", "\0\n")
    return marked.replace(" \0", " ").replace("\n\0", "\n").split("\0")


class EndsInBlank(Exception):
    """A piece ends in another kind of blank, so a token may cross its end."""


class WordCache(dict[str, bytes]):
    """Tokenize texts through a cache: word with its preceding blanks -> bytes of its token ids.

    Requires `splits_before_blanks` or `splits_at_blanks`; not thread-safe.
    """

    def __init__(
        self,
        tokenizer: RowTokenizer,
        most_words: int = MOST_WORDS,
        tokenize: Callable[[RowTokenizer, Sequence[str]], list[list[int]]] = tokenize,
    ) -> None:
        super().__init__()
        self._tokenizer, self._backend = tokenizer, backend_of(tokenizer)
        self._most_words, self._tokenize = most_words, tokenize

    def __call__(self, texts: Sequence[str]) -> list[Tokens]:
        """Tokenize texts, without special tokens."""
        cached = list(map(self._look_up, texts))
        missing = [text for text, ids in zip(texts, cached, strict=True) if ids is None]
        rest = iter(self._tokenize(self._tokenizer, missing))
        return [array("i", next(rest) if ids is None else ids) for ids in cached]

    def _look_up(self, text: str) -> bytes | None:
        """Return a text's token ids; ``None`` if it cannot be split into words."""
        # U+0000 marks the borders of words in `words_of`.
        if len(text) > MEAN_WORD * (text.count(" ") + 2) or "\0" in text:
            return None
        try:
            return b"".join(map(self.__getitem__, words_of(text)))
        except EndsInBlank:
            return None

    def __missing__(self, word: str) -> bytes:
        # A word may end in " " or "\n" only at the end of the text: `words_of` splits before them.
        if word and word[-1].isspace() and word[-1] not in " \n":
            raise EndsInBlank
        ids = array("i", self._backend.encode(word, add_special_tokens=False).ids).tobytes()
        if len(word) <= _LONGEST_WORD:
            if len(self) == self._most_words:
                self.clear()  # common words return quickly
            self[word] = ids
        return ids
