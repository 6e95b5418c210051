"""Read conversations, mask their questions, and export a recipe's prompt as a chat template.

    prompt of the messages before an answer | answer | the template's text before the next answer | answer | ...

Every answer of the assistant is a target, all in one row; the rest is input.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gptj_ft.config.options import Recipe
from gptj_ft.data.sandbox import bounded_environment, compile_template
from gptj_ft.data.template import JINJA, fields_of, render, stripped, stripped_fields
from gptj_ft.errors import RowSkipped, UsageError
from gptj_ft.system.plain_text import shortened

MESSAGES, REPLY = "messages", "reply"  # fields of a chat's prompt and completion
ASSISTANT, SYSTEM = "assistant", "system"
ROLES = {  # names of ShareGPT and others -> names in templates
    "system": SYSTEM, "developer": SYSTEM,
    "user": "user", "human": "user", "prompter": "user", "customer": "user",
    "assistant": ASSISTANT, "gpt": ASSISTANT, "bot": ASSISTANT, "chatbot": ASSISTANT, "model": ASSISTANT,
    "agent": ASSISTANT,
}  # fmt: skip


class Conversation(tuple[Mapping[str, Any], ...]):
    """Messages, each with ``role`` and ``content``; ``str`` joins their contents.

    For a model's chat template also with thoughts and calls of tools, see `KEPT`.
    """

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(str(message.get("content") or "") for message in self)


# Keys of messages that chat templates read, besides role and content.
KEPT = ("reasoning_content", "reasoning", "thinking", "tool_calls", "tool_call_id", "name")
WEIGHT = "weight"  # of an answer in OpenAI's files: 0 reads it, but does not train it


def texts_in(value: Any) -> Iterator[str]:
    """Yield every text nested in a JSON value, names in objects included, in any order."""
    pending = [value]
    while pending:
        each = pending.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, Mapping):
            pending += (*each, *each.values())
        elif isinstance(each, list | tuple):
            pending += each


def is_chat(recipe: Recipe) -> bool:
    """Tell whether the recipe's rows are conversations."""
    return MESSAGES in fields_of(recipe.prompt)


def read_conversation(cell: Any, for_template: bool = False) -> Conversation:
    """Return the messages of a cell: ``[{"role", "content"}]``, ShareGPT's ``[{"from", "value"}]``, or either as JSON.

    Args:
        for_template: keep texts unstripped, thoughts, and calls of tools, for a model's chat template.

    Raises:
        RowSkipped: the cell has another form, or a message is not text.
    """
    if isinstance(cell, str):
        try:
            cell = json.loads(cell)
        except ValueError as error:
            raise RowSkipped("the messages are a text, not a list") from error
    if isinstance(cell, dict) and isinstance(cell.get(MESSAGES), list):
        cell = cell[MESSAGES]
    if not isinstance(cell, list):
        raise RowSkipped("the messages are not a list")
    return Conversation(_message(each, for_template) for each in cell)


def _message(value: Any, for_template: bool) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RowSkipped("a message is not an object with role and content")
    role = value.get("role", value.get("from"))
    content = value.get("content", value.get("value", value.get("text")))
    roles = {**ROLES, "tool": "tool"} if for_template else ROLES
    if not isinstance(role, str) or role.strip().casefold() not in roles:
        raise RowSkipped(f"a message has the role '{shortened(str(role))}', not system, user or assistant")
    role = roles[role.strip().casefold()]
    if isinstance(content, list):  # OpenAI's multi-part content
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise RowSkipped("a message has parts other than text")
        content = "\n".join(part["text"] for part in content)
    kept = {key: value[key] for key in KEPT if value.get(key)} if for_template else {}
    if role == ASSISTANT:
        kept |= _weight(value.get(WEIGHT))
    if kept.get("tool_calls") and not content:
        return {"role": role, **kept}
    if not isinstance(content, str) or not content.strip():
        raise RowSkipped("a message is empty")
    return {"role": role, "content": content if for_template else content.strip(), **kept}


def _weight(value: Any) -> dict[str, int]:
    if not isinstance(value, int | float | None) or value not in (None, 0, 1):
        raise RowSkipped(f"a message has the weight {shortened(repr(value))}, neither 0 nor 1")
    return {} if value is None or value == 1 else {WEIGHT: 0}


def is_target(message: Mapping[str, Any]) -> bool:
    """Tell whether a message is an answer to train."""
    return message["role"] == ASSISTANT and message.get(WEIGHT) != 0


def start_conversation(text: str) -> Conversation:
    """Return a conversation that begins with a user's text."""
    return Conversation([{"role": "user", "content": text.strip()}])


def drop_trailing_messages(conversation: Conversation) -> Conversation:
    """Drop the messages after the last answer to train.

    Raises:
        RowSkipped: there is no such answer, or nothing before it.
    """
    answers = [index for index, message in enumerate(conversation) if is_target(message)]
    if not answers:
        is_silent = any(message["role"] == ASSISTANT for message in conversation)
        raise RowSkipped(
            "each message of the assistant has the weight 0" if is_silent else "no message of the assistant"
        )
    if answers[-1] == 0:
        raise RowSkipped("nothing comes before the assistant's message")
    return Conversation(conversation[: answers[-1] + 1])


def render_parts(recipe: Recipe, conversation: Conversation) -> list[tuple[str, bool]]:
    """Render a conversation that ends with an answer: texts, and whether each is a target."""
    done, parts = "", list[tuple[str, bool]]()
    for index, message in enumerate(conversation):
        # A conversation that begins with an answer has no prompt for it: that answer is only input.
        if not is_target(message) or not index:
            continue
        before = render(recipe.prompt, {MESSAGES: conversation[:index]})
        # Otherwise earlier tokens would depend on later messages, and answers be trained after another prompt than at
        # inference.
        if not before.startswith(done):
            raise UsageError(
                "prompt: the template must only append text for further messages, and write answers as the completion "
                f"does; it changes earlier text before message {index + 1}"
            )
        answer = render(recipe.completion, {REPLY: message["content"], MESSAGES: conversation[:index]})
        parts += [(before[len(done) :], False), (answer, True)]
        done = before + answer
    return parts


def opening_of(conversation: Conversation) -> Conversation:
    """Return the messages before the first answer to a user; all of them if there is none."""
    asked = next((index for index, message in enumerate(conversation) if message["role"] == "user"), 0)
    ends = (index for index, message in enumerate(conversation) if index > asked and message["role"] == ASSISTANT)
    return Conversation(conversation[: next(ends, None)])


def drop_oldest(conversation: Conversation) -> Iterable[Conversation]:
    """Yield the conversation without its oldest messages, one less each time.

    The system message stays; the other messages begin with one of the user.
    """
    system = [message for message in conversation if message["role"] == SYSTEM]
    others = [message for message in conversation if message["role"] != SYSTEM]
    for start in range(1, len(others)):
        if others[start]["role"] == "user":
            yield Conversation([*system, *others[start:]])


# As in https://github.com/huggingface/transformers/blob/main/src/transformers/utils/chat_template_utils.py
_TRANSFORMERS = bounded_environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
# Normalizes messages as `read_conversation` does: strips contents and renames the developer role.
_MESSAGES = (
    "{%- set gptj_ft = namespace(messages=[]) -%}{%- for message in messages -%}"
    "{%- set role = 'system' if message.role == 'developer' else message.role -%}"
    "{%- set one = [{'role': role, 'content': message.content | trim}] -%}"
    "{%- set gptj_ft.messages = gptj_ft.messages + one -%}{%- endfor -%}{%- set messages = gptj_ft.messages +%}"
)
_LAST = "{%%- set %s = (messages | selectattr('role', 'equalto', 'user') | list)[-1].content%s +%%}"
_USER = {"role": "user", "content": "  Does {{ this }} work?\n\n  It {% should %}. "}
_SAMPLES = (
    [_USER],
    [_USER, {"role": ASSISTANT, "content": "It does.\n"}, {"role": "user", "content": "Good"}],
    [{"role": SYSTEM, "content": "Be brief. "}, _USER],
)


def chat_template(recipe: Recipe) -> str | None:
    """Return a chat template for `transformers` that renders messages exactly as the recipe's prompt does.

    ``None`` if the prompt does not have exactly one field, or renders differently in the environment of `transformers`.
    """
    fields = fields_of(recipe.prompt)
    if len(fields) != 1:
        return None
    # Jinja drops a template's last line break; the empty expression after it prevents that.
    trim = " | trim" if fields[0] in stripped_fields(recipe.prompt, recipe.completion) else ""
    begin = _MESSAGES if is_chat(recipe) else _LAST % (fields[0], trim)
    template = begin + _portable(recipe.prompt) + "{{ '' }}"
    return template if _is_same(recipe, template) else None


def _portable(source: str) -> str:
    """Remove a template's comments, and mark its blocks so that an environment with trim_blocks keeps their white
    space.
    """
    text = ""
    for _, kind, value in JINJA.lex(source):
        if kind == "block_begin":
            text += value if value[2:] else value + "+"
        elif kind == "block_end":
            text += value if value[0] in "+-" else "+" + value
        elif not kind.startswith("comment"):
            text += value
    return text


def _is_same(recipe: Recipe, template: str) -> bool:
    compared = 0
    for sample in _SAMPLES:
        values = (
            {MESSAGES: read_conversation(sample)}
            if is_chat(recipe)
            else stripped(recipe, {fields_of(recipe.prompt)[0]: Conversation(sample)[-1]["content"]})
        )
        try:
            expected = render(recipe.prompt, values)
        except UsageError:  # e.g. a template that rejects system messages
            continue
        try:
            text = compile_template(_TRANSFORMERS, template).render({MESSAGES: sample, "add_generation_prompt": True})
        except UsageError:
            return False
        if text != expected:
            return False
        compared += 1
    return compared > 0
