"""Test escaping of control characters, secrets and shell words."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gptj_ft.system.plain_text import command_line, escape_controls, one_line, without_secrets


def test_control_characters_are_written_out() -> None:
    text = "naïve 日本\n\ttab \x1b[2J \x9b2J \x07 \r \u202e \x7f \ud83d"
    assert escape_controls(text) == "naïve 日本\n\ttab \\x1b[2J \\x9b2J \\x07 \\r \\u202e \\x7f \\ud83d"


def test_a_line_stays_one_line() -> None:
    assert one_line("a\nb\r\nc\td\u2028e") == "a\\nb\\r\\nc\\td\\u2028e"


def test_only_secrets_are_hidden_in_commands() -> None:
    token = "hf_" + "a1B2" * 8
    typed = [
        "--hub-token",
        "abc",
        "--set",
        f"api_key={token}",
        f"--auth-token={token}",
        "https://me:pass@host/a",
        token,
    ]
    shown = ["--hub-token", "***", "--set", "api_key=***", "--auth-token=***", "https://***@host/a", "***"]
    assert without_secrets(typed) == shown
    harmless = ["finetune", "--set", "generation.max_new_tokens=4", "--set", "micro_batch_tokens=99", "hub:a/b", "keys"]
    assert without_secrets(harmless) == harmless
    assert without_secrets(["M\udcfcller"]) == ["M\\xfcller"], "run folders hold commands as JSON"


@pytest.mark.parametrize("name", ["a b", "$(touch pwned)", "-dash", "it's", "b\\s", "a\nb\x1b[2J'\\", "M\udcfcller"])
def test_printed_command_quotes_its_paths(name: str, tmp_path: Path) -> None:
    command = command_line("finetune", "--resume", Path(name))
    assert one_line(command) == command
    script = f'gptj-ft() {{ printf "%s\\0" "$@"; }}\n{command}'
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, errors="surrogateescape", check=True, cwd=tmp_path
    )
    assert done.stdout.split("\0")[:-1] == ["finetune", "--resume", f"./{name}" if name[0] == "-" else name]
    assert not list(tmp_path.iterdir())
