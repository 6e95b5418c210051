"""Draw charts as SVG inside a page: round ticks, lines labelled at their ends, the colours of the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gptj_ft.cli.html import fill_template

WIDTH, HEIGHT = 560, 270
LEFT, RIGHT, TOP, BOTTOM = 70, 18, 34, 46
CHARACTER = 10.2  # width of a character on a phone, which uses the largest font
NAME_HEIGHT = 20  # height of a label
MOST_LABEL = 15  # characters of a label
COLOURS = 6  # --c0 to --c5 in the style of the page
DASHES = ("", "6 3", "2 3", "8 3 2 3")  # distinguish lines without colour
MOST_POINTS = 400
MARKED = 25  # lines with at most this many points get marks
FEWEST_JOINED = 3  # points to draw a line; two are no trend
POWERS = 1e-3, 1e6  # numbers outside this range get a power of ten
REACH = 42.0  # percent of a strip's width from its middle to the end of its scale
Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """Line of a chart."""

    name: str  # label at the end of the line
    points: Sequence[Point]  # (x, y), in the order of x; non-finite points are skipped
    is_faint: bool = False  # thin and without a label
    marks_lowest: bool = False  # draw a ring around the lowest point


@dataclass(frozen=True)
class Axis:
    """Axis of a chart."""

    name: str  # with unit
    from_zero: bool = False


@dataclass(frozen=True)
class Change:
    """Change of a score, see `change_strip`; the sign is chosen so that more is better."""

    name: str  # of the score
    text: str  # formatted change
    value: float  # new minus old
    ends: tuple[float, float] | None  # 95 % interval, if known
    verdict: str  # better, worse or unclear

    @property
    def reach(self) -> float:
        """Largest magnitude of value and interval."""
        return max(abs(self.value), *map(abs, self.ends or (self.value,)))


def round_ticks(low: float, high: float) -> list[float]:
    """Return about six ticks that enclose a range; their steps are 1, 2 or 5 times a power of ten."""
    if high <= low:
        margin = abs(low) * 0.1 or 1.0
        low, high = (low - margin if low else 0.0), high + margin
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    # The small term absorbs rounding: 0.3 / 0.1 is 2.9999999999999996.
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def tick_texts(ticks: Sequence[float]) -> list[str]:
    """Format ticks with a common number of decimals."""
    step, largest = ticks[1] - ticks[0], max(map(abs, ticks))
    if largest < POWERS[0] or largest >= POWERS[1]:
        power = math.floor(math.log10(largest))
        decimals = max(0, power - math.floor(math.log10(step) + 1e-9))
        return ["0" if not tick else f"{tick / 10**power:.{decimals}f}e{power}" for tick in ticks]
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return [f"{tick:,.{decimals}f}" for tick in ticks]


def line_chart(title: str, x: Axis, y: Axis, lines: Sequence[Line]) -> str:
    """Draw a chart of lines; return an empty text if there are no points or, from zero, all values are 0."""
    finite = [(line, [point for point in line.points if all(map(math.isfinite, point))]) for line in lines]
    lines = [replace(line, points=_thinned(points)) for line, points in finite if points]
    xs, ys = ([point[axis] for line in lines for point in line.points] for axis in (0, 1))
    if not lines or (y.from_zero and not any(ys)):
        return ""
    y_ticks = round_ticks(min(0.0, *ys) if y.from_zero else min(ys), max(ys))
    left, right = min(xs), max(xs)
    named = [line for line in lines if not line.is_faint]
    names = [_short(line.name) for line in named] if len(named) > 1 else []
    margin = RIGHT + CHARACTER * max(map(len, names), default=0)

    def place(px: float, py: float) -> Point:
        across = LEFT + (px - left) / ((right - left) or 1) * (WIDTH - LEFT - margin)
        down = (py - y_ticks[0]) / (y_ticks[-1] - y_ticks[0]) * (HEIGHT - BOTTOM - TOP)
        return round(across, 1), round(HEIGHT - BOTTOM - down, 1)

    x_ticks = _inner_ticks(left, right)
    drawn = [_drawn(line, 0, place) for line in lines if line.is_faint]
    drawn += [_drawn(line, number, place) for number, line in enumerate(named)]
    heights = _apart([place(*line.points[-1])[1] for line in named]) if names else []
    description = "; ".join(f"{line.name} from {line.points[0][1]:.4g} to {line.points[-1][1]:.4g}" for line in named)
    facts = {
        "label": f"{title} by {x.name}, {left:,.4g} to {right:,.4g}: {description}",
        "axes": (x.name, y.name),
        "is_from_zero": not y_ticks[0],
        "box": {"left": LEFT, "right": place(right, y_ticks[0])[0], "bottom": HEIGHT - BOTTOM},
        "rows": [(text, place(right, at)[1]) for text, at in zip(tick_texts(y_ticks), y_ticks, strict=True)],
        "columns": [(text, place(at, y_ticks[0])[0]) for text, at in zip(_x_texts(x_ticks), x_ticks, strict=True)],
        "lines": drawn,
        "names": [(name, _colour(number), heights[number]) for number, name in enumerate(names)],
    }
    return fill_template("chart.svg", {"width": WIDTH, "height": HEIGHT, **facts})


def _drawn(line: Line, number: int, place: Callable[[float, float], Point]) -> dict[str, Any]:
    points, is_joined = [place(*point) for point in line.points], len(line.points) >= FEWEST_JOINED
    return {
        "path": "L".join(f"{x} {y}" for x, y in points),
        "marks": points if len(points) <= MARKED and not line.is_faint else [],
        "lowest": place(*lowest_of(line.points)) if line.marks_lowest and is_joined else None,
        "is_joined": is_joined,
        "is_faint": line.is_faint,
        "colour": _colour(number),
        "dashes": "" if line.is_faint else DASHES[number % len(DASHES)],
    }


def lowest_of(points: Sequence[Point]) -> Point:
    """Return the first point with the lowest y."""
    return min(points, key=lambda point: point[1])


def change_strip(change: Change, reach: float | None = None) -> str:
    """Draw the change of a score and its interval on a strip with 0 in the middle.

    Args:
        change: change of the score; a non-finite one gives an empty text.
        reach: value at the ends of the strip; default `Change.reach`.
    """
    ends = change.ends or (change.value, change.value)
    if not all(map(math.isfinite, (change.value, *ends))):
        return ""
    reach = reach or change.reach or 1.0
    between = f", 95 % interval {ends[0]:.4g} to {ends[1]:.4g}, more is better" if change.ends else ""
    facts = {
        "places": [round(50 + REACH * each / reach, 2) for each in (ends[0], change.value, ends[1])],
        "text": change.text,
        "verdict": change.verdict or "unclear",
        "label": f"{change.name}: change {change.text}{between}; {change.verdict or 'no verdict'}",
    }
    return fill_template("strip.svg", facts)


def _inner_ticks(low: float, high: float) -> list[float]:
    """Return the ends of the data and round ticks between them."""
    least = (high - low) / 7  # distance between ticks, so that their labels fit
    inner = [
        tick
        for tick in round_ticks(low, high)
        if low + least < tick < high - least and (tick == int(tick) or high - low < 2)
    ]
    return [low, *inner, high] if high > low else [low]


def _x_texts(ticks: Sequence[float]) -> list[str]:
    return [f"{tick:,.0f}" if tick == int(tick) else f"{tick:,.3g}" for tick in ticks]


def _apart(heights: Sequence[float]) -> list[float]:
    """Move heights apart so that labels do not overlap."""
    placed: dict[int, float] = {}
    # Lowest place of the first label that leaves room for all others below it.
    lowest = HEIGHT - BOTTOM - NAME_HEIGHT * (len(heights) - 1)
    last = -math.inf
    for rank, number in enumerate(sorted(range(len(heights)), key=lambda number: heights[number])):
        last = placed[number] = max(min(heights[number], lowest + NAME_HEIGHT * rank), last + NAME_HEIGHT)
    return [placed[number] for number in range(len(heights))]


def _colour(number: int) -> str:
    return f"var(--c{number % COLOURS})"


def _short(name: str) -> str:
    return name if len(name) <= MOST_LABEL else "..." + name[3 - MOST_LABEL :]


def _thinned(points: Sequence[Point]) -> list[Point]:
    """Thin out dense points: keep the lowest and the highest point of each stretch."""
    if len(points) <= MOST_POINTS:
        return list(points)
    size = 2 * len(points) / MOST_POINTS
    kept = []
    for start in range(MOST_POINTS // 2):
        stretch = points[int(start * size) : int((start + 1) * size)]
        kept += sorted({min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])})
    return [points[0], *kept, points[-1]]
