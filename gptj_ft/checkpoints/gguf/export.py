"""Export a model or an adapter as a GGUF file for llama.cpp; a model with an Ollama Modelfile next to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from gptj_ft.checkpoints.adapter import Adapter
from gptj_ft.checkpoints.gguf.layout import TensorForm, form_of, tensor_forms
from gptj_ft.checkpoints.gguf.modelfile import modelfile
from gptj_ft.checkpoints.gguf.tokenizer import Vocabulary, read_vocabulary
from gptj_ft.checkpoints.gguf.writer import FILE_TYPES, GgufFile, GgufType, NewTensor, new_files
from gptj_ft.checkpoints.source import CheckpointSource
from gptj_ft.checkpoints.transfer import TensorTransfer
from gptj_ft.checkpoints.weight_file import TensorInfo
from gptj_ft.errors import UsageError
from gptj_ft.models.gguf_form import GgufForm
from gptj_ft.models.lora import A, B
from gptj_ft.models.registry import Architecture
from gptj_ft.system.files import SHARED_FILE, write_file
from gptj_ft.system.ordered_tasks import SizedTask, run_ordered

TYPES: Mapping[torch.dtype, GgufType] = {
    torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F32",
}  # fmt: skip
BLOCK = 32  # numbers of a Q8_0 block
# llama.cpp computes with this one in fp32, whatever the type of the matrices.
POSITIONS = "position_embd.weight"


@dataclass(frozen=True)
class _Planned:
    """A tensor to write, and where it comes from."""

    own: str  # Hugging Face's name
    form: TensorForm
    new: NewTensor


class GgufExport:
    """Export of one model."""

    def __init__(
        self,
        source: CheckpointSource,
        dtype: torch.dtype | Literal["q8_0"] | None,
        tokenizer: Path,
        name: str,
        advance: Callable[[int], None],
    ) -> None:
        """Translate the model's shape and its tokenizer.

        Args:
            dtype: type of the matrices; ``None``: each one's own. Vectors are always fp32.
            tokenizer: folder of the tokenizer.
            name: ``general.name``.
            advance: callback of the bytes written or verified since the last call.

        Raises:
            UsageError: llama.cpp does not have the family, the tokenizer or a setting of the model.
            DataError: the tokenizer has more tokens than the model.
        """
        architecture, config = source.architecture, source.architecture.config
        form = form_of(architecture, source.path)
        try:
            further = form.to_metadata(config)
        except UsageError as error:
            raise UsageError(f"{source.path}: {error}; use --to huggingface") from error
        self._checkpoint, self._advance = source.checkpoint, advance
        stored = dtype if isinstance(dtype, torch.dtype) else None
        self.transfer = TensorTransfer(architecture, source.checkpoint, stored, lambda num_bytes: None)
        forms, is_quantized = tensor_forms(architecture, form), dtype == "q8_0"
        self._planned = [_planned(own, entry, forms[own], is_quantized) for own, entry in self.transfer.entries.items()]
        self._factors = form.rope_factors(config)
        self._vocabulary = read_vocabulary(tokenizer, config.vocab_size, architecture.raw)
        kinds = [each.new.kind for each in self._planned if len(each.new.shape) > 1]
        self.kind: GgufType = "Q8_0" if "Q8_0" in kinds else max(set(kinds), key=kinds.count)
        self._metadata = {
            "general.architecture": form.architecture,
            "general.type": "model",
            "general.name": _safe_name(name, self._vocabulary),
            "general.file_type": FILE_TYPES[self.kind],
            "general.quantization_version": 2,
            **_shape(architecture, form, further),
            **{f"tokenizer.{key}": value for key, value in self._vocabulary.metadata.items()},
        }
        self.bytes = sum(each.new.num_bytes for each in self._planned)

    @property
    def tensors(self) -> list[NewTensor]:
        return [each.new for each in self._planned]

    def write(self, target: Path) -> None:
        """Write the file and the Modelfile, atomically.

        Raises:
            DataError: the source is damaged, or holds values that cannot be stored.
        """
        tensors = self.tensors
        tensors = [NewTensor(name, "F32", tuple(factors.shape)) for name, factors in self._factors.items()] + tensors
        planned = {each.new.name: each for each in self._planned}
        tasks = (task for each in self._planned for task in self._tasks(each))
        with new_files(target, target.with_suffix(".Modelfile")) as (draft, text):
            with closing(run_ordered(tasks)) as pieces:

                def pieces_of(tensor: NewTensor) -> Iterator[Tensor]:
                    if tensor.name in self._factors:
                        yield self._factors[tensor.name]
                        return
                    each = planned[tensor.name]
                    for _ in self._ranges(each):
                        piece = next(pieces)
                        self.transfer.inspect(each.own, piece)
                        yield piece if each.form.is_plain else each.form.store(piece)

                GgufFile(self._metadata, tensors, self._advance).write(draft, pieces_of)
            write_file(text, modelfile(target, self._vocabulary), SHARED_FILE)

    def _ranges(self, planned: _Planned) -> list[tuple[int, int]]:
        """Return the rows to read together: all of them if their order changes."""
        rows = self._checkpoint.row_ranges(planned.own)
        return list(rows) if planned.form.is_plain else [(0, self._checkpoint.entry(planned.own).rows)]

    def _tasks(self, planned: _Planned) -> Iterator[SizedTask[Tensor]]:
        for rows in self._ranges(planned):
            yield self._checkpoint.read_task(planned.own, rows)


def _planned(own: str, entry: TensorInfo, form: TensorForm, is_quantized: bool) -> _Planned:
    shape = form.shape(entry.shape)
    if len(shape) < 2 or form.name == POSITIONS:
        kind: GgufType = "F32"
    elif is_quantized:
        kind = "F16" if shape[-1] % BLOCK else "Q8_0"  # as llama.cpp's converter for other widths
    else:
        kind = TYPES.get(entry.dtype, "F32")
    return _Planned(own, form, NewTensor(form.name, kind, shape))


def _safe_name(name: str, vocabulary: Vocabulary) -> str:
    """Return ``general.name``. By it, llama.cpp recognizes Phi-3's tokenizer, and crashes if that has no ``</s>``."""
    is_like = any(part in name.lower() for part in ("phi-3", "phi3"))
    return "model" if is_like and "</s>" not in vocabulary.tokens else name


def _shape(architecture: Architecture, form: GgufForm, further: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of a model's shape."""
    config = architecture.config
    own = {key: getattr(config, field) for key, field in form.fields.items()}
    own |= {"vocab_size": config.vocab_size, **further}
    return {f"{form.architecture}.{key}": value for key, value in own.items()}


def export_adapter(
    adapter: Adapter, architecture: Architecture, target: Path, advance: Callable[[int], None]
) -> list[NewTensor]:
    """Write an adapter as a GGUF file for ``llama.cpp --lora``, atomically, in fp32; return its tensors.

    Args:
        architecture: the base model's.

    Raises:
        UsageError: llama.cpp does not have the family, or the adapter is DoRA or has a head.
    """
    form = form_of(architecture, adapter.folder)
    if adapter.whole:
        raise UsageError(f"{adapter.folder}: this adapter replaces {min(adapter.whole)}, which has no form in GGUF")
    if any(rank.magnitude for rank in adapter.ranks.values()):
        raise UsageError(
            f"{adapter.folder}: llama.cpp has no DoRA adapters; merge it, type "
            f"`gptj-ft convert --merge {adapter.folder} --to gguf`"
        )
    forms = tensor_forms(architecture, form)
    first = next(iter(adapter.ranks.values()))
    alpha = first.rank * first.scaling
    matrices: dict[str, Tensor] = {}
    for module, rank in adapter.ranks.items():
        place = forms[f"{module}.weight"]
        b = adapter.read(module, B).float()
        # llama.cpp scales all by alpha / rank: other scalings, as of rsLoRA, go into B.
        if rank.rank * rank.scaling != alpha:
            b = b * (rank.scaling * rank.rank / alpha)
        matrices[f"{place.name}.lora_a"] = adapter.read(module, A).float()
        matrices[f"{place.name}.lora_b"] = b if place.order is None else b[place.order]
    metadata = {
        "general.architecture": form.architecture,
        "general.type": "adapter",
        "general.name": target.stem,
        "general.file_type": FILE_TYPES["F32"],
        "adapter.type": "lora",
        "adapter.lora.alpha": alpha,
    }
    tensors = [NewTensor(name, "F32", tuple(matrix.shape)) for name, matrix in matrices.items()]
    with new_files(target) as (draft,):
        GgufFile(metadata, tensors, advance).write(draft, lambda tensor: iter([matrices[tensor.name]]))
    return tensors
