"""Reports in files: pages without scripts that need no network, and the same for programs as JSON."""

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
    """Return a template of this folder, filled in: ``run.html``, ``evaluation.md``. In HTML every text is escaped."""
    return writable(_templates().get_template(f"{name}.jinja").render(facts=facts, version=__version__))


@cache
def _templates() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=lambda template: template is not None and not template.endswith(".md.jinja"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def to_json(facts: Mapping[str, Any]) -> str:
    """Return facts as JSON for programs."""
    return writable(json.dumps(facts, indent=2, ensure_ascii=False, default=str) + "\n")


def writable(text: str) -> str:
    """Return a text with bytes that are no characters, as names of files may hold them, written out."""
    return text.encode(errors="backslashreplace").decode()


def check_report_path(path: Path, suffixes: Sequence[str]) -> None:
    """Check that a report can be written there.

    Raises:
        UsageError: its name ends with none of the suffixes, or it exists.
    """
    if path.suffix.lower() not in suffixes:
        raise UsageError(f"--report {path}: the name must end with {' or '.join(suffixes)}")
    require_new(path)


def write_new(path: Path, text: str) -> None:
    """Write a new file, whole or not at all.

    Raises:
        UsageError: it exists, or cannot be written.
        ResourceError: the disk is full.
    """
    with atomic_files(path) as (file,):
        file.write(text)
