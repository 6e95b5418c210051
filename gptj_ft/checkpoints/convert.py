"""Convert a checkpoint to another form, tensor by tensor, and verify the result."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any, Literal

import torch

import gptj_ft
from gptj_ft.checkpoints import optimizer_state as moments_of_model
from gptj_ft.checkpoints.adapter import MergedCheckpoint, open_adapter, with_head_of
from gptj_ft.checkpoints.metadata import check_base
from gptj_ft.checkpoints.model_folder import (
    DESCRIPTION,
    METADATA_FILE,
    Checkpoint,
    check_tensors,
    copy_files,
    copy_origin,
    heads_left_out,
    write_companions,
    write_json_file,
)
from gptj_ft.checkpoints.open import FORMATS, files_of, open_source
from gptj_ft.checkpoints.optimizer_state import Moments
from gptj_ft.checkpoints.source import CheckpointSource, FormatName
from gptj_ft.checkpoints.transfer import TensorTransfer
from gptj_ft.checkpoints.weight_file import dtype_name
from gptj_ft.errors import DataError, ResourceError, UsageError
from gptj_ft.models.layout import Kind
from gptj_ft.system.atomic import atomic_folder
from gptj_ft.system.digests import read_json
from gptj_ft.system.dtypes import PRECISIONS
from gptj_ft.system.files import files_in, remove
from gptj_ft.system.machine import free_disk

DtypeChoice = Literal["keep", "fp32", "bf16", "fp16"]
OutputForm = Literal["folder", "huggingface", "mesh"]
UNPACKED = "unpacked"  # in the draft: an archive's content
COMPANION_BYTES = 16 << 20  # tokenizer, configs, headers: more than GPT-J's take


@dataclass(frozen=True)
class Conversion:
    """Request of a conversion.

    Attributes:
        format: format of the source; default ``None``: detected.
        config: file with the model's shape, where the source does not say it; default: none.
        to: format of the result: model folder (one shard per layer; default), Hugging Face's usual files, or
            mesh-transformer-jax's slim checkpoint.
        dtype: type to store; default ``keep``: each tensor's own.
        shard_bytes: size limit of Hugging Face's files; a model that fits into one is not sharded; default 5 GB.
        mesh_shards: number of mesh-transformer-jax's shards; default 8.
        tokenizer: folder whose tokenizer files are copied; default ``None``: the source's.
        verify: whether every tensor is read back and compared; default true.
        merge: folder of an adapter to merge in, whose metadata is kept; default: none.
        with_optimizer: whether the source's optimizer moments are converted, too, for a run that begins with them.
    """

    format: FormatName | None = None
    config: Path | None = None
    to: OutputForm = "folder"
    dtype: DtypeChoice = "keep"
    shard_bytes: int = 5 * 10**9
    mesh_shards: int = 8
    tokenizer: Path | None = None
    verify: bool = True
    merge: Path | None = None
    with_optimizer: bool = False


@dataclass(frozen=True)
class ConvertReport:
    """Result of a conversion.

    Attributes:
        tensors: number of tensors.
        parameters: number of parameters in them.
        bytes: size of the weights as stored, without moments.
        dtype: stored type, or ``mixed``.
        dropped: names of the source's tensors that a model does not need (masks of old files, heads of pre-training).
        left_out: names of those among them that are weights.
        missing: names of tensors that files of a pre-trained model may lack: a run that needs them begins with random
            ones.
        not_finite: names of tensors that hold NaN or infinity, which were carried over as they are.
        has_left_moments: whether optimizer moments of the source were left out.
        updates: number of updates that the converted moments have seen; ``None``: no moments were converted.
        is_verified: whether each tensor was read back and compared.
        seconds: duration of reading, writing and comparing.
    """

    tensors: int
    parameters: int
    bytes: int
    dtype: str
    dropped: tuple[str, ...]
    left_out: tuple[str, ...]
    missing: tuple[str, ...]
    not_finite: tuple[str, ...]
    has_left_moments: bool
    updates: int | None
    is_verified: bool
    seconds: float


def convert(
    source: Path,
    target: Path,
    conversion: Conversion = Conversion(),
    progress: Callable[[int, int], None] | None = None,
) -> ConvertReport:
    """Write a checkpoint in another form; memory use is about its largest tensor at most.

    Unless it is asked not to, every tensor of the result is compared with its source, bit for bit after the change of
    type, before the result appears under its name. After a kill or Ctrl-C the same call goes on where it was.

    Args:
        source: a checkpoint of any form that `open.open_source` reads.
        target: the folder to write; it must not exist.
        conversion: the request.
        progress: callback of bytes done and total bytes, written and compared; default: none.

    Raises:
        UsageError: no checkpoint in the source, or not the moments asked for; or the target exists or cannot be
            written.
        DataError: the source is damaged or does not fit its config, a value does not fit the type, or the result
            differs from the source.
        ResourceError: not enough space on the disk.
    """
    start = time.monotonic()
    with (
        atomic_folder(target, resume=_plan(source, conversion)) as draft,
        open_source(source, conversion.format, conversion.config, draft / UNPACKED) as opened,
    ):
        moments = _moments_of(opened, conversion)
        dropped = check_tensors(opened.architecture, opened.checkpoint)
        if conversion.merge is not None:
            architecture = with_head_of(conversion.merge, opened.architecture)
            adapter = open_adapter(conversion.merge, architecture)
            check_base(conversion.merge, architecture, opened.checkpoint)
            merged = MergedCheckpoint(opened.checkpoint, adapter)
            opened = replace(opened, architecture=replace(architecture, new=frozenset()), checkpoint=merged)
            dropped = check_tensors(opened.architecture, merged)
        work = _Work(opened, moments, target, conversion, progress)
        work.check_space(draft)
        work.write(draft)
        if conversion.verify:
            work.verify(draft)
        remove(draft / UNPACKED)
        return ConvertReport(
            tensors=len(work.weights.entries),
            parameters=sum(torch.Size(entry.shape).numel() for entry in work.weights.entries.values()),
            bytes=work.weights.bytes,
            dtype=dtype_name(work.weights.entries.values()),
            dropped=tuple(dropped),
            left_out=heads_left_out(opened.architecture, dropped),
            missing=tuple(sorted(opened.architecture.family.optional - work.weights.entries.keys()))
            if opened.architecture.task is None
            else (),
            not_finite=tuple(sorted(work.not_finite())),
            has_left_moments=opened.open_moments is not None and moments is None,
            updates=None if moments is None else moments.updates,
            is_verified=conversion.verify,
            seconds=time.monotonic() - start,
        )


class _Work:
    """Conversion under way."""

    def __init__(
        self,
        source: CheckpointSource,
        moments: Moments | None,
        target: Path,
        conversion: Conversion,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.source, self.target, self.conversion = source, target, conversion
        architecture = source.architecture
        self.weights = TensorTransfer(architecture, source.checkpoint, PRECISIONS.get(conversion.dtype), self._advance)
        self.updates = moments.updates if moments else 0
        self.moments: dict[Kind, TensorTransfer] = {}
        for kind, checkpoint in moments.checkpoints.items() if moments else ():
            check_tensors(architecture, checkpoint)
            self.moments[kind] = TensorTransfer(architecture, checkpoint, None, self._advance, kind == "exp_avg_sq")
        self.bytes = sum(copy.bytes for copy in (self.weights, *self.moments.values()))
        self._done, self._total = 0, self.bytes * (2 if conversion.verify else 1)
        self._progress = progress

    def check_space(self, draft: Path) -> None:
        """Check that the result fits on the disk, with what is there of it already."""
        written = sum(path.stat().st_size for path in files_in(draft) if UNPACKED not in path.parts)
        free, needed = free_disk(draft), self.bytes + COMPANION_BYTES - written
        if free < needed:
            raise ResourceError(
                f"{self.target} needs {needed / 1e9:.1f} GB, but {self.target.parent} has {free / 1e9:.1f} GB free; "
                "name a target on another disk, or convert to bf16"
            )

    def write(self, draft: Path) -> None:
        """Write all files."""
        source, kept, weights = self.source, self.conversion, self.weights
        if kept.to == "mesh":
            write = FORMATS["mesh"].write
            assert write is not None
            write(draft, source, weights, kept.mesh_shards)
        else:
            weights.write(draft, kept.shard_bytes if kept.to == "huggingface" else None)
        for kind, copy in self.moments.items():
            copy.write(draft / moments_of_model.FOLDER / kind)
        if self.moments:
            write_json_file(draft / moments_of_model.FOLDER / moments_of_model.STATE, {"updates": self.updates})
        stored = reduce(torch.promote_types, (entry.dtype for entry in weights.entries.values()))
        copy_origin(source.folder, draft)
        copy_files(source.folder, draft, DESCRIPTION)
        if (metadata := (kept.merge or source.folder) / METADATA_FILE).is_file():
            write_json_file(draft / METADATA_FILE, read_json(metadata))
        write_companions(draft, source.architecture, stored, kept.tokenizer or source.folder)

    def verify(self, draft: Path) -> None:
        """Compare each tensor that was written with its source."""
        name: FormatName = "mesh" if self.conversion.to == "mesh" else "huggingface"
        with open_source(draft, name, None, draft) as written:
            check_tensors(written.architecture, written.checkpoint)
            self._compare(self.weights, written.checkpoint)
        if self.moments:
            moments = moments_of_model.open_moments(draft)
            for kind, copy in self.moments.items():
                self._compare(copy, moments.checkpoints[kind])

    def not_finite(self) -> set[str]:
        """Return the names of what holds NaN or infinity."""
        moments = {f"{kind} of {name}" for kind, copy in self.moments.items() for name in copy.not_finite}
        return self.weights.not_finite | moments

    def _compare(self, copy: TensorTransfer, written: Checkpoint) -> None:
        try:
            copy.compare(written)
        except DataError as error:
            raise DataError(f"{self.target}: {error}") from error

    def _advance(self, num_bytes: int) -> None:
        self._done += num_bytes
        if self._progress is not None:
            self._progress(min(self._done, self._total), self._total)


def _moments_of(source: CheckpointSource, conversion: Conversion) -> Moments | None:
    """Open the moments that are to be carried over; ``None`` if none are.

    Raises:
        UsageError: they are asked for, but there are none, or they have no place in the result.
    """
    if not conversion.with_optimizer:
        return None
    if conversion.to != "folder" or conversion.merge is not None:
        raise UsageError(
            "--with-optimizer goes with --to folder, for nothing else has room for moments, and without --merge, after "
            "which they would be those of another model"
        )
    if source.open_moments is None:
        raise UsageError(
            f"{source.path} holds no optimizer's moments: leave out --with-optimizer. A full checkpoint of "
            "mesh-transformer-jax may, a .mdl of Cerebras, a folder that was written with this option"
        )
    return source.open_moments()


def _plan(source: Path, conversion: Conversion) -> dict[str, Any]:
    """Return all that decides what is written, the versions of the source's files by size and time."""
    files = files_of(source)
    files += sorted(conversion.merge.iterdir()) if conversion.merge else []
    found = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files if path.is_file()]
    chosen = {key: str(value) for key, value in asdict(conversion).items() if key != "verify"}
    config = conversion.config.read_text(errors="replace") if conversion.config and conversion.config.is_file() else ""
    return json.loads(json.dumps({"version": gptj_ft.__version__, "source": found, **chosen, "config": config}))  # type: ignore[no-any-return]
