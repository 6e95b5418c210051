"""A row's texts -> token ids, by the recipe's templates. Training and inference both come through here.

    prompt tokens | completion tokens | EOS          loss on completion and EOS

A row above the limit loses part of its `shorten` field and nothing else: instruction, delimiters, the other fields
and the answer stay whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gptj_ft.data.placeholders import fields_of, parse_template, render
from gptj_ft.errors import DataError, UsageError, did_you_mean
from gptj_ft.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = [
    "Encoded",
    "Prompt",
    "RowSkipped",
    "assemble",
    "check_templates",
    "encode",
    "encode_prompt",
    "eos_of",
    "fields_of",
    "texts",
    "tokenize",
]

# How many tokens a cut may move back to fall between two words.
WORD_TOKENS = 5


class RowSkipped(DataError):
    """A row that cannot be used; the message is the reason, the same text for every row with this problem."""


@dataclass(frozen=True)
class Encoded:
    """A row as tokens.

    Attributes:
        documents: token ids, EOS at the end; more than one when plain text is split into windows.
        prompt_length: tokens at the start that are not trained on.
        cut: whether the `shorten` field lost a part.
    """

    documents: tuple[list[int], ...]
    prompt_length: int
    cut: bool


@dataclass(frozen=True)
class Prompt:
    """What the model continues; ``cut`` tells whether the document lost a part."""

    ids: list[int]
    cut: bool


def check_templates(recipe: Recipe) -> None:
    """Check what the templates and the length policy say of each other.

    Raises:
        UsageError: `shorten` names no field of the prompt, or `split` is asked for with a prompt.
    """
    cuttable = fields_of(recipe.prompt or recipe.completion)
    fields_of(recipe.completion)
    if recipe.shorten and recipe.shorten not in cuttable:
        hint = did_you_mean(recipe.shorten, cuttable)
        raise UsageError(f"shorten: '{recipe.shorten}' is no field of the prompt{hint}; it has: {', '.join(cuttable)}")
    if recipe.too_long == "split" and recipe.prompt:
        raise UsageError("too_long: 'split' is for plain text (an empty prompt); use cut-end, cut-start, skip or error")


def texts(recipe: Recipe, values: Mapping[str, str]) -> tuple[str, str]:
    """Return the texts of prompt and completion.

    Raises:
        RowSkipped: a field of the prompt, or the whole completion, is blank.
    """
    _require_content(recipe.prompt, values)
    completion = render(recipe.completion, values)
    if not completion.strip():
        raise RowSkipped("the completion is empty")
    return render(recipe.prompt, values), completion


def tokenize(tokenizer: PreTrainedTokenizerFast, batch: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each text, without special tokens added."""
    if not batch:
        return []
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = bool(tokenizer.split_special_tokens)
    return [encoding.ids for encoding in backend.encode_batch_fast(list(batch), add_special_tokens=False)]


def eos_of(tokenizer: PreTrainedTokenizerFast) -> int:
    """Return the id that ends every document.

    Raises:
        UsageError: the tokenizer has none.
    """
    if tokenizer.eos_token_id is None:
        raise UsageError(
            f"the tokenizer {tokenizer.name_or_path} has no EOS token, and a model tuned without one never stops\n"
            'name one in its tokenizer_config.json, e.g. "eos_token": "<|endoftext|>"'
        )
    return int(tokenizer.eos_token_id)


def encode(recipe: Recipe, tokenizer: PreTrainedTokenizerFast, values: Mapping[str, str]) -> Encoded:
    """Return a row as tokens: prompt, completion, EOS; at most `max_length` of them.

    Args:
        recipe: its templates and length policy.
        tokenizer: a fast tokenizer with an EOS token.
        values: field -> text.

    Raises:
        RowSkipped: blank, or too long and not to be shortened.
        DataError: too long, and the policy is `error`.
        UsageError: no EOS token.
    """
    prompt, completion = texts(recipe, values)
    prompt_ids, completion_ids = tokenize(tokenizer, [prompt, completion])
    return assemble(recipe, tokenizer, values, prompt_ids, completion_ids)


def assemble(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerFast,
    values: Mapping[str, str],
    prompt_ids: list[int],
    completion_ids: list[int],
) -> Encoded:
    """Join a row's tokens, and apply the length policy; the second half of `encode`, for tokens made in batches."""
    eos = eos_of(tokenizer)
    num_tokens = len(prompt_ids) + len(completion_ids) + 1
    if num_tokens <= recipe.max_length:
        return Encoded(([*prompt_ids, *completion_ids, eos],), len(prompt_ids), cut=False)
    if recipe.too_long == "error":
        raise DataError(
            f"{num_tokens} tokens with EOS, max_length is {recipe.max_length}; raise it, or set too_long to "
            "cut-end, cut-start or skip"
        )
    if recipe.too_long == "skip":
        raise RowSkipped("longer than max_length")
    if recipe.too_long == "split":
        return Encoded(_windows([*completion_ids, eos], recipe.max_length), 0, cut=False)
    if recipe.prompt:
        prompt_ids = _shorten(recipe, tokenizer, values, prompt_ids, recipe.max_length - len(completion_ids) - 1)
    else:
        completion_ids = _shorten(recipe, tokenizer, values, completion_ids, recipe.max_length - 1)
    return Encoded(([*prompt_ids, *completion_ids, eos],), len(prompt_ids), cut=True)


def encode_prompt(recipe: Recipe, tokenizer: PreTrainedTokenizerFast, values: Mapping[str, str], room: int) -> Prompt:
    """Return the prompt of one row, shortened as in training.

    Without a prompt template (plain text) the text itself is continued, and of a long one its end is kept.

    Args:
        recipe: the one the model was tuned with.
        tokenizer: the model's.
        values: field -> text; the completion's fields are not needed.
        room: most tokens the prompt may take.

    Raises:
        DataError: a field is blank, or the prompt is too long and not to be shortened.
        UsageError: no room at all.
    """
    if room < 1:
        raise UsageError("no room is left for the prompt; lower generation.max_new_tokens")
    template = recipe.prompt or recipe.completion
    _require_content(template, values)
    ids = tokenize(tokenizer, [render(template, values)])[0]
    if len(ids) <= room:
        return Prompt(ids, cut=False)
    if not recipe.prompt:
        return Prompt(ids[-room:], cut=True)
    if recipe.too_long in ("skip", "error"):
        raise DataError(f"the prompt takes {len(ids)} tokens, there is room for {room} (too_long: {recipe.too_long})")
    return Prompt(_shorten(recipe, tokenizer, values, ids, room), cut=True)


def _require_content(template: str, values: Mapping[str, str]) -> None:
    for name in fields_of(template):
        if not values.get(name, "").strip():
            raise RowSkipped(f"the field '{name}' is empty")


def _windows(ids: list[int], length: int) -> tuple[list[int], ...]:
    """Cut plain text; a window starts with the token the last one ended with, so that each is a target once."""
    return tuple(ids[start : start + length] for start in range(0, len(ids) - 1, length - 1))


def _shorten(
    recipe: Recipe, tokenizer: PreTrainedTokenizerFast, values: Mapping[str, str], ids: list[int], room: int
) -> list[int]:
    """Return the tokens of the prompt with the longest part of the `shorten` field for which they fit in ``room``.

    ``ids`` are the tokens of the whole prompt, which do not fit. The field's own tokens tell where to cut; each try is
    tokenised as a whole, because at the joints tokens may merge differently.
    """
    template = recipe.prompt or recipe.completion
    if recipe.shorten not in fields_of(template):
        raise RowSkipped("longer than max_length, and no field to `shorten` is named (plain text: too_long: split)")
    text = values[recipe.shorten]
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
    uses = sum(name == recipe.shorten for _, name in parse_template(template))

    def with_part(keep: int) -> list[int]:
        part = _part(text, offsets, keep, recipe.too_long)
        return tokenize(tokenizer, [render(template, {**values, recipe.shorten: part})])[0]

    keep, fitting = len(offsets), ids
    while keep > 0 and len(fitting) > room:
        keep -= max(1, (len(fitting) - room) // uses)
        fitting = with_part(keep) if keep > 0 else ids
    if keep <= 0 or not _part(text, offsets, keep, recipe.too_long).strip():
        raise RowSkipped(f"too long: no room for any part of '{recipe.shorten}'")
    while keep < len(offsets) and len(longer := with_part(keep + 1)) <= room:
        keep, fitting = keep + 1, longer
    for fewer in range(keep, max(keep - WORD_TOKENS, 0), -1):
        if _ends_between_words(text, offsets, fewer, recipe.too_long):
            shorter = fitting if fewer == keep else with_part(fewer)
            return shorter if len(shorter) <= room else fitting
    return fitting


def _part(text: str, offsets: Sequence[tuple[int, int]], keep: int, too_long: str) -> str:
    """Return what the first (cut-end) or last (cut-start) ``keep`` tokens of a text cover."""
    return text[: offsets[keep - 1][1]] if too_long == "cut-end" else text[offsets[-keep][0] :]


def _ends_between_words(text: str, offsets: Sequence[tuple[int, int]], keep: int, too_long: str) -> bool:
    at = offsets[keep - 1][1] if too_long == "cut-end" else offsets[-keep][0]
    # Offsets may leave out the blank that belongs to a token, so both sides count.
    return text[at - 1 : at].isspace() or text[at : at + 1].isspace()
