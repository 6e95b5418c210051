"""Run a command on several ranks. Rank 0 alone prints."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gptj_ft.cli.terminal.output import print_note
from gptj_ft.distributed.control import PeerFailed
from gptj_ft.distributed.launch import TOKEN, joined
from gptj_ft.errors import GptjFtError, UsageError
from gptj_ft.system.signals import StopRequest, stop_message

if TYPE_CHECKING:
    from gptj_ft.generation.workers import Workers
    from gptj_ft.system.group import Group


@contextmanager
def sharing(num_processes: int | None) -> Iterator[Group]:
    """Join the ranks of a command, as `launch.joined` does; an error on another rank than 0 is only an exit code."""
    rank = 0
    try:
        with joined(num_processes, sys.argv[1:]) as group:
            rank = group.rank
            if rank == 0 and group.local_size < group.size and not os.environ.get(TOKEN):
                print_note(f"{TOKEN} is not set: anybody who reaches the port of this run can join and end it")
            yield group
    except GptjFtError as error:
        # Rank 0 has died without a message: rank 1 prints instead.
        is_orphan = isinstance(error, PeerFailed) and error.rank == 0 and error.is_gone and rank == 1
        if rank == 0 or is_orphan:
            raise
        sys.exit(error.exit_code)


@contextmanager
def leading(num_processes: int | None) -> Iterator[Workers]:
    """Run the block on rank 0, with the other ranks as its workers; these serve instead, and exit."""
    with sharing(num_processes) as group:
        from gptj_ft.distributed.serving import ServingRanks, serve_models

        if group.rank == 0:
            workers = ServingRanks(group)
            try:
                yield workers
            except PeerFailed as error:
                if error.is_gone:
                    error.add_note("finished rows are kept; the same command resumes")
                raise
            workers.dismiss()
            return
        # A terminal or a launcher signals every rank. Rank 0 reports it.
        with stop_message(lambda: "stopped"), StopRequest():
            serve_models(group)
    sys.exit(0)


def check_has_rows(num_processes: int | None, rows: object) -> None:
    """Check that a command with --nproc has rows to scatter."""
    if num_processes not in (None, 1) and rows is None:
        raise UsageError("--nproc divides the rows of a file: add --input FILE --output FILE, or leave it out")
