"""Make flags from the options of `Recipe`, and complete their values in the shell."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from inspect import Parameter, Signature, signature
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic import TypeAdapter, ValidationError

from gptj_ft.config.options import ByteSize, field_of, flag_spec, meaning_of
from gptj_ft.config.presets import preset_names
from gptj_ft.errors import UsageError
from gptj_ft.models.supported import TINY_MODELS
from gptj_ft.system.paths import RUNS, models

# Heading of advanced flags, which `--help-all` shows.
MORE = "More options"
SHOWS_ALL = "gptj_ft.help_all"  # key in the `meta` of a click context


def flag(meaning: str, *names: str, more: bool = False, **settings: Any) -> Any:
    """Make a flag of a command.

    Args:
        meaning: help text.
        *names: names with dashes; default: the parameter's. A switch without a name also gets ``--no-``.
        more: show the flag in `--help-all` only.
        **settings: other settings of `typer.Option`.
    """
    return typer.Option(*names, help=meaning, rich_help_panel=MORE if more else None, **settings)


def option_of(field: str, meaning: str | None = None, more: bool = False) -> Any:
    """Make a flag of a recipe's option, with its help text, choices and default.

    Args:
        field: name of the option, ``group.name`` in a group; the flag has no group.
        meaning: help text that replaces the option's and its default.
        more: show the flag in `--help-all` only.
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
    """Return the presets with this prefix."""
    return [name for name in preset_names() if name.startswith(incomplete)]


def complete_run(incomplete: str) -> list[str]:
    """Return the run folders in ``runs`` with this prefix."""
    folders = sorted(str(path.parent) for path in RUNS.glob("*/recipe.yaml"))
    return [name for name in folders if name.startswith(incomplete)]


def complete_model(incomplete: str) -> list[str]:
    """Return the names of models and runs with this prefix."""
    local = sorted(path.parent.name for path in models().glob("*/config.json"))
    return [name for name in (*local, *TINY_MODELS) if name.startswith(incomplete)] + complete_run(incomplete)


def parse_size_flag(flag: str, text: str) -> int:
    """Parse the value of a size flag, such as ``5GB``."""
    try:
        return TypeAdapter(ByteSize).validate_python(text)
    except ValidationError as error:
        raise UsageError(f"{flag} {text}: {error.errors()[0]['msg']}") from error


def is_assigned(key: str, assignments: Sequence[str] | None) -> bool:
    """Tell whether ``--set`` names an option."""
    return any(text.partition("=")[0] == key for text in assignments or ())


def _show_all_help(context: typer.Context, wanted: bool) -> None:
    if wanted:
        context.meta[SHOWS_ALL] = True
        print(context.get_help())
        raise typer.Exit


TUNED_RECIPE = "task; default: the task that the model was tuned for"
# Options of forward passes.
INFERENCE_OPTIONS = ("device", "precision", "weights", "device_memory", "host_memory")
# Options that decide the placement of a run.
PLACEMENT_OPTIONS = (
    "device_memory", "host_memory", "device", "precision", "weights", "optimizer_state", "activations", "boundaries",
    "disk_space",
)  # fmt: skip
SetOptions = Mapping[str, Any]  # options set by flags


def takes_options(
    *fields: str, meanings: Mapping[str, str] | None = None, shown: Collection[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add flags for recipe options, and ``--help-all``, to a command.

    The flags replace the command's parameter ``options``, which receives the options that are set.

    Args:
        *fields: names of options, ``group.name`` in a group.
        meanings: help texts that replace the options' own.
        shown: options marked ``in_more`` that this command shows without ``--help-all``.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        """Return the command with flags in place of its parameter ``options``."""
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
            options = {field: values.pop(name) for name, field in names.items()}
            if options.get("map") is not None:
                options["map"] = ",".join(options["map"]) or None  # repeated flags add up
            command(options={field: value for field, value in options.items() if value is not None}, **values)

        call.__name__, call.__doc__ = command.__name__, command.__doc__
        call.__signature__ = Signature([*parameters, help_all])  # type: ignore[attr-defined]
        call.__annotations__ = {}
        return call

    return decorate


def _flag_of(field: str, meaning: str | None, more: bool) -> Any:
    """Return the annotation of a flag: the option's type if it is a number, else text for `Recipe` to validate."""
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
    list[str] | None, flag("set any option; `gptj-ft recipes show NAME` lists them", "--set", metavar="KEY=VALUE")
]
Offline = Annotated[
    bool, flag("use the fetched copy of a hub: dataset; nothing else uses the network", "--offline", more=True)
]
Json = Annotated[bool, flag("print one JSON object and nothing else", "--json")]
Quiet = Annotated[bool, flag("print only the result (a path, an answer) and errors", "--quiet", "-q")]
Nproc = Annotated[int | None, flag("divide the rows among N processes of this machine", metavar="N", min=1, more=True)]
HelpAll = Annotated[
    bool, flag("show every option and exit", "--help-all", is_eager=True, expose_value=False, callback=_show_all_help)
]
