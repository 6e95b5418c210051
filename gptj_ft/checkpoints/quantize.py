"""Quantize the linear layers of a model while it is converted."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from gptj_ft.checkpoints.model_folder import Checkpoint, weights_of
from gptj_ft.checkpoints.quantized import ABSMAX, MAP, ROW_FORMAT, ROW_SCALES, STATE
from gptj_ft.checkpoints.weight_file import PIECE_BYTES, TensorInfo
from gptj_ft.errors import DataError, UsageError
from gptj_ft.models import lora
from gptj_ft.models.embedding import Embedding
from gptj_ft.models.quantization.bitsandbytes import TABLES, WRITTEN
from gptj_ft.models.quantization.form import CODES, SCALES, QuantizedForm
from gptj_ft.models.registry import Architecture, full_name

Quantization = Literal["nf4", "int8"]


def quantized_names(architecture: Architecture) -> dict[str, bool]:
    """Return the weights to quantize, and whether each is stored (in, out): the linear layers of the blocks."""
    last = len(architecture.skeleton) - 1
    return {
        f"{name}.weight": lora.is_transposed(architecture, layer, local)
        for name, (layer, local) in lora.linear_layers(architecture).items()
        if 0 < layer < last
    }


def vocabulary_names(architecture: Architecture) -> list[str]:
    """Return the matrices with a row for each token: the embedding, and a head of its own."""
    layers, family = architecture.skeleton, architecture.family
    tables = [
        name
        for name, module in layers[0].named_modules()
        if isinstance(module, Embedding) and module.index == "tokens_T"
    ]
    heads = [
        f"{name}.weight" for name, (layer, _) in lora.linear_layers(architecture).items() if layer == len(layers) - 1
    ]
    return [*(family.name_of(0, f"{table}.weight", len(layers)) for table in tables), *heads]


def quantization_config(quantization: Quantization, architecture: Architecture, dtype: torch.dtype) -> dict[str, Any]:
    """Return the ``quantization_config`` by which `transformers` opens the folder.

    Args:
        dtype: type of the computation there.
    """
    quantized = quantized_names(architecture)
    others = [name for name in lora.linear_layers(architecture) if f"{name}.weight" not in quantized]
    tied = [name.removesuffix(".weight") for name in architecture.ties()]
    config: dict[str, Any] = {"quant_method": "bitsandbytes", "llm_int8_skip_modules": sorted({*others, *tied})}
    if quantization == "int8":
        return {**config, "load_in_4bit": False, "load_in_8bit": True, "llm_int8_threshold": 6.0}
    four_bit = {
        "quant_type": quantization,
        "use_double_quant": False,
        "quant_storage": "uint8",
        "compute_dtype": str(dtype).removeprefix("torch."),
    }
    config |= {"load_in_4bit": True, "load_in_8bit": False}
    return config | {f"bnb_4bit_{key}": value for key, value in four_bit.items()}


@dataclass(frozen=True)
class StoredPart:
    """A tensor of the quantized folder."""

    entry: TensorInfo
    read: Callable[[int, int], Tensor]  # rows from, to
    rows_at_once: int


class PartsCheckpoint(Checkpoint):
    """A checkpoint that stores some matrices in parts; its tensors are those of the folder to write.

    Args:
        source: the weights.
        dtype: type of all values; ``None``: each tensor's own.
    """

    def __init__(self, source: Checkpoint, dtype: torch.dtype | None) -> None:
        super().__init__(source.folder, {})
        self._source, self._dtype = source, dtype
        self._tensors: dict[str, StoredPart] = {}
        self._by_matrix: dict[str, list[str]] = {}
        self._descriptions: set[str] = set()

    def quantization_config(self, dtype: torch.dtype) -> dict[str, Any]:
        """Return the ``quantization_config`` of the folder.

        Args:
            dtype: type of the computation there.
        """
        raise NotImplementedError

    @property
    def quantization_name(self) -> str:
        """Name for reports."""
        raise NotImplementedError

    @property
    def value_types(self) -> set[torch.dtype]:
        """Types that the values of all tensors have."""
        return {self._dtype or self._source.dtype(name) for name in self._source.names}

    def _list_names(self) -> None:
        """Set the names of all tensors, when the parts of every matrix are known."""
        self.names = tuple(other for name in self._source.names for other in self._stored_names(name))

    def _add_constant(self, name: str, values: Tensor) -> None:
        """Add a small tensor that describes a matrix."""
        entry = TensorInfo(values.dtype, tuple(values.shape))
        self._tensors[name] = StoredPart(entry, lambda start, stop: values, max(1, values.numel()))
        self._descriptions.add(name)

    def names_of(self, architecture: Architecture, layer: int) -> Mapping[str, str]:
        names = [other for name in super().names_of(architecture, layer).values() for other in self._stored_names(name)]
        # Descriptions last: behind one of odd length, numbers would not be aligned in the file.
        return {name: name for name in sorted(names, key=lambda name: name in self._descriptions)}

    def _stored_names(self, name: str) -> list[str]:
        return self._by_matrix.get(name, [name])

    def entry(self, name: str) -> TensorInfo:
        return self._tensors[name].entry if name in self._tensors else self._plain(name)

    def _plain(self, name: str) -> TensorInfo:
        entry = self._source.entry(name)
        return TensorInfo(self._dtype or entry.dtype, entry.shape)

    def file_of(self, name: str) -> Path:
        return self._source.file_of(name)

    def matrix(self, name: str) -> None:
        return None

    def rows_at_once(self, name: str) -> int:
        return self._tensors[name].rows_at_once if name in self._tensors else self._source.rows_at_once(name)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        if name not in self._tensors:
            return self._source.read(name, start, stop).to(self._plain(name).dtype)
        tensor = self._tensors[name]
        return tensor.read(start, tensor.entry.rows if stop is None else min(stop, tensor.entry.rows))


class QuantizedCheckpoint(PartsCheckpoint):
    """A checkpoint whose linear layers are quantized as they are read."""

    def __init__(
        self, source: Checkpoint, architecture: Architecture, quantization: Quantization, dtype: torch.dtype | None
    ) -> None:
        """Choose the matrices.

        Args:
            dtype: type to store; ``None``: each tensor's own.

        Raises:
            UsageError: the source is quantized already.
        """
        super().__init__(source, dtype)
        self._name, self._codec, self._architecture = quantization, WRITTEN[quantization], architecture
        for name, is_transposed in quantized_names(architecture).items():
            if name not in source.names:
                continue
            if (matrix := source.matrix(name)) is not None:
                raise UsageError(
                    f"{source.folder} is quantized already ({matrix.form.codec.name}): quantize the model that it was "
                    "made from, or convert it without --quantize to restore plain weights"
                )
            self._add(name, is_transposed)
        self._list_names()

    def quantization_config(self, dtype: torch.dtype) -> dict[str, Any]:
        return quantization_config(self._name, self._architecture, dtype)

    @property
    def quantization_name(self) -> str:
        return self._name

    def _add(self, name: str, is_transposed: bool) -> None:
        source, codec = self._source, self._codec
        rows, columns = source.shape(name)[:: -1 if is_transposed else 1]
        form = QuantizedForm(codec, rows, columns, self._dtype or source.dtype(name), is_transposed)
        items = form.num_items()
        step = rows if is_transposed else max(1, PIECE_BYTES // (columns * 4 * form.row_step)) * form.row_step

        def add(stored: str, part: str, shape: tuple[int, ...]) -> None:
            at_once = max(1, form.spans(0, min(step, rows))[part].stop * shape[0] // max(1, items[part]))
            entry = TensorInfo(form.parts()[part].dtype, shape)
            self._tensors[stored] = StoredPart(entry, partial(self._part, name, form, part, shape), at_once)

        if self._name == "int8":
            module = name.removesuffix(".weight")
            add(name, CODES, (rows, columns))
            add(f"{module}.{ROW_SCALES}", SCALES, (rows,))
            self._add_constant(f"{module}.{ROW_FORMAT}", torch.tensor(0, dtype=torch.uint8))
            self._by_matrix[name] = [name, f"{module}.{ROW_SCALES}", f"{module}.{ROW_FORMAT}"]
            return
        add(name, CODES, (items[CODES], 1))
        add(f"{name}.{ABSMAX}", SCALES, (items[SCALES],))
        self._add_constant(f"{name}.{MAP}", torch.tensor(TABLES[self._name]))
        state = {"quant_type": self._name, "blocksize": codec.parts(columns)[SCALES].numbers, **describe(form)}
        self._add_constant(f"{name}.{STATE}{self._name}", as_bytes(state))
        self._by_matrix[name] = [name, *(f"{name}.{part}" for part in (ABSMAX, MAP, f"{STATE}{self._name}"))]

    def _part(self, name: str, form: QuantizedForm, part: str, shape: tuple[int, ...], start: int, stop: int) -> Tensor:
        """Quantize the rows that some items of a part belong to; return these items."""
        numbers, per_row = form.parts()[part].numbers, form.num_items()[part] // shape[0]
        first = start * per_row * numbers // form.columns // form.row_step * form.row_step
        last = min(-(-stop * per_row * numbers // form.columns), form.rows)
        last = min(-(-last // form.row_step) * form.row_step, form.rows)
        if form.is_transposed:
            values = self._source.read(name).t()[first:last]
        else:
            values = self._source.read(name, first, last)
        values = values if self._dtype is None else values.to(self._dtype)
        parts = {SCALES: self._codec.scales(values)} if part == SCALES else self._codec.encode(values)
        if not parts[SCALES].isfinite().all():
            raise DataError(
                f"{self.folder}: {name} holds NaN, infinity or numbers too large for {self._name}, so it cannot be "
                "quantized"
            )
        begin = form.spans(first, last)[part].start
        return parts[part][start * per_row - begin : stop * per_row - begin].view(-1, *shape[1:])


def describe(form: QuantizedForm) -> dict[str, Any]:
    """Return the type of the values and the shape of a stored matrix, for its description."""
    return {"dtype": str(form.dtype).removeprefix("torch."), "shape": [form.rows, form.columns]}


def as_bytes(description: Mapping[str, Any]) -> Tensor:
    """Return a description as JSON in bytes, uint8."""
    return torch.tensor([*json.dumps(description).encode()], dtype=torch.uint8)


def open_stored(folder: Path, architecture: Architecture) -> Checkpoint:
    """Open the tensors of a quantized folder as they are stored, each part under its own name."""
    return Checkpoint(folder, weights_of(folder), partial(full_name, family=architecture.family))
