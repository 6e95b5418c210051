"""Set up training: derive steps, schedule, device and precision, and plan the placement."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from gptj_ft.checkpoints.model_folder import check_tensors, heads_left_out, open_checkpoint, with_new
from gptj_ft.checkpoints.optimizer_state import has_moments, open_moments
from gptj_ft.config.options import Recipe
from gptj_ft.config.run_folder import Run, steps_done
from gptj_ft.data.batches import Rows, rows_of_step, steps_per_epoch
from gptj_ft.errors import UsageError
from gptj_ft.models.batch import padded_length
from gptj_ft.models.layout import Layout
from gptj_ft.models.registry import Architecture, read_architecture
from gptj_ft.models.trainable import Selection, select
from gptj_ft.planning.plan import Plan, choose
from gptj_ft.planning.resources import Target, check_lengths
from gptj_ft.planning.scale_out import part_of
from gptj_ft.planning.workload import Workload
from gptj_ft.streaming.objective import Objective, objective_of
from gptj_ft.streaming.relay import ONE_PROCESS, Relay, assign, restricted
from gptj_ft.system.digests import check_weights
from gptj_ft.system.processes.group import ALONE, Group
from gptj_ft.training.schedule import Schedule


@dataclass(frozen=True)
class TrainSetup:
    """Recipe, model, rows, steps and plan of a run; the recipe's ``precision`` is not ``auto`` any more.

    No step of the run has more than ``most_step_tokens``, whatever the order of the rows. ``updates_before`` is how
    many updates the moments have seen that it begins with; ``None``: it begins with zeros. Of several processes, each
    has the layers that ``relay`` says, or all of them, and then rows of the ``lanes``; ``selection`` has the layers of
    this process, ``whole`` those of the model.
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
    lanes: int = 1
    whole: Selection | None = None

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
        target: what it is planned for; default: this machine.
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
    target = target or Target.here(recipe, folder, group.on_this_machine)
    recipe = shared_recipe(recipe, group, architecture, len(whole.trained))
    relay = relay_of(recipe, group, whole.trained, architecture.config.n_embd)
    owners = relay.owners
    selection = replace(
        whole,
        trained=restricted(whole.trained, owners, relay.group.rank),
        frozen=restricted(whole.frozen, owners, relay.group.rank),
    )
    per_epoch = steps_per_epoch(len(train), recipe.batch_size)
    num_steps = recipe.num_steps(len(train))
    schedule = Schedule.of(recipe, num_steps)
    lengths = train.lengths
    steps = range(min(num_steps, per_epoch))
    chosen = [
        [lengths[row] for row in rows_of_step(step, len(train), recipe.batch_size, recipe.seed)] for step in steps
    ]
    sizes = [sum(each) for each in chosen]
    is_encoder, drops = architecture.family.is_encoder, architecture.drops_attention
    most_step_tokens = sum(sorted(lengths)[-recipe.batch_size :])
    load = Workload(
        layouts=whole.trained,
        frozen=whole.frozen,
        layers=whole.build(),
        width=architecture.config.n_embd,
        dtype=target.dtype,
        micro_batch_tokens=max(recipe.micro_batch_tokens, max(lengths)),
        step_tokens=max(sizes),
        mean_step_tokens=sum(sizes) / len(sizes),
        mean_step_targets=train.num_targets / per_epoch,
        num_steps=num_steps - steps_done(Run(folder)),
        context=architecture.config.n_positions,
        longest_row=max(lengths),
        attended=sum(length * length for length in lengths) / sum(lengths) / (1 if is_encoder else 2),
        step_pairs=max(sum(padded_length(length) ** 2 for length in each) for each in chosen)
        if is_encoder or drops
        else 0,
        dropped_heads=architecture.config.n_head if drops else 0,
        validation_tokens=sum(validation.lengths),
        validation_targets=validation.num_targets,
    )
    has_begun = Run(folder).recipe_file.is_file()
    if relay.group.size > 1:
        load = part_of(load, [layer for layer, owner in enumerate(owners) if owner == relay.group.rank])
    plan = choose(recipe, load, target.free, target.rates, has_begun)
    # Another machine, or this one on another day, might choose another type in the middle of the run.
    recipe = recipe.model_copy(update={"precision": plan.precision})
    return TrainSetup(
        recipe, model, architecture, selection, train, validation, data_sha256, num_steps, most_step_tokens,
        schedule, target.device, target.dtype, plan, objective_of(recipe, class_weights(recipe, train, len(labels))),
        updates_before(recipe, model, architecture), group, relay, recipe.lanes or 1, whole,
    )  # fmt: skip


def shared_recipe(recipe: Recipe, group: Group, architecture: Architecture, num_layers: int) -> Recipe:
    """Return a recipe that says how several processes share the run.

    Raises:
        UsageError: they cannot share it as the recipe says.
    """
    size, num_blocks = group.size, num_layers - 2
    if size == 1:
        return recipe
    share = recipe.share
    # Where the whole state need not be in each process, where bits are those of one, and activations are small.
    is_plain = recipe.task == "language-model" and not recipe.sample_rows
    if share == "auto":
        share = "layers" if recipe.method == "full" and is_plain and num_blocks >= 2 * size else "rows"
    if share == "layers":
        if not is_plain:
            what = "sample_rows" if recipe.task == "language-model" else f"a head for {recipe.task}"
            raise UsageError(f"share: layers does not go together with {what} yet: use --set share=rows")
        if num_blocks < size:
            raise UsageError(f"{size} processes cannot share {num_blocks} blocks: use fewer, or --set share=rows")
        return recipe.model_copy(update={"share": share})
    lanes = recipe.lanes or size
    if lanes < size:
        raise UsageError(
            f"{size} processes cannot share the rows of {lanes} lane{'s' if lanes > 1 else ''}: use {lanes}; lanes "
            "decide the last bits of a run, so that they stay what they were when it began"
        )
    return recipe.model_copy(update={"share": share, "lanes": lanes})


def relay_of(recipe: Recipe, group: Group, layouts: Sequence[Layout], width: int) -> Relay:
    """Return which process has which layer: with ``share: rows`` each has all."""
    if group.size == 1 or recipe.share == "rows":
        return Relay.alone(len(layouts))
    return Relay(group, assign(layouts, group.size), width)


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
    return replace(architecture, left_out=heads_left_out(architecture, dropped))


def updates_before(recipe: Recipe, model: Path, architecture: Architecture) -> int | None:
    """Return how many updates the moments have seen that a run begins with; ``None`` if it begins with zeros.

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
