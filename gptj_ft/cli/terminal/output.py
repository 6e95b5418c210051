"""Print the results and the notes of a command; ask for columns that are not clear."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
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
    """Streams of a command: its result goes to stdout, all else to stderr.

    Attributes:
        as_json: one JSON object instead of what people read.
        is_quiet: the result alone: a path, an answer.
    """

    as_json: bool = False
    is_quiet: bool = False

    @property
    def notes(self) -> Console:
        """Console of everything but the result; silent where the result alone is asked for."""
        from gptj_ft.cli.terminal.screen import console_for

        return console_for(quiet=self.as_json or self.is_quiet)

    def bar(self, what: str, unit: str = "bytes", then: str = "") -> AbstractContextManager[Advance]:
        """Show how far something is, see `bars.bar`."""
        from gptj_ft.cli.terminal.bars import bar

        return bar(self.notes, what, unit, then)

    def activity(self, what: str = "loading libraries") -> AbstractContextManager[Doing]:
        """Show what is being done where nothing can be counted, see `bars.activity`."""
        from gptj_ft.cli.terminal.bars import activity

        return activity(self.notes, what)

    def finish(self, facts: Mapping[str, Any], result: str, show: Callable[[Console], None]) -> None:
        """Print the result.

        Args:
            facts: object for ``--json``.
            result: result in a line or a few; empty where only the exit code tells.
            show: printer of the result for people.
        """
        from gptj_ft.cli.terminal.screen import console_for

        if self.as_json:
            print_json(facts)
        elif self.is_quiet:
            print_result(result, end="\n" if result else "")
        else:
            show(console_for(stderr=False))


def asking(resolved: Resolved, out: Output, work: Callable[[Resolved], _T]) -> _T:
    """Do what needs the columns of the data; on a terminal, ask for those that are not clear."""
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
            resolved = Resolved(recipe, {**resolved.origins, "map": "asked"})


def _ask_for_column(field: str, columns: Sequence[str]) -> str:
    """Ask for the column of a field until one is named that there is.

    Raises:
        UsageError: the input ends.
    """
    named = {shortened(column): column for column in columns} | {column: column for column in columns}
    while True:
        question = f"column for '{field}' ({', '.join(map(shortened, columns))}): "
        print(question, end="", file=sys.stderr, flush=True)
        answer = sys.stdin.readline()
        if not answer:  # Ctrl-D
            print(file=sys.stderr)
            raise UsageError(f"no column was named for '{field}': type one, or add --map {field}=COLUMN")
        if answer.strip() in named:
            return named[answer.strip()]
        print(f"'{shortened(answer.strip())}' is none of these columns; Ctrl-D stops", file=sys.stderr)


def print_json(value: Mapping[str, Any]) -> None:
    """Print one JSON object."""
    print(in_json(json.dumps(value, ensure_ascii=False, default=str)))


def print_result(text: str, end: str = "\n") -> None:
    """Print to stdout: to a file or a pipe as it is, to a terminal with control characters written out."""
    print(escape_controls(text) if sys.stdout.isatty() else text, end=end, flush=not end)


def print_note(text: str) -> None:
    """Print to stderr, control characters written out."""
    print(escape_controls(text), file=sys.stderr)
