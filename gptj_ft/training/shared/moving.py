"""Bring what a run is saved with to the processes that go on with it, where they have no file system in common.

On each machine the run folder holds the layers that were trained there. When a run goes on, its processes agree on the
step, tell each other which layers they see, and hand the files of a layer that has another place now from machine to
machine. On one machine, or on a shared file system, everybody sees everything, and nothing moves.
"""

from __future__ import annotations

import os
import platform
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gptj_ft.config.run_folder import COMMIT, MANIFEST, Run, owner_of
from gptj_ft.errors import DataError
from gptj_ft.streaming.stores.state_file import layer_path, stamp_of
from gptj_ft.system.digests import digest_of, write_sealed
from gptj_ft.system.files import inside, keep_folder, new_name, remove, remove_folder, sync_path, write_file
from gptj_ft.system.processes.group import Group
from gptj_ft.training.setup import TrainSetup

PART_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Saved:
    """What a run goes on from; neither: from the start.

    Attributes:
        commit: last commit of a run on disk.
        checkpoint: step of the newest checkpoint.
        bytes_moved: of files that this process has got from others.
    """

    commit: dict[str, Any] | None
    checkpoint: int | None
    bytes_moved: int = 0


def agree(setup: TrainSetup, run: Run) -> Saved:
    """Agree with the other processes on what the run goes on from, and have the files of its layers here.

    Raises:
        DataError: files of a layer are on no machine that takes part.
    """
    commit, checkpoints = run.last_commit(), run.whole_checkpoints()
    if setup.relay.group.size == 1:
        return Saved(commit, max(checkpoints, default=None))
    group = setup.relay.group
    manifests = {str(step): run.manifest(step) for step in checkpoints}
    noted = run.record()["saved"] if run.record_file.is_file() else None
    said = group.gather("saved", {"commit": commit, "manifests": manifests, "noted": noted})
    commits = [each["commit"] for each in said if each["commit"]]
    if commits:
        last = max(commits, key=lambda each: int(each["step"]))
        moved = _have_layers(setup, run, run.state, int(last["step"]), ("layer", "gradient"))
        if run.writes and (commit is None or commit["step"] != last["step"]):
            # Its machine was cut off between two commits, or is new; gradients of this step are there all the same.
            write_sealed(run.state / COMMIT, {key: last[key] for key in ("step", "facts", "update")})
        group.gather("agreed on a commit", {})
        return Saved(last, max(checkpoints, default=None), moved)
    lost = dict[int, list[int]]()
    steps = sorted({int(step) for each in said for step in each["manifests"]}, reverse=True)
    for step in steps:
        folder = run.checkpoint(step)
        manifest = next(each["manifests"][str(step)] for each in said if str(step) in each["manifests"])
        if lost.setdefault(step, _lost_layers(setup, folder, step)):
            continue
        moved = _have_layers(setup, run, folder, step, ("layer",))
        if run.writes:
            for later, path in checkpoints.items():
                if later > step:
                    remove_folder(path)  # it was not finished on every machine
            if step not in checkpoints:
                write_sealed(folder / MANIFEST, {key: manifest[key] for key in ("step", "facts")})
                sync_path(folder)
        group.gather("agreed on a checkpoint", {})
        return Saved(None, step, moved)
    if lost and any(each["noted"] for each in said):  # else the first was just being made
        raise DataError(_missing(group, run, run.checkpoint(steps[0]), steps[0], lost[steps[0]]))
    return Saved(None, None)


def _lost_layers(setup: TrainSetup, folder: Path, step: int) -> list[int]:
    """Return the layers of a checkpoint that are on no machine."""
    stamps = _stamps(setup, folder, "layer")
    here = [layer for layer, stamp in stamps.items() if stamp == step]
    said = setup.relay.group.gather("layers of a checkpoint", {"has": here})
    return sorted(set(_trained(setup)) - {layer for each in said for layer in each["has"]})


def _have_layers(setup: TrainSetup, run: Run, folder: Path, step: int, prefixes: Sequence[str]) -> int:
    """Have the files of this process's layers in a folder; return the bytes that have come from other machines.

    Raises:
        DataError: nobody has them.
    """
    group, relay, moved = setup.relay.group, setup.relay, 0
    here = {prefix: _stamps(setup, folder, prefix) for prefix in prefixes}
    said = group.gather(
        "layers", {prefix: {str(at): stamp for at, stamp in found.items()} for prefix, found in here.items()}
    )
    # A layer that lacks the update of the step needs its gradient; an older one was left here by an earlier move.
    found = {
        layer: [rank for rank, each in enumerate(said) if each["layer"].get(str(layer)) in (step, step - 1)]
        for layer in _trained(setup)
    }
    if lost := [layer for layer, ranks in found.items() if not ranks]:
        raise DataError(_missing(group, run, folder, step, lost))
    gone = list[Path]()
    for layer, valid in found.items():
        owner = relay.owners[layer]
        newest = max(said[rank]["layer"][str(layer)] for rank in valid)
        if said[owner]["layer"].get(str(layer)) == newest:
            continue
        source = next(rank for rank in valid if said[rank]["layer"][str(layer)] == newest)
        for prefix in prefixes:
            if prefix == "gradient" and newest == step:
                continue
            path = layer_path(folder / prefix, layer)
            if group.rank == source:
                send_file(group, owner, path)
                gone.append(path)
            elif group.rank == owner:
                keep_folder(path.parent)
                moved += receive_file(group, source, path)
    group.gather("layers moved", {})
    for path in gone:  # not before: they are on the other disk now, whatever happens
        remove(path)
    return moved


def _missing(group: Group, run: Run, folder: Path, step: int, layers: Sequence[int]) -> str:
    """Say which layers are on no machine that takes part, and which machines had them."""
    noted = group.gather("owners", {"of": {str(layer): owner_of(run, layer) for layer in layers}})
    owners = dict[str, list[str]]()
    for layer in layers:
        name = next((each["of"][str(layer)] for each in noted if each["of"][str(layer)]), "a machine that is not known")
        owners.setdefault(name, []).append(str(layer))
    texts = [f"layer{'s' if len(own) > 1 else ''} {', '.join(own)} of {name}" for name, own in owners.items()]
    files = ", ".join(f"{folder.name}/*-{layer:03d}.*" for layer in layers)
    return (
        f"on none of these machines at step {step}: {'; '.join(texts)}. Start the run on all that have trained it, or "
        f"copy the files ({files}) from there to one of these; if that disk is lost, begin the run again"
    )


def _trained(setup: TrainSetup) -> list[int]:
    assert setup.whole is not None
    return [layer for layer, layout in enumerate(setup.whole.trained) if layout.numel]


def _stamps(setup: TrainSetup, folder: Path, prefix: str) -> dict[int, int]:
    """Return the step of each layer whose file is in a folder."""
    stamps = ((layer, stamp_of(layer_path(folder / prefix, layer))) for layer in _trained(setup))
    return {layer: stamp for layer, stamp in stamps if stamp is not None}


def send_file(group: Group, to: int, path: Path) -> None:
    """Give a file to another process, in parts."""
    size = path.stat().st_size
    group.send(to, torch.tensor([size])).wait()
    with path.open("rb") as file:
        while part := file.read(PART_BYTES):
            group.send(to, torch.frombuffer(bytearray(part), dtype=torch.uint8)).wait()


def receive_file(group: Group, source: int, path: Path) -> int:
    """Take a file from another process; it has its name when all of it is on the disk. Return its bytes."""
    length = torch.zeros(1, dtype=torch.int64)
    group.receive(source, length).wait()
    size, draft = int(length), new_name(path)
    remove(draft)
    write_file(draft, b"")
    with draft.open("r+b") as file:
        for start in range(0, size, PART_BYTES):
            part = torch.empty(min(PART_BYTES, size - start), dtype=torch.uint8)
            group.receive(source, part).wait()
            file.write(part.numpy().tobytes())
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
    sync_path(path.parent)
    return size


def share_folder(group: Group, run: Run) -> bool:
    """Have the options and rows of a run on every machine; tell whether this process writes what is there once.

    Process 0 has made the folder. A process that does not see it is on another machine, where the first of its host
    name makes a copy, and writes there what process 0 writes in its own.

    Raises:
        DataError: there is another run in that place.
    """
    mark = run.folder / f".seen-{group.gather('mark', {'id': secrets.token_hex(8)})[0]['id']}"
    if group.rank == 0:
        write_file(mark, b"")
    group.gather("marked", {})
    # Not before: until then process 0 may just be making the folder.
    said = group.gather("sees", {"sees": mark.exists(), "recipe": _recipe_of(run), "host": platform.node()})
    if group.rank == 0:
        remove(mark)
    if said[group.rank]["recipe"] not in ("", said[0]["recipe"]):
        raise DataError(f"{run.folder} on {platform.node()} is another run: name another --output, or move it away")
    apart = [rank for rank, each in enumerate(said) if not each["sees"]]
    first_of_host = {said[rank]["host"]: rank for rank in reversed(apart)}
    for rank in sorted(first_of_host.values()):
        if said[rank]["recipe"]:
            continue  # it has the folder already
        if group.rank == 0:
            _send_folder(group, rank, run)
        elif group.rank == rank:
            _receive_folder(group, run)
    group.gather("folder shared", {})
    return group.rank == 0 or group.rank in first_of_host.values()


def _recipe_of(run: Run) -> str:
    return digest_of(run.record()["recipe"]) if run.record_file.is_file() else ""


def _files(run: Run) -> Iterator[Path]:
    yield from (run.recipe_file, run.base_file)
    yield from (run.metrics_file,) if run.metrics_file.is_file() else ()
    yield from (path for path in sorted(run.data.rglob("*")) if path.is_file())
    yield run.record_file  # last: a folder that has it has everything


def _send_folder(group: Group, rank: int, run: Run) -> None:
    names = [str(path.relative_to(run.folder)) for path in _files(run)]
    text = "\n".join(names).encode()
    group.send(rank, torch.tensor([len(text)])).wait()
    group.send(rank, torch.frombuffer(bytearray(text), dtype=torch.uint8)).wait()
    for name in names:
        send_file(group, rank, run.folder / name)


def _receive_folder(group: Group, run: Run) -> None:
    length = torch.zeros(1, dtype=torch.int64)
    group.receive(0, length).wait()
    text = torch.empty(int(length), dtype=torch.uint8)
    group.receive(0, text).wait()
    for name in text.numpy().tobytes().decode().split("\n"):
        path = inside(run.folder / name, run.folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        receive_file(group, 0, path)
