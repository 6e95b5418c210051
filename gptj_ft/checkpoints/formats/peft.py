"""Read, write and merge adapters in PEFT's format (https://huggingface.co/docs/peft/developer_guides/checkpoint)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptj_ft.checkpoints.base_model import find_model
from gptj_ft.checkpoints.formats.safetensors import open_shard, write_safetensors
from gptj_ft.checkpoints.formats.tensor_info import Shard, TensorInfo
from gptj_ft.checkpoints.model_folder import Checkpoint, copy_files, write_json_file
from gptj_ft.errors import DataError, UsageError
from gptj_ft.models.lora import A, B, Rank, is_transposed, linear_layers, widths
from gptj_ft.models.registry import Architecture
from gptj_ft.system.atomic import atomic_folder
from gptj_ft.system.digests import FOLDER_DIGESTS, check_file, folder_digests, read_json
from gptj_ft.system.files import SHARED_FILE, require_plain, write_file
from gptj_ft.system.paths import ADAPTER_CONFIG, TOKENIZER_FILES, is_adapter, is_model

ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_PREFIX = "base_model.model."
# What would compute something else than LoRA, and what it has to be for it not to.
UNSUPPORTED = {
    "use_dora": False,
    "bias": "none",
    "lora_bias": False,
    "modules_to_save": None,
    "layer_replication": None,
}


@dataclass(frozen=True)
class Adapter:
    """Opened adapter.

    Attributes:
        folder: the adapter's folder.
        ranks: rank and scaling of each adapted linear layer, by Hugging Face's names.
        shard: file of the matrices, under PEFT's names.
        transposed: linear layers whose weight is stored (in, out).
    """

    folder: Path
    ranks: Mapping[str, Rank]
    shard: Shard
    transposed: frozenset[str] = frozenset()

    def read(self, module: str, matrix: str) -> Tensor:
        """Return a linear layer's matrix, `lora.A` or `lora.B`."""
        return self.shard.read(_key(module, matrix))

    def change(self, module: str) -> Tensor:
        """Return what the adapter adds to a linear layer's weight, fp32."""
        product = self.read(module, B).float() @ self.read(module, A).float()
        return (product.T if module in self.transposed else product) * self.ranks[module].scaling


class MergedCheckpoint(Checkpoint):
    """Checkpoint with an adapter merged into its weights, in their own types."""

    def __init__(self, base: Checkpoint, adapter: Adapter) -> None:
        super().__init__(base.folder, {})
        self._base, self._adapter, self.names = base, adapter, base.names
        self._change: tuple[str, Tensor] = "", torch.empty(0)  # the last one: a tensor may be read in pieces

    def entry(self, name: str) -> TensorInfo:
        return self._base.entry(name)

    def file_of(self, name: str) -> Path:
        return self._base.file_of(name)

    def rows_at_once(self, name: str) -> int:
        return self._base.rows_at_once(name)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        tensor, module = self._base.read(name, start, stop), name.removesuffix(".weight")
        if module == name or module not in self._adapter.ranks:
            return tensor
        last = self._change  # which another thread may replace
        if last[0] != module:  # whole, since a product of some rows may be rounded otherwise
            self._change = last = module, self._adapter.change(module)
        return (tensor.float() + last[1][start:stop]).to(tensor.dtype)


def open_adapter(folder: Path, architecture: Architecture) -> Adapter:
    """Open an adapter for a model.

    Raises:
        UsageError: no adapter, or of a kind that is not supported.
        DataError: damaged, or made for another model.
    """
    require_plain(folder)
    config = _read_config(folder)
    if config.get("peft_type") != "LORA":
        raise UsageError(f"{folder / ADAPTER_CONFIG}: peft_type {config.get('peft_type')} is not supported, LORA is")
    for key, plain in UNSUPPORTED.items():
        if config.get(key, plain) not in (plain, [] if plain is None else plain):
            raise UsageError(f"{folder / ADAPTER_CONFIG}: {key} {config[key]!r} is not supported")
    path = next((folder / name for name in ADAPTER_WEIGHTS if (folder / name).is_file()), None)
    if path is None:
        raise UsageError(f"{folder} holds no adapter's weights: looked for {', '.join(ADAPTER_WEIGHTS)}")
    shard, places = open_shard(path), linear_layers(architecture)
    layers, ranks = architecture.layers(), {}
    transposed = frozenset(module for module, place in places.items() if is_transposed(architecture, *place))
    keys = set(shard.entries)
    for module, (index, local) in places.items():
        pair = _key(module, A), _key(module, B)
        if not keys.issuperset(pair):
            continue
        keys -= set(pair)
        expected = widths(layers[index].get_submodule(local))
        (rank, width), (height, same) = (shard.entries[key].shape for key in pair)
        if (width, height) != expected or rank != same:
            raise DataError(
                f"{path}: the matrices for {module} do not fit: it takes {expected[0]} and gives {expected[1]}"
            )
        ranks[module] = Rank(rank, _scaling(config, module, rank))
    if keys:
        raise DataError(f"{path}: {min(keys)} belongs to no linear layer of this {architecture.family.model_type}")
    return Adapter(folder, ranks, shard, transposed)


def base_folder(folder: Path) -> Path:
    """Return the folder of the model that an adapter is for; a model's folder itself.

    Raises:
        UsageError: that model is not there.
    """
    if not is_adapter(folder):
        return folder
    name = str(_read_config(folder).get("base_model_name_or_path"))
    try:
        found = find_model(name)
    except UsageError:
        found = folder
    if not is_model(found):
        raise UsageError(
            f"{folder} is an adapter for {name}, which is not there: fetch it with `gptj-ft download`, or write where "
            f"it is into base_model_name_or_path of {folder / ADAPTER_CONFIG}"
        )
    return found


def weight_bytes(folder: Path) -> int:
    """Return the size of the weights in an adapter's folder; 0 of a model's, which has none."""
    return sum((folder / name).stat().st_size for name in ADAPTER_WEIGHTS if (folder / name).is_file())


def tokenizer_folder(folder: Path) -> Path:
    """Return where the tokenizer of a model or an adapter is: an adapter may have none of its own."""
    has_own = any((folder / name).is_file() for name in TOKENIZER_FILES)
    return folder if has_own else base_folder(folder)


def write_adapter(
    folder: Path,
    base: Path,
    settings: Mapping[str, Any],
    layers: Iterable[Mapping[str, Tensor]],
    files: Mapping[str, str],
) -> None:
    """Write an adapter's folder, atomically.

    Args:
        folder: target, which must not exist.
        base: folder of the base model, whose tokenizer files are copied.
        settings: fields of PEFT's configuration that differ between adapters.
        layers: matrices by PEFT's names without their prefix, layer by layer.
        files: other texts of the folder, by file name.

    Raises:
        UsageError: the folder exists, or cannot be written.
        ResourceError: the disk is full.
    """
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base.resolve()), **settings,
        "bias": "none", "inference_mode": True, "init_lora_weights": True,
    }  # fmt: skip
    with atomic_folder(folder) as draft:
        tensors = {f"{_PREFIX}{name}": matrix.clone() for layer in layers for name, matrix in layer.items()}
        _, digest = write_safetensors(draft / ADAPTER_WEIGHTS[0], tensors, torch.float32)
        copy_files(base, draft, TOKENIZER_FILES)
        for name, text in files.items():
            write_file(draft / name, text, SHARED_FILE)
        write_json_file(draft / ADAPTER_CONFIG, config)
        write_json_file(draft / FOLDER_DIGESTS, folder_digests(draft, {ADAPTER_WEIGHTS[0]: digest}))


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        raise UsageError(f"{folder} is no adapter: it has no {ADAPTER_CONFIG}")
    check_file(path)
    return read_json(path)


def _scaling(config: Mapping[str, Any], module: str, rank: int) -> float:
    """Return alpha / rank, or over its root (https://arxiv.org/abs/2312.03732); alpha may differ by layer."""
    patterns = config.get("alpha_pattern") or {}
    own = next((alpha for pattern, alpha in patterns.items() if re.match(rf"(.*\.)?({pattern})$", module)), None)
    alpha = float(config.get("lora_alpha", 8) if own is None else own)
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _key(module: str, matrix: str) -> str:
    return f"{_PREFIX}{module}.{matrix}.weight"
