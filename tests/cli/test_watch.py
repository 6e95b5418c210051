"""Test the command `watch`: one run, several, and runs that write no page of their own."""

from __future__ import annotations

import json
import threading
import webbrowser
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from gptj_ft.cli.html.refresh import LIVE, WATCHED
from gptj_ft.cli.html.watched_page import WatchedPage
from gptj_ft.config.run_folder import Run
from gptj_ft.system.lock import locked
from gptj_ft.system.paths import remember_start

STEP = {
    "tokens": 9, "target_tokens": 5, "seconds": 2.0, "waited_seconds": 0.5, "bytes_read": 0, "bytes_written": 0,
    "memory_bytes": 10**9, "device_memory_bytes": 0, "target_tokens_per_second": 2.5, "stall": 0.25, "lr": 1e-4,
    "grad_norm": 1.5,
}  # fmt: skip


def run_at(folder: Path, steps: int = 3) -> Run:
    run = Run(folder)
    folder.mkdir(parents=True)
    run.recipe_file.write_text("recipe: summarization\nmodel: gpt-j\ndata: rows.jsonl\n", encoding="utf-8")
    run.append_metrics({"step": 0, "validation_loss": 3.0})
    for step in range(1, steps + 1):
        run.append_metrics({"step": step, "loss": 3.0 / step, **STEP})
    return run


@contextmanager
def training(*runs: Run) -> Iterator[None]:
    with ExitStack() as stack:
        for run in runs:
            stack.enter_context(locked(run.folder, "training"))
        yield


def reloads(page: Path) -> bool:
    return "data-refresh" in page.read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def no_display(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def test_watch_finds_the_newest_run(shell, tmp_path: Path) -> None:
    assert shell("watch").code == 2
    run = run_at(tmp_path / "elsewhere" / "one")
    remember_start(run.folder)
    done = shell("watch --json")
    assert (done.code, json.loads(done.out)["page"]) == (0, str(run.folder / "report.html"))
    second = run_at(Path("runs/two"))
    assert shell("watch --quiet").out.strip() == str(second.folder / "report.html")
    assert not reloads(second.folder / "report.html")


def test_watch_prints_a_link_without_display(shell, tmp_path: Path) -> None:
    run_at(tmp_path / "a run")
    done = shell("watch 'a run'")
    assert done.code == 0
    assert f"file://{tmp_path}/a%20run/report.html" in done.out


@pytest.mark.parametrize("answer", [True, webbrowser.Error("none")])
def test_watch_opens_a_browser_on_a_display(answer: object, shell, monkeypatch, tmp_path: Path) -> None:
    opened = []

    def open_link(link: str) -> bool:
        opened.append(link)
        if isinstance(answer, Exception):
            raise answer
        return True

    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr(webbrowser, "open", open_link)
    run_at(tmp_path / "run")
    done = shell("watch run")
    assert (done.code, opened) == (0, [f"file://{tmp_path}/run/report.html"])
    assert ("opened" in done.out) is (answer is True)


def test_watch_leaves_the_page_of_a_run_that_writes_it(shell, tmp_path: Path) -> None:
    run = run_at(tmp_path / "run")
    page = run.folder / "report.html"
    page.write_text(f'<meta name="generator" content="{LIVE}">', encoding="utf-8")
    with training(run):
        assert shell("watch run").code == 0
    assert page.read_text(encoding="utf-8").startswith("<meta")


@pytest.mark.parametrize("count", [1, 3])
def test_watched_page_follows_runs_until_they_end(count: int, tmp_path: Path) -> None:
    runs = [run_at(tmp_path / f"run{number}") for number in range(count)]
    page = WatchedPage.of(runs, None)
    seen = []

    def wait(seconds: float) -> bool:
        seen.append((seconds >= 3, reloads(page.path)))
        if len(seen) == 2:
            for run in runs:
                run.append_metrics({"step": 4, "validation_loss": 1.125})
        if len(seen) == 3:
            held.close()
        return True

    with ExitStack() as held:
        held.enter_context(training(*runs))
        page.write(3.0)
        page.follow(wait)
    assert seen == [(True, True)] * 3
    text = page.path.read_text(encoding="utf-8")
    assert "1.125" in text
    assert not reloads(page.path)
    assert "Last written" in text


def test_watching_ends_with_a_page_that_rests(tmp_path: Path) -> None:
    runs = [run_at(tmp_path / name) for name in "ab"]
    page = WatchedPage.of(runs, None)
    with training(*runs):
        page.write(3.0)
        assert reloads(page.path)
        page.follow(lambda seconds: False)
    assert not reloads(page.path)


def test_watching_ends_where_the_run_writes_its_page(tmp_path: Path) -> None:
    run = run_at(tmp_path / "run")
    page = WatchedPage.of([run], None)
    live = f'<meta name="generator" content="{LIVE}">'

    waits = iter(range(3))

    def start_writing(seconds: float) -> bool:
        page.path.write_text(live, encoding="utf-8")
        return next(waits) < 2

    with training(run):
        page.write(3.0)
        page.follow(start_writing)
    assert page.path.read_text(encoding="utf-8") == live


def test_readers_of_a_watched_page_see_whole_pages(tmp_path: Path) -> None:
    page = WatchedPage.of([run_at(tmp_path / name) for name in "abc"], None)
    page.write()
    is_over, broken = threading.Event(), list[str]()

    def read() -> None:
        while not is_over.is_set():
            if not (text := page.path.read_text(encoding="utf-8")).endswith("</html>\n"):
                broken.append(text)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(10):
        page.write(3.0)
    is_over.set()
    reader.join()
    assert not broken


def test_watch_rejects_bad_input_in_a_line(shell, tmp_path: Path) -> None:
    run_at(tmp_path / "one")
    run_at(tmp_path / "two")
    Path("mine.html").write_text("mine", encoding="utf-8")
    for line in (
        "nowhere",
        "one --output x.html",
        "one two --output mine.html",
        "one two --output page.txt",
        "one nowhere",
    ):
        done = shell(f"watch {line}")
        assert (done.code, len(done.err.splitlines())) == (2, 1), done.said
    assert Path("mine.html").read_text(encoding="utf-8") == "mine"
    for _ in range(2):
        assert shell("watch one two").code == 0
    assert WATCHED in Path("watch.html").read_text(encoding="utf-8")
