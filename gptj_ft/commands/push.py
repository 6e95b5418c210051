"""`convert --push`: say what goes to the Hub, then send it."""

from __future__ import annotations

import sys
from pathlib import Path

from gptj_ft.commands.terminal import bar, print_json


def send(folder: Path, repository: str, is_public: bool, dry_run: bool, as_json: bool) -> None:
    """Send a model folder to the Hub, or with ``dry_run`` only say what would go."""
    from dataclasses import asdict

    from gptj_ft.machine import gigabytes
    from gptj_ft.push import left_behind, pack, push

    parcels = pack(folder)
    kept, total = left_behind(folder, parcels), sum(parcel.bytes for parcel in parcels)
    files = [{"name": each.name, "bytes": each.bytes, "left_out": each.left_out} for each in parcels]
    facts = {"dry_run": dry_run, "folder": str(folder), "repository": repository, "public": is_public, "bytes": total}
    if not (dry_run and as_json):
        for each in parcels:
            without = f"  without {', '.join(each.left_out)}" if each.left_out else ""
            print(f"{gigabytes(each.bytes):>10}  {each.name}{without}", file=sys.stderr)
        if kept:
            print(f"stays here: {', '.join(kept)}", file=sys.stderr)
        who = "public" if is_public else "private"
        verb = "would go" if dry_run else "go"
        print(f"{gigabytes(total)} of {folder} {verb} to {repository}, {who}", file=sys.stderr)
    if dry_run:
        if as_json:
            print_json({**facts, "files": files, "stays": kept})
        return
    with bar("sending", not as_json) as advance:
        pushed = push(parcels, repository, is_public=is_public, progress=advance)
    if as_json:
        print_json({**facts, "files": files, "stays": kept, **asdict(pushed)})
    else:
        print(f"{pushed.url}, {'private' if pushed.is_private else 'public'}, commit {pushed.commit[:12]}")
