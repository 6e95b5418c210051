"""Hold the metrics of a run in bounded memory, for its charts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gptj_ft.cli.html.charts import MOST_POINTS, Point

# Metrics of a step that have a chart.
DRAWN = (
    "loss", "lr", "grad_norm", "loss_scale", "target_tokens_per_second", "memory_bytes", "device_memory_bytes", "stall",
    "bytes_read", "bytes_written",
)  # fmt: skip
VALIDATION = "validation_loss"


@dataclass(slots=True)
class Stretch:
    """Successive points of a curve."""

    count: int
    total: tuple[float, float]  # sums of x and of y
    low: Point  # the first point with the lowest y
    high: Point  # the first point with the highest y

    def absorb(self, later: Stretch) -> None:
        """Add the points of the next stretch."""
        self.count += later.count
        self.total = self.total[0] + later.total[0], self.total[1] + later.total[1]
        self.low = later.low if later.low[1] < self.low[1] else self.low
        self.high = later.high if later.high[1] > self.high[1] else self.high


class Curve:
    """Points of a metric, in the order of x; stretches of equal size replace points that are too many to draw."""

    def __init__(self) -> None:
        self.count = 0  # points added
        self._size = 1  # points of a stretch
        self._stretches: list[Stretch] = []
        self.first = self.last = (math.nan, math.nan)  # points

    def add(self, x: float, y: float) -> None:
        """Add a point; skip non-finite ones."""
        if not math.isfinite(y):
            return
        point = (x, y)
        new = Stretch(1, point, point, point)
        self.first = point if self.count == 0 else self.first
        self.last = point
        self.count += 1
        if self._stretches and self._stretches[-1].count < self._size:
            self._stretches[-1].absorb(new)
            return
        self._stretches.append(new)
        if len(self._stretches) > MOST_POINTS:
            self._halve()

    def _halve(self) -> None:
        """Join neighbours."""
        self._size *= 2
        for first, second in zip(self._stretches[::2], self._stretches[1::2], strict=False):
            first.absorb(second)
        self._stretches = self._stretches[::2]

    @property
    def points(self) -> list[Point]:
        """The points; of stretches, the lowest and the highest."""
        if self._size == 1:
            return [stretch.low for stretch in self._stretches]
        extremes = [point for each in self._stretches for point in sorted({each.low, each.high})]
        return [self.first, *extremes, self.last]

    @property
    def means(self) -> list[Point]:
        """The mean of each stretch."""
        return [(each.total[0] / each.count, each.total[1] / each.count) for each in self._stretches]

    @property
    def lowest(self) -> Point:
        """The first point with the lowest y."""
        return min((each.low for each in self._stretches), key=lambda point: point[1])


@dataclass
class History:
    """Curves of a run."""

    steps: dict[str, Curve] = field(default_factory=dict)  # metrics of steps, see `DRAWN`
    validation: Curve = field(default_factory=Curve)  # validation loss
    scores: dict[str, Curve] = field(default_factory=dict)  # of the validation sample
    moves: bool = False  # whether the stores moved bytes

    @classmethod
    def of(cls, lines: Iterable[Mapping[str, Any]]) -> History:
        """Read the lines of ``metrics.jsonl``."""
        history = cls()
        for line in lines:
            history.add(line)
        return history

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a line of ``metrics.jsonl``."""
        step = line["step"]
        if "loss" in line:
            for name in DRAWN:
                if (value := line.get(name)) is not None:
                    self.curve(name).add(step, value)
            self.moves = self.moves or bool(line["bytes_read"] or line["bytes_written"])
        elif VALIDATION in line:
            self.validation.add(step, line[VALIDATION])
            for name, value in line.get("scores", {}).items():
                if value is not None:
                    self.scores.setdefault(name, Curve()).add(step, value)

    def curve(self, name: str) -> Curve:
        """Return the curve of a metric of steps, new if there is none."""
        if name not in self.steps:
            self.steps[name] = Curve()
        return self.steps[name]
