"""Saving the state of a run and bringing it back: without memory for the model, and so that no crash loses a step.

A run whose whole state is on disk needs no checkpoints: its state folder is one, at any instant.

1.  Step t+1 has written every gradient, each stamped t+1; then ``commit.json`` is replaced: step t+1, with the update
    that turns the gradients into weights. That is the commit of step t+1.
2.  The updates follow as a redo: a layer's new state is a new file, stamped t+1, renamed over the old. No gradient of
    step t+2 replaces one of t+1 before every layer has got there.

After a crash, layers stamped t are updated from their stored gradients, layers stamped t+1 are done, and gradients of a
step without its commit are of no interest.

Other runs have ``checkpoints/step-000120/``: the same file for each layer and, written last, ``manifest.json``. It is
made under a temporary name and renamed when everything in it is on the disk: a folder of that name is whole.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptj_ft.errors import DataError, ResourceError
from gptj_ft.optimizer import Update
from gptj_ft.run import Run, read_json, write_json
from gptj_ft.stack import LayerStack
from gptj_ft.stores import Kind
from gptj_ft.stores.blockio import disk_error, open_direct, sync, sync_folder
from gptj_ft.stores.statefile import Digests, StateFile, layer_path

MANIFEST = "manifest.json"
COMMIT = "commit.json"


def commit(run: Run, step: int, update: Update | None, facts: Mapping[str, Any]) -> None:
    """Make a step of a run on disk permanent, once everything it wrote is there (see `LayerStore.then`).

    Args:
        run: whose state folder.
        step: optimizer steps done.
        update: what the step's gradients still have to do; ``None`` at the start.
        facts: what else resuming needs.

    Raises:
        ResourceError: the disk is full or fails; the commit before this one stands.
    """
    write_json(run.state / COMMIT, {"step": step, "update": asdict(update) if update else None, "facts": dict(facts)})
    sync_folder(run.state)


def committed(run: Run) -> dict[str, Any] | None:
    """Return the last commit of a run on disk; ``None`` if it has none."""
    return read_json(run.state / COMMIT) if (run.state / COMMIT).is_file() else None


def steps_done(run: Run) -> int:
    """Return the optimizer steps that resuming a run would not do again."""
    saved = checkpoints(run)
    last = committed(run) or (read_json(saved[-1] / MANIFEST) if saved else {"step": 0})
    return int(last["step"])


def layers_behind(run: Run, stack: LayerStack, step: int) -> set[int]:
    """Return the layers that the update of a committed step had not reached.

    Raises:
        DataError: a file is missing, cut short or of a step that it cannot be of.
    """
    behind, gradients = set(), _forms(stack, ("grad",))
    for layer, form in enumerate(_forms(stack, state_kinds(stack))):
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


def state_kinds(stack: LayerStack) -> tuple[Kind, ...]:
    """Return the kinds that make up a layer's state."""
    return tuple(kind for kind in stack.dtypes if kind != "grad")


def save(run: Run, stack: LayerStack, step: int, facts: Mapping[str, Any]) -> None:
    """Write a checkpoint and remove the ones before it. Pending updates must have been flushed.

    Args:
        run: whose checkpoint.
        stack: whose state, after ``step``.
        step: optimizer steps done.
        facts: what else resuming needs.

    Raises:
        ResourceError: no space, or the disk fails; earlier checkpoints are still there.
    """
    final = _folder(run, step)
    if (final / MANIFEST).is_file():
        return  # the same step, saved before
    temporary = final.with_name(final.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        _write_layers(temporary, stack, step)
        _publish(temporary, final, step, facts)
    except (OSError, ResourceError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise (disk_error(error, f"checkpoint {final}") if isinstance(error, OSError) else error) from error
    for old in checkpoints(run):
        if old != final:
            shutil.rmtree(old)


def turn_into_checkpoint(run: Run, step: int, facts: Mapping[str, Any]) -> None:
    """Make the state folder of a run on disk a checkpoint, for a session that keeps the state elsewhere.

    Every layer must have been updated.
    """
    for path in {*run.state.glob("gradient-*"), *run.state.glob("*.new")}:
        path.unlink()
    run.checkpoints.mkdir(exist_ok=True)
    _publish(run.state, _folder(run, step), step, facts)


def checkpoints(run: Run) -> list[Path]:
    """Return the whole checkpoints of a run, oldest first."""
    return sorted(path.parent for path in run.checkpoints.glob(f"step-*/{MANIFEST}") if path.parent.suffix != ".tmp")


def restore(folder: Path, stack: LayerStack, step: int) -> None:
    """Fill the stores from a checkpoint.

    Raises:
        DataError: a file is missing, damaged, of another step, or of another model.
    """
    kinds = state_kinds(stack)
    forms = _forms(stack, kinds)
    for layer, form in enumerate(forms):
        path = layer_path(folder / "layer", layer)
        if form.check(path)[0] != step:
            raise DataError(f"{path} is not of step {step}")
    for layer, form in enumerate(forms):
        path = layer_path(folder / "layer", layer)
        _, digests = form.check(path)
        descriptor = open_direct(path, os.O_RDONLY)
        try:
            for kind in kinds:
                stack.write_parts(kind, layer, partial(_read, form, descriptor, kind, digests))
        except DataError as error:
            raise DataError(f"{path}: {error}") from error
        finally:
            os.close(descriptor)
        stack.commit(kinds, layer, step)
    stack.drain()


def _read(form: StateFile, descriptor: int, kind: Kind, digests: Digests, start: int, part: Tensor) -> None:
    staging = part if part.device.type == "cpu" else torch.empty_like(part, device="cpu")
    form.read(descriptor, kind, staging, start, digests)
    if staging is not part:
        part.copy_(staging)


def _write_layers(folder: Path, stack: LayerStack, step: int) -> None:
    kinds = state_kinds(stack)
    for layer, form in enumerate(_forms(stack, kinds)):
        path = layer_path(folder / "layer", layer)
        digests = form.no_digests()
        descriptor = open_direct(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            for kind in kinds:
                for start, part in stack.read_parts(kind, layer):
                    form.write(descriptor, kind, part.cpu(), start, digests)
            form.write_header(descriptor, step, digests)
            sync(descriptor, path)
        finally:
            os.close(descriptor)


def _publish(temporary: Path, final: Path, step: int, facts: Mapping[str, Any]) -> None:
    """Complete a checkpoint's folder and give it its name."""
    write_json(temporary / MANIFEST, {"step": step, "facts": dict(facts)})
    sync_folder(temporary)
    temporary.rename(final)
    sync_folder(final.parent)


def _folder(run: Run, step: int) -> Path:
    return run.checkpoints / f"step-{step:06d}"


def _forms(stack: LayerStack, kinds: tuple[Kind, ...]) -> list[StateFile]:
    dtypes = {kind: stack.dtypes[kind] for kind in kinds}
    return [StateFile(layout, dtypes, stack.room.part_numel) for layout in stack.layouts]
