"""Lay out help: commands in groups, basic options first, examples at the end."""

from __future__ import annotations

from typing import Any, NoReturn

from typer.core import TyperCommand, TyperGroup

from gptj_ft.cli.options import MORE, SHOWS_ALL
from gptj_ft.config.resolve import peers_option
from gptj_ft.errors import UsageError

# Commands of other systems, and our equivalents.
PEERS_COMMANDS = {
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
    """End help with examples, and translate flags of other systems."""

    def format_epilog(self: Any, ctx: Any, formatter: Any) -> None:
        """Write the examples, one per line."""
        lines = (self.epilog or "").splitlines()
        if lines:
            with formatter.section("Example" + "s" * (len(lines) > 1)):
                for line in lines:
                    formatter.write(f"{'':{formatter.current_indent}}{line}\n")

    def parse_args(self: Any, ctx: Any, args: list[str]) -> list[str]:
        """Parse flags; for a flag of another system, raise an error with our name."""
        try:
            return super().parse_args(ctx, args)  # type: ignore[misc, no-any-return]
        except Exception as error:
            _explain(error, self.get_params(ctx))


class Commands(Explained, TyperGroup):
    """Commands in groups, by their ``rich_help_panel``."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write names and summaries; the columns of all groups align."""
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
        """Find a command; for a command of another system, raise an error with our equivalent."""
        if args[0] in PEERS_COMMANDS and self.get_command(ctx, args[0]) is None:
            raise UsageError(f"no such command: {args[0]}; use {PEERS_COMMANDS[args[0]]}")
        return super().resolve_command(ctx, args)


class Command(Explained, TyperCommand):
    """Command whose advanced options are shown by ``--help-all`` only."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options; those under `MORE` with ``--help-all`` only."""
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
    """Raise an error again; for a flag of another system, with our name."""
    unknown = getattr(error, "option_name", None)  # typer moves the class between releases
    translation = peers_option(str(unknown).lstrip("-")) if unknown else None
    if translation is None:
        raise error
    name, meaning = translation
    flags = {flag for parameter in parameters for flag in parameter.opts}
    flag = "--" + name.replace("_", "-")
    typed = name if name.startswith("--") else flag if flag in flags else f"--set {name}=VALUE"
    raise UsageError(f"no such option: {unknown}; use {typed}" + (f" ({meaning})" if meaning else "")) from error
