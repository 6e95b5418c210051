"""Texts -> token ids, many in one call; what several texts begin with is tokenised once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenizers import pre_tokenizers

if TYPE_CHECKING:
    from gptj_ft.data.tokenizer import RowTokenizer


class Tokenized(NamedTuple):
    """Texts as tokens.

    Attributes:
        ids: of each text.
        encodings: by the number of the text, of long ones: what the tokenizer says of where their tokens are.
    """

    ids: list[list[int]]
    encodings: dict[int, Any]


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
        self._parts: list[int | list[int]] = []  # of each text: its number, or those of its parts

    def add(self, text: str, head: int = 0, tail: int = 0) -> None:
        """Add a text whose first ``head`` and last ``tail`` characters others have, too; their tokens are their own."""
        if not head and not tail:
            self._parts.append(len(self._texts))
            self._texts.append(text)
            return
        end = len(text) - tail
        parts = [self._shared(text[:head])] if head else []
        parts.append(len(self._texts))
        self._texts.append(text[head:end])
        self._parts.append([*parts, self._shared(text[end:])] if tail else parts)

    def _shared(self, text: str) -> int:
        number = self._number.setdefault(text, len(self._texts))
        if number == len(self._texts):
            self._texts.append(text)
        return number

    def tokenize(self) -> Tokenized:
        """Return the tokens of each text, in the order they came in."""
        texts, backend = self._texts, self._backend
        long = [number for number, text in enumerate(texts) if len(text) > self._long]
        # Without offsets it is faster.
        encodings = dict(
            zip(long, backend.encode_batch([texts[n] for n in long], add_special_tokens=False), strict=True)
        )
        short = [text for text in texts if len(text) <= self._long] if long else texts
        fast = [encoding.ids for encoding in backend.encode_batch_fast(short, add_special_tokens=False)]
        rest = iter(fast)
        found = [encodings[n].ids if n in encodings else next(rest) for n in range(len(texts))] if long else fast
        return Tokenized(
            [found[of] if isinstance(of, int) else [*chain.from_iterable(found[n] for n in of)] for of in self._parts],
            {at: encodings[of] for at, of in enumerate(self._parts) if isinstance(of, int) and of in encodings}
            if long
            else {},
        )


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
