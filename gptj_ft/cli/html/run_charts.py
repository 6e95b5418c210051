"""Draw the charts of a run, or of several runs, from their histories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from markupsafe import Markup

from gptj_ft.cli.html.charts import FEWEST_JOINED, Axis, Line, Point, line_chart
from gptj_ft.cli.html.history import Curve, History

SMOOTHED = 100  # runs with at least this many steps get a smoothed line
NATS = "nats per target token"
DEVICE = "device"  # memory line of accelerators
MEMORY = "Peak memory"
# Charts on the machine: title, axis, and for each line its name, metric and unit.
MACHINE: Sequence[tuple[str, str, Sequence[tuple[str, str, float]]]] = (
    ("Learning rate", "learning rate", [("learning rate", "lr", 1)]),
    ("Gradient norm, before clipping", "norm", [("norm", "grad_norm", 1)]),
    ("Loss scale", "factor", [("loss scale", "loss_scale", 1)]),
    ("Throughput", "target tokens / s", [("throughput", "target_tokens_per_second", 1)]),
    (MEMORY, "GB", [("process", "memory_bytes", 1e9), (DEVICE, "device_memory_bytes", 1e9)]),
    ("Waiting for the stores", "% of the step", [("waiting", "stall", 0.01)]),
    ("Moved by the stores in a step", "GB", [("read", "bytes_read", 1e9), ("written", "bytes_written", 1e9)]),
)
NUM_WITHOUT_STORES = 5  # charts of a run without host or disk stores
Chart = dict[str, Any]  # title, note and svg; pages skip empty charts


def learning_charts(history: History, main: str = "") -> list[Chart]:
    """Draw losses, the lowest validation loss marked, and scores of the sample, the ``main`` one first."""
    loss, validation = history.curve("loss"), history.validation
    losses, notes = [Line("training", loss.points)], []
    if loss.count >= SMOOTHED:
        losses = [Line("training", _smoothed(loss.means)), Line("each step", loss.points, is_faint=True)]
        notes.append(f"training: mean of {_width(loss.count)} steps; thin: each step")
    losses.append(Line("validation", validation.points, marks_lowest=True))
    if validation.count >= FEWEST_JOINED:
        step, lowest = validation.lowest
        notes.append(f"ring: lowest validation loss, {lowest:.4f} after step {step:,}")
    scores = [
        _chart(f"{name} of the sample", Axis(name), [Line(name, curve.points)])
        for name, curve in sorted(history.scores.items(), key=lambda item: (item[0] != main, item[0]))
    ]
    return [_chart("Loss", Axis(NATS), losses, "; ".join(notes)), *scores]


def machine_charts(history: History, planned: Mapping[str, float] | None = None) -> list[Chart]:
    """Draw charts on the machine; those on stores only if bytes were moved.

    Args:
        history: metrics of the run.
        planned: planned memory in bytes, by name of its line.
    """
    charts = []
    for title, axis, parts in MACHINE if history.moves else MACHINE[:NUM_WITHOUT_STORES]:
        drawn = [Line(name, _scaled(history.curve(of), unit)) for name, of, unit in parts]
        drawn = [line for line in drawn if line.name != DEVICE or any(y for _, y in line.points)]
        if title == MEMORY and drawn and drawn[0].points:
            first, last = drawn[0].points[0][0], drawn[0].points[-1][0]
            ends = [(name, size / 1e9) for name, size in (planned or {}).items()]
            drawn += [Line(name, [(first, y), ((first + last) / 2, y), (last, y)]) for name, y in ends]
        charts.append(_chart(title, Axis(axis, from_zero=True), drawn))
    return charts


def compared_charts(runs: Sequence[tuple[str, History]]) -> list[Chart]:
    """Draw loss charts of several runs."""
    validation = [Line(name, history.validation.points, marks_lowest=True) for name, history in runs]
    training = [Line(name, _smoothed(history.curve("loss").means)) for name, history in runs]
    return [
        _chart("Validation loss", Axis(NATS), validation, "ring: the lowest of a run"),
        _chart("Training loss", Axis(NATS), training, "means of a twentieth of the steps"),
    ]


def compared_machines(runs: Sequence[tuple[str, History]]) -> list[Chart]:
    """Draw charts on the machine of several runs."""
    charts = []
    for title, axis, ((_, of, unit), *_) in MACHINE[:NUM_WITHOUT_STORES]:
        drawn = [Line(name, _scaled(history.curve(of), unit)) for name, history in runs]
        charts.append(_chart(title, Axis(axis, from_zero=True), drawn))
    return charts


def _chart(title: str, y: Axis, lines: Sequence[Line], note: str = "") -> Chart:
    return {"title": title, "note": note, "svg": Markup(line_chart(title, Axis("step"), y, lines))}


def _scaled(curve: Curve, unit: float) -> list[Point]:
    return [(x, y / unit) for x, y in curve.points]


def _width(num_points: int) -> int:
    return max(2, num_points // 20)


def _smoothed(points: Sequence[Point]) -> list[Point]:
    """Return the moving average over a twentieth of the points."""
    half = _width(len(points)) // 2
    # Prefix sums: the time does not grow with the width of the average.
    sums = list(accumulate((y for _, y in points), initial=0.0))
    spans = [(max(0, at - half), min(len(points), at + half + 1)) for at in range(len(points))]
    return [(x, (sums[end] - sums[start]) / (end - start)) for (x, _), (start, end) in zip(points, spans, strict=True)]
