"""Truncate rows that are too long: cut one field at its end, beginning or middle, or far from the answer."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gptj_ft.config.options import Recipe
from gptj_ft.data.template import parse_template, render
from gptj_ft.data.tokenization import RowTokenizer, Span, is_before_blank, splits_before_blanks, token_spans, tokenize
from gptj_ft.errors import RowSkipped

# How many tokens a cut may move back to fall between two words.
WORD_TOKENS = 5
_GAP = " ... "  # where the middle of a text is left out

Keeper = Callable[[int], list[Span]]  # of so many tokens: which, as (first, end) spans


def shorten(
    recipe: Recipe,
    tokenizer: RowTokenizer,
    values: Mapping[str, Any],
    room: int,
    answer_at: int | None = None,
    ids: Sequence[int] | None = None,
) -> list[int]:
    """Truncate the `shorten` field so that the prompt fits in ``room`` tokens; return the prompt's tokens.

    Args:
        recipe: its templates, `shorten` and `cut`; the prompt is the completion where there is none.
        tokenizer: a fast one.
        values: field -> text.
        room: tokens; the whole prompt has more.
        answer_at: first character of the answer in the field; ``None``: unknown.
        ids: tokens of the whole prompt, if they are there.

    Raises:
        RowSkipped: no part fits, or there is no field that may lose one.
    """
    template = recipe.prompt or recipe.completion
    found = parse_template(template)
    if recipe.shorten not in found.fields:
        raise RowSkipped("longer than max_length, and no field to `shorten` is named (plain text: on_long: split)")
    text, uses = values[recipe.shorten], found.uses[recipe.shorten]
    ids = tokenize(tokenizer, [render(template, values)])[0] if ids is None else ids
    inside = _field_tokens(template, recipe.shorten, values, tokenizer, ids) if uses == 1 else None
    offsets = inside.offsets if inside else token_spans(tokenizer, text, tokenize(tokenizer, [text])[0])
    start = inside.start if inside else 0
    cut = _Cut(text, start, offsets, _keeper(recipe.cut, offsets, None if answer_at is None else start + answer_at))

    def with_part(keep: int) -> list[int]:
        if inside and recipe.cut == "end" and (spliced := inside.without_end(keep, tokenizer)):
            return spliced
        return tokenize(tokenizer, [render(template, {**values, recipe.shorten: cut.text(keep)})])[0]

    excess = len(ids) - room
    # Where to cut can nearly always be told from the tokens of the whole ...
    keep = len(offsets) - -(-excess // uses)
    if (fewer := cut.between_words(keep)) and cut.text(fewer).strip() and len(fitting := with_part(fewer)) <= room:
        return fitting
    # ... but at the joints tokens may merge differently, and a word may be longer than what is looked at.
    keep, fitting = len(offsets), list(ids)
    while keep > 0 and len(fitting) > room:
        keep -= max(1, (len(fitting) - room) // uses)
        fitting = with_part(keep) if keep > 0 else fitting
    if keep <= 0 or not cut.text(keep).strip():
        raise RowSkipped(f"too long: no room for any part of '{recipe.shorten}'")
    while keep < len(offsets) and len(longer := with_part(keep + 1)) <= room:
        keep, fitting = keep + 1, longer
    fewer = cut.between_words(keep)
    shorter = with_part(fewer) if fewer not in (0, keep) else fitting
    return shorter if len(shorter) <= room else fitting


@dataclass(frozen=True)
class _FieldTokens:
    """The tokens of a field inside those of a prompt.

    Attributes:
        ids: token ids of the prompt.
        prompt: its text.
        start: first character of the field in the prompt.
        stop: first character after the field.
        first: token of the field.
        offsets: characters of the field's tokens in the prompt.
    """

    ids: Sequence[int]
    prompt: str
    start: int
    stop: int
    first: int
    offsets: Sequence[Span]

    def without_end(self, keep: int, tokenizer: RowTokenizer) -> list[int] | None:
        """Return the prompt's tokens with only the first ``keep`` of the field, if no token goes across the joint."""
        cut = self.offsets[keep - 1][1]
        joint = self.prompt[cut - 1] + self.prompt[self.stop : self.stop + 1]
        # Of a character that is several tokens each says that it is all of it.
        is_whole = keep < len(self.offsets) and self.offsets[keep][0] >= cut
        can_join = is_whole and is_before_blank(self.prompt, cut) and is_before_blank(joint, 1)
        if not (can_join and splits_before_blanks(tokenizer)):
            return None
        return [*self.ids[: self.first + keep], *tokenize(tokenizer, [self.prompt[self.stop :]])[0]]


def _field_tokens(
    template: str, field: str, values: Mapping[str, Any], tokenizer: RowTokenizer, ids: Sequence[int]
) -> _FieldTokens | None:
    """Find the tokens of a field, of a template that has nothing but fields and texts."""
    pieces = parse_template(template).pieces
    if pieces is None:
        return None
    texts = [str(values[text]) if is_field else text for text, is_field in pieces]
    start = sum(map(len, texts[: next(n for n, piece in enumerate(pieces) if piece == (field, True))]))
    stop, prompt = start + len(values[field]), "".join(texts)
    places = token_spans(tokenizer, prompt, ids)
    first = bisect_left(places.firsts, start)
    end = next((number for number in range(len(places), first, -1) if places[number - 1][1] <= stop), first)
    if end == first:
        return None
    return _FieldTokens(ids, prompt, start, stop, first, places[first:end])


def _keeper(cut: str, offsets: Sequence[Span], answer_at: int | None) -> Keeper:
    """Return the function that selects the tokens to keep."""
    count = len(offsets)
    if cut == "start":
        return lambda keep: [(count - keep, count)]
    if cut == "middle":
        return lambda keep: [(0, -(-keep // 2)), (count - keep // 2, count)] if keep < count else [(0, count)]
    if cut == "answer" and answer_at is not None:
        at = next((index for index, (_, end) in enumerate(offsets) if end > answer_at), count - 1)

        def around(keep: int) -> list[Span]:
            first = min(max(at - keep // 2, 0), count - keep)
            return [(first, first + keep)]

        return around
    return lambda keep: [(0, keep)]


@dataclass(frozen=True)
class _Cut:
    """A text of which a number of tokens is kept.

    Attributes:
        whole: the text.
        start: position of the text's first character, as the offsets count.
        offsets: characters of its tokens.
        keeper: choice of the tokens that stay.
    """

    whole: str
    start: int
    offsets: Sequence[Span]
    keeper: Keeper

    def text(self, keep: int) -> str:
        """Return the text of ``keep`` tokens."""
        return _GAP.join(self.whole[start:end] for start, end in self._spans(keep) if end > start)

    def between_words(self, keep: int) -> int:
        """Return the number of tokens, ``keep`` or a few less, after which every cut falls between words; or 0."""
        fewer = range(keep, max(keep - WORD_TOKENS, 0), -1)
        return next((number for number in fewer if self._is_between_words(number)), 0)

    def _is_between_words(self, keep: int) -> bool:
        spans, whole = self._spans(keep), self.whole
        # Offsets may leave out the blank that belongs to a token, so before a word both sides count.
        return all(
            (first == 0 or whole[first - 1].isspace() or whole[first].isspace())
            and (end == len(whole) or is_before_blank(whole, end))
            for first, end in spans
        )

    def _spans(self, keep: int) -> list[Span]:
        count, offsets = len(self.offsets), self.offsets
        return [
            (
                offsets[first][0] - self.start if first else 0,
                offsets[end - 1][1] - self.start if end < count else len(self.whole),
            )
            for first, end in self.keeper(keep)
            if end > first
        ]
