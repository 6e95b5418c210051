"""Write the page of runs that train in other processes, until they end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gptj_ft.cli.html.refresh import LIVE, PAGE, WATCHED, is_made_by, refresh_facts, reloads
from gptj_ft.cli.html.run_page import comparison_page, is_training, run_page
from gptj_ft.config.run_folder import Run
from gptj_ft.errors import GptjFtError, UsageError
from gptj_ft.system.atomic import replace_shared
from gptj_ft.system.files import disk_errors

LEAST_WAIT = 3.0  # seconds between two writings
CPU_SHARE = 1 / 20  # of a core that the runs may need
OLD_SECONDS = 120.0  # a page that is older, and older than several writings, stops refreshing


@dataclass(frozen=True)
class WatchedPage:
    """Page of one or several runs."""

    runs: Sequence[Run]
    path: Path

    @classmethod
    def of(cls, runs: Sequence[Run], output: Path | None) -> WatchedPage:
        """Choose the file of the page.

        Raises:
            UsageError: a folder is not a run, or the file exists and is another page.
        """
        for run in runs:
            run.recipe()
        if len(runs) == 1:
            if output is not None:
                raise UsageError(f"--output needs several runs; the page of one run is {PAGE} in its folder")
            return cls(runs, runs[0].folder / PAGE)
        path = output or Path("watch.html")
        if path.suffix.lower() != ".html":
            raise UsageError(f"--output {path}: the name must end with .html")
        if path.exists() and not is_made_by(WATCHED, path):
            raise UsageError(f"{path} exists and is no page of `watch`: name another with --output FILE.html")
        return cls(runs, path)

    @property
    def is_complete(self) -> bool:
        """Whether the page needs no writing: the run writes it, or its report is there."""
        if len(self.runs) > 1:
            return False
        is_report = self.path.is_file() and not reloads(self.path) and not is_training(self.runs[0])
        return is_report or is_made_by(LIVE, self.path)

    @property
    def is_followed(self) -> bool:
        """Whether a run trains that does not write the page itself."""
        return not self.is_complete and any(map(is_training, self.runs))

    def write(self, seconds: float = 0.0) -> None:
        """Write the page; ``seconds``: until the next writing, 0 for the last one."""
        refresh = refresh_facts(seconds, max(OLD_SECONDS, 5 * seconds), WATCHED)
        if len(self.runs) > 1:
            command = ["watch", *(str(run.folder) for run in self.runs), "--output", str(self.path)]
            text = comparison_page(self.runs, command, refresh)
        else:
            text = run_page(self.runs[0], refresh=refresh)
        with disk_errors(self.path):
            replace_shared(self.path, text)

    def follow(self, wait: Callable[[float], bool]) -> None:
        """Write the page every few seconds while a run trains.

        Args:
            wait: waits for some seconds; returns whether to continue.
        """
        seconds = LEAST_WAIT
        while wait(seconds) and self.is_followed:
            start = time.monotonic()
            with suppress(OSError, GptjFtError):  # a file of the run has changed at this moment
                self.write(seconds)
            seconds = max(LEAST_WAIT, (time.monotonic() - start) / CPU_SHARE)
        if not self.is_complete:
            self.write()
