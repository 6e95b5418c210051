"""Share read-only work with ranks that open the same model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gptj_ft.config.options import Recipe
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.system.group import ALONE, Group


class Workers:
    """The ranks that compute read-only work for this rank. This class has none; `distributed.serving` has some."""

    group: Group = ALONE  # this rank and its workers

    def __repr__(self) -> str:
        return "NO_WORKERS"  # a default value in the documentation

    def announce(self, folder: Path, recipe: Recipe, weights: str, cap: int | None) -> None:
        """Tell the workers which model to open, and wait until each has checked its copy.

        Args:
            recipe: options, with the precision resolved.
            weights: place of the weights.
            cap: limit of device memory in bytes.
        """

    @contextmanager
    def attached(self, model: OffloadedModel) -> Iterator[None]:
        """Scatter the read-only work of a model to the workers inside the block."""
        yield


NO_WORKERS = Workers()
