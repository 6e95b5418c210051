"""The command `recipes`: list, show or copy the presets."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from gptj_ft.cli.help import Commands
from gptj_ft.cli.options import Assignments, Json, complete_recipe
from gptj_ft.cli.terminal.output import print_json, print_result
from gptj_ft.config import yaml
from gptj_ft.config.options import GROUPS, meaning_of
from gptj_ft.config.resolve import Resolved, resolve
from gptj_ft.system.atomic import atomic_files
from gptj_ft.system.files import SHARED_FILE
from gptj_ft.system.plain_text import command_line

WIDTH, COMMENTS_FROM = 80, 34
LONGEST_WORD = 16  # PyYAML may exceed its width by this much
recipes_app = typer.Typer(cls=Commands, no_args_is_help=True, help="Presets for tasks: list them, show or copy one.")


@recipes_app.command("list")
def list_recipes(as_json: Json = False) -> None:
    """List the presets with their purposes."""
    from gptj_ft.cli.terminal.screen import console_for, panel
    from gptj_ft.config.presets import load_preset, preset_names

    abouts = {name: load_preset(name).get("about", "") for name in preset_names()}
    if as_json:
        print_json(abouts)
    else:
        panel(console_for(stderr=False), "", abouts.items())


@recipes_app.command("show")
def show_recipe(
    name: Annotated[str, typer.Argument(help="name of a preset", autocompletion=complete_recipe)],
    assignments: Assignments = None,
    as_json: Json = False,
) -> None:
    """Show every option of a preset with its meaning.

    The output is YAML for --config. Values other than defaults have their origin in brackets.
    """
    resolved = resolve({"recipe": name}, None, assignments)
    if as_json:
        print_json(resolved.recipe.to_dict())
    else:
        print_result("\n".join(_explained(resolved)))


def _explained(resolved: Resolved) -> Iterator[str]:
    """Yield a recipe as lines of YAML with help texts as comments."""
    for key, value in resolved.recipe.to_dict().items():
        origin = resolved.origins.get(key)
        if key in GROUPS and isinstance(value, dict):
            yield f"{key}:" + (f"  # [{origin}]" if origin else "")
            for name, each in value.items():
                yield from _entry(f"{key}.{name}", each, resolved.origins.get(f"{key}.{name}"))
        else:
            yield from _entry(key, value, origin)


def _entry(option: str, value: Any, origin: str | None) -> Iterator[str]:
    """Yield the lines of an option; the comment is next to a short value, above a long one."""
    group, _, name = option.rpartition(".")
    indent = "  " if group else ""
    is_single = not isinstance(value, list | dict)
    lines = yaml.dump({name: value}, WIDTH - LONGEST_WORD, compact=not is_single).splitlines()
    comment = f"{meaning_of(option)}{f' [{origin}]' if origin else ''}"
    if len(lines) == 1 and len(indent + lines[0]) < COMMENTS_FROM:
        first, *rest = textwrap.wrap(comment, WIDTH - COMMENTS_FROM - 2)
        yield f"{indent + lines[0]:{COMMENTS_FROM}}# {first}"
        yield from (f"{'':{COMMENTS_FROM}}# {line}" for line in rest)
    else:
        yield from (f"{indent}# {line}" for line in textwrap.wrap(comment, WIDTH - len(indent) - 2))
        yield from (indent + line for line in lines)


@recipes_app.command("copy")
def copy_recipe(
    name: Annotated[str, typer.Argument(help="name of a preset", autocompletion=complete_recipe)],
    target: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="new file; default NAME.yaml")] = None,
) -> None:
    """Copy a preset to a file, to edit for --config."""
    from gptj_ft.config.presets import preset_file

    target = target or Path(f"{name}.yaml")
    text = preset_file(name).read_text(encoding="utf-8")
    with atomic_files(target, mode=SHARED_FILE) as (file,):
        file.write(text)
    print_result(f"wrote {target}; edit it, then\nnext: {command_line('finetune', '--config', target, '--data')} FILE")
