"""Write conversations by the chat template of a model, and mark the tokens of the assistant's turns.

    <|im_start|>user\\nHello<|im_end|>\\n<|im_start|>assistant\\n | Hi!<|im_end|>\\n | <|im_start|>user ...
    prompt, as the template ends it for generation             | trained         | prompt

The trained text of an answer is the part by which the template's text grows over the prompt that generation starts
from. `transformers` renders the template, in its sandbox.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
from jinja2 import TemplateError

from gptj_ft.config.options import Recipe
from gptj_ft.data.chat import ASSISTANT, KEPT, Conversation, is_target, texts_in
from gptj_ft.data.tokenization import NoTokenizer, RowTokenizer, Span, backend_of
from gptj_ft.errors import RowSkipped, UsageError
from gptj_ft.system.plain_text import one_line, shortened

AUTO, MODEL, NONE = "auto", "model", "none"  # values of the option `chat_template` other than a template
TOOLS = "tools"  # field of a row: the functions that the assistant may call
SPLIT = "the chat template changes earlier messages, so each answer is a row of its own"
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_TODAY = re.compile(r"""strftime_now\(\s*(?:'([^'\\]*)'|"([^"\\]*)")\s*\)""")
_REASON_SHOWN = 120


class Rendered(NamedTuple):
    """A text that the template wrote."""

    text: str
    marked: Sequence[Span]  # spans between {% generation %} and {% endgeneration %}


class RenderedChat(NamedTuple):
    """A conversation as the model reads it, up to an answer."""

    messages: Conversation
    text: str
    trained: Sequence[Span]  # spans of the answers, ends of turns included

    @property
    def answer(self) -> str:
        return str(self.messages[-1].get("content") or "").strip()


class EncodedText(NamedTuple):
    """Token ids of a rendered text."""

    ids: list[int]
    offsets: Sequence[Span]  # characters of each token


@dataclass(frozen=True, eq=False)
class ChatTemplate:
    """A model's chat template with everything that it reads besides messages.

    Args:
        source: Jinja, in the dialect of `transformers`.
        options: further variables, such as ``enable_thinking``.
        day: date that the template writes as today's, ISO.
    """

    tokenizer: RowTokenizer
    source: str
    options: Mapping[str, Any]
    day: str

    @classmethod
    def of(cls, recipe: Recipe, tokenizer: RowTokenizer) -> ChatTemplate | None:
        """Return the template of a recipe that `with_model_defaults` has completed; ``None`` if it has none."""
        if not has_template(recipe) or isinstance(tokenizer, NoTokenizer):
            return None
        return cls(tokenizer, recipe.chat_template, recipe.template_options, recipe.template_date)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Any = None, to_answer: bool = False) -> Rendered:
        """Write messages as text.

        Args:
            tools: functions that the assistant may call, as JSON schemas.
            to_answer: end with the beginning of an answer.

        Raises:
            RowSkipped: the template rejects the messages.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        values = {**self.tokenizer.special_tokens_map, **self.options}  # type: ignore[union-attr]
        try:
            texts, marks = render_jinja_template(
                conversations=[list(messages)],
                tools=tools,
                chat_template=self._source,
                return_assistant_tokens_mask=self._has_marks,
                add_generation_prompt=to_answer,
                **values,
            )
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            reason = one_line(getattr(error, "message", None) or str(error))
            raise RowSkipped(f"the chat template rejects it: {shortened(reason, _REASON_SHOWN)}") from error
        return Rendered(texts[0], marks[0] if marks else ())

    def rows_of(self, conversation: Conversation, tools: Any = None) -> list[RenderedChat]:
        """Write a conversation with the spans to train: one text or, if the template changes earlier messages, several.

        Qwen3's template, for example, drops the thoughts of an answer once another question follows it.

        Raises:
            RowSkipped: the template rejects a message, leaves one out, or starts an answer otherwise than generation.
        """
        self._check(conversation, tools)
        rows: list[RenderedChat] = []
        for index, message in enumerate(conversation):
            if not is_target(message) or not index:
                continue
            before = self.render(conversation[:index], tools, to_answer=True).text
            text, marked = self.render(conversation[: index + 1], tools)
            _check_answer(message, before, text)
            earlier = rows[-1] if rows and text.startswith(rows[-1].text) else None
            start = max(len(before), len(earlier.text) if earlier else 0)
            spans = [(max(first, start), end) for first, end in marked if end > start] if self._has_marks else []
            spans = spans or [(start, len(text))]
            if earlier:
                spans, rows = [*earlier.trained, *spans], rows[:-1]
            rows.append(RenderedChat(Conversation(conversation[: index + 1]), text, spans))
        return rows

    def prompt(self, conversation: Conversation, tools: Any = None) -> str:
        """Write a conversation up to the beginning of the next answer.

        Raises:
            RowSkipped: the template rejects a message.
        """
        self._check(conversation, tools)
        return self.render(conversation, tools, to_answer=True).text

    def encode(self, texts: Sequence[str]) -> list[EncodedText]:
        """Tokenize rendered texts, in which special tokens are tokens."""
        backend = backend_of(self.tokenizer)
        backend.encode_special_tokens = False
        try:
            encodings = backend.encode_batch(list(texts), add_special_tokens=False)
        finally:
            backend.encode_special_tokens = self.tokenizer.split_special_tokens
        return [EncodedText(each.ids, each.offsets) for each in encodings]

    def end_of_turn(self) -> str:
        """Return the special token that ends an answer.

        Raises:
            UsageError: the template cannot write a conversation, or its answers have no end.
        """
        try:
            (row,) = self.rows_of(Conversation([{"role": "user", "content": "1"}, {"role": ASSISTANT, "content": "2"}]))
        except RowSkipped as reason:
            raise UsageError(f"chat_template: {reason}; choose --set chat_template=none or @FILE") from reason
        end = row.text[row.text.rindex("2", row.trained[-1][0]) + 1 :]
        tokens = self._special_tokens.findall(end) if self._special_tokens else []
        if not tokens:
            raise UsageError(
                "chat_template: the model's template ends answers without a special token, so that a tuned model would "
                "never stop; choose --set chat_template=none or @FILE"
            )
        return str(tokens[0])

    @cached_property
    def _source(self) -> str:
        """The template, preceded by a macro that replaces `strftime_now`: another day must not change a prompt."""
        if "strftime_now" not in self.source:
            return self.source
        formats = [single or double for single, double in _TODAY.findall(self.source)]
        if len(formats) != self.source.count("strftime_now("):
            raise UsageError(
                "chat_template: it writes the date in a form that is not constant; choose another template"
            )
        day = date.fromisoformat(self.day)
        texts = ", ".join(f"{text!r}: {day.strftime(text)!r}" for text in dict.fromkeys(formats))
        return f"{{% macro strftime_now(format) -%}}{{{{ {{{texts}}}[format] }}}}{{%- endmacro +%}}{self.source}"

    @cached_property
    def _has_marks(self) -> bool:
        return _MARKS.search(self.source) is not None

    @property
    def _special_tokens(self) -> re.Pattern[str] | None:
        return _special_tokens(self.tokenizer)

    def _check(self, conversation: Conversation, tools: Any) -> None:
        """Check for messages that the template ignores, and for texts that would become special tokens."""
        if tools and TOOLS not in self.source:
            raise RowSkipped("the row has tools, and the chat template takes none")
        for message in conversation:
            if (message.get("tool_calls") or message["role"] == "tool") and "tool" not in self.source:
                raise RowSkipped("a message calls a tool, and the chat template takes none")
        texts = [message.get(key) for message in conversation for key in ("content", *KEPT)]
        for where, values in (("a message contains", texts), ("the tools contain", tools)):
            for text in texts_in(values):
                if self._special_tokens and (token := self._special_tokens.search(text)):
                    raise RowSkipped(f"{where} {token[0]}, a special token of the tokenizer")


def has_template(recipe: Recipe) -> bool:
    """Tell whether a chat template writes the prompts of a recipe."""
    return recipe.chat_template not in (AUTO, MODEL, NONE)


def as_conversation(prompt: str, completion: str | None = None) -> Conversation:
    """Return a prompt as the message of a user, and its completion as the answer."""
    messages = [{"role": "user", "content": prompt.strip()}]
    return Conversation(messages + ([] if completion is None else [{"role": ASSISTANT, "content": completion.strip()}]))


def trained_borders(tokens: EncodedText, spans: Sequence[Span]) -> list[int]:
    """Return the borders of alternating token spans: masked, trained, masked, ...; the last one ends the text.

    As in `transformers`, a token across the border of a span belongs to it.
    """
    firsts, ends = np.array(tokens.offsets, np.int64).reshape(-1, 2).T
    is_trained = np.zeros(len(firsts) + 1, np.bool_)
    for first, end in spans:
        inside = np.flatnonzero((ends > first) & (firsts < end))
        if len(inside):
            is_trained[inside[0] : inside[-1] + 1] = True
    return [*np.flatnonzero(np.diff(is_trained, prepend=False)).tolist()]


@lru_cache(maxsize=4)
def _special_tokens(tokenizer: RowTokenizer) -> re.Pattern[str] | None:
    added = backend_of(tokenizer).get_added_tokens_decoder().values()
    names = sorted((token.content for token in added if token.special), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, names))) if names else None


def _check_answer(message: Mapping[str, Any], before: str, text: str) -> None:
    """Check that the template writes an answer, right after the beginning that generation starts from."""
    answer = str(message.get("content") or "").rpartition("</think>")[2].strip()
    if not message.get("tool_calls") and answer not in text[len(before) if text.startswith(before) else 0 :]:
        raise RowSkipped("the chat template leaves out an answer")
    if not text.startswith(before) or len(text) == len(before):
        raise RowSkipped(
            "the chat template starts an answer otherwise than the prompt for it ends; look at template_options, such "
            "as enable_thinking"
        )
