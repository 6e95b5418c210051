"""Read PyTorch's ``.bin``, a few rows at a time; nothing but tensors is ever unpickled."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import Tensor

from gptj_ft.checkpoints.formats.tensor_info import Shard, TensorInfo, read_tensor_rows, stored_members
from gptj_ft.errors import DataError


class PickleShard(Shard):
    """Weight file written by ``torch.save``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            if file.read(1) == b"\x80":  # a bare pickle; since PyTorch 1.6 it is in a zip file
                raise DataError(f"{path}: saved by PyTorch before 1.6, or no weights; load it there and save it again")
        stored_members(path)
        size = path.stat().st_size
        entries: dict[str, TensorInfo] = {}
        self._strided: set[str] = set()
        for name, tensor in _load(path, "meta").items():
            begin = tensor.untyped_storage()._checkpoint_offset
            assert begin is not None, "PyTorch does not say where the data are"
            at = begin + int(tensor.storage_offset()) * tensor.dtype.itemsize
            entry = TensorInfo(tensor.dtype, tuple(tensor.shape), at if tensor.is_contiguous() else 0)
            if not entry.offset:
                self._strided.add(name)
            elif at + entry.num_bytes > size:
                raise DataError(f"{path}: {name} lies beyond its end ({size} bytes); get the file again")
            entries[name] = entry
        self.entries: Mapping[str, TensorInfo] = entries

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        if name not in self._strided:
            return read_tensor_rows(self.path, self.entries[name], start, stop)
        # Mapped anew for each tensor (milliseconds): a map's touched pages stay in memory until it is closed.
        tensor = _load(self.path, "cpu")[name]
        rows = tensor[start:stop] if tensor.ndim else tensor
        return rows.clone(memory_format=torch.contiguous_format)


def _load(path: Path, device: str) -> Mapping[str, Tensor]:
    try:
        loaded = torch.load(path, map_location=device, weights_only=True, mmap=device != "meta")
    except UnpicklingError as error:
        raise DataError(
            f"{path}: holds more than tensors, and loading it could run code; it was not loaded. "
            "Get the model in safetensors form"
        ) from error
    except Exception as error:  # a damaged file can raise anything
        raise DataError(f"{path}: truncated or corrupt; get the file again") from error
    if not isinstance(loaded, dict):
        raise DataError(f"{path}: expected tensors by name, found {type(loaded).__name__}")
    for name, value in loaded.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise DataError(f"{path}: {name!r} is not a tensor but {type(value).__name__}")
    return loaded
