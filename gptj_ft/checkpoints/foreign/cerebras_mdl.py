"""Read Cerebras' ``.mdl``: an HDF5 file whose root holds one data set per tensor, named by the tensor's path.

The root's ``__spec__`` is a pickle; it is never read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gptj_ft.checkpoints.weight_file import Shard, TensorInfo
from gptj_ft.data.readers.hdf5 import open_hdf5
from gptj_ft.data.readers.source import FORMAT_MAGIC
from gptj_ft.errors import DataError
from gptj_ft.system.dtypes import FROM_NUMPY

if TYPE_CHECKING:
    import h5py

MODEL_PREFIX = "model."  # of the names of weights
_MAX_CHUNK_BYTES = 2**30  # HDF5 unpacks a chunk at once


def is_hdf5(path: Path) -> bool:
    """Tell whether a file is HDF5."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return FORMAT_MAGIC.get(file.read(8)) == "hdf5"


class MdlShard(Shard):
    """Data sets of a ``.mdl`` file, as tensors."""

    def __init__(self, path: Path, data_sets: Mapping[str, str]) -> None:
        """Open data sets.

        Args:
            data_sets: the name in the file for each name that `read` takes.
        """
        self.path, self._data_sets = path, data_sets
        with open_hdf5(path) as file:
            self.entries: Mapping[str, TensorInfo] = {name: self._entry(file, own) for name, own in data_sets.items()}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        entry, own = self.entries[name], self._data_sets[name]
        with open_hdf5(self.path) as file:
            data = data_set(self.path, file, own)
            array = data[start:stop] if entry.shape else data[()]
        tensor = torch.from_numpy(array) if entry.shape else torch.tensor(array)
        return tensor.view(torch.bfloat16) if entry.dtype is torch.bfloat16 else tensor.to(entry.dtype)

    def _entry(self, file: h5py.File, name: str) -> TensorInfo:
        data = data_set(self.path, file, name)
        # HDF5 has no bf16: the bits are stored as 2-byte integers, marked by an attribute.
        is_bfloat16 = bool(data.attrs.get("is_bfloat16", False))
        dtype = torch.bfloat16 if is_bfloat16 else FROM_NUMPY.get(data.dtype.str)
        if dtype is None or (is_bfloat16 and data.dtype.itemsize != 2):
            raise DataError(f"{self.path}: {name} has type {data.dtype}, which no weights have")
        return TensorInfo(dtype, tuple(data.shape))


class MdlFile:
    """Open ``.mdl`` file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with open_hdf5(path) as file:
            self.names = tuple(file)  # of all data sets
        self.parameters = MdlShard(path, {name: name for name in self.names if name.startswith(MODEL_PREFIX)})
        self.step = None if "global_step" not in self.names else int(self.value("global_step"))  # optimizer step
        if not self.parameters.entries:
            raise DataError(f"{path} holds no weights: no data set in it is named {MODEL_PREFIX}...")

    def value(self, name: str, index: int = 0) -> float:
        """Return one number of a data set."""
        with open_hdf5(self.path) as file:
            return float(data_set(self.path, file, name)[()].reshape(-1)[index])


def data_set(path: Path, file: h5py.File, name: str) -> Any:
    """Return a data set that is stored in the file itself, in chunks of limited size.

    Raises:
        DataError: a link, an external or virtual data set, or huge chunks.
    """
    import h5py

    # A link or an external data set could name any file of this machine.
    if not isinstance(file.get(name, getlink=True), h5py.HardLink):
        raise DataError(f"{path}: {name} is a link; it was not followed")
    data = file[name]
    if not isinstance(data, h5py.Dataset) or data.is_virtual or data.external:
        raise DataError(f"{path}: {name} is no data set of this file")
    if data.chunks and math.prod(data.chunks) * data.dtype.itemsize > _MAX_CHUNK_BYTES:
        raise DataError(f"{path}: {name} unpacks to more than {_MAX_CHUNK_BYTES >> 30} GiB at once")
    return data
