"""Copy files of a run folder from rank to rank, where machines share no file system."""

from __future__ import annotations

import os
import platform
import secrets
from collections.abc import Iterator
from pathlib import Path

import torch

from gptj_ft.config.run_folder import Run
from gptj_ft.distributed.mirror import PART_BYTES
from gptj_ft.errors import DataError
from gptj_ft.system.digests import digest_of
from gptj_ft.system.files import inside, new_name, remove, sync_path, write_file
from gptj_ft.system.group import Group


def send_bytes(group: Group, target: int, content: bytes) -> None:
    """Send bytes, with their number first."""
    group.send(target, torch.tensor([len(content)])).wait()
    # `frombuffer` needs writable memory, and bytes are read-only.
    group.send(target, torch.frombuffer(bytearray(content), dtype=torch.uint8)).wait()


def recv_bytes(group: Group, source: int) -> bytes:
    """Receive bytes from `send_bytes`."""
    values = torch.empty(_recv_int(group, source), dtype=torch.uint8)
    group.recv(source, values).wait()
    return values.numpy().tobytes()


def send_file(group: Group, target: int, path: Path) -> None:
    """Send a file, with its size first."""
    group.send(target, torch.tensor([path.stat().st_size])).wait()
    with path.open("rb") as file:
        while part := file.read(PART_BYTES):
            group.send(target, torch.frombuffer(bytearray(part), dtype=torch.uint8)).wait()


def recv_file(group: Group, source: int, path: Path) -> int:
    """Receive a file from `send_file`; return the size. The file gets its name after it is written and synced."""
    size, draft = _recv_int(group, source), new_name(path)
    remove(draft)
    write_file(draft, b"")
    with draft.open("r+b") as file:
        for start in range(0, size, PART_BYTES):
            part = torch.empty(min(PART_BYTES, size - start), dtype=torch.uint8)
            group.recv(source, part).wait()
            file.write(part.numpy().tobytes())
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
    sync_path(path.parent)
    return size


def _recv_int(group: Group, source: int) -> int:
    values = torch.zeros(1, dtype=torch.int64)
    group.recv(source, values).wait()
    return int(values)


def share_folder(group: Group, run: Run) -> bool:
    """Copy options and rows from rank 0 to every machine that does not see its run folder.

    Returns: whether this rank writes the files that a folder has once: rank 0, and the first rank of other machines.
    """
    mark = run.folder / f".seen-{group.broadcast('mark', {'id': secrets.token_hex(8)})['id']}"
    if group.rank == 0:
        write_file(mark, b"")
    group.barrier("marked")
    # Not earlier: before the barrier, rank 0 may still be making the folder.
    messages = group.gather("sees", {"sees": mark.exists(), "recipe": _recipe_digest(run), "host": platform.node()})
    if group.rank == 0:
        remove(mark)
    if messages[group.rank]["recipe"] not in ("", messages[0]["recipe"]):
        raise DataError(f"{run.folder} on {platform.node()} is another run: name another --output, or move it away")
    remote = [rank for rank, each in enumerate(messages) if not each["sees"]]
    # Reversed, so that the lowest rank of each host is the last to be set.
    first_of_host = {messages[rank]["host"]: rank for rank in reversed(remote)}
    for rank in sorted(first_of_host.values()):
        if messages[rank]["recipe"]:
            continue  # the machine has a copy
        if group.rank == 0:
            names = [str(path.relative_to(run.folder)) for path in _files(run)]
            send_bytes(group, rank, "\n".join(names).encode())
            for name in names:
                send_file(group, rank, run.folder / name)
        elif group.rank == rank:
            for name in recv_bytes(group, 0).decode().split("\n"):
                # The name came over the network: it must not lead out of the folder.
                path = inside(run.folder / name, run.folder)
                path.parent.mkdir(parents=True, exist_ok=True)
                recv_file(group, 0, path)
    group.barrier("folder shared")
    return group.rank == 0 or group.rank in first_of_host.values()


def _recipe_digest(run: Run) -> str:
    return digest_of(run.record()["recipe"]) if run.record_file.is_file() else ""


def _files(run: Run) -> Iterator[Path]:
    yield from (run.recipe_file, run.base_file)
    yield from (run.metrics_file,) if run.metrics_file.is_file() else ()
    yield from (path for path in sorted(run.data.rglob("*")) if path.is_file())
    yield run.record_file  # last: its presence says that the copy is complete
