"""How several ranks train one run.

The method bodies are the single-process case. `distributed.training` overrides them: pipeline ranks share the layers of
one replica of the model, and replicas share the rows of each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from gptj_ft.config.options import Recipe
from gptj_ft.config.run_folder import Run
from gptj_ft.models.layout import Layout
from gptj_ft.models.trainable import Selection
from gptj_ft.planning.workload import Workload
from gptj_ft.streaming.adamw import AdamW
from gptj_ft.streaming.exchange import LOCAL, Exchange
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.system.group import ALONE, Group
from gptj_ft.training.run_state import RunState

if TYPE_CHECKING:
    from gptj_ft.training.setup import TrainSetup
    from gptj_ft.training.validation import ValidationSample

OpenedModel = tuple[OffloadedModel, AdamW, RunState]
Validated = tuple[float, "ValidationSample | None"]


@dataclass(frozen=True)
class ResumePoint:
    """The state that a run resumes from; without commit and checkpoint, the start."""

    commit: dict[str, Any] | None  # the last one of a run on disk
    checkpoint: int | None  # step of the newest
    bytes_moved: int = 0  # of files that other ranks have sent
    note: str | None = None  # the loss, if the run goes back to mirrored checkpoints


class StepWork(NamedTuple):
    """The share of one rank in a step."""

    seconds: float  # without waiting for other ranks
    flops: float


NO_WORK = StepWork(0.0, 0.0)


class Mirrors:
    """Copies of checkpoints on a second disk. This class makes none."""

    is_active: bool = False
    newest: int | None = None  # newest checkpoint of which every layer is on two disks
    note: str | None = None  # why there are none although the recipe has them

    def mirror_existing(self, best: int | None) -> None:
        """Complete the mirrors of the newest checkpoint and of the best one."""

    def mirror(self, step: int) -> None:
        """Mirror a new checkpoint."""


class Parallel:
    """The ranks of a run, and this rank's share of layers and rows."""

    world: Group = ALONE  # all ranks
    pipeline: Group = ALONE  # ranks that share the layers of this replica
    replicas: Group = ALONE  # ranks with the same layers, one per replica; replica 0 has the state that is saved

    def __repr__(self) -> str:
        return "ONE_PROCESS"  # a default value in the documentation

    @property
    def is_replica(self) -> bool:
        """Whether this rank has a copy of the state, not the state that is saved."""
        return self.replicas.rank > 0

    # Setup and plan

    def assign(self, recipe: Recipe, whole: Selection, width: int, is_resumed: bool) -> tuple[Self, Recipe]:
        """Assign layers and rows to the ranks; return this rank's share, and the recipe with the split resolved."""
        return self, recipe

    def local_layouts(self, layouts: Sequence[Layout]) -> Sequence[Layout]:
        """Return the layouts of all layers, those of remote layers empty."""
        return layouts

    def local_job(self, recipe: Recipe, workload: Workload) -> tuple[Recipe, Workload]:
        """Return the recipe and workload to plan for this rank."""
        return recipe.model_copy(update={"mirror": False}), workload  # one disk has no second

    def describe(self, recipe: Recipe) -> dict[str, str]:
        """Return facts for ``environment.json``."""
        return {}

    def thread_warning(self) -> str:
        """Warn if the ranks compute with fewer threads than a single process would; else empty."""
        return ""

    def measure_network(self) -> None:
        """Measure the network between the ranks."""

    def traffic(self, setup: TrainSetup) -> str | None:
        """Describe the bytes per step between ranks and their seconds."""
        return None

    def announce(self, setup: TrainSetup, run: Run, start: int | None) -> None:
        """Send the plan to the other ranks, and wait until each has accepted it.

        Args:
            start: step of the checkpoint to go back to; None: resume from the newest state.
        """

    def share_folder(self, run: Run) -> None:
        """Copy options and rows to machines that do not see the run folder."""

    # State

    def find_resume_point(self, setup: TrainSetup, run: Run) -> ResumePoint:
        """Choose the state to resume from, and fetch the files of this rank's layers."""
        return ResumePoint(run.last_commit(), max(run.whole_checkpoints(), default=None))

    @contextmanager
    def opened(self, setup: TrainSetup, run: Run, open_saved: Callable[[], OpenedModel]) -> Iterator[OpenedModel]:
        """Open model, optimizer and state.

        Args:
            open_saved: restores them from the run folder.
        """
        model, optimizer, state = open_saved()
        try:
            yield model, optimizer, state
        finally:
            model.close()

    def exchange(self) -> Exchange:
        """Return the connection of the model to other ranks."""
        return LOCAL

    def open_mirrors(self, setup: TrainSetup, run: Run) -> Mirrors:
        """Open the mirrors of checkpoints that the recipe asks for."""
        return Mirrors()

    # Loop

    def validate(self, setup: TrainSetup, model: OffloadedModel, compute: Callable[[], Validated]) -> Validated:
        """Return loss and sample of a validation that ``compute`` runs."""
        return compute()

    def agree_on_time(self, step: int, is_in_time: bool, work: StepWork) -> tuple[bool, str | None]:
        """Return whether training may continue by rank 0's clock, and a warning of slow ranks."""
        return is_in_time, None


ONE_PROCESS = Parallel()
