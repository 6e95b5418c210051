"""Hugging Face model folders: read in every form the Hub has, written with one safetensors shard per layer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from gptj_ft.checkpoints.formats.safetensors import open_shard
from gptj_ft.checkpoints.formats.tensor_info import Entry, Shard
from gptj_ft.checkpoints.writer import INDEX, write_model
from gptj_ft.errors import DataError, UsageError
from gptj_ft.models.registry import Architecture, Family, full_name
from gptj_ft.system.block_reader import Extent
from gptj_ft.system.files import inside, read_text

__all__ = ["Checkpoint", "check", "layer_tensor", "layer_tensors", "open_checkpoint", "tensor_source", "write_model"]

# Best first: safetensors needs no unpickling and is checked against its own header.
WEIGHTS = ("model.safetensors", INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")
PROBLEMS_SHOWN = 3


class Checkpoint:
    """The tensors of a model folder, read one at a time; use it in a ``with`` block or close it.

    Attributes:
        folder: the model folder.
        names: Hugging Face's names of all tensors, those of a whole model, whatever the files have.
    """

    def __init__(
        self, folder: Path, shards: Mapping[str, Shard], rename: Callable[[str], str | None] = full_name
    ) -> None:
        """Open a checkpoint.

        Args:
            folder: what it is called in messages.
            shards: the file of each tensor, by its name in there.
            rename: that name -> Hugging Face's in a whole model; ``None`` for what is left out.

        Raises:
            DataError: two tensors of the same name.
        """
        self.folder = folder
        self._shards: dict[str, Shard] = {}
        self._own_names: dict[str, str] = {}
        for own, shard in shards.items():
            name = rename(own)
            if name in self._shards:
                raise DataError(f"{folder}: the weights hold {own} twice, also as {self._own_names[name]}")
            if name is not None:
                self._shards[name], self._own_names[name] = shard, own
        self.names = tuple(self._shards)
        self._names_by_layer: list[dict[str, str]] = []

    def names_of(self, architecture: Architecture, layer: int) -> Mapping[str, str]:
        """Return the names of a layer's tensors in the checkpoint, by their names in the layer."""
        if not self._names_by_layer:  # making the layers to see their names takes longer than reading a small one
            layers, name_of = architecture.layers(), architecture.family.name_of
            self._names_by_layer = [
                {local: name_of(index, local, len(layers)) for local in layers[index].state_dict()}
                for index in range(len(layers))
            ]
        return self._names_by_layer[layer]

    def entry(self, name: str) -> Entry:
        return self._shards[name].entries[self._own_names[name]]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return self.entry(name).dtype

    def file_of(self, name: str) -> Path:
        return self._shards[name].path

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Return a tensor, or its rows from ``start`` to ``stop``, on the CPU, in memory of its own."""
        return self._shards[name].read(self._own_names[name], start, stop)

    def extent(self, name: str) -> Extent | None:
        """Return where a tensor's numbers lie, row after row; none: nowhere in one piece."""
        shard, own = self._shards[name], self._own_names[name]
        entry = shard.entries[own]
        return Extent(shard.path, entry.offset, entry.dtype) if entry.offset else None

    def rows_at_once(self, name: str) -> int:
        """Return how many rows of a tensor to read at a time."""
        return self._shards[name].rows_at_once(self._own_names[name])

    def close(self) -> None:
        """Let go of the files."""
        self._shards = {}

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open the weights of a model folder: safetensors if it has them, else ``.bin``; in one file or in shards.

    Raises:
        UsageError: the folder holds no weights.
        DataError: a file is truncated, corrupt or missing, or the index and the shards contradict each other.
    """
    return Checkpoint(folder, weights_of(folder))


def weights_of(folder: Path) -> dict[str, Shard]:
    """Return the file of each tensor of a model folder, by its name in there; raises what `open_checkpoint` does."""
    for file_name in WEIGHTS:
        path = folder / file_name
        if path.is_file():
            return _indexed(path) if path.suffix == ".json" else _single(path)
    raise UsageError(f"{folder} holds no weights: looked for {', '.join(WEIGHTS)}")


def _single(path: Path) -> dict[str, Shard]:
    shard = open_shard(inside(path))
    return dict.fromkeys(shard.entries, shard)


def _indexed(index: Path) -> dict[str, Shard]:
    try:
        weight_map = dict(json.loads(read_text(index))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{index}: not an index of weights ({error!r}); get the file again") from error
    shards: dict[str, Shard] = {}
    for file_name in sorted({str(value) for value in weight_map.values()}):
        path = index.parent / file_name
        if Path(file_name).name != file_name or not path.is_file():
            raise DataError(f"{index}: names {file_name}, which is not in {index.parent}; get the file again")
        shards[file_name] = open_shard(inside(path))
    for name, file_name in weight_map.items():
        if name not in shards[file_name].entries:
            raise DataError(f"{shards[file_name].path}: lacks {name}, which {index.name} says it holds")
    for file_name, shard in shards.items():
        for name in shard.entries:
            if weight_map.get(name) != file_name:
                raise DataError(f"{shard.path}: holds {name}, which {index.name} does not say")
    return {name: shards[file_name] for name, file_name in weight_map.items()}


def check(architecture: Architecture, checkpoint: Checkpoint) -> list[str]:
    """Check that every tensor is there, in its shape and of a floating point type, and that none is unknown.

    A tied tensor may be there a second time, if that is the same.

    Returns: the names of the tensors that are dropped on purpose.

    Raises:
        DataError: how many problems there are, and the first of them with tensor, shapes and file.
    """
    if (num_layers := architecture.config.n_layer) > len(checkpoint.names):  # before so many are made
        raise DataError(
            f"{checkpoint.folder}: the weights do not fit config.json: that says n_layer {num_layers}, and there are "
            f"{len(checkpoint.names)} tensors"
        )
    family, layers = architecture.family, architecture.layers()
    expected = {
        family.name_of(index, local, len(layers)): tuple(tensor.shape)
        for index, layer in enumerate(layers)
        for local, tensor in layer.state_dict().items()
    }
    ties, present = architecture.ties(), set(checkpoint.names)
    dropped, problems = [], []
    for name in checkpoint.names:
        where, found = checkpoint.file_of(name).name, checkpoint.shape(name)
        if name in ties:
            dropped.append(name)
            if ties[name] in present and not _are_equal(checkpoint, name, ties[name]):
                problems.append(f"{name} in {where} is not {ties[name]}, as tie_word_embeddings in config.json says")
        elif name not in expected:
            if is_dropped(family, name, len(layers)):
                dropped.append(name)
            else:
                problems.append(f"{name} in {where} is no tensor of this {family.model_type}")
        elif found != expected[name]:
            problems.append(f"{name} in {where} has shape {list(found)}, config.json says {list(expected[name])}")
        elif not checkpoint.dtype(name).is_floating_point:
            problems.append(f"{name} in {where} is {checkpoint.dtype(name)}, not floating point")
    problems += [f"{name} of shape {list(expected[name])} is missing" for name in expected if name not in present]
    if problems:
        shown = "; ".join(problems[:PROBLEMS_SHOWN])
        more = f"; and {len(problems) - PROBLEMS_SHOWN} more" if len(problems) > PROBLEMS_SHOWN else ""
        raise DataError(f"{checkpoint.folder}: the weights do not fit config.json: {shown}{more}")
    return dropped


def _are_equal(checkpoint: Checkpoint, one: str, other: str) -> bool:
    forms = {(checkpoint.shape(name), checkpoint.dtype(name)) for name in (one, other)}
    step, num_rows = checkpoint.rows_at_once(one), checkpoint.shape(one)[0]
    return len(forms) == 1 and all(
        torch.equal(checkpoint.read(one, start, start + step), checkpoint.read(other, start, start + step))
        for start in range(0, num_rows, step)
    )


def is_dropped(family: Family, name: str, num_layers: int) -> bool:
    """Tell whether a tensor of a file is no part of the model, on purpose: masks of old files."""
    try:
        return family.locate(name, num_layers) is None
    except KeyError:
        return False


def layer_tensor(architecture: Architecture, checkpoint: Checkpoint, layer: int, local: str) -> Tensor:
    """Read one tensor by its layer and its name there, in the checkpoint's type."""
    return checkpoint.read(_name_in(checkpoint, architecture, layer, local))


def tensor_source(
    architecture: Architecture, checkpoint: Checkpoint, layer: int, local: str
) -> Extent | Callable[[], Tensor]:
    """Return where one tensor lies; if that is nowhere in one piece, what reads it."""
    name = _name_in(checkpoint, architecture, layer, local)
    return checkpoint.extent(name) or partial(checkpoint.read, name)


def _name_in(checkpoint: Checkpoint, architecture: Architecture, layer: int, local: str) -> str:
    name = checkpoint.names_of(architecture, layer).get(local)
    if name is None:  # of another layer, too
        name = architecture.ties()[architecture.family.name_of(layer, local, len(architecture.layers()))]
    return name


def layer_tensors(architecture: Architecture, checkpoint: Checkpoint, layer: int) -> dict[str, Tensor]:
    """Read one layer: its tensors by their names in the layer, in the checkpoint's types."""
    return {
        local: layer_tensor(architecture, checkpoint, layer, local)
        for local in checkpoint.names_of(architecture, layer)
    }
