"""Show runs, plans and results: the values that `--json` prints for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from gptj_ft.cli.terminal.screen import next_steps, panel, say, time_after, whole
from gptj_ft.config.options import Recipe
from gptj_ft.distributed.environment import thread_warning
from gptj_ft.planning.advice import Advice, advise
from gptj_ft.planning.constants import SYSTEM_BYTES
from gptj_ft.planning.costs import WARRANTED_BYTES, Costs
from gptj_ft.planning.inference_plan import InferencePlan
from gptj_ft.planning.memory import Requirements
from gptj_ft.planning.plan import Plan
from gptj_ft.planning.scaling_law import CONFIRMED_FLOPS, FITTED_FLOPS, TOKENS_PER_PARAMETER, ScalingForecast
from gptj_ft.system.dtypes import PRECISIONS
from gptj_ft.system.group import Group
from gptj_ft.system.plain_text import command_line
from gptj_ft.system.units import clock, gigabytes
from gptj_ft.training.run_state import LOSS, BestState
from gptj_ft.training.throughput import describe_throughput

if TYPE_CHECKING:
    from gptj_ft.config.options import Recipe
    from gptj_ft.models.published import Published
    from gptj_ft.training.finetune import PreparedRun
    from gptj_ft.training.loop import TrainResult
    from gptj_ft.training.throughput import StepCounts, Throughput

FEW_TRAINING_ROWS, FEW_VALIDATION_ROWS = 100, 20
EXAMPLE_DEVICE = "RTX 4090 24GB"
BUSY = "other programs slowed the measurements: the seconds are too long; plan again later"
STALL_NOTICED = 0.01  # fraction of a step


def show_prepared_run(console: Console, prepared: PreparedRun, verbose: bool = False) -> None:
    """Show data, cost, output folder, and the commands to stop and resume a run, before it starts."""
    setup, recipe = prepared.setup, prepared.setup.recipe
    folder = recipe.output or ""
    rows = f"{len(setup.train):,} training rows, {len(setup.validation):,} validation rows"
    before = [
        ("data", f"{rows}; recipe {recipe.recipe}"),
        ("model", f"{setup.architecture.family.model_type}: {whole(str(setup.model))}"),
    ]
    if setup.updates_before is not None:
        updates = f"starts from the moments in the model folder, after {setup.updates_before:,} updates"
        before.append(("optimizer", updates))
    numbers = len(setup.train), len(setup.validation), recipe.batch_size
    before += [("warning", text) for text in cautions(*numbers)]
    keeps = "every step is already on disk" if setup.plan.placement.is_durable else "everything is saved first"
    after = [
        ("results", f"in {folder}; metrics in its metrics.jsonl{_TRACKED[recipe.report_to]}"),
        ("to stop", f"Ctrl-C stops after the current step; {keeps}"),
        ("to resume", whole(command_line("finetune", "--resume", Path(folder)))),
    ]
    traffic = setup.parallel.traffic(setup)
    network = [("network", traffic)] if traffic else []
    # Only options of a new run may change its numbers.
    advice = [("faster", str(each)) for each in advise(setup.plan)[:1]] if prepared.run is None else []
    costs = [*plan_rows(setup.plan, setup.architecture.notes, verbose), *advice, *network]
    panel(console, "The run", [*before, *costs, *after])


def cautions(train: int, validation: int, batch_size: int) -> list[str]:
    """Return warnings about too few rows for training, validation or a batch."""
    warnings = []
    if train < FEW_TRAINING_ROWS:
        warnings.append(f"only {train:,} training rows: with fewer than about {FEW_TRAINING_ROWS} a model overfits")
    if 0 < validation < FEW_VALIDATION_ROWS:
        warnings.append(
            f"only {validation:,} validation rows: with fewer than about {FEW_VALIDATION_ROWS} the loss is unreliable"
        )
    if batch_size > train:
        warnings.append(f"batch_size {batch_size:,} exceeds the {train:,} training rows: each step uses all of them")
    return warnings


_TRACKED = {
    "none": "",
    "tensorboard": ", and for TensorBoard",
    "trackio": ", and for Trackio",
    "wandb": ", also sent to the server of Weights & Biases",
}


def show_plan(console: Console, plan: Plan, notes: Sequence[str] = (), advice: Sequence[Advice] = ()) -> None:
    """Show the forecast of a run, see `plan_rows`, and options that make it much faster."""
    rows = [*plan_rows(plan, notes), *(("faster", str(each)) for each in advice)]
    if plan.rates.on_cpu:
        named = command_line("plan", "--device", EXAMPLE_DEVICE)
        rows.append(("a card", f"{named} plans for one that you do not have"))
    panel(console, "Forecast", rows)


def plan_rows(plan: Plan, notes: Sequence[str] = (), verbose: bool = True) -> list[tuple[str, str]]:
    """Return the rows of a plan: resources needed and available, bytes moved, seconds.

    Args:
        plan: plan of the run.
        notes: notes on the treatment of the model.
        verbose: also show bytes and FLOPs of a step, and measured rates.
    """
    rows = [
        ("parameters", f"{plan.workload.num_parameters:,}, {_share_trained(plan)}"),
        *((("device", f"{plan.device}, by its published rates"),) if plan.device else ()),
        ("precision", f"{plan.precision}: {plan.reason}"),
        *((("products", plan.products),) if plan.products else ()),
        ("placement", str(plan.placement)),
        *_needs(plan),
        *_transfers(plan.costs),
        *_times(plan),
        *_stall(plan),
        *((("busy", BUSY),) if plan.is_busy else ()),
        ("published" if plan.device else "measured", _measured(plan)),
        ("training", _amount(plan.outlook)),
        *(("note", note) for note in notes),
    ]
    return [row for row in rows if verbose or row[0] not in ENGINE_ROWS]


ENGINE_ROWS = {"moved per step", "validations", "checkpoints", "measured", "published", "training", "passes"}


def show_reading(
    console: Console, title: str, about: Sequence[tuple[str, str]], plan: InferencePlan, writes: bool = True
) -> None:
    """Show the resources of an evaluation, or of answering the rows of a file.

    Args:
        title: heading of the panel.
        about: rows on the model and the task.
        plan: memory and token budget.
        writes: whether the model generates text; one with a task head does not.
    """
    together = plan.together
    rows = [
        ("weights", f"{_WHERE[plan.weights]}, in {plan.precision}"),
        *_needs(plan),
        ("batch", f"{together.written:,} tokens while generating, {together.read:,} while only reading")
        if writes
        else ("batch", f"{together.read:,} tokens"),
        ("to stop", "Ctrl-C; the same command resumes"),
    ]
    panel(console, title, [*about, *rows])


def show_threads(console: Console, recipe: Recipe, group: Group) -> None:
    """Note that several processes divide the CPU threads, unless the recipe sets them."""
    if recipe.threads is None and (warning := thread_warning(group)):
        say(console, warning)


_WHERE = {"device": "stay on the device", "host": "stream from a copy in RAM", "disk": "stream from the model folder"}


def _amount(outlook: ScalingForecast) -> str:
    if outlook.flops is None:
        return f"{outlook.flops_per_step:.2g} FLOPs per step"
    share = f"{outlook.tokens_per_parameter:.2g} per parameter"
    return f"{outlook.flops:.2g} FLOPs on {outlook.tokens:,.0f} tokens, {share}"


def show_outlook(console: Console, outlook: ScalingForecast, published: Published | None) -> None:
    """Show the forecast for pre-training from scratch by the published scaling law, and the published training."""
    tokens = f"{TOKENS_PER_PARAMETER} tokens per parameter ({outlook.scratch_tokens:.3g})"
    result = f"{outlook.scratch_flops:.2g} FLOPs and reach a loss of {outlook.scratch_pile_loss:.2f} on the Pile"
    fitted = f"fitted from {FITTED_FLOPS[0]:.2g} to {FITTED_FLOPS[1]:.2g} FLOPs, confirmed at {CONFIRMED_FLOPS:.2g}"
    caveat = "" if outlook.is_in_range else "; this model is outside that range, so the forecast is unreliable"
    lines = [f"Pre-training on {tokens} would take {result}, by the Cerebras-GPT law ({fitted}){caveat}."]
    if published and published.tokens and published.flops:
        trained = f"trained on {published.tokens:.3g} tokens, {published.flops:.2g} FLOPs"
        lines.append(f"{published.repository} was {trained}: loss on the Pile {published.pile_loss}.")
    for line in lines:
        say(console, line)


def _needs(plan: Requirements) -> Iterator[tuple[str, str]]:
    """Yield a row for each resource: bytes that are needed and available."""
    for each in plan.needs:
        kept = f" ({gigabytes(SYSTEM_BYTES)} more are left to the system)" if each.resource == "host memory" else ""
        yield each.resource, f"needs about {gigabytes(each.need)} of {gigabytes(each.have)}{kept}"


def _share_trained(plan: Plan) -> str:
    workload = plan.workload
    if plan.recipe.method == "sampled":
        sampled, blocks = plan.recipe.sampled, len(workload.layouts) - 2
        ends = "" if sampled.vocabulary_every == 1 else f" (in 1 of {sampled.vocabulary_every} periods)"
        few = f"{sampled.layers} of {blocks} blocks, others every {sampled.period} steps"
        return f"all trained, a few at a time: embedding and head{ends}, {few}"
    return (
        "all trained"
        if workload.num_trained == workload.num_parameters
        else f"{workload.num_trained:,} of them trained"
    )


def show_training(
    console: Console, result: TrainResult, recipe: Recipe, num_validation: int, verbose: bool = False
) -> None:
    """Show the result of a run, the folder of its model, and the next commands.

    Args:
        recipe: options of the run.
        num_validation: number of validation rows.
        verbose: also show FLOPs, stalls and bytes moved.
    """
    counts, throughput = result.counts, result.throughput
    rows = []
    if result.loss_before is not None and result.loss_after is not None:
        losses = f"{result.loss_before:.4f} before, {result.loss_after:.4f} after; lower is better"
        few = f" (unreliable: only {num_validation} rows)" if num_validation < FEW_VALIDATION_ROWS else ""
        exported = f" (exported: step {result.exported_step})" if result.exported_step != result.steps else ""
        rows.append(("validation loss", losses + few + exported))
    if result.best and result.best.step != result.exported_step:
        rows.append(("best", describe_best(result.run, result.best, result.best_checkpoint)))
    rows.append(("time", f"{clock(counts.seconds)} of steps, {describe_throughput(counts, throughput)[0]}"))
    page = Path(result.run) / "report.html"
    rows += [("tuned model", whole(result.model)), *([("report", whole(str(page)))] if page.is_file() else [])]
    panel(console, f"Done: {result.steps:,} steps", [*rows, *(_engine_rows(counts, throughput) if verbose else ())])
    measure = command_line("evaluate", Path(result.run))
    measure += f"   # on the {num_validation:,} held-out rows" if num_validation else " --data FILE"
    next_steps(console, measure, ask(recipe))


def ask(recipe: Recipe, model: Path | None = None) -> str:
    """Return the command that prompts a model.

    Args:
        recipe: options of the run.
        model: model folder; default: the newest run's.
    """
    named = ("--model", model) if model else ()
    if recipe.task == "language-model":
        return f'{command_line("generate", *named)} "prompt"'
    second = ' --pair "text"' if recipe.pair else ""
    return f'{command_line("predict", *named)} "text"{second}'


def _engine_rows(counts: StepCounts, throughput: Throughput) -> list[tuple[str, str]]:
    return [
        ("tokens", f"{counts.tokens:,}, {counts.target_tokens:,} of them targets"),
        ("GFLOP/s", f"{throughput.hardware_gflops:,.1f}; {throughput.model_gflops:,.1f} without recomputation"),
        ("of matmul rate", f"{throughput.hfu:.1%}; {throughput.mfu:.1%} without recomputation"),
        ("waiting", f"{throughput.stall:.1%} of the time, for host memory or disk"),
        ("moved", f"{gigabytes(counts.bytes_read)} read, {gigabytes(counts.bytes_written)} written"),
    ]


def _transfers(costs: Costs) -> Iterator[tuple[str, str]]:
    read, written = costs.bytes_read_per_step, costs.bytes_written_per_step
    if read or written:
        yield "moved per step", f"{gigabytes(read)} read, {gigabytes(written)} written"
    texts = [f"{gigabytes(costs.disk_bytes_written_per_step)} a step"] if costs.disk_bytes_written_per_step else []
    if costs.disk_bytes_written is not None:
        texts.append(f"{gigabytes(costs.disk_bytes_written)} in total")
    wear = costs.ssd_wear or 0.0
    warranty = f": {wear:.1%} of the {WARRANTED_BYTES / 1e12:.0f} TB warranty of a typical 1 TB consumer SSD"
    if texts:
        yield "disk wear", "writes " + ", ".join(texts) + (warranty if wear >= 0.001 else "")


def _times(plan: Plan) -> Iterator[tuple[str, str]]:
    costs = plan.costs
    yield "steps", f"{costs.num_steps or 'unknown without data'}, of {plan.workload.step.mean:,.0f} tokens on average"
    parts = f"compute {_seconds(costs.compute_seconds)}"
    if costs.transfer_seconds:
        parts += f", overlapped with transfers {_seconds(costs.transfer_seconds)}"
    if plan.timeline:
        parts = f"{plan.timeline.tokens_per_second:,.0f} tokens/s; {parts}"
    yield "a step", f"about {_seconds(costs.seconds_per_step)}: {parts}"
    if costs.seconds is None:
        return
    for name, aside in (("validations", costs.validations), ("checkpoints", costs.checkpoints)):
        if aside.number * aside.seconds > 0.01 * costs.seconds:
            yield name, f"{aside.number}, about {_seconds(aside.seconds)} each"
    yield "finish", f"after about {clock(costs.seconds)}: {time_after(costs.seconds)} if it starts now"


def _stall(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield the stalls of a step, a batch size that hides them, and the bound of each pass."""
    timeline = plan.timeline
    if not timeline or timeline.stall < STALL_NOTICED:
        return
    cause = max(timeline.waits, key=lambda name: timeline.waits[name])
    more = plan.tokens_to_hide_stall
    hidden = f": {more:,} more tokens per step would hide it" if cause != "program" and more else ""
    yield "waiting", f"for the {cause} {timeline.stall:.0%} of a step{hidden}"
    passes = "; ".join(
        f"{name}: compute {_seconds(times.compute)}, transfers {_seconds(times.moving)}"
        for name, times in (("forward", timeline.forward), ("backward", timeline.backward))
    )
    yield "passes", f"{passes}; {timeline.share_by_pass:.0%} of the speed limit set by the longer part of each pass"


def _measured(plan: Plan) -> str:
    disk, product = plan.rates.disk, plan.rates.compute.matmul(PRECISIONS[plan.precision])
    product_text = f"{product / 1e9:,.0f} GFLOP/s in {plan.precision}"
    if plan.device:
        compute = plan.rates.compute
        memory, link = f"{compute.memory / 1e9:,.0f} GB/s", f"{compute.to_device / 1e9:.1f} GB/s"
        product_text += f", memory {memory}, link {link} each way: fractions of published rates, see docs/devices.md"
    if plan.rates.is_disk_assumed:
        return f"{product_text}; disk {disk.mixed / 1e9:.1f} GB/s assumed: too little free space to measure it"
    filled = f", after {clock(disk.filled)} of writing" if disk.filled else ""
    return (
        f"{product_text}; disk reads {disk.read / 1e9:.1f} GB/s, writes {disk.write / 1e9:.1f}, "
        f"both at once {disk.mixed / 1e9:.1f}{filled} (remeasure: gptj-ft plan --measure)"
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 10 else clock(seconds)


def describe_best(run: str, best: BestState, checkpoint: str | None) -> str:
    """Describe a best state that is not the last one, and the way to get it."""
    export = command_line("runs", "export", Path(run), "FOLDER", "--from", "best")
    where = (
        f"export it with {whole(f'`{export}`')}"
        if checkpoint
        else "next time, --keep best,last keeps that state and --export best exports it"
    )
    is_loss = best.by == LOSS
    value = f"{best.value:.4f}" if is_loss else f"{best.by} {best.value:.2f}"
    best_by = "lowest validation loss" if is_loss else f"best {best.by}"
    return f"{best_by} after {best.step} steps, {value}; {where}"
