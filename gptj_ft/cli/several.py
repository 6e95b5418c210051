"""Commands in several processes: process 0 speaks for all."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gptj_ft.errors import GptjFtError
from gptj_ft.system.processes.control import PeerFailed
from gptj_ft.system.processes.launch import joined

if TYPE_CHECKING:
    from gptj_ft.system.processes.group import Group


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


def take_part(group: Group) -> None:
    """Do this process's share of a run that process 0 leads.

    Raises:
        GptjFtError: as `follow_run`.
    """
    from gptj_ft.training.finetune import follow_run
    from gptj_ft.training.loop import Session

    follow_run(group, Session(owns_process=True))
