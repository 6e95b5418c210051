"""Relate a model's tensors to those of its GGUF file: names, order of rows, transposition, offset of norms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gptj_ft.errors import UsageError
from gptj_ft.models.gguf_form import GgufForm
from gptj_ft.models.lora import is_transposed
from gptj_ft.models.registry import Architecture, families
from gptj_ft.system.memory import contiguous

OUTPUT = "output.weight"
# Types of ggml that are read, with the numbers and bytes of a block. K types have blocks of 256 numbers.
READ_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")


@dataclass(frozen=True)
class TensorForm:
    """The form of a tensor in a GGUF file."""

    name: str  # in the file
    order: Tensor | None = None  # for each stored row, its row in Hugging Face's tensor
    is_transposed: bool = False  # Hugging Face stores (in, out)
    offset: float = 0.0  # added to the stored numbers

    @property
    def is_plain(self) -> bool:
        """Whether rows are stored as they are, so that some can be read without the others."""
        return self.order is None and not self.is_transposed and not self.offset

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Return Hugging Face's shape for a stored shape, and the reverse."""
        return stored[::-1] if self.is_transposed else stored

    def store(self, tensor: Tensor) -> Tensor:
        """Return a whole tensor as llama.cpp stores it."""
        if self.offset:
            tensor = tensor.float() + self.offset
        if self.is_transposed:
            tensor = contiguous(tensor.t())
        return tensor if self.order is None else tensor[self.order]

    def restore(self, stored: Tensor) -> Tensor:
        """Return a whole stored tensor as Hugging Face has it: the inverse of `store`."""
        if self.order is not None:
            stored = stored[torch.argsort(self.order)]
        if self.is_transposed:
            stored = contiguous(stored.t())
        return stored.float() - self.offset if self.offset else stored


def form_of(architecture: Architecture, place: Path) -> GgufForm:
    """Return the family's form.

    Args:
        place: the model, for the message.

    Raises:
        UsageError: llama.cpp does not have the family, or the model has a head for labels.
    """
    family = architecture.family
    if family.gguf is None:
        raise UsageError(
            f"{place}: llama.cpp has no graph for {family.model_type}, so no program could run it as GGUF; "
            "use --to huggingface"
        )
    if architecture.task is not None:
        raise UsageError(f"{place}: a head for {architecture.task} has no form in GGUF; use --to huggingface")
    return family.gguf


def tensor_forms(architecture: Architecture, form: GgufForm) -> dict[str, TensorForm]:
    """Return the form of each tensor, tied ones included, by Hugging Face's names."""
    import gguf

    family, layers = architecture.family, architecture.skeleton
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == form.architecture)
    names = gguf.get_tensor_name_map(number, len(layers) - 2)
    forms = {}
    for index, layer in enumerate(layers):
        for local in layer.state_dict():
            own = family.name_of(index, local, len(layers))
            module, _, part = own.rpartition(".")
            stored = names.get_name(module)
            assert stored is not None, f"llama.cpp has no tensor {own} in {form.architecture}"
            is_norm, is_weight = stored.endswith("norm"), part == "weight"
            forms[own] = TensorForm(
                f"{stored}.{part}",
                form.row_order(architecture.config, own),
                is_weight and is_transposed(architecture, index, local.removesuffix(".weight")),
                form.norm_offset if is_norm and is_weight else 0.0,
            )
    return forms | dict.fromkeys(architecture.ties(), TensorForm(OUTPUT))


def family_forms() -> Mapping[str, tuple[str, GgufForm]]:
    """Return the families that llama.cpp has, by ``general.architecture``: ``model_type`` and form.

    Several families may share an architecture, such as Llama and Mistral; the first is returned.
    """
    forms: dict[str, tuple[str, GgufForm]] = {}
    for model_type, family in families().items():
        if family.gguf is not None:
            forms.setdefault(family.gguf.architecture, (model_type, family.gguf))
    return forms
