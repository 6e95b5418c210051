"""Runs as pages: what is on them, what is not, and charts that can be read."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest

from gptj_ft.evaluate import Evaluation
from gptj_ft.evaluation_report import record, table_in, table_of
from gptj_ft.metrics import score
from gptj_ft.pages.charts import Axis, Line, Span, bar_chart, intervals_chart, line_chart, round_ticks, tick_texts
from gptj_ft.run import Run, read_json
from gptj_ft.run_report import write_comparison, write_report
from gptj_ft.verdict import judge


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 10, ["0", "2", "4", "6", "8", "10"]),
        (1.37, 6.2, ["1", "2", "3", "4", "5", "6", "7"]),
        (0, 0.01, ["0.000", "0.002", "0.004", "0.006", "0.008", "0.010"]),
        (0, 2e-5, ["0", "0.5e-5", "1.0e-5", "1.5e-5", "2.0e-5"]),
        (3, 3, ["2.6", "2.8", "3.0", "3.2", "3.4"]),
        (0, 0, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (-12, 1234, ["-500", "0", "500", "1,000", "1,500"]),
    ],
)
def test_ticks_are_round_and_enclose_the_values(low: float, high: float, ticks: list[str]) -> None:
    found = round_ticks(low, high)
    assert found[0] <= low <= high <= found[-1] + 1e-12
    assert tick_texts(found) == ticks


def texts_in(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_a_line_chart_names_its_axes_and_lines_and_draws_points_where_they_are() -> None:
    lines = [Line("a<b", [(0, 0), (5, 5), (10, 10)]), Line("other", [(0, 10), (3, math.nan), (10, 0)])]
    svg = line_chart('Loss & "more"', Axis("step"), Axis("nats", from_zero=True), lines)
    root = ElementTree.fromstring(svg)
    assert root.get("aria-label") == 'Loss & "more"'
    assert {"step", "nats", "a<b", "other", "0", "10"} <= set(texts_in(svg))
    places = [(float(c.get("cx")), float(c.get("cy"))) for c in root.iter("{http://www.w3.org/2000/svg}circle")]
    assert len(places) == 5, "what is not finite is left out"
    (x0, y0), (x1, y1), (x2, y2) = places[:3]
    assert (x1, y1) == pytest.approx(((x0 + x2) / 2, (y0 + y2) / 2))
    assert x0 < x2
    assert y0 > y2, "upwards"
    assert line_chart("", Axis(""), Axis(""), [Line("", [])]) == ""


def test_a_chart_of_a_long_run_stays_small_and_keeps_its_peaks() -> None:
    points = [(n, 100.0 if n == 51_234 else math.sin(n)) for n in range(100_000)]
    svg = line_chart("", Axis("step"), Axis("y"), [Line("", points)])
    assert len(svg) < 12_000
    assert "100" in texts_in(svg)


def test_bars_and_intervals_are_as_long_as_their_values() -> None:
    bars = ElementTree.fromstring(bar_chart("Rows", "tokens", "rows", [("1", 5.0), ("2", 10.0), ("3", 0.0)]))
    heights = [float(bar.get("height")) for bar in bars.iter("{http://www.w3.org/2000/svg}rect")]
    assert heights == pytest.approx([heights[1] / 2, heights[1], 0], abs=0.2)
    svg = intervals_chart("Scores", "score", ["baseline", "model"], [("f1", [Span(20, None, None), Span(50, 40, 60)])])
    places = [float(c.get("cx")) for c in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}circle")][2:]
    whisker = re.search(r"M([\d.]+) \d+H([\d.]+)\" stroke=\"var\(--c1\)", svg)
    assert whisker
    assert float(whisker[1]) < places[1] < float(whisker[2])
    assert places[0] < places[1]
    assert {"f1", "baseline", "model"} <= set(texts_in(svg))


class Checker(HTMLParser):
    """Sees that tags are closed, and what a page would fetch or run."""

    VOID = {"meta", "br", "link", "img"}

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetches: list[tuple[str, object]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list) -> None:
        self.open += [tag] if tag not in self.VOID else []
        self.fetches += [(tag, value) for name, value in attributes if name in ("src", "href", "onload", "onclick")]
        self.fetches += [(tag, None)] if tag in ("script", "link", "img", "iframe") else []

    def handle_startendtag(self, tag: str, attributes: list) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def make_run(folder: Path, lr: float = 1e-5, steps: int = 3) -> Run:
    run = Run(folder)
    folder.mkdir()
    run.recipe_file.write_text(f"recipe: summarization\nlr: {lr}\nabout: <b>about</b>\n", encoding="utf-8")
    figures = {
        "tokens": 9, "target_tokens": 5, "seconds": 2.0, "waited_seconds": 0.5, "bytes_read": 10**9, "bytes_written": 5,
        "memory_bytes": 10**9, "device_memory_bytes": 0, "target_tokens_per_second": 2.5, "stall": 0.25, "lr": lr,
        "grad_norm": 1.5,
    }  # fmt: skip
    run.append_metrics({"step": 0, "validation_loss": 3.0})
    for step in range(1, steps + 1):
        run.append_metrics({"step": step, "loss": 3.0 / step, **figures})
    run.append_metrics({"step": steps, "validation_loss": 1.25})
    return run


def verdict_on(answers: list[str]):
    references, places = [["a secret text"]] * len(answers), [f"f:{n}" for n in range(len(answers))]
    systems = [
        Evaluation(name, score(["rouge"], texts, references), places, texts, references)
        for name, texts in (("tuned", answers), ("untuned", ["another"] * len(answers)))
    ]
    return judge(*systems, ["rouge"], 0)


def test_a_page_has_the_run_its_curves_and_commands_and_fetches_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    page = Checker(write_report(run).read_text(encoding="utf-8"))
    assert not page.open
    assert not page.fetches
    for text in (
        "3.0000 before, 1.2500 after",
        "Learning rate",
        "Throughput",
        "GB",
        "finetune --config",
        "<b>about</b>",
    ):
        assert text in page.text
    assert "not been evaluated yet" in page.text


def test_an_evaluation_is_on_the_page_and_texts_only_if_asked_for(tmp_path: Path) -> None:
    run, verdict = make_run(tmp_path / "run"), verdict_on(["a secret text", "another", "a text"])
    record(run.folder, verdict, "gptj-ft evaluate run")
    page = Checker(write_report(run).read_text(encoding="utf-8")).text
    assert "better on 2" in re.sub(r"\s+", " ", page)
    assert "secret" not in page
    assert "gptj-ft evaluate run" in page
    shown = Checker(write_report(run, show_text=True).read_text(encoding="utf-8"))
    assert not shown.open
    assert "a secret text" in shown.text
    assert table_in(read_json(run.folder / "evaluation.json")) == table_of(verdict.comparison)


def test_runs_are_compared_by_what_differs(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "one"), make_run(tmp_path / "two", lr=2e-5, steps=5)]
    write_comparison(runs, tmp_path / "both.html")
    page = Checker((tmp_path / "both.html").read_text(encoding="utf-8"))
    assert not page.open
    assert not page.fetches
    assert page.text.count("Options that differ") == 1
    assert "2e-05" in page.text
    assert "batch_size" not in page.text


def test_report_is_a_command(shell, tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name).folder for name in ("one", "two")]
    assert shell(f"report {runs[0]}").out.strip() == str(runs[0] / "report.html")
    assert shell(f"report {runs[0]}").code == 0, "made anew"
    done = shell(f"report {runs[0]} {runs[1]} --output both.html --json")
    assert done.json == {"page": "both.html"}
    assert shell(f"report {runs[0]} {runs[1]} --output both.html").code == 2
    assert shell(f"report {tmp_path}").code == 2
    assert shell(f"report {runs[0]} --output x.html").code == 2
    (runs[0] / "evaluation.json").write_text("{", encoding="utf-8")
    assert shell(f"report {runs[0]}").code == 3
    json.loads(done.out)
