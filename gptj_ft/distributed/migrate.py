"""Bring what a run is saved with to the processes that go on with it, where they have no file system in common.

On each machine the run folder holds the layers that were trained there. When a run goes on, its processes agree on the
step, tell each other which layers they see, and hand the files of a layer that has another place now from machine to
machine. On one machine, or on a shared file system, everybody sees everything, and nothing moves.
"""

from __future__ import annotations

import os
import platform
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gptj_ft.config.run_folder import COMMIT, MANIFEST, Run, owner_of
from gptj_ft.distributed.mirror import PART_BYTES
from gptj_ft.errors import DataError
from gptj_ft.streaming.stores.state_file import layer_path, stamp_of
from gptj_ft.system.digests import digest_of, write_sealed
from gptj_ft.system.files import inside, keep_folder, new_name, remove, sync_path, write_file
from gptj_ft.system.group import Group
from gptj_ft.training.retention import go_back
from gptj_ft.training.run_state import RunState
from gptj_ft.training.setup import TrainSetup
from gptj_ft.training.verify import stored_form


@dataclass(frozen=True)
class ResumePoint:
    """What a run goes on from; neither: from the start.

    Attributes:
        commit: last commit of a run on disk.
        checkpoint: step of the newest checkpoint.
        bytes_moved: bytes of the files that this process has got from others.
        note: line that says what is lost, if the run goes back to what its mirrors have; ``None``: it does not.
    """

    commit: dict[str, Any] | None
    checkpoint: int | None
    bytes_moved: int = 0
    note: str | None = None


def agree(setup: TrainSetup, run: Run) -> ResumePoint:
    """Agree with the other processes on what the run goes on from, and have the files of its layers here.

    Raises:
        DataError: files of a layer are on no machine that takes part, or damaged.
    """
    commit, checkpoints = run.last_commit(), run.whole_checkpoints()
    if setup.relay.group.size == 1 and not setup.recipe.mirror:
        return ResumePoint(commit, max(checkpoints, default=None))
    group = setup.relay.group
    manifests = {str(step): run.manifest(step) for step in checkpoints}
    noted = run.record()["saved"] if run.record_file.is_file() else None
    said = group.gather("saved", {"commit": commit, "manifests": manifests, "noted": noted})
    commits = [each["commit"] for each in said if each["commit"]]
    last = max(commits, key=lambda each: int(each["step"]), default=None)
    lost = dict[Path, tuple[int, list[int]]]()  # what the run would have gone on from, newest first
    if last:
        at = int(last["step"])
        # A layer that lacks the update of the step needs its gradient; an older one was left here by an earlier move.
        missing = _lost_layers(setup, run.state, (at, at - 1))
        if not missing:
            moved = _have_layers(setup, run.state, at, ("layer", "gradient"))
            if run.writes and (commit is None or commit["step"] != at):
                # Its machine was cut off between two commits, or is new; gradients of this step are there all the same.
                write_sealed(run.state / COMMIT, {key: last[key] for key in ("step", "facts", "update")})
            moved += _have_best(setup, run, last)
            group.gather("agreed on a commit", {})
            return ResumePoint(last, max(checkpoints, default=None), moved)
        if not setup.recipe.mirror:
            raise DataError(_missing(group, run, run.state, at, missing))
        lost[run.state / COMMIT] = at, missing
    every = {int(step): manifest for each in said for step, manifest in each["manifests"].items()}
    for step in sorted(every, reverse=True):
        folder = run.checkpoint(step)
        if missing := _lost_layers(setup, folder, (step,)):
            lost[folder / MANIFEST] = step, missing
            continue
        noted = {run.folder / each["noted"] for each in said if each["noted"]}
        # Else a newer one was just being made, and nothing is lost.
        gone = next((each for path, each in lost.items() if path == run.state / COMMIT or path in noted), None)
        moved = _have_layers(setup, folder, step, ("layer",), is_checked=gone is not None)
        if run.writes and step not in checkpoints:
            write_sealed(folder / MANIFEST, {key: every[step][key] for key in ("step", "facts")})
            sync_path(folder)
        moved += _have_best(setup, run, every[step])
        note = f"lost: {_whose(group, run, gone[1])}; the run goes back from step {gone[0]} to {step}" if gone else None
        group.gather("agreed on a checkpoint", {})
        if run.writes:
            go_back(run, step)  # a later checkpoint was not finished on every machine
        group.gather("begins from a checkpoint", {})
        return ResumePoint(None, step, moved, note)
    if lost and (last or any(each["noted"] for each in said)):  # else the first was just being made
        path, (step, missing) = next(iter(lost.items()))
        raise DataError(_missing(group, run, path.parent, step, missing))
    return ResumePoint(None, None)


def _lost_layers(setup: TrainSetup, folder: Path, steps: Sequence[int]) -> list[int]:
    """Return the layers that are on no machine, stamped with one of some steps."""
    here = [layer for layer, stamp in _stamps(setup, folder, "layer").items() if stamp in steps]
    said = setup.relay.group.gather("layers of a step", {"has": here})
    return sorted(set(_trained(setup)) - {layer for each in said for layer in each["has"]})


def _have_best(setup: TrainSetup, run: Run, saved: Mapping[str, Any]) -> int:
    """Have the files of this process's layers in the checkpoint of the best state, too; return the bytes."""
    best = RunState.of(saved).best
    if best is None or not setup.recipe.keeps_best:
        return 0
    folder, group = run.checkpoint(best.step), setup.relay.group
    is_here = (folder / MANIFEST).is_file()
    said = group.gather("best state", {"manifest": run.manifest(best.step) if is_here else None})
    manifest = next((each["manifest"] for each in said if each["manifest"]), None)
    if manifest is None or _lost_layers(setup, folder, (best.step,)):
        return 0
    moved = _have_layers(setup, folder, best.step, ("layer",))
    if run.writes and not is_here:
        write_sealed(folder / MANIFEST, {key: manifest[key] for key in ("step", "facts")})
        sync_path(folder)
    return moved


def _have_layers(setup: TrainSetup, folder: Path, step: int, prefixes: Sequence[str], is_checked: bool = False) -> int:
    """Have the files of this process's layers in a folder; return the bytes that have come from other machines.

    Args:
        setup: plan of the run, with the owner of each layer; each layer is on some machine.
        folder: the folder, of the same name on each machine.
        step: step of the state in it.
        prefixes: names of the files before the layer's number.
        is_checked: whether what is used is compared with its digests before.

    Raises:
        DataError: a file is damaged; nothing was moved.
    """
    group, relay, moved = setup.relay.group, setup.relay, 0
    here = {prefix: _stamps(setup, folder, prefix) for prefix in prefixes}
    said = group.gather(
        "layers", {prefix: {str(at): stamp for at, stamp in found.items()} for prefix, found in here.items()}
    )
    valid = (step, step - 1) if "gradient" in prefixes else (step,)
    newest, sources = dict[int, int](), dict[int, int]()
    for layer in _trained(setup):
        stamps = [each["layer"].get(str(layer)) for each in said]
        newest[layer] = max(stamp for stamp in stamps if stamp in valid)
        owner = relay.owners[layer]
        sources[layer] = owner if stamps[owner] == newest[layer] else stamps.index(newest[layer])
    if is_checked:
        _check_layers(setup, folder, [layer for layer, source in sources.items() if source == group.rank])
    gone = list[Path]()
    for layer, source in sources.items():
        if source == relay.owners[layer]:
            continue
        for prefix in prefixes:
            if prefix == "gradient" and newest[layer] == step:
                continue
            path = layer_path(folder / prefix, layer)
            if group.rank == source:
                send_file(group, relay.owners[layer], path)
                gone.append(path)
            elif group.rank == relay.owners[layer]:
                keep_folder(path.parent)
                moved += receive_file(group, source, path)
    group.gather("layers moved", {})
    if "gradient" in prefixes or not setup.recipe.mirror:  # else it is the mirror
        for path in gone:  # not before: they are on the other disk now, whatever happens
            remove(path)
    return moved


def _check_layers(setup: TrainSetup, folder: Path, layers: Sequence[int]) -> None:
    """Compare files with their digests; goes on when every process has done so.

    Raises:
        DataError: one is damaged; names it.
    """
    assert setup.whole is not None
    for layer in layers:
        path = layer_path(folder / "layer", layer)
        if damage := stored_form(path, setup.whole.trained[layer]).damage(path):
            raise DataError(
                f"{path} on {platform.node()} is damaged: {damage[0]}; the run would go back to it, for a disk is "
                "lost. Put it back from a copy"
            )
    setup.relay.group.gather("layers checked", {})


def _missing(group: Group, run: Run, folder: Path, step: int, layers: Sequence[int]) -> str:
    """Return the message about layers that are on no machine that takes part, and the machines that had them."""
    files = ", ".join(f"{folder.name}/*-{layer:03d}.*" for layer in layers)
    return (
        f"on none of these machines at step {step}: {_whose(group, run, layers)}. Start the run on all that have "
        f"trained it, or copy the files ({files}) from there to one of these; if that disk is lost, begin the run again"
    )


def _whose(group: Group, run: Run, layers: Sequence[int]) -> str:
    """Name layers by the machines that had them."""
    noted = group.gather("owners", {"of": {str(layer): owner_of(run, layer) for layer in layers}})
    owners = dict[str, list[str]]()
    for layer in layers:
        name = next((each["of"][str(layer)] for each in noted if each["of"][str(layer)]), "a machine that is not known")
        owners.setdefault(name, []).append(str(layer))
    return "; ".join(f"layer{'s' if len(own) > 1 else ''} {', '.join(own)} of {name}" for name, own in owners.items())


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
