"""Average checkpoints of one architecture, tensor by tensor in fp32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from gptj_ft.checkpoints.adapter import ADAPTER_WEIGHTS, open_weights, read_config
from gptj_ft.checkpoints.architecture import read_architecture
from gptj_ft.checkpoints.metadata import read_metadata
from gptj_ft.checkpoints.model_folder import (
    DESCRIPTION,
    METADATA_FILE,
    Checkpoint,
    check_tensors,
    copy_files,
    open_checkpoint,
    write_json_file,
)
from gptj_ft.checkpoints.source import CheckpointSource
from gptj_ft.checkpoints.weight_file import TensorInfo, open_shard, write_safetensors
from gptj_ft.errors import DataError, UsageError
from gptj_ft.models.registry import Architecture
from gptj_ft.system.atomic import atomic_folder
from gptj_ft.system.digests import FOLDER_DIGESTS, check_weights, folder_digests
from gptj_ft.system.paths import ADAPTER_CONFIG, TOKENIZER_FILES, is_adapter

# Fields of PEFT's configuration that decide how an adapter's matrices are used.
DECIDING = (
    "peft_type", "task_type", "r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "bias",
    "fan_in_fan_out",
)  # fmt: skip


class AveragedCheckpoint(Checkpoint):
    """Checkpoint whose tensors are the means of several; each keeps the first one's type."""

    def __init__(self, first: Checkpoint, others: Sequence[Checkpoint], is_fp32: bool) -> None:
        """Combine open checkpoints.

        Args:
            is_fp32: give the means in fp32, for a conversion to another type.
        """
        super().__init__(first.folder, {})
        self._first, self._others, self._is_fp32 = first, others, is_fp32
        self.names = first.names

    def entry(self, name: str) -> TensorInfo:
        entry = self._first.entry(name)
        return TensorInfo(torch.float32 if self._is_fp32 else entry.dtype, entry.shape)

    def file_of(self, name: str) -> Path:
        return self._first.file_of(name)

    def rows_at_once(self, name: str) -> int:
        return self._first.rows_at_once(name)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        tensors = (each.read(name, start, stop) for each in (self._first, *self._others))
        return mean_of(tensors).to(self.entry(name).dtype)


def mean_of(tensors: Iterator[Tensor]) -> Tensor:
    """Return the fp32 mean of tensors, holding two of them at a time."""
    # In the order and rounding of torch.mean over a stack of up to 16 tensors: sum one by one, then divide.
    total, count = next(tensors).to(torch.float32, copy=True), 1
    for tensor in tensors:
        total += tensor
        count += 1
    return total.div_(count)


@contextmanager
def averaged(source: CheckpointSource, folders: Sequence[Path], is_fp32: bool) -> Iterator[CheckpointSource]:
    """Replace a checkpoint by its mean with other model folders.

    Raises:
        UsageError, DataError: a folder is unusable, or has another architecture.
    """
    if not folders:
        yield source
        return
    with ExitStack() as stack:
        others = []
        for folder in folders:
            if is_adapter(folder):
                raise UsageError(f"{folder} is an adapter, {source.path} a model: they have no average")
            architecture, checkpoint = read_architecture(folder), stack.enter_context(open_checkpoint(folder))
            _check_alike(source, folder, architecture)
            check_weights(folder)
            check_tensors(architecture, checkpoint)
            if missing := sorted(set(source.checkpoint.names) - set(checkpoint.names)):
                raise DataError(f"{folder} has no {missing[0]}, {source.path} has: they have no average")
            others.append(checkpoint)
        yield replace(source, checkpoint=AveragedCheckpoint(source.checkpoint, others, is_fp32))


def _check_alike(first: CheckpointSource, folder: Path, other: Architecture) -> None:
    """Check that two models have the same family, head and config."""
    mine = first.architecture
    require = partial(_require_equal, first.path, folder)
    require("model_type", mine.family.model_type, other.family.model_type)
    for name in (field.name for field in fields(mine.config) if field.name not in mine.family.rates):
        require(name, getattr(mine.config, name), getattr(other.config, name))
    require("task", mine.task, other.task)
    require("labels", mine.labels, other.labels)


def _require_equal(first: Path, other: Path, name: str, mine: object, theirs: object) -> None:
    if mine != theirs:
        raise UsageError(
            f"{other} differs from {first} in {name}: {theirs!r:.80}, not {mine!r:.80}; only checkpoints of one "
            "architecture have an average"
        )


def average_adapters(folders: Sequence[Path], target: Path) -> dict[str, TensorInfo]:
    """Average the matrices of adapters for one base model into a new adapter; return what it holds.

    Raises:
        UsageError: they differ in base model, rank, scale or adapted layers; or the target exists.
        DataError: a file is damaged.
    """
    first, shards = folders[0], [open_weights(folder) for folder in folders]
    config, metadata = read_config(first), read_metadata(first)
    for folder, shard in zip(folders, shards, strict=True):
        require = partial(_require_equal, first, folder)
        theirs, their_metadata = read_config(folder), read_metadata(folder)
        for name in DECIDING:
            require(name, config.get(name), theirs.get(name))
        bases = [each.base_digest if each else None for each in (metadata, their_metadata)]
        if None in bases:  # of another program
            bases = [str(each.get("base_model_name_or_path")) for each in (config, theirs)]
        require("base model", *bases)
        mine, others = ({name: entry.shape for name, entry in each.entries.items()} for each in (shards[0], shard))
        for name in sorted(mine.keys() | others.keys()):
            require(name, mine.get(name), others.get(name))
    means = {name: mean_of(shard.read(name) for shard in shards) for name in shards[0].entries}
    with atomic_folder(target) as draft:
        weights = draft / ADAPTER_WEIGHTS[0]
        _, digest = write_safetensors(weights, means, torch.float32)
        written = open_shard(weights)
        if any(not torch.equal(written.read(name), mean) for name, mean in means.items()):
            raise DataError(f"{target}: the written matrices differ from the means; is the disk faulty?")
        copy_files(first, draft, (*TOKENIZER_FILES, *DESCRIPTION, METADATA_FILE))
        write_json_file(draft / ADAPTER_CONFIG, config)
        write_json_file(draft / FOLDER_DIGESTS, folder_digests(draft, {weights.name: digest}))
    return dict(written.entries)
