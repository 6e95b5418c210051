"""Interface between checkpoint formats and the code that converts and compares checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gptj_ft.checkpoints.model_folder import Checkpoint
from gptj_ft.checkpoints.optimizer_state import Moments
from gptj_ft.models.registry import Architecture

if TYPE_CHECKING:
    from gptj_ft.checkpoints.transfer import TensorTransfer

FormatName = Literal["huggingface", "mesh", "cerebras", "tensorflow", "gguf"]


@dataclass(frozen=True)
class CheckpointSource:
    """Open checkpoint of any format."""

    path: Path  # as the user named it
    format: FormatName
    architecture: Architecture
    checkpoint: Checkpoint  # tensors under Hugging Face's names
    folder: Path  # may hold tokenizer files
    step: int = 0  # optimizer step; 0 if the checkpoint does not record it
    open_moments: Callable[[], Moments] | None = None  # raises UsageError, DataError; None: no optimizer state


@dataclass(frozen=True)
class OpenRequest:
    """Arguments of a format's `CheckpointFormat.open`."""

    path: Path
    config: Path | None  # JSON of the model's shape, for checkpoints without one
    scratch: Path  # folder for unpacked archives; it need not exist


@dataclass(frozen=True)
class CheckpointFormat:
    """A checkpoint format: how to recognize, read and write it."""

    detect: Callable[[Path], bool]
    open: Callable[[OpenRequest], AbstractContextManager[CheckpointSource]]
    # Write tensors of a source into a folder as a number of shards; None: read only.
    write: Callable[[Path, CheckpointSource, TensorTransfer, int], None] | None = None
