"""A verdict for people: on the terminal, as Markdown, as a page; and for programs, as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from gptj_ft.durable import new_files, require_new
from gptj_ft.errors import UsageError
from gptj_ft.metrics.bootstrap import Comparison, Estimate
from gptj_ft.pages import to_page
from gptj_ft.run import read_json, write_json
from gptj_ft.screen import next_steps, panel, say, table
from gptj_ft.verdict import LOWER_IS_BETTER, Verdict

SAMPLE_CHARACTERS = 300
RECORD = "evaluation.json"  # in a run's folder
RECORDED = 20  # rows of each kind
DIGITS = {"loss": 4, "perplexity": 3, "word_perplexity": 3, "byte_perplexity": 3}  # others 2
Facts = Mapping[str, Any]


def facts_of(verdict: Verdict, command: str, num_samples: int) -> dict[str, Any]:
    """Return what there is to say, as text; of the rows' texts only as many as are asked for."""
    baseline = verdict.baseline
    return {
        "model": verdict.model.model,
        "baseline": baseline.model if baseline else None,
        "rows": verdict.model.rows,
        "target_tokens": verdict.model.target_tokens,
        "table": table_of(verdict.comparison),
        "by_file": {file: table_of(found) for file, found in verdict.by_file.items()},
        "lines": lines_of(verdict),
        "samples": samples_of(verdict, range(min(num_samples, verdict.model.rows))),
        "command": command,
    }


def table_of(comparison: Comparison) -> list[dict[str, Any]]:
    """Return each score as text: the model's, the baseline's, the change, and what that means."""
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


def table_in(record: Facts) -> list[dict[str, Any]]:
    """Return `table_of` what was recorded."""

    def read(found: Facts | None) -> dict[str, Estimate]:
        scores, intervals = (found["scores"], found["intervals"]) if found else ({}, {})
        return {name: _estimate(value, *intervals[name]) for name, value in scores.items()}

    differences = {name: _estimate(*each.values()) for name, each in record["differences"].items()}
    return table_of(Comparison(read(record["model"]), read(record["baseline"]), differences))


def _estimate(value: float | None, low: float | None, high: float | None) -> Estimate:
    return Estimate(math.nan if value is None else value, low, high)


def record(run: Path, verdict: Verdict, command: str) -> None:
    """Keep a verdict on a run's model in the run's folder, texts included, for its report; a former one is replaced.

    Raises:
        ResourceError: it cannot be written.
    """
    extremes = (verdict.by_row.better[:RECORDED], verdict.by_row.worse[:RECORDED]) if verdict.by_row else ([], [])
    shown = dict.fromkeys([*extremes[0], *extremes[1], *range(min(RECORDED, verdict.model.rows))])
    texts = {kind: samples_of(verdict, rows) for kind, rows in zip(("better", "worse"), extremes, strict=True)}
    texts["first"] = samples_of(verdict, list(shown)[-RECORDED:])
    write_json(run / RECORD, {**verdict.to_dict(texts=False), "samples": texts, "command": command})


def evaluation_of(run: Path) -> dict[str, Any] | None:
    """Return what `record` has kept in a run's folder; ``None`` if there is nothing.

    Raises:
        DataError: it is damaged.
    """
    return read_json(run / RECORD) if (run / RECORD).is_file() else None


def samples_in(record: Facts, count: int) -> list[dict[str, Any]]:
    """Return recorded rows: where the model has gained most and lost most, or if nothing was compared the first."""
    kinds = record["samples"]
    changed = [
        {**sample, "place": f"{sample['place']}: {word}"}
        for kind, word in (("better", "better"), ("worse", "worse"))
        for sample in kinds[kind][:count]
    ]
    return changed or list(kinds["first"][:count])


def lines_of(verdict: Verdict) -> list[str]:
    """Return sentences on what the scores mean."""
    lines = []
    if verdict.by_row:
        by_row = verdict.by_row
        lines.append(
            f"{by_row.score} by row: better in {len(by_row.better):,}, worse in {len(by_row.worse):,}, "
            f"the same in {by_row.same:,}"
        )
    if verdict.model.rows > 1:
        lines.append(
            "intervals: bootstrap over rows, 1,000 samples, 95 %; a change whose interval has no 0 is beyond chance"
        )
    return [*lines, *(f"note: {note}" for note in verdict.model.notes)]


def samples_of(verdict: Verdict, rows: Sequence[int]) -> list[dict[str, Any]]:
    """Return what was expected and answered in some rows, cut to what can be looked at."""
    model, baseline = verdict.model, verdict.baseline
    return [
        {
            "place": model.places[row],
            "texts": {
                name: text if len(text) <= SAMPLE_CHARACTERS else text[:SAMPLE_CHARACTERS] + " ..."
                for name, text in {
                    "expected": " | ".join(model.references[row]),
                    **({"baseline": baseline.answers[row]} if baseline else {}),
                    "model": model.answers[row],
                }.items()
            },
        }
        for row in rows
    ]


def show_verdict(console: Console, facts: Facts, written: Sequence[Path] = (), commands: Sequence[str] = ()) -> None:
    """Show scores, the baseline's beside them if there is one, then rows by rows what was asked for.

    Args:
        console: where to.
        facts: of `facts_of`.
        written: files that have more.
        commands: what to type next.
    """
    _show_table(console, f"{facts['rows']:,} rows, {facts['target_tokens']:,} target tokens", facts["table"], facts)
    for file, rows in facts["by_file"].items():
        _show_table(console, f"rows of {file}", rows, facts)
    for line in facts["lines"]:
        say(console, line, "  ")
    for sample in facts["samples"]:
        panel(console, sample["place"], [(name, text) for name, text in sample["texts"].items()])
    for path in written:
        console.print(f"written to {path}")
    next_steps(console, *commands)


def scores_text(facts: Facts) -> str:
    """Return the model's scores, one a line."""
    return "\n".join(f"{row['name']} {row['model']['value'].replace(',', '')}" for row in facts["table"])


def _show_table(console: Console, title: str, rows: Sequence[Facts], facts: Facts) -> None:
    compared = facts["baseline"] is not None
    names = ("baseline", "model", "change") if compared else ("model",)
    head = ("score", *names, "95 % interval", *(("",) if compared else ()))
    lines = [
        (row["name"], *(row[key]["value"] for key in ("baseline", "model", "change")), row["change"]["interval"],
         row["verdict"])
        if compared else (row["name"], row["model"]["value"], row["model"]["interval"])
        for row in rows
    ]  # fmt: skip
    table(console, title, [head, *lines], right=range(1, 5))


def check_report_path(path: Path) -> None:
    """Check that a report can be written there.

    Raises:
        UsageError: its name ends with none of what `WRITERS` has, or it exists.
    """
    if path.suffix.lower() not in WRITERS:
        raise UsageError(f"--report {path}: the name must end with {', '.join(WRITERS)}")
    require_new(path)


def write_report(path: Path, facts: Facts, json_facts: Facts) -> None:
    """Write a new file of the form that its name says.

    Raises:
        UsageError: it exists, or cannot be written.
        ResourceError: the disk is full.
    """
    with new_files(path) as (file,):
        text = WRITERS[path.suffix.lower()](facts, json_facts)
        file.write(text.encode(errors="backslashreplace").decode())


def to_json(facts: Facts, json_facts: Facts) -> str:
    """Return what `--json` prints."""
    return json.dumps({**json_facts, "command": facts["command"]}, indent=2, ensure_ascii=False, default=str) + "\n"


def to_markdown(facts: Facts, json_facts: Facts) -> str:
    """Return the same as Markdown."""
    compared = f", compared with `{facts['baseline']}`" if facts["baseline"] else ""
    lines = [f"# Evaluation of `{facts['model']}`", "", f"{facts['rows']:,} rows{compared}.", ""]
    lines += _markdown_table(facts["table"], facts["baseline"] is not None)
    for file, rows in facts["by_file"].items():
        lines += ["", f"## Rows of {file}", "", *_markdown_table(rows, facts["baseline"] is not None)]
    lines += ["", *(f"- {line}" for line in facts["lines"])]
    for sample in facts["samples"]:
        lines += ["", f"### {sample['place']}"]
        for name, text in sample["texts"].items():
            lines += ["", f"{name}:", "", *(f"    {line}" for line in text.splitlines())]
    return "\n".join([*lines, "", "```", facts["command"], "```", ""])


def _markdown_table(rows: Sequence[Facts], has_baseline: bool) -> list[str]:
    keys = ("baseline", "model", "change") if has_baseline else ("model",)
    lines = [f"| score | {' | '.join(keys)} |", "|---|" + "---:|" * len(keys)]
    for row in rows:
        lines.append(f"| {row['name']} | " + " | ".join(_cell(row[key]) for key in keys) + " |")
    return lines


def _cell(texts: Facts) -> str:
    return f"{texts['value']} ({texts['interval']})" if texts["interval"] else texts["value"]


def to_html(facts: Facts, json_facts: Facts) -> str:
    """Return the same as a page that needs nothing else."""
    return to_page("evaluation", facts)


WRITERS: Mapping[str, Callable[[Facts, Facts], str]] = {".json": to_json, ".md": to_markdown, ".html": to_html}


def _texts(name: str, estimate: Estimate | None, sign: str = "") -> dict[str, str]:
    if estimate is None:
        return {"value": "", "interval": ""}
    digits = DIGITS.get(name, 2)
    if digits > 2 and math.isfinite(estimate.value):  # of large perplexities nobody reads more
        digits = max(0, digits - max(0, len(f"{abs(estimate.value):.0f}") - 1))
    form = f"{sign},.{digits}f"
    has_interval = estimate.low is not None and estimate.high is not None
    interval = f"{estimate.low:{form}} to {estimate.high:{form}}" if has_interval else ""
    return {"value": "?" if math.isnan(estimate.value) else f"{estimate.value:{form}}", "interval": interval}


def _verdict(name: str, difference: Estimate | None) -> str:
    if difference is None:
        return ""
    if not difference.is_clear:
        return "unclear"
    return "better" if (difference.value < 0) == (name in LOWER_IS_BETTER) else "worse"
