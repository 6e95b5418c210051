"""Compare two evaluations: scores with confidence intervals, changes row by row, thresholds."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from gptj_ft.config.options import Recipe
from gptj_ft.errors import UsageError, did_you_mean
from gptj_ft.evaluation.metrics import Statistic, score_by_row
from gptj_ft.evaluation.metrics import rouge as rouge_metric
from gptj_ft.evaluation.metrics.label_scores import LabelScores
from gptj_ft.evaluation.metrics.statistic import Estimate, PairedEstimates, estimate_scores, values

LOWER_IS_BETTER = ("loss", "perplexity", "word_perplexity", "byte_perplexity", "ece", "mse", "mae")
MAX_FILES = 10  # with scores of their own
OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt,
}  # fmt: skip


@dataclass(frozen=True)
class Evaluation:
    """Scores of a model, or of the outputs of any system, on a dataset."""

    model: str  # model folder, or file of outputs
    figures: dict[str, Statistic]  # statistics by name, including loss and perplexities
    places: list[str]  # file and line of each row
    answers: list[str]  # generated text of each row; empty if no metric needs one
    references: list[list[str]]  # accepted answers of each row
    notes: tuple[str, ...] = ()  # warnings about the scores
    target_tokens: int = 0  # tokens that the loss covers; 0: no loss
    labels: LabelScores | None = None  # scores of each label, for heads with labels

    @property
    def rows(self) -> int:
        return len(self.places)

    @property
    def scores(self) -> dict[str, float]:
        """Scores over all rows, by name."""
        return values(self.figures, self.rows)


def with_warnings(evaluation: Evaluation, recipe: Recipe) -> Evaluation:
    """Add warnings about metrics that do not suit these rows."""
    warning = rouge_metric.warning(evaluation.references) if "rouge" in recipe.metrics else None
    return replace(evaluation, notes=(*evaluation.notes, warning)) if warning else evaluation


@dataclass(frozen=True)
class ChangesByRow:
    """Rows whose score is better, worse or the same as with the baseline."""

    score: str
    better: list[int]  # greatest gain first
    worse: list[int]  # greatest loss first
    same: int  # number of rows
    before: list[float]  # score of each row with the baseline
    after: list[float]  # score of each row with the model

    def to_dict(self) -> dict[str, Any]:
        return {"score": self.score, "better": len(self.better), "worse": len(self.worse), "same": self.same}

    def change_of(self, row: int) -> str:
        """Return the score of a row before and after."""
        return f"{self.score} {self.before[row]:,.4g} -> {self.after[row]:,.4g}"


@dataclass(frozen=True)
class ModelComparison:
    """Evaluations of a model and its baseline on the same rows, and their differences."""

    model: Evaluation
    baseline: Evaluation | None
    comparison: PairedEstimates  # over all rows
    by_file: dict[str, PairedEstimates]  # over the rows of each file; empty if there is one file or more than ten
    by_row: ChangesByRow | None  # None without a baseline

    def to_dict(self, texts: bool) -> dict[str, Any]:
        """Convert to JSON values, with texts only on request; values that are not finite become None."""
        facts = {
            "model": _to_dict(self.model, self.comparison.scores, texts),
            "baseline": _to_dict(self.baseline, self.comparison.baseline, texts) if self.baseline else None,
            "differences": _as_dicts(self.comparison.differences),
            "by_row": self.by_row.to_dict() if self.by_row else None,
            "by_file": {
                file: {"scores": _as_dicts(estimates.scores), "baseline": _as_dicts(estimates.baseline)}
                for file, estimates in self.by_file.items()
            },
        }
        return {key: finite(each) for key, each in facts.items()}


def compare_models(
    model: Evaluation, baseline: Evaluation | None, metrics: Sequence[str], seed: int
) -> ModelComparison:
    """Compare two evaluations of the same rows, or estimate the scores of one alone.

    Raises:
        UsageError: the rows are not the same.
    """
    same_rows(model, baseline)
    other = baseline.figures if baseline else {}
    files = [place.rpartition(":")[0] for place in model.places]
    names = list(dict.fromkeys(files))
    by_file = {
        file: estimate_scores(
            model.figures, other, model.rows, seed, np.array([each == file for each in files], np.float64)
        )
        for file in (names if 1 < len(names) <= MAX_FILES else ())
    }
    by_row = _by_row(score_by_row(metrics, model.figures), model, baseline) if baseline else None
    return ModelComparison(model, baseline, estimate_scores(model.figures, other, model.rows, seed), by_file, by_row)


def same_rows(model: Evaluation, baseline: Evaluation | None) -> None:
    """Check that two evaluations cover the same rows."""
    if baseline and baseline.places != model.places:
        raise UsageError(
            f"{baseline.model} was measured on {baseline.rows:,} rows and {model.model} on {model.rows:,}, which are "
            "not the same ones, so they cannot be compared: name another --baseline, or none"
        )


@dataclass(frozen=True)
class Gate:
    """Required score, such as ``rougeL>=30``."""

    text: str
    name: str
    compare: Callable[[float, float], bool]
    bound: float


def parse_gates(texts: Sequence[str], names: Sequence[str]) -> list[Gate]:
    """Parse the thresholds of ``--gate``.

    Args:
        texts: thresholds, such as ``rougeL>=30``.
        names: available scores.
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


def failed_gates(gates: Sequence[Gate], scores: Mapping[str, Estimate]) -> list[str]:
    """Describe the thresholds that scores miss."""
    return [
        f"{gate.text}: it is {scores[gate.name].value:.4f}" if gate.name in scores else f"{gate.text}: no row has it"
        for gate in gates
        if gate.name not in scores or not gate.compare(scores[gate.name].value, gate.bound)
    ]


def _by_row(name: str, model: Evaluation, baseline: Evaluation) -> ChangesByRow | None:
    if name not in model.figures or name not in baseline.figures:
        return None
    after_N, before_N = model.figures[name].rows_N, baseline.figures[name].rows_N
    if after_N is None or before_N is None:
        return None
    # So that a positive gain is an improvement for every score.
    gain_N = (before_N - after_N) if name in LOWER_IS_BETTER else (after_N - before_N)
    order = np.argsort(-gain_N, kind="stable").tolist()
    better = [row for row in order if gain_N[row] > 0]
    worse = [row for row in reversed(order) if gain_N[row] < 0]
    return ChangesByRow(
        name, better, worse, len(gain_N) - len(better) - len(worse), before_N.tolist(), after_N.tolist()
    )


def _as_dicts(estimates: Mapping[str, Estimate]) -> dict[str, Any]:
    return {name: asdict(each) for name, each in estimates.items()}


def _to_dict(evaluation: Evaluation, estimates: Mapping[str, Estimate], texts: bool) -> dict[str, Any]:
    scores = {name: each.value for name, each in estimates.items()}
    facts = {
        "model": evaluation.model,
        "rows": evaluation.rows,
        "target_tokens": evaluation.target_tokens,
        "loss": scores.get("loss"),
        "perplexity": scores.get("perplexity"),
        "scores": scores,
        "intervals": {name: [each.low, each.high] for name, each in estimates.items()},
        "notes": evaluation.notes,
        **({"labels": evaluation.labels.to_dict()} if evaluation.labels else {}),
    }
    return {**facts, "answers": evaluation.answers, "references": evaluation.references} if texts else facts


def finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by None."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
