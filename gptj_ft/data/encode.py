"""Encode rows as token ids by the recipe's templates, for training and inference alike.

    BOS, if the tokenizer adds one | prompt tokens | completion tokens | EOS          loss on completion and EOS

A row above the limit loses part of its `shorten` field and nothing else: instruction, delimiters, the other fields
and the answer stay complete. A conversation loses its oldest messages.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from gptj_ft.config.options import Recipe
from gptj_ft.data.chat import MESSAGES, REPLY, Conversation, drop_oldest, is_chat, render_parts
from gptj_ft.data.chat_template import TOOLS, ChatTemplate, as_conversation, has_template
from gptj_ft.data.loss_mask import num_inputs
from gptj_ft.data.template import fields_of, render
from gptj_ft.data.tokenization import (
    NoTokenizer,
    RowTokenizer,
    backend_of,
    frame_of,
    no_tokenizer,
    tokenize,
    tokenizer_digest,
)
from gptj_ft.data.truncation import shorten
from gptj_ft.errors import DataError, RowSkipped, UsageError, did_you_mean

PRESETS = {  # task -> recipe that an error suggests
    "classification": "classification",
    "multi-label": "multi-label",
    "regression": "regression",
    "token-labels": "token-labels",
    "spans": "squad-bert",
    "sentences": "bertsum",
}

TextPart = tuple[str, bool]  # a text of a row, and whether it is a target


class Encoded(NamedTuple):
    """A row as tokens."""

    documents: tuple[Sequence[int], ...]  # token ids ending with EOS; several if plain text is split into windows
    prompt_length: int  # untrained tokens at the start
    masked_spans: tuple[int, ...] = ()
    """further untrained spans, (start, end) pairs in one flat list; the questions of a conversation"""
    tokens_cut: int = 0  # tokens lost by truncation


@dataclass(frozen=True)
class Prompt:
    """Token ids of a prompt; ``cut`` tells whether it was truncated."""

    ids: list[int]
    cut: bool


def check_templates(recipe: Recipe) -> None:
    """Check templates and length policy against each other."""
    if recipe.task != "language-model":
        _check_task_templates(recipe)
        return
    cuttable = fields_of(recipe.prompt or recipe.completion)
    if recipe.pair:
        raise UsageError("pair: only tasks that label pairs of texts have a second text, e.g. task=classification")
    if not fields_of(recipe.completion):
        raise UsageError(f"completion: {recipe.completion!r} has no field, so there is nothing to train on")
    if is_chat(recipe) and REPLY not in fields_of(recipe.completion):
        raise UsageError(f"completion: for conversations it must contain {{{{ {REPLY} }}}}, the assistant's message")
    if recipe.shorten and recipe.shorten not in cuttable:
        hint = did_you_mean(recipe.shorten, cuttable)
        raise UsageError(f"shorten: the prompt has no field '{recipe.shorten}'{hint}; it has: {', '.join(cuttable)}")
    if has_template(recipe) and not recipe.prompt:
        raise UsageError("chat_template: plain text has no messages; set prompt and completion, or chat_template=none")
    if has_template(recipe) and recipe.labels and "accuracy" in recipe.metrics:
        raise UsageError(f"chat_template: the labels of recipe {recipe.recipe} are compared without one; leave it out")
    if recipe.on_long == "split" and recipe.prompt:
        raise UsageError("on_long: 'split' is for plain text (an empty prompt); use shorten, skip or error")


def _check_task_templates(recipe: Recipe) -> None:
    task, inputs = recipe.task, (*fields_of(recipe.prompt), *fields_of(recipe.pair))
    if not fields_of(recipe.prompt):
        raise UsageError(
            f"prompt: task={task} needs a text to read, e.g. prompt: '{{{{ text }}}}' and completion: '{{{{ label }}}}'"
            f"\nor start from the recipe {PRESETS[task]}"
        )
    if not fields_of(recipe.completion):
        raise UsageError(f"completion: {recipe.completion!r} has no field, so there is nothing to predict")
    if recipe.pair and task in ("token-labels", "sentences"):
        raise UsageError(f"pair: task={task} reads one text")
    if not recipe.pair and task == "spans":
        raise UsageError("pair: task=spans needs the text that contains the answer, e.g. prompt: '{{ question }}', "
                         "pair: '{{ context }}'")  # fmt: skip
    if is_chat(recipe):
        raise UsageError(f"prompt: conversations are for task=language-model, not {task}")
    if recipe.shorten and recipe.shorten not in inputs:
        hint = did_you_mean(recipe.shorten, inputs)
        raise UsageError(f"shorten: prompt and pair have no field '{recipe.shorten}'{hint}; they have: "
                         f"{', '.join(inputs)}")  # fmt: skip
    if recipe.cut == "answer":
        raise UsageError(f"cut: 'answer' is for task=language-model, not {task}; use end, start or middle")
    if recipe.packing != "off":
        raise UsageError(f"packing: windows of several documents are for task=language-model, not {task}")


def parts(recipe: Recipe, values: Mapping[str, Any]) -> list[TextPart]:
    """Render a row's texts: prompt and completion; for a conversation, one such pair per answer.

    Args:
        values: field -> text, or `Conversation`.

    Raises:
        RowSkipped: a field of the prompt, or the whole completion, is blank.
    """
    _require_content(recipe.prompt, values)
    if is_chat(recipe):
        return render_parts(recipe, values[MESSAGES])
    completion = render(recipe.completion, values)
    if not completion.strip():
        raise RowSkipped("the completion is empty")
    return [(render(recipe.prompt, values) if recipe.prompt else "", False), (completion, True)]


def eos_of(tokenizer: RowTokenizer) -> int:
    """Return the token id that ends every document."""
    if isinstance(tokenizer, NoTokenizer):
        raise no_tokenizer(Path(tokenizer.name_or_path))
    if tokenizer.eos_token_id is None:
        raise UsageError(
            f"the tokenizer {tokenizer.name_or_path} has no EOS token, and a model trained without one never stops\n"
            'name one in its tokenizer_config.json, e.g. "eos_token": "<|endoftext|>"'
        )
    return int(tokenizer.eos_token_id)


def start_of(recipe: Recipe, tokenizer: RowTokenizer) -> tuple[int, ...]:
    """Return the special tokens before each text of a language model; empty if a chat template writes them."""
    if recipe.task != "language-model" or not recipe.bos or has_template(recipe) or isinstance(tokenizer, NoTokenizer):
        return ()
    return frame_of(tokenizer).first


def tokens_digest(recipe: Recipe, tokenizer: RowTokenizer) -> str:
    """Return the digest of a tokenizer and the special tokens that a recipe puts before texts."""
    return tokenizer_digest(tokenizer, start_of(recipe, tokenizer))


def assemble(
    recipe: Recipe,
    tokenizer: RowTokenizer,
    eos: int,
    values: Mapping[str, Any],
    texts: Sequence[TextPart],
    ids: Sequence[Sequence[int]],
    answer_at: int | None = None,
    start: Sequence[int] = (),
) -> Encoded:
    """Join the tokens of prompt and completion and add EOS; apply the length policy if there are more than
    `max_length`.

    Args:
        eos: token id that ends every document.
        values: field -> text.
        texts: the row's texts, see `parts`.
        ids: tokens of each text.
        answer_at: first character of the answer in the `shorten` field; ``None``: unknown.
        start: special tokens before the texts, see `start_of`.

    Raises:
        RowSkipped: the row is too long and cannot be shortened.
    """
    limit, own = recipe.max_length, len(start) + 1  # special tokens: `start` and EOS
    num_tokens = sum(map(len, ids)) + own
    if num_tokens <= limit:
        return _joined(start, texts, ids, eos)
    refuse_if_not_to_be_shortened(recipe, num_tokens)
    if recipe.on_long == "split":
        return Encoded(_windows(_joined(start, texts, ids, eos).documents[0], limit), 0)
    if is_chat(recipe):
        for fewer in drop_oldest(values[MESSAGES]):
            texts = render_parts(recipe, fewer)
            ids = tokenize(tokenizer, [text for text, _ in texts])
            if (rest := sum(map(len, ids)) + own) <= limit:
                return _joined(start, texts, ids, eos, num_tokens - rest)
        raise RowSkipped("too long: no room for the last question and its answer")
    # Only one part is shortened: the prompt or, without a prompt template, the plain text. The rest and EOS stay.
    part = 0 if recipe.prompt else 1
    room = limit - own - sum(len(each) for index, each in enumerate(ids) if index != part)
    cut = shorten(recipe, tokenizer, values, room, answer_at, ids[part])
    whole: list[Sequence[int]] = [cut if index == part else each for index, each in enumerate(ids)]
    return _joined(start, texts, whole, eos, num_tokens - sum(map(len, whole)) - own)


def from_tokens(recipe: Recipe, ids: list[int], trained: Any) -> Encoded:
    """Encode a tokenized row; split it if it is too long and trained as a whole.

    `max_length` bounds the inputs: the last target may be one token beyond, as in windows of other systems with n
    inputs and n targets.

    Args:
        trained: (start, end) pairs of the targets, nested or in one flat list; ``None``: all tokens but the first.

    Raises:
        RowSkipped: there is no target, or the row is too long.
    """
    spans = [1, len(ids)] if trained is None else _flat(trained)
    borders = [0, *spans]
    if len(spans) % 2 or any(one > other for one, other in pairwise(borders)) or borders[-1] > len(ids):
        raise DataError(
            f"'trained' must be a list of ascending (start, end) pairs within the row's {len(ids):,} tokens, such as "
            "[[2, 5], [7, 9]]"
        )
    pairs = [(max(start, 1), end) for start, end in zip(spans[::2], spans[1::2], strict=True) if end > max(start, 1)]
    if not pairs:
        raise RowSkipped("no token that is trained on")
    last = pairs[-1][1]  # tokens after the last target have no effect
    ids = ids[:last]
    if num_inputs(len(ids), recipe.max_length) > recipe.max_length:
        if recipe.on_long == "split" and len(pairs) == 1 and pairs[0][0] == 1:
            # One token more than inputs: a window's last token is only a target.
            return Encoded(_windows(ids, recipe.max_length + 1), 0)
        refuse_if_not_to_be_shortened(recipe, len(ids))
        raise RowSkipped("longer than max_length, and tokens cannot be shortened")
    # Masked spans lie between consecutive targets: from the end of one to the start of the next.
    gaps = tuple(border for (_, end), (start, _) in pairwise(pairs) for border in (end, start))
    # Token 0 is never a target, so a prompt of one token is none. Packing requires rows without prompts.
    return Encoded((ids,), pairs[0][0] if pairs[0][0] > 1 else 0, gaps)


def _flat(trained: Any) -> list[int]:
    """Flatten a list of pairs or of numbers; return an invalid list for anything else.

    >>> _flat([[2, 5], [7, 9]]), _flat([2, 5, 7, 9]), _flat("2-5")
    ([2, 5, 7, 9], [2, 5, 7, 9], [-1])
    """
    items: list[Any] = list(trained) if isinstance(trained, list | tuple) else [None]
    if all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in items):
        items = [bound for pair in items for bound in pair]
    return items if all(type(bound) is int for bound in items) else [-1]


def encode_prompt(recipe: Recipe, tokenizer: RowTokenizer, values: Mapping[str, Any], room: int) -> Prompt:
    """Encode a row's prompt, truncated as in training.

    Without a prompt template (plain text), the text itself is the prompt, and truncation keeps its end.

    Args:
        values: field -> text; the completion's fields are not needed.
        room: most tokens of the prompt.
    """
    start = start_of(recipe, tokenizer)
    if room <= len(start):
        raise UsageError("no room is left for the prompt; lower generation.max_new_tokens")
    _require_content(recipe.prompt or recipe.completion, values)
    if written_by := ChatTemplate.of(recipe, tokenizer):
        return _templated_prompt(recipe, written_by, values, room)
    prompt = _rendered_prompt(recipe, tokenizer, values, room - len(start), len(start))
    return Prompt([*start, *prompt.ids], prompt.cut)


def _rendered_prompt(
    recipe: Recipe, tokenizer: RowTokenizer, values: Mapping[str, Any], room: int, num_special: int
) -> Prompt:
    """Encode the text of a prompt, without the special tokens before it."""
    template = recipe.prompt or recipe.completion
    ids = tokenize(tokenizer, [render(template, values)])[0]
    if limit := recipe.generation.max_prompt_tokens:
        most = min(max(1, limit - num_special), room)
        if len(ids) > most:
            return Prompt(ids[:most], cut=True)
    if len(ids) <= room:
        return Prompt(ids, cut=False)
    if not recipe.prompt:
        return Prompt(ids[-room:], cut=True)
    if recipe.on_long in ("skip", "error"):
        raise DataError(f"the prompt takes {len(ids)} tokens, there is room for {room} (on_long: {recipe.on_long})")
    if is_chat(recipe):
        for fewer in drop_oldest(values[MESSAGES]):
            ids = tokenize(tokenizer, [render(template, {**values, MESSAGES: fewer})])[0]
            if len(ids) <= room:
                return Prompt(ids, cut=True)
        raise DataError(f"the last message alone takes {len(ids)} tokens, there is room for {room}")
    return Prompt(shorten(recipe, tokenizer, values, room, ids=ids), cut=True)


def _templated_prompt(recipe: Recipe, template: ChatTemplate, values: Mapping[str, Any], room: int) -> Prompt:
    def encode(conversation: Conversation) -> list[int]:
        return template.encode([template.prompt(conversation, values.get(TOOLS))])[0].ids

    conversation = values[MESSAGES] if is_chat(recipe) else as_conversation(render(recipe.prompt, values))
    if len(ids := encode(conversation)) <= room:
        return Prompt(ids, cut=False)
    if recipe.on_long in ("skip", "error"):
        raise DataError(f"the prompt takes {len(ids)} tokens, there is room for {room} (on_long: {recipe.on_long})")
    if is_chat(recipe):
        for fewer in drop_oldest(conversation):
            if len(ids := encode(fewer)) <= room:
                return Prompt(ids, cut=True)
        raise DataError(f"the last message alone takes {len(ids)} tokens, there is room for {room}")
    text = shorten_text(recipe, template.tokenizer, values, lambda text: len(encode(as_conversation(text))) - room)
    return Prompt(encode(as_conversation(text)), cut=True)


def shorten_text(
    recipe: Recipe,
    tokenizer: RowTokenizer,
    values: Mapping[str, Any],
    excess: Callable[[str], int],
    answer_at: int | None = None,
) -> str:
    """Shorten the `shorten` field of a prompt until nothing exceeds the limit; return the prompt's text.

    Args:
        excess: number of tokens above the limit with a text as prompt.
    """
    text = render(recipe.prompt, values)
    ids = tokenize(tokenizer, [text])[0]
    room = len(ids)
    # The tokens of a prompt alone and within a message may differ by a few at its ends.
    while (more := excess(text)) > 0:
        room -= more
        text = backend_of(tokenizer).decode(
            shorten(recipe, tokenizer, values, room, answer_at, ids), skip_special_tokens=False
        )
    return text


def _joined(
    start: Sequence[int], texts: Sequence[TextPart], ids: Sequence[Sequence[int]], eos: int, tokens_cut: int = 0
) -> Encoded:
    whole = array("i", start)  # extends fast by another array
    for each in ids:
        whole.extend(each)
    whole.append(eos)
    if len(texts) == 2:  # a prompt and its completion
        return Encoded((whole,), len(start) + len(ids[0]) if ids[0] else 0, (), tokens_cut)
    borders = list(accumulate(map(len, ids), initial=len(start)))
    spans = zip(texts, pairwise(borders), strict=True)
    masked_spans = [span for (_, is_trained), span in spans if not is_trained]
    prompt_length, further = masked_spans[0][1], masked_spans[1:]
    return Encoded((whole,), prompt_length, tuple(border for span in further for border in span), tokens_cut)


def _require_content(template: str, values: Mapping[str, Any]) -> None:
    for name in fields_of(template):
        if not str(values.get(name, "")).strip():
            raise RowSkipped(f"the field '{name}' is empty")


def refuse_if_not_to_be_shortened(recipe: Recipe, num_tokens: int) -> None:
    """Raise `DataError` or `RowSkipped` for a row that is too long, unless ``on_long`` allows to shorten it."""
    if recipe.on_long == "error":
        raise DataError(
            f"{num_tokens} tokens with EOS, max_length is {recipe.max_length}; raise it, or set on_long "
            "to shorten or skip"
        )
    if recipe.on_long == "skip":
        raise RowSkipped("longer than max_length")


def _windows(ids: Sequence[int], length: int) -> tuple[Sequence[int], ...]:
    """Split plain text into windows that overlap by one token: every token but the first is a target once."""
    return tuple(ids[start : start + length] for start in range(0, len(ids) - 1, length - 1))
