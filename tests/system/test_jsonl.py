"""Test that JSON-lines files survive a crash at any byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from gptj_ft.system.jsonl import JsonLines

LINES = [{"row": 0, "text": "a\ud800\n"}, {"row": 1, "text": "é"}, {"row": 2}]


@pytest.mark.parametrize("is_sealed", [False, True])
def test_truncated_file_keeps_complete_lines(tmp_path: Path, is_sealed: bool) -> None:
    file = JsonLines(tmp_path / "a.jsonl", is_sealed)
    assert list(file.read()) == []
    file.append(*LINES[:2])
    file.append(LINES[2])
    content = file.path.read_bytes()
    assert content.decode().count("é") == 1
    assert [line for _, line in file.read()] == LINES
    for size in range(len(content) + 1):
        file.path.write_bytes(content[:size])
        whole = content[:size].count(b"\n")
        assert [line for _, line in file.read()] == LINES[:whole]
        file.append(*LINES[whole:])
        assert file.path.read_bytes() == content


def test_checksum_detects_a_changed_line(tmp_path: Path) -> None:
    file = JsonLines(tmp_path / "a.jsonl", is_sealed=True)
    file.append(*LINES)
    file.path.write_bytes(file.path.read_bytes().replace(b'"row": 1', b'"row": 7'))
    texts, lines = zip(*file.read(), strict=True)
    assert lines == (LINES[0], None, LINES[2])
    file.replace(texts[1:])
    assert [text for text, _ in file.read()] == list(texts[1:])
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
