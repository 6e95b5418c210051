"""Show prepared rows: counts, columns, reasons of skipped rows, lengths, examples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from gptj_ft.cli.terminal.screen import next_steps, panel, whole, width_of
from gptj_ft.data.batches import steps_per_epoch
from gptj_ft.data.lengths import Lengths, histogram
from gptj_ft.data.loss_mask import num_targets, spans_of
from gptj_ft.data.readers.rows import format_places
from gptj_ft.errors import listed
from gptj_ft.system.plain_text import command_line, shortened

if TYPE_CHECKING:
    from gptj_ft.config.options import Recipe
    from gptj_ft.data.checks.repair import RepairReport
    from gptj_ft.data.dataset import Prepared, Report
    from gptj_ft.training.finetune import PreparedRun
    from gptj_ft.training.prepare_data import Preparation

FILES_SHOWN = 3
LABELS_SHOWN = 12
LINES_SHOWN = 6  # of a row, its heading aside


def show_data(console: Console, report: Report) -> None:
    """Show what was understood of the rows, and what became of each."""
    files = ", ".join(report.files[:FILES_SHOWN]) + (
        f" and {len(report.files) - FILES_SHOWN} more" if len(report.files) > FILES_SHOWN else ""
    )
    is_text = "task" not in report.settings  # what is learnt is tokens, not labels
    trained = f"{report.target_tokens:,} of them trained on" if is_text else f"{report.target_tokens:,} places labelled"
    counts = f"{report.tokens:,}, {trained}; longest row {report.longest:,}"
    rows = [
        ("file" + "s" * (len(report.files) > 1), whole(files)),
        ("rows", f"{report.rows_read:,} read, {report.rows_kept:,} kept"),
        ("columns", ", ".join(_column(field, column) for field, column in report.columns.items())),
        ("tokens", counts),
    ]
    if report.labels:
        counted = zip(report.labels, report.label_counts, strict=False)
        rows.append(("labels", listed((f"{shortened(name)} {count:,}" for name, count in counted), LABELS_SHOWN)))
    if report.rows_cut:
        field = report.settings["shorten"] or ("oldest messages" if is_text else "")
        what = f" of '{field}'" if field else ""
        rows.append(("shortened", f"{report.rows_cut:,} rows by {report.tokens_cut:,} tokens{what} to fit"))
    if report.windows > report.rows_kept:
        rows.append(("split", f"into {report.windows:,} windows of at most {report.settings['max_length']:,} tokens"))
    for reason, skips in report.rows_skipped.items():
        rows.append(("skipped", f"{skips.count:,}: {reason} ({format_places(skips.first, skips.count)})"))
    for what, found in report.warnings.items():
        rows.append(
            (
                "warning",
                f"{found.count:,} row{'s' * (found.count > 1)}: {what} ({format_places(found.first, found.count)})",
            )
        )
    rows += [("note", note) for note in report.notes]
    panel(console, "Data", rows)


def _column(field: str, column: str) -> str:
    """Say where a field is from."""
    first, several, _ = column.partition("+")
    if not several:
        return f"{field} = column '{shortened(column)}'"
    trained = f"'{shortened(first)}' is trained on where it has a text, and all are right answers"
    return f"{field} = columns '{shortened(column)}' ({trained})"


def show_fixes(console: Console, report: RepairReport) -> None:
    """Show what was mended, what was left out, and where that stands."""
    dropped = report.rows_read - report.rows_written
    counts = f"{report.rows_written:,} of {report.rows_read:,}, {report.rows_changed:,} of them mended"
    rows = [("file", whole(str(report.file))), ("rows", f"{counts}, {dropped:,} dropped")]
    rows += [
        ("mended", f"{cells:,} cell{'s' if cells > 1 else ''}: {fix}") for fix, cells in report.cells.items() if cells
    ]
    for reason, found in report.rows_dropped.items():
        rows.append(("dropped", f"{found.count:,}: {reason} ({format_places(found.first, found.count)})"))
    rows.append(("changes", f"are in {whole(str(report.diff))}"))
    panel(console, "Mended, and what follows is about that file", rows)


def show_lengths(console: Console, prepared: Prepared, recipe: Recipe) -> None:
    """Show how long prompts and answers are, what padding would have cost, and what an epoch is."""
    lengths = Lengths.of(prepared, recipe.packing)
    rows = len(lengths.steps)
    named = [("prompt", lengths.prompts), ("answer", lengths.answers)] if recipe.prompt else [("text", lengths.answers)]
    if recipe.task != "language-model":
        named = [("text", lengths.prompts)]
    unit = "rows" if recipe.packing == "off" else "windows of several documents"
    for name, of in named:
        console.print(Text(f"\nTokens of the {name}, rows", style="bold"))
        console.print(Text("\n".join(histogram(of))))
    times = lengths.padding(recipe.batch_size, recipe.seed)
    padding = f"none (for comparison: other systems pad, and would compute {times:.1f} times as much)"
    filled = f"a row fills {lengths.share_of_window:.0%} of max_length on average"
    named_rows = [("window", filled), ("padding", padding)]
    panel(console, "An epoch", [*named_rows, *_steps_and_split(recipe, rows, unit, int(lengths.steps.sum()))])


def _steps_and_split(recipe: Recipe, rows: int, unit: str, tokens: int) -> Iterator[tuple[str, str]]:
    """Say how rows divide into training and validation, and how many steps they are."""
    held = 0 if recipe.val_data or rows < 2 else min(max(round(recipe.holdout * rows), 1), rows - 1)
    if recipe.holdout == 0:
        held = 0
    train, share = rows - held, held / rows
    if held:
        yield (
            "split",
            f"about {train:,} {unit} ({tokens * (1 - share):,.0f} tokens) to train on, {held:,} "
            f"({tokens * share:,.0f}) held out to validate",
        )
    num_steps = recipe.num_steps(train)
    rises = f", {recipe.num_warmup_steps(num_steps):,} of them warm-up" if isinstance(recipe.schedule, str) else ""
    times = 2 + (num_steps - 1) // recipe.validate_every if recipe.validate_every else 2
    validated = f"; validated {times} times" if held or recipe.val_data else ""
    yield (
        "steps",
        f"{steps_per_epoch(train, recipe.batch_size):,} an epoch of {train:,} {unit}, {num_steps:,} in all"
        f"{rises}{validated}",
    )


def show_rows(console: Console, run: PreparedRun, count: int | None) -> None:
    """Show the counts of a run's rows; on a terminal some rows, too: a log gets no text of the user's.

    Args:
        console: terminal or log.
        run: run that is ready to start.
        count: rows to show; ``None``: one, with its middle left out if it is long.
    """
    from gptj_ft.data.tokenization import load_row_tokenizer

    show_data(console, run.report)
    if console.is_terminal and not console.quiet:
        decode = load_row_tokenizer(run.setup.model).decode
        show_examples(console, run.rows[0], decode, 1 if count is None else count, cut=count is None)


def show_examples(
    console: Console, prepared: Prepared, decode: Callable[[list[int]], str], count: int, cut: bool = False
) -> None:
    """Show the first rows as the model will see them: what is trained on between marks, and bold.

    Args:
        console: terminal or log.
        prepared: the rows.
        decode: token ids -> text.
        count: rows to show.
        cut: whether the middle of long rows is left out; default false.
    """
    for row in prepared.rows.select(range(min(count, len(prepared.rows)))):
        ids, prompt = row["input_ids"], row["prompt_length"]
        expected = row["label"] or next(iter(row["references"]), "")
        trained = f", {num_targets(len(ids), prompt, row['untrained'])} in «» trained on"
        what = f"; expected: {shortened(expected)}" if row["targets"] else trained
        place = f"\n{row['source']}:{row['line']} as the model sees it"
        text = Text.assemble((f"{place}: {len(ids)} tokens{what}\n", "bold"))
        for span, is_trained_on in filter(itemgetter(0), spans_of(row, decode)):
            text.append(f"«{span}»" if is_trained_on else span, style="bold" if is_trained_on else "dim")
        # On a terminal, words are not torn apart; a log has the text as it is.
        console.print(in_few_lines(text, console) if cut else text, soft_wrap=not console.is_terminal)


def in_few_lines(text: Text, console: Console) -> Text:
    """Return a text as lines of the terminal, few enough: the beginning and the end, which is what is trained on."""
    lines = text.wrap(console, width_of(console))
    if len(lines) <= LINES_SHOWN + 2:  # an empty line and the heading are before them
        return text
    first, last = lines[: LINES_SHOWN - 1], lines[len(lines) - 2 :]
    left = len(lines) - len(first) - len(last)
    return Text("\n").join([*first, Text(f"  ... {left:,} more lines; --show 1 shows them ..."), *last])


def show_preparation(console: Console, done: Preparation, report: Path | None, num_examples: int | None) -> None:
    """Show what became of the rows, what the model will see, and what to type next; a log gets no row unasked."""
    if done.fixes:
        show_fixes(console, done.fixes)
    show_data(console, done.prepared.report)
    show_lengths(console, done.prepared, done.recipe)
    num_examples = int(console.is_terminal) if num_examples is None else num_examples
    show_examples(console, done.prepared, done.tokenizer.decode, num_examples)
    page = [("report", whole(str(report)))] if report else []
    panel(console, "Written", [("tokens", whole(str(done.targets.folder))), *page])
    model = ("--model", done.recipe.model) if done.recipe.model else ()
    next_steps(console, command_line("finetune", "--recipe", done.recipe.recipe, "--data", done.targets.folder, *model))
