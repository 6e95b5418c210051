"""The flags that several commands share, made from the recipe's options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from gptj_ft.recipe import Recipe


def option_of(field: str) -> Any:
    """Make a flag of a recipe's option; its meaning, choices and default are written there and nowhere else."""
    info = Recipe.model_fields[field]
    choices = get_args(info.annotation) if get_origin(info.annotation) is Literal else ()
    default = ",".join(info.default) if isinstance(info.default, tuple) else info.default
    facts = [*([" | ".join(choices)] if choices else []), *([f"default {default}"] if default else [])]
    text = (info.description or "") + (f" [{'; '.join(facts)}]" if facts else "")
    return typer.Option("--" + field.replace("_", "-"), help=text)


RecipeName = Annotated[str | None, option_of("recipe")]
Data = Annotated[str | None, option_of("data")]
Model = Annotated[str | None, option_of("model")]
Cache = Annotated[
    bool | None, typer.Option("--cache/--no-cache", help=Recipe.model_fields["cache"].description, show_default=False)
]
Map = Annotated[str | None, option_of("map")]
MaxBadRows = Annotated[int | None, option_of("max_bad_rows")]
BatchSize = Annotated[int | None, option_of("batch_size")]
OnLong = Annotated[str | None, option_of("on_long")]
MaxLength = Annotated[int | None, option_of("max_length")]
MaxSteps = Annotated[int | None, option_of("max_steps")]
Epochs = Annotated[float | None, option_of("epochs")]
MaxTime = Annotated[str | None, option_of("max_time")]
Seed = Annotated[int | None, option_of("seed")]
Device = Annotated[str | None, option_of("device")]
Precision = Annotated[str | None, option_of("precision")]
Weights = Annotated[str | None, option_of("weights")]
OptimizerState = Annotated[str | None, option_of("optimizer_state")]
Activations = Annotated[str | None, option_of("activations")]
Boundaries = Annotated[str | None, option_of("boundaries")]
DeviceMemory = Annotated[str | None, option_of("device_memory")]
HostMemory = Annotated[str | None, option_of("host_memory")]
DiskSpace = Annotated[str | None, option_of("disk_space")]
Config = Annotated[Path | None, typer.Option("--config", help="YAML file of options")]
Assignments = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="any option of a recipe")]
Offline = Annotated[
    bool, typer.Option("--offline", help="take a hub: data set as it was fetched before; nothing else uses the network")
]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="print the result alone (a path, an answer), and errors")]
