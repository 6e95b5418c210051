"""Load tokenizers, tokenize texts in batches through a word-to-token cache, and locate tokens in a text."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from tokenizers import pre_tokenizers

from gptj_ft.data.wordpiece import CLASSES, VOCABULARY, load_wordpiece, normalizer_as_said, splits_at_blanks
from gptj_ft.errors import UsageError
from gptj_ft.system.digests import check_file
from gptj_ft.system.files import read_text, require_plain
from gptj_ft.system.paths import TOKENIZER_FILES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


# Classes that add nothing to what tokenizer.json says.
GENERIC = ("GPT2Tokenizer", "GPT2TokenizerFast", "PreTrainedTokenizerFast", "TokenizersBackend")
# What decides which ids a text becomes; truncation, padding and post-processing are not used here.
_PARTS = ("normalizer", "pre_tokenizer", "model", "added_tokens")


class NoTokenizer:
    """Stands for the tokenizer of a model folder that has none: rows that are tokens already need none."""

    split_special_tokens, eos_token_id = True, None

    def __init__(self, folder: Path) -> None:
        self._folder, self.name_or_path = folder, str(folder)

    @property
    def backend_tokenizer(self) -> Any:
        """Refuse to tokenise.

        Raises:
            UsageError: always.
        """
        raise no_tokenizer(self._folder)

    def get_vocab(self) -> dict[str, int]:
        """Return no token."""
        return {}

    def decode(self, ids: Sequence[int], /) -> str:
        """Return the ids themselves."""
        return "".join(f"[{number}]" for number in ids)


RowTokenizer: TypeAlias = "PreTrainedTokenizerFast | NoTokenizer"


def no_tokenizer(folder: Path) -> UsageError:
    """Return the error of a model folder that has no tokenizer where one is needed."""
    return UsageError(
        f"{folder} has no tokenizer: neither tokenizer.json nor vocab.json with merges.txt nor vocab.txt\n"
        "copy these files from the original model (for GPT-J: `gptj-ft download` has them); only rows that are tokens "
        "already need none"
    )


def has_tokenizer(folder: Path) -> bool:
    """Tell whether a model folder has the files of a tokenizer."""
    sets = (("tokenizer.json",), ("vocab.json", "merges.txt"), (VOCABULARY,))
    return any(all((folder / name).exists() for name in names) for names in sets)


def load_row_tokenizer(folder: Path) -> RowTokenizer:
    """Load the tokenizer of a folder; for a folder without one, a `NoTokenizer`, which refuses where one is needed.

    Raises:
        UsageError, DataError: as `load_tokenizer`.
    """
    return NoTokenizer(folder) if folder.is_dir() and not has_tokenizer(folder) else load_tokenizer(folder)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Load a folder's fast tokenizer; never from the network.

    Raises:
        UsageError: no tokenizer files in it, or none that can be read; says what is missing.
        DataError: the folder has a link to elsewhere.
    """
    if not folder.is_dir():
        raise UsageError(f"no such folder: {folder}")
    if not has_tokenizer(folder):
        raise no_tokenizer(folder)
    require_plain(folder)
    present = {path.name for path in folder.iterdir()}
    for name in TOKENIZER_FILES:
        check_file(folder / name)
    try:
        tokenizer = _read(folder, present)
    except UsageError:
        raise
    except Exception as error:  # The Rust library raises bare Exception on a broken tokenizer.json.
        reason = str(error).strip().split("\n")[0]
        raise UsageError(f"cannot read the tokenizer in {folder}: {reason}") from error
    if not tokenizer.is_fast:
        raise UsageError(f"{folder}: {type(tokenizer).__name__} is not a fast tokenizer; it needs a tokenizer.json")
    # "<|endoftext|>" in somebody's text is text: a document must not end because its author wrote of one.
    tokenizer.split_special_tokens = True
    return tokenizer


def _read(folder: Path, present: set[str]) -> PreTrainedTokenizerFast:
    """Read a folder's tokenizer by the class that it needs."""
    config = _config_of(folder)
    name = config.get("tokenizer_class")
    is_bert = name in CLASSES
    if "tokenizer.json" not in present and VOCABULARY in present and (is_bert or name is None):
        return load_wordpiece(folder, config)
    if present >= {"tokenizer.json", "tokenizer_config.json"} and (is_bert or name in GENERIC):
        # All of it is in tokenizer.json, and this class comes without torch, which takes seconds to load.
        from transformers import PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
        if is_bert:
            backend = tokenizer.backend_tokenizer
            backend.normalizer = normalizer_as_said(backend.normalizer, config)
        return tokenizer
    from transformers import AutoTokenizer, GPT2TokenizerFast

    # Without one of these AutoTokenizer cannot know the class; bare vocabulary and merges are GPT-2's, as GPT-J's are.
    is_known = present & {"tokenizer_config.json", "config.json", "tokenizer.json"}
    return (AutoTokenizer if is_known else GPT2TokenizerFast).from_pretrained(str(folder), local_files_only=True)


def _config_of(folder: Path) -> dict[str, Any]:
    """Read tokenizer_config.json; empty if it is not there or no JSON."""
    try:
        config = json.loads(read_text(folder / "tokenizer_config.json"))
    except (ValueError, OSError):
        return {}
    return config if isinstance(config, dict) else {}


@lru_cache(maxsize=4)
def tokenizer_digest(tokenizer: RowTokenizer) -> str:
    """Return the SHA-256 of a tokenizer: vocabulary, merges, text splitting, EOS id and the tokens that frame texts.

    Of none it is empty.
    """
    if isinstance(tokenizer, NoTokenizer):
        return ""
    saved = json.loads(tokenizer.backend_tokenizer.to_str())
    parts = {name: saved.get(name) for name in _PARTS} | {"eos": tokenizer.eos_token_id}
    if (frame := frame_of(tokenizer)).is_there:
        parts["frame"] = list(frame)
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class Frame(NamedTuple):
    """Special tokens that stand around texts: [CLS] a [SEP], or [CLS] a [SEP] b [SEP].

    Attributes:
        first: tokens before the text.
        last: tokens after it, and after the second of two.
        middle: tokens between two texts.
        has_types: whether the second text, and what follows it, is of another token type.
    """

    first: tuple[int, ...]
    last: tuple[int, ...]
    middle: tuple[int, ...]
    has_types: bool

    @property
    def is_there(self) -> bool:
        """Whether there are such tokens on both sides; those of GPT's kind have none, and the last token stands."""
        return bool(self.first and self.last)


@lru_cache(maxsize=4)
def frame_of(tokenizer: RowTokenizer) -> Frame:
    """Find the special tokens that a tokenizer puts around texts.

    Args:
        tokenizer: BERT's or RoBERTa's has them; GPT's has not.
    """
    pair = backend_of(tokenizer).encode("a", "b", add_special_tokens=True)
    of = pair.sequence_ids  # the text that each token is of
    if 0 not in of or 1 not in of:
        return Frame((), (), (), False)
    ends = of.index(0), len(of) - of[::-1].index(0), of.index(1), len(of) - of[::-1].index(1)
    first, middle, last = pair.ids[: ends[0]], pair.ids[ends[1] : ends[2]], pair.ids[ends[3] :]
    has_types = bool(last) and pair.type_ids[ends[2]] != pair.type_ids[ends[0]]
    return Frame(tuple(first), tuple(last), tuple(middle), has_types)


Span = tuple[int, int]
Characters = NDArray[np.int64]


def tokenize(tokenizer: RowTokenizer, batch: Sequence[str]) -> list[list[int]]:
    """Tokenize texts in one call, without adding special tokens."""
    backend = backend_of(tokenizer)
    if len(batch) < 2:  # which is not worth waking other threads for
        return [backend.encode(text, add_special_tokens=False).ids for text in batch]
    # Without offsets it is faster.
    return [encoding.ids for encoding in backend.encode_batch_fast(list(batch), add_special_tokens=False)]


class TokenSpans(Sequence[Span]):
    """Character spans of the tokens of a text.

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
    """Locate the tokens of a text, in characters; several tokens of one character each span all of it.

    Args:
        tokenizer: a fast one.
        text: text to locate them in.
        ids: its tokens, as `tokenize` returns them.
    """
    if len(sizes := _token_bytes(tokenizer)):
        lengths = sizes[np.asarray(ids, np.int64)]
        ends, raw = np.cumsum(lengths), np.frombuffer(text.encode(), np.uint8)
        if len(ends) and ends[-1] == len(raw):
            if len(raw) == len(text):  # a byte is a character
                return TokenSpans(ends - lengths, ends)
            character = np.cumsum((raw & 0xC0) != 0x80)  # that a byte is of, counted from 1
            return TokenSpans(character[ends - lengths] - 1, character[ends - 1])
    offsets = np.array(backend_of(tokenizer).encode(text, add_special_tokens=False).offsets, np.int64).reshape(-1, 2)
    return TokenSpans(offsets[:, 0], offsets[:, 1])


@lru_cache(maxsize=4)
def _token_bytes(tokenizer: RowTokenizer) -> Characters:
    """Return the byte length of every token; empty if it is uncertain or the tokenizer drops blanks."""
    backend = backend_of(tokenizer)
    places = backend.encode("a b", add_special_tokens=False).offsets
    if not splits_before_blanks(tokenizer) or len(places) < 2 or places[1][0] != 1:
        return np.empty(0, np.int64)
    # Each character of a token's name stands for a byte.
    sizes = {number: len(name) for name, number in backend.get_vocab(with_added_tokens=False).items()}
    sizes |= {number: len(token.content.encode()) for number, token in backend.get_added_tokens_decoder().items()}
    table = np.zeros(max(sizes) + 1, np.int64)
    table[list(sizes)] = list(sizes.values())
    return table


def backend_of(tokenizer: RowTokenizer) -> Any:
    """Return the `tokenizers.Tokenizer`, without truncation, padding and special tokens."""
    backend = tokenizer.backend_tokenizer
    # Changing a tokenizer waits for all that is being encoded by another thread, even where nothing changes.
    if backend.truncation is not None:
        backend.no_truncation()
    if backend.padding is not None:
        backend.no_padding()
    if backend.encode_special_tokens != tokenizer.split_special_tokens:
        backend.encode_special_tokens = bool(tokenizer.split_special_tokens)
    return backend


def splits_before_blanks(tokenizer: RowTokenizer) -> bool:
    r"""Tell whether no token goes across a place where a blank follows what is none.

    So it is with GPT-2's splitting, ``'s|'t|...| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+``: a piece has a
    blank at its beginning or consists of blanks, and looks at nothing before it. Tokens are made inside pieces.
    """
    backend = tokenizer.backend_tokenizer
    splitter = backend.pre_tokenizer
    return (
        isinstance(splitter, pre_tokenizers.ByteLevel)
        and splitter.use_regex
        and not splitter.add_prefix_space
        and backend.normalizer is None
        and not getattr(backend.model, "dropout", None)  # tokens by chance
        and not any(
            token.lstrip or token.rstrip or any(map(str.isspace, token.content))
            for token in backend.get_added_tokens_decoder().values()
        )
    )


def is_before_blank(text: str, at: int) -> bool:
    """Tell whether a blank follows what is none."""
    # Blanks of the splitting are Unicode's White_Space; Python's `isspace` adds four separators of ASCII.
    is_blank = 0 < at < len(text) and text[at].isspace() and text[at] not in "\x1c\x1d\x1e\x1f"
    return is_blank and not text[at - 1].isspace()


MOST_WORDS = 2**17  # in the table, some 40 MB
_LONGEST_WORD = 64  # characters
MEAN_WORD = 16  # characters of a text's words, above which its script is one that does without blanks

Tokens: TypeAlias = "array[int]"  # of 32 bits
Tokenize: TypeAlias = "Callable[[Sequence[str]], list[Tokens]]"


def tokenize_by(tokenizer: RowTokenizer) -> Tokenize:
    """Return a function like `tokenize` that caches words where the tokenizer splits texts before blanks."""
    if splits_before_blanks(tokenizer) or splits_at_blanks(tokenizer):
        return WordCache(tokenizer)
    return lambda texts: [array("i", ids) for ids in tokenize(tokenizer, texts)]


def words_of(text: str) -> list[str]:
    """Split a text before each blank or line end that follows neither; it must not hold U+0000."""
    marked = text.replace(" ", "\0 ").replace("\n", "\0\n")
    return marked.replace(" \0", " ").replace("\n\0", "\n").split("\0")


class EndsInBlank(Exception):
    """A split follows a blank of another kind, so a token may cross it."""


class WordCache(dict[str, bytes]):
    """Tokenizes texts through a table: a word with the blanks before it -> the bytes of its token ids.

    Needs `splits_before_blanks` or `splits_at_blanks`; not thread-safe.
    """

    def __init__(self, tokenizer: RowTokenizer) -> None:
        super().__init__()
        self._tokenizer, self._backend = tokenizer, backend_of(tokenizer)

    def __call__(self, texts: Sequence[str]) -> list[Tokens]:
        """Tokenize texts in one call, without adding special tokens."""
        found = list(map(self._look_up, texts))
        rest = iter(tokenize(self._tokenizer, [text for text, ids in zip(texts, found, strict=True) if ids is None]))
        return [array("i", next(rest) if ids is None else ids) for ids in found]

    def _look_up(self, text: str) -> bytes | None:
        """Look up the tokens of a text; ``None`` if it cannot be split, or should not be."""
        if len(text) > MEAN_WORD * (text.count(" ") + 2) or "\0" in text:
            return None
        try:
            return b"".join(map(self.__getitem__, words_of(text)))
        except EndsInBlank:
            return None

    def __missing__(self, word: str) -> bytes:
        # Behind these two nothing is ever taken apart: they are at the end of the text.
        if word and word[-1].isspace() and word[-1] not in " \n":
            raise EndsInBlank
        ids = array("i", self._backend.encode(word, add_special_tokens=False).ids).tobytes()
        if len(word) <= _LONGEST_WORD:
            if len(self) == MOST_WORDS:
                self.clear()  # what is common is soon there again
            self[word] = ids
        return ids
