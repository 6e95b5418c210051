"""Hooks of `mkdocs build`: add README.md and other files of the repository to the site, and rewrite links to them."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
# Files outside docs/ and their names on the site.
ADDED = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/RESULTS.md": "results.md",
    "examples/README.md": "examples.md",
}
SOURCES = {page: source for source, page in ADDED.items()}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#:\s]+)(#[^)]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not in docs/."""
    for source, page in ADDED.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links at pages of the site; a link to any other file of the repository becomes its text."""
    here = SOURCES.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def point(match: re.Match[str]) -> str:
        image, text, target, anchor = match[1], match[2], match[3], match[4] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(here), target))
        if path in ADDED or path.startswith("docs/"):
            return f"{image}[{text}]({ADDED.get(path, path.removeprefix('docs/'))}{anchor})"
        return text

    return LINK.sub(point, markdown)
