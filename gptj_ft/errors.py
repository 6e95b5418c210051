"""Everything that can go wrong because of the world outside the program.

    GptjFtError            exit 1
    ├── UsageError         exit 2   an option, a recipe, a folder that is not what was asked for
    ├── DataError          exit 3   the content of a file: rows, shards
    │   └── RowSkipped              a row that is left out, counted and reported
    ├── ResourceError      exit 4   memory or disk
    ├── NetworkError       exit 5
    │   ├── Unreachable    no answer from the Hub: no connection, or it is down
    │   └── NoSuchRevision
    ├── GateError          exit 6   a score is not what --gate asks for
    ├── NotFinite          exit 1   a loss or a gradient that is no number
    └── Interrupted        exit 130 stopped on request, after a clean save
        └── OutOfTime      exit 7   stopped by --max-time, likewise: to be resumed by whoever set it

A message is one or two lines: what, where (file:line), what to do next. What cannot be the user's doing is an `assert`.
`cli.py` alone turns these into exit codes.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class GptjFtError(Exception):
    """Root of the tree; the message is shown to the user as it is."""

    exit_code = 1


class UsageError(GptjFtError, ValueError):
    """A wrong option, recipe or folder."""

    exit_code = 2


class DataError(GptjFtError, ValueError):
    """A file whose content cannot be used."""

    exit_code = 3


class RowSkipped(DataError):
    """A row that cannot be used; the message is the reason, the same text for every row with this problem."""


class ResourceError(GptjFtError):
    """Not enough memory or disk."""

    exit_code = 4


class NetworkError(GptjFtError):
    """A download that failed."""

    exit_code = 5


class Unreachable(NetworkError):
    """No answer from the Hub: no connection, or it is down. What was fetched before may do."""


class NoSuchRevision(NetworkError):
    """A repository without the branch, tag or commit that was asked for."""


class GateError(GptjFtError):
    """A score that is not what was asked for; all else went well."""

    exit_code = 6


class NotFinite(GptjFtError):
    """A loss or a gradient that is no number, or infinite."""


class Interrupted(GptjFtError):
    """Stopped on request, everything saved."""

    exit_code = 130


class OutOfTime(Interrupted):
    """Stopped before the time of the session was over, everything saved.

    A code of its own, because a batch job resumes what ran out of time and not what somebody stopped.
    """

    exit_code = 7


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` for the nearest known name, or an empty string."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean '{near[0]}'?)" if near else ""
