"""Chat with a model: earlier messages are part of the prompt as far as the context allows."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gptj_ft.config.options import Recipe
from gptj_ft.data.chat import ASSISTANT, MESSAGES, SYSTEM, Conversation, is_chat
from gptj_ft.errors import DataError, UsageError
from gptj_ft.generation.generator import Generator

HELP = "/clear forgets what was said, /exit (or Ctrl-D) ends, Ctrl-C stops an answer"
_STOPPED = "(stopped; that question is forgotten)"
FORGOTTEN = "(the oldest messages no longer fit, and are left out)"
Say = Callable[[str], object]


def check_is_chat(recipe: Recipe) -> None:
    """Check that a model's template takes conversations.

    Raises:
        UsageError: a model tuned for single texts.
    """
    if not is_chat(recipe):
        single = f"was tuned for single texts ({recipe.recipe}), not for conversations"
        what = single if recipe.prompt else "has no template of conversations"
        raise UsageError(f"--chat: this model {what}; add --recipe chat to try it all the same")


def run_chat(
    generator: Generator,
    said: Iterable[str],
    system: str | None,
    show: Callable[[str], object],
    note: Callable[[str], object],
) -> None:
    """Run a conversation until the messages end, or one is ``/exit``.

    Args:
        generator: model whose template takes conversations.
        said: messages of the user, asked for one by one.
        system: system message; kept when the oldest messages are dropped.
        show: callback for pieces of an answer as they are written, and for a line's end after each answer.
        note: callback for everything but answers.
    """
    start = [{"role": SYSTEM, "content": system}] if system else []
    messages = list(start)
    for text in said:
        command = text.strip().lower()
        if command in ("/exit", "/quit"):
            return
        if command == "/clear":
            messages = list(start)
        elif command.startswith("/"):
            note(HELP)
        elif command:
            asked = {"role": "user", "content": text.strip()}
            if reply := _answer(generator, [*messages, asked], show, note):
                messages += [asked, {"role": ASSISTANT, "content": reply}]


def _answer(generator: Generator, messages: list[dict[str, str]], show: Say, note: Say) -> str:
    """Generate the answer; empty if there is none, and the conversation continues without the question."""
    try:
        answer = generator.write({MESSAGES: Conversation(messages)}, show=show)
    except KeyboardInterrupt:
        show("\n")
        note(_STOPPED)
        return ""
    except DataError as error:
        note(f"({error})")
        return ""
    show("\n")
    if answer.was_cut:
        note(FORGOTTEN)
    return answer.texts[0]
