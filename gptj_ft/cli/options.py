"""The flags that several commands share, made from the recipe's options, and what completes their values."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from gptj_ft.config.options import GROUPS, Recipe
from gptj_ft.config.presets import preset_names
from gptj_ft.models.supported import TINY_MODELS
from gptj_ft.system.paths import RUNS, models

# The heading of flags that a newcomer can do without; `--help` leaves them to `--help-all`.
MORE = "More options"
SHOWS_ALL = "gptj_ft.help_all"  # in the `meta` of a command's context
# Options that presets set: what stands in `Recipe` is then seldom the default that a user gets.
SET_BY_PRESETS = {"lr", "epochs", "batch_size", "max_length", "on_long", "max_steps", "holdout"}

METAVARS = {
    "recipe": "NAME", "model": "MODEL", "data": "FILE", "val_data": "FILE", "output": "FOLDER", "max_time": "TIME",
    "map": "FIELD=COLUMN", "device_memory": "SIZE", "host_memory": "SIZE", "disk_space": "SIZE", "train": "PATTERN",
}  # fmt: skip


def option_of(field: str, meaning: str | None = None, more: bool = False) -> Any:
    """Make a flag of a recipe's option; its meaning, choices and default are written there and nowhere else.

    Args:
        field: name of the option, with its group if it is of one; the flag is called without.
        meaning: in a command that uses the option for something else than training; no default is then shown.
        more: whether only `--help-all` shows it.
    """
    group, _, name = field.rpartition(".")
    info = (GROUPS[group] if group else Recipe).model_fields[name]
    choices = get_args(info.annotation) if get_origin(info.annotation) is Literal else ()
    default = ",".join(info.default) if isinstance(info.default, tuple) else info.default
    facts = [" | ".join(choices)] if choices else []
    if meaning is None and (group or field in SET_BY_PRESETS):
        facts.append("default: the recipe's")
    elif meaning is None and default:
        facts.append(f"default {default}")
    text = (meaning or info.description or "") + (f" [{'; '.join(facts)}]" if facts else "")
    return typer.Option(
        "--" + name.replace("_", "-"),
        help=text,
        metavar=METAVARS.get(field),
        rich_help_panel=MORE if more else None,
        autocompletion=COMPLETED.get(field),
    )


def complete_recipe(incomplete: str) -> list[str]:
    """Return the presets that begin so."""
    return [name for name in preset_names() if name.startswith(incomplete)]


def complete_run(incomplete: str) -> list[str]:
    """Return the run folders in ``runs`` that begin so."""
    found = sorted(str(path.parent) for path in RUNS.glob("*/recipe.yaml"))
    return [name for name in found if name.startswith(incomplete)]


def complete_model(incomplete: str) -> list[str]:
    """Return the names of models, and the runs, that begin so."""
    there = sorted(path.parent.name for path in models().glob("*/config.json"))
    return [name for name in (*there, *TINY_MODELS) if name.startswith(incomplete)] + complete_run(incomplete)


COMPLETED = {"recipe": complete_recipe, "model": complete_model}


def _show_all_help(context: typer.Context, wanted: bool) -> None:
    if wanted:
        context.meta[SHOWS_ALL] = True
        print(context.get_help())
        raise typer.Exit


RecipeName = Annotated[str | None, option_of("recipe")]
TunedRecipeName = Annotated[str | None, option_of("recipe", "task; default: the one that the model was tuned for")]
Data = Annotated[str | None, option_of("data")]
Model = Annotated[str | None, option_of("model")]
Cache = Annotated[
    bool | None,
    typer.Option(
        "--cache/--no-cache",
        help=Recipe.model_fields["cache"].description,
        show_default=False,
        rich_help_panel=MORE,
    ),
]
Map = Annotated[str | None, option_of("map")]
MaxBadRows = Annotated[int | None, option_of("max_bad_rows", more=True)]
BatchSize = Annotated[int | None, option_of("batch_size")]
OnLong = Annotated[str | None, option_of("on_long", more=True)]
MaxLength = Annotated[int | None, option_of("max_length")]
MaxSteps = Annotated[int | None, option_of("max_steps")]
Epochs = Annotated[float | None, option_of("epochs")]
MaxTime = Annotated[str | None, option_of("max_time")]
Seed = Annotated[int | None, option_of("seed", more=True)]
Device = Annotated[str | None, option_of("device", more=True)]
Precision = Annotated[str | None, option_of("precision", more=True)]
Weights = Annotated[str | None, option_of("weights", more=True)]
OptimizerState = Annotated[str | None, option_of("optimizer_state", more=True)]
Activations = Annotated[str | None, option_of("activations", more=True)]
Boundaries = Annotated[str | None, option_of("boundaries", more=True)]
DeviceMemory = Annotated[str | None, option_of("device_memory")]
HostMemory = Annotated[str | None, option_of("host_memory")]
DiskSpace = Annotated[str | None, option_of("disk_space", more=True)]
Config = Annotated[Path | None, typer.Option("--config", help="YAML file of options")]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="any option of a recipe; `gptj-ft recipes show` lists them"),
]
Offline = Annotated[
    bool,
    typer.Option(
        "--offline",
        help="take a hub: data set as it was fetched before; nothing else uses the network",
        rich_help_panel=MORE,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="print the result alone (a path, an answer), and errors")]
HelpAll = Annotated[
    bool,
    typer.Option(
        "--help-all", help="show every option and exit", is_eager=True, expose_value=False, callback=_show_all_help
    ),
]
