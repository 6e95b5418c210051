"""Write a leak report as HTML, Markdown or JSON, and lay out its facts for the terminal."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from typing import Any

from gptj_ft.cli.html import fill_template, to_json
from gptj_ft.cli.html.names import model_name, place_name, portable
from gptj_ft.evaluation.leak_report import ANSWER, TEXT, LeakReport
from gptj_ft.evaluation.leaks import ALTERNATIVES
from gptj_ft.evaluation.metrics.memorization import chance_exposure, wilson_estimate
from gptj_ft.evaluation.metrics.statistic import Estimate

SHOWN_ROWS = 20
NO_GUARANTEE = (
    "A report without leaks is no guarantee: it tries greedy continuations and attacks by loss, on a sample of the "
    "rows. Other prompts, sampling, or questions about facts in other words may find more."
)


def leak_facts(report: LeakReport, command: str) -> dict[str, Any]:
    """Lay out a report: title, summary, tables of texts, notes."""
    return {
        "model": model_name(report.model),
        "baseline": model_name(report.baseline) if report.baseline else None,
        "title": _title(report),
        "summary": _summary(report),
        "tables": [table for table in (_continuations(report), _membership(report), _canaries(report)) if table],
        "rows": _rows(report),
        "notes": [*report.notes, NO_GUARANTEE],
        "command": command,
        "portable_command": portable(shlex.split(command)[1:]),
    }


def _title(report: LeakReport) -> str:
    """Return the main result in a few words."""
    checked = sum(bool(row.lengths) for row in report.rows if row.is_trained)
    if not checked:
        return "no row is long enough for a continuation"
    leaked = sum(row.is_leaked for row in report.rows if row.is_trained)
    return f"{leaked:,} of {checked:,} training rows repeated word for word"


def _summary(report: LeakReport) -> str:
    """Return the intervals of the main results in a sentence."""
    parts, leaks = [], report.scores.get("leaks")
    if leaks is not None and leaks.high is not None:
        parts.append(f"With 95 % confidence, at most {leaks.high:.2g} % of all training rows are repeated.")
    name = "calibrated_auc" if "calibrated_auc" in report.scores else "membership_auc"
    parts.append(f"Training rows are told from unseen rows with an AUC of {_text(report.scores[name], 1)}; chance: 50.")
    return " ".join(parts)


def leak_report(suffix: str, facts: Mapping[str, Any], json_facts: Mapping[str, Any]) -> str:
    """Return a report in the format of its suffix: ``.json``, ``.md`` or ``.html``."""
    if suffix == ".json":
        return to_json({**json_facts, "command": facts["command"]})
    return fill_template(f"leaks{suffix}", facts)


def _continuations(report: LeakReport) -> dict[str, Any] | None:
    given = {
        TEXT: f"{report.length} tokens after the first {report.prefix} of a row",
        ANSWER: f"the answer, or its first {report.length} tokens, after the whole prompt",
    }
    head = [
        "Continuation",
        "Training rows",
        "Unseen rows",
        *(["Training rows, untuned model"] if report.baseline else []),
    ]
    rows = []
    for kind in report.kinds:
        counts = [report.count(kind, True), report.count(kind, False)]
        counts += [report.count(kind, True, by_untuned=True)] if report.baseline else []
        rows.append([given[kind], *(f"{count:,} of {total:,}{_rate(count, total)}" for count, total in counts)])
    title = "Written word for word by greedy decoding"
    return {"title": title, "caption": "rates with 95 % Wilson intervals", "head": head, "rows": rows} if rows else None


def _membership(report: LeakReport) -> dict[str, Any]:
    words = {
        "membership": "loss of a row",
        "calibrated": "loss, relative to the untuned model",
        "untuned": "control: loss by the untuned model",
    }
    rows = [
        [text, _text(report.scores[f"{name}_auc"], 1), _text(report.scores.get(f"{name}_tpr"), 1)]
        for name, text in words.items()
        if f"{name}_auc" in report.scores
    ]
    trained, unseen = report.num_trained, len(report.rows) - report.num_trained
    return {
        "title": "Membership: training rows told from unseen rows",
        "caption": f"{trained:,} training rows, {unseen:,} unseen; AUC 50: chance; 95 % intervals",
        "head": ["Attack by", "AUC", "% found at 1 % false alarms"],
        "rows": rows,
    }


def _canaries(report: LeakReport) -> dict[str, Any] | None:
    if not report.canaries:
        return None
    rows = [
        [
            f"in {repeats:,} row{'s' * (repeats != 1)}" if repeats else "in no row (control)",
            f"{len(bits):,}",
            f"{math.fsum(bits) / len(bits):.2f}",
            f"{min(bits):.2f} to {max(bits):.2f}",
        ]
        for repeats, bits in report.exposures()
    ]
    chance, most = chance_exposure(ALTERNATIVES + 1), math.log2(ALTERNATIVES + 1)
    return {
        "title": "Canaries: exposure in bits",
        "caption": f"rank of the planted secret among {ALTERNATIVES + 1:,}; chance: {chance:.2f}, most: {most:g}",
        "head": ["Planted", "Canaries", "Mean exposure", "Range"],
        "rows": rows,
    }


def _rows(report: LeakReport) -> dict[str, Any]:
    rows = []
    for row in report.most_leaked[:SHOWN_ROWS]:
        repeated = ", ".join(
            f"{kind} {row.tuned.repeated[kind]:,} of {length:,}" for kind, length in row.lengths.items()
        )
        before = f"{row.untuned.loss:.3f} -> " if row.untuned else ""
        verdict = "leaked" if row.is_leaked else ""
        rows.append([place_name(row.place), verdict, repeated or "too short", f"{before}{row.tuned.loss:.3f}"])
    return {
        "title": "Training rows that leak most",
        "caption": "tokens right before the first error; loss by the untuned model -> by the model",
        "head": ["Row", "", "Tokens repeated", "Loss"],
        "rows": rows,
    }


def _rate(count: int, total: int) -> str:
    return f": {_text(wilson_estimate(count, total), 1, ' %')}" if total else ""


def _text(estimate: Estimate | None, digits: int, unit: str = "") -> str:
    if estimate is None:
        return ""
    ends = "" if estimate.low is None else f" ({estimate.low:.{digits}f} to {estimate.high:.{digits}f})"
    return f"{estimate.value:.{digits}f}{unit}{ends}"
