"""Chat with a model; the prompt contains as many earlier messages as fit into the context."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gptj_ft.config.options import Recipe
from gptj_ft.data.chat import ASSISTANT, MESSAGES, SYSTEM, Conversation, is_chat
from gptj_ft.errors import DataError, UsageError
from gptj_ft.generation.generator import Generator

HELP = "/clear starts a new conversation, /exit (or Ctrl-D) ends the chat, Ctrl-C stops an answer"
_STOPPED = "(stopped; the question is dropped from the conversation)"
FORGOTTEN = "(the oldest messages no longer fit, and are left out)"
Show = Callable[[str], object]


def check_is_chat(recipe: Recipe) -> None:
    """Check that a model's template takes conversations."""
    if not is_chat(recipe):
        single = f"was tuned for single texts ({recipe.recipe}), not for conversations"
        problem = single if recipe.prompt else "has no template of conversations"
        raise UsageError(f"--chat: this model {problem}; add --recipe chat to try it anyway")


def run_chat(
    generator: Generator,
    inputs: Iterable[str],
    system: str | None,
    show: Show,
    note: Show,
) -> None:
    """Run a conversation until the user's messages end, or one is ``/exit``.

    Args:
        generator: model with a template for conversations.
        inputs: messages of the user, read one by one.
        system: system message; kept when the oldest messages are dropped.
        show: receiver of the pieces of an answer, and of a newline after each answer.
        note: receiver of everything else.
    """
    start = [{"role": SYSTEM, "content": system}] if system else []
    messages = list(start)
    for text in inputs:
        command = text.strip().lower()
        if command in ("/exit", "/quit"):
            return
        if command == "/clear":
            messages = list(start)
        elif command.startswith("/"):
            note(HELP)
        elif command:
            question = {"role": "user", "content": text.strip()}
            if reply := _answer(generator, [*messages, question], show, note):
                messages += [question, {"role": ASSISTANT, "content": reply}]


def _answer(generator: Generator, messages: list[dict[str, str]], show: Show, note: Show) -> str:
    """Generate the answer; empty if it was stopped or failed: the conversation then continues without the question."""
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
