"""Saving the state of a run and bringing it back, layer by layer, so that neither needs memory for the model.

A checkpoint is ``checkpoints/step-000120/``: one state file per layer and, written last, ``manifest.json``. It is
made under a temporary name and renamed when everything in it is on the disk: a folder of that name is whole.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gptj_ft.errors import DataError, ResourceError
from gptj_ft.run import Run, write_json
from gptj_ft.stores import Kind
from gptj_ft.stores.statefile import StateFile, disk_error
from gptj_ft.streaming import LayerStack, Visit, stream

MANIFEST = "manifest.json"


def state_kinds(stack: LayerStack) -> tuple[Kind, ...]:
    """Return the kinds that a run cannot recompute: a low-precision weight follows from its master."""
    parameter: Kind = "master" if "master" in stack.dtypes else "weight"
    return (parameter, "exp_avg", "exp_avg_sq")


def save(run: Run, stack: LayerStack, step: int, facts: Mapping[str, Any]) -> Path:
    """Write a checkpoint and remove the ones before it. Pending updates must have been flushed.

    Args:
        run: whose checkpoint.
        stack: whose state, after ``step``.
        step: optimizer steps done.
        facts: what else `restore` must return.

    Raises:
        ResourceError: no space, or the disk fails; earlier checkpoints are still there.
    """
    final = run.checkpoints / f"step-{step:06d}"
    temporary = final.with_name(final.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        _write_layers(temporary, stack, step)
        write_json(temporary / MANIFEST, {"step": step, "num_layers": len(stack.layers), **facts})
        _fsync_folder(temporary)
        if final.exists():  # the same step, saved before
            shutil.rmtree(final)
        temporary.rename(final)
        _fsync_folder(run.checkpoints)
    except (OSError, ResourceError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise (disk_error(error, f"checkpoint {final}") if isinstance(error, OSError) else error) from error
    for old in checkpoints(run):
        if old != final:
            shutil.rmtree(old)
    return final


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
        path = _layer_file(folder, layer)
        if form.check(path) != step:
            raise DataError(f"{path} is not of step {step}")
    everything: tuple[Kind, ...] = tuple(dict.fromkeys(("weight", *kinds)))
    for loaded in stream(stack, [Visit(layer, (), everything) for layer in range(len(stack.layers))]):
        descriptor = os.open(_layer_file(folder, loaded.index), os.O_RDONLY)
        try:
            for kind in kinds:
                target = loaded.tensors[kind]
                staging = target if target.device.type == "cpu" else target.cpu()
                forms[loaded.index].read(descriptor, kind, staging)
                if staging is not target:
                    target.copy_(staging)
        finally:
            os.close(descriptor)
        if "weight" not in kinds:
            loaded.tensors["weight"].copy_(loaded.tensors["master"])
        loaded.write(everything)
        loaded.commit(everything, step)
    stack.drain()


def _write_layers(folder: Path, stack: LayerStack, step: int) -> None:
    kinds = state_kinds(stack)
    forms = _forms(stack, kinds)
    for loaded in stream(stack, [Visit(layer, kinds) for layer in range(len(stack.layers))]):
        descriptor = os.open(_layer_file(folder, loaded.index), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            for kind in kinds:
                forms[loaded.index].write(descriptor, kind, loaded.tensors[kind].cpu())
            forms[loaded.index].write_header(descriptor, step)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _forms(stack: LayerStack, kinds: tuple[Kind, ...]) -> list[StateFile]:
    return [StateFile(layout, {kind: stack.dtypes[kind] for kind in kinds}) for layout in stack.layouts]


def _layer_file(folder: Path, layer: int) -> Path:
    return folder / f"layer-{layer:03d}.safetensors"


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
