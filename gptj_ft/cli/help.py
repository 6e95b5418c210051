"""Lay out help: commands in groups, the options of newcomers first, examples at the end."""

from __future__ import annotations

from typing import Any, NoReturn

from typer.core import TyperCommand, TyperGroup

from gptj_ft.cli.options import MORE, SHOWS_ALL
from gptj_ft.config.resolve import peers_option
from gptj_ft.errors import UsageError

# Commands that other systems have, and what does it here.
ELSEWHERE = {
    "train": "gptj-ft finetune",
    "eval": "gptj-ft evaluate",
    "chat": "gptj-ft generate --chat",
    "classify": "gptj-ft predict",
    "infer": "gptj-ft generate",
    "merge": "gptj-ft convert --merge RUN",
    "push": "gptj-ft convert RUN --push owner/name",
    "export": "gptj-ft convert RUN DEST --to huggingface, or of a checkpoint: gptj-ft runs export RUN DEST",
    "serve": "transformers serve RUN/model (pip install 'transformers[serving]'), or vllm serve RUN/model",
}


class Explained:
    """End help with examples, and name flags of other systems as they are called here: for groups and commands."""

    def format_epilog(self: Any, ctx: Any, formatter: Any) -> None:
        """Write the examples, a line each."""
        lines = (self.epilog or "").splitlines()
        if lines:
            with formatter.section("Example" + "s" * (len(lines) > 1)):
                for line in lines:
                    formatter.write(f"{'':{formatter.current_indent}}{line}\n")

    def parse_args(self: Any, ctx: Any, args: list[str]) -> list[str]:
        """Parse flags; an unknown one that another system has is named as it is called here."""
        try:
            return super().parse_args(ctx, args)  # type: ignore[misc, no-any-return]
        except Exception as error:
            _explain(error, self.get_params(ctx))


class Commands(Explained, TyperGroup):
    """Commands in groups; each is of the group that its ``rich_help_panel`` names."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the names and summaries, in the same two columns in every group."""
        named = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        groups: dict[str, list[tuple[str, Any]]] = {}
        for name, command in named:
            if command is not None and not command.hidden:
                groups.setdefault(getattr(command, "rich_help_panel", None) or "Commands", []).append((name, command))
        width = max(len(name) for name, _ in named)
        for title, commands in groups.items():
            with formatter.section(title):
                formatter.write_dl([(f"{name:{width}}", each.get_short_help_str(200)) for name, each in commands])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find a command.

        Raises:
            UsageError: it is one that other systems have; names what does it here.
        """
        if args[0] in ELSEWHERE and self.get_command(ctx, args[0]) is None:
            raise UsageError(f"there is no command '{args[0]}'; what you look for is: {ELSEWHERE[args[0]]}")
        return super().resolve_command(ctx, args)


class Command(Explained, TyperCommand):
    """A command whose help leaves what newcomers can do without to ``--help-all``."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options, those of `MORE` only if all are asked for."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
                panel = getattr(parameter, "rich_help_panel", None)
                sections.setdefault(MORE if panel == MORE else kind, []).append(record)
        for title in ("Arguments", "Options", MORE):
            if title in sections and (title != MORE or ctx.meta.get(SHOWS_ALL)):
                with formatter.section(title):
                    formatter.write_dl(sections[title])


def _explain(error: Exception, parameters: list[Any]) -> NoReturn:
    """Raise an error again; if it is a flag of another system, with its name here."""
    unknown = getattr(error, "option_name", None)  # the class that has it moves between releases of typer
    here = peers_option(str(unknown).lstrip("-")) if unknown else None
    if here is None:
        raise error
    name, meaning = here
    flags = {flag for parameter in parameters for flag in parameter.opts}
    flag = "--" + name.replace("_", "-")
    typed = name if name.startswith("--") else flag if flag in flags else f"--set {name}=VALUE"
    raise UsageError(f"no such option: {unknown}; here it is {typed}" + (f" ({meaning})" if meaning else "")) from error
