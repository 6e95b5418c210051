"""Keep the codes of a GGUF file's matrices while it is converted."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gptj_ft.checkpoints.gguf.source import GgufShard, StoredCodes
from gptj_ft.checkpoints.model_folder import Checkpoint
from gptj_ft.checkpoints.quantize import (
    PartsCheckpoint,
    StoredPart,
    as_bytes,
    describe,
    quantized_names,
    vocabulary_names,
)
from gptj_ft.checkpoints.quantized import GGML_STATE
from gptj_ft.checkpoints.weight_file import TensorInfo
from gptj_ft.errors import DataError, UsageError
from gptj_ft.models.quantization.form import CODES, QuantizedForm
from gptj_ft.models.quantization.ggml import GGML
from gptj_ft.models.registry import Architecture


class KeptCodes(PartsCheckpoint):
    """A GGUF file whose linear layers, embedding and head keep their codes; all other tensors get plain values."""

    def __init__(self, source: Checkpoint, architecture: Architecture, dtype: torch.dtype | None) -> None:
        """Choose the matrices.

        Args:
            dtype: type of all values; ``None``: fp32 for quantized tensors, else each tensor's own.

        Raises:
            UsageError: no GGUF file, or none of its matrices has codes that are kept.
        """
        super().__init__(source, dtype)
        self._kinds = Counter[str]()
        for name in (*quantized_names(architecture), *vocabulary_names(architecture)):
            stored = source.stored(name)
            if stored is None or not isinstance(stored[0], GgufShard):
                raise UsageError(f"--quantize keep needs a GGUF file, whose codes it keeps; {source.folder} is none")
            if (codes := stored[0].codes(stored[1])) is not None:
                self._add(name, codes)
                self._kinds[codes.codec.name] += 1
        if not self._kinds:
            raise UsageError(
                f"{source.folder}: none of its matrices is quantized as {', '.join(GGML)}, whose codes are kept; "
                "leave out --quantize, or name nf4 or int8"
            )
        self._list_names()

    def quantization_config(self, dtype: torch.dtype) -> dict[str, Any]:
        return {"quant_method": "ggml", "types": dict(self._kinds)}  # only this program opens such folders

    @property
    def quantization_name(self) -> str:
        return " and ".join(sorted(self._kinds))

    def _add(self, name: str, codes: StoredCodes) -> None:
        form = codes.form(self._dtype or self._source.dtype(name))
        names = {part: name if part == CODES else f"{name}.{part}" for part in form.parts()}
        for part, (dtype, numbers) in form.parts().items():
            entry = TensorInfo(dtype, (form.rows, form.columns // numbers))
            self._tensors[names[part]] = StoredPart(entry, partial(self._part, codes, form, part), form.rows)
        self._add_constant(f"{name}.{GGML_STATE}", as_bytes({"type": codes.codec.name, **describe(form)}))
        self._by_matrix[name] = [*names.values(), f"{name}.{GGML_STATE}"]

    def _part(self, codes: StoredCodes, form: QuantizedForm, part: str, start: int, stop: int) -> Tensor:
        items = codes.read()
        for values in items.values():
            if values.dtype == torch.float16 and not values.isfinite().all():
                raise DataError(
                    f"{codes.stored.path}: {codes.tensor_form.name} has scales of NaN or infinity; get the file again"
                )
        return items[part].view(form.rows, -1)[start:stop].clone()
