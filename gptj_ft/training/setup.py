"""Set up training: derive steps, schedule, device and precision, and plan the placement."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from gptj_ft.checkpoints.architecture import read_architecture
from gptj_ft.checkpoints.model_folder import check_tensors, heads_left_out, open_checkpoint, with_new
from gptj_ft.checkpoints.optimizer_state import has_moments, open_moments
from gptj_ft.config.options import Recipe
from gptj_ft.config.run_folder import Run, steps_done
from gptj_ft.data.batches import Rows, first_fit, rows_of_step, steps_per_epoch
from gptj_ft.distributed.pipeline import ONE_PROCESS, Relay, assign, restricted
from gptj_ft.distributed.scale_out import part_of, wire_bytes, with_mirrors
from gptj_ft.errors import UsageError
from gptj_ft.models.batch import padded_length, rounded_up
from gptj_ft.models.layout import Layout
from gptj_ft.models.registry import Architecture
from gptj_ft.models.trainable import Selection, select
from gptj_ft.planning.plan import Plan, choose
from gptj_ft.planning.resources import Target, check_lengths
from gptj_ft.planning.workload import RowLengths, StepTokens, Validation, Workload
from gptj_ft.streaming.objective import Objective, objective_of
from gptj_ft.system.digests import check_weights
from gptj_ft.system.group import ALONE, Group, subgroup
from gptj_ft.training.schedule import Schedule

COUNTED_STEPS = 100  # whose micro-batches are counted


@dataclass(frozen=True)
class TrainSetup:
    """Recipe, model, rows, steps and plan of a run.

    Several processes are replicas of the model, and a replica is one process or several that share its layers. The
    state of a run is that of replica 0.

    Attributes:
        recipe: options of the run; its ``precision`` is not ``auto`` any more.
        model: folder of the model to start from.
        architecture: architecture of the model, with the head of its task.
        selection: trained and frozen parameters of this process's layers.
        train: rows to train on.
        validation: rows to measure on; may be none.
        data_sha256: digest of the file the rows came from.
        num_steps: optimizer steps of the run.
        most_step_tokens: largest number of tokens of a step, whatever the order of the rows.
        schedule: learning rates of the run.
        device: device that computes.
        dtype: data type of the computation.
        plan: placement, buffer budget and forecast.
        objective: objective of the task.
        updates_before: updates that the first values of the moments have seen; ``None``: these are zeros.
        group: processes that share the run.
        relay: owner process of each layer, among the processes of this replica.
        peers: processes that have the same layers as this one, one of each replica, by its number; each has rows of
            some of the lanes.
        lanes: shares that the rows of a step are dealt out to, see `distributed.row_shards`.
        whole: trained and frozen parameters of the model.
        on_the_wire: most bytes that a process sends in a step, and most that one receives.
    """

    recipe: Recipe
    model: Path
    architecture: Architecture
    selection: Selection
    train: Rows
    validation: Rows
    data_sha256: str
    num_steps: int
    most_step_tokens: int
    schedule: Schedule
    device: torch.device
    dtype: torch.dtype
    plan: Plan
    objective: Objective
    updates_before: int | None = None
    group: Group = ALONE
    relay: Relay = ONE_PROCESS
    peers: Group = ALONE
    lanes: int = 1
    whole: Selection | None = None
    on_the_wire: tuple[float, float] = (0.0, 0.0)

    @property
    def is_replica(self) -> bool:
        """Whether this process is of another replica than the first, and has a copy of the state."""
        return self.peers.rank > 0

    @property
    def num_classes(self) -> int:
        """Classes among which is chosen: tokens or labels; 2 where numbers are learned."""
        if self.architecture.task is None:
            return int(self.architecture.config.vocab_size)
        return max(2, self.architecture.num_outputs)

    @property
    def drops(self) -> bool:
        """Whether training drops activations, of the model or of adapters' inputs."""
        recipe = self.recipe
        return bool(self.architecture.dropout) or (recipe.method == "lora" and recipe.lora.dropout > 0)


def make_setup(
    recipe: Recipe,
    model: Path,
    train: Rows,
    validation: Rows,
    data_sha256: str,
    folder: Path,
    target: Target | None = None,
    labels: Sequence[str] = (),
    group: Group = ALONE,
) -> TrainSetup:
    """Derive the steps of a run and plan where everything goes.

    Args:
        recipe: the whole run.
        model: folder of the model to start from.
        train: rows to train on.
        validation: rows to measure on; may be none.
        data_sha256: digest of the file the rows came from.
        folder: the run folder, for the space and rate of its disk, and the steps done if it is resumed.
        target: device and resources to plan for; default: this machine.
        labels: names of the classes, of a task with labels.
        group: processes that share the run.

    Raises:
        ResourceError: it cannot fit.
        UsageError, DataError: a model folder that cannot be used, or a schedule that ends before the run.
    """
    check_weights(model)
    architecture = trained_architecture(recipe, model, labels)
    check_lengths(recipe, architecture)
    whole = select(architecture, recipe)
    target = target or Target.here(recipe, folder, group)
    has_begun = Run(folder).recipe_file.is_file()
    recipe = shared_recipe(recipe, group.size, len(whole.trained) - 2, has_begun)
    relay, peers = layer_owners(recipe, group, whole.trained, architecture.config.n_embd)
    owners = relay.owners
    selection = replace(
        whole,
        trained=restricted(whole.trained, owners, relay.group.rank),
        frozen=restricted(whole.frozen, owners, relay.group.rank),
    )
    num_steps = recipe.num_steps(len(train))
    workload = target.settled(workload_of(recipe, architecture, whole, train, validation), recipe)
    workload = replace(workload, num_steps=num_steps - steps_done(Run(folder)))
    on_the_wire = wire_bytes(workload, owners, peers.size)
    if relay.group.size > 1:
        workload = part_of(workload, [layer for layer, owner in enumerate(owners) if owner == relay.group.rank])
    plan = choose(with_mirrors(recipe, relay.group.size), workload, target.free, target.rates, has_begun)
    # Another machine, or this one on another day, might choose another type in the middle of the run.
    recipe = recipe.model_copy(update={"precision": plan.precision})
    most_step_tokens = sum(sorted(train.lengths)[-recipe.batch_size :])
    objective = objective_of(recipe, class_weights(recipe, train, len(labels)))
    return TrainSetup(
        recipe=recipe,
        model=model,
        architecture=architecture,
        selection=selection,
        train=train,
        validation=validation,
        data_sha256=data_sha256,
        num_steps=num_steps,
        most_step_tokens=most_step_tokens,
        schedule=Schedule.of(recipe, num_steps),
        device=target.device,
        dtype=workload.dtype,
        plan=plan,
        objective=objective,
        updates_before=updates_before(recipe, model, architecture),
        group=group,
        relay=relay,
        peers=peers,
        lanes=recipe.lanes or 1,
        whole=whole,
        on_the_wire=on_the_wire,
    )


def workload_of(
    recipe: Recipe,
    architecture: Architecture,
    selection: Selection,
    train: Rows,
    validation: Rows,
    dtype: torch.dtype = torch.float32,
) -> Workload:
    """Return the workload of a whole run, on one machine.

    Args:
        recipe: batch size and number of steps.
        architecture: model that is trained.
        selection: its parameters that are.
        train: rows to train on.
        validation: rows to measure on; may be none.
        dtype: data type of the computation, as long as none is chosen.
    """
    per_epoch, num_steps = steps_per_epoch(len(train), recipe.batch_size), recipe.num_steps(len(train))
    lengths, steps = train.lengths, range(min(num_steps, per_epoch))
    rows = [rows_of_step(step, len(train), recipe.batch_size, recipe.seed) for step in steps]
    chosen = [[lengths[row] for row in each] for each in rows]
    sizes = [sum(each) for each in chosen]
    typical = sum(length * length for length in lengths) / sum(lengths)
    most = max(recipe.micro_batch_tokens, max(lengths))
    groups = [first_fit(each, most) for each in chosen[:COUNTED_STEPS]]

    def by_micro_batch(counts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Sum up the numbers of rows, of each micro-batch of the counted steps."""
        pairs = zip(counts, groups, strict=False)
        return [[sum(of_row[place] for place in group) for group in step] for of_row, step in pairs]

    packed = by_micro_batch(chosen)
    fillers = [rounded_up(tokens) - tokens for step in packed for tokens in step]
    targets = [[train.targets[row] for row in each] for each in rows]
    # The share that one micro-batch has of a step's targets; in steps that are not counted it is taken for no larger.
    share = max(max(step) / max(1, sum(step)) for step in by_micro_batch(targets))
    is_encoder, drops = architecture.family.is_encoder, architecture.drops_attention
    pairs = max(sum(padded_length(length) ** 2 for length in each) for each in chosen) if is_encoder or drops else 0
    return Workload(
        layouts=selection.trained,
        frozen=selection.frozen,
        layers=selection.build(),
        width=architecture.config.n_embd,
        dtype=dtype,
        step=StepTokens(
            micro_batch=most,
            most=max(sizes),
            mean=sum(sizes) / len(sizes),
            targets=train.num_targets / per_epoch,
            micro_batches=sum(map(len, packed)) / len(packed),
            fillers=sum(fillers) / len(packed),
            most_targets=math.ceil(share * max(map(sum, targets))),
            pairs=pairs,
        ),
        num_steps=num_steps,
        rows=RowLengths(max(lengths), round(typical), typical / (1 if is_encoder else 2)),
        validation=Validation(sum(validation.lengths), validation.num_targets),
        context=architecture.config.n_positions,
        dropped_heads=architecture.config.n_head if drops else 0,
    )


def shared_recipe(recipe: Recipe, size: int, num_blocks: int, has_begun: bool = False) -> Recipe:
    """Return a recipe that says how several processes share the run.

    There are as many processes as replicas times processes that share the layers of one.

    Args:
        recipe: options of the run; the way to share it may be ``auto``.
        size: number of processes.
        num_blocks: blocks of the model.
        has_begun: whether it is a run that goes on; its lanes stay.

    Raises:
        UsageError: they cannot share it as the recipe says.
    """
    if size == 1:
        return recipe
    share, replicas = recipe.share, recipe.replicas
    lanes = recipe.lanes or (1 if has_begun else None)
    divisors = [each for each in range(1, size + 1) if size % each == 0]
    if share == "auto":
        # Where the whole state need not be in each process, and activations are smaller than gradients.
        if replicas is None and recipe.method == "full" and recipe.shares_layers:
            possible = [each for each in divisors if each <= (lanes or size)]
            replicas = next((each for each in possible if 2 * (size // each) <= num_blocks), possible[-1])
        share = "rows" if (replicas or size) == size else "layers"
    if share == "rows" and recipe.replicas not in (None, size):
        raise UsageError(
            f"share: rows makes {size} processes {size} replicas, and replicas says {recipe.replicas}: leave it out "
            "(null), or use --set share=layers"
        )
    replicas = size if share == "rows" else replicas or 1
    if replicas not in divisors:
        raise UsageError(
            f"{size} processes are not {replicas} replicas of as many each: use another number of processes, or --set "
            f"replicas=N, where N is one of {', '.join(map(str, divisors))}"
        )
    stages = size // replicas
    if stages > 1 and not recipe.shares_layers:
        what = "sample_rows" if recipe.task == "language-model" else f"a head for {recipe.task}"
        raise UsageError(f"share: layers does not go together with {what} yet: use --set share=rows")
    if stages == 1 and recipe.mirror:
        raise UsageError(
            "mirror: true is for processes that share the layers: use --set share=layers, or --set mirror=false"
        )
    if stages > num_blocks:
        raise UsageError(
            f"{stages} processes cannot share {num_blocks} blocks: use fewer, more replicas of the model (--set "
            "replicas=N), or --set share=rows"
        )
    lanes = lanes or replicas
    if lanes < replicas:
        who = "processes" if share == "rows" else "replicas"
        raise UsageError(
            f"{replicas} {who} cannot share the rows of {lanes} lane{'s' if lanes > 1 else ''}: use {lanes}; lanes "
            "decide the last bits of a run, so that they stay what they were when it began"
        )
    if replicas == 1:
        return recipe.model_copy(update={"share": share})
    return recipe.model_copy(update={"share": share, "replicas": replicas if stages > 1 else None, "lanes": lanes})


def layer_owners(recipe: Recipe, group: Group, layouts: Sequence[Layout], width: int) -> tuple[Relay, Group]:
    """Return the owners of the layers in this process's replica, and the processes with the same layers as this one."""
    replicas = group.size if recipe.share == "rows" else recipe.replicas or 1
    stages = group.size // replicas if group.size > 1 else 1
    first, stage = group.rank - group.rank % stages, group.rank % stages
    peers = subgroup(group, range(stage, group.size, stages))
    if stages == 1:
        return Relay.alone(len(layouts)), peers
    return Relay(subgroup(group, range(first, first + stages)), assign(layouts, stages), width), peers


def trained_architecture(recipe: Recipe, model: Path, labels: Sequence[str]) -> Architecture:
    """Return the architecture that a run trains: that of the model it starts from, with the head of its task.

    Args:
        recipe: task and dropout.
        model: folder of the model to start from.
        labels: names of the classes, of a task with labels.

    Raises:
        UsageError, DataError: the family has no such head, or the weights do not fit.
    """
    source = read_architecture(model)
    architecture = source.with_head(recipe.task, labels).with_dropout(recipe.dropout, recipe.attention_dropout)
    with open_checkpoint(model) as weights:
        architecture = with_new(architecture, weights, source)
        dropped = check_tensors(architecture, weights)
    left_out = heads_left_out(architecture, dropped)
    return replace(architecture, left_out=left_out) if left_out else architecture


def updates_before(recipe: Recipe, model: Path, architecture: Architecture) -> int | None:
    """Count the updates that a run's first moments have seen; ``None`` if they are zeros.

    Raises:
        UsageError, DataError: the moments in the model's folder are damaged, or of another model.
    """
    if recipe.method != "full" or recipe.initial_moments != "model" or not has_moments(model):
        return None
    moments = open_moments(model)
    for checkpoint in moments.checkpoints.values():
        check_tensors(architecture, checkpoint)
    return moments.updates


def class_weights(recipe: Recipe, rows: Rows, num_classes: int) -> tuple[float, ...]:
    """Return the weight of the rows of each class, the mean over the rows 1; none where all are alike."""
    if recipe.class_weights == "none" or recipe.task not in ("classification", "token-labels"):
        return ()
    counts = Counter(target for mark in rows.marks or () for target in mark.targets)
    total = sum(counts.values())
    return tuple(total / (len(counts) * counts[number]) if counts[number] else 0.0 for number in range(num_classes))
