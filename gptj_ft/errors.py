"""Define the errors that users can cause or meet, with their exit codes.

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
`cli/app.py` alone turns these into exit codes.
"""

from __future__ import annotations

import difflib
import errno
import os
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


# What the system may answer for a reason that lies outside the program: what kind of error that is, and what to do.
_REASONS: dict[int, tuple[type[GptjFtError], str]] = {
    errno.EACCES: (UsageError, "change its permissions, or name another place (GPTJ_FT_HOME, --output)"),
    errno.EPERM: (UsageError, "change its permissions, or name another place (GPTJ_FT_HOME, --output)"),
    errno.EROFS: (ResourceError, "make its file system writable, or copy it to one that is"),
    errno.ENAMETOOLONG: (UsageError, "name a shorter one"),
    errno.ENOTDIR: (UsageError, "a folder on the way to it is a file: name another, or move that away"),
    errno.EISDIR: (UsageError, "it should be a file: name another, or move that away"),
    errno.ELOOP: (UsageError, "links lead in a circle there: name the file itself"),
    errno.ENOENT: (UsageError, "it was there, or should have been: put it back, or begin again"),
    errno.EEXIST: (UsageError, "name another, or move it away"),
    errno.ENOTEMPTY: (UsageError, "name another, or move it away"),
    errno.EBUSY: (ResourceError, "something else uses it: wait, and repeat"),
    errno.EMFILE: (ResourceError, "too many files are open: raise the limit (`ulimit -n`)"),
    errno.EIO: (ResourceError, "the disk fails: check it, and use a copy"),
    errno.ESTALE: (ResourceError, "a network file system has lost it: mount that again, and repeat"),
}


def in_words(error: OSError) -> GptjFtError | None:
    """Return an error of the system as a line for the user: what, where, what to do; ``None`` if it needs a traceback.

    Disks and quotas that are full are not among them: what is saved then has to be said, too.
    """
    if error.errno not in _REASONS or error.filename is None:
        return None
    kind, advice = _REASONS[error.errno]
    names = " -> ".join(
        os.fsdecode(each) for each in (error.filename, error.filename2) if isinstance(each, str | bytes)
    )
    return kind(f"{names}: {error.strerror}; {advice}")


def listed(names: Iterable[str], most: int = 20) -> str:
    """Return names for a message: the first of them, and how many more there are; ``none`` without any."""
    every = list(names)
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "") or "none"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` for the nearest known name, or an empty string."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean '{near[0]}'?)" if near else ""
