"""Texts -> token ids, word by word: a table holds the tokens of words that were there before.

A language says most things with few words, and looking one up takes a tenth of what it takes to make its tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from gptj_ft.data.tokens import backend_of, splits_before_blanks, tokenize

if TYPE_CHECKING:
    from gptj_ft.data.tokenizer import RowTokenizer

MOST_WORDS = 2**17  # in the table, some 40 MB
LONGEST_WORD = 64  # characters
MEAN_WORD = 16  # characters of a text's words, above which its script is one that does without blanks

Tokens: TypeAlias = "array[int]"  # of 32 bits
Tokenize: TypeAlias = "Callable[[Sequence[str]], list[Tokens]]"


def tokenize_by(tokenizer: RowTokenizer) -> Tokenize:
    """Return what does as `tokenize` does, and remembers words if the tokenizer lets texts be taken apart."""
    if splits_before_blanks(tokenizer):
        return Words(tokenizer)
    return lambda texts: [array("i", ids) for ids in tokenize(tokenizer, texts)]


class Words:
    """The tokens of words, for a tokenizer of which `splits_before_blanks` is true; not for several threads at once."""

    def __init__(self, tokenizer: RowTokenizer) -> None:
        self._tokenizer, self._table = tokenizer, _Table(tokenizer)

    def __call__(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the token ids of each text, without special tokens added."""
        found = list(map(self._look_up, texts))
        rest = iter(tokenize(self._tokenizer, [text for text, ids in zip(texts, found, strict=True) if ids is None]))
        return [array("i", next(rest) if ids is None else ids) for ids in found]

    def _look_up(self, text: str) -> bytes | None:
        """Return the tokens of a text; ``None`` if it cannot be taken apart, or should not be."""
        if len(text) > MEAN_WORD * (text.count(" ") + 2) or "\0" in text:
            return None
        try:
            return b"".join(map(self._table.__getitem__, words_of(text)))
        except EndsInBlank:
            return None


def words_of(text: str) -> list[str]:
    """Take a text apart before each blank or line end that follows neither; there must be no U+0000 in it."""
    marked = text.replace(" ", "\0 ").replace("\n", "\0\n")
    return marked.replace(" \0", " ").replace("\n\0", "\n").split("\0")


class EndsInBlank(Exception):
    """What a text has been taken apart behind is a blank of another kind, so a token may go across that place."""


class _Table(dict[str, bytes]):
    """Word, with the blanks before it -> the bytes of its tokens, which are made when they are first asked for."""

    def __init__(self, tokenizer: RowTokenizer) -> None:
        super().__init__()
        self._backend = backend_of(tokenizer)

    def __missing__(self, word: str) -> bytes:
        # Behind these two nothing is ever taken apart: they are at the end of the text.
        if word and word[-1].isspace() and word[-1] not in " \n":
            raise EndsInBlank
        ids = array("i", self._backend.encode(word, add_special_tokens=False).ids).tobytes()
        if len(word) <= LONGEST_WORD:
            if len(self) == MOST_WORDS:
                self.clear()  # what is common is soon there again
            self[word] = ids
        return ids
