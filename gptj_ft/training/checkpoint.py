"""Save and restore the state of a run layer by layer, so that no crash loses a step.

A run whose whole state is on disk needs no checkpoints: its state folder is one at any time. This is its commit
protocol:

1.  Step t+1 writes every gradient, stamped t+1. Then it replaces ``commit.json``, which holds step t+1 and the update
    that turns the gradients into weights. Now step t+1 is committed.
2.  The update is a redo log: each layer's new state is a new file, stamped t+1, renamed over the old one. No gradient
    of step t+2 replaces a gradient of t+1 before every layer is updated.

After a crash, layers stamped t are updated again from their stored gradients, layers stamped t+1 are done, and
gradients of an uncommitted step are ignored. Where a step trains only some layers (`models.layer_sampling`), it writes
their files only: the stamp of a layer is the last step that trained it, `EveryLayer.last_step`.

Other runs save checkpoints. ``checkpoints/step-000120/`` has one file per layer and, written last, ``manifest.json``.
The folder gets its name when all its files are on disk, so a folder with that name is whole. A run on disk makes it of
hard links: a layer's file is never changed, only replaced. `retention` decides which checkpoints are made and kept.

``run.json`` records whether the newest state is a commit or a checkpoint. So a lost file (an error) differs from a run
that was killed before it saved anything (a fresh start).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptj_ft.checkpoints.weight_file import Shard, open_shard
from gptj_ft.config.run_folder import COMMIT, MANIFEST, Run
from gptj_ft.errors import DataError, ResourceError
from gptj_ft.models.layer_sampling import EveryLayer
from gptj_ft.models.layout import Kind, Layout
from gptj_ft.planning.step_replay import state_kinds
from gptj_ft.streaming.adamw import Update
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.streaming.split_master import LOW_BITS, join
from gptj_ft.streaming.stores.base import CHUNK_NUMEL, chunks
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
    """Commit a step of a run on disk; call it when the step's gradients are on disk (see `LayerStore.then`).

    A failure leaves the previous commit in place.

    Args:
        update: turns the step's gradients into weights; ``None`` at the start.
    """
    if run.writes:
        write_sealed(run.state / COMMIT, {**state.to_dict(), "update": asdict(update) if update else None})


def commit_together(run: Run, group: Group, state: RunState, update: Update | None) -> None:
    """Commit a step when all processes of the run have their gradients on disk (two-phase commit)."""
    group.gather("prepared", {"step": state.step})
    # From here on, a crash on any machine can redo the step: all its gradients are stored.
    commit(run, state, update)
    # No process may overwrite its part of the old state before the commit is on disk.
    group.gather("committed", {"step": state.step})


def layers_behind(run: Run, offloaded: OffloadedModel, step: int) -> set[int]:
    """Return the layers that the update of the committed step has not reached."""
    behind, gradients, last_step = set(), _forms(offloaded, ("grad",)), offloaded.choice.last_step
    for layer, form in _forms(offloaded, state_kinds(offloaded.dtypes)).items():
        path = layer_path(run.state / "layer", layer)
        stamp, _ = form.check(path)
        if offloaded.choice.is_behind(layer, step, stamp):
            # The crash came before this layer's update: its gradient must be that of the committed step, to redo the
            # update.
            behind.add(layer)
            gradient = layer_path(run.state / "gradient", layer)
            if gradients[layer].check(gradient)[0] != step:
                raise DataError(f"{gradient} is not of step {step}, which {path} needs")
        elif stamp != last_step(layer, step):
            raise DataError(wrong_stamp(offloaded.choice, path, layer, step, stamp))
    return behind


def wrong_stamp(choice: EveryLayer, path: Path, layer: int, step: int, stamp: int | None) -> str:
    """Describe a layer's file whose stamp does not match the step of the run."""
    expected = choice.last_step(layer, step)
    needed = f", which last trained this layer in step {expected}" if expected != step else ""
    return f"{path} is of step {stamp}, the run is at step {step}{needed}"


def save_checkpoint(
    run: Run, group: Group, offloaded: OffloadedModel, state: RunState, is_regular: bool = False
) -> None:
    """Write a checkpoint of a flushed model; a failure leaves earlier checkpoints in place.

    Args:
        group: processes that share the layers.
        is_regular: whether it is one of those made every ``save_every`` steps.
    """
    if not _exists(run, group, state, is_regular):
        with _new_checkpoint(run, group, state, is_regular) as folder:
            _write_layers(folder, offloaded, state.step)
    run.note_saved(run.checkpoint(state.step) / MANIFEST)


def link(run: Run, group: Group, offloaded: OffloadedModel, state: RunState, is_regular: bool = False) -> None:
    """Make a checkpoint of a flushed run on disk from hard links to its state, see `save_checkpoint`."""
    if not _exists(run, group, state, is_regular):
        with _new_checkpoint(run, group, state, is_regular) as folder:
            are_links = _link_layers(run.state, folder, offloaded)
        if not are_links:
            run.log(f"{run.folder} is on a file system without hard links: its checkpoints are copies")


def adopt(run: Run, group: Group, offloaded: OffloadedModel, step: int) -> None:
    """Fill the empty state folder of a run on disk with hard links to a checkpoint, and commit it."""
    folder = run.checkpoint(step)
    state = RunState.of(run.manifest(step))
    try:
        # Links before the commit: a kill in between leaves scratch that the next start discards.
        _link_layers(folder, run.state, offloaded)
        sync_path(run.state)
    except OSError as error:
        raise disk_error(error, run.state, RESUME) from error
    commit_together(run, group, state, None)


def turn_into_checkpoint(run: Run, state: RunState) -> None:
    """Turn the state folder of a flushed run on disk into a checkpoint, for a session with its state elsewhere."""
    if not run.writes:
        return
    # Gradients are spent, and ``*.new`` files are incomplete: a checkpoint has neither.
    for path in {*run.state.glob("gradient-*"), *run.state.glob("*.new")}:
        path.unlink()
    final = run.checkpoint(state.step)
    run.note_saved(final / MANIFEST)  # before the commit disappears, so that a kill in between loses nothing
    if (final / MANIFEST).is_file():  # a checkpoint of the same files, by hard links
        remove_folder(run.state)
        return
    keep_folder(run.checkpoints)
    _publish(run.state, final, state.to_dict())


def restore(folder: Path, offloaded: OffloadedModel, step: int) -> None:
    """Fill the stores from a checkpoint.

    Raises:
        DataError: a file is missing, damaged, or belongs to another step or model.
    """
    kinds = state_kinds(offloaded.dtypes)
    forms = _forms(offloaded, kinds)
    # Check every header before the first write: a bad checkpoint must not leave stores half filled.
    for layer, form in forms.items():
        path = layer_path(folder / "layer", layer)
        if form.check(path)[0] != offloaded.choice.last_step(layer, step):
            raise DataError(f"{path} is not of step {offloaded.choice.last_step(layer, step)}")
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
        offloaded.transfers.commit(kinds, layer, offloaded.choice.last_step(layer, step))
    offloaded.drain()
    offloaded.free_filling_pools()


def _read(form: StateFile, descriptor: int, kind: Kind, digests: Digests, start: int, part: Tensor) -> None:
    host = _host_memory(part)
    form.read(descriptor, kind, host, start, digests)
    if host is not part:
        part.copy_(host)


def parameters(folder: Path, layouts: Sequence[Layout]) -> Iterator[dict[str, Tensor]]:
    """Yield each layer's trained parameters in fp32 from a checkpoint; an empty dict for a frozen layer."""
    for layer, layout in enumerate(layouts):
        if not layout.numel:
            yield {}
            continue
        yield layout.views(_master_weights(open_shard(layer_path(folder / "layer", layer))))


def _master_weights(shard: Shard) -> Tensor:
    """Read the fp32 parameters of a layer, whatever their layout."""
    if LOW_BITS not in shard.entries:
        return shard.read("master" if "master" in shard.entries else "weight")
    master = torch.empty(shard.entries["weight"].shape)
    for span in chunks(len(master), CHUNK_NUMEL):
        at = span.start, span.stop
        join(shard.read("weight", *at), shard.read(LOW_BITS, *at), master[span])
    return master


def _host_memory(part: Tensor) -> Tensor:
    """Return page-aligned host memory for direct I/O of a part; on a CPU, the part itself."""
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
            # Last: without a header the file is recognized as incomplete.
            form.write_header(descriptor, offloaded.choice.last_step(layer, step), digests)
            sync(descriptor, path)
        finally:
            os.close(descriptor)


def _link_layers(source: Path, target: Path, offloaded: OffloadedModel) -> bool:
    """Link each layer's file into another folder; return False if some had to be copied."""
    names = [layer_path(source / "layer", layer).name for layer in offloaded.trained]
    are_links = [link_or_copy(source / name, target / name) for name in names]
    return all(are_links)


def _exists(run: Run, group: Group, state: RunState, is_regular: bool = False) -> bool:
    """Tell whether the checkpoint of a step exists; if so, update its manifest, since it may now be the best."""
    manifest = run.checkpoint(state.step) / MANIFEST
    facts = group.gather("has checkpoint", {"is_there": manifest.is_file()})
    exists = all(each["is_there"] for each in facts)
    if run.writes and exists:
        write_sealed(manifest, _manifest(state, is_regular))
    elif run.writes:
        remove_folder(manifest.parent)  # a kill can leave it published on some machines only
    return exists


@contextmanager
def _new_checkpoint(run: Run, group: Group, state: RunState, is_regular: bool = False) -> Iterator[Path]:
    """Yield a folder for the layers of all processes; publish it as the checkpoint at the end."""
    final = run.checkpoint(state.step)
    temporary = doomed_name(final)
    try:
        if run.writes:
            keep_folder(final.parent)
            create_folder(temporary)
        group.barrier("checkpoint begun")  # the folder exists: all processes may write into it
        yield temporary
        group.barrier("checkpoint written")  # all layers are on disk: it may be published
        if run.writes:
            _publish(temporary, final, _manifest(state, is_regular))
        group.barrier("checkpoint published")
    except (OSError, ResourceError) as error:
        if run.writes:
            discard(temporary)
        raise (disk_error(error, f"checkpoint {final}", RESUME) if isinstance(error, OSError) else error) from error


def _publish(temporary: Path, final: Path, manifest: Mapping[str, Any]) -> None:
    """Write the manifest and rename the folder; the name is durable when this returns."""
    # Manifest, rename, sync, in this order: after a power cut, a folder with the final name is whole.
    write_sealed(temporary / MANIFEST, manifest)
    temporary.rename(final)
    # The folder of checkpoints may be new, so its own name must reach the disk, too.
    for folder in (final.parent, final.parent.parent):
        sync_path(folder)


def _manifest(state: RunState, is_regular: bool) -> dict[str, Any]:
    """Return the values of a manifest; the mark is written only if set: earlier versions know no such key."""
    return {**state.to_dict(), **({"is_regular": True} if is_regular else {})}


def _forms(offloaded: OffloadedModel, kinds: tuple[Kind, ...]) -> dict[int, StateFile]:
    """Return the file format of each trained layer."""
    dtypes = {kind: offloaded.dtypes[kind] for kind in kinds}
    return {
        layer: StateFile(offloaded.layouts[layer], dtypes, offloaded.budget.chunk_numel) for layer in offloaded.trained
    }
