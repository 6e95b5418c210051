"""Test the report of `prepare-data --report`: equal facts as JSON and as a page, texts only on request."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.tiny_tokenizer import make_tokenizer

from gptj_ft.cli.data_facts import data_facts
from gptj_ft.cli.html import write_new
from gptj_ft.cli.html.data_page import data_report
from gptj_ft.cli.terminal.data_tables import show_data, show_lengths
from gptj_ft.config.resolve import resolve
from gptj_ft.data.lengths import bins_of
from gptj_ft.data.prepare import TokenizeJob, tokenize_rows
from gptj_ft.errors import ResourceError
from gptj_ft.training.inputs import gather

TYPED = "prepare-data --recipe summarization --model tiny --data rows.jsonl"
VOID = {"meta", "link", "br"}


class Page(HTMLParser):
    """Parse a page: its tags, attributes and visible text; check that every tag is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.seen: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.seen).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "title"} & set(self.open):
            self.seen.append(data)


@pytest.fixture(autouse=True)
def rows(tmp_path: Path) -> list[dict[str, Any]]:
    """Write forty rows, one of them twice, and two unusable ones."""
    rows: list[dict[str, Any]] = [
        {"note": f"Pump {n} leaks. " * (n % 7 + 1), "summary": f"Leak at {n}."} for n in range(40)
    ]
    rows += [rows[0], {"note": "", "summary": "x"}, {"note": "Odd", "summary": None}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def test_json_report_adds_lengths_and_splits(tmp_path: Path, shell: Any) -> None:
    done = shell(f"{TYPED} --report out.json --json --output folder")
    assert done.code == 0, done.err
    facts = json.loads((tmp_path / "out.json").read_text())
    assert done.json.items() <= facts.items()
    assert facts["rows_read"] == 43
    assert facts["rows_kept"] == 41
    assert set(facts["lengths"]) == {"whole row", "prompt", "answer"}
    for of in facts["lengths"].values():
        assert sum(each["rows"] for each in of["bins"]) == facts["windows"]
        assert of["bins"][0]["first"] == of["shortest"]
        assert of["bins"][-1]["first"] <= of["longest"] <= of["bins"][-1]["last"]
    assert sum(part["documents"] for part in facts["splits"].values()) == facts["windows"]
    for name in ("tokens", "target_tokens"):
        assert sum(part[name] for part in facts["splits"].values()) == facts[name]
    assert facts["padding"]["times_the_tokens"] > 1
    assert 0 < facts["padding"]["share_of_window"] < 1
    assert "examples" not in facts


def test_report_split_equals_the_runs(tmp_path: Path) -> None:
    options = {"recipe": "summarization", "model": "tiny", "data": "rows.jsonl", "holdout": 0.2}
    resolved = resolve(options, environment={})
    inputs, recipe = gather(resolved), resolved.recipe
    assert inputs.validation is not None
    whole = tokenize_rows(TokenizeJob.of(recipe, make_tokenizer(), tmp_path / "rows.jsonl", 50400))
    splits = data_facts(whole, recipe)["splits"]
    assert splits["train"]["documents"] == len(inputs.train.rows)
    assert splits["validation"]["documents"] == len(inputs.validation.rows)
    other = recipe.model_copy(update={"val_data": "other.jsonl"})
    assert list(data_facts(whole, other)["splits"]) == ["train"]


def test_page_accounts_for_every_row(shell: Any, tmp_path: Path) -> None:
    done = shell(f"{TYPED} --report out.html")
    assert done.code == 0, done.err
    assert "report out.html" in done.said
    page = Page((tmp_path / "out.html").read_text(encoding="utf-8"))
    assert "rows 43 read = 41 kept + 2 skipped" in page.text
    assert "skipped 1 row: the field 'document' is empty (rows.jsonl:42)" in page.text
    assert "skipped 1 row: no value for column 'summary' (rows.jsonl:43)" in page.text
    assert "warning 1 row: the same row again; `prepare-data --fix` drops it (rows.jsonl:41)" in page.text
    assert "document = column 'note'" in page.text
    assert "Tokens of the prompt: " in page.text
    assert "Tokens of the answer: " in page.text
    assert re.search(r"train \d+ rows, [\d,]+ tokens, [\d,]+ of them targets validation \d+ rows", page.text)
    assert re.search(r"would compute 1\.\d\d times as many tokens", page.text)
    widths = [attrs["style"] for tag, attrs in page.tags if attrs.get("class") == "bar"]
    assert len(widths) >= 8
    assert "width: 100.0%" in widths


def test_page_is_standalone_and_accessible(shell: Any, tmp_path: Path) -> None:
    assert shell(f"{TYPED} --report out.html").code == 0
    text = (tmp_path / "out.html").read_text(encoding="utf-8")
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "svg", "object"} & {tag for tag, _ in page.tags}
    assert not {"src", "href", "onload", "onclick"} & {name for _, attrs in page.tags for name in attrs}
    assert not re.search(r"https?:|url\(|@import", text)
    assert "default-src 'none'" in text
    assert dict(page.tags)["html"] == {"lang": "en"}
    assert "prefers-color-scheme: dark" in text
    assert all(attrs.get("scope") in ("col", "row") for tag, attrs in page.tags if tag == "th")
    assert all(
        attrs.get("aria-hidden") == "true"
        for tag, attrs in page.tags
        if attrs.get("class") == "bars" and len(attrs) > 1
    )


@pytest.mark.parametrize("suffix", ["json", "html"])
def test_page_shows_texts_only_if_requested(suffix: str, shell: Any, tmp_path: Path) -> None:
    for number, (show, there) in enumerate({"": 0, "--show 0": 0, "--show 2": 2}.items()):
        done = shell(f"{TYPED} --report {number}.{suffix} --output folder{number} {show}")
        assert done.code == 0, done.err
        text = (tmp_path / f"{number}.{suffix}").read_text(encoding="utf-8")
        assert len(set(re.findall(r"Leak at \d+", text))) == there
        assert ("Pump" in text) == (there > 0)


def test_page_escapes_data() -> None:
    path = Path("odd.jsonl")
    row = {"<script>alert(1)</script>": "x", "note": "</pre><img src=x onerror=alert(2)>", "summary": "<b>&amp;"}
    path.write_text(json.dumps(row) + "\n")
    recipe = resolve({"recipe": "summarization", "map": "summary=<script>alert(1)</script>"}, environment={}).recipe
    prepared = tokenize_rows(TokenizeJob.of(recipe, make_tokenizer(), path, 50400))
    parts = [{"text": text, "is_trained_on": number == 1} for number, text in enumerate((row["note"], row["summary"]))]
    examples = [{"place": "odd.jsonl:1", "is_cut": False, "parts": parts}]
    page = Page(data_report(".html", {**data_facts(prepared, recipe), "examples": examples}, recipe))
    assert not {"script", "img", "b"} & {tag for tag, _ in page.tags}
    assert "summary = column '<script>alert(1)</script>'" in page.text
    assert "</pre><img src=x onerror=alert(2)>" in page.text
    assert "«<b>&amp;»" in page.text


def test_page_starts_with_summary_without_folders(tmp_path: Path) -> None:
    with Path("rows.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"note": "Call 555-867-5309 or mail ann@example.org", "summary": "Call."}) + "\n")
    recipe = resolve({"recipe": "summarization", "max_length": 60}, environment={}).recipe
    facts = data_facts(tokenize_rows(TokenizeJob.of(recipe, make_tokenizer(), tmp_path / "rows.jsonl", 50400)), recipe)
    text = data_report(".html", facts, recipe)
    page = Page(text)
    shortened = facts["rows_cut"]
    assert shortened
    sentence = f"42 of 44 rows kept, {shortened} shortened, 1 with possible personal data, 1 other warning"
    assert page.text.startswith(sentence)
    assert str(tmp_path) not in text
    assert "rows.jsonl:44" in page.text
    assert text.count('class="limit"') == 1
    assert "max_length 60" in page.text
    assert "windows" not in page.text


def test_page_shows_shortened_rows_among_the_first(shell: Any, tmp_path: Path) -> None:
    with Path("rows.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"note": "Very long. " * 60, "summary": "Call."}) + "\n")
    line = len(Path("rows.jsonl").read_text(encoding="utf-8").splitlines())
    done = shell(f"{TYPED} --max-length 100 --report rows.html --show 4")
    assert done.code == 0, done.err
    text = Path("rows.html").read_text(encoding="utf-8")
    headings = re.findall(r"<h3>(.*?)</h3>", text)
    assert len(headings) == 4
    assert headings[-1] == f'rows.jsonl:{line} <span class="worse">shortened</span>'
    assert f"to fit in max_length 100 (rows.jsonl:{line})" in text


@pytest.mark.parametrize("max_length", [60, 2048])
def test_page_and_terminal_have_every_count(max_length: int) -> None:
    recipe = resolve({"recipe": "summarization", "max_length": max_length}, environment={}).recipe
    prepared = tokenize_rows(TokenizeJob.of(recipe, make_tokenizer(), Path("rows.jsonl"), 50400))
    facts, console = data_facts(prepared, recipe), Console(file=io.StringIO(), width=100)
    page = Page(data_report(".html", facts, recipe)).text
    show_data(console, prepared.report)
    show_lengths(console, prepared, recipe)
    terminal = console.file.getvalue()  # type: ignore[attr-defined]
    counts = {value for value in facts.values() if type(value) is int} - {facts["version"]}
    counts |= {value for part in facts["splits"].values() for value in part.values()}
    for text in (page, terminal):
        assert {f"{count:,}" for count in counts - {0}} <= set(re.findall(r"[\d,]*\d", text))


def test_report_counts_repairs(shell: Any, tmp_path: Path) -> None:
    done = shell(f"{TYPED} --fix --report out.html")
    assert done.code == 0, done.err
    page = Page((tmp_path / "out.html").read_text(encoding="utf-8"))
    assert "file rows.fixed.jsonl rows 43 read = 40 written + 3 dropped" in page.text
    assert "dropped 1 row: the same row again (rows.jsonl:41)" in page.text
    assert "rows 40 read = 40 kept + 0 skipped" in page.text


@pytest.mark.parametrize("name", ["out.pdf", "out", "html"])
def test_another_suffix_is_refused_before_any_work(name: str, tmp_path: Path, shell: Any, own_home: Path) -> None:
    done = shell(f"{TYPED} --fix --report {name}")
    assert (done.code, f"--report {name}: the name must end with .json or .html" in done.err) == (2, True)
    assert not own_home.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_a_report_that_exists_is_left_alone(tmp_path: Path, shell: Any, own_home: Path) -> None:
    (tmp_path / "out.html").write_text("mine")
    done = shell(f"{TYPED} --report out.html")
    assert (done.code, "out.html exists already" in done.err) == (2, True)
    assert (tmp_path / "out.html").read_text() == "mine"
    assert not own_home.exists()


def test_full_disk_leaves_no_partial_report(tmp_path: Path, fill_disk: Callable[..., None]) -> None:
    recipe = resolve({"recipe": "summarization"}, environment={}).recipe
    facts = data_facts(tokenize_rows(TokenizeJob.of(recipe, make_tokenizer(), Path("rows.jsonl"), 50400)), recipe)
    before = {path.name for path in tmp_path.iterdir()}
    fill_disk()
    for name in ("out.html", "out.json"):
        with pytest.raises(ResourceError, match=f"no space left on the disk while writing {name}"):
            write_new(Path(name), data_report(Path(name).suffix, facts, recipe))
    assert {path.name for path in tmp_path.iterdir()} == before


def test_undecodable_file_name_is_reported() -> None:
    recipe = resolve({"recipe": "summarization"}, environment={}).recipe
    facts = data_facts(tokenize_rows(TokenizeJob.of(recipe, make_tokenizer(), Path("rows.jsonl"), 50400)), recipe)
    for name in ("a.json", "a.html"):
        write_new(Path(name), data_report(Path(name).suffix, {**facts, "files": ["caf\udce9.jsonl"]}, recipe))
    assert json.loads(Path("a.json").read_text())["files"] == ["caf\udce9.jsonl"]
    assert "caf\\udce9.jsonl" in Path("a.html").read_text()


def test_bins_count_every_length_once() -> None:
    lengths = [5, *range(5, 900), 33]
    bins = bins_of(lengths)
    assert sum(each.rows for each in bins) == len(lengths)
    assert all(sum(each.first <= length <= each.last for length in lengths) == each.rows for each in bins)
    assert len(bins) <= 8
