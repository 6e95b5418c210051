"""Write an Ollama Modelfile (https://docs.ollama.com/modelfile): the file, the template in Go, the stop strings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gptj_ft.checkpoints.gguf.tokenizer import Vocabulary

CHAT_ROLES = ("system", "user", "assistant")
MARK = "\u241eMARK\u241e"  # stands for a message's text while a template is taken apart


@dataclass(frozen=True)
class Turns:
    """Texts around the messages of a chat template that treats each role the same in every turn."""

    around: dict[str, tuple[str, str]]  # role -> text before and after a message
    default: str  # text before a conversation without a system message
    opening: str  # text that starts an answer


def modelfile(target: Path, vocabulary: Vocabulary) -> str:
    """Return the Modelfile of a GGUF file.

    A chat template that is not the same in each turn is left to Ollama, which reads it from the GGUF file.
    """
    lines = [f"FROM ./{target.name}"]
    if vocabulary.template is None:
        lines.append('TEMPLATE """{{ .Prompt }}"""')
    elif (turns := turns_of(vocabulary)) is not None:
        lines.append(f'TEMPLATE """{_in_go(turns)}"""')
    else:
        lines.append("# the chat template is in the GGUF file; it has no plain form in Ollama's language")
    lines += [f'PARAMETER stop "{_quoted(vocabulary.tokens[end])}"' for end in vocabulary.ends]
    return "\n".join(lines) + "\n"


def turns_of(vocabulary: Vocabulary) -> Turns | None:
    """Take a chat template apart by rendering it; ``None`` if it is not made of turns that only depend on the role."""
    try:
        return _turns(vocabulary)
    except (TemplateError, ValueError, TypeError, AttributeError, KeyError):
        return None


def _turns(vocabulary: Vocabulary) -> Turns | None:
    def render(*roles: str, opens: bool = False) -> str:
        return _render(vocabulary, [(role, MARK) for role in roles], opens)

    try:
        before_system, rest = render("system", "user").split(MARK, 1)
        has_system = True
    except (TemplateError, ValueError):
        before_system, rest, has_system = "", "", False
    first, after_user = render("user").split(MARK)
    opening = render("user", opens=True).removeprefix(first + MARK + after_user)
    *_, after_answer = render("user", "assistant").split(MARK)
    between = render("user", "assistant", "user").split(MARK)
    if len(between) != 4:  # a template of prompts, for example, leaves out messages
        return None
    # A user's turn after an answer has no default system message before it: what remains is the role's own text.
    before_user = between[2].removeprefix(after_answer)
    before_answer = between[1].removeprefix(after_user)
    if not first.endswith(before_user):
        return None
    around = {"user": (before_user, after_user), "assistant": (before_answer, after_answer)}
    if has_system:
        after_system = rest.split(MARK)[0]
        if not after_system.endswith(before_user):
            return None
        around["system"] = before_system, after_system.removesuffix(before_user)
    turns = Turns(around, first.removesuffix(before_user), opening)
    probes = [("user", "One "), ("assistant", "two"), ("user", " three"), ("assistant", "Four"), ("user", "five")]
    for probe in [probes, [("system", "Be brief."), *probes]][: 1 + has_system]:
        if _render(vocabulary, probe, True) != _assembled(turns, probe):
            return None
    bos = vocabulary.bos if vocabulary.adds_bos else None
    return turns if bos is None else _without_bos(turns, bos)


def _render(vocabulary: Vocabulary, messages: list[tuple[str, str]], opens: bool) -> str:
    """Render the template as `transformers` does."""
    assert vocabulary.template is not None
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)

    def fail(message: str) -> None:
        raise TemplateError(message)

    environment.globals["raise_exception"] = fail
    names: dict[str, Any] = {"bos_token": vocabulary.bos or "", "eos_token": ""}
    if vocabulary.ends:
        names["eos_token"] = vocabulary.tokens[vocabulary.ends[0]]
    content = [{"role": role, "content": text} for role, text in messages]
    return environment.from_string(vocabulary.template).render(messages=content, add_generation_prompt=opens, **names)


def _assembled(turns: Turns, messages: list[tuple[str, str]]) -> str:
    text = "" if messages[0][0] == "system" else turns.default
    for role, content in messages:
        before, after = turns.around[role]
        text += before + content + after
    return text + turns.opening


def _without_bos(turns: Turns, bos: str) -> Turns:
    """Leave out the BOS that llama.cpp adds itself."""
    around = dict(turns.around)
    if "system" in around:
        around["system"] = around["system"][0].removeprefix(bos), around["system"][1]
    return Turns(around, turns.default.removeprefix(bos), turns.opening)


def _in_go(turns: Turns) -> str:
    """Return the template in Go's language."""
    parts = ["{{- range .Messages }}"]
    for number, role in enumerate(role for role in CHAT_ROLES if role in turns.around):
        before, after = turns.around[role]
        start = "{{- if" if number == 0 else "{{- else if"
        parts.append(f'{start} eq .Role "{role}" }}}}{_text(before)}{{{{ .Content }}}}{_text(after)}')
    parts.append("{{- end }}{{- end }}")
    default = f"{{{{- if not .System }}}}{_text(turns.default)}{{{{- end }}}}" if turns.default else ""
    return f"{default}{''.join(parts)}{_text(turns.opening)}"


def _text(text: str) -> str:
    """Return literal text in Go's template language: an action, so that neighbours cannot trim its white space."""
    return "{{ " + f'"{_quoted(text)}"' + " }}" if text else ""


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")
