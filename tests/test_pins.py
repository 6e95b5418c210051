"""Test the pinned packages: every file has a hash, and advisories are reported."""

from __future__ import annotations

import json
import re
import tomllib
import urllib.error
from pathlib import Path
from typing import Any

import pytest
from support.audit import ROOT, audit, pins


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.lower())


PINNED = {(plain(name), version) for name, version in pins(ROOT / "constraints.txt")}


def test_every_pin_has_hashes() -> None:
    hashed = {}
    for block in re.split(r"\n(?=[A-Za-z])", (ROOT / "requirements.txt").read_text(encoding="utf-8")):
        if match := re.search(r"^([\w.-]+)==([\w.+-]+)", block, re.M):
            hashed[plain(match[1]), match[2]] = re.findall(r"--hash=sha256:[0-9a-f]{64}\b", block)
    assert hashed.keys() == PINNED, "run `make hashes`"
    assert all(hashed.values())


def test_every_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    needed = [
        *project["dependencies"],
        *(line for name, lines in extras.items() if name != "harness" for line in lines),
    ]
    names = {plain(match[0]) for line in needed if (match := re.match(r"[\w.-]+", line))}
    assert names - {"gptj-ft"} <= {name for name, _ in PINNED}


def answer(*ids: list[str]) -> bytes:
    results = [{"vulns": [{"id": each} for each in group]} if group else {} for group in ids]
    return json.dumps({"results": results}).encode()


@pytest.mark.parametrize(
    ("reply", "code", "said"),
    [
        (answer([], []), 0, "2 packages, 0 with advisories"),
        (answer([], ["GHSA-1", "PYSEC-2"]), 1, "b-c 2.0: https://osv.dev/vulnerability/GHSA-1"),
        (answer([]), 2, "not audited: 2 pins, 1 answers"),
        (b"<html>", 2, "not audited: .* unexpected answer"),
        (b'{"results": [1, 2]}', 2, "not audited: .* unexpected answer"),
        (
            urllib.error.URLError("no route"),
            2,
            "not audited: .* cannot be reached.* where there is a network",
        ),
    ],
)
def test_audit_reports_advisories_or_fails(reply: Any, code: int, said: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "constraints.txt").write_text("# pins\na==1.0\nb-c==2.0 ; python_full_version >= '3.11.5'\n")
    queries = []

    def ask(body: bytes) -> bytes:
        queries.extend(json.loads(body)["queries"])
        if isinstance(reply, Exception):
            raise reply
        return bytes(reply)

    assert audit(tmp_path / "constraints.txt", ask) == code
    out = capsys.readouterr()
    assert re.search(said, out.out + out.err)
    assert [(each["package"]["name"], each["version"]) for each in queries] == [("a", "1.0"), ("b-c", "2.0")]
