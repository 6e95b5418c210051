"""Lay out panels, tables and next commands for terminals, logs and screen readers.

Colours and frames carry no meaning. Text is as wide as the terminal, at most `WIDEST`. Paths and commands are never
broken, so that they can be copied.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from gptj_ft.system.plain_text import escape_controls

WIDEST = 100
GAP = "  "
NO_BREAK = "\N{NO-BREAK SPACE}"


class PlainConsole(Console):
    """Console that escapes control characters in texts."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=escape_controls(segment.text))


def console_for(stderr: bool = True, quiet: bool = False) -> Console:
    """Return a console for plain text: no markup, and the terminal wraps long lines."""
    return PlainConsole(stderr=stderr, quiet=quiet, soft_wrap=True, highlight=False, markup=False, emoji=False)


def is_live(console: Console) -> bool:
    """Tell whether lines can be redrawn: not in a log and not on a dumb terminal."""
    return console.is_terminal and not console.is_dumb_terminal


def width_of(console: Console) -> int:
    """Return the width of text in columns."""
    return min(console.width, WIDEST)


def whole(command: str) -> str:
    """Protect a command or a path from being wrapped."""
    return command.replace(" ", NO_BREAK)


def wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """Wrap a text; ``indent`` precedes the second and later lines.

    Breaks words only if they are longer than a line, and never a path or a `whole` command.
    """
    room, lines = max(width, 20), []
    for line in text.splitlines() or [""]:
        line = " ".join(piece for word in line.split(" ") for piece in _pieces(word, room - len(indent)))
        lines += textwrap.wrap(
            line, room, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        ) or [""]
    return [line.replace(NO_BREAK, " ") for line in lines]


def _pieces(word: str, room: int) -> list[str]:
    if len(word) <= room or "/" in word or NO_BREAK in word:
        return [word]
    return [word[start : start + room] for start in range(0, len(word), room)]


def say(console: Console, text: str, indent: str = "") -> None:
    """Print a wrapped text."""
    console.print(Text("\n".join(wrapped(text, width_of(console), indent))), soft_wrap=True)


def panel(console: Console, title: str, rows: Iterable[tuple[str, str]]) -> None:
    """Print a title, then a line for each pair of name and text."""
    named = list(rows)
    column = max((len(name) for name, _ in named), default=0)
    text = Text(f"\n{title}\n", style="bold") if title else Text()
    room = width_of(console) - column - 2 * len(GAP)
    for name, value in named:
        head = f"{GAP}{name:{column}}{GAP}"
        for number, line in enumerate(wrapped(value, room)):
            text.append(head if number == 0 else " " * len(head), style="cyan" if number == 0 else "")
            text.append(line + "\n", style="not bold")
    console.print(text, end="", soft_wrap=True)


def next_steps(console: Console, *commands: str) -> None:
    """Print suggested commands, one per line."""
    for number, command in enumerate(commands):
        console.print(Text(f"{'next:' if number == 0 else '     '} {command}"), soft_wrap=True)


def table(console: Console, title: str, rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> None:
    """Print a table; on a terminal too narrow for it, print each row as a panel.

    Args:
        title: title; may be empty.
        rows: rows of equal length; the first one holds the column names.
        right: columns to align right.
    """
    if title:
        console.print(Text(f"\n{title}", style="bold"), soft_wrap=True)
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    if console.is_terminal and sum(widths) + len(GAP) * (len(widths) - 1) > console.width:
        names, *records = rows
        for record in records:
            shown = [pair for pair in zip(names[1:], record[1:], strict=True) if pair[1]]
            panel(console, record[0], shown)
        return
    for number, row in enumerate(rows):
        cells = []
        for index, (cell, width) in enumerate(zip(row, widths, strict=True)):
            space = " " * (width - cell_len(cell))
            cells.append(space + cell if index in right else cell + space)
        console.print(Text(GAP.join(cells).rstrip(), style="cyan" if number == 0 else ""), soft_wrap=True)


def time_after(seconds: float) -> str:
    """Return the time of day after some seconds, with the date unless it is today."""
    now = datetime.now()
    then = now + timedelta(seconds=seconds)
    return f"{then:%H:%M}" if then.date() == now.date() else f"{then:%a %d %b, %H:%M}"
