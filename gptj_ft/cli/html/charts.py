"""Charts as SVG inside a page: round numbers and units, lines named at their ends, the colours of the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 270
LEFT, RIGHT, TOP, BOTTOM = 66, 18, 34, 46
CHARACTER = 10.2  # width of one on a phone, where letters are the largest
NAME_HEIGHT = 20  # height of a line's name
MOST_LABEL = 15  # characters of it
COLOURS = 6  # in the page's style: --c0 and so on
DASHES = ("", "6 3", "2 3", "8 3 2 3")  # so that lines differ without colours, too
MOST_POINTS = 400
MARKED = 25  # points that are so few get marks
FEWEST_JOINED = 3  # two points are no trend
POWERS = 1e-3, 1e6  # numbers outside are written with a power of ten
REACH = 42.0  # percent of a strip's width, from its middle to the far end of the interval
Projection = Callable[[float, float], tuple[float, float]]  # values -> where they are drawn


@dataclass(frozen=True)
class Line:
    """Points in the order of x; what is not finite is left out.

    Attributes:
        name: written at the end of the line.
        points: (x, y).
        is_faint: whether it is in the background, without a name.
        marks_lowest: whether the lowest point has a ring.
    """

    name: str
    points: Sequence[tuple[float, float]]
    is_faint: bool = False
    marks_lowest: bool = False


@dataclass(frozen=True)
class Axis:
    """What an axis says: its name with the unit, whether it begins at 0."""

    name: str
    from_zero: bool = False


@dataclass(frozen=True)
class Change:
    """Change of a score, for `change_strip`.

    Attributes:
        name: name of the score.
        text: the change as it is written.
        value: new minus old, turned so that more is better.
        ends: ends of its 95 % interval, turned as well; ``None``: there is no interval.
        verdict: ``better``, ``worse`` or ``unclear``.
    """

    name: str
    text: str
    value: float
    ends: tuple[float, float] | None
    verdict: str

    @property
    def reach(self) -> float:
        """Distance from 0 of the farthest of value and ends."""
        return max(abs(self.value), *map(abs, self.ends or (self.value,)))


def round_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return round numbers, at equal steps of 1, 2 or 5 times a power of ten, that enclose a range.

    Args:
        low: lower end of the range.
        high: upper end of the range, at least ``low``.
        most: greatest number of ticks, about.
    """
    if high <= low:
        margin = abs(low) * 0.1 or 1.0
        low, high = (low - margin if low else 0.0), high + margin
    rough = (high - low) / max(most - 1, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def tick_texts(ticks: Sequence[float]) -> list[str]:
    """Return numbers as people read them, all with the same decimals."""
    step, largest = ticks[1] - ticks[0], max(map(abs, ticks))
    if largest < POWERS[0] or largest >= POWERS[1]:
        power = math.floor(math.log10(largest))
        decimals = max(0, power - math.floor(math.log10(step) + 1e-9))
        return ["0" if not tick else f"{tick / 10**power:.{decimals}f}e{power}" for tick in ticks]
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return [f"{tick:,.{decimals}f}" for tick in ticks]


def line_chart(title: str, x: Axis, y: Axis, lines: Sequence[Line]) -> str:
    """Return a chart of lines; an empty text if there is nothing to show: no point, or amounts that are all 0."""
    lines = [
        Line(
            line.name,
            _thinned([p for p in line.points if all(map(math.isfinite, p))]),
            line.is_faint,
            line.marks_lowest,
        )
        for line in lines
    ]
    lines = [line for line in lines if line.points]
    xs, ys = ([point[axis] for line in lines for point in line.points] for axis in (0, 1))
    if not lines or (y.from_zero and not any(ys)):
        return ""
    y_ticks = round_ticks(min(0.0, *ys) if y.from_zero else min(ys), max(ys))
    left, right = min(xs), max(xs)
    named = [line for line in lines if not line.is_faint]
    names = [_short(line.name) for line in named] if len(named) > 1 else []
    margin = RIGHT + CHARACTER * max(map(len, names), default=0)

    def place(px: float, py: float) -> tuple[float, float]:
        across = LEFT + (px - left) / ((right - left) or 1) * (WIDTH - LEFT - margin)
        return across, HEIGHT - BOTTOM - (py - y_ticks[0]) / (y_ticks[-1] - y_ticks[0]) * (HEIGHT - BOTTOM - TOP)

    parts = _grid(place, (_inner_ticks(left, right), y_ticks), (x.name, y.name), right)
    for line in [*(line for line in lines if line.is_faint), *named]:
        parts += _drawn(line, 0 if line.is_faint else named.index(line), place)
    heights = _apart([place(*line.points[-1])[1] for line in named]) if names else []
    for number, (name, height) in enumerate(zip(names, heights, strict=True)):
        at = f'x="{WIDTH - margin + 10:.0f}" y="{height + 4:.1f}"'
        parts.append(f'<text {at} style="fill:{_colour(number)}">{escape(name)}</text>')
    told = "; ".join(f"{line.name} from {line.points[0][1]:.4g} to {line.points[-1][1]:.4g}" for line in named)
    return _svg(f"{title} by {x.name}, {left:,.4g} to {right:,.4g}: {told}", parts)


def lowest_of(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the point with the least y, the first of them."""
    return min(points, key=lambda point: point[1])


def change_strip(change: Change, reach: float | None = None) -> str:
    """Return the change of a score with its interval around 0, as a strip that is as wide as its place.

    Args:
        change: change of the score; empty where it is not finite.
        reach: value at either end of the strip; by default the scale is the strip's own, see `Change.reach`.
    """
    ends = change.ends or (change.value, change.value)
    if not all(map(math.isfinite, (change.value, *ends))):
        return ""
    reach = reach or change.reach or 1.0
    low, at, high = (50 + REACH * each / reach for each in (ends[0], change.value, ends[1]))
    anchor = "start" if at < 15 else "end" if at > 85 else "middle"
    between = f", 95 % interval {ends[0]:.4g} to {ends[1]:.4g}, more is better" if change.ends else ""
    told = escape(f"{change.name}: change {change.text}{between}; {change.verdict or 'no verdict'}", quote=True)
    parts = ['<line class="zero" x1="50%" x2="50%" y1="0" y2="36"/>']
    if change.ends:
        parts.append(f'<line class="span" x1="{low:.2f}%" x2="{high:.2f}%" y1="24" y2="24"/>')
    parts.append(f'<circle cx="{at:.2f}%" cy="24" r="4.5"/>')
    parts.append(f'<text class="halo" x="{at:.2f}%" y="13" text-anchor="{anchor}">{escape(change.text)}</text>')
    kind = change.verdict or "unclear"
    return f'<svg class="strip {kind}" height="36" role="img" aria-label="{told}">{"".join(parts)}</svg>'


def _drawn(line: Line, number: int, place: Projection) -> list[str]:
    points, colour = [place(*point) for point in line.points], _colour(number)
    style = f'stroke="{colour}" stroke-width="{1 if line.is_faint else 2}" opacity="{0.4 if line.is_faint else 1}"'
    dash = "" if line.is_faint else DASHES[number % len(DASHES)]
    parts = []
    if len(points) >= FEWEST_JOINED:
        path = "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in points)
        parts.append(f'<path d="{path}" fill="none" {style} stroke-dasharray="{dash}" stroke-linejoin="round"/>')
    if len(points) <= MARKED and not line.is_faint:
        parts += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{colour}"/>' for px, py in points]
    if line.marks_lowest and len(points) >= FEWEST_JOINED:
        px, py = place(*lowest_of(line.points))
        parts.append(f'<circle class="lowest" cx="{px:.1f}" cy="{py:.1f}" r="7" fill="none" stroke="{colour}"/>')
    return parts


def _grid(
    place: Projection, ticks: tuple[Sequence[float], Sequence[float]], names: tuple[str, str], right: float
) -> list[str]:
    (x_ticks, y_ticks), (x, y), parts = ticks, names, []
    end = place(right, y_ticks[0])[0]
    y_texts = tick_texts(y_ticks)
    for tick, text in zip(y_ticks, y_texts, strict=True):
        py = place(right, tick)[1]
        parts.append(f'<path d="M{LEFT} {py:.1f}H{end:.1f}" stroke="var(--grid)"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{py + 4:.1f}" text-anchor="end">{text}</text>')
    for tick, text in zip(x_ticks, _x_texts(x_ticks), strict=True):
        px = place(tick, y_ticks[0])[0]
        parts.append(f'<text x="{px:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{text}</text>')
    parts.append(f'<path d="M{LEFT} {HEIGHT - BOTTOM}H{end:.1f}" stroke="var(--dim)"/>')
    middle = (LEFT + end) / 2
    parts.append(f'<text class="unit" x="{middle:.0f}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x)}</text>')
    span = f", axis {y_texts[0]} to {y_texts[-1]}" if y_ticks[0] else ""
    return [*parts, f'<text class="unit" x="0" y="14">{escape(y)}{span}</text>']


def _inner_ticks(low: float, high: float) -> list[float]:
    """Return round numbers within a range, and its ends: an axis ends where the data ends."""
    least = (high - low) / 7  # between two of them, so that their texts have room
    inner = [
        tick
        for tick in round_ticks(low, high)
        if low + least < tick < high - least and (tick == int(tick) or high - low < 2)
    ]
    return [low, *inner, high] if high > low else [low]


def _x_texts(ticks: Sequence[float]) -> list[str]:
    return [f"{tick:,.0f}" if tick == int(tick) else f"{tick:,.3g}" for tick in ticks]


def _apart(heights: Sequence[float]) -> list[float]:
    """Return heights, moved so that names there do not cover each other."""
    placed: dict[int, float] = {}
    lowest = HEIGHT - BOTTOM - NAME_HEIGHT * (len(heights) - 1)
    last = -math.inf
    for rank, number in enumerate(sorted(range(len(heights)), key=lambda number: heights[number])):
        last = placed[number] = max(min(heights[number], lowest + NAME_HEIGHT * rank), last + NAME_HEIGHT)
    return [placed[number] for number in range(len(heights))]


def _colour(number: int) -> str:
    return f"var(--c{number % COLOURS})"


def _svg(title: str, parts: Sequence[str]) -> str:
    head = f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
    return f'{head} aria-label="{escape(title, quote=True)}">{"".join(parts)}</svg>'


def _short(name: str) -> str:
    return name if len(name) <= MOST_LABEL else "..." + name[3 - MOST_LABEL :]


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Leave out what nobody could see: of each stretch, the lowest and the highest point stay."""
    if len(points) <= MOST_POINTS:
        return list(points)
    size = 2 * len(points) / MOST_POINTS
    kept = []
    for start in range(MOST_POINTS // 2):
        stretch = points[int(start * size) : int((start + 1) * size)]
        kept += sorted({min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])})
    return [points[0], *kept, points[-1]]
