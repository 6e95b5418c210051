"""Read the architecture and the vocabulary size from a model folder's ``config.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptj_ft.errors import DataError, UsageError
from gptj_ft.models.supported import MODEL_TYPES, context_of
from gptj_ft.system.digests import check_file
from gptj_ft.system.files import read_text, require_plain

if TYPE_CHECKING:
    from gptj_ft.models.registry import Architecture


def read_architecture(folder: Path) -> Architecture:
    """Read a model folder's ``config.json``.

    Raises:
        UsageError: there is no such file, or the architecture is not supported.
        DataError: the file is not JSON, contradicts the architecture, fails its checksum, or the folder has a link to
            elsewhere.
    """
    from gptj_ft.models.registry import architecture_of

    path = folder / "config.json"
    if not path.is_file():
        raise UsageError(f"{folder} is not a model folder: it has no config.json")
    require_plain(folder)
    try:
        check_file(path)
        raw = json.loads(read_text(path))
    except DataError:
        raise
    except (ValueError, OSError, RecursionError) as error:
        raise DataError(f"{path}: not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise DataError(f"{path}: expected an object, found {type(raw).__name__}")
    return architecture_of(raw, path)


def is_quantized(folder: Path) -> bool:
    """Tell whether the weights of a supported model are quantized."""
    return bool(_raw_config(folder).get("quantization_config"))


def vocab_size_of(folder: Path) -> int:
    """Read the vocabulary size of a model, if possible without importing torch.

    Raises:
        UsageError, DataError: see `read_architecture`.
    """
    size = _raw_config(folder).get("vocab_size")
    return size if type(size) is int and size > 0 else int(read_architecture(folder).config.vocab_size)


def context_in(folder: Path) -> int:
    """Read the context of a model in tokens, if possible without importing torch.

    Raises:
        UsageError, DataError: see `read_architecture`.
    """
    size = context_of(_raw_config(folder))
    return size if size is not None and size > 0 else int(read_architecture(folder).config.n_positions)


def _raw_config(folder: Path) -> dict[str, Any]:
    """Read the ``config.json`` of a supported family; empty if it is another, or cannot be read."""
    try:
        raw = json.loads(read_text(folder / "config.json"))
    except (ValueError, OSError):
        return {}
    return raw if isinstance(raw, dict) and raw.get("model_type") in MODEL_TYPES else {}
