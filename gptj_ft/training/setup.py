"""Set up training: derive steps, schedule, device and precision, and plan the placement."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from gptj_ft.checkpoints.architecture import read_architecture
from gptj_ft.checkpoints.model_folder import (
    check_tensors,
    check_trainable,
    heads_left_out,
    open_checkpoint,
    with_new,
    with_stored_sizes,
)
from gptj_ft.checkpoints.optimizer_state import has_moments, open_moments
from gptj_ft.config.options import Recipe
from gptj_ft.config.run_folder import Run, steps_done
from gptj_ft.data.batches import Rows, first_fit, rows_of_step, steps_per_epoch
from gptj_ft.models.batch import padded_length, rounded_up
from gptj_ft.models.layer_sampling import EVERY_LAYER, EveryLayer, layer_choice
from gptj_ft.models.registry import Architecture
from gptj_ft.models.trainable import Selection, select
from gptj_ft.planning.plan import Plan, choose
from gptj_ft.planning.resources import Target, check_lengths
from gptj_ft.planning.workload import RowLengths, StepTokens, Validation, Workload
from gptj_ft.streaming.objective import Objective, objective_of
from gptj_ft.system.digests import check_weights
from gptj_ft.training.parallel import ONE_PROCESS, Parallel
from gptj_ft.training.schedule import Schedule

COUNTED_STEPS = 100  # their micro-batches are counted


@dataclass(frozen=True)
class TrainSetup:
    """Recipe, model, rows, steps and plan of a run."""

    recipe: Recipe  # with the chosen precision
    model: Path  # folder of the model to start from
    architecture: Architecture  # with the head of the task
    selection: Selection  # trained and frozen parameters of this process's layers
    train: Rows
    validation: Rows  # may be empty
    data_sha256: str  # of the file of rows
    num_steps: int  # optimizer steps of the run
    most_step_tokens: int  # of a step, for any order of the rows
    schedule: Schedule  # learning rates
    device: torch.device
    dtype: torch.dtype  # of the computation
    plan: Plan
    objective: Objective
    updates_before: int | None = None  # updates in the initial moments; None: these are zeros
    parallel: Parallel = ONE_PROCESS  # ranks of the run, and the share of this one
    whole: Selection | None = None  # trained and frozen parameters of the model
    choice: EveryLayer = EVERY_LAYER  # layers that each step trains

    @property
    def num_classes(self) -> int:
        """Number of tokens or labels; 2 for a regression."""
        if self.architecture.task is None:
            return int(self.architecture.config.vocab_size)
        return max(2, self.architecture.num_outputs)

    @property
    def drops(self) -> bool:
        """Whether training has dropout, in the model or before adapters."""
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
    parallel: Parallel = ONE_PROCESS,
    done: int | None = None,
) -> TrainSetup:
    """Derive the steps of a run, and plan its placement.

    Args:
        folder: the run folder; a resumed run has steps in it.
        target: device and resources to plan for; default: this machine.
        labels: names of the classes, for a task with labels.
        parallel: ranks that share the run.
        done: steps of the run that need not be trained; default: those of its newest state.

    Raises:
        ResourceError: the run does not fit.
        UsageError, DataError: the model folder is unusable, or the schedule ends before the run.
    """
    check_weights(model)
    architecture = trained_architecture(recipe, model, labels)
    check_lengths(recipe, architecture)
    whole = sized(select(architecture, recipe), architecture, model)
    target = target or Target.local(recipe, folder, parallel.world)
    has_begun = Run(folder).recipe_file.is_file()
    parallel, recipe = parallel.assign(recipe, whole, architecture.config.n_embd, has_begun)
    selection = replace(
        whole, trained=parallel.local_layouts(whole.trained), frozen=parallel.local_layouts(whole.frozen)
    )
    num_steps = recipe.num_steps(len(train))
    workload = target.settled(workload_of(recipe, architecture, whole, train, validation), recipe)
    done = steps_done(Run(folder)) if done is None else done
    workload = replace(workload, num_steps=num_steps - done, steps_done=done)
    planned, workload = parallel.local_job(recipe, workload)
    plan = choose(planned, workload, target.free, target.rates, has_begun)
    # A resumed run must not choose another type or other libraries, on another machine or after other measurements.
    recipe = recipe.model_copy(update={"precision": plan.precision, "products": str(workload.products)})
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
        parallel=parallel,
        whole=whole,
        choice=layer_choice(recipe, len(whole.trained)),
    )


def sized(selection: Selection, architecture: Architecture, model: Path) -> Selection:
    """Return a selection whose frozen layouts have their sizes in the files of a model.

    Raises:
        UsageError: the model is quantized, and the selection trains quantized weights.
    """
    with open_checkpoint(model) as checkpoint:
        check_trainable(architecture, checkpoint, selection.trained)
        return replace(selection, frozen=with_stored_sizes(architecture, checkpoint, selection.frozen))


def workload_of(
    recipe: Recipe,
    architecture: Architecture,
    selection: Selection,
    train: Rows,
    validation: Rows,
) -> Workload:
    """Return the workload of a whole run on one machine, in fp32 until a type is chosen."""
    per_epoch, num_steps = steps_per_epoch(len(train), recipe.batch_size), recipe.num_steps(len(train))
    lengths, steps = train.lengths, range(min(num_steps, per_epoch))
    rows = [rows_of_step(step, len(train), recipe.batch_size, recipe.seed) for step in steps]
    chosen = [[lengths[row] for row in each] for each in rows]
    sizes = [sum(each) for each in chosen]
    # The mean over tokens, not over rows: the cost of attention per token grows with its row.
    typical = sum(length * length for length in lengths) / sum(lengths)
    most = max(recipe.micro_batch_tokens, max(lengths))
    groups = [first_fit(each, most) for each in chosen[:COUNTED_STEPS]]

    def by_micro_batch(counts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Sum counts of rows by micro-batch, in the counted steps."""
        pairs = zip(counts, groups, strict=False)
        return [[sum(of_row[place] for place in group) for group in step] for of_row, step in pairs]

    packed = by_micro_batch(chosen)
    fillers = [rounded_up(tokens) - tokens for step in packed for tokens in step]
    targets = [[train.targets[row] for row in each] for each in rows]
    # Largest share of a step's targets in one micro-batch; assumed to hold for the steps that are not counted.
    share = max(max(step) / max(1, sum(step)) for step in by_micro_batch(targets))
    is_encoder, drops = architecture.family.is_encoder, architecture.drops_attention
    pairs = max(sum(padded_length(length) ** 2 for length in each) for each in chosen) if is_encoder or drops else 0
    return Workload(
        layouts=selection.trained,
        frozen=selection.frozen,
        layers=selection.build(),
        width=architecture.config.n_embd,
        dtype=torch.float32,
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
        # With a causal mask, a token attends to half of its row on average.
        rows=RowLengths(max(lengths), round(typical), typical / (1 if is_encoder else 2)),
        validation=Validation(sum(validation.lengths), validation.num_targets),
        context=architecture.config.n_positions,
        dropped_heads=architecture.config.n_head if drops else 0,
        choice=layer_choice(recipe, len(selection.trained)),
    )


def trained_architecture(recipe: Recipe, model: Path, labels: Sequence[str]) -> Architecture:
    """Return the architecture of the initial model with the head and the dropout of the run.

    Raises:
        UsageError, DataError: the family has no such head, or the weights do not match.
    """
    source = read_architecture(model)
    architecture = source.with_head(recipe.task, labels).with_dropout(recipe.dropout, recipe.attention_dropout)
    if recipe.revision == 1:
        architecture = _with_old_head_dropout(architecture, recipe)
    with open_checkpoint(model) as weights:
        architecture = with_new(architecture, weights, source)
        dropped = check_tensors(architecture, weights)
    left_out = heads_left_out(architecture, dropped)
    return replace(architecture, left_out=left_out) if left_out else architecture


def _with_old_head_dropout(architecture: Architecture, recipe: Recipe) -> Architecture:
    """Return the model with the head dropout of earlier versions: 0.1, if anything else is dropped."""
    names = architecture.head.dropouts if architecture.head else ()
    without = replace(architecture, config=replace(architecture.config, **dict.fromkeys(names, 0.0)))
    drops = without.dropout or (recipe.method == "lora" and recipe.lora.dropout)
    return replace(without, config=replace(without.config, **dict.fromkeys(names, 0.1))) if drops else without


def updates_before(recipe: Recipe, model: Path, architecture: Architecture) -> int | None:
    """Return the number of updates in a run's initial moments; ``None`` if they are zeros.

    Raises:
        UsageError, DataError: the moments in the model's folder are damaged, or belong to another model.
    """
    if recipe.method == "lora" or recipe.initial_moments != "model" or not has_moments(model):
        return None
    moments = open_moments(model)
    for checkpoint in moments.checkpoints.values():
        check_tensors(architecture, checkpoint)
    return moments.updates


def class_weights(recipe: Recipe, rows: Rows, num_classes: int) -> tuple[float, ...]:
    """Return the loss weight of each class, with mean 1 over the rows; empty if all are equal."""
    if recipe.class_weights == "none" or recipe.task not in ("classification", "token-labels"):
        return ()
    counts = Counter(target for mark in rows.marks or () for target in mark.targets)
    total = sum(counts.values())
    return tuple(total / (len(counts) * counts[number]) if counts[number] else 0.0 for number in range(num_classes))
