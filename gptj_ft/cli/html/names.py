"""Name models, files and commands on pages without revealing local folders."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from gptj_ft.config.options import Recipe
from gptj_ft.config.run_folder import Run
from gptj_ft.system.plain_text import command_line


def subject_of(recipe: Recipe, run: Run) -> str:
    """Return the heading of a run's page: recipe and run."""
    task, name = recipe.recipe.replace("_", " ").replace("-", " "), run.folder.resolve().name
    number = re.sub(r"^run\b[-_ ]*", "", name.removeprefix(f"{recipe.recipe}-"))
    return f"{task[:1].upper()}{task[1:]}" + (f", run\N{NO-BREAK SPACE}{number}" if number else "")


def model_name(path: str) -> str:
    """Return the name of a model folder or a file of outputs; for the ``model`` folder of a run, the run's name."""
    folder = Path(path)
    if folder.name == "model" and folder.parent.name:
        folder = folder.parent
    return folder.name or folder.resolve().name


def place_name(place: str) -> str:
    """Return ``file:line`` without the folder."""
    return place.rpartition("/")[2]


def apart_names(files: Sequence[str]) -> list[str]:
    """Return the names of files, numbered if they are equal."""
    names = [Path(file).name for file in files]
    return [
        f"{name} ({names[: at + 1].count(name)})" if names.count(name) > 1 else name for at, name in enumerate(names)
    ]


def file_names(files: Sequence[str]) -> str:
    """List the first three names of files and the number of others."""
    names = [Path(file).name for file in files]
    more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def portable(words: Sequence[str], names: Mapping[str, str] | None = None) -> str:
    """Return a command of this program with each path reduced to its last part.

    Args:
        words: arguments of the program.
        names: replacements of arguments.
    """
    return command_line(*((names or {}).get(word) or _portable(word) for word in words))


def last_part(word: str) -> str:
    """Return the last part of a path; leave Hub names, ``runs/NAME`` and templates unchanged."""
    path = Path(word)
    if "/" not in word or "{{" in word or word.startswith("hub:") or path.parent == Path("runs"):
        return word
    looks_so = word[0] in "/~." or path.suffix[1:].isalpha() or (word.count("/") > 1 and " " not in word)
    return model_name(word) if looks_so or path.exists() else word


def _portable(word: str) -> str:
    option, equals, value = word.partition("=")
    return f"{option}={last_part(value)}" if equals else last_part(word)
