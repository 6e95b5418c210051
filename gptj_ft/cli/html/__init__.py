"""Pages: one file each, without scripts, that need no network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gptj_ft import __version__


def to_page(name: str, facts: Mapping[str, Any]) -> str:
    """Return a page of this folder, filled in."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(f"{name}.html.jinja").render(facts=facts, version=__version__)
