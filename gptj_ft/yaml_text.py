"""YAML as people write options in it."""

from __future__ import annotations

import re
from typing import Any

import yaml

from gptj_ft.errors import UsageError


def parse(text: str, where: str) -> Any:
    """Read YAML.

    Raises:
        UsageError: it is none; names ``where`` and the line.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise UsageError(f"{where}{line}: not YAML: {getattr(error, 'problem', error)}") from error


def dump(values: dict[str, Any], width: int = 1000, compact: bool = False) -> str:
    """Write a mapping, without a line break at the end.

    Args:
        values: the mapping.
        width: characters of a line, as far as words can be parted.
        compact: write lists and mappings that hold nothing but single values on one line, if it is long enough.
    """
    style = None if compact else False
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=width, default_flow_style=style)
    return str(text).rstrip("\n")


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads ``1e-5`` as a string; people who write learning rates do not."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][-+]?\d+)$|^[-+]?(?:\d+\.\d*|\.\d+)$"),
    list("-+.0123456789"),
)
