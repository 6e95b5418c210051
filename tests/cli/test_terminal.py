"""Control characters in foreign texts: terminals get them escaped, files and pipes unchanged."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from rich.live import Live
from rich.text import Text
from support.cli_runner import Shell, Terminal

from gptj_ft.cli.terminal.output import print_json, print_result
from gptj_ft.cli.terminal.screen import PlainConsole

# Clears the screen; writes the clipboard; a C1 sequence introducer; bell, backspaces and a return, to overwrite a line.
HOSTILE = "\x1b[2J\x1b]52;c;QUJD\x07\x9b2J\x08\x08\rok\u202e"
SECRET = "hf_" + "a1B2c3D4" * 4
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


@pytest.fixture
def typed(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Run commands on a terminal without colours; check that its output has no control characters, and return it."""
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "80")

    def type_(line: str, *more: object, code: int = 0) -> str:
        screen = Terminal()
        with redirect_stdout(screen), redirect_stderr(screen):
            done = shell(line, *more)
        text = screen.getvalue()
        assert done.code == code, text
        assert text
        assert not (found := OBEYED.search(text)), (line, text[max(found.start() - 60, 0) : found.end() + 20])
        return text

    return type_


def test_terminals_get_no_hostile_control_characters(typed: Callable[..., str], shell: Shell, tmp_path: Path) -> None:
    folder = tmp_path / f"from{HOSTILE.replace('/', '')}others"
    folder.mkdir()
    rows, odd = folder / "rows.jsonl", folder / "odd.jsonl"
    lines = [{"document": f"Zwetschge {n} {HOSTILE} is long.", "summary": f"{HOSTILE} Zwetschge {n}"} for n in range(8)]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    odd.write_text(json.dumps({f"name{HOSTILE}": "a", f"other{HOSTILE}": HOSTILE}) + "\n")
    small = "--recipe summarization --model tiny --max-length 128"
    shown = typed(f"prepare-data {small} --show 2 --data", rows, "--output", tmp_path / "shown")
    assert r"\x1b[2J\x1b]52;c;QUJD" in shown
    typed(f"prepare-data {small} --json --data", rows, "--output", tmp_path / "object")
    typed(f"prepare-data {small} --data", odd, code=3)
    typed(f"prepare-data {small} --map document={shlex.quote(HOSTILE)} --data", rows, code=3)
    odd.write_text(f'{{"document": "a" {HOSTILE}}}\n')
    typed(f"prepare-data {small} --data", odd, code=3)
    run = tmp_path / "runs" / f"run{HOSTILE}"
    typed(
        f"finetune {small} --max-steps 2 --batch-size 4 --precision fp32 --set sample_rows=1 "
        f"--set generation.max_new_tokens=4 --set about={SECRET} --data", rows, "--output", run,
    )  # fmt: skip
    assert SECRET not in (run / "environment.json").read_text()
    assert "run" in typed("runs list")
    typed("runs verify", run)
    typed("report", run)
    typed("evaluate --show 2 --set generation.max_new_tokens=4", run, "--data", rows)
    for more in ("--json", "--stream"):
        typed(f"generate --max-new-tokens 8 {more} --model", run, HOSTILE)
    for line, *more in (
        (f"prepare-data {small} --data", rows, "--output", tmp_path / "logged"),
        ("evaluate --set generation.max_new_tokens=4", run, "--data", rows),
        (
            f"finetune {small} --max-steps 1 --precision fp32 --set sample_rows=1 --set generation.max_new_tokens=2",
            "--data", rows, "--output", tmp_path / "again",
        ),
        ("runs list",),
        ("report", run, "--output", tmp_path / "page.html"),
    ):  # fmt: skip
        logged = shell(line, *more)
        assert logged.said, line
        assert "Zwetschge" not in logged.said, line
    typed("models list")
    typed("cache list")
    config = run / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": HOSTILE}))
    typed("generate --model", run / "model", "hi", code=2)
    (run / "recipe.yaml").write_text(f'lr: "{HOSTILE.encode("unicode_escape").decode()}"')
    typed("finetune --resume", run, code=2)


def test_answer_is_escaped_on_terminals_only(capsys: pytest.CaptureFixture[str]) -> None:
    print_result(f"{HOSTILE}\n\tfin", end="")
    assert capsys.readouterr().out == f"{HOSTILE}\n\tfin"
    screen = Terminal()
    with redirect_stdout(screen):
        print_result(f"{HOSTILE}\n\tfin")
    assert screen.getvalue() == "\\x1b[2J\\x1b]52;c;QUJD\\x07\\x9b2J\\x08\\x08\\rok\\u202e\n\tfin\n"


def test_json_escapes_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"text": HOSTILE + "é"})
    out = capsys.readouterr().out
    assert json.loads(out) == {"text": HOSTILE + "é"}
    assert not OBEYED.search(out)
    assert "é" in out


def test_console_escapes_text_but_not_styles() -> None:
    screen = Terminal()
    console = PlainConsole(file=screen, force_terminal=True, color_system="truecolor", width=60)
    with Live(Text(f"{HOSTILE} bar", style="red"), console=console):
        console.print(Text(f"{HOSTILE} said", style="bold"))
    own = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", screen.getvalue())
    assert not OBEYED.search(own)
    assert "\x1b[1m" in screen.getvalue()
    assert "\x1b[2J" not in screen.getvalue()
