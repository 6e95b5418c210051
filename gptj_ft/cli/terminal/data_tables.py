"""Show prepared rows: counts, columns, skipped rows, lengths, examples."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from gptj_ft.cli.data_facts import Pairs, data_facts, data_rows, epoch_rows, repair_rows, tokens_by_part
from gptj_ft.cli.terminal.screen import next_steps, panel, whole, width_of
from gptj_ft.data.lengths import Lengths, histogram
from gptj_ft.data.loss_mask import num_targets, spans_of
from gptj_ft.system.plain_text import command_line, shortened

if TYPE_CHECKING:
    from gptj_ft.config.options import Recipe
    from gptj_ft.data.dataset import Prepared, Report
    from gptj_ft.training.finetune import PreparedRun
    from gptj_ft.training.prepare_command import Preparation

LINES_SHOWN = 6  # of an abridged row, without its heading


def show_data(console: Console, report: Report) -> None:
    """Show the files, the columns and the fate of every row."""
    panel(console, "Data", _with_whole_paths(data_rows(report.to_dict())))


def _with_whole_paths(rows: Pairs) -> Pairs:
    return [(label, whole(text) if label in ("file", "files") else text) for label, text in rows]


def show_lengths(console: Console, prepared: Prepared, recipe: Recipe) -> None:
    """Show token lengths, the cost that padding would have had, and the steps of an epoch."""
    lengths = Lengths.of(prepared, recipe.packing)
    for name, tokens in tokens_by_part(lengths, recipe).items():
        console.print(Text(f"\nTokens of the {name}, rows", style="bold"))
        console.print(Text("\n".join(histogram(tokens))))
    is_packed = recipe.packing != "off" and prepared.report.rows_kept > 1
    packed = [("packing", f"{len(lengths.steps):,} windows of several documents")] if is_packed else []
    panel(console, "An epoch", [*packed, *epoch_rows(data_facts(prepared, recipe), recipe)])


def show_rows(console: Console, run: PreparedRun, count: int | None) -> None:
    """Show the counts of a run's rows, and examples on a terminal; a log gets no text of rows.

    Args:
        run: run that is ready to start.
        count: rows to show; ``None``: one, abridged.
    """
    from gptj_ft.data.tokenization import load_row_tokenizer

    show_data(console, run.report)
    if console.is_terminal and not console.quiet:
        decode = load_row_tokenizer(run.setup.model).decode
        show_examples(console, run.rows[0], decode, 1 if count is None else count, cut=count is None)


def show_examples(
    console: Console, prepared: Prepared, decode: Callable[[list[int]], str], count: int, cut: bool = False
) -> None:
    """Show the first rows as the model reads them; training targets are bold and between marks.

    Args:
        decode: token ids -> text.
        cut: abridge long rows.
    """
    for row in prepared.rows.select(range(min(count, len(prepared.rows)))):
        ids, prompt = row["input_ids"], row["prompt_length"]
        expected = row["label"] or next(iter(row["references"]), "")
        trained = f", {num_targets(len(ids), prompt, row['untrained'])} in «» trained on"
        target = f"; expected: {shortened(expected)}" if row["targets"] else trained
        place = f"\n{row['source']}:{row['line']} as the model reads it"
        text = Text.assemble((f"{place}: {len(ids)} tokens{target}\n", "bold"))
        for span, is_trained_on in filter(itemgetter(0), spans_of(row, decode)):
            text.append(f"«{span}»" if is_trained_on else span, style="bold" if is_trained_on else "dim")
        # Wrap between words on a terminal; leave the text unchanged in a log.
        console.print(in_few_lines(text, console) if cut else text, soft_wrap=not console.is_terminal)


def in_few_lines(text: Text, console: Console) -> Text:
    """Abridge a text to its first lines and its last ones, which hold the training target."""
    lines = text.wrap(console, width_of(console))
    if len(lines) <= LINES_SHOWN + 2:  # an empty line and the heading come first
        return text
    first, last = lines[: LINES_SHOWN - 1], lines[len(lines) - 2 :]
    left = len(lines) - len(first) - len(last)
    return Text("\n").join([*first, Text(f"  ... {left:,} more lines; --show 1 shows them ..."), *last])


def show_preparation(console: Console, done: Preparation, report: Path | None, num_examples: int | None) -> None:
    """Show the fate of the rows, examples and the next command; a log gets examples on request only."""
    if done.fixes:
        panel(console, "Fixed file, described below", _with_whole_paths(repair_rows(done.fixes.to_dict())))
    show_data(console, done.prepared.report)
    show_lengths(console, done.prepared, done.recipe)
    num_examples = int(console.is_terminal) if num_examples is None else num_examples
    show_examples(console, done.prepared, done.tokenizer.decode, num_examples)
    page = [("report", whole(str(report)))] if report else []
    panel(console, "Written", [("tokens", whole(str(done.targets.folder))), *page])
    model = ("--model", done.recipe.model) if done.recipe.model else ()
    next_steps(console, command_line("finetune", "--recipe", done.recipe.recipe, "--data", done.targets.folder, *model))
