"""What every command does on the terminal: ask, fetch what is named, show a bar, print."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from gptj_ft.recipe import Resolved

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")


def fetched(resolved: Resolved, offline: bool, as_json: bool) -> Resolved:
    """Fetch the rows that a recipe names on the Hub, if it does; in the recipe they are known by their commit then."""
    named = {key: getattr(resolved.recipe, key) for key in ("data", "val_data")}
    pinned = {key: fetched_rows(data, offline, as_json) for key, data in named.items() if data is not None}
    return replace(resolved, recipe=resolved.recipe.model_copy(update=pinned))


def fetched_rows(data: str, offline: bool, as_json: bool) -> str:
    """Return what names the rows on this machine: what the user wrote, but of what is on the Hub, fetched now."""
    from gptj_ft.data.hub_rows import fetch, is_reference

    if not is_reference(data):
        return data
    with bar("downloading", not as_json) as advance:
        return fetch(data, offline, lambda text: console_for().print(text, highlight=False, markup=False), advance)


def asking(resolved: Resolved, as_json: bool, work: Callable[[Resolved], T]) -> T:
    """Do what needs the columns of the data; on a terminal, ask for those that are not clear."""
    from gptj_ft.data.fields import UnknownColumn

    while True:
        try:
            return work(resolved)
        except UnknownColumn as error:
            if as_json or not error.choices or not (sys.stdin.isatty() and sys.stderr.isatty()):
                raise
            print(str(error).partition("\n")[0], file=sys.stderr)
            question = f"column for '{error.field}' ({', '.join(error.choices)})"
            while (column := typer.prompt(question, err=True).strip()) not in error.choices:
                pass
            columns = {**resolved.recipe.map, error.field: column}
            recipe = resolved.recipe.model_copy(update={"map": columns})
            resolved = Resolved(recipe, {**resolved.origins, "map": "asked"})


def as_tuple(assignments: list[str] | None) -> tuple[str, ...]:
    """Return what --set was given, however often."""
    return tuple(assignments or ())


def console_for(stderr: bool = True, quiet: bool = False) -> Console:
    """Return a terminal for text; long lines are left to the terminal to wrap."""
    from rich.console import Console

    return Console(stderr=stderr, quiet=quiet, soft_wrap=True)


@contextmanager
def bar(what: str, visible: bool) -> Iterator[Callable[[int, int | None], None]]:
    """Show a bar on a terminal; yield what moves it: (done, total if it is known)."""
    from rich.progress import Progress

    console = console_for()
    with Progress(console=console, transient=True, disable=not (visible and console.is_terminal)) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def print_json(value: Mapping[str, Any]) -> None:
    """Print one JSON object."""
    print(json.dumps(value, ensure_ascii=False, default=str))
