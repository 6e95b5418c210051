"""Two systems side by side: scores with intervals, what changed and how sure that is, and what was asked for."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from gptj_ft.errors import UsageError, did_you_mean
from gptj_ft.evaluation.evaluate import Evaluation
from gptj_ft.evaluation.metrics import METRICS
from gptj_ft.evaluation.metrics.bootstrap import PairedEstimates, compare

LOWER_IS_BETTER = ("loss", "perplexity", "word_perplexity", "byte_perplexity")
OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt,
}  # fmt: skip


@dataclass(frozen=True)
class ChangesByRow:
    """Rows on which a system does better than its baseline, and worse, by one score.

    Attributes:
        score: its name.
        better: rows, the greatest gain first.
        worse: rows, the greatest loss first.
        same: how many are neither.
        before: the score of each row, by the baseline.
        after: the score of each row, by the system.
    """

    score: str
    better: list[int]
    worse: list[int]
    same: int
    before: list[float]
    after: list[float]

    def to_dict(self) -> dict[str, Any]:
        """Return the counts."""
        return {"score": self.score, "better": len(self.better), "worse": len(self.worse), "same": self.same}

    def change_of(self, row: int) -> str:
        """Return the score of a row before and after."""
        return f"{self.score} {self.before[row]:,.4g} -> {self.after[row]:,.4g}"


@dataclass(frozen=True)
class ModelComparison:
    """A system, the one it is compared with, and what follows.

    Attributes:
        model: what was measured.
        baseline: what it is compared with, on the same rows; ``None``: nothing.
        comparison: of all rows.
        by_file: of the rows of each file, where they come from several.
        by_row: wins and losses; ``None`` without a baseline.
    """

    model: Evaluation
    baseline: Evaluation | None
    comparison: PairedEstimates
    by_file: dict[str, PairedEstimates]
    by_row: ChangesByRow | None

    def to_dict(self, texts: bool) -> dict[str, Any]:
        """Return what JSON can hold; texts only if asked for. What is not finite is ``None``."""
        facts = {
            "model": _to_dict(self.model, self.comparison, texts),
            "baseline": _to_dict(self.baseline, _of_baseline(self.comparison), texts) if self.baseline else None,
            "differences": {name: asdict(each) for name, each in self.comparison.differences.items()},
            "by_row": self.by_row.to_dict() if self.by_row else None,
            "by_file": {
                file: {
                    "scores": {name: asdict(each) for name, each in found.scores.items()},
                    "baseline": {name: asdict(each) for name, each in found.baseline.items()},
                }
                for file, found in self.by_file.items()
            },
        }
        finite = _finite(facts)
        assert isinstance(finite, dict)
        return finite


def compare_models(
    model: Evaluation, baseline: Evaluation | None, metrics: Sequence[str], seed: int
) -> ModelComparison:
    """Compare two evaluations of the same rows, or estimate one alone.

    Raises:
        UsageError: the rows are not the same.
    """
    same_rows(model, baseline)
    other = baseline.figures if baseline else {}
    files = [place.rpartition(":")[0] for place in model.places]
    names = list(dict.fromkeys(files))
    by_file = {
        file: compare(model.figures, other, model.rows, seed, np.array([each == file for each in files], np.float64))
        for file in (names if 1 < len(names) <= MOST_FILES else ())
    }
    main = METRICS[metrics[0]].main if metrics else "loss"
    main = main if main in model.figures else "loss"
    by_row = _by_row(main, model, baseline) if baseline else None
    return ModelComparison(model, baseline, compare(model.figures, other, model.rows, seed), by_file, by_row)


def same_rows(model: Evaluation, baseline: Evaluation | None) -> None:
    """Check that two evaluations can be compared.

    Raises:
        UsageError: the rows are not the same.
    """
    if baseline and baseline.places != model.places:
        raise UsageError(
            f"{baseline.model} was measured on {baseline.rows:,} rows and {model.model} on {model.rows:,}, which are "
            "not the same ones, so they cannot be compared: name another --baseline, or none"
        )


MOST_FILES = 10  # that are worth a table each


@dataclass(frozen=True)
class Gate:
    """A score that is asked for: ``rougeL>=30``."""

    text: str
    name: str
    compare: Callable[[float, float], bool]
    bound: float


def parse_gates(texts: Sequence[str], names: Sequence[str]) -> list[Gate]:
    """Read what ``--gate`` was given.

    Args:
        texts: such as ``rougeL>=30``.
        names: of the scores there will be.

    Raises:
        UsageError: it cannot be read, or there will be no such score.
    """
    gates = []
    for text in texts:
        match = re.fullmatch(r"\s*([\w.:/-]+)\s*(>=|<=|>|<)\s*([-+]?\d+\.?\d*)\s*", text)
        if match is None:
            raise UsageError(f"--gate takes a score, >=, <=, > or <, and a number, e.g. 'rougeL>=30', not '{text}'")
        name, sign, number = match.groups()
        if name not in names:
            raise UsageError(
                f"--gate {text}: no score '{name}'{did_you_mean(name, names)}; there are {', '.join(names)}"
            )
        gates.append(Gate(text, name, OPERATORS[sign], float(number)))
    return gates


def failed_gates(gates: Sequence[Gate], verdict: ModelComparison) -> list[str]:
    """Return which scores are not what was asked for, and what they are."""
    scores = verdict.comparison.scores
    return [
        f"{gate.text}: it is {scores[gate.name].value:.4f}" if gate.name in scores else f"{gate.text}: no row has it"
        for gate in gates
        if gate.name not in scores or not gate.compare(scores[gate.name].value, gate.bound)
    ]


def _by_row(name: str, model: Evaluation, baseline: Evaluation) -> ChangesByRow | None:
    if name not in model.figures or name not in baseline.figures:
        return None
    ours, theirs = model.figures[name].rows_N, baseline.figures[name].rows_N
    if ours is None or theirs is None:
        return None
    gain = (theirs - ours) if name in LOWER_IS_BETTER else (ours - theirs)
    order = np.argsort(-gain, kind="stable").tolist()
    better = [row for row in order if gain[row] > 0]
    worse = [row for row in reversed(order) if gain[row] < 0]
    return ChangesByRow(name, better, worse, len(gain) - len(better) - len(worse), theirs.tolist(), ours.tolist())


def _of_baseline(comparison: PairedEstimates) -> PairedEstimates:
    return PairedEstimates(comparison.baseline, {}, {})


def _to_dict(found: Evaluation, comparison: PairedEstimates, texts: bool) -> dict[str, Any]:
    scores = {name: each.value for name, each in comparison.scores.items()}
    own = {
        "model": found.model,
        "rows": found.rows,
        "target_tokens": found.target_tokens,
        "loss": scores.get("loss"),
        "perplexity": scores.get("perplexity"),
        "scores": scores,
        "intervals": {name: [each.low, each.high] for name, each in comparison.scores.items()},
        "notes": found.notes,
    }
    return {**own, "answers": found.answers, "references": found.references} if texts else own


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
