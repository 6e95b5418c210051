"""Charts as SVG inside a page: axes with round numbers and units, a legend, the colours of the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 250
LEFT, RIGHT, TOP, BOTTOM = 70, 14, 12, 42
LEGEND = 20  # height of its line
COLOURS = 6  # in the page's style: --c0 and so on
DASHES = ("", "6 3", "2 3", "8 3 2 3")  # so that lines differ without colours, too
MOST_POINTS = 400
MARKED = 25  # points that are so few get marks
POWERS = 1e-3, 1e6  # numbers outside are written with a power of ten
Place = Callable[[float, float], tuple[float, float]]  # values -> where they are drawn


@dataclass(frozen=True)
class Line:
    """Points in the order of x; what is not finite is left out.

    Attributes:
        name: for the legend.
        points: (x, y).
        is_faint: whether it is in the background.
    """

    name: str
    points: Sequence[tuple[float, float]]
    is_faint: bool = False


@dataclass(frozen=True)
class Axis:
    """What an axis says: its name with the unit, whether it begins at 0."""

    name: str
    from_zero: bool = False


@dataclass(frozen=True)
class Span:
    """A value with its interval, of one of several systems, for `intervals_chart`."""

    value: float
    low: float | None
    high: float | None


def round_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return round numbers, at equal steps of 1, 2 or 5 times a power of ten, that enclose a range.

    Args:
        low: of the range.
        high: of the range, at least ``low``.
        most: of them, about.
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
    """Return a chart of lines; an empty text if there is nothing to show."""
    lines = [
        Line(line.name, _thinned([p for p in line.points if all(map(math.isfinite, p))]), line.is_faint)
        for line in lines
    ]
    lines = [line for line in lines if line.points]
    if not lines:
        return ""
    xs, ys = ([point[axis] for line in lines for point in line.points] for axis in (0, 1))
    x_ticks = [tick for tick in round_ticks(min(xs), max(xs)) if tick == int(tick) or max(xs) - min(xs) < 2]
    y_ticks = round_ticks(min(0.0, *ys) if y.from_zero else min(ys), max(ys))
    has_legend = len(lines) > 1
    top = TOP + LEGEND * has_legend
    left, right = x_ticks[0], x_ticks[-1]

    def place(px: float, py: float) -> tuple[float, float]:
        across = LEFT + (px - left) / ((right - left) or 1) * (WIDTH - LEFT - RIGHT)
        return across, HEIGHT - BOTTOM - (py - y_ticks[0]) / (y_ticks[-1] - y_ticks[0]) * (HEIGHT - BOTTOM - top)

    parts = [*_grid(place, x_ticks, y_ticks, x.name, y.name)]
    for number, line in enumerate(lines):
        points = [place(*point) for point in line.points]
        colour, dash = f"var(--c{number % COLOURS})", DASHES[number % len(DASHES)]
        if line.is_faint:
            colour, dash = "var(--c0)", ""
        style = f'stroke="{colour}" stroke-width="{1 if line.is_faint else 2}" opacity="{0.4 if line.is_faint else 1}"'
        path = "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in points)
        parts.append(f'<path d="{path}" fill="none" {style} stroke-dasharray="{dash}" stroke-linejoin="round"/>')
        if len(points) <= MARKED and not line.is_faint:
            parts += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="2.5" fill="{colour}"/>' for px, py in points]
        if has_legend:
            at = LEFT + number * (WIDTH - LEFT - RIGHT) / len(lines)
            parts.append(f'<path d="M{at:.0f} 10h22" {style} stroke-dasharray="{dash}"/>')
            parts.append(f'<text x="{at + 28:.0f}" y="14">{escape(_short(line.name, len(lines)))}</text>')
    return _svg(title, HEIGHT, parts)


def bar_chart(title: str, x: str, y: str, bars: Sequence[tuple[str, float]]) -> str:
    """Return a chart of bars, each with its name below; an empty text if there is none."""
    if not bars:
        return ""
    ticks = round_ticks(0.0, max(value for _, value in bars) or 1.0)
    width = (WIDTH - LEFT - RIGHT) / len(bars)

    def place(px: float, py: float) -> tuple[float, float]:
        return LEFT + px * width, HEIGHT - BOTTOM - py / ticks[-1] * (HEIGHT - BOTTOM - TOP)

    parts = [*_grid(place, [], ticks, x, y)]
    every = -(-len(bars) * max(len(name) for name, _ in bars) * 7 // (WIDTH - LEFT - RIGHT))
    for number, (name, value) in enumerate(bars):
        px, py = place(number, value)
        size = f'width="{max(width - 2, 0.5):.1f}" height="{HEIGHT - BOTTOM - py:.1f}"'
        parts.append(f'<rect x="{px + 1:.1f}" y="{py:.1f}" {size} fill="var(--c0)"/>')
        if number % every == 0:
            at = f'x="{px + width / 2:.1f}" y="{HEIGHT - BOTTOM + 16}"'
            parts.append(f'<text {at} text-anchor="middle">{escape(name)}</text>')
    return _svg(title, HEIGHT, parts)


def intervals_chart(title: str, unit: str, systems: Sequence[str], rows: Sequence[tuple[str, Sequence[Span]]]) -> str:
    """Return a chart of scores with their intervals, a line for each score and a mark for each system."""
    if not rows:
        return ""
    ends = [end for _, spans in rows for span in spans for end in (span.value, span.low, span.high) if end is not None]
    ticks = round_ticks(min(0.0, *ends), max(ends))
    left, line = 150, 16 + 14 * len(systems)
    top = TOP + LEGEND
    height = top + line * len(rows) + BOTTOM

    def across(value: float) -> float:
        return left + (value - ticks[0]) / (ticks[-1] - ticks[0]) * (WIDTH - left - RIGHT)

    parts = []
    for tick, text in zip(ticks, tick_texts(ticks), strict=True):
        px = across(tick)
        parts.append(f'<path d="M{px:.1f} {top}V{height - BOTTOM}" stroke="var(--grid)"/>')
        parts.append(f'<text x="{px:.1f}" y="{height - BOTTOM + 16}" text-anchor="middle">{text}</text>')
    parts.append(_x_name(unit, height, left))
    for number, system in enumerate(systems):
        at = left + number * (WIDTH - left - RIGHT) / len(systems)
        parts.append(f'<circle cx="{at:.0f}" cy="10" r="4" fill="var(--c{number % COLOURS})"/>')
        parts.append(f'<text x="{at + 10:.0f}" y="14">{escape(_short(system, len(systems)))}</text>')
    for row, (name, spans) in enumerate(rows):
        start = top + row * line
        parts.append(f'<text x="{left - 10}" y="{start + line / 2 + 4:.1f}" text-anchor="end">{escape(name)}</text>')
        for number, span in enumerate(spans):
            py, colour = start + 15 + 14 * number, f"var(--c{number % COLOURS})"
            if span.low is not None and span.high is not None:
                whisker = f"M{across(span.low):.1f} {py}H{across(span.high):.1f}"
                parts.append(f'<path d="{whisker}" stroke="{colour}" stroke-width="2"/>')
            parts.append(f'<circle cx="{across(span.value):.1f}" cy="{py}" r="4" fill="{colour}"/>')
    return _svg(title, height, parts)


def _grid(place: Place, x_ticks: Sequence[float], y_ticks: Sequence[float], x: str, y: str) -> list[str]:
    parts = []
    for tick, text in zip(y_ticks, tick_texts(y_ticks), strict=True):
        py = place(0, tick)[1]
        parts.append(f'<path d="M{LEFT} {py:.1f}H{WIDTH - RIGHT}" stroke="var(--grid)"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{py + 4:.1f}" text-anchor="end">{text}</text>')
    for tick, text in zip(x_ticks, tick_texts(x_ticks) if len(x_ticks) > 1 else map(str, x_ticks), strict=True):
        px = place(tick, y_ticks[0])[0]
        parts.append(f'<text x="{px:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{text}</text>')
    parts.append(f'<path d="M{LEFT} {HEIGHT - BOTTOM}H{WIDTH - RIGHT}" stroke="var(--dim)"/>')
    parts.append(_x_name(x, HEIGHT, LEFT))
    middle = (HEIGHT - BOTTOM + TOP) / 2
    turned = f'transform="rotate(-90 12 {middle:.0f})"'
    parts.append(f'<text class="unit" x="12" y="{middle:.0f}" text-anchor="middle" {turned}>{escape(y)}</text>')
    return parts


def _x_name(name: str, height: int, left: int) -> str:
    middle = (left + WIDTH - RIGHT) / 2
    return f'<text class="unit" x="{middle:.0f}" y="{height - 6}" text-anchor="middle">{escape(name)}</text>'


def _svg(title: str, height: int, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"'
    return f'{head} aria-label="{escape(title, quote=True)}">{"".join(parts)}</svg>'


def _short(name: str, count: int) -> str:
    room = max(6, (WIDTH - LEFT - RIGHT) // count // 7 - 5)
    return name if len(name) <= room else "..." + name[3 - room :]


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
