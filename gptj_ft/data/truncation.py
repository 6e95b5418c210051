"""Truncate rows that are too long: cut one field at its end, start or middle, or far from the answer."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gptj_ft.config.options import Recipe
from gptj_ft.data.template import parse_template, render
from gptj_ft.data.tokenization import RowTokenizer, Span, is_before_blank, splits_before_blanks, token_spans, tokenize
from gptj_ft.errors import RowSkipped

WORD_TOKENS = 5  # tokens that a cut may move back to fall between two words
_GAP = " ... "  # in place of a removed middle

Keeper = Callable[[int], list[Span]]  # number of tokens to keep -> their (first, end) spans


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
        recipe: its templates, `shorten` and `cut`; without a prompt template, the completion is the prompt.
        values: field -> text.
        room: tokens; fewer than the prompt has.
        answer_at: first character of the answer in the field; ``None``: unknown.
        ids: tokens of the prompt, if known.

    Raises:
        RowSkipped: no part of the field fits, or no field may be truncated.
    """
    template = recipe.prompt or recipe.completion
    parsed = parse_template(template)
    if recipe.shorten not in parsed.fields:
        raise RowSkipped("longer than max_length, and no field to `shorten` is named (plain text: on_long: split)")
    text, uses = values[recipe.shorten], parsed.uses[recipe.shorten]
    ids = tokenize(tokenizer, [render(template, values)])[0] if ids is None else ids
    inside = _field_tokens(template, recipe.shorten, values, tokenizer, ids) if uses == 1 else None
    offsets = inside.offsets if inside else token_spans(tokenizer, text, tokenize(tokenizer, [text])[0])
    start = inside.start if inside else 0
    cut = _Cut(text, start, offsets, _keeper(recipe.cut, offsets, None if answer_at is None else start + answer_at))

    def with_part(keep: int) -> list[int]:
        if inside and recipe.cut == "end" and (spliced := inside.without_end(keep, tokenizer)):
            return spliced
        return tokenize(tokenizer, [render(template, {**values, recipe.shorten: cut.text(keep)})])[0]

    # A field used several times loses the same part in each place: divide the excess by the uses.
    excess = len(ids) - room
    # Usually the tokens of the whole prompt tell where to cut.
    keep = len(offsets) - -(-excess // uses)
    if (fewer := cut.between_words(keep)) and cut.text(fewer).strip() and len(fitting := with_part(fewer)) <= room:
        return fitting
    # Otherwise search: tokens may merge differently at the joints, or a word have more than `WORD_TOKENS` tokens.
    keep, fitting = len(offsets), list(ids)
    while keep > 0 and len(fitting) > room:
        keep -= max(1, (len(fitting) - room) // uses)
        fitting = with_part(keep) if keep > 0 else fitting
    if keep <= 0 or not cut.text(keep).strip():
        raise RowSkipped(f"too long: no room for any part of '{recipe.shorten}'")
    # The decrements may have overshot: grow again, token by token.
    while keep < len(offsets) and len(longer := with_part(keep + 1)) <= room:
        keep, fitting = keep + 1, longer
    fewer = cut.between_words(keep)
    shorter = with_part(fewer) if fewer not in (0, keep) else fitting
    return shorter if len(shorter) <= room else fitting


@dataclass(frozen=True)
class _FieldTokens:
    """The tokens of a field within those of a prompt."""

    ids: Sequence[int]  # of the prompt
    prompt: str
    start: int  # characters of the field in the prompt
    stop: int
    first: int  # first token of the field
    offsets: Sequence[Span]  # characters of the field's tokens in the prompt

    def without_end(self, keep: int, tokenizer: RowTokenizer) -> list[int] | None:
        """Return the prompt's tokens with only ``keep`` tokens of the field; ``None`` if a token may cross the
        joint.
        """
        cut = self.offsets[keep - 1][1]
        joint = self.prompt[cut - 1] + self.prompt[self.stop : self.stop + 1]
        # Several tokens of one character all have the offsets of the whole character: do not cut between them.
        is_whole = keep < len(self.offsets) and self.offsets[keep][0] >= cut
        can_join = is_whole and is_before_blank(self.prompt, cut) and is_before_blank(joint, 1)
        if not (can_join and splits_before_blanks(tokenizer)):
            return None
        # A blank follows the cut in both texts, so the tokens before it are the same in both.
        return [*self.ids[: self.first + keep], *tokenize(tokenizer, [self.prompt[self.stop :]])[0]]


def _field_tokens(
    template: str, field: str, values: Mapping[str, Any], tokenizer: RowTokenizer, ids: Sequence[int]
) -> _FieldTokens | None:
    """Find the tokens of a field, if the template has only fields and texts."""
    pieces = parse_template(template).pieces
    if pieces is None:
        return None
    texts = [str(values[text]) if is_field else text for text, is_field in pieces]
    start = sum(map(len, texts[: next(n for n, piece in enumerate(pieces) if piece == (field, True))]))
    stop, prompt = start + len(values[field]), "".join(texts)
    spans = token_spans(tokenizer, prompt, ids)
    # A token that crosses a border of the field belongs to the template and is never cut.
    first = bisect_left(spans.firsts, start)
    end = next((number for number in range(len(spans), first, -1) if spans[number - 1][1] <= stop), first)
    if end == first:
        return None
    return _FieldTokens(ids, prompt, start, stop, first, spans[first:end])


def _keeper(cut: str, offsets: Sequence[Span], answer_at: int | None) -> Keeper:
    """Return the function that selects the tokens to keep."""
    count = len(offsets)
    if cut == "start":
        return lambda keep: [(count - keep, count)]
    if cut == "middle":
        return lambda keep: [(0, -(-keep // 2)), (count - keep // 2, count)] if keep < count else [(0, count)]
    if cut == "answer" and answer_at is not None:
        answer = next((index for index, (_, end) in enumerate(offsets) if end > answer_at), count - 1)

        def around(keep: int) -> list[Span]:
            first = min(max(answer - keep // 2, 0), count - keep)
            return [(first, first + keep)]

        return around
    return lambda keep: [(0, keep)]


@dataclass(frozen=True)
class _Cut:
    """A text of which some tokens are kept."""

    whole: str
    start: int  # offset of the text's first character in ``offsets``
    offsets: Sequence[Span]
    keeper: Keeper

    def text(self, keep: int) -> str:
        """Return the text of ``keep`` tokens."""
        return _GAP.join(self.whole[start:end] for start, end in self._spans(keep) if end > start)

    def between_words(self, keep: int) -> int:
        """Return ``keep``, or a few tokens less, so that every cut falls between words; 0 if impossible."""
        fewer = range(keep, max(keep - WORD_TOKENS, 0), -1)
        return next((number for number in fewer if self._is_between_words(number)), 0)

    def _is_between_words(self, keep: int) -> bool:
        spans, whole = self._spans(keep), self.whole
        # Offsets may exclude a token's leading blank: the blank before a word is on either side of the cut.
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
