"""Write reports: HTML pages without scripts or network access, Markdown, and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptj_ft import __version__
from gptj_ft.errors import UsageError
from gptj_ft.system.atomic import atomic_files, require_new

if TYPE_CHECKING:
    from jinja2 import Environment


def fill_template(name: str, facts: Mapping[str, Any]) -> str:
    """Render a template of this folder, such as ``run.html``; HTML templates escape every text."""
    return writable(_templates().get_template(f"{name}.jinja").render(facts=facts, version=__version__))


@cache
def _templates() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        # Markdown would show escaped characters as entities.
        autoescape=lambda template: template is not None and not template.endswith(".md.jinja"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def to_json(facts: Mapping[str, Any]) -> str:
    """Return facts as JSON."""
    return writable(json.dumps(facts, indent=2, ensure_ascii=False, default=str) + "\n")


def writable(text: str) -> str:
    """Escape undecodable bytes, which file names may contain."""
    return text.encode(errors="backslashreplace").decode()


def check_report_path(path: Path, suffixes: Sequence[str]) -> None:
    """Check the name of a new report."""
    if path.suffix.lower() not in suffixes:
        raise UsageError(f"--report {path}: the name must end with {' or '.join(suffixes)}")
    require_new(path)


def write_new(path: Path, text: str) -> None:
    """Write a new file atomically.

    Raises:
        UsageError: the file exists or cannot be written.
    """
    with atomic_files(path) as (file,):
        file.write(text)
