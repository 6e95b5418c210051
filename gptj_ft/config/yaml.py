"""Parse and write option files in YAML."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

import yaml

from gptj_ft.errors import UsageError
from gptj_ft.system.plain_text import one_line

MOST_VALUES = 100_000
MOST_BITS = 1024
MOST_NESTED = 100
REASON_SHOWN = 200  # characters


def parse(text: str, where: str) -> Any:
    """Parse YAML from the file or option named ``where``.

    Raises:
        UsageError: not YAML, or too large.
    """
    # The parser in C is ten times as fast. The one in Python explains what is wrong; they differ about tabs and tags.
    with suppress(Exception):
        if not {"\t", "!"} & {*text} and _is_shallow(text):
            return _document(text, where, _CLoader)
    try:
        return _document(text, where, _Loader)
    except UsageError:
        raise
    except RecursionError as error:
        raise UsageError(f"{where}: not YAML: nested too deeply, or an alias contains itself") from error
    # PyYAML's constructors raise the latter for impossible dates, numbers with too many digits and odd tags.
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise UsageError(f"{where}{line}: not YAML: {one_line(problem)[:REASON_SHOWN]}") from error


def _document(text: str, where: str, loader_class: type[_Loader]) -> Any:
    """Return the values of the only document of a text."""
    loader = loader_class(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _num_values(node) > MOST_VALUES:
            raise UsageError(f"{where}: not options: its aliases expand to more than {MOST_VALUES:,} values")
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _is_shallow(text: str) -> bool:
    """Tell whether a text nests so little that the parser in C, which recurses, cannot exhaust the stack."""
    depth = 0
    for event in yaml.parse(text, Loader=_CLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MOST_NESTED:
            return False
    return True


def _num_values(node: yaml.Node) -> int:
    """Count the values after expanding aliases, without expanding them."""
    counted: dict[int, int] = {}

    def count(node: yaml.Node) -> int:
        if id(node) not in counted:
            parts = node.value if isinstance(node.value, list) else []
            inner = [each for part in parts for each in (part if isinstance(part, tuple) else (part,))]
            # An aliased node is one object: count it once, and add its size at every use.
            counted[id(node)] = 1 + sum(map(count, inner))
        return counted[id(node)]

    return count(node)


def dump(values: dict[str, Any], width: int = 1000, compact: bool = False) -> str:
    """Write a mapping, without a final line break.

    Args:
        width: preferred line width in characters.
        compact: write lists and mappings of scalars on one line if they fit.
    """
    style = None if compact else False
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=width, default_flow_style=style)
    return str(text).rstrip("\n")


class _Loader(yaml.SafeLoader):
    """Loader that parses ``1e-5`` as a number; YAML 1.1 parses it as a string."""


class _CLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """The same in C, where PyYAML was built with libyaml."""


def _whole_number(loader: _Loader, node: yaml.ScalarNode) -> int:
    """Parse an integer; reject one with more digits than Python prints."""
    number = int(loader.construct_yaml_int(node))
    if number.bit_length() > MOST_BITS:
        # An integer above 1,024 bits converts to no float, and one above 4,300 digits to no text.
        raise yaml.constructor.ConstructorError(None, None, "a number with too many digits", node.start_mark)
    return number


for each in (_Loader, _CLoader):
    each.add_constructor("tag:yaml.org,2002:int", _whole_number)
    each.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][-+]?\d+)$|^[-+]?(?:\d+\.\d*|\.\d+)$"),
        list("-+.0123456789"),
    )
