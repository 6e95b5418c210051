"""Test that a tokenizer.json of a stranger ends with one line: bombs, bad patterns, panics."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from support.tiny_tokenizer import make_tokenizer

from gptj_ft.checkpoints.tiny import make_tiny
from gptj_ft.data.tokenization import load_tokenizer, tokenize
from gptj_ft.errors import DataError, GptjFtError

DOUBLING = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
GOOD: list[Any] = [
    {"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "\u2581"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]},
    {"type": "Sequence", "normalizers": [
        {"type": "Replace", "pattern": {"String": "``"}, "content": '"'}, {"type": "NFKD"}, {"type": "StripAccents"},
        {"type": "Lowercase"}, {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}]},
    {"type": "Sequence", "normalizers": [
        {"type": "NFC"}, {"type": "Replace", "pattern": {"Regex": "\\s+"}, "content": " "}, {"type": "Lowercase"}]},
]  # fmt: skip
BAD: dict[str, tuple[str, Any, str]] = {
    "doubling": ("normalizer", {"type": "Sequence", "normalizers": [DOUBLING] * 40}, "over 64 times longer"),
    "nested": (
        "normalizer", {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [DOUBLING] * 4}] * 4},
        "over 64 times longer",
    ),
    "one step": (
        "normalizer", {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 99}, "over 64 times longer"
    ),
    "empty match": (
        "normalizer",
        {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"Regex": "x*"}, "content": "b"}] * 9},
        "over 64 times longer",
    ),
    "bytes": (
        "pre_tokenizer",
        {"type": "Sequence", "pretokenizers": [
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}] * 9},
        "over 64 times longer",
    ),
    "steps": ("normalizer", {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 200}, "over 100 steps"),
    "pieces": ("pre_tokenizer", {"type": "FixedLength", "length": 0}, "pieces of length 0"),
    "pattern": ("normalizer", {"type": "Replace", "pattern": {"Regex": "("}, "content": "b"}, "unmatched parenthesis"),
    "map": ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}, "precompiled_charsmap"),
    "retries": (
        "pre_tokenizer",
        {"type": "Split", "pattern": {"Regex": "(x|xx)+[^x]"}, "behavior": "Isolated", "invert": False},
        "retry-limit-in-match",
    ),
}  # fmt: skip


def written(folder: Path, part: str, value: Any, escape: bool = False) -> Path:
    make_tokenizer().save_pretrained(folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8")) | {part: value}
    # The library normalizes this token when it loads the file.
    content["added_tokens"].append({**content["added_tokens"][0], "id": 400, "content": "aa", "normalized": True})
    content["added_tokens"][-1]["special"] = False
    text = json.dumps(content)
    path.write_text(text.replace('"Replace"', '"\\u0052eplace"').replace("Seq", "\\u0053eq") if escape else text)
    return folder


@pytest.mark.parametrize("name", BAD)
def test_hostile_tokenizer_ends_with_one_line(tmp_path: Path, name: str) -> None:
    part, value, message = BAD[name]
    start = time.monotonic()
    with pytest.raises(GptjFtError, match=message) as caught:
        tokenize(load_tokenizer(written(tmp_path, part, value)), ["x" * 60])
    assert (str(tmp_path) in str(caught.value), str(caught.value).count("\n")) == (True, 0)
    assert time.monotonic() - start < 60


def test_escaped_names_hide_no_bomb(tmp_path: Path) -> None:
    part, value, message = BAD["nested"]
    with pytest.raises(DataError, match=message):
        load_tokenizer(written(tmp_path, part, value, escape=True))


@pytest.mark.parametrize("number", range(len(GOOD)))
def test_published_normalizers_load(tmp_path: Path, number: int) -> None:
    assert tokenize(load_tokenizer(written(tmp_path, "normalizer", GOOD[number])), ["a  b"])


def test_hostile_tokenizer_stops_every_command(shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"document": "aaa", "summary": "a"}\n' * 9)
    make_tiny(tmp_path / "model", ["aaa"], seed=0)
    written(tmp_path / "model", *BAD["doubling"][:2])
    for line in (
        "prepare-data --recipe summarization --data rows.jsonl --model model --output ready",
        "finetune --recipe summarization --data rows.jsonl --model model --output run",
        "generate --model model hello",
    ):
        done = shell(line)
        assert (done.code, done.err.count("over 64 times longer"), done.err.count("\n")) == (3, 1, 1), done.said
    assert {path.name for path in tmp_path.iterdir()} <= {"rows.jsonl", "model", "home"}
