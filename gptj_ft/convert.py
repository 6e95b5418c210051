"""Convert a checkpoint into a model folder, layer by layer, and prove that nothing was lost."""

from __future__ import annotations

import itertools
import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from gptj_ft.errors import DataError, ResourceError
from gptj_ft.families import Architecture, read_architecture
from gptj_ft.formats.huggingface import Checkpoint, check, layer_tensors, open_checkpoint, write_model
from gptj_ft.formats.writing import TUNING

DtypeChoice = Literal["keep", "fp32", "bf16", "fp16"]
DTYPES: dict[DtypeChoice, torch.dtype | None] = {
    "keep": None,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
COMPANION_BYTES = 16 << 20  # tokenizer, configs, headers: more than GPT-J's take


@dataclass(frozen=True)
class ConvertReport:
    """What `convert` wrote.

    Attributes:
        tensors: how many.
        parameters: numbers in them.
        bytes: their size as stored.
        dtype: the stored type, or ``mixed``.
        dropped: names of the source's tensors that a model does not need (masks of old files).
        seconds: reading, writing and comparing together.
    """

    tensors: int
    parameters: int
    bytes: int
    dtype: str
    dropped: tuple[str, ...]
    seconds: float


def convert(
    source: Path,
    target: Path,
    dtype: DtypeChoice = "keep",
    progress: Callable[[int, int], None] | None = None,
) -> ConvertReport:
    """Write a source checkpoint as a model folder; memory use is about one layer.

    Every tensor of the result is compared with its source, bit for bit after the change of type, before the folder
    appears under its name.

    Args:
        source: a Hugging Face model folder with safetensors or ``.bin`` weights.
        target: the folder to write; it must not exist.
        dtype: the type to store; ``keep`` leaves each tensor as it is.
        progress: called with steps done and steps in all; each tensor is two, written and compared.

    Raises:
        UsageError: no model in the source, or the target exists or cannot be written.
        DataError: the source is damaged or does not fit its config, a value does not fit the type, or the result
            differs from the source.
        ResourceError: not enough space on the disk.
    """
    start = time.monotonic()
    architecture = read_architecture(source)
    stored = DTYPES[dtype]
    with open_checkpoint(source) as checkpoint:
        dropped = check(architecture, checkpoint)
        kept = [name for name in checkpoint.names if name not in set(dropped)]
        num_bytes = sum(_numel(checkpoint, name) * (stored or checkpoint.dtype(name)).itemsize for name in kept)
        _check_space(target, num_bytes)
        steps = itertools.count(1)

        def step() -> None:
            if progress is not None:
                progress(next(steps), 2 * len(kept))

        def layers() -> Iterator[dict[str, Tensor]]:
            for index, layer in enumerate(architecture.layers()):
                yield _read_layer(architecture, checkpoint, index, stored)
                for _ in layer.state_dict():
                    step()

        def verify(folder: Path) -> None:
            compare(architecture, checkpoint, folder, stored, step)

        write_model(target, architecture, layers(), dtype=stored, source=source, extra=_tuning(source), verify=verify)
        types = {stored or checkpoint.dtype(name) for name in kept}
        return ConvertReport(
            tensors=len(kept),
            parameters=sum(_numel(checkpoint, name) for name in kept),
            bytes=num_bytes,
            dtype=str(types.pop()).removeprefix("torch.") if len(types) == 1 else "mixed",
            dropped=tuple(dropped),
            seconds=time.monotonic() - start,
        )


def compare(
    architecture: Architecture,
    source: Checkpoint,
    folder: Path,
    dtype: torch.dtype | None,
    step: Callable[[], None] = lambda: None,
) -> None:
    """Read a written model folder back and compare every tensor with its source, bit for bit.

    Args:
        architecture: of both.
        source: what was converted.
        folder: what was written.
        dtype: the type it was written in; ``None``: each tensor's own.
        step: called after each tensor.

    Raises:
        DataError: the first tensor that differs, or one that is missing or too many.
    """
    with open_checkpoint(folder) as written:
        check(architecture, written)
        for name in written.names:
            expected = source.read(name)
            expected = expected.to(dtype or expected.dtype)
            found = written.read(name)
            # As bytes, for a NaN does not equal itself.
            if found.dtype != expected.dtype or not torch.equal(_bytes(found), _bytes(expected)):
                raise DataError(f"{name} read back from the disk differs from {source.folder}: is the disk faulty?")
            step()


def _read_layer(
    architecture: Architecture, checkpoint: Checkpoint, index: int, dtype: torch.dtype | None
) -> dict[str, Tensor]:
    tensors = layer_tensors(architecture, checkpoint, index)
    if dtype is torch.float16:
        for name, tensor in tensors.items():
            largest = max(abs(float(extreme)) for extreme in tensor.aminmax())
            if torch.finfo(dtype).max < largest < float("inf"):
                where = f"{checkpoint.folder}: layer {index}: {name}"
                raise DataError(f"{where} holds {largest:.6g}, too large for fp16; use bf16 or fp32")
    return tensors


def _check_space(target: Path, num_bytes: int) -> None:
    there = next(folder for folder in (target, *target.absolute().parents) if folder.is_dir())
    free, needed = shutil.disk_usage(there).free, num_bytes + COMPANION_BYTES
    if free < needed:
        raise ResourceError(
            f"{target} needs {needed / 1e9:.1f} GB, but {there} has {free / 1e9:.1f} GB free; "
            "name a target on another disk, or convert to bf16"
        )


def _tuning(source: Path) -> dict[str, object] | None:
    """Return what a fine-tuned source says about its prompt and its training."""
    path = source / TUNING
    if not path.is_file():
        return None
    try:
        loaded: dict[str, object] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path}: not JSON: {error}") from error
    return loaded


def _numel(checkpoint: Checkpoint, name: str) -> int:
    return torch.Size(checkpoint.shape(name)).numel()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
