"""Read conversations, mask their questions, and export a recipe's prompt as a chat template.

    prompt of the messages before an answer | answer | what the template puts before the next one | answer | ...

Every answer of the assistant is trained on, in one row; the rest is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from gptj_ft.config.options import Recipe
from gptj_ft.data.sandbox import bounded_environment, compile_template
from gptj_ft.data.template import JINJA, fields_of, render, stripped, stripped_fields
from gptj_ft.errors import RowSkipped, UsageError
from gptj_ft.system.plain_text import shortened

MESSAGES, REPLY = "messages", "reply"  # the field of a prompt, and what its completion is made of
ASSISTANT, SYSTEM = "assistant", "system"
# ShareGPT's names and others' -> those of the template.
ROLES = {
    "system": SYSTEM, "developer": SYSTEM,
    "user": "user", "human": "user", "prompter": "user", "customer": "user",
    "assistant": ASSISTANT, "gpt": ASSISTANT, "bot": ASSISTANT, "chatbot": ASSISTANT, "model": ASSISTANT,
    "agent": ASSISTANT,
}  # fmt: skip


class Conversation(tuple[Mapping[str, str], ...]):
    """Messages, each with ``role`` (system, user, assistant) and ``content``; as text, their contents."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(message["content"] for message in self)


def is_chat(recipe: Recipe) -> bool:
    """Tell whether the recipe's rows are conversations."""
    return MESSAGES in fields_of(recipe.prompt)


def read_conversation(cell: Any) -> Conversation:
    """Return the messages of a cell: ``[{"role", "content"}]``, ShareGPT's ``[{"from", "value"}]``, or either as JSON.

    Raises:
        RowSkipped: it is none, or has a message that is no text.
    """
    if isinstance(cell, str):
        try:
            cell = json.loads(cell)
        except ValueError as error:
            raise RowSkipped("the messages are a text, not a list") from error
    if isinstance(cell, dict) and isinstance(cell.get(MESSAGES), list):
        cell = cell[MESSAGES]
    if not isinstance(cell, list):
        raise RowSkipped("the messages are no list")
    return Conversation(_message(each) for each in cell)


def _message(value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise RowSkipped("a message is no object with role and content")
    role = value.get("role", value.get("from"))
    content = value.get("content", value.get("value", value.get("text")))
    if not isinstance(role, str) or role.strip().casefold() not in ROLES:
        raise RowSkipped(f"a message has the role '{shortened(str(role))}', not system, user or assistant")
    if isinstance(content, list):  # parts of several kinds
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise RowSkipped("a message is not text alone")
        content = "\n".join(part["text"] for part in content)
    if not isinstance(content, str) or not content.strip():
        raise RowSkipped("a message is empty")
    return {"role": ROLES[role.strip().casefold()], "content": content.strip()}


def asked(text: str) -> Conversation:
    """Return a conversation that begins with a user's text."""
    return Conversation([{"role": "user", "content": text.strip()}])


def up_to_the_last_answer(conversation: Conversation) -> Conversation:
    """Drop the messages after the last answer.

    Raises:
        RowSkipped: there is none, or nothing before it.
    """
    answers = [index for index, message in enumerate(conversation) if message["role"] == ASSISTANT]
    if not answers:
        raise RowSkipped("no message of the assistant")
    if answers[-1] == 0:
        raise RowSkipped("nothing comes before the assistant's message")
    return Conversation(conversation[: answers[-1] + 1])


def render_parts(recipe: Recipe, conversation: Conversation) -> list[tuple[str, bool]]:
    """Render a conversation that ends with an answer: texts, each with whether it is trained on.

    Raises:
        UsageError: what the template makes of the first messages changes when others follow.
    """
    done, parts = "", list[tuple[str, bool]]()
    for index, message in enumerate(conversation):
        if message["role"] != ASSISTANT or not index:
            continue
        before = render(recipe.prompt, {MESSAGES: conversation[:index]})
        if not before.startswith(done):
            raise UsageError(
                "prompt: after an answer it must go on from what it was before, with the answer as the completion "
                f"writes it; it does not before message {index + 1}"
            )
        answer = render(recipe.completion, {REPLY: message["content"], MESSAGES: conversation[:index]})
        parts += [(before[len(done) :], False), (answer, True)]
        done = before + answer
    return parts


def shorter(conversation: Conversation) -> Iterable[Conversation]:
    """Yield the conversation without its oldest messages, one less each time; the system message stays.

    Each begins with a message of the user, and has all from there on.
    """
    system = [message for message in conversation if message["role"] == SYSTEM]
    others = [message for message in conversation if message["role"] != SYSTEM]
    for start in range(1, len(others)):
        if others[start]["role"] == "user":
            yield Conversation([*system, *others[start:]])


# As transformers makes it, https://github.com/huggingface/transformers/blob/main/src/transformers/utils/chat_template_utils.py
_THEIRS = bounded_environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
# What `data.chat` makes of messages: no white space around them, and one name for who sets the scene.
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
    """Return a chat template of `transformers` that renders messages as the recipe's prompt does, to the character.

    ``None``: the prompt has several fields or none, or comes out otherwise in the environment of `transformers`.
    """
    fields = fields_of(recipe.prompt)
    if len(fields) != 1:
        return None
    # The empty text at the end keeps a last line break, which that environment would take away.
    trim = " | trim" if fields[0] in stripped_fields(recipe.prompt, recipe.completion) else ""
    begin = _MESSAGES if is_chat(recipe) else _LAST % (fields[0], trim)
    template = begin + _portable(recipe.prompt) + "{{ '' }}"
    return template if _is_same(recipe, template) else None


def _portable(source: str) -> str:
    """Return a template that keeps its white space where blocks are trimmed by default; without its comments."""
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
            ours = render(recipe.prompt, values)
        except UsageError:  # a template may refuse who sets the scene
            continue
        try:
            theirs = compile_template(_THEIRS, template).render({MESSAGES: sample, "add_generation_prompt": True})
        except UsageError:
            return False
        if ours != theirs:
            return False
        compared += 1
    return compared > 0
