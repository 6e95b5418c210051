"""Run a model with a head on labelled rows: what the head gives for each row, window by window, and the loss.

Axis letters: S rows that the head reads in a window, C its outputs for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from gptj_ft.data.batches import Rows, first_fit
from gptj_ft.data.table import TokenTable
from gptj_ft.evaluation.likelihood import passes
from gptj_ft.models.batch import Marks
from gptj_ft.planning.inference_plan import TokenBudget
from gptj_ft.streaming.objective import Objective, StepLoss
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.streaming.scoring import head_outputs

Outputs = NDArray[np.float32]
NO_TOKEN_LIMIT = 2**62  # tokens: no limit


@dataclass(frozen=True)
class RowOutput:
    """What a head gives for a row, and what the row says is right.

    Attributes:
        outputs: outputs for each of its windows, [S, C].
        marks: tokens read and targets of each window.
        offsets: start and end character of each token in the text, for a span's windows; empty for other tasks.
        texts: context, words or sentences of the row; empty where there are none.
        references: accepted answers.
        place: file and line.
    """

    outputs: Sequence[Outputs]
    marks: Sequence[Marks]
    offsets: Sequence[NDArray[np.int64]]
    texts: Sequence[str]
    references: Sequence[str]
    place: str


def outputs_of(
    offloaded: OffloadedModel,
    rows: Rows,
    objective: Objective,
    together: TokenBudget,
    before_pass: Callable[[], None] = lambda: None,
    loss: Callable[[StepLoss], object] | None = None,
) -> Iterator[Outputs]:
    """Yield the outputs of the head for each document, [S, C].

    Args:
        offloaded: model.
        rows: documents.
        objective: objective that the head was trained with.
        together: tokens computed at once, and in a pass over the weights.
        before_pass: called before each pass over the weights; may raise to stop.
        loss: receiver of the loss of each micro-batch; default: the rows have no targets, and none is computed.
    """
    for span in passes(rows.lengths, together.read):
        before_pass()
        groups = first_fit([rows.lengths[row] for row in span], together.computed)
        numbers = [[span.start + place for place in group] for group in groups]
        batches = [batch.to(offloaded.device) for group in numbers for batch in rows.batches(group, NO_TOKEN_LIMIT)]
        found: dict[int, Outputs] = {}
        for group, batch, output_SC in zip(numbers, batches, head_outputs(offloaded, batches, objective), strict=True):
            if loss is not None:
                total, _ = objective.loss(output_SC, batch, batch.target_positions_T)
                loss(StepLoss(float(total), objective.weight(batch), num_targets=batch.num_targets))
            whole = output_SC.cpu().numpy()
            ends = pairwise((0, *batch.row_ends))
            found |= {row: whole[start:end] for row, (start, end) in zip(group, ends, strict=True)}
        yield from (found[row] for row in span)


def row_outputs(table: TokenTable, rows: Rows, outputs: Iterator[Outputs]) -> Iterator[RowOutput]:
    """Yield the outputs of whole rows: windows that continue a row belong to it.

    Args:
        table: the rows, as they were prepared.
        rows: the same, as documents.
        outputs: outputs of the head for each document.
    """
    assert rows.marks is not None
    columns = ("continues", "texts", "references", "source", "line", "offsets")
    window: list[tuple[Outputs, Marks, NDArray[np.int64]]] = []
    about: tuple[Sequence[str], Sequence[str], str] = (), (), ""

    def whole() -> RowOutput:
        given, marks, offsets = zip(*window, strict=True)
        return RowOutput(given, marks, offsets, *about)

    for output_SC, marks, (continues, texts, references, source, line, offsets) in zip(
        outputs, rows.marks, zip(*(table[name] for name in columns), strict=True), strict=True
    ):
        if window and not continues:
            yield whole()
            window.clear()
        if not window:
            about = texts, references, f"{source}:{line}"
        window.append((output_SC, marks, np.asarray(offsets, np.int64).reshape(-1, 2)))
    if window:
        yield whole()


def split_rows(table: TokenTable, most_tokens: int) -> Iterator[range]:
    """Yield ranges of documents of about so many tokens, none of which parts the windows of a row."""
    start = tokens = 0
    for number, (length, continues) in enumerate(zip(table.lengths().tolist(), table["continues"], strict=True)):
        if not continues and number > start and tokens + length > most_tokens:
            yield range(start, number)
            start, tokens = number, 0
        tokens += length
    if start < len(table):
        yield range(start, len(table))
