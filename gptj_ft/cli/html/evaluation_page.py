"""Write an evaluation as HTML, Markdown or JSON."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from gptj_ft.cli.html import fill_template, to_json
from gptj_ft.cli.html.charts import Change, change_strip
from gptj_ft.cli.html.differences import marked
from gptj_ft.cli.html.label_tables import label_facts
from gptj_ft.cli.html.names import apart_names, model_name, place_name, portable
from gptj_ft.config.run_folder import write_json
from gptj_ft.config.saved_values import RecordedEvaluation, checked
from gptj_ft.evaluation.comparison import LOWER_IS_BETTER, ModelComparison
from gptj_ft.evaluation.metrics import main_score
from gptj_ft.evaluation.metrics.label_scores import LabelScores
from gptj_ft.evaluation.metrics.statistic import Estimate, PairedEstimates
from gptj_ft.system.digests import read_json

SAMPLE_CHARACTERS = 1000
RECORD = "evaluation.json"  # in a run folder
RECORDED = 20  # rows of each kind
METRIC_DIGITS = {"loss": 4, "perplexity": 3, "word_perplexity": 3, "byte_perplexity": 3, "mse": 4, "mae": 4}  # others 2
POWERS_FROM = 10_000  # larger values, as perplexities of untrained models, get three digits and a power of ten
EVALUATION_SUFFIXES = (".json", ".md", ".html")
# Names of scores in sentences.
SCORE_WORDS = {
    "rougeL": "ROUGE-L", "f1": "F1", "micro_f1": "micro-F1", "macro_f1": "macro-F1", "relations_f1": "F1 of relations",
    "entity_f1": "F1 of entities", "word_accuracy": "accuracy by words", "pearson": "Pearson correlation",
    "mse": "mean squared error",
}  # fmt: skip
VERDICTS = {"better": "better", "worse": "worse", "unclear": "no clear change"}
Facts = Mapping[str, Any]


def evaluation_facts(verdict: ModelComparison, command: str, num_samples: int) -> dict[str, Any]:
    """Collect the facts of a comparison as text, and ``num_samples`` rows."""
    baseline, rows, by_row = verdict.baseline, verdict.model.rows, verdict.by_row
    files = zip(apart_names(list(verdict.by_file)), verdict.by_file.values(), strict=True)
    return {
        "model": model_name(verdict.model.model),
        "baseline": model_name(baseline.model) if baseline else None,
        "rows": rows,
        "target_tokens": verdict.model.target_tokens,
        **_compared_facts(verdict.comparison, by_row.to_dict() if by_row else None, rows),
        "by_file": {name: table_of(found) for name, found in files},
        "labels": label_facts(verdict.model.labels, baseline.labels if baseline else None),
        "lines": lines_of(verdict),
        "samples": row_samples(verdict, range(min(num_samples, rows))),
        "command": command,
        "portable_command": portable(shlex.split(command)[1:]),
    }


def _compared_facts(comparison: PairedEstimates, by_row: Facts | None, rows: int) -> dict[str, Any]:
    """Return main score, verdict, changes, and the table of scores."""
    main = by_row["score"] if by_row else main_score(comparison.scores)
    return {
        "main": main,
        "headline": headline_of(comparison, main, rows),
        "changes": changes_of(comparison, main),
        "by_row": by_row,
        "table": table_of(comparison),
    }


def headline_of(comparison: PairedEstimates, main: str, rows: int) -> dict[str, str]:
    """Return the verdict in words, and the scores behind it."""
    if main not in comparison.scores:
        return {"verdict": "", "words": "", "figures": f"{rows:,} rows"}
    verdict = _verdict(main, comparison.differences.get(main))
    figures = f"{SCORE_WORDS.get(main, main)} {_pair(comparison, main)} on {rows:,} row{'s' * (rows != 1)}"
    return {"verdict": verdict, "words": VERDICTS.get(verdict, ""), "figures": figures}


def changes_of(comparison: PairedEstimates, main: str) -> list[dict[str, Any]]:
    """Draw the change of each score, the main score first; skip perplexities if the loss is there."""
    names = [
        name
        for name in dict.fromkeys([main, *comparison.differences])
        if not (name.endswith("perplexity") and "loss" in comparison.differences)
    ]
    strips = [strip_of(comparison, name) for name in names if name in comparison.differences]
    return [strip for strip in strips if strip["svg"]]


def strip_of(comparison: PairedEstimates, name: str, reach: float | None = None) -> dict[str, Any]:
    """Return values, verdict and strip of a score's change, see `change_strip`."""
    change = change_in(comparison, name)
    svg = Markup(change_strip(change, reach))
    return {"name": name, "figures": _pair(comparison, name), "verdict": change.verdict, "svg": svg}


def change_in(comparison: PairedEstimates, name: str) -> Change:
    """Return the change of a score, with the sign chosen so that more is better."""
    difference = comparison.differences[name]
    sign = -1 if name in LOWER_IS_BETTER else 1
    ends = sorted(sign * end for end in (difference.low, difference.high) if end is not None)
    return Change(
        name,
        _texts(name, difference, sign="+")["value"],
        sign * difference.value,
        (ends[0], ends[1]) if len(ends) > 1 else None,
        _verdict(name, difference),
    )


def _pair(comparison: PairedEstimates, name: str) -> str:
    """Return the values of a score: baseline, then model."""
    estimates = (comparison.baseline.get(name), comparison.scores[name])
    return " -> ".join(_texts(name, each)["value"] for each in estimates if each is not None)


def table_of(comparison: PairedEstimates) -> list[dict[str, Any]]:
    """Return each score as text: model, baseline, change and verdict."""
    return [
        {
            "name": name,
            "model": _texts(name, estimate),
            "baseline": _texts(name, comparison.baseline.get(name)),
            "change": _texts(name, comparison.differences.get(name), sign="+"),
            "verdict": _verdict(name, comparison.differences.get(name)),
        }
        for name, estimate in comparison.scores.items()
    ]


def comparison_in(record: Facts) -> PairedEstimates:
    """Restore the scores of a recorded evaluation."""

    def read(system: Facts | None) -> dict[str, Estimate]:
        scores, intervals = (system["scores"], system["intervals"]) if system else ({}, {})
        return {name: _estimate(value, *intervals[name]) for name, value in scores.items()}

    differences = {name: _estimate(*each.values()) for name, each in record["differences"].items()}
    return PairedEstimates(read(record["model"]), read(record["baseline"]), differences)


def _labels_in(system: Facts | None) -> LabelScores | None:
    return LabelScores.from_dict(system["labels"]) if system and "labels" in system else None


def _estimate(value: float | None, low: float | None, high: float | None) -> Estimate:
    return Estimate(math.nan if value is None else value, low, high)


def record(run: Path, verdict: ModelComparison, command: str) -> None:
    """Record an evaluation with some rows in the run folder, for the report; replaces an older one."""
    extremes = (verdict.by_row.better[:RECORDED], verdict.by_row.worse[:RECORDED]) if verdict.by_row else ([], [])
    shown = dict.fromkeys([*extremes[0], *extremes[1], *range(min(RECORDED, verdict.model.rows))])
    texts = {kind: row_samples(verdict, rows) for kind, rows in zip(("better", "worse"), extremes, strict=True)}
    texts["first"] = row_samples(verdict, list(shown)[-RECORDED:])
    write_json(run / RECORD, {**verdict.to_dict(texts=False), "samples": texts, "command": command})


def recorded_facts(run: Path) -> dict[str, Any] | None:
    """Return the evaluation recorded in a run folder, or ``None``."""
    if not (run / RECORD).is_file():
        return None
    advice = "evaluate again, or remove it to get a page without scores"
    record = checked(RecordedEvaluation, read_json(run / RECORD), run / RECORD, advice)
    comparison, model, baseline = comparison_in(record), record["model"], record["baseline"]
    return {
        **_compared_facts(comparison, record["by_row"], model["rows"]),
        "comparison": comparison,
        "rows": model["rows"],
        "baseline": model_name(baseline["model"]) if baseline else None,
        "labels": label_facts(*(_labels_in(each) for each in (model, baseline))),
        "notes": model["notes"],
        "samples": record["samples"],
        "command": record["command"],
    }


def samples_in(record: Facts, count: int) -> list[dict[str, Any]]:
    """Return the recorded rows with the largest gains and losses; without a baseline, the first rows."""
    kinds = record["samples"]
    changed = [
        {**sample, "place": f"{sample['place']}: {kind}" + (f", {sample['change']}" if sample.get("change") else "")}
        for kind in ("better", "worse")
        for sample in kinds[kind][:count]
    ]
    return changed or list(kinds["first"][:count])


def lines_of(verdict: ModelComparison) -> list[str]:
    """Return sentences that explain the scores."""
    lines = []
    if verdict.by_row:
        by_row = verdict.by_row
        lines.append(
            f"{by_row.score} by row: {len(by_row.better):,} better, {len(by_row.worse):,} worse, {by_row.same:,} equal"
        )
    if verdict.model.rows > 1:
        lines.append(
            "intervals: bootstrap over rows, 1,000 samples, 95 %; a change is significant if its interval excludes 0"
        )
    return [*lines, *(f"note: {note}" for note in verdict.model.notes)]


def row_samples(verdict: ModelComparison, rows: Sequence[int]) -> list[dict[str, Any]]:
    """Return references, shortened answers and score changes of some rows."""
    model, baseline, by_row = verdict.model, verdict.baseline, verdict.by_row
    return [
        {
            "place": place_name(model.places[row]),
            "change": by_row.change_of(row) if by_row else "",
            "texts": {
                name: cut_text(text, SAMPLE_CHARACTERS)
                for name, text in {
                    "expected": " | ".join(model.references[row]),
                    **({"baseline": baseline.answers[row]} if baseline else {}),
                    "model": model.answers[row],
                }.items()
            },
        }
        for row in rows
    ]


def cut_text(text: str, characters: int) -> str:
    """Return the first characters of a text, with dots if it is longer."""
    return text if len(text) <= characters else text[:characters] + " ..."


def evaluation_report(suffix: str, facts: Facts, json_facts: Facts) -> str:
    """Return a report in the format of its suffix, see `EVALUATION_SUFFIXES`.

    Args:
        suffix: suffix of the file, in lower case.
        facts: mapping made by `evaluation_facts`.
        json_facts: object of ``--json``.
    """
    if suffix == ".json":
        return to_json({**json_facts, "command": facts["command"]})
    return fill_template(f"evaluation{suffix}", {**facts, "marked": marked(facts["samples"])})


def _texts(name: str, estimate: Estimate | None, sign: str = "") -> dict[str, str]:
    if estimate is None:
        return {"value": "", "interval": ""}
    digits = METRIC_DIGITS.get(name, 2)
    if digits > 2 and math.isfinite(estimate.value):  # large perplexities need no decimals
        digits = max(0, digits - max(0, len(f"{abs(estimate.value):.0f}") - 1))

    def text(value: float) -> str:
        if abs(value) >= POWERS_FROM and math.isfinite(value):
            mantissa, power = f"{value:{sign}.2e}".split("e")
            return f"{mantissa}e{int(power)}"
        return f"{value:{sign},.{digits}f}"

    low, high = estimate.low, estimate.high
    interval = f"{text(low)} to {text(high)}" if low is not None and high is not None else ""
    return {"value": "?" if math.isnan(estimate.value) else text(estimate.value), "interval": interval}


def _verdict(name: str, difference: Estimate | None) -> str:
    if difference is None:
        return ""
    if not difference.is_clear:
        return "unclear"
    return "better" if (difference.value < 0) == (name in LOWER_IS_BETTER) else "worse"
