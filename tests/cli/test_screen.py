"""Terminal output: width, logs without control characters, quiet and JSON results."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from conftest import write_rows
from rich.console import Console
from rich.live import Live
from rich.text import Text

from gptj_ft.cli.terminal.bars import ItemRate, activity, bar
from gptj_ft.cli.terminal.data_tables import in_few_lines
from gptj_ft.cli.terminal.progress import TerminalReporter
from gptj_ft.cli.terminal.screen import panel, table, whole
from gptj_ft.cli.terminal.tables import show_training
from gptj_ft.config.options import Recipe
from gptj_ft.training.loop import TrainResult
from gptj_ft.training.reporter import RecentSteps, StepReport
from gptj_ft.training.throughput import StepCounts, Throughput

PATH = "/home/somebody/a/folder/with/a/name/that/is/longer/than/most/lines.jsonl"
ROWS = [
    ("data", "word " * 60),
    ("text", "word" * 60),
    ("path", PATH),
    ("to resume", whole("gptj-ft finetune --resume a/long/enough/name" * 2)),
]


def console_of(width: int, is_terminal: bool = True, term: str = "xterm") -> Console:
    return Console(
        file=io.StringIO(), width=width, force_terminal=is_terminal, color_system=None, _environ={"TERM": term}
    )


def printed(console: Console) -> str:
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [60, 80, 200])
def test_panel_fits_terminal_without_breaking_paths(width: int) -> None:
    console = console_of(width)
    panel(console, "The run", ROWS)
    text = printed(console)
    assert PATH in text
    assert "gptj-ft finetune --resume" in text
    assert max(len(line) for line in text.splitlines() if "word" in line) <= min(width, 100)
    assert len({line.index("word") for line in text.splitlines() if "word word" in line}) == 1, "under each other"


def test_wide_table_becomes_panels_on_narrow_terminal() -> None:
    rows = [("run", "status", "path"), ("one", "finished", PATH), ("two", "stopped", "")]
    narrow, log = console_of(60), console_of(60, is_terminal=False)
    table(narrow, "", rows)
    assert [line.split() for line in printed(narrow).splitlines() if line] == [
        ["one"], ["status", "finished"], ["path", PATH], ["two"], ["status", "stopped"]
    ]  # fmt: skip
    table(log, "", rows)
    assert [line.split() for line in printed(log).splitlines()] == [[cell for cell in row if cell] for row in rows]


def test_long_example_keeps_beginning_and_target() -> None:
    row = Text("\nrows.jsonl:1 as the model sees it\n" + "word " * 500 + "«the answer»")
    lines = [line.plain for line in in_few_lines(row, console_of(80)).split("\n")]
    assert len(lines) == 2 + 6
    assert max(map(len, lines)) <= 80
    assert lines[1].startswith("rows.jsonl:1")
    assert lines[-3] == "  ... 27 more lines; --show 1 shows them ..."
    assert lines[-1].endswith("«the answer»")
    assert in_few_lines(Text("short"), console_of(80)).plain == "short"


def test_log_progress_has_time_and_percent() -> None:
    now = [0.0]
    for console in (console_of(80, is_terminal=False), console_of(80, term="dumb")):
        with bar(console, "converting", clock=lambda: now[0]) as advance:
            for second in range(8 * 3600):
                now[0] += 1
                advance(second * 10**6, 8 * 3600 * 10**6)
        text = printed(console)
        assert not set("\r\x1b") & set(text)
        assert 50 < text.count("\n") < 150
        for line in text.splitlines():
            assert re.fullmatch(r"\d\d:\d\d:\d\d  converting: \d+%, [\d.]+ [MG]B of 28.8 GB, .* left", line), line


def test_uncounted_activity_shows_on_terminals_only() -> None:
    live, log, quiet = console_of(80), console_of(80, is_terminal=False), console_of(80)
    quiet.quiet = True
    for console in (live, log, quiet):
        with activity(console, "loading libraries") as doing:
            doing("reading the rows")
    text = printed(live)
    assert "loading libraries ..." in text
    assert "reading the rows ..." in text
    assert text.rstrip().endswith("\x1b[2K"), "the line goes away"
    assert printed(log) == printed(quiet) == ""


def test_time_left_ignores_resumed_work() -> None:
    now = [100.0]
    resumed, fresh = (ItemRate(lambda: now[0]) for _ in range(2))
    assert resumed.left(50, 100) is None
    now[0] += 10
    assert resumed.left(60, 100) == pytest.approx(40)
    assert fresh.left(5, 100) == pytest.approx(190)
    assert fresh.left(0, 100) is None, "it begins again"
    now[0] += 10
    assert fresh.left(50, 100) == pytest.approx(10)


@pytest.mark.parametrize("verbose", [False, True])
def test_verbose_summary_shows_engine_numbers(verbose: bool) -> None:
    console, counts = console_of(80), StepCounts(2048, 600, 649.0, 3.0, 10**11, 10**11, 6 * 10**9, 0)
    throughput = Throughput(0.9, 3.2, 20.0, 30.0, 0.5, 0.6, 0.005)
    result = TrainResult("-run", "-run/model", 9, 9, 2.5, 2.25, None, None, 700.0, counts, throughput)
    show_training(console, result, Recipe(), 20, verbose)
    text = " ".join(printed(console).split())
    assert "validation loss 2.5000 before, 2.2500 after; lower is better time 11 min of steps, 3.2 tokens/s" in text
    for phrase in ("GFLOP/s 30.0", "without recomputation", "waiting 0.5%", "moved 100.0 GB read"):
        assert (phrase in text) == verbose
    show_training(none := console_of(80), result, Recipe(), 0)
    assert "evaluate ./-run --data FILE" in printed(none)


class StillLive(Live):
    """Live display that draws nothing by itself."""

    def start(self, refresh: bool = False) -> None:
        pass


@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.parametrize("width", [60, 80, 200])
def test_live_progress_fits_the_terminal(width: int, verbose: bool) -> None:
    console = console_of(width)
    reporter, recent = TerminalReporter(console, verbose, StillLive), RecentSteps(12000, 0, 90.0)
    reporter.on_start(recent.progress)
    counts = StepCounts(2048, 600, 649.0, 3.0, 10**11, 10**11, 6 * 10**9, 10**9)
    report = StepReport(
        11999, 12.3456, 0.01, 1e-5, 123.4, counts, Throughput(123456.7, 234567.8, 1e4, 1e4, 0.5, 0.6, 0.1)
    )
    reporter.on_activity("validating on 1,000 rows")
    reporter._since -= 60.0
    console.print(reporter._drawn())
    assert "100 h" not in printed(console)
    assert "12 d 12 h left" in printed(console), "as forecast"
    reporter.on_step(report, recent.add(report))
    console.print(reporter._drawn())
    assert max(map(len, printed(console).splitlines())) <= min(width, 100)
    for phrase in (
        "step 11999/12000",
        "11 min left, done at",
        "loss 12.3456",
        "waiting for the stores 10%",
        "validating on 1,000 rows",
        "234,568 tokens/s (123,457 trained on), 1.0 GB on the device",
    ):
        assert phrase in " ".join(printed(console).split()), phrase
    for phrase in ("GFLOP/s", "of matmul", "read 100.0 GB"):
        assert (phrase in printed(console)) == verbose, "verbose output only"


COMMANDS = {
    "prepare-data --recipe summarization --data rows.jsonl --model tiny": "next: gptj-ft finetune --recipe",
    "finetune --recipe summarization --data rows.jsonl.prepared --model tiny --max-steps 2 --output run":
        "next: gptj-ft evaluate run   # on the 2 held-out rows",
    "evaluate run --limit 4 --set generation.max_new_tokens=2": "next: gptj-ft report run",
    "generate --input rows.jsonl --output out.jsonl --set generation.max_new_tokens=2": "next: gptj-ft evaluate --pred",
    "convert run/model converted": "--data my.jsonl --model converted",
    "report run": "", "runs list": "", "runs verify run": "", "models": "", "recipes list": "", "cache list": "",
}  # fmt: skip
RESULTS = ["rows.jsonl.prepared", "run/model", None, "out.jsonl", "converted", "run/report.html"]


def test_logs_are_plain_and_name_next_command(shell, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl")
    for line, following in COMMANDS.items():
        done = shell(line)
        assert done.code == 0, (line, done.err)
        assert following in done.out, (line, done.out)
        assert not set("\r\x1b") & set(done.out + done.err), line
        lines = (done.out + done.err).replace(f"{tmp_path}", "").splitlines()
        wide = [text for text in lines if len(text) > 80 and "gptj-ft " not in text]  # commands are not broken
        assert not wide, (line, wide)


@pytest.mark.thorough
def test_a_quiet_command_prints_its_result_alone(shell, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl")
    for line, result in zip(COMMANDS, RESULTS, strict=False):
        done = shell(f"{line} --quiet")
        assert (done.code, done.err) == (0, ""), line
        if result is not None:
            assert done.out == f"{result}\n"
        else:
            assert all(re.fullmatch(r"\w+ [\d.e]+", text) for text in done.out.splitlines()), done.out
    assert shell("runs verify run -q").out == ""
    one = shell("generate --quiet --max-new-tokens 2", "The lift stops.")
    assert (one.err, one.out.count("\n")) == ("", 1)
    refused = shell("finetune --resume run --quiet")
    assert (refused.code, refused.out) == (2, "")
    assert "is finished" in refused.err


def test_list_commands_print_one_json_object(shell, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl")
    prepare, *_ = COMMANDS
    assert shell(f"{prepare} --json").json["folder"] == "rows.jsonl.prepared"
    plan = "plan --recipe summarization --data rows.jsonl.prepared --model tiny"
    assert shell(f"{plan} --json").json["needs"]
    assert shell(f"{plan} -q").out == ""
    for line in ("runs list", "models", "recipes list", "cache list", "cache clear"):
        assert isinstance(shell(f"{line} --json").json, dict), line


def test_training_log_has_time_progress_and_forecast(shell, tmp_path: Path, monkeypatch) -> None:
    write_rows(tmp_path / "rows.jsonl")
    done = shell("finetune --recipe summarization --data rows.jsonl --model tiny --max-steps 2 --output run")
    steps = [line for line in done.err.splitlines() if "step " in line and "loss" in line]
    assert re.match(r"\d\d:\d\d:\d\d  step 1/2  50%  loss \d+\.\d{4}  [\d,]+ tokens/s  \d+ s left", steps[0])
    panel_text = done.err.partition("\nThe run\n")[2].partition("validation loss")[0]
    for name in ("data", "model", "memory", "disk", "steps", "finish", "results", "to stop", "to resume"):
        assert re.search(rf"^  {name} ", panel_text, re.MULTILINE), name
