"""Test that the documentation matches the code and that its links resolve."""

from __future__ import annotations

import ast
import json
import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "examples/README.md", ROOT / "benchmarks/RESULTS.md"]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.S)


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the names of docs/generate.py, run in this process: a new one imports for seconds."""
    monkeypatch.syspath_prepend(ROOT / "docs")  # the end of the test removes what the script adds, too
    return runpy.run_path(str(ROOT / "docs/generate.py"))


@pytest.mark.parametrize("is_whole", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["quick", "whole"])
def test_generated_pages_are_current(is_whole: bool, generator: dict[str, Any]) -> None:
    expected = generator["files"](() if is_whole else generator["SLOW_PARTS"])
    stale = [path for path, text in expected.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    assert expected
    assert not stale, "run docs/generate.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    broken = []
    for target in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert not broken


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as Python-Markdown makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def test_every_page_is_in_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("nav:")[2]
    missing = [page.name for page in ROOT.glob("docs/*.md") if page.name not in navigation]
    assert not missing


def test_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    assert all(len(line) <= 160 for line in lines if not line.startswith("|"))


def test_files_named_in_developing_exist() -> None:
    page = (ROOT / "docs/developing.md").read_text(encoding="utf-8")
    paths = re.findall(r"(?:gptj_ft|tests|recipes|docs|benchmarks)/[\w./]*", page)
    placeholder = re.compile(r"/[A-Z]+\.")  # a file that the reader is to write
    assert len(paths) > 30
    assert not [path for path in paths if not placeholder.search(path) and not (ROOT / path.rstrip(".")).exists()]


def test_recipes_of_developing_stay_short() -> None:
    page = (ROOT / "docs/developing.md").read_text(encoding="utf-8")
    sections = page.split("\n## ")[1:]
    assert len(sections) == 9
    assert not [section.splitlines()[0] for section in sections if len(section.strip().splitlines()) > 14]


def test_troubleshooting_messages_exist() -> None:
    constants = []
    for path in (ROOT / "gptj_ft").rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        constants += [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    rows = re.findall(r"^\| (`.*`) \| ", (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8"), re.M)
    parts = [part.strip("`,; ") for row in rows for part in re.split(r"\.\.\.|`, `", row)]
    unknown = [part for part in parts if part and not any(part in constant for constant in constants)]
    assert len(parts) > 40
    assert not unknown


def test_notebook_commands_exist(shell) -> None:
    notebook = json.loads((ROOT / "examples/prove.ipynb").read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["metadata"]["kernelspec"]["language"]) == (4, "python")
    cells = {cell["id"]: cell for cell in notebook["cells"]}
    assert len(cells) == len(notebook["cells"])
    code = ["".join(cell["source"]) for cell in cells.values() if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] for cell in cells.values() if cell["cell_type"] == "code")
    commands = [line.removeprefix("!gptj-ft ") for text in code for line in text.splitlines() if line[0:1] == "!"]
    assert {line.split()[0] for line in commands} == {"doctor", "prove"}
    for line in commands:
        command, *words = shlex.split(line)
        page = shell(f"{command} --help").out
        assert all(word in page for word in words if word.startswith("-")), line
    for text in code:
        compile(re.sub(r"^[!%].*$", "pass", text, flags=re.M), "cell", "exec")
