"""Checkpoints of the Cerebras model zoo, releases 1.7 to 2.x: ``.mdl``, which is HDF5, and ``.bin`` with their names.

Every tensor is a data set in the root, named by its path: ``model.transformer_decoder.layers.0.norm1.weight``. The
root's ``__spec__`` is a pickle, which nothing here reads.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gptj_ft.errors import DataError, UsageError
from gptj_ft.families import Family, Leaf
from gptj_ft.formats.borrowed import contiguous
from gptj_ft.formats.entries import PIECE_BYTES, Entry, Shard
from gptj_ft.formats.huggingface import Checkpoint, weights_of
from gptj_ft.formats.shards import open_shard

if TYPE_CHECKING:
    import h5py

MAGIC = b"\x89HDF\r\n\x1a\n"
MODEL = "model."  # before the names of weights; before 1.9 it may be there twice, in a .bin not at all
MOMENTS = "optimizer.state."
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
def open_cerebras(path: Path, family: Family) -> Iterator[tuple[Checkpoint, int, bool]]:
    """Open a ``.mdl``, a ``.bin`` or a folder of it; yield its tensors under Hugging Face's names, its step, and
    whether it holds the optimizer's moments.

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
    with Checkpoint(path, _joined(path, shards, family), _renamer(family)) as checkpoint:
        yield checkpoint, mdl.step if mdl else 0, mdl is not None and mdl.has_moments


def _own_name(name: str) -> str:
    return re.sub(rf"^({re.escape(MODEL)})+", "", name)


def _pattern(own: str) -> tuple[str, str]:
    """Return a name with ``{}`` for the number of its block, and that number."""
    number = re.search(r"\.layers\.(\d+)\.", own)
    return (own.replace(number[0], ".layers.{}.", 1), number[1]) if number else (own, "")


class JoinedShard:
    """A tensor that is made of several, side by side, or of one, with its axes the other way round."""

    def __init__(self, leaf: Leaf, parts: Sequence[tuple[Shard, str]]) -> None:
        self.path, self._leaf, self._parts = parts[0][0].path, leaf, parts
        found = [shard.entries[name] for shard, name in parts]
        shape = list(found[0].shape)  # theirs, along whose first axis they lie side by side
        for entry, (_, name) in zip(found, parts, strict=True):
            if entry.shape[1:] != found[0].shape[1:] or entry.dtype != found[0].dtype or not entry.shape:
                raise DataError(f"{self.path}: {name} is of another shape or type than what belongs to it")
        shape[0] = sum(entry.rows for entry in found)
        self.entries: Mapping[str, Entry] = {
            leaf.name: Entry(found[0].dtype, tuple(shape[::-1] if leaf.is_transposed else shape))
        }

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        whole = torch.cat([shard.read(own) for shard, own in self._parts])
        return contiguous(whole.t() if self._leaf.is_transposed else whole)[start:stop]

    def rows_at_once(self, name: str) -> int:
        return self.entries[name].rows


def _joined(path: Path, shards: Mapping[str, Shard], family: Family) -> dict[str, Shard]:
    """Return the shards by the names in them, but those of tensors in parts joined, by Hugging Face's names."""
    apart, order = dict(shards), list(family.cerebras)
    groups: dict[Leaf, list[tuple[int, Shard, str]]] = {}
    for name, shard in shards.items():
        pattern, number = _pattern(_own_name(name))
        leaf = family.cerebras.get(pattern)
        if isinstance(leaf, Leaf):
            del apart[name]
            here = replace(leaf, name=leaf.name.format(number))
            groups.setdefault(here, []).append((order.index(pattern), shard, name))
    joined: dict[str, Shard] = {}
    for leaf, parts in groups.items():
        pattern, _ = _pattern(_own_name(parts[0][2]))
        expected = sum(other == family.cerebras[pattern] for other in family.cerebras.values())
        if len(parts) != expected:
            raise DataError(f"{path}: {leaf.name} is made of {expected} tensors, and {len(parts)} of them are there")
        joined[leaf.name] = JoinedShard(leaf, [(shard, name) for _, shard, name in sorted(parts, key=lambda it: it[0])])
    return {**apart, **joined}


def _renamer(family: Family) -> Callable[[str], str | None]:
    def rename(name: str) -> str | None:
        own = _own_name(name)
        pattern, number = _pattern(own)
        ours = family.cerebras.get(pattern, own)  # if it is no tensor of the family, whoever checks it will say so
        assert not isinstance(ours, Leaf), "these have been joined"
        return ours and ours.format(number)

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
        has_moments: whether it holds the optimizer's moments, too.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.step, self.has_moments = path, 0, False
        entries: dict[str, Entry] = {}
        with self._opened() as file:
            for name in file:
                if name.startswith(MODEL):
                    entries[name] = self._entry(file, name)
            self.has_moments = any(name.startswith(MOMENTS) for name in file)
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
