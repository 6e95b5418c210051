"""Flags made from the options of `Recipe`: declared once, for every command; completion of their values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from inspect import Parameter, Signature, signature
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from gptj_ft.config.options import field_of, flag_spec, meaning_of
from gptj_ft.config.presets import preset_names
from gptj_ft.models.supported import TINY_MODELS
from gptj_ft.system.paths import RUNS, models

# The heading of flags that a newcomer can do without; `--help` leaves them to `--help-all`.
MORE = "More options"
SHOWS_ALL = "gptj_ft.help_all"  # in the `meta` of a command's context


def flag(meaning: str, *names: str, more: bool = False, **settings: Any) -> Any:
    """Make a flag of a command.

    Args:
        meaning: help text.
        *names: names with their dashes; default: the parameter's. A switch needs one, or it has a ``--no-``.
        more: whether only `--help-all` shows it.
        **settings: other settings of `typer.Option`.
    """
    return typer.Option(*names, help=meaning, rich_help_panel=MORE if more else None, **settings)


def option_of(field: str, meaning: str | None = None, more: bool = False) -> Any:
    """Make a flag of a recipe's option; its meaning, choices and default are written there and nowhere else.

    Args:
        field: name of the option, with its group if it is of one; the flag is called without.
        meaning: help text without a default, where the option is not for training; default: the option's.
        more: whether only `--help-all` shows it.
    """
    info, spec, (group, _, name) = field_of(field), flag_spec(field), field.rpartition(".")
    choices = get_args(info.annotation) if get_origin(info.annotation) is Literal else ()
    default = ",".join(info.default) if isinstance(info.default, tuple) else info.default
    facts = [" | ".join(choices)] if choices else []
    if meaning is None and (group or spec.set_by_presets):
        facts.append("default: the recipe's")
    elif meaning is None and default:
        facts.append(f"default {default}")
    text = (meaning or meaning_of(field)) + (f" [{'; '.join(facts)}]" if facts else "")
    complete = {"RECIPE": complete_recipe, "MODEL": complete_model}.get(spec.metavar or "")
    return flag(text, "--" + name.replace("_", "-"), more=more, metavar=spec.metavar, autocompletion=complete)


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


def _show_all_help(context: typer.Context, wanted: bool) -> None:
    if wanted:
        context.meta[SHOWS_ALL] = True
        print(context.get_help())
        raise typer.Exit


TUNED_RECIPE = "task; default: the one that the model was tuned for"
# How a model's forward passes run.
INFERENCE_OPTIONS = ("device", "precision", "weights", "device_memory", "host_memory")
# What a run is planned for: where it runs, and what may be used there.
PLACEMENT_OPTIONS = (
    "device_memory", "host_memory", "device", "precision", "weights", "optimizer_state", "activations", "boundaries",
    "disk_space",
)  # fmt: skip
Given = Mapping[str, Any]  # of a recipe, those that were given as flags


def takes_options(
    *fields: str, meanings: Mapping[str, str] | None = None, shown: Collection[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command a flag for each of some options, and ``--help-all``; its parameter ``options`` gets those given.

    Their flags stand where that parameter does.

    Args:
        *fields: names of options, with their group if they are of one.
        meanings: help texts of options that the command uses for something else than training.
        shown: options marked ``in_more`` that this command shows without ``--help-all``.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        names = {field.rpartition(".")[2]: field for field in fields}
        flags = [
            Parameter(
                name,
                Parameter.KEYWORD_ONLY,
                default=None,
                annotation=_flag_of(
                    field, (meanings or {}).get(field), flag_spec(field).in_more and field not in shown
                ),
            )
            for name, field in names.items()
        ]
        help_all = Parameter("help_all", Parameter.KEYWORD_ONLY, default=False, annotation=HelpAll)
        parameters: list[Parameter] = []
        for own in signature(command, eval_str=True).parameters.values():
            parameters += flags if own.name == "options" else [own.replace(kind=Parameter.KEYWORD_ONLY)]

        def call(help_all: bool = False, **values: Any) -> None:
            given = {field: values.pop(name) for name, field in names.items()}
            if given.get("map") is not None:
                given["map"] = ",".join(given["map"]) or None  # a flag that is given again adds to it
            command(options={field: value for field, value in given.items() if value is not None}, **values)

        call.__name__, call.__doc__ = command.__name__, command.__doc__
        call.__signature__ = Signature([*parameters, help_all])  # type: ignore[attr-defined]
        call.__annotations__ = {}
        return call

    return decorate


def _flag_of(field: str, meaning: str | None, more: bool) -> Any:
    """Return the annotation of a flag: the option's type where that is a number, else the text to be validated."""
    if field == "cache":
        switch = flag(meaning_of(field), "--cache/--no-cache", show_default=False, more=True)
        return Annotated[bool | None, switch]
    if field == "map":
        return Annotated[list[str] | None, option_of(field, meaning, more)]
    annotation = field_of(field).annotation
    kinds = [kind for kind in (get_args(annotation) or (annotation,)) if kind is not NoneType]
    kind = kinds[0] if len(kinds) == 1 and kinds[0] in (int, float) else str
    return Annotated[kind | None, option_of(field, meaning, more)]


Config = Annotated[Path | None, flag("YAML file of options", "--config")]
Assignments = Annotated[
    list[str] | None, flag("any option of a recipe; `gptj-ft recipes show` lists them", "--set", metavar="KEY=VALUE")
]
Offline = Annotated[
    bool, flag("take a hub: data set as it was fetched before; nothing else uses the network", "--offline", more=True)
]
Json = Annotated[bool, flag("print one JSON object and nothing else", "--json")]
Quiet = Annotated[bool, flag("print the result alone (a path, an answer), and errors", "--quiet", "-q")]
Nproc = Annotated[
    int | None, flag("deal the rows out to so many processes of this machine", metavar="N", min=1, more=True)
]
HelpAll = Annotated[
    bool, flag("show every option and exit", "--help-all", is_eager=True, expose_value=False, callback=_show_all_help)
]
