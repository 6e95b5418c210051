"""Open a weight file by its suffix: safetensors or PyTorch's ``.bin``."""

from __future__ import annotations

from pathlib import Path

from gptj_ft.checkpoints.formats.pytorch_bin import PickleShard
from gptj_ft.checkpoints.formats.safetensors import SafetensorsShard
from gptj_ft.checkpoints.formats.tensor_info import Shard
from gptj_ft.errors import DataError


def open_shard(path: Path) -> Shard:
    """Open a weight file, and check it.

    Raises:
        DataError: unreadable, truncated, corrupt, or holding more than tensors.
    """
    try:
        return SafetensorsShard(path) if path.suffix == ".safetensors" else PickleShard(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
