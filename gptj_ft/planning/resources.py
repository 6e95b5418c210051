"""Find the resources that a run is planned for: device, free bytes and rates, of this machine or of a named device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from gptj_ft.config.options import Recipe
from gptj_ft.errors import UsageError
from gptj_ft.models.layout import NO_PARAMETERS, Layout
from gptj_ft.models.products import ONEDNN, Products
from gptj_ft.models.registry import Architecture
from gptj_ft.planning.devices import find_device, is_published_name
from gptj_ft.planning.machine_profile import disk_rates, rates, with_times
from gptj_ft.planning.memory import Free, device_cap
from gptj_ft.planning.probe import Rates
from gptj_ft.planning.workload import RowLengths, StepTokens, Workload
from gptj_ft.system import machine
from gptj_ft.system.accelerator import shares_memory
from gptj_ft.system.dtypes import PRECISION_NAMES, PRECISIONS
from gptj_ft.system.files import disk_bytes, files_in
from gptj_ft.system.group import ALONE, Group
from gptj_ft.system.threads import computing_in

READ_TOKENS = 256  # of a document on which the data types of inference are compared


@dataclass(frozen=True)
class Target:
    """Device and resources that a run is planned for."""

    device: torch.device  # meta: a device that is not in this machine
    precision: str  # data type of the computation, or "auto": `settled` chooses it
    free: Free
    rates: Rates
    name: str = ""  # of a device that is not in this machine
    threads_alone: int | None = None  # CPU threads of a process without the others of --nproc; None: the current number

    @classmethod
    def local(cls, recipe: Recipe, folder: Path, group: Group = ALONE) -> Target:
        """Return this machine, or this process's share of it, for a run in a folder.

        Raises:
            UsageError: there is no such device.
        """
        device = machine.choose_device(recipe.device, recipe.device_memory, group.local_rank)
        free = free_resources(device, folder, recipe.device, group)
        own = rates(device, folder)
        shared = replace(own, disk=own.disk.shared(group.local_size))
        return cls(device, recipe.precision, free, shared, threads_alone=threads_alone(recipe, group))

    @classmethod
    def of(cls, recipe: Recipe, folder: Path) -> Target:
        """Return the device of a recipe: of this machine, or a named one with published rates.

        Host memory and disk are those of this machine, unless the recipe's caps are larger.

        Raises:
            UsageError: there is no such device, or it does not compute in the recipe's precision.
        """
        if not is_published_name(recipe.device):
            return cls.local(recipe, folder)
        device = find_device(recipe.device)
        if recipe.precision == "bf16" and not device.has_bf16:
            raise UsageError(f"{device.name} does not compute in bf16: use --precision fp16")
        precision = PRECISION_NAMES[device.half] if recipe.precision == "auto" else recipe.precision
        own = free_resources(torch.device("cpu"), folder, "cpu")
        host, disk = max(own.host, recipe.host_memory or 0), max(own.disk, recipe.disk_space or 0)
        free = Free.of_accelerator(device.memory_bytes, host, disk)
        return cls(torch.device("meta"), precision, free, Rates(device.rates(), disk_rates(folder)), device.name)

    def settled(self, workload: Workload, recipe: Recipe) -> Workload:
        """Return a workload in the data type of the computation, with the libraries of its products; on a CPU, with the
        times of its layers.
        """
        if self.device.type != "cpu":
            # Only on a CPU are kernels compiled per shape, and batches padded to few shapes.
            workload = workload.with_step(fillers=0.0)
            workload = replace(workload, products=ONEDNN)  # unused there
        elif recipe.products != "auto":
            workload = replace(workload, products=Products.parse(recipe.products))
        memory, alone, own = self.free.capped(recipe).device, self.threads_alone, torch.get_num_threads()
        if self.device.type != "cpu" or alone in (None, own) or "auto" not in (self.precision, recipe.products):
            return with_times(workload, self.precision, self.device, memory)
        # What changes numbers is chosen by the times of a process that runs alone: it does not depend on --nproc.
        with computing_in(alone):
            chosen = with_times(workload, self.precision, self.device, memory)
        workload = replace(workload, products=chosen.products)
        timed = with_times(workload, PRECISION_NAMES[chosen.dtype], self.device, memory)
        gain, products_gain = chosen.times.gain, chosen.times.products_gain
        return replace(timed, times=timed.times._replace(gain=gain, products_gain=products_gain))


def threads_alone(recipe: Recipe, group: Group) -> int | None:
    """Return the CPU threads of a single process, or ``None`` if it would have those of each of several."""
    return group.threads_alone if recipe.threads is None else None


def inference_dtype(
    recipe: Recipe, architecture: Architecture, device: torch.device, group: Group = ALONE
) -> torch.dtype:
    """Return the data type of inference: the recipe's, or the one in which the model's blocks are faster.

    Args:
        group: processes that share the work; the type is the one that a single process would choose.
    """
    if recipe.precision != "auto":
        return PRECISIONS[recipe.precision]
    layers = architecture.layers()
    workload = Workload(
        layouts=[NO_PARAMETERS] * len(layers),
        frozen=[Layout.of(layer) for layer in layers],
        layers=layers,
        width=architecture.config.n_embd,
        dtype=torch.float32,
        step=StepTokens(READ_TOKENS, READ_TOKENS, READ_TOKENS, 0),
        num_steps=None,
        rows=RowLengths(READ_TOKENS),
    )
    free = machine.free_memory(device)
    allowed = min(free, device_cap(recipe, shares_memory(device)) or free)
    with computing_in(threads_alone(recipe, group)):
        return with_times(workload, recipe.precision, device, allowed).dtype


def free_resources(device: torch.device, folder: Path, name: str, group: Group = ALONE) -> Free:
    """Return the free resources of a run, and the disk space that its folder occupies already.

    Processes on the same machine share them equally.

    Args:
        name: name by which the device was chosen.
    """
    processes = group.local_size
    taken = disk_bytes(files_in(folder))
    host = machine.free_memory(torch.device("cpu"))
    is_shared = shares_memory(device)
    device_bytes, disk = host if is_shared else machine.free_memory(device), machine.free_disk(folder) + taken
    on_device = machine.processes_on(device, name, processes)
    free = Free(device_bytes, host, disk, is_shared) if is_shared else Free.of_accelerator(device_bytes, host, disk)
    return Free(free.device // on_device, free.host // processes, free.disk // processes, is_shared)


def check_lengths(recipe: Recipe, architecture: Architecture) -> None:
    """Reject a maximum row length above the model's context."""
    if recipe.max_length > architecture.config.n_positions:
        raise UsageError(
            f"max_length {recipe.max_length} is above the model's context of {architecture.config.n_positions} tokens: "
            f"use --set max_length={architecture.config.n_positions}"
        )
