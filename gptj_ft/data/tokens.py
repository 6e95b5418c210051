"""Texts -> token ids, many in one call; what several texts begin with is tokenised once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenizers import pre_tokenizers

if TYPE_CHECKING:
    from gptj_ft.data.tokenizer import RowTokenizer


class Tokens(NamedTuple):
    """A text as tokens, and what the tokenizer says of where they are in it, if that was asked for."""

    ids: list[int]
    encoding: Any = None


class TextBatch:
    """Texts that are tokenised together.

    Args:
        tokenizer: a fast one.
        long: characters from which on it is worth knowing where a text's tokens are.
    """

    def __init__(self, tokenizer: RowTokenizer, long: int) -> None:
        self._backend, self._long = backend_of(tokenizer), long
        self._texts: list[str] = []
        self._number: dict[str, int] = {}
        self._parts: list[tuple[int, int]] = []  # of each text: numbers of its beginning, -1 for none, and of its rest

    def add(self, text: str, head: int = 0) -> None:
        """Add a text whose first ``head`` characters others have, too; they must be tokens of their own."""
        number = -1
        if head:
            number = self._number.setdefault(text[:head], len(self._texts))
            if number == len(self._texts):
                self._texts.append(text[:head])
        self._parts.append((number, len(self._texts)))
        self._texts.append(text[head:] if head else text)

    def tokenize(self) -> list[Tokens]:
        """Return the tokens of each text, in the order they came in."""
        found: list[Any] = [None] * len(self._texts)
        for is_long in (False, True):
            numbers = [number for number, text in enumerate(self._texts) if (len(text) > self._long) == is_long]
            # Without offsets it is faster.
            encode = self._backend.encode_batch if is_long else self._backend.encode_batch_fast
            texts = [self._texts[number] for number in numbers]
            for number, encoding in zip(numbers, encode(texts, add_special_tokens=False), strict=True):
                found[number] = Tokens(encoding.ids, encoding if is_long else None)
        return [found[rest] if head < 0 else Tokens(found[head].ids + found[rest].ids) for head, rest in self._parts]


def tokenize(tokenizer: RowTokenizer, batch: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each text, without special tokens added."""
    if not batch:
        return []
    return [encoding.ids for encoding in backend_of(tokenizer).encode_batch_fast(list(batch), add_special_tokens=False)]


def encoding_of(tokenizer: RowTokenizer, text: str) -> Any:
    """Return the tokens of one text with their offsets; not after the batch that another thread has begun."""
    return backend_of(tokenizer).encode(text, add_special_tokens=False)


def backend_of(tokenizer: RowTokenizer) -> Any:
    """Return what tokenises, set to do nothing else."""
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
