"""`recipes`: the presets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gptj_ft.commands.help import Commands
from gptj_ft.commands.terminal import as_tuple, print_json
from gptj_ft.durable import new_files
from gptj_ft.options import Assignments, Json, complete_recipe
from gptj_ft.plain_text import command_line
from gptj_ft.recipe import resolve

recipes_app = typer.Typer(cls=Commands, no_args_is_help=True, help="Presets for tasks: list them, show or copy one.")


@recipes_app.command("list")
def list_recipes(as_json: Json = False) -> None:
    """List the presets and what each is for."""
    from gptj_ft.recipe import load_preset, preset_names
    from gptj_ft.screen import console_for, panel

    abouts = {name: load_preset(name).get("about", "") for name in preset_names()}
    if as_json:
        print_json(abouts)
    else:
        panel(console_for(stderr=False), "", abouts.items())


@recipes_app.command("show")
def show_recipe(
    name: Annotated[str, typer.Argument(help="a preset", autocompletion=complete_recipe)],
    assignments: Assignments = None,
    as_json: Json = False,
) -> None:
    """Show every option of a preset, and what it means.

    A value that is not a default has its origin beside it.
    """
    from gptj_ft.recipe import dump

    resolved = resolve({"recipe": name}, None, as_tuple(assignments))
    if as_json:
        print_json(resolved.recipe.to_dict())
    else:
        print(dump(resolved.recipe, resolved.origins), end="")


@recipes_app.command("copy")
def copy_recipe(
    name: Annotated[str, typer.Argument(help="a preset", autocompletion=complete_recipe)],
    target: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="new file; default NAME.yaml")] = None,
) -> None:
    """Copy a preset to a file of yours, for --config."""
    from gptj_ft.recipe import preset_file

    target = target or Path(f"{name}.yaml")
    text = preset_file(name).read_text(encoding="utf-8")
    with new_files(target) as (file,):
        file.write(text)
    print(f"{target}: yours to change\nnext: {command_line('finetune', '--config', target, '--data')} FILE")
