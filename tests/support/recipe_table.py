"""Store golden recipes as one recipe with every option, and the differences of all others."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DEFAULTS = "custom"
ABSENT = "absent"


class RecipeTable:
    """Golden recipes by name: every option of ``custom``, and for all others the options with another value.

    An option of a group has a dotted name, as for ``--set``. ``absent`` lists the options that a recipe lacks.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._changes: dict[str, dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))

    def __iter__(self) -> Iterator[str]:
        return iter(self._changes)

    def __getitem__(self, name: str) -> dict[str, Any]:
        """Return every option of a recipe."""
        recipe = copy.deepcopy(self._changes[DEFAULTS])
        for option, value in self._changes[name].items():
            group, _, member = option.rpartition(".")
            (recipe[group] if group else recipe)[member] = value
        for option in recipe.pop(ABSENT, ()):
            del recipe[option]
        return recipe

    def __setitem__(self, name: str, recipe: dict[str, Any]) -> None:
        """Write the table with this recipe; ``custom`` comes first."""
        if name == DEFAULTS:
            self._changes[name] = recipe
        else:
            defaults = self._changes[DEFAULTS]
            absent = [option for option in defaults if option not in recipe]
            self._changes[name] = dict(changed_options(recipe, defaults)) | ({ABSENT: absent} if absent else {})
        self._file.write_text(_one_line_an_option(self._changes), encoding="utf-8")


def changed_options(recipe: dict[str, Any], defaults: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the options that differ from the defaults, in type or value."""
    for option, value in recipe.items():
        default = defaults.get(option)
        if isinstance(value, dict) and isinstance(default, dict) and list(value) == list(default):
            yield from ((f"{option}.{member}", each) for member, each in changed_options(value, default))
        elif json.dumps(value) != json.dumps(default):
            yield option, value


def _one_line_an_option(table: dict[str, dict[str, Any]]) -> str:
    """Format the table so that a diff shows each changed option alone."""
    recipes = []
    for name, options in table.items():
        lines = [f"  {json.dumps(each)}: {json.dumps(value, ensure_ascii=False)}" for each, value in options.items()]
        recipes.append(f" {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(recipes) + "\n}\n"
