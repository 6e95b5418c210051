"""Keep each layer of a checkpoint on two disks, where the processes that share the layers have disks of their own.

A layer's file lies in the checkpoint's folder of the process that trains it, and its mirror under the same name in the
same checkpoint's folder on the next disk. So a checkpoint is there as long as each of its layers is on some disk, and
what goes on from it (`migrate.agree`) need not know which files are mirrors. The older checkpoint and its mirrors stay
until those of the newer are whole.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from gptj_ft.config.run_folder import Run
from gptj_ft.distributed.pipeline import Relay
from gptj_ft.errors import DataError
from gptj_ft.streaming.stores.state_file import layer_path, stamp_of
from gptj_ft.system.direct_io import RESUME
from gptj_ft.system.files import create_file, disk_errors, new_name, remove, sync_path, write_file
from gptj_ft.system.group import Group, Handover


def disks_of(group: Group, folder: Path) -> list[int]:
    """Return the disk of each process's run folder: the rank of the first process that sees the same one."""
    mark = folder / f"{secrets.token_hex(8)}.mark"
    write_file(mark, b"")
    try:
        names = [each["name"] for each in group.gather("mark of a disk", {"name": mark.name})]
        seen = next(rank for rank, name in enumerate(names) if (folder / name).exists())
        return [each["is"] for each in group.gather("disk", {"is": seen})]
    finally:
        remove(mark)


PART_BYTES = 16 * 2**20  # of a file on its way to another process


@dataclass(frozen=True)
class Way:
    """A layer's file on its way from one process to another; its size in bytes."""

    source: int
    target: int
    layer: int
    size: int


def ways_of(holders: Sequence[Mapping[str, int]], owners: Sequence[int], disks: Sequence[int]) -> Iterator[Way]:
    """Yield the transfers that put each layer on two disks; none of a layer that is nowhere.

    Args:
        holders: size of each layer's file that each process sees.
        owners: rank of the process that trains each layer.
        disks: disk of each process.
    """
    for layer, owner in enumerate(owners):
        having = [rank for rank, sizes in enumerate(holders) if str(layer) in sizes]
        if not having or len({disks[rank] for rank in having}) > 1:
            continue
        source = owner if owner in having else having[0]
        following = [(source + steps) % len(disks) for steps in range(1, len(disks))]
        target = next(rank for rank in following if disks[rank] != disks[source])
        yield Way(source, target, layer, holders[source][str(layer)])


def mirror(relay: Relay, run: Run, trained: Sequence[int], disks: Sequence[int], step: int) -> bool:
    """Have every layer of a checkpoint on two disks; tell whether all are.

    Each file has its name when all of it is on the disk, and is what was sent.

    Args:
        relay: owner process of each layer.
        run: run that has the checkpoint.
        trained: the layers that are trained, of all processes.
        disks: disk of each process, see `disks_of`; there are two at least.
        step: step of the checkpoint.

    Raises:
        ResourceError: a disk is full or fails; older mirrors are still there.
        DataError: something else has arrived than was sent.
    """
    group, prefix = relay.group, run.checkpoint(step) / "layer"
    paths = {layer: layer_path(prefix, layer) for layer in trained}
    here = {str(layer): path.stat().st_size for layer, path in paths.items() if stamp_of(path) == step}
    holders = [each["has"] for each in group.gather("layers to mirror", {"has": here})]
    ways, digests = list(ways_of(holders, relay.owners, disks)), dict[str, str]()
    leaving = [way for way in ways if way.source == group.rank]
    coming = [way for way in ways if way.target == group.rank]
    with disk_errors(prefix.parent, RESUME):
        moves = list[Iterator[Handover]]()
        for rank in range(group.size):
            moves.append(_send(group, [way for way in leaving if way.target == rank], paths, digests))
            moves.append(_receive(group, [way for way in coming if way.source == rank], paths, digests))
        _take_turns(moves)
        said = group.gather("mirrors written", {"of": digests})
        for way in coming:
            name = str(way.layer)
            if digests[name] != said[way.source]["of"][name]:
                raise DataError(f"{paths[way.layer]} is not what {group.names[way.source]} has sent; resume the run")
            os.replace(new_name(paths[way.layer]), paths[way.layer])
        if coming:
            sync_path(prefix.parent)
    group.gather("mirrors whole", {})
    return all(any(str(layer) in each for each in holders) for layer in trained)


def _take_turns(moves: Sequence[Iterator[Handover]]) -> None:
    """Move files, a part of each at a time: processes that send each other would wait for one another for ever."""
    while moves:
        begun = [(each, handover) for each in moves if (handover := next(each, None))]
        for _, handover in begun:
            handover.wait()
        moves = [each for each, _ in begun]


def _send(group: Group, ways: Sequence[Way], paths: Mapping[int, Path], digests: dict[str, str]) -> Iterator[Handover]:
    """Give files to a process, and yield each part on its way; note their digests."""
    for way in ways:
        digest = xxhash.xxh3_128()
        with paths[way.layer].open("rb") as file:
            while part := file.read(PART_BYTES):
                digest.update(part)
                yield group.send(way.target, torch.frombuffer(bytearray(part), dtype=torch.uint8))
        digests[str(way.layer)] = digest.hexdigest()


def _receive(
    group: Group, ways: Sequence[Way], paths: Mapping[int, Path], digests: dict[str, str]
) -> Iterator[Handover]:
    """Take files from a process, under the names of new ones, and yield each part on its way; note their digests."""
    for way in ways:
        digest = xxhash.xxh3_128()
        with os.fdopen(create_file(new_name(paths[way.layer])), "wb") as file:
            for start in range(0, way.size, PART_BYTES):
                part = torch.empty(min(PART_BYTES, way.size - start), dtype=torch.uint8)
                yield group.receive(way.source, part)
                content = part.numpy().tobytes()
                digest.update(content)
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
        digests[str(way.layer)] = digest.hexdigest()
