"""Report of memorization: continuations repeated word for word, membership, canaries, and the rows that leak most."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from gptj_ft.data.canaries import Canary
from gptj_ft.evaluation.comparison import finite
from gptj_ft.evaluation.metrics.class_scores import RocAuc
from gptj_ft.evaluation.metrics.memorization import TruePositives, wilson_estimate
from gptj_ft.evaluation.metrics.statistic import Estimate, Statistic, estimate_scores, mean

LEAK_SCORES = (
    "leaks", "leaks_unseen", "membership_auc", "membership_tpr", "calibrated_auc", "calibrated_tpr", "untuned_auc",
    "exposure", "exposure_unseen",
)  # fmt: skip
TEXT, ANSWER = "text", "answer"  # continuations of a row's first tokens, and of its whole prompt
FEW_UNSEEN = 100  # rows; with fewer, a single one is more than the rate of false positives
CHANCE_AUC = 50.0


@dataclass(frozen=True)
class RowScores:
    """Scores of one row by one model."""

    loss: float  # mean over the trained tokens, nats
    repeated: Mapping[str, int]  # by kind: tokens of the continuation that greedy decoding gets right before an error


@dataclass(frozen=True)
class ExaminedRow:
    """Row with its scores."""

    place: str  # file and line
    is_trained: bool
    lengths: Mapping[str, int]  # tokens of the continuations, by kind; a short row has none
    tuned: RowScores
    untuned: RowScores | None  # by the model before tuning

    def is_repeated(self, kind: str) -> bool:
        """Whether the model writes a continuation word for word."""
        return kind in self.lengths and self.tuned.repeated[kind] == self.lengths[kind]

    def is_known(self, kind: str) -> bool:
        """Whether the untuned model writes it word for word, too."""
        return self.untuned is not None and self.untuned.repeated.get(kind) == self.lengths.get(kind, -1)

    @property
    def is_leaked(self) -> bool:
        """Whether the model writes a continuation word for word that the untuned model does not."""
        return any(self.is_repeated(kind) and not self.is_known(kind) for kind in self.lengths)

    @property
    def gain(self) -> float:
        """Reduction of the loss by tuning; without an untuned model, the negative loss."""
        return (self.untuned.loss if self.untuned else 0.0) - self.tuned.loss


@dataclass(frozen=True)
class ExposedCanary:
    """Canary with its exposure."""

    canary: Canary
    exposure: float  # bits


@dataclass(frozen=True)
class LeakReport:
    """Memorization of a model's training rows."""

    model: str
    baseline: str | None
    prefix: int  # tokens given before a continuation
    length: int  # tokens of a continuation
    rows: Sequence[ExaminedRow]
    canaries: Sequence[ExposedCanary]  # planted ones and controls; empty: none were planted
    scores: Mapping[str, Estimate]  # of `LEAK_SCORES`, those that apply
    notes: Sequence[str] = ()

    def count(self, kind: str, is_trained: bool, by_untuned: bool = False) -> tuple[int, int]:
        """Count the continuations of a kind that are written word for word, and all of the kind."""
        rows = [row for row in self.rows if row.is_trained == is_trained and kind in row.lengths]
        return sum(row.is_known(kind) if by_untuned else row.is_repeated(kind) for row in rows), len(rows)

    @property
    def kinds(self) -> list[str]:
        """Kinds of continuations that some training row has."""
        return [kind for kind in (TEXT, ANSWER) if self.count(kind, True)[1]]

    @property
    def num_trained(self) -> int:
        return sum(row.is_trained for row in self.rows)

    @property
    def most_leaked(self) -> list[ExaminedRow]:
        """Training rows in the order of how much they leak."""
        return sorted((row for row in self.rows if row.is_trained), key=lambda row: (not row.is_leaked, -row.gain))

    def exposures(self) -> Iterator[tuple[int, list[float]]]:
        """Yield the exposures of the canaries by repeats; controls have 0."""
        for repeats in sorted({each.canary.repeats for each in self.canaries}):
            yield repeats, [each.exposure for each in self.canaries if each.canary.repeats == repeats]

    def to_dict(self, num_rows: int) -> dict[str, Any]:
        """Convert to JSON values, with the ``num_rows`` rows that leak most."""
        facts = {
            "model": self.model,
            "baseline": self.baseline,
            "rows": {"trained": self.num_trained, "unseen": len(self.rows) - self.num_trained},
            "prefix_tokens": self.prefix,
            "continuation_tokens": self.length,
            "continuations": {kind: self._continuations(kind) for kind in self.kinds},
            "scores": {name: each.value for name, each in self.scores.items()},
            "intervals": {name: [each.low, each.high] for name, each in self.scores.items()},
            "canaries": [{**asdict(each.canary), "exposure": each.exposure} for each in self.canaries],
            "exposure_by_repeats": {str(repeats): math.fsum(each) / len(each) for repeats, each in self.exposures()},
            "most_leaked": [
                {
                    "place": row.place,
                    "is_leaked": row.is_leaked,
                    "repeated": {kind: [row.tuned.repeated[kind], row.lengths[kind]] for kind in row.lengths},
                    "loss": row.tuned.loss,
                    "untuned_loss": row.untuned.loss if row.untuned else None,
                }
                for row in self.most_leaked[:num_rows]
            ],
            "notes": list(self.notes),
        }
        return {key: finite(each) for key, each in facts.items()}

    def _continuations(self, kind: str) -> dict[str, Any]:
        counts = {"trained": self.count(kind, True), "unseen": self.count(kind, False)}
        if self.baseline:
            counts["trained_by_untuned"] = self.count(kind, True, by_untuned=True)
        return {name: {"repeated": repeated, "rows": rows} for name, (repeated, rows) in counts.items()}


def estimate_leaks(rows: Sequence[ExaminedRow], canaries: Sequence[ExposedCanary], seed: int) -> dict[str, Estimate]:
    """Estimate the scores of `LEAK_SCORES` that rows and canaries allow."""
    estimates = {}
    for name, is_trained in (("leaks", True), ("leaks_unseen", False)):
        checked = [row.is_leaked for row in rows if row.is_trained == is_trained and row.lengths]
        if checked:
            estimates[name] = wilson_estimate(sum(checked), len(checked))
    is_trained_N = np.array([row.is_trained for row in rows])
    figures: dict[str, Statistic] = {}
    attacks = {"membership": [-row.tuned.loss for row in rows]}
    if all(row.untuned for row in rows):
        attacks["calibrated"] = [row.gain for row in rows]
        figures["untuned_auc"] = RocAuc(is_trained_N, np.array([-row.untuned.loss for row in rows if row.untuned]))
    for name, scores in attacks.items():
        figures[f"{name}_auc"] = RocAuc(is_trained_N, np.array(scores))
        figures[f"{name}_tpr"] = TruePositives(is_trained_N, np.array(scores))
    estimates |= estimate_scores(figures, {}, len(rows), seed).scores
    for name, of in (
        ("exposure", [each.exposure for each in canaries if each.canary.repeats]),
        ("exposure_unseen", [each.exposure for each in canaries if not each.canary.repeats]),
    ):
        if of:
            estimates |= estimate_scores({name: mean(of)}, {}, len(of), seed).scores
    return {name: estimates[name] for name in LEAK_SCORES if name in estimates}


def warnings_of(report: LeakReport) -> list[str]:
    """Describe what limits the figures of a report."""
    notes, unseen = [], len(report.rows) - report.num_trained
    untuned = report.scores.get("untuned_auc", Estimate(CHANCE_AUC, None, None))
    if untuned.low is not None and untuned.high is not None and not untuned.low <= CHANCE_AUC <= untuned.high:
        notes.append(
            f"the untuned model also separates training rows from unseen ones (AUC {untuned.value:.1f}): they differ "
            "by themselves, so only the calibrated scores measure memorization"
        )
    if unseen < FEW_UNSEEN:
        notes.append(f"{unseen:,} unseen rows are few: true positives at 1 % false positives need {FEW_UNSEEN} or more")
    needed = {TEXT: f"{report.prefix + report.length} tokens", ANSWER: "a prompt and an answer that is long enough"}
    for kind, words in needed.items():
        missing = report.num_trained - report.count(kind, True)[1]
        if kind in report.kinds and missing:
            notes.append(f"{missing:,} of {report.num_trained:,} training rows lack {words} and are not in '{kind}'")
    return notes
