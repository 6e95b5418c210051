"""Define the errors that users can cause or meet, with their exit codes.

    GptjFtError            exit 1
    ├── UsageError         exit 2   an invalid option, recipe or folder
    ├── DataError          exit 3   the content of a file: rows, shards
    │   └── RowSkipped              a row that is left out and reported
    ├── ResourceError      exit 4   memory or disk
    ├── NetworkError       exit 5
    │   ├── Unreachable    no answer from the Hub: no connection, or it is down
    │   └── NoSuchRevision
    ├── GateError          exit 6   a score missed its --gate
    ├── NotFinite          exit 1   a loss or a gradient is not finite
    └── Interrupted        exit 130 stopped on request, after a clean save
        └── OutOfTime      exit 7   stopped by --max-time, likewise; a batch job can resume it

A message is one or two lines: what is wrong, where (file:line), and the next step. Bugs are `assert`s instead.
Only `cli/app.py` turns these errors into exit codes.
"""

from __future__ import annotations

import difflib
import errno
import os
from collections.abc import Iterable


class GptjFtError(Exception):
    """Root of the tree; the message is shown to the user unchanged."""

    exit_code = 1


class UsageError(GptjFtError, ValueError):
    """A wrong option, recipe or folder."""

    exit_code = 2


class DataError(GptjFtError, ValueError):
    """A file whose content cannot be used."""

    exit_code = 3


class RowSkipped(DataError):
    """A row that cannot be used; the message is the reason, equal for all rows with this problem."""


class ResourceError(GptjFtError):
    """Not enough memory or disk."""

    exit_code = 4


class NetworkError(GptjFtError):
    """A download that failed."""

    exit_code = 5


class Unreachable(NetworkError):
    """No answer from the Hub: no connection, or it is down. A fetched copy may suffice."""


class NoSuchRevision(NetworkError):
    """A repository without the requested branch, tag or commit."""


class GateError(GptjFtError):
    """A score that missed its gate; everything else succeeded."""

    exit_code = 6


class NotFinite(GptjFtError):
    """A loss or a gradient that is not finite."""


class Interrupted(GptjFtError):
    """Stopped on request, everything saved."""

    exit_code = 130


class OutOfTime(Interrupted):
    """Stopped before the session's time limit, everything saved.

    Has its own exit code: a batch job resumes a run that is out of time, but not one that a person stopped.
    """

    exit_code = 7


# Errors of the system with causes outside the program: class and remedy.
_REASONS: dict[int, tuple[type[GptjFtError], str]] = {
    errno.EACCES: (UsageError, "change its permissions, or choose another place (GPTJ_FT_HOME, --output)"),
    errno.EPERM: (UsageError, "change its permissions, or choose another place (GPTJ_FT_HOME, --output)"),
    errno.EROFS: (ResourceError, "make the file system writable, or copy the file to a writable one"),
    errno.ENAMETOOLONG: (UsageError, "choose a shorter name"),
    errno.ENOTDIR: (UsageError, "a folder of the path is a file: choose another path, or move that file"),
    errno.EISDIR: (UsageError, "expected a file: choose another name, or move that folder"),
    errno.ELOOP: (UsageError, "circular links: name the file itself"),
    errno.ENOENT: (UsageError, "a file has disappeared: restore it, or start again"),
    errno.EEXIST: (UsageError, "choose another name, or move it"),
    errno.ENOTEMPTY: (UsageError, "choose another name, or move it"),
    errno.EBUSY: (ResourceError, "another program uses it: wait and repeat"),
    errno.EMFILE: (ResourceError, "too many files are open: raise the limit (`ulimit -n`)"),
    errno.EIO: (ResourceError, "the disk fails: check it, and use a copy"),
    errno.ESTALE: (ResourceError, "lost by a network file system: remount it and repeat"),
}


def in_words(error: OSError) -> GptjFtError | None:
    """Translate an error of the system into an error for the user; ``None``: a bug, show the traceback.

    Full disks and quotas are handled elsewhere: their message also says how much is saved.
    """
    if error.errno not in _REASONS or error.filename is None:
        return None
    kind, advice = _REASONS[error.errno]
    names = " -> ".join(
        os.fsdecode(each) for each in (error.filename, error.filename2) if isinstance(each, str | bytes)
    )
    return kind(f"{names}: {error.strerror}; {advice}")


def listed(names: Iterable[str], most: int = 20) -> str:
    """List the first names and the number of others for a message; ``none`` if empty."""
    every = list(names)
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "") or "none"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` for the nearest known name, or an empty string."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean '{near[0]}'?)" if near else ""


def panic_in_words(error: BaseException, place: object = "use") -> DataError | None:
    """Return the error for a panic of the Rust library for tokenizers, which is no `Exception`; else ``None``.

    Args:
        place: folder of the tokenizer.
    """
    if type(error).__name__ != "PanicException":
        return None
    reason = " ".join(str(error).split())[:200] or "unknown"
    return DataError(f"the tokenizer in {place} failed: {reason}; use the tokenizer.json of the original model")
