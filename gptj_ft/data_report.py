"""What preparing rows tells on the terminal: what was understood, kept, left out, how long, what the model sees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from gptj_ft.data.batches import steps_per_epoch
from gptj_ft.data.lengths import Lengths, histogram
from gptj_ft.data.targets import num_targets, stretches

if TYPE_CHECKING:
    from gptj_ft.data.fixed_file import FixReport
    from gptj_ft.data.prepared import Prepared, Report
    from gptj_ft.recipe import Recipe

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
