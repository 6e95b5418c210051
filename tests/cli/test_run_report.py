"""Pages on runs: content, privacy, and readable charts."""

from __future__ import annotations

import io
import json
import math
import re
import shlex
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from gptj_ft.cli.html.charts import Axis, Change, Line, change_strip, line_chart, round_ticks, tick_texts
from gptj_ft.cli.html.differences import marked
from gptj_ft.cli.html.evaluation_page import (
    change_in,
    changes_of,
    comparison_in,
    evaluation_facts,
    evaluation_report,
    record,
    table_of,
)
from gptj_ft.cli.html.names import portable
from gptj_ft.cli.html.run_page import write_comparison, write_run_page
from gptj_ft.cli.terminal.evaluation import show_comparison
from gptj_ft.config.run_folder import Run, write_json
from gptj_ft.evaluation.comparison import Evaluation, compare_models
from gptj_ft.evaluation.metrics import score
from gptj_ft.evaluation.metrics.label_scores import scores_of_rows
from gptj_ft.evaluation.metrics.statistic import Estimate, PairedEstimates
from gptj_ft.system.digests import read_json


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


def test_line_chart_places_points_and_names_lines() -> None:
    lines = [Line("a<b", [(0, 0), (5, 5), (10, 10)]), Line("other", [(0, 10), (3, math.nan), (10, 0)])]
    svg = line_chart('Loss & "more"', Axis("step"), Axis("nats", from_zero=True), lines)
    root = ElementTree.fromstring(svg)
    told = root.get("aria-label") or ""
    assert told.startswith('Loss & "more" by step, 0 to 10: a<b from 0 to 10; other from 10 to 0')
    assert {"step", "nats", "a<b", "other", "0", "10"} <= set(texts_in(svg))
    places = [(float(c.get("cx")), float(c.get("cy"))) for c in root.iter("{http://www.w3.org/2000/svg}circle")]
    assert len(places) == 5, "what is not finite is left out"
    (x0, y0), (x1, y1), (x2, y2) = places[:3]
    assert (x1, y1) == pytest.approx(((x0 + x2) / 2, (y0 + y2) / 2))
    assert x0 < x2
    assert y0 > y2, "upwards"
    assert line_chart("", Axis(""), Axis(""), [Line("", [])]) == ""
    assert line_chart("", Axis(""), Axis("", from_zero=True), [Line("", [(0, 0.0), (5, 0.0)])]) == "", "all zero"


def test_an_axis_ends_where_the_data_ends() -> None:
    points = [(step, 8 - step / 200) for step in range(0, 661, 60)]
    svg = line_chart("Loss", Axis("step"), Axis("nats"), [Line("one", points)])
    assert {"0", "200", "400", "660"} <= set(texts_in(svg))
    assert not {"600", "800"} & set(texts_in(svg)), "neither beyond the end, nor over its text"
    circles = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}circle")
    last = max(float(circle.get("cx")) for circle in circles)
    assert last > 500, "the last point stands at the right edge"
    assert "nats, axis 4 to 8" in texts_in(svg), "the range of an axis that does not begin at 0 is said"


def test_lowest_of_three_points_gets_a_ring() -> None:
    def drawn(count: int) -> tuple[int, int]:
        points = [(step, abs(step - 1.0)) for step in range(count)]
        svg = line_chart("", Axis("step"), Axis("y"), [Line("", points, marks_lowest=True)])
        return svg.count("stroke-dasharray"), svg.count('class="lowest"')

    assert (drawn(2), drawn(3)) == ((0, 0), (1, 1))


def test_line_labels_do_not_overlap() -> None:
    lines = [Line(f"run {n}", [(0, 5), (1, 1 + n / 100), (2, 1 + n / 100)]) for n in range(5)]
    root = ElementTree.fromstring(line_chart("", Axis("step"), Axis("y"), lines))
    texts = root.iter("{http://www.w3.org/2000/svg}text")
    heights = sorted(float(text.get("y")) for text in texts if (text.text or "").startswith("run "))
    assert min(after - before for before, after in pairwise(heights)) >= 18


def test_long_run_chart_keeps_its_peaks() -> None:
    points = [(n, 100.0 if n == 51_234 else math.sin(n)) for n in range(100_000)]
    svg = line_chart("", Axis("step"), Axis("y"), [Line("", points)])
    assert len(svg) < 12_000
    assert "100" in texts_in(svg)


def test_strip_places_change_and_interval_around_0() -> None:
    for scale in (1e-3, 1.0, 1e7):
        svg = change_strip(Change("f1", "+<2>", 20 * scale, (-10 * scale, 50 * scale), "unclear"))
        root = ElementTree.fromstring(svg)
        (point,), (zero, span) = root.findall("circle"), root.findall("line")
        low, at, high = (float(x.rstrip("%")) for x in (span.get("x1"), point.get("cx"), span.get("x2")))
        assert zero.get("x1") == "50%"
        assert (at - 50, 50 - low) == pytest.approx(((high - 50) * 0.4, (high - 50) * 0.2), abs=0.1)
        assert 90 < high < 95, "as wide as its place"
        assert root.get("aria-label", "").startswith("f1: change +<2>, 95 % interval ")
    assert change_strip(Change("", "", math.inf, None, "")) == ""


class Checker(HTMLParser):
    """Parser that checks closed tags and records fetched or executed resources."""

    VOID = {"meta", "br", "link", "img", "wbr"}

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetches: list[tuple[str, object]] = []
        self.text = ""
        self.within: dict[str, str] = {}
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
        if "style" not in self.open:
            self.text += data
            for tag in self.open:
                self.within[tag] = self.within.get(tag, "") + data

    def first(self, tag: str) -> str:
        """Return the text of the only element with a tag."""
        return " ".join(self.within[tag].split())


HOME = "/home/somebody/ward 7"
RECIPE = f"""recipe: summarization
model: {HOME}/models/gpt-j  # command line
data: {HOME}/notes.jsonl
output: {HOME}/runs/mine
lr: LR
about: <b>about</b>
"""


def make_run(folder: Path, lr: float = 1e-5, steps: int = 3, moved: int = 0) -> Run:
    run = Run(folder)
    folder.mkdir()
    run.recipe_file.write_text(RECIPE.replace("LR", str(lr)), encoding="utf-8")
    command = ["x", "finetune", "--recipe", "summarization", "--data", f"{HOME}/notes.jsonl", f"--model={HOME}/m/gpt-j"]
    chosen = {"placement": "weights on device, optimizer state on host", "precision": "bf16"}
    write_json(run.folder / "environment.json", {"torch": "2.9", **chosen, "command": command})
    figures = {
        "tokens": 9, "target_tokens": 5, "seconds": 2.0, "waited_seconds": 0.5, "bytes_read": moved, "bytes_written": 0,
        "memory_bytes": 10**9, "device_memory_bytes": 0, "target_tokens_per_second": 2.5, "stall": 0.25, "lr": lr,
        "grad_norm": 1.5,
    }  # fmt: skip
    run.append_metrics({"step": 0, "validation_loss": 3.0})
    for step in range(1, steps + 1):
        run.append_metrics({"step": step, "loss": 3.0 / step, **figures})
    run.append_metrics({"step": steps, "validation_loss": 1.25})
    return run


def verdict_on(answers: list[str]):
    references, places = [["a secret text"]] * len(answers), [f"{HOME}/f:{n}" for n in range(len(answers))]
    systems = [
        Evaluation(f"{HOME}/{name}", score(["rouge"], texts, references), places, texts, references)
        for name, texts in (("mine/model", answers), ("untuned", ["another"] * len(answers)))
    ]
    return compare_models(*systems, ["rouge"], 0)


def page_of(run: Run, show_text: bool = False) -> Checker:
    page = Checker(write_run_page(run, show_text).read_text(encoding="utf-8"))
    assert not page.open
    assert not page.fetches
    return page


def test_run_page_is_complete_and_fetches_nothing(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "summarization-4", moved=10**9))
    for text in (
        "3.0000 before, 1.2500 after (lower is better)",
        "Learning rate", "Throughput", "Waiting for the stores", "Moved by the stores",
        "finetune --config", "<b>about</b>", "Not evaluated yet", "weights on device, optimizer state on host",
    ):  # fmt: skip
        assert text in page.text
    assert page.first("h1") == "Summarization, run 4: stopped at step 0, validation loss 3.0000 → 1.2500"


def test_page_starts_with_verdict_and_changes(tmp_path: Path) -> None:
    run = make_run(tmp_path / "summarization-1")
    record(run.folder, verdict_on(["a secret text"] * 2 + ["another"] * 2 + ["a text"] * 2), "gptj-ft evaluate run")
    text = write_run_page(run).read_text(encoding="utf-8")
    page = page_of(run)
    assert page.first("h1") == "Summarization, run 1: better. ROUGE-L 0.00 → 60.00 on 6 rows"
    order = [
        "<h1>",
        'class="strip better"',
        'class="wins"',
        "<table",
        "Learning curves",
        "The run",
        "<h2>Data",
        "<details",
    ]
    assert sorted(order, key=text.index) == order
    assert page.text.index("rougeL") < page.text.index("rouge1"), "the main score first"
    assert "better on 4the same on 2worse on 0" in page.text
    levels = [int(level) for level in re.findall(r"<h(\d)", text)]
    assert levels[0] == 1
    assert set(levels[1:]) == {2}


def test_page_omits_empty_charts_and_folds_machine(tmp_path: Path) -> None:
    text = write_run_page(make_run(tmp_path / "run")).read_text(encoding="utf-8")
    assert "Moved by the stores" not in text
    assert "Waiting for the stores" not in text
    folded = text.index('<details class="part">')
    assert text.index("<figcaption>Loss") < folded < text.index("<figcaption>Throughput")


def test_only_long_runs_get_a_smoothed_line(tmp_path: Path) -> None:
    for steps, thin in ((60, 0), (200, 1)):
        text = write_run_page(make_run(tmp_path / f"run{steps}", steps=steps)).read_text(encoding="utf-8")
        assert text.count('opacity="0.4"') == thin


def test_pages_reveal_no_local_folder(tmp_path: Path) -> None:
    run, verdict = make_run(tmp_path / "mine"), verdict_on(["a secret text", "another"])
    command = shlex.join(["gptj-ft", "evaluate", f"{HOME}/runs/mine", "--data", f"{HOME}/held.jsonl"])
    record(run.folder, verdict, command)
    facts = evaluation_facts(verdict, command, 2)
    write_comparison([run, make_run(tmp_path / "other")], tmp_path / "both.html")
    comparison = (tmp_path / "both.html").read_text(encoding="utf-8")
    report = write_run_page(run, show_text=True).read_text(encoding="utf-8")
    for text in (report, comparison, evaluation_report(".html", facts, {}), evaluation_report(".md", facts, {})):
        assert "somebody" not in text
        assert "ward" not in text
        assert str(tmp_path) not in text
        assert "weights auto" not in text
    for text in (report, comparison):
        assert "weights on device, optimizer state on host" in text
    assert "model: gpt-j  # command line" in report
    assert "gptj-ft finetune --recipe summarization --data notes.jsonl --model=gpt-j" in report
    assert "mine: <span" in evaluation_report(".html", facts, {})


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("/home/a/x.jsonl", "x.jsonl"), ("~/x.jsonl", "x.jsonl"), ("../b/x", "x"), ("ward/patient/rows", "rows"),
        ("ward/x.jsonl", "x.jsonl"), ("--data=/a/x.csv", "--data=x.csv"), ("/a/runs/r1/model", "r1"),
        ("runs/r1", "runs/r1"), ("EleutherAI/gpt-j-6b", "EleutherAI/gpt-j-6b"), ("hub:a/b/c", "hub:a/b/c"),
        ("prompt={{ text }} yes/no", "prompt={{ text }} yes/no"), ("ward 7/x.jsonl", "x.jsonl"),
        ("yes/no or so", "yes/no or so"), ("--lr", "--lr"),
    ],
)  # fmt: skip
def test_page_commands_shorten_paths(word: str, shown: str) -> None:
    assert shlex.split(portable([word])) == ["gptj-ft", shown]


def test_page_shows_row_texts_on_request_only(tmp_path: Path) -> None:
    run, verdict = make_run(tmp_path / "run"), verdict_on(["a secret text", "another", "a text"])
    record(run.folder, verdict, "gptj-ft evaluate run")
    page = page_of(run).text
    assert "secret" not in page
    assert "gptj-ft evaluate run" in page
    shown = page_of(run, show_text=True)
    assert "a secret text" in shown.text
    assert "f:0: better, rougeL 0 → 100" in shown.text, "by how much"
    assert comparison_in(read_json(run.folder / "evaluation.json")) == verdict.comparison


def test_run_page_shows_label_scores(tmp_path: Path) -> None:
    run, verdict = make_run(tmp_path / "run"), verdict_on(["a text", "another"])
    labels = scores_of_rows([0, 1], [[0.9, 0.1], [0.6, 0.4]], ["bad", "good"])
    record(run.folder, replace(verdict, model=replace(verdict.model, labels=labels)), "gptj-ft evaluate run")
    page = page_of(run).text
    assert "always answering 'bad' is right for 50.00 % of the rows" in page
    assert "Confusion matrix: true labels down, answers across" in page


def test_html_escapes_texts_and_markdown_does_not() -> None:
    facts = evaluation_facts(verdict_on(["a <i> & text", "another"]), "gptj-ft evaluate", 1)
    markdown, page = (evaluation_report(suffix, facts, {}) for suffix in (".md", ".html"))
    assert "model:\n\n    a <i> & text\n" in markdown
    assert "| score | baseline | model | change |\n|---|---:|---:|---:|\n| rouge1 |" in markdown
    assert "<i>" not in page
    assert "&lt;i&gt; &amp;" in page


def test_unexpected_words_are_marked() -> None:
    texts = {"expected": "Stop the pump, then call.", "model": "Stop that pump, then  wait.", "baseline": "long " * 60}
    (sample,) = marked([{"place": "f:1", "texts": texts}])
    for name, text in texts.items():
        assert "".join(part["text"] for part in sample["texts"][name]["parts"]) == text
    differing = [part["text"].strip() for part in sample["texts"]["model"]["parts"] if part["differs"]]
    assert differing == ["that", "wait"]
    assert [sample["texts"][name]["is_long"] for name in texts] == [False, False, True]
    missing = [part["text"].strip() for part in sample["texts"]["expected"]["parts"] if part["differs"]]
    assert missing == ["the", "call"], "what the model's answer lacks"


WIDE = PairedEstimates(
    {"perplexity": Estimate(10_360_296, 3_427_433, 34_314_701), "loss": Estimate(16.1, 15, 17.4)},
    {"perplexity": Estimate(44_367_943, 30e6, 50e6), "loss": Estimate(17.6, 17, 18)},
    {"perplexity": Estimate(-34_007_647, -46e6, -3_369_996), "loss": Estimate(-1.5, -2, 0.1)},
)


def test_lower_loss_is_drawn_as_better() -> None:
    loss = change_in(WIDE, "loss")
    assert (loss.value, loss.ends, loss.verdict) == (1.5, (-0.1, 2), "unclear")
    assert [each["name"] for each in changes_of(WIDE, "loss")] == ["loss"], "perplexities say the same"


def test_large_perplexities_get_three_digits() -> None:
    table = {row["name"]: row for row in table_of(WIDE)}
    assert table["perplexity"]["model"] == {"value": "1.04e7", "interval": "3.43e6 to 3.43e7"}
    assert table["perplexity"]["change"] == {"value": "-3.40e7", "interval": "-4.60e7 to -3.37e6"}
    assert table["loss"]["change"] == {"value": "-1.5000", "interval": "-2.0000 to +0.1000"}
    facts = evaluation_facts(verdict_on(["a text", "a text"]), "gptj-ft evaluate", 0)
    text = evaluation_report(".html", {**facts, "table": list(table.values())}, {})
    assert re.findall(r'<th role="columnheader"[^>]*>([^<]+)<', text)[:2] == ["Score", "Verdict"]
    assert re.search(r"\.verdict {[^}]*white-space: nowrap", text)
    assert re.search(r"th, td {[^}]*overflow-wrap: break-word", text)
    assert not re.search(r"th, td {[^}]*anywhere", text)
    assert all(f'data-label="{name}"' in text for name in ("Verdict", "Baseline", "Model", "Change"))


def test_terminal_scores_fit_80_columns() -> None:
    names = ("loss", "perplexity", "word_perplexity", "byte_perplexity", "token_accuracy", "rougeL")
    wide = PairedEstimates(
        *(dict.fromkeys(names, found["perplexity"]) for found in (WIDE.scores, WIDE.baseline, WIDE.differences))
    )
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    show_comparison(console, {**evaluation_facts(verdict_on(["a text"] * 2), "", 0), "table": table_of(wide)})
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.startswith(("loss", "perplexity", "token_accuracy", "rougeL ")) for line in lines) == 5, (
        "one line each"
    )
    assert not any("word_perplexity" in line for line in lines)
    assert lines[-1] == "Better: ROUGE-L 0.00 -> 80.00 on 2 rows"


def luminance(colour: str) -> float:
    digits = colour.lstrip("#")
    digits = "".join(2 * digit for digit in digits) if len(digits) == 3 else digits
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_text_colours_meet_wcag_aa_contrast() -> None:
    text = evaluation_report(".html", evaluation_facts(verdict_on(["a text", "a text"]), "gptj-ft evaluate", 0), {})
    themes = [dict(re.findall(r"--([\w]+): (#\w+);", rule)) for rule in re.findall(r":root {([^}]*)}", text)]
    assert len(themes) == 3

    def contrast(one: str, other: str) -> float:
        low, high = sorted((luminance(one), luminance(other)))
        return (high + 0.05) / (low + 0.05)

    for theme in themes:
        for name in ("text", "dim", "better", "worse", *(f"c{n}" for n in range(6))):
            assert contrast(theme[name], theme["ground"]) >= 4.5, name
        for name in ("better", "same", "worse"):
            assert contrast(theme[name], theme["on"]) >= 4.5, name


def test_runs_are_compared_by_what_differs(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "one"), make_run(tmp_path / "two", lr=2e-5, steps=5)]
    write_comparison(runs, tmp_path / "both.html")
    page = Checker((tmp_path / "both.html").read_text(encoding="utf-8"))
    assert not page.open
    assert not page.fetches
    assert page.first("h1") == "2 runs, validated on different rows: their losses cannot be compared"
    assert page.text.count("Options that differ") == 1
    assert "2e-05" in page.text
    assert "batch_size" not in page.text


def test_comparison_names_lowest_loss_first(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name) for name in ("one", "two")]
    runs[1].append_metrics({"step": 4, "validation_loss": 1.125})
    for run, answers in zip(runs, (["a text"] * 3 + ["another"], ["a secret text"] * 3 + ["another"]), strict=True):
        (run.data / "validation").mkdir(parents=True)
        write_json(run.data / "validation" / "manifest.json", {"data_sha256": "d", "windows": 3})
        run.recipe_file.write_text(run.recipe_file.read_text() + f"weights: {'auto' if run is runs[0] else 'disk'}\n")
        record(run.folder, verdict_on(answers), "gptj-ft evaluate run")
    write_comparison(runs, tmp_path / "both.html")
    text = (tmp_path / "both.html").read_text(encoding="utf-8")
    page = Checker(text)
    assert page.first("h1") == "two has the lowest validation loss of 2 runs, 1.1250"
    assert "Change of rougeL against the baseline, with 95 % intervals, all on one scale" in page.text
    assert "auto" not in page.text
    ends = [float(end) for end in re.findall(r'class="span" x1="[\d.]+%" x2="([\d.]+)%"', text)]
    assert len(ends) == 2
    assert ends[1] == 92, "the farthest end"
    assert ends[0] - 50 == pytest.approx(0.8 * 42), "rougeL of 80 beside 100"
    assert "not shown: data/" in page_of(runs[0]).text, "rows that cannot be read do not keep a run from being shown"


def test_report_is_a_command(shell, tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name).folder for name in ("one", "two")]
    assert shell(f"report {runs[0]}").out.strip() == str(runs[0] / "report.html")
    assert shell(f"report {runs[0]}").code == 0, "made anew"
    done = shell(f"report {runs[0]} {runs[1]} --output both.html --json")
    assert done.json == {"page": "both.html"}
    assert shell(f"report {runs[0]} {runs[1]} --output both.html").code == 2
    assert shell(f"report {tmp_path}").code == 2
    assert shell(f"report {runs[0]} --output x.html").out.strip() == "x.html"
    assert shell(f"report {runs[0]} --output x.html").code == 2, "it exists"
    json.loads(done.out)
    for text in ("{", '{"model": 3}', '{"model": {}, "baseline": null, "by_row": null, "differences": []}'):
        (runs[0] / "evaluation.json").write_text(text, encoding="utf-8")
        assert shell(f"report {runs[0]}").code == 3
        assert shell(f"report {runs[0]} {runs[1]} --output new.html").code == 3
    model = {"model": "m", "rows": 1, "notes": [], "scores": {}, "intervals": {}}
    sound = {"baseline": None, "differences": {}, "by_row": None, "samples": {}, "command": ""}
    for part in ({"rows": 10**400}, {"scores": {"loss": "x"}}, {"intervals": {"loss": []}}, {"notes": ["x" * 10**6]}):
        hostile = {**sound, "model": {**model, **part}}
        (runs[0] / "evaluation.json").write_text(json.dumps(hostile), encoding="utf-8")
        done = shell(f"report {runs[0]}")
        assert (done.code, f"evaluation.json is damaged: model.{next(iter(part))}" in done.said) == (3, True), done.said
    (runs[0] / "evaluation.json").unlink()
    (runs[0] / "environment.json").write_text('{"command": 5}', encoding="utf-8")
    assert shell(f"report {runs[0]}").code == 3
