"""Checkpoints of the Cerebras model zoo, releases 1.7 to 2.x: ``.mdl``, which is HDF5, and ``.bin`` with their names.

Every tensor is a data set in the root, named by its path: ``model.transformer_decoder.layers.0.norm1.weight``. The
root's ``__spec__`` is a pickle, which nothing here reads.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gptj_ft.errors import DataError, UsageError
from gptj_ft.families import Family
from gptj_ft.formats.entries import PIECE_BYTES, Entry, Shard
from gptj_ft.formats.huggingface import Checkpoint, weights_of
from gptj_ft.formats.shards import open_shard

if TYPE_CHECKING:
    import h5py

MAGIC = b"\x89HDF\r\n\x1a\n"
MODEL = "model."  # before the names of weights; before 1.9 it may be there twice, in a .bin not at all
TYPICAL = "transformer_decoder.layers."
MOST_CHUNK_BYTES = 2**30  # of what HDF5 unpacks at once
DTYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "int64": torch.int64}


def is_hdf5(path: Path) -> bool:
    """Tell whether a file is HDF5."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def has_cerebras_names(folder: Path) -> bool:
    """Tell whether the weights of a folder go by Cerebras' names.

    Raises:
        UsageError, DataError: as `huggingface.weights_of`.
    """
    return any(TYPICAL in name for name in weights_of(folder))


@contextmanager
def open_cerebras(path: Path, family: Family) -> Iterator[tuple[Checkpoint, int]]:
    """Open a ``.mdl``, a ``.bin`` or a folder of it; yield its tensors under Hugging Face's names, and its step.

    Raises:
        UsageError: no such file, or h5py is not installed.
        DataError: damaged; or a tensor that is there twice, as some are, is another the second time.
    """
    mdl = MdlShard(path) if is_hdf5(path) else None
    if mdl is not None:
        shards: Mapping[str, Shard] = dict.fromkeys(mdl.entries, mdl)
    elif path.is_dir():
        shards = weights_of(path)
    elif path.is_file():
        shard = open_shard(path)
        shards = dict.fromkeys(shard.entries, shard)
    else:
        raise UsageError(f"{path} does not exist")
    _compare_copies(path, shards)
    with Checkpoint(path, shards, _renamer(family)) as checkpoint:
        yield checkpoint, mdl.step if mdl else 0


def _own_name(name: str) -> str:
    return re.sub(rf"^({re.escape(MODEL)})+", "", name)


def _renamer(family: Family) -> Callable[[str], str | None]:
    def rename(name: str) -> str | None:
        own = _own_name(name)
        number = re.search(r"\.layers\.(\d+)\.", own)
        pattern = own.replace(number[0], ".layers.{}.", 1) if number else own
        if pattern not in family.cerebras:
            return own  # which is no tensor of the family, as whoever checks it will say
        theirs = family.cerebras[pattern]
        return theirs and theirs.format(number[1] if number else "")

    return rename


def _compare_copies(path: Path, shards: Mapping[str, Shard]) -> None:
    """Check that the copies of the last norm, of which one is left out, are the same."""
    own = {_own_name(name): name for name in shards}
    for part in ("weight", "bias"):
        first, second = own.get(f"transformer_decoder.norm.{part}"), own.get(f"ln_f.{part}")
        if first and second and not torch.equal(shards[first].read(first), shards[second].read(second)):
            raise DataError(f"{path}: {first} and {second} should be the same, and are not")


class MdlShard:
    """The weights in a ``.mdl`` file.

    Attributes:
        path: of the file.
        step: the optimizer step it is of; 0 if it does not say.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.step = path, 0
        entries: dict[str, Entry] = {}
        with self._opened() as file:
            for name in file:
                if name.startswith(MODEL):
                    entries[name] = self._entry(file, name)
            if "global_step" in file:
                self.step = int(self._data(file, "global_step")[()])
        self.entries: Mapping[str, Entry] = entries
        if not entries:
            raise DataError(f"{path} holds no weights: no data set in it is named {MODEL}...")

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        entry = self.entries[name]
        with self._opened() as file:
            array = self._data(file, name)[start:stop] if entry.shape else self._data(file, name)[()]
        tensor = torch.from_numpy(array) if entry.shape else torch.tensor(array)
        return tensor.view(torch.bfloat16) if entry.dtype is torch.bfloat16 else tensor.to(entry.dtype)

    def rows_at_once(self, name: str) -> int:
        return self.entries[name].rows_in(PIECE_BYTES)

    @contextmanager
    def _opened(self) -> Iterator[h5py.File]:
        try:
            import h5py
        except ImportError as error:
            raise UsageError(f"{self.path} is an HDF5 file: pip install 'gptj-ft[hdf5]'") from error
        try:
            with h5py.File(self.path, "r", locking=False) as file:  # a lock needs what some file systems lack
                yield file
        except DataError:
            raise
        # h5py turns each class of HDF5's errors into one of Python's; any may come from a damaged file.
        except (OSError, RuntimeError, LookupError, ValueError, TypeError, OverflowError, MemoryError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise DataError(f"{self.path}: truncated or corrupt ({reason}); get the file again") from error

    def _data(self, file: h5py.File, name: str) -> Any:
        import h5py

        if not isinstance(file.get(name, getlink=True), h5py.HardLink):
            raise DataError(f"{self.path}: {name} is a link; it was not followed")
        data = file[name]
        if not isinstance(data, h5py.Dataset) or data.is_virtual or data.external:
            raise DataError(f"{self.path}: {name} is no data set of this file")
        if data.chunks and math.prod(data.chunks) * data.dtype.itemsize > MOST_CHUNK_BYTES:
            raise DataError(f"{self.path}: {name} unpacks to more than {MOST_CHUNK_BYTES >> 30} GiB at once")
        return data

    def _entry(self, file: h5py.File, name: str) -> Entry:
        data = self._data(file, name)
        is_bfloat16 = bool(data.attrs.get("is_bfloat16", False))
        dtype = torch.bfloat16 if is_bfloat16 else DTYPES.get(data.dtype.name)
        if dtype is None or (is_bfloat16 and data.dtype.itemsize != 2):
            raise DataError(f"{self.path}: {name} is of type {data.dtype}, which no weights have")
        return Entry(dtype, tuple(data.shape))
