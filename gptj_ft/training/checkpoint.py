"""Save and restore the state of a run, without memory for the model, and so that no crash loses a step.

A run whose whole state is on disk needs no checkpoints: its state folder is one, at any instant. Which of the two a
run goes on from, commit or newest checkpoint, is noted in its ``run.json`` once there is one; so what a kill leaves
before anything was saved, which is scratch, differs from a run of which a file was lost, which is left as it is.

1.  Step t+1 has written every gradient, each stamped t+1; then ``commit.json`` is replaced: step t+1, with the update
    that turns the gradients into weights. That is the commit of step t+1.
2.  The updates follow as a redo: a layer's new state is a new file, stamped t+1, renamed over the old. No gradient of
    step t+2 replaces one of t+1 before every layer has got there.

After a crash, layers stamped t are updated from their stored gradients, layers stamped t+1 are done, and gradients of a
step without its commit are of no interest.

``checkpoints/step-000120/`` has the same file for each layer and, written last, ``manifest.json``. It is made under a
temporary name and renamed when everything in it is on the disk: a folder of that name is whole. A run on disk makes it
of hard links, for a layer's file is never changed, only replaced: that takes no time, and space only as the run moves
on. Which checkpoints are made and kept is decided in `retention`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from gptj_ft.checkpoints.weight_file import open_shard
from gptj_ft.config.run_folder import COMMIT, MANIFEST, Run
from gptj_ft.errors import DataError, ResourceError
from gptj_ft.models.layout import Kind, Layout
from gptj_ft.planning.step_replay import state_kinds
from gptj_ft.streaming.adamw import Update
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.streaming.stores.state_file import Digests, StateFile, layer_path
from gptj_ft.system.digests import write_sealed
from gptj_ft.system.direct_io import RESUME, open_direct, sync
from gptj_ft.system.files import (
    create_folder,
    discard,
    disk_error,
    doomed_name,
    keep_folder,
    link_or_copy,
    remove_folder,
    sync_path,
)
from gptj_ft.system.group import Group
from gptj_ft.system.memory import allocate
from gptj_ft.training.run_state import RunState


def commit(run: Run, state: RunState, update: Update | None) -> None:
    """Make a step of a run on disk permanent, once everything it wrote is there (see `LayerStore.then`).

    Args:
        run: run whose state folder is committed.
        state: step, losses, digests.
        update: pending update of the step's gradients; ``None`` at the start.

    Raises:
        ResourceError: the disk is full or fails; the commit before this one stands.
    """
    if run.writes:
        write_sealed(run.state / COMMIT, {**state.to_dict(), "update": asdict(update) if update else None})


def commit_together(run: Run, group: Group, state: RunState, update: Update | None) -> None:
    """Make a step permanent that several processes have computed, when the gradients of all are on the disk.

    No process goes on to write what is of this step before its commit is there. Args and errors: as `commit`.

    Raises:
        PeerFailed: another process has failed; then the commit before this one may be the last.
    """
    group.gather("prepared", {"step": state.step})
    commit(run, state, update)
    group.gather("committed", {"step": state.step})


def layers_behind(run: Run, offloaded: OffloadedModel, step: int) -> set[int]:
    """Return the layers that the update of a committed step had not reached.

    Raises:
        DataError: a file is missing, cut short or of a step that it cannot be of.
    """
    behind, gradients = set(), _forms(offloaded, ("grad",))
    for layer, form in _forms(offloaded, state_kinds(offloaded.dtypes)).items():
        path = layer_path(run.state / "layer", layer)
        stamp, _ = form.check(path)
        if stamp == step - 1:
            behind.add(layer)
            gradient = layer_path(run.state / "gradient", layer)
            if gradients[layer].check(gradient)[0] != step:
                raise DataError(f"{gradient} is not of step {step}, which {path} needs")
        elif stamp != step:
            raise DataError(f"{path} is of step {stamp}, the run is at step {step}")
    return behind


def save_checkpoint(run: Run, group: Group, offloaded: OffloadedModel, state: RunState) -> None:
    """Write a checkpoint. Pending updates must have been flushed.

    Args:
        run: run that gets the checkpoint.
        group: processes that share its layers.
        offloaded: model with its optimizer state.
        state: step, losses, digests.

    Raises:
        ResourceError: no space, or the disk fails; earlier checkpoints are still there.
    """
    if not _is_there(run, group, state):
        with _new_checkpoint(run, group, state) as folder:
            _write_layers(folder, offloaded, state.step)
    run.note_saved(run.checkpoint(state.step) / MANIFEST)


def link(run: Run, group: Group, offloaded: OffloadedModel, state: RunState) -> None:
    """Make a checkpoint of a run on disk, of links to its state. Pending updates must have been flushed.

    Args and errors: as `save`.
    """
    if not _is_there(run, group, state):
        with _new_checkpoint(run, group, state) as folder:
            are_links = _link_layers(run.state, folder, offloaded)
        if not are_links:
            run.log(f"{run.folder} is on a file system without hard links: its checkpoints are copies")


def adopt(run: Run, group: Group, offloaded: OffloadedModel, step: int) -> None:
    """Make a checkpoint the state of a run on disk, of links to it; the state folder must be empty.

    Raises:
        ResourceError, DataError: as `save` and `Run.manifest`.
    """
    folder = run.checkpoint(step)
    state = RunState.of(run.manifest(step))
    try:
        _link_layers(folder, run.state, offloaded)
        sync_path(run.state)
    except OSError as error:
        raise disk_error(error, run.state, RESUME) from error
    commit_together(run, group, state, None)


def turn_into_checkpoint(run: Run, state: RunState) -> None:
    """Make the state folder of a run on disk a checkpoint, for a session that keeps the state elsewhere.

    Every layer must have been updated.
    """
    if not run.writes:
        return
    for path in {*run.state.glob("gradient-*"), *run.state.glob("*.new")}:
        path.unlink()
    final = run.checkpoint(state.step)
    run.note_saved(final / MANIFEST)  # before the commit goes
    if (final / MANIFEST).is_file():  # of the same files, by links
        remove_folder(run.state)
        return
    keep_folder(run.checkpoints)
    _publish(run.state, final, state)


def restore(folder: Path, offloaded: OffloadedModel, step: int) -> None:
    """Fill the stores from a checkpoint.

    Raises:
        DataError: a file is missing, damaged, of another step, or of another model.
    """
    kinds = state_kinds(offloaded.dtypes)
    forms = _forms(offloaded, kinds)
    for layer, form in forms.items():
        path = layer_path(folder / "layer", layer)
        if form.check(path)[0] != step:
            raise DataError(f"{path} is not of step {step}")
    for layer, form in forms.items():
        path = layer_path(folder / "layer", layer)
        _, digests = form.check(path)
        descriptor = open_direct(path, os.O_RDONLY)
        try:
            for kind in kinds:
                offloaded.write_chunks(kind, layer, partial(_read, form, descriptor, kind, digests))
        except DataError as error:
            raise DataError(f"{path}: {error}") from error
        finally:
            os.close(descriptor)
        offloaded.transfers.commit(kinds, layer, step)
    offloaded.drain()
    offloaded.free_filling_pools()


def _read(form: StateFile, descriptor: int, kind: Kind, digests: Digests, start: int, part: Tensor) -> None:
    host = _host_memory(part)
    form.read(descriptor, kind, host, start, digests)
    if host is not part:
        part.copy_(host)


def parameters(folder: Path, layouts: Sequence[Layout]) -> Iterator[dict[str, Tensor]]:
    """Yield each layer's trained parameters, fp32, from a checkpoint's folder; of a layer without any, nothing.

    Raises:
        DataError: a file is missing or damaged.
    """
    for layer, layout in enumerate(layouts):
        if not layout.numel:
            yield {}
            continue
        shard = open_shard(layer_path(folder / "layer", layer))
        yield layout.views(shard.read("master" if "master" in shard.entries else "weight"))


def _host_memory(part: Tensor) -> Tensor:
    """Return memory for a part that files can be read into and written from, past the page cache: its own on a CPU."""
    return part if part.device.type == "cpu" else allocate(len(part), part.dtype, torch.device("cpu"))


def _write_layers(folder: Path, offloaded: OffloadedModel, step: int) -> None:
    kinds = state_kinds(offloaded.dtypes)
    for layer, form in _forms(offloaded, kinds).items():
        path = layer_path(folder / "layer", layer)
        digests = form.no_digests()
        descriptor = open_direct(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            for kind in kinds:
                for start, part in offloaded.read_chunks(kind, layer):
                    host = _host_memory(part)
                    form.write(descriptor, kind, host if host is part else host.copy_(part), start, digests)
            form.write_header(descriptor, step, digests)
            sync(descriptor, path)
        finally:
            os.close(descriptor)


def _link_layers(source: Path, target: Path, offloaded: OffloadedModel) -> bool:
    """Give each layer's file a second name; tell whether all are links, not copies."""
    names = [layer_path(source / "layer", layer).name for layer in offloaded.trained]
    are_links = [link_or_copy(source / name, target / name) for name in names]
    return all(are_links)


def _is_there(run: Run, group: Group, state: RunState) -> bool:
    """Tell whether a step has its checkpoint already; then only its manifest changes: it has become the best."""
    manifest = run.checkpoint(state.step) / MANIFEST
    said = group.gather("has checkpoint", {"is_there": manifest.is_file()})
    is_there = all(each["is_there"] for each in said)
    if run.writes and is_there:
        write_sealed(manifest, state.to_dict())
    elif run.writes:
        remove_folder(manifest.parent)  # there was a kill when it was published on some machines, not on all
    return is_there


@contextmanager
def _new_checkpoint(run: Run, group: Group, state: RunState) -> Iterator[Path]:
    """Yield a folder to fill, each process with its layers; it then becomes the checkpoint."""
    final = run.checkpoint(state.step)
    temporary = doomed_name(final)
    try:
        if run.writes:
            keep_folder(final.parent)
            create_folder(temporary)
        group.barrier("checkpoint begun")
        yield temporary
        group.barrier("checkpoint written")
        if run.writes:
            _publish(temporary, final, state)
        group.barrier("checkpoint published")
    except (OSError, ResourceError) as error:
        if run.writes:
            discard(temporary)
        raise (disk_error(error, f"checkpoint {final}", RESUME) if isinstance(error, OSError) else error) from error


def _publish(temporary: Path, final: Path, state: RunState) -> None:
    """Complete a checkpoint's folder and give it its name."""
    write_sealed(temporary / MANIFEST, state.to_dict())
    temporary.rename(final)
    for folder in (final.parent, final.parent.parent):
        sync_path(folder)


def _forms(offloaded: OffloadedModel, kinds: tuple[Kind, ...]) -> dict[int, StateFile]:
    """Return the form of each file, by the number of its layer; layers that are not trained have none."""
    dtypes = {kind: offloaded.dtypes[kind] for kind in kinds}
    return {
        layer: StateFile(offloaded.layouts[layer], dtypes, offloaded.budget.chunk_numel) for layer in offloaded.trained
    }
