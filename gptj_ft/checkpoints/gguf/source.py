"""Open a GGUF file as a checkpoint: tensors under Hugging Face's names, dequantized a few rows at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gptj_ft.checkpoints.gguf.header import GgufHeader, StoredTensor, read_header
from gptj_ft.checkpoints.gguf.layout import OUTPUT, READ_TYPES, TensorForm, family_forms, tensor_forms
from gptj_ft.checkpoints.gguf.tokenizer import write_tokenizer
from gptj_ft.checkpoints.model_folder import Checkpoint
from gptj_ft.checkpoints.source import CheckpointSource, OpenRequest
from gptj_ft.checkpoints.weight_file import Shard, TensorInfo, read_tensor_rows
from gptj_ft.errors import DataError, UsageError
from gptj_ft.models.gguf_form import ROPE_TENSORS, TENSORS, Metadata
from gptj_ft.models.quantization.form import QuantizedForm
from gptj_ft.models.quantization.ggml import GGML, GgmlCodec
from gptj_ft.models.registry import Architecture, architecture_of
from gptj_ft.system.files import remove

EMBEDDING = "token_embd.weight"
PLAIN_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
TOKEN_IDS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
COMPUTED = (*ROPE_TENSORS, "attn_rot_embd.weight", "rotary_emb.inv_freq")  # tables that are computed from the config


class GgufShard(Shard):
    """Tensors of a GGUF file under Hugging Face's names. Quantized ones have fp32 values, as in the package gguf."""

    def __init__(self, header: GgufHeader, forms: Mapping[str, TensorForm]) -> None:
        """Choose the stored types.

        Args:
            forms: form of each tensor; those that the file lacks are ignored.

        Raises:
            UsageError: a tensor has a quantization that is not read.
            DataError: a tensor lies beyond the end of its file.
        """
        self.path, self._kinds = header.path, _type_names()
        self._tensors = {own: header.tensors[form.name] for own, form in forms.items() if form.name in header.tensors}
        known = {form.name for form in forms.values()}
        # Unknown tensors keep their names, so that the check of the model names them.
        others = {name: stored for name, stored in header.tensors.items() if name not in known}
        self._tensors |= {name: stored for name, stored in others.items() if not name.endswith(COMPUTED)}
        self._forms = forms
        self.entries = {own: self._entry(own, stored) for own, stored in self._tensors.items()}

    def _entry(self, own: str, stored: StoredTensor) -> TensorInfo:
        kind, form = self._kind(stored), self._form(own)
        if stored.offset + _num_bytes(stored) > stored.path.stat().st_size:
            raise DataError(f"{stored.path}: truncated: {form.name} lies beyond its end; get the file again")
        dtype = torch.float32 if form.offset else PLAIN_TYPES.get(kind, torch.float32)
        offset = stored.offset if form.is_plain and kind in PLAIN_TYPES else 0
        return TensorInfo(dtype, form.shape(stored.shape), offset)

    def _kind(self, stored: StoredTensor) -> str:
        kind = self._kinds.get(stored.kind, f"type {stored.kind}")
        if kind not in READ_TYPES:
            raise UsageError(
                f"{stored.path}: tensors quantized as {kind} are not read; those read are {', '.join(READ_TYPES)}: "
                "get the model in another quantization, best of 8 bits or more"
            )
        return kind

    def _form(self, own: str) -> TensorForm:
        return self._forms.get(own, TensorForm(own))

    def rows_at_once(self, name: str) -> int:
        return super().rows_at_once(name) if self._form(name).is_plain else self.entries[name].rows

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        stored, form = self._tensors[name], self._form(name)
        if form.is_plain:
            return self._read_rows(stored, start, stop)
        tensor = form.restore(self._read_rows(stored, 0, None))
        return tensor[start:stop] if tensor.ndim else tensor

    def codes(self, name: str) -> StoredCodes | None:
        """Return the codes of a matrix if its quantization is one of `GGML`; ``None`` for other tensors."""
        stored, form = self._tensors[name], self._form(name)
        codec = GGML.get(self._kind(stored))
        if codec is None or len(stored.shape) != 2 or form.offset:
            return None
        return StoredCodes(codec, stored, form)

    def _read_rows(self, stored: StoredTensor, start: int, stop: int | None) -> Tensor:
        import gguf

        kind = self._kinds[stored.kind]
        if kind in PLAIN_TYPES:
            return read_tensor_rows(
                stored.path, TensorInfo(PLAIN_TYPES[kind], stored.shape, stored.offset), start, stop
            )
        data = _read_blocks(stored, start, stop).numpy()
        with np.errstate(all="ignore"):  # a block's scale may be NaN, as in any damaged file; the caller counts them
            values = gguf.dequantize(data, gguf.GGMLQuantizationType(stored.kind))
        return torch.from_numpy(values).reshape(-1, *stored.shape[1:])


@dataclass(frozen=True)
class StoredCodes:
    """The codes of a matrix in a GGUF file."""

    codec: GgmlCodec
    stored: StoredTensor
    tensor_form: TensorForm

    def form(self, dtype: torch.dtype) -> QuantizedForm:
        """Return the form of the stored matrix, whose transpose Hugging Face's may be.

        Args:
            dtype: type of its values.
        """
        rows, columns = self.stored.shape
        return QuantizedForm(self.codec, rows, columns, dtype)

    def read(self) -> dict[str, Tensor]:
        """Return all items of each part, flat; rows are in Hugging Face's order."""
        blocks, order = _read_blocks(self.stored), self.tensor_form.order
        rows = blocks if order is None else blocks[torch.argsort(order)]
        _, size = _block_of(self.stored)
        return self.codec.unpack(rows.view(-1, size))


def _read_blocks(stored: StoredTensor, start: int = 0, stop: int | None = None) -> Tensor:
    """Read rows of a quantized tensor, uint8 [rows, bytes of a row]."""
    row_bytes = _num_bytes(stored) // max(1, stored.shape[0])
    return read_tensor_rows(
        stored.path, TensorInfo(torch.uint8, (stored.shape[0], row_bytes), stored.offset), start, stop
    )


def _block_of(stored: StoredTensor) -> tuple[int, int]:
    """Return numbers and bytes of a block of a tensor of a known type."""
    import gguf

    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(stored.kind)]
    return block, size


def _type_names() -> dict[int, str]:
    import gguf

    return {int(kind): kind.name for kind in gguf.GGMLQuantizationType}


def _num_bytes(stored: StoredTensor) -> int:
    """Return the size of a tensor of a known type.

    Raises:
        DataError: a row is not a whole number of blocks.
    """
    block, size = _block_of(stored)
    numbers = int(np.prod(stored.shape, dtype=object))
    if numbers and stored.shape[-1] % block:
        raise DataError(
            f"{stored.path}: rows of {stored.shape[-1]} numbers are no blocks of {block}; get the file again"
        )
    return int(numbers // block * size)


@contextmanager
def open_gguf_source(request: OpenRequest) -> Iterator[CheckpointSource]:
    """Open a GGUF file; its tokenizer, chat template and end tokens become files in the scratch folder.

    Raises:
        UsageError: an architecture, a quantization or a tokenizer that is not supported.
        DataError: the file is truncated, damaged or big-endian, or a part of it is missing.
    """
    header = read_header(request.path)
    raw = read_gguf_config(header)
    architecture = architecture_of(raw, request.path)
    checkpoint = _open_tensors(header, architecture)
    remove(request.scratch)
    request.scratch.mkdir(parents=True)
    write_tokenizer(header, request.scratch)
    yield CheckpointSource(request.path, "gguf", architecture, checkpoint, request.scratch)


def _open_tensors(header: GgufHeader, architecture: Architecture) -> Checkpoint:
    form = architecture.family.gguf
    assert form is not None
    shard = GgufShard(header, tensor_forms(architecture, form))
    return Checkpoint(header.path, dict.fromkeys(shard.entries, shard), lambda name: name)


def read_gguf_config(header: GgufHeader) -> dict[str, Any]:
    """Return the metadata of a file as Hugging Face's ``config.json``.

    Raises:
        UsageError: the architecture is not supported.
        DataError: a key or the embedding is missing.
    """
    path, metadata = header.path, header.metadata
    name, forms = str(metadata.get("general.architecture")), family_forms()
    if (kind := metadata.get("general.type", "model")) != "model":
        raise UsageError(f"{path}: this GGUF file holds no model but {kind}: name the model's own file")
    if name not in forms:
        raise UsageError(
            f"{path}: architecture {name!r} in GGUF is not supported; supported: {', '.join(sorted(forms))}"
        )
    model_type, form = forms[name]
    own: Metadata = {
        key.removeprefix(f"{name}."): value for key, value in metadata.items() if key.startswith(f"{name}.")
    }
    if own.get("expert_count"):
        raise UsageError(f"{path}: a mixture of {own['expert_count']} experts is not supported, only dense models")
    embedding = header.tensors.get(EMBEDDING)
    missing = [f"{name}.{key}" for key in form.fields if key not in own]
    if missing or embedding is None or len(embedding.shape) != 2:
        raise DataError(f"{path}: {(missing or [EMBEDDING])[0]} is missing; get the file again")
    raw: dict[str, Any] = {"model_type": model_type}
    raw |= {field: own[key] for key, field in form.fields.items()}
    tables = {name: _numbers(header, name) for name in ROPE_TENSORS if name in header.tensors}
    own = {**own, **tables, TENSORS: header.tensors.keys()}
    try:
        raw |= form.to_config(own)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error
    raw["vocab_size"] = embedding.shape[0]
    raw["tie_word_embeddings"] = OUTPUT not in header.tensors
    ids = {ours: metadata.get(f"tokenizer.ggml.{theirs}_token_id") for ours, theirs in TOKEN_IDS.items()}
    return raw | ids  # those that the file lacks, too: a family's defaults are another vocabulary's


def _numbers(header: GgufHeader, name: str) -> list[float]:
    only = replace(header, tensors={name: header.tensors[name]})
    values: list[float] = GgufShard(only, {name: TensorForm(name)}).read(name).float().tolist()
    return values
