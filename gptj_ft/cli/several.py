"""Commands in several processes: process 0 speaks for all."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gptj_ft.distributed.control import PeerFailed
from gptj_ft.distributed.launch import joined
from gptj_ft.errors import GptjFtError, UsageError
from gptj_ft.system.signals import StopRequest, stop_says

if TYPE_CHECKING:
    from gptj_ft.system.group import Group


@contextmanager
def sharing(num_processes: int | None) -> Iterator[Group]:
    """Be one of the processes of a command, see `launch.joined`; of all but process 0, only the exit code tells."""
    rank = 0
    try:
        with joined(num_processes, sys.argv[1:]) as group:
            rank = group.rank
            yield group
    except GptjFtError as error:
        is_orphan = isinstance(error, PeerFailed) and error.rank == 0 and error.is_gone and rank == 1
        if rank == 0 or is_orphan:
            raise
        sys.exit(error.exit_code)


def serve_run(group: Group) -> None:
    """Do this process's share of a run that process 0 leads.

    Raises:
        GptjFtError: as `follow_run`.
    """
    from gptj_ft.training.finetune import follow_run
    from gptj_ft.training.loop import Session

    follow_run(group, Session(owns_process=True))


@contextmanager
def leading(num_processes: int | None) -> Iterator[Group]:
    """Lead the processes that a command deals its work out to, see `launch.joined`; this is process 0, in the block.

    The others compute what it deals out, and end here.
    """
    with sharing(num_processes) as group:
        if group.rank == 0:
            try:
                yield group
            except PeerFailed as error:
                if error.is_gone:
                    error.add_note("what is done is kept; the same command goes on")
                raise
            if group.size > 1:
                from gptj_ft.distributed.served_model import announce_end

                announce_end(group)
            return
        from gptj_ft.distributed.replica import serve_models

        # What a terminal or a launcher sends to all of them is for process 0 to tell of.
        with stop_says(lambda: "stopped"), StopRequest():
            serve_models(group)
    sys.exit(0)


def check_dealt(num_processes: int | None, rows: object) -> None:
    """Check that there are rows to be dealt out.

    Raises:
        UsageError: there are none, and several processes are asked for.
    """
    if num_processes not in (None, 1) and rows is None:
        raise UsageError("--nproc deals the rows of a file out: add --input FILE --output FILE, or leave it out")
