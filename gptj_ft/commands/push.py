"""`convert --push`: say what goes to the Hub, then send it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from gptj_ft.commands.terminal import Output


def send(folder: Path, repository: str, is_public: bool, dry_run: bool, out: Output) -> None:
    """Send a model folder to the Hub, or with ``dry_run`` only say what would go."""
    from gptj_ft.machine import gigabytes
    from gptj_ft.push import left_behind, pack, push
    from gptj_ft.screen import console_for, say

    parcels = pack(folder)
    kept, total = left_behind(folder, parcels), sum(parcel.bytes for parcel in parcels)
    files = [{"name": each.name, "bytes": each.bytes, "left_out": each.left_out} for each in parcels]
    facts = {"dry_run": dry_run, "folder": str(folder), "repository": repository, "public": is_public, "bytes": total}
    facts |= {"files": files, "stays": kept}
    # What goes to others is said, with --json, too; in a dry run it is the result.
    notes = console_for(quiet=out.is_quiet or (dry_run and out.as_json))
    for each in parcels:
        without = f"  without {', '.join(each.left_out)}" if each.left_out else ""
        notes.print(f"{gigabytes(each.bytes):>10}  {each.name}{without}")
    if kept:
        say(notes, f"stays here: {', '.join(kept)}", "  ")
    who = "public" if is_public else "private"
    notes.print(f"{gigabytes(total)} of {folder} {'would go' if dry_run else 'go'} to {repository}, {who}")
    if dry_run:
        out.finish(facts, "", lambda console: None)
        return
    with out.bar("sending") as advance:
        pushed = push(parcels, repository, is_public=is_public, progress=advance)
    what = f"{pushed.url}, {'private' if pushed.is_private else 'public'}, commit {pushed.commit[:12]}"
    out.finish({**facts, **asdict(pushed)}, pushed.url, lambda console: console.print(what))
