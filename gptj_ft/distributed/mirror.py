"""Keep each layer of a checkpoint on two disks, where pipeline ranks have disks of their own.

A layer's file lies in the checkpoint folder of its owner. Its mirror has the same name, in the same folder on another
disk. `migrate` treats both alike, so that the loss of one disk loses no layer. The previous checkpoint with its mirrors
stays until the mirrors of the new one are complete.
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
from gptj_ft.distributed.pipeline import Partition
from gptj_ft.errors import DataError
from gptj_ft.models.layer_sampling import EveryLayer
from gptj_ft.streaming.stores.state_file import layer_path, stamp_of
from gptj_ft.system.direct_io import RESUME
from gptj_ft.system.files import create_file, disk_errors, new_name, remove, sync_path, write_file
from gptj_ft.system.group import Group, PendingTransfer
from gptj_ft.training.parallel import Mirrors

PART_BYTES = 16 * 2**20  # of a file, per transfer


class DiskMirrors(Mirrors):
    """The mirrors of a run.

    Args:
        partition: owner rank of each layer.
        trained: trained layers of all ranks.
        choice: layers that each step trains.
    """

    def __init__(self, partition: Partition, run: Run, trained: Sequence[int], choice: EveryLayer) -> None:
        self._partition, self._run, self._trained, self._choice = partition, run, trained, choice
        self._disks = find_disks(partition.group, run.folder)
        self.is_active = len(set(self._disks)) > 1
        if not self.is_active:
            self.note = "nothing is mirrored: all processes that share the layers have the same disk"

    def mirror_existing(self, best: int | None) -> None:
        # A lost disk or a kill may have left these without mirrors.
        messages = self._partition.group.gather("found", {"steps": list(self._run.whole_checkpoints())})
        complete = set.intersection(*(set(each["steps"]) for each in messages))
        for step in sorted(complete & {best, max(complete, default=None)}):
            self.mirror(step)

    def mirror(self, step: int) -> None:
        stamps = {layer: self._choice.last_step(layer, step) for layer in self._trained}
        if mirror_checkpoint(self._partition, self._run.checkpoint(step), stamps, self._disks):
            self.newest = step


def find_disks(group: Group, folder: Path) -> list[int]:
    """Return an id of each rank's disk: the lowest rank that sees the same run folder."""
    mark = folder / f"{secrets.token_hex(8)}.mark"
    write_file(mark, b"")
    try:
        # The first `gather` ends when all marks exist; the second when all ranks have looked at them.
        names = [each["name"] for each in group.gather("mark of a disk", {"name": mark.name})]
        seen = next(rank for rank, name in enumerate(names) if (folder / name).exists())
        return [each["is"] for each in group.gather("disk", {"is": seen})]
    finally:
        remove(mark)


@dataclass(frozen=True)
class FileCopy:
    """The transfer of one layer's file."""

    source: int
    target: int
    layer: int
    size: int  # bytes


def plan_copies(
    holders: Sequence[Mapping[str, int]], owners: Sequence[int], disks: Sequence[int]
) -> Iterator[FileCopy]:
    """Yield the transfers after which each layer is on two disks; none for a layer that is on no disk.

    Args:
        holders: size of each layer's file that a rank sees, by rank.
        owners: rank of each layer.
        disks: disk of each rank.
    """
    for layer, owner in enumerate(owners):
        having = [rank for rank, sizes in enumerate(holders) if str(layer) in sizes]
        if not having or len({disks[rank] for rank in having}) > 1:
            continue
        source = owner if owner in having else having[0]
        # Around the ring, so that the mirrors spread over all disks.
        following = [(source + steps) % len(disks) for steps in range(1, len(disks))]
        target = next(rank for rank in following if disks[rank] != disks[source])
        yield FileCopy(source, target, layer, holders[source][str(layer)])


def mirror_checkpoint(partition: Partition, folder: Path, stamps: Mapping[int, int], disks: Sequence[int]) -> bool:
    """Put every layer of a checkpoint on two disks; return False if one is on no disk.

    A mirror gets its name after it is written, synced and compared with the digest of the sender.

    Args:
        folder: the checkpoint.
        stamps: stamp of the file of each trained layer, of all ranks.
        disks: disk of each rank; at least two differ.

    Raises:
        ResourceError: a disk is full or fails; older mirrors are intact.
    """
    group, prefix = partition.group, folder / "layer"
    paths = {layer: layer_path(prefix, layer) for layer in stamps}
    local = {str(layer): path.stat().st_size for layer, path in paths.items() if stamp_of(path) == stamps[layer]}
    holders = [each["has"] for each in group.gather("layers to mirror", {"has": local})]
    copies, digests = list(plan_copies(holders, partition.owners, disks)), dict[str, str]()
    sending = [copy for copy in copies if copy.source == group.rank]
    receiving = [copy for copy in copies if copy.target == group.rank]
    with disk_errors(prefix.parent, RESUME):
        streams = list[Iterator[PendingTransfer]]()
        for rank in range(group.size):
            streams.append(_send_files(group, [copy for copy in sending if copy.target == rank], paths, digests))
            streams.append(_recv_files(group, [copy for copy in receiving if copy.source == rank], paths, digests))
        _interleave(streams)
        messages = group.gather("mirrors written", {"of": digests})
        for copy in receiving:
            name = str(copy.layer)
            if digests[name] != messages[copy.source]["of"][name]:
                raise DataError(f"{paths[copy.layer]} is not what {group.names[copy.source]} has sent; resume the run")
            os.replace(new_name(paths[copy.layer]), paths[copy.layer])
        if receiving:
            sync_path(prefix.parent)
    group.barrier("mirrors whole")
    return all(any(str(layer) in each for each in holders) for layer in stamps)


def _interleave(streams: Sequence[Iterator[PendingTransfer]]) -> None:
    """Run one transfer of every stream at a time: with one stream after the other, two senders would deadlock."""
    while streams:
        started = [(stream, transfer) for stream in streams if (transfer := next(stream, None))]
        for _, transfer in started:
            transfer.wait()
        streams = [stream for stream, _ in started]


def _send_files(
    group: Group, copies: Sequence[FileCopy], paths: Mapping[int, Path], digests: dict[str, str]
) -> Iterator[PendingTransfer]:
    """Yield the transfer of each part of some files to one rank; add their digests."""
    for copy in copies:
        digest = xxhash.xxh3_128()
        with paths[copy.layer].open("rb") as file:
            while part := file.read(PART_BYTES):
                digest.update(part)
                yield group.send(copy.target, torch.frombuffer(bytearray(part), dtype=torch.uint8))
        digests[str(copy.layer)] = digest.hexdigest()


def _recv_files(
    group: Group, copies: Sequence[FileCopy], paths: Mapping[int, Path], digests: dict[str, str]
) -> Iterator[PendingTransfer]:
    """Yield the transfer of each part of some files from one rank, into draft files; add their digests."""
    for copy in copies:
        digest = xxhash.xxh3_128()
        with os.fdopen(create_file(new_name(paths[copy.layer])), "wb") as file:
            for start in range(0, copy.size, PART_BYTES):
                part = torch.empty(min(PART_BYTES, copy.size - start), dtype=torch.uint8)
                yield group.recv(copy.source, part)  # the caller waits before it resumes this generator
                content = part.numpy().tobytes()
                digest.update(content)
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
        digests[str(copy.layer)] = digest.hexdigest()
