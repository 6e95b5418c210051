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
    """A parsed template.

    Attributes:
        fields: each once, in order of their first use.
        uses: number of times that each is named.
        literals: the texts between them.
        pieces: texts and fields in turn, (text, is a field), if there is nothing else in it.
        compiled: compiled template, which renders it.
    """

    fields: tuple[str, ...]
    uses: Mapping[str, int]
    literals: tuple[str, ...]
    pieces: tuple[tuple[str, bool], ...] | None
    compiled: Compiled


@lru_cache
def parse_template(source: str) -> Template:
    """Parse a template: ``{{ field }}`` stands for a value.

    Raises:
        UsageError: it is no Jinja, or has single braces where fields are meant.
    """
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
    """Return the texts and fields of a template that has nothing else: joining them is faster than Jinja."""
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
    """Render a template; values are inserted as they are, braces included.

    Raises:
        UsageError: the template asks for what a value does not have.
    """
    template = parse_template(source)
    if template.pieces is not None and all(map(values.__contains__, template.fields)):
        return "".join([str(values[text]) if is_field else text for text, is_field in template.pieces])
    return template.compiled.render(values)


@lru_cache
def stripped_fields(prompt: str, completion: str) -> frozenset[str]:
    """Return the fields that are stripped: the templates put their own white space around them.

    A template that is one field and nothing else takes it as it is: plain text, and rows whose prompts and answers are
    written out with the blanks between them.
    """
    templates = [parse_template(source) for source in (prompt, completion)]
    whole = {name for each in templates for name in each.fields if each.pieces == ((name, True),)}
    return frozenset(name for each in templates for name in each.fields) - whole


def stripped(recipe: Recipe, values: Mapping[str, str]) -> dict[str, str]:
    """Strip the texts of fields as a recipe's templates need them."""
    fields = stripped_fields(recipe.prompt, recipe.completion)
    return {name: text.strip() if name in fields else text for name, text in values.items()}
