"""Templates: text with ``{fields}`` in it. Strict about the template, indifferent to what the values hold."""

from __future__ import annotations

import string
from collections.abc import Mapping
from functools import lru_cache

from gptj_ft.errors import UsageError


@lru_cache
def parse_template(template: str) -> tuple[tuple[str, str], ...]:
    """Return (text, field after it or ``""``) pairs; ``{{`` and ``}}`` are braces.

    Raises:
        UsageError: unbalanced braces, or more than a name between them.
    """
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise UsageError(f"template {template!r}: {error}; write {{{{ and }}}} for braces") from error
    for _, name, spec, conversion in parts:
        if name is not None and (not name.isidentifier() or spec or conversion):
            raise UsageError(f"template {template!r}: '{{{name}}}' is no field; write {{name}}, and {{{{ for a brace")
    return tuple((text, name or "") for text, name, _, _ in parts)


def fields_of(template: str) -> tuple[str, ...]:
    """Return the fields of a template, each once, in order."""
    return tuple(dict.fromkeys(name for _, name in parse_template(template) if name))


def render(template: str, values: Mapping[str, str]) -> str:
    """Put values in the place of fields; what a value holds, braces too, stays as it is."""
    return "".join(text + (values[name] if name else "") for text, name in parse_template(template))
