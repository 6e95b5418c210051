"""The workload of one rank, and the bytes that it sends and receives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import torch

from gptj_ft.config.options import Recipe
from gptj_ft.models.layout import NO_PARAMETERS, Kind, Layout
from gptj_ft.planning.memory import stored_kinds
from gptj_ft.planning.plan import Plan
from gptj_ft.planning.step_replay import state_kinds
from gptj_ft.planning.workload import Workload
from gptj_ft.streaming.stores.state_file import StateFile

FP32 = torch.float32.itemsize


def with_mirrors(recipe: Recipe, stages: int) -> Recipe:
    """Return the recipe, without mirrors if a single rank has all layers."""
    return recipe if stages > 1 else recipe.model_copy(update={"mirror": False})


def replica_workload(workload: Workload, replicas: int) -> Workload:
    """Return the workload of one replica: its share of a step's rows, and all validation rows."""
    if replicas == 1:
        return workload
    return replace(workload, step=workload.step.scaled(Fraction(1, replicas), workload.rows.longest))


def local_workload(workload: Workload, layers: Sequence[int]) -> Workload:
    """Return the workload of some layers; embedding and head remain, empty if they are remote.

    Frozen layers below the lowest local trained layer count as not computed in backward. Where frozen layers lie
    between trained ones of other ranks, that is slightly too little.
    """
    top, own = len(workload.layouts) - 1, set(layers)
    kept = [index for index in range(top + 1) if index in own or index in (0, top)]

    def pick(layouts: Sequence[Layout]) -> tuple[Layout, ...]:
        return tuple(layouts[index] if index in own else NO_PARAMETERS for index in kept) if layouts else ()

    times = workload.times
    return replace(
        workload,
        layouts=pick(workload.layouts),
        frozen=pick(workload.frozen),
        layers=tuple(workload.layers[index] for index in kept) if workload.layers else (),
        times=times._replace(layers=tuple(times.layers[index] for index in kept if times.layers)),
        step=workload.step if top in own else replace(workload.step, targets=0.0),
        validation=workload.validation if top in own else workload.validation._replace(targets=0),
    )


def most_step_bytes(workload: Workload, owners: Sequence[int], replicas: int) -> tuple[float, float]:
    """Return the most bytes that a rank sends in a step, and the most that one receives.

    Args:
        workload: whole run.
        owners: pipeline rank of each layer.
    """
    workload, totals = replica_workload(workload, replicas), list[tuple[float, float]]()
    for rank in sorted(set(owners)):
        own = local_workload(workload, [layer for layer, owner in enumerate(owners) if owner == rank])
        up, down = pass_bytes(workload, own, owners, rank, replicas)
        totals.append((up[0] + down[0], up[1] + down[1]))
    return max(sent for sent, _ in totals), max(received for _, received in totals)


def pass_bytes(
    workload: Workload, own: Workload, owners: Sequence[int], rank: int, replicas: int
) -> list[tuple[float, float]]:
    """Return the bytes that a pipeline rank sends and receives: in forward, in backward.

    Args:
        workload: replica.
        own: the rank's share of it.
    """
    hop_bytes = workload.width * workload.dtype.itemsize * workload.step.computed
    passes = []
    for is_backward in (False, True):
        # Gradients of hidden states end at the lowest trained layer.
        pairs = list(pairwise(owners))[workload.lowest_trained if is_backward else 0 :]
        hops = [(high, low) if is_backward else (low, high) for low, high in pairs if low != high]
        elements = own.stored_elements + own.lent_elements if is_backward else 0
        gradients = all_reduce_bytes(replicas) * elements
        sent, received = (sum(hop[end] == rank for hop in hops) for end in (0, 1))
        passes.append((hop_bytes * sent + gradients, hop_bytes * received + gradients))
    return passes


def all_reduce_bytes(replicas: int) -> float:
    """Return the bytes per element, each way: reduce-scatter and all-gather move (R - 1) / R of the elements each."""
    return 2 * FP32 * (replicas - 1) / replicas


def migrated_bytes(
    plan: Plan, recipe: Recipe, workload: Workload, before: Sequence[int], after: Sequence[int]
) -> dict[int, int]:
    """Return the bytes of layer files that each rank receives when a run resumes with other owners.

    For machines with disks of their own. An upper bound for a run on disk: a layer that has the last update moves
    without its gradient.

    Args:
        workload: whole run or replica.
        before: owner of each layer so far.
        after: owner of each layer from now on.
    """
    stored = stored_kinds(plan.placement, workload, recipe)
    files: list[dict[Kind, torch.dtype]] = [{kind: stored[kind] for kind in state_kinds(stored)}]
    if plan.placement.is_durable:
        files.append({"grad": stored["grad"]})
    moved = dict.fromkeys(after, 0)
    for layout, old, new in zip(workload.layouts, before, after, strict=True):
        if layout.numel and old != new:
            moved[new] += sum(StateFile(layout, kinds, plan.budget.chunk_numel).num_bytes for kinds in files)
    return moved
