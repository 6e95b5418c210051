"""Print the result and the notes of a command; ask for unknown columns."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from gptj_ft.config.resolve import Resolved
from gptj_ft.errors import UsageError
from gptj_ft.system.plain_text import escape_controls, in_json, shortened

if TYPE_CHECKING:
    from rich.console import Console

    from gptj_ft.cli.terminal.bars import Advance, Doing

_T = TypeVar("_T")


@dataclass(frozen=True)
class Output:
    """Streams of a command: the result goes to stdout, everything else to stderr."""

    as_json: bool = False  # print one JSON object
    is_quiet: bool = False  # print only the result: a path, an answer

    @property
    def notes(self) -> Console:
        """Console for everything but the result; silent with ``--json`` or ``--quiet``."""
        from gptj_ft.cli.terminal.screen import console_for

        return console_for(quiet=self.as_json or self.is_quiet)

    def bar(self, name: str, unit: str = "bytes", then: str = "") -> AbstractContextManager[Advance]:
        """Show progress, see `bars.bar`."""
        from gptj_ft.cli.terminal.bars import bar

        return bar(self.notes, name, unit, then)

    def activity(self, name: str = "loading libraries") -> AbstractContextManager[Doing]:
        """Show an activity without a count, see `bars.activity`."""
        from gptj_ft.cli.terminal.bars import activity

        return activity(self.notes, name)

    def finish(self, facts: Mapping[str, Any], result: str, show: Callable[[Console], None]) -> None:
        """Print the result.

        Args:
            facts: object for ``--json``.
            result: text for ``--quiet``; may be empty.
            show: printer for people.
        """
        from gptj_ft.cli.terminal.screen import console_for

        if self.as_json:
            print_json(facts)
        elif self.is_quiet:
            print_result(result, end="\n" if result else "")
        else:
            show(console_for(stderr=False))


def asking(resolved: Resolved, out: Output, work: Callable[[Resolved], _T]) -> _T:
    """Call ``work``; on a terminal, ask for columns that it cannot find and retry."""
    from gptj_ft.data.columns import UnknownColumn

    while True:
        try:
            return work(resolved)
        except UnknownColumn as error:
            if out.as_json or not error.choices or not (sys.stdin.isatty() and sys.stderr.isatty()):
                raise
            print_note(str(error).partition("\n")[0])
            columns = {**resolved.recipe.map, error.field: _ask_for_column(error.field, error.choices)}
            recipe = resolved.recipe.model_copy(update={"map": columns})
            resolved = replace(resolved, recipe=recipe, origins={**resolved.origins, "map": "asked"})


def _ask_for_column(field: str, columns: Sequence[str]) -> str:
    """Ask for the column of a field until the answer is one of the columns."""
    named = {shortened(column): column for column in columns} | {column: column for column in columns}
    while True:
        question = f"column for '{field}' ({', '.join(map(shortened, columns))}): "
        print(question, end="", file=sys.stderr, flush=True)
        answer = sys.stdin.readline()
        if not answer:  # Ctrl-D
            print(file=sys.stderr)
            raise UsageError(f"no column chosen for '{field}': add --map {field}=COLUMN")
        if answer.strip() in named:
            return named[answer.strip()]
        print(
            f"no column '{shortened(answer.strip())}'; type one of the names above, or Ctrl-D to stop", file=sys.stderr
        )


def print_json(value: Mapping[str, Any]) -> None:
    """Print one JSON object."""
    print(in_json(json.dumps(value, ensure_ascii=False, default=str)))


def print_result(text: str, end: str = "\n") -> None:
    """Print to stdout; escape control characters on a terminal, not in a file or a pipe."""
    print(escape_controls(text) if sys.stdout.isatty() else text, end=end, flush=not end)


def print_note(text: str) -> None:
    """Print to stderr with control characters escaped."""
    print(escape_controls(text), file=sys.stderr)
