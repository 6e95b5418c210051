"""Models, files and commands as a page that is handed on names them: without the folders of whoever made it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from gptj_ft.system.plain_text import command_line


def model_name(path: str) -> str:
    """Return the name of a model folder, of a run by its ``model`` folder, or of a file of outputs."""
    given = Path(path)
    if given.name == "model" and given.parent.name:
        given = given.parent
    return given.name or given.resolve().name


def place_name(place: str) -> str:
    """Return ``file:line`` without the folder of the file."""
    return place.rpartition("/")[2]


def apart_names(files: Sequence[str]) -> list[str]:
    """Return names of files, with a number where several have the same."""
    names = [Path(file).name for file in files]
    return [
        f"{name} ({names[: at + 1].count(name)})" if names.count(name) > 1 else name for at, name in enumerate(names)
    ]


def file_names(files: Sequence[str], most: int = 3) -> str:
    """Return names of files as a sentence has them, the first few and how many more."""
    names = [Path(file).name for file in files]
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def portable(words: Sequence[str], names: Mapping[str, str] | None = None) -> str:
    """Return a command of this program that holds of each path its last part only.

    Args:
        words: words after the program's name.
        names: replacements for some of them.
    """
    return command_line(*((names or {}).get(word) or _portable(word) for word in words))


def last_part(word: str) -> str:
    """Return the last part of a path; names on the Hub, folders of runs and templates stay as they are."""
    path = Path(word)
    if "/" not in word or "{{" in word or word.startswith("hub:") or path.parent == Path("runs"):
        return word
    looks_so = word[0] in "/~." or path.suffix[1:].isalpha() or (word.count("/") > 1 and " " not in word)
    return model_name(word) if looks_so or path.exists() else word


def _portable(word: str) -> str:
    option, equals, value = word.partition("=")
    return f"{option}={last_part(value)}" if equals else last_part(word)
