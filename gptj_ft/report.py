"""What the commands print for people: tables and lines, from the values that `--json` prints for programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from gptj_ft.costs import WARRANTED_BYTES, Costs
from gptj_ft.data.batches import steps_per_epoch
from gptj_ft.data.lengths import Lengths, histogram
from gptj_ft.data.targets import num_targets, stretches
from gptj_ft.machine import gigabytes
from gptj_ft.plan import Plan
from gptj_ft.progress import clock
from gptj_ft.rates import PRECISIONS
from gptj_ft.scaling import CONFIRMED_FLOPS, FITTED_FLOPS, TOKENS_PER_PARAMETER, Outlook

if TYPE_CHECKING:
    from gptj_ft.data.fixed_file import FixReport
    from gptj_ft.data.prepared import Prepared, Report
    from gptj_ft.published import Published
    from gptj_ft.recipe import Recipe
    from gptj_ft.trainer import TrainResult

FILES_SHOWN = 3
BUSY = 0.5  # average load of a core from which on what is measured is not to be trusted


def show_data(console: Console, report: Report) -> None:
    """Show what was understood of the rows, and what became of each."""
    columns = ", ".join(f"{field} = column '{column}'" for field, column in report.columns.items())
    files = ", ".join(report.files[:FILES_SHOWN]) + (
        f" and {len(report.files) - FILES_SHOWN} more" if len(report.files) > FILES_SHOWN else ""
    )
    lines = [
        f"{files}: {report.rows_read:,} rows read, {report.rows_kept:,} kept",
        f"  {columns}",
        f"  {report.tokens:,} tokens, {report.target_tokens:,} of them trained on; longest row {report.longest:,}",
    ]
    if report.rows_cut:
        what = report.settings["shorten"] or "oldest messages"
        lines.append(
            f"  {report.rows_cut:,} rows shortened by {report.tokens_cut:,} tokens of '{what}' to fit max_length"
        )
    if report.windows > report.rows_kept:
        lines.append(f"  split into {report.windows:,} windows of at most {report.settings['max_length']:,} tokens")
    for reason, skips in report.rows_skipped.items():
        lines.append(f"  skipped {skips.count:,}: {reason} ({', '.join(skips.first)})")
    for what, rows in report.warnings.items():
        lines.append(f"  warning, {rows.count:,} row{'s' if rows.count > 1 else ''}: {what} ({', '.join(rows.first)})")
    lines += [f"  note: {note}" for note in report.notes]
    console.print(escape("\n".join(lines)), highlight=False)


def show_fixes(console: Console, report: FixReport) -> None:
    """Show what was mended, what was left out, and where that stands."""
    dropped = report.rows_read - report.rows_written
    lines = [
        f"{report.file}: {report.rows_written:,} of {report.rows_read:,} rows, {report.rows_changed:,} of them mended, "
        f"{dropped:,} dropped; the changes are in {report.diff}"
    ]
    lines += [
        f"  mended {cells:,} cell{'s' if cells > 1 else ''}: {fix}" for fix, cells in report.cells.items() if cells
    ]
    for reason, rows in report.rows_dropped.items():
        lines.append(f"  dropped {rows.count:,}: {reason} ({', '.join(rows.first)})")
    lines.append("what follows is about that file")
    console.print(escape("\n".join(lines)), highlight=False)


def show_lengths(console: Console, prepared: Prepared, recipe: Recipe) -> None:
    """Show how long prompts and answers are, what padding would have cost, and what an epoch is."""
    lengths = Lengths.of(prepared, recipe.packing)
    rows = len(lengths.steps)
    named = [("prompt", lengths.prompts), ("answer", lengths.answers)] if recipe.prompt else [("text", lengths.answers)]
    unit = "rows" if recipe.packing == "off" else "windows of several documents"
    lines = [line for name, of in named for line in (f"tokens of the {name}, rows", *histogram(of))]
    lines += [
        f"a row fills {lengths.share_of_window:.0%} of max_length on average; padding batches of {recipe.batch_size} "
        f"to its longest row would compute {lengths.padding(recipe.batch_size, recipe.seed):.2f} times as many tokens",
        *_steps_and_split(recipe, rows, unit, int(lengths.steps.sum())),
    ]
    console.print(escape("\n".join(lines)), highlight=False)


def _steps_and_split(recipe: Recipe, rows: int, unit: str, tokens: int) -> Iterator[str]:
    """Say how rows divide into training and validation, and how many steps they are."""
    held = 0 if recipe.val_data or rows < 2 else min(max(round(recipe.holdout * rows), 1), rows - 1)
    if recipe.holdout == 0:
        held = 0
    train, share = rows - held, held / rows
    if held:
        yield (
            f"about {train:,} {unit} ({tokens * (1 - share):,.0f} tokens) to train on, {held:,} "
            f"({tokens * share:,.0f}) held out to validate"
        )
    num_steps = recipe.num_steps(train)
    rises = f", {recipe.num_warmup_steps(num_steps):,} of them warm-up" if isinstance(recipe.schedule, str) else ""
    times = 2 + (num_steps - 1) // recipe.validate_every if recipe.validate_every else 2
    validated = f"; validated {times} times" if held or recipe.val_data else ""
    yield (
        f"{steps_per_epoch(train, recipe.batch_size):,} steps an epoch of {train:,} {unit}, {num_steps:,} in all"
        f"{rises}{validated}"
    )


def show_examples(console: Console, prepared: Prepared, decode: Callable[[list[int]], str], count: int) -> None:
    """Show the first rows as the model will see them: what is trained on between marks, and bold."""
    for row in prepared.rows.select(range(min(count, len(prepared.rows)))):
        ids, prompt = row["input_ids"], row["prompt_length"]
        trained = num_targets(len(ids), prompt, row["untrained"])
        text = Text(f"{row['source']}:{row['line']}, {len(ids)} tokens, {trained} trained on\n")
        for number, (start, end) in enumerate(pairwise(stretches(row))):
            if number % 2:
                text.append("«" + decode(ids[start:end]) + "»", style="bold")
            else:
                text.append(decode(ids[start:end]), style="dim")
        console.print(text, highlight=False)


def show_plan(console: Console, plan: Plan, notes: Sequence[str] = ()) -> None:
    """Show what a run will cost: what it needs beside what it may use, what it moves, how long it takes.

    Args:
        console: where to.
        plan: of the run.
        notes: on how the model is treated.
    """
    table = Table(title="What it will cost", show_header=False, title_justify="left")
    rows = [
        ("parameters", f"{plan.num_parameters:,}, {_share_trained(plan)}"),
        ("computed in", f"{plan.precision}: {plan.reason}"),
        ("placement", str(plan.placement)),
        *((each.resource, f"needs about {gigabytes(each.need)} of {gigabytes(each.have)}") for each in plan.needs),
        *_transfers(plan.costs),
        *_times(plan),
        ("measured", _measured(plan)),
        ("training", _amount(plan.outlook)),
        *(("note", note) for note in notes),
    ]
    for name, text in rows:
        table.add_row(name, text)
    console.print(table)


def _amount(outlook: Outlook) -> str:
    if outlook.flops is None:
        return f"{outlook.flops_per_step:.2g} FLOPs a step"
    share = f"{outlook.tokens_per_parameter:.2g} a parameter"
    return f"{outlook.flops:.2g} FLOPs on {outlook.tokens:,.0f} tokens, {share}"


def show_outlook(console: Console, outlook: Outlook, published: Published | None) -> None:
    """Show what a pre-training from scratch would take and reach, by the published law, and what was published."""
    tokens = f"{TOKENS_PER_PARAMETER} tokens a parameter, {outlook.scratch_tokens:.3g}"
    result = f"{outlook.scratch_flops:.2g} FLOPs and give a loss of {outlook.scratch_pile_loss:.2f} on the Pile"
    fitted = f"fitted from {FITTED_FLOPS[0]:.2g} to {FITTED_FLOPS[1]:.2g} FLOPs, confirmed at {CONFIRMED_FLOPS:.2g}"
    there = "" if outlook.is_in_range else "; this is outside, so do not rely on it"
    lines = [f"From scratch, {tokens}, would take {result}, by the law of Cerebras-GPT ({fitted}){there}."]
    if published:
        trained = f"trained on {published.tokens:.3g} tokens, {published.flops:.2g} FLOPs"
        lines.append(f"{published.repository} was {trained}: loss on the Pile {published.pile_loss}.")
    console.print("\n".join(lines), highlight=False)


def _share_trained(plan: Plan) -> str:
    return "all trained" if plan.num_trained == plan.num_parameters else f"{plan.num_trained:,} of them trained"


def show_training(console: Console, result: TrainResult) -> None:
    """Show what a finished run did and how fast, where the model is, and what to type next."""
    tally, meters = result.tally, result.meters
    rows = [
        ("tokens", f"{tally.tokens:,}, {tally.target_tokens:,} of them trained on, in {clock(tally.seconds)} of steps"),
        ("tokens/s", f"{meters.target_tokens_per_second:,.1f} trained on, of {meters.tokens_per_second:,.1f}"),
        ("GFLOP/s", f"{meters.hardware_gflops:,.1f}; {meters.model_gflops:,.1f} without recomputation"),
        ("of matmul rate", f"{meters.hfu:.1%}; {meters.mfu:.1%} without recomputation"),
        ("waiting", f"{meters.stall:.1%} of the time, for the stores"),
        ("moved", f"{gigabytes(tally.bytes_read)} read, {gigabytes(tally.bytes_written)} written by the stores"),
        ("peak memory", gigabytes(tally.memory_bytes)),
    ]
    if tally.device_memory_bytes:
        rows.append(("on the device", gigabytes(tally.device_memory_bytes)))
    if result.loss_before is not None and result.loss_after is not None:
        rows.insert(0, ("validation loss", f"{result.loss_before:.4f} before, {result.loss_after:.4f} after"))
        if result.exported_step != result.steps:
            rows[0] = (rows[0][0], f"{rows[0][1]} (exported: step {result.exported_step})")
    table = Table(title=f"{result.steps:,} steps", show_header=False, title_justify="left")
    for name, text in rows:
        table.add_row(name, text)
    console.print(table)
    if result.best and result.best["step"] != result.exported_step:
        console.print(escape(describe_best(result.run, result.best)), highlight=False)
    lines = [
        f"tuned model: {result.model}",
        f"next: gptj-ft evaluate {result.run} --data FILE",
        '      gptj-ft generate "prompt"',
    ]
    console.print(escape("\n".join(lines)), highlight=False)


def _transfers(costs: Costs) -> Iterator[tuple[str, str]]:
    read, written = costs.bytes_read_per_step, costs.bytes_written_per_step
    yield "moved per step", f"{gigabytes(read)} read, {gigabytes(written)} written"
    texts = [f"{gigabytes(costs.disk_bytes_written_per_step)} a step"] if costs.disk_bytes_written_per_step else []
    if costs.disk_bytes_written is not None:
        texts.append(f"{gigabytes(costs.disk_bytes_written)} in all")
    wear = costs.ssd_wear or 0.0
    warranty = f": {wear:.1%} of the {WARRANTED_BYTES / 1e12:.0f} TB that a typical 1 TB consumer SSD is warranted for"
    if texts:
        yield "disk wear", "writes " + ", ".join(texts) + (warranty if wear >= 0.001 else "")


def _times(plan: Plan) -> Iterator[tuple[str, str]]:
    costs = plan.costs
    yield "steps", f"{costs.num_steps or 'not counted without rows'}, of {plan.tokens_per_step:,.0f} tokens on average"
    parts = f"computing {_seconds(costs.compute_seconds)}"
    if costs.transfer_seconds:
        parts += f", and beside it moving bytes {_seconds(costs.transfer_seconds)}"
    yield "a step", f"about {_seconds(costs.seconds_per_step)}: {parts}"
    if costs.seconds is None:
        return
    for what, aside in (("validations", costs.validations), ("checkpoints", costs.checkpoints)):
        if aside.number * aside.seconds > 0.01 * costs.seconds:
            yield what, f"{aside.number}, about {_seconds(aside.seconds)} each"
    finish = datetime.now() + timedelta(seconds=costs.seconds)
    yield "finish", f"after about {clock(costs.seconds)}: {finish:%a %d %b, %H:%M} if it starts now"


def _measured(plan: Plan) -> str:
    disk, product = plan.rates.disk, plan.rates.compute.matmul(PRECISIONS[plan.precision])
    product_text = f"{product / 1e9:,.0f} GFLOP/s in {plan.precision}"
    if plan.rates.is_disk_assumed:
        return f"{product_text}; for the disk {disk.mixed / 1e9:.1f} GB/s is assumed: there was no room to measure it"
    busy = "; the machine was busy then" if plan.rates.compute.load > BUSY else ""
    return (
        f"{product_text}; disk reads {disk.read / 1e9:.1f} GB/s, writes {disk.write / 1e9:.1f}, "
        f"both at once {disk.mixed / 1e9:.1f}{busy} (again: plan --measure)"
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 10 else clock(seconds)


def describe_best(run: str, best: Mapping[str, Any]) -> str:
    """Say that the best state came before the end, and how to have it."""
    where = (
        f"it is kept: `gptj-ft runs export {run} FOLDER --from best`"
        if best["checkpoint"]
        else "--keep best,last keeps that state, --export best exports it"
    )
    by = [name for name in best if name not in ("step", "validation_loss", "checkpoint")]
    value = f"{by[0]} {best[by[0]]:.2f}" if by else f"{best['validation_loss']:.4f}"
    what = f"the best state by {by[0]} is that" if by else "the validation loss was lowest"
    return f"{what} after {best['step']} steps, {value}; {where}"
