"""Parse and render templates of prompts and completions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jinja2 import nodes

from gptj_ft.config.options import Recipe
from gptj_ft.data.sandbox import Compiled, bounded_environment, compile_template, shown
from gptj_ft.errors import UsageError

JINJA = bounded_environment(keep_trailing_newline=True)


@dataclass(frozen=True)
class Template:
    """A parsed template."""

    fields: tuple[str, ...]  # each once, in order of first use
    uses: Mapping[str, int]  # field -> number of uses
    literals: tuple[str, ...]  # the texts between fields
    pieces: tuple[tuple[str, bool], ...] | None
    """texts and fields, (text, is a field), if the template has nothing else"""
    compiled: Compiled


@lru_cache
def parse_template(source: str) -> Template:
    """Parse a template: ``{{ field }}`` stands for a value."""
    template = compile_template(JINJA, source)
    tree, names = template.tree, template.fields
    if not names and (lone := re.search(r"\{(\w+)\}", source)):
        raise UsageError(f"template {shown(source)}: write {{{{ {lone[1]} }}}} for a field, not {lone[0]}")
    return Template(
        fields=tuple(dict.fromkeys(names)),
        uses={name: names.count(name) for name in names},
        literals=tuple(node.data for node in tree.find_all(nodes.TemplateData)),
        pieces=_pieces_of(tree, names),
        compiled=template,
    )


def _pieces_of(tree: nodes.Template, fields: Sequence[str]) -> tuple[tuple[str, bool], ...] | None:
    """Return texts and fields of a template without other syntax: joining them is faster than Jinja."""
    pieces = []
    for statement in tree.body:
        if not isinstance(statement, nodes.Output):
            return None
        for node in statement.nodes:
            if isinstance(node, nodes.TemplateData):
                pieces.append((node.data, False))
            elif isinstance(node, nodes.Name) and node.name in fields:
                pieces.append((node.name, True))
            else:
                return None
    return tuple(pieces)


def fields_of(source: str) -> tuple[str, ...]:
    """Return the fields of a template, each once, in order."""
    return parse_template(source).fields


def render(source: str, values: Mapping[str, Any]) -> str:
    """Render a template; values are inserted verbatim, braces included."""
    template = parse_template(source)
    if template.pieces is not None and all(map(values.__contains__, template.fields)):
        return "".join([str(values[text]) if is_field else text for text, is_field in template.pieces])
    return template.compiled.render(values)


@lru_cache
def stripped_fields(prompt: str, completion: str) -> frozenset[str]:
    """Return the fields whose texts are stripped, because the templates put white space around them.

    A template that is a single field keeps its text as it is: plain text, and rows whose prompts and answers include
    the blanks between them.
    """
    templates = [parse_template(source) for source in (prompt, completion)]
    whole = {name for each in templates for name in each.fields if each.pieces == ((name, True),)}
    return frozenset(name for each in templates for name in each.fields) - whole


def stripped(recipe: Recipe, values: Mapping[str, str]) -> dict[str, str]:
    """Strip the texts of fields as a recipe's templates need it."""
    fields = stripped_fields(recipe.prompt, recipe.completion)
    return {name: text.strip() if name in fields else text for name, text in values.items()}
