"""Query free memory and disk, and check row length against the model's context."""

from __future__ import annotations

from pathlib import Path

import torch

from gptj_ft.config.options import Recipe
from gptj_ft.errors import UsageError
from gptj_ft.models.registry import Architecture
from gptj_ft.planning.plan import Free
from gptj_ft.system import machine
from gptj_ft.system.accelerator import shares_memory
from gptj_ft.system.files import disk_bytes, files_in


def free_resources(device: torch.device, folder: Path) -> Free:
    """Return the resources of a run: free ones, and the disk space that its folder occupies already."""
    taken = disk_bytes(files_in(folder))
    host = machine.free_memory(torch.device("cpu"))
    is_shared = shares_memory(device)
    return Free(host if is_shared else machine.free_memory(device), host, machine.free_disk(folder) + taken, is_shared)


def check_lengths(recipe: Recipe, architecture: Architecture) -> None:
    """Refuse rows longer than the model's context.

    Raises:
        UsageError: ``max_length`` is above the model's context.
    """
    if recipe.max_length > architecture.config.n_positions:
        raise UsageError(
            f"max_length {recipe.max_length} is above the model's context of {architecture.config.n_positions} tokens: "
            f"use --set max_length={architecture.config.n_positions}"
        )
