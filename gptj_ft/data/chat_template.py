"""A recipe's prompt as a chat template of `transformers`, so that servers that speak of messages can use the model.

A prompt of messages takes them all. One with a single field takes the last message of the user, for nothing else was
trained. One with several fields is no conversation, and gets none.
"""

from __future__ import annotations

from gptj_ft.config.options import Recipe
from gptj_ft.data.chat import ASSISTANT, MESSAGES, SYSTEM, Conversation, is_chat, read_conversation
from gptj_ft.data.columns import stripped, stripped_fields
from gptj_ft.data.jinja_template import ENVIRONMENT, fields_of, render
from gptj_ft.data.sandbox import bounded_environment, compiled
from gptj_ft.errors import UsageError

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
    """Return a chat template that makes of messages what the recipe's prompt makes of them, to the last character.

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
    for _, kind, value in ENVIRONMENT.lex(source):
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
            theirs = compiled(_THEIRS, template).render({MESSAGES: sample, "add_generation_prompt": True})
        except UsageError:
            return False
        if ours != theirs:
            return False
        compared += 1
    return compared > 0
