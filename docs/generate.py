"""Generate parts of the documentation from the code: help texts, options, recipes, packages, forecasts.

    python docs/generate.py            # write all parts
    python docs/generate.py --check    # exit with 1 and name the files that are out of date
    python docs/generate.py --check --quick    # skip the forecasts, which take half a minute

Replaces the text between `<!-- generated: NAME -->` and `<!-- end -->` in each page, and docs/layers.svg.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import sys
import textwrap
import tokenize
from collections.abc import Collection, Iterator
from dataclasses import is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import typer
from hours import details, table
from layers_figure import draw
from typer.core import TyperGroup

import gptj_ft.api
from gptj_ft.cli.app import app
from gptj_ft.cli.options import SHOWS_ALL
from gptj_ft.config.options import FREE_ON_RESUME, GROUPS, ByteSize, Duration, Options, Recipe, meaning_of
from gptj_ft.config.presets import load_preset, preset_names
from gptj_ft.planning.devices import DEVICES, LINKS

UNITS = {
    "max_length": "tokens", "micro_batch_tokens": "tokens", "generation.max_new_tokens": "tokens",
    "generation.min_new_tokens": "tokens", "generation.max_prompt_tokens": "tokens",
    "generation.prompt_lookup_num_tokens": "tokens", "generation.no_repeat_ngram_size": "tokens", "batch_size": "rows",
    "sample_rows": "rows", "max_bad_rows": "rows", "holdout": "share of documents", "epochs": "passes",
    "max_steps": "steps",
    "validate_every": "steps", "save_every": "steps", "save_minutes": "minutes", "patience": "validations",
    "warmup": "share of steps, or steps", "final_lr": "share of lr", "schedule.start": "share of lr",
    "schedule.end": "share of lr", "schedule.steps": "steps", "read_ahead": "layers", "canaries": "secrets",
    "canary_repeats": "rows", "sampled.layers": "blocks", "sampled.period": "steps",
    "sampled.vocabulary_every": "periods",
}  # fmt: skip
SLOW_PARTS = ("hours", "hours-details")
TYPES = {bool: "true, false", int: "integer", float: "number", str: "text"}


def main() -> None:
    """Write all generated files, or check them."""
    found = files(SLOW_PARTS if "--quick" in sys.argv else ())
    stale = [path for path, text in found.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if "--check" in sys.argv:
        names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
        sys.exit(f"out of date: {names}; run python docs/generate.py" if stale else 0)
    for path in stale:
        path.write_text(found[path], encoding="utf-8")
        print(path.relative_to(ROOT))


def files(left_out: Collection[str] = ()) -> dict[Path, str]:
    """Return the current text of every file that is generated in whole or in part.

    Args:
        left_out: parts that keep their text.
    """
    parts = {"hours": table, "hours-details": details, "recipes": recipes, "packages": packages, "commands": commands}
    parts |= {"options": options, "api": api, "devices": devices}
    figure = draw([name for name in layers() if (ROOT / "gptj_ft" / name).is_dir()])
    found = {ROOT / "docs/layers.svg": figure}
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        new = re.sub(
            r"(<!-- generated: (\S+) -->\n).*?(<!-- end -->)",
            lambda match: match[0] if match[2] in left_out else f"{match[1]}\n{parts[match[2]]()}\n\n{match[3]}",
            text,
            flags=re.S,
        )
        if new != text or "<!-- generated:" in text:
            found[path] = new
    return found


def commands() -> str:
    """Return the complete help of every command."""
    return "\n\n".join(
        f"## {name}\n\n```text\n{text}\n```" for name, text in helps(typer.main.get_command(app), "gptj-ft")
    )


def helps(command: Any, name: str, parent: Any = None) -> Iterator[tuple[str, str]]:
    """Yield names and help texts of a command and its subcommands."""
    context = type(command).context_class(command, info_name=name.split()[-1], parent=parent, terminal_width=88)
    context.meta[SHOWS_ALL] = True
    yield name, command.get_help(context).rstrip()
    if isinstance(command, TyperGroup):
        for child in command.list_commands(context):
            yield from helps(command.get_command(context, child), f"{name} {child}", context)


def devices() -> str:
    """Return the table of known devices."""
    lines = ["| device | products | memory | link, each way | bf16 | source |", "|---|---|---|---|---|---|"]
    for device in DEVICES.values():
        star = "*" if device.is_derived else ""
        cells = [
            device.name,
            f"{device.half_tflops:g} TFLOP/s{star}",
            f"{device.memory_rate:,g} GB/s",
            f"{LINKS[device.link]:g} GB/s ({device.link})",
            "yes" if device.has_bf16 else "no",
            f"[{device.source.split('/')[2]}]({device.source})",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def options() -> str:
    """Return the tables of all options: those of a run, then the groups."""
    tables = [option_table(Recipe, "", GROUPS)]
    for group, model in GROUPS.items():
        tables.append(f"## `{group}`\n\n" + option_table(model, f"{group}.", {}))
    return "\n\n".join(tables)


def option_table(model: type[Options], prefix: str, left_out: Any) -> str:
    """Return the fields of an options model as a table."""
    lines = ["| option | type | default | unit | meaning |", "|---|---|---|---|---|"]
    hints = get_type_hints(model, include_extras=True)
    for name, field in model.model_fields.items():
        if name in left_out and name != "schedule":
            continue
        mark = " ↻" if prefix + name in FREE_ON_RESUME else ""
        default = "" if field.is_required() or field.default_factory else shown(field.default)
        cells = [f"`{prefix}{name}`{mark}", kind(hints[name]), default]
        cells += [unit(prefix + name, hints[name]), meaning_of(prefix + name)]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def shown(value: Any) -> str:
    """Format a default as YAML."""
    words = {None: "null", True: "true", False: "false", "": "empty", (): "empty"}
    if isinstance(value, dict):
        return "see `recipes show`" if value else "empty"
    if isinstance(value, tuple) and value:
        return f"`{', '.join(map(str, value))}`"
    return words[value] if not isinstance(value, int | float) and value in words else f"`{value}`".replace(
        "True", "true"
    ).replace("False", "false")  # fmt: skip


def kind(annotation: Any) -> str:
    """Name a type in words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in (ByteSize, Duration):
        return "text or number"
    if origin is Annotated:
        return kind(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{each}`" for each in arguments)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(kind(each) for each in arguments if each is not NoneType))
    if origin is tuple:
        return "list" if arguments[-1] is Ellipsis else "pair"
    if origin is dict:
        return "map"
    return TYPES.get(annotation, "list of pieces")


def unit(name: str, annotation: Any) -> str:
    """Return the unit of an option."""
    parts = {annotation, *(part for each in get_args(annotation) for part in (each, *get_args(each)))}
    if ByteSize in parts:
        return "bytes, or `8GiB`"
    if Duration in parts:
        return "seconds, or `1h30m`"
    return UNITS.get(name, "")


def recipes() -> str:
    """Return the presets with their main hyper-parameters."""
    lines = ["| recipe | for | lr | epochs or steps | rows a step | tokens a row | metrics |", "|" + "---|" * 7]
    for name in preset_names():
        recipe = Recipe.model_validate({"recipe": name, **load_preset(name)})
        length = f"{recipe.max_steps} steps" if recipe.max_steps else f"{recipe.epochs:g}"
        cells = [f"`{name}`", recipe.about, f"{recipe.lr:g}", length, str(recipe.batch_size), str(recipe.max_length)]
        lines.append("| " + " | ".join([*cells, ", ".join(recipe.metrics)]) + " |")
    return "\n".join(lines)


def layers() -> list[str]:
    """Return the packages, highest layer first, as import-linter checks them."""
    contract = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("layers = [")[2].partition("]")[0]
    return re.findall(r'"(\w+)"', contract)


def packages() -> str:
    """Return a table row per package, highest layer first, with the first line of its docstring."""
    lines = ["| package | purpose |", "|---|---|"]
    for name in layers():
        folder = ROOT / "gptj_ft" / name
        file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
        purpose = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").splitlines()[0]
        lines.append(f"| `{name}` | {purpose} |")
    return "\n".join(lines)


def api() -> str:
    """Return the functions and classes of the Python API with their docstrings."""
    functions = [name for name in vars(gptj_ft.api) if name in gptj_ft.__all__ and name[0].islower()]  # as in the file
    classes = [name for name in gptj_ft.__all__ if name not in functions]
    entries = (entry(f"gptj_ft.{name}", getattr(gptj_ft, name), "##") for name in functions + classes)
    return "\n\n".join([markdown(inspect.getdoc(gptj_ft.api) or ""), *entries])


def entry(name: str, thing: Any, heading: str) -> str:
    """Return the entry of a function, or of a class with its documented methods."""
    text = [f"{heading} `{name}`"]
    if inspect.isfunction(thing):
        text.append(f"```python\n{short_signature(name, thing)}\n```")
    text.append(markdown(inspect.getdoc(thing) or ""))
    if is_dataclass(thing) and (fields := documented_fields(thing)):
        text += ["**Attributes**", "\n".join(f"* `{field}`: {meaning}" for field, meaning in fields.items())]
    if (
        isinstance(thing, type)
        and thing.__module__.startswith("gptj_ft")
        and not issubclass(thing, Exception | Options)
    ):
        for method, value in vars(thing).items():
            value = value.__func__ if isinstance(value, classmethod) else value
            if inspect.isfunction(value) and value.__doc__ and not method.startswith("_"):
                text.append(entry(f"{name.rpartition('.')[2]}.{method}", value, "###"))
    return "\n\n".join(text)


def documented_fields(kind: Any) -> dict[str, str]:
    """Return the fields of a dataclass that a trailing comment or a string literal under them documents."""
    source = textwrap.dedent(inspect.getsource(kind))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    body = next(node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)).body
    found = {}
    for node, after in zip(body, [*body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        literal = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else None
        text = str(literal) if literal else comments.get(node.end_lineno or 0, "")
        if text:
            found[node.target.id] = " ".join(text.replace("``", "`").split())
    return found


def short_signature(name: str, function: Any) -> str:
    """Return a signature with defaults and without types."""
    parameters = [each for each in inspect.signature(function).parameters.values() if each.name not in ("self", "cls")]
    shown = [str(each.replace(annotation=inspect.Parameter.empty)) for each in parameters]
    first = next((n for n, each in enumerate(parameters) if each.kind is each.KEYWORD_ONLY), None)
    if first is not None:
        shown.insert(first, "*")
    call = f"{name}({', '.join(shown)})"
    return call if len(call) <= 100 else f"{name}(\n    " + ",\n    ".join(shown) + ",\n)"


def markdown(docstring: str) -> str:
    """Convert a docstring to Markdown: examples to code, sections such as `Args` to lists."""
    lines: list[str] = []
    for line in docstring.replace("``", "`").splitlines():
        section = re.fullmatch(r"(Args|Attributes|Raises|Returns|Yields):", line)
        named = re.fullmatch(r"    (\S[^:]*): (.*)", line)
        if section:
            lines += [f"**{section[1]}**", ""]
        elif line.lstrip().startswith((">>>", "... ")):
            lines += [f"\0{line.lstrip()}"]
        elif named and "**" in "".join(lines):
            lines.append(f"* `{named[1]}`: {named[2]}")
        else:
            lines.append(("  " if line.startswith("        ") else "") + line.strip())
    text = "\n".join(lines)
    return re.sub(r"(\0.*\n?)+", lambda match: "```python\n" + match[0].replace("\0", "").rstrip() + "\n```\n", text)


if __name__ == "__main__":
    main()
