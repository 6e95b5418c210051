"""Draw the packages as layers, and the paths of a weight, a row and an option through them; see `generate.py`."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

# Package and what happens there, in order.
WAYS = {
    "a weight": [
        ("checkpoints", "model folder"),
        ("streaming", "store, then slot"),
        ("models", "the layer computes"),
        ("streaming", "gradient, AdamW"),
        ("training", "commit, export"),
        ("checkpoints", "tuned model"),
    ],
    "a row": [
        ("data", "reader, columns"),
        ("data", "template, tokens"),
        ("data", "Arrow table, split"),
        ("training", "rows of a step"),
        ("models", "packed batch"),
        ("streaming", "micro-batch, loss"),
    ],
    "an option": [
        ("cli", "flag"),
        ("config", "checked, merged"),
        ("planning", "auto is resolved"),
        ("training", "schedule, steps"),
        ("config", "recipe.yaml"),
        ("checkpoints", "gptj_ft.json"),
    ],
}
COLORS = ("#1565c0", "#2e7d32", "#b45309")
LEFT, COLUMN, TOP, ROW, GAP = 78, 82, 34, 34, 16
NODE_WIDTH, NODE_HEIGHT = 116, 19


def draw(layers: Sequence[str]) -> str:
    """Return the figure as SVG: a column for each package, the lowest at the left, and a row for each station of a way.

    Args:
        layers: names of the packages, highest first.
    """
    columns = {name: LEFT + COLUMN * (number + 0.5) for number, name in enumerate(reversed(layers))}
    width = LEFT + COLUMN * len(layers) + 24
    height = TOP + sum(ROW * len(way) + GAP for way in WAYS.values())
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif"',
        ' font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="#777"/></marker></defs>',
    ]
    for number, (name, x) in enumerate(columns.items()):
        fill = "#eef1f5" if number % 2 else "#f7f8fa"
        left = x - COLUMN / 2
        parts.append(f'<rect x="{left:.0f}" y="4" width="{COLUMN}" height="{height - 8}" fill="{fill}"/>')
        parts.append(f'<text x="{x:.0f}" y="22" text-anchor="middle" font-weight="bold" fill="#222">{name}</text>')
    top = float(TOP)
    for (title, way), color in zip(WAYS.items(), COLORS, strict=True):
        parts += _way(title, [(columns[package], label) for package, label in way], top, color)
        top += ROW * len(way) + GAP
    return "\n".join([*parts, "</svg>\n"])


def _way(title: str, way: Sequence[tuple[float, str]], top: float, color: str) -> list[str]:
    """Return the stations of a way and the arrows between them."""
    text = f'font-weight="bold" fill="{color}"'
    parts = [f'<text x="8" y="{top + ROW / 2 + 4:.0f}" {text}>{title}</text>']
    ys = [top + ROW * (number + 0.5) for number in range(len(way))]
    for (x1, _), (x2, _), y1, y2 in zip(way, way[1:], ys, ys[1:], strict=False):
        ends = f'x1="{x1:.0f}" y1="{y1 + NODE_HEIGHT / 2:.0f}" x2="{x2:.0f}" y2="{y2 - NODE_HEIGHT / 2:.0f}"'
        parts.append(f'<line {ends} stroke="#777" marker-end="url(#tip)"/>')
    for (x, label), y in zip(way, ys, strict=True):
        corner = f'x="{x - NODE_WIDTH / 2:.0f}" y="{y - NODE_HEIGHT / 2:.0f}"'
        shape = f'width="{NODE_WIDTH}" height="{NODE_HEIGHT}" rx="9" fill="#fff" stroke="{color}"'
        parts.append(f"<rect {corner} {shape}/>")
        parts.append(f'<text x="{x:.0f}" y="{y + 4:.0f}" text-anchor="middle" fill="{color}">{escape(label)}</text>')
    return parts
