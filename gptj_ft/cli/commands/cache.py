"""The command `cache`: list or clear the cache of tokenized rows."""

from __future__ import annotations

import typer

from gptj_ft.cli.help import Commands
from gptj_ft.cli.options import Json, Quiet
from gptj_ft.cli.terminal.output import Output, print_json

cache_app = typer.Typer(cls=Commands, no_args_is_help=True, help="Cache of tokenized rows: list or clear it.")


@cache_app.command("list")
def list_cache(as_json: Json = False) -> None:
    """List the cached data, largest first."""
    from gptj_ft.cli.terminal.screen import console_for, say, table
    from gptj_ft.data.load import cache_entries, cache_folder
    from gptj_ft.system.units import gigabytes

    entries = cache_entries()
    if as_json:
        rows = [{"folder": str(x.folder), "bytes": x.bytes, "files": x.files, "rows": x.rows} for x in entries]
        print_json({"folder": str(cache_folder()), "kept": rows})
        return
    console = console_for(stderr=False)
    if entries:
        lines = [(gigabytes(x.bytes), f"{x.rows:,}", ", ".join(x.files[:2]) or "damaged") for x in entries]
        table(console, "", [("size", "rows", "of"), *lines], right=(0, 1))
    say(console, f"{gigabytes(sum(each.bytes for each in entries))} in {cache_folder()}")


@cache_app.command("clear")
def clear_cache(quiet: Quiet = False, as_json: Json = False) -> None:
    """Remove all cached rows; runs have their own copies."""
    from gptj_ft.data.load import remove_prepared_rows
    from gptj_ft.system.units import gigabytes

    freed = remove_prepared_rows()
    out = Output(as_json, quiet)
    out.finish({"freed_bytes": freed}, "", lambda console: console.print(f"{gigabytes(freed)} freed"))
