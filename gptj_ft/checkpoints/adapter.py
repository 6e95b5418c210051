"""Read, write and merge adapters in PEFT's format (https://huggingface.co/docs/peft/developer_guides/checkpoint)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from gptj_ft.checkpoints.architecture import read_architecture
from gptj_ft.checkpoints.base_model import find_model
from gptj_ft.checkpoints.model_folder import METADATA_FILE, Checkpoint, copy_files, open_checkpoint, write_json_file
from gptj_ft.checkpoints.weight_file import Shard, TensorInfo, open_shard, write_safetensors
from gptj_ft.config.options import Task
from gptj_ft.errors import DataError, UsageError
from gptj_ft.models.lora import (
    MAGNITUDE,
    SMALLEST,
    A,
    B,
    Rank,
    file_name,
    is_transposed,
    linear_layers,
    row_norms,
    widths,
)
from gptj_ft.models.registry import Architecture
from gptj_ft.models.trainable import locate_parameters
from gptj_ft.system.atomic import atomic_folder
from gptj_ft.system.digests import FOLDER_DIGESTS, check_file, folder_digests, read_json
from gptj_ft.system.files import SHARED_FILE, require_plain, write_file
from gptj_ft.system.paths import ADAPTER_CONFIG, TOKENIZER_FILES, is_adapter, is_model

ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_PREFIX = "base_model.model."
# Settings that change the computation, with the only supported value.
UNSUPPORTED = {
    "bias": "none", "lora_bias": False, "layer_replication": None, "alora_invocation_tokens": None, "use_bdlora": None,
    "arrow_config": None,
}  # fmt: skip
# Starts of initializations that change the model's own weights, in PEFT each time the adapter is opened.
CHANGING = ("pissa", "olora", "corda", "loftq", "lora_ga")
TASK_TYPES: Mapping[Task, str] = {  # PEFT's
    "language-model": "CAUSAL_LM",
    "classification": "SEQ_CLS",
    "multi-label": "SEQ_CLS",
    "regression": "SEQ_CLS",
    "token-labels": "TOKEN_CLS",
    "spans": "QUESTION_ANS",
}


@dataclass(frozen=True)
class Adapter:
    """Open adapter. Linear layers and parameters have Hugging Face's names."""

    folder: Path
    ranks: Mapping[str, Rank]  # rank and scaling of each adapted linear layer
    shard: Shard  # file of the parameters, under PEFT's names
    architecture: Architecture  # with the adapter's head
    transposed: frozenset[str] = frozenset()  # linear layers whose weight is stored (in, out)
    whole: frozenset[str] = frozenset()  # parameters of the head that replace the model's

    def key(self, name: str) -> str:
        """Return PEFT's name of a parameter."""
        return _key(self.architecture, name)

    def read_whole(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Return rows ``start`` to ``stop`` of a parameter of the head, by default all."""
        return self.shard.read(self.key(name), start, stop)

    def read(self, module: str, matrix: str) -> Tensor:
        """Return `A`, `B` or `MAGNITUDE` of a linear layer."""
        return self.shard.read(self.key(file_name(module, matrix)))

    def change(self, module: str) -> Tensor:
        """Compute the adapter's fp32 change of a linear layer's weight: B A times the scaling."""
        product = self.read(module, B).float() @ self.read(module, A).float()
        return (product.T if module in self.transposed else product) * self.ranks[module].scaling

    def scale(self, module: str, base: Checkpoint, change: Tensor) -> Tensor:
        """Compute DoRA's fp32 scale of a linear layer's outputs: the magnitude divided by the norms of the new weight.

        Args:
            change: the weight's change, see `change`.
        """
        norms = weight_norms(base, module, module in self.transposed, change)
        return self.read(module, MAGNITUDE).float() / norms.clamp_min_(SMALLEST)


def weight_norms(base: Checkpoint, module: str, is_transposed: bool, change: Tensor | None = None) -> Tensor:
    """Compute the fp32 norms of a linear layer's weight, one for each output; reads a few rows at a time.

    Args:
        is_transposed: whether the weight is stored (in, out).
        change: fp32 tensor added to the weight.
    """
    name, norms = f"{module}.weight", list[Tensor]()
    for start, stop in base.row_ranges(name):
        rows = base.read(name, start, stop)
        norms.append(row_norms(rows if change is None else rows.float() + change[start:stop], is_transposed))
    return torch.linalg.vector_norm(torch.stack(norms), dim=0) if is_transposed else torch.cat(norms)


class MergedCheckpoint(Checkpoint):
    """Checkpoint with an adapter merged into its weights; each weight keeps its type."""

    def __init__(self, base: Checkpoint, adapter: Adapter, is_fp32: bool = False) -> None:
        """Combine an open checkpoint and an adapter.

        Args:
            is_fp32: give the changed weights in fp32, for a conversion to another type.
        """
        super().__init__(base.folder, {})
        self._base, self._adapter, self._is_fp32 = base, adapter, is_fp32
        self.names = (*base.names, *sorted(adapter.whole - set(base.names)))
        # Of the last tensor, which may be read in pieces: its module, its change, and DoRA's scale.
        self._change: tuple[str, Tensor, Tensor | None] = "", torch.empty(0), None

    def entry(self, name: str) -> TensorInfo:
        if name in self._adapter.whole:
            return self._adapter.shard.entries[self._adapter.key(name)]
        entry = self._base.entry(name)
        is_wider = self._is_fp32 and self._module(name) is not None
        return TensorInfo(torch.float32, entry.shape) if is_wider else entry

    def file_of(self, name: str) -> Path:
        return self._adapter.shard.path if name in self._adapter.whole else self._base.file_of(name)

    def rows_at_once(self, name: str) -> int:
        return self.entry(name).rows if name in self._adapter.whole else self._base.rows_at_once(name)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        if name in self._adapter.whole:
            return self._adapter.read_whole(name, start, stop)
        tensor, module = self._base.read(name, start, stop), self._module(name)
        if module is None:
            return tensor
        last = self._change  # a local reference: another thread may replace the cache
        if last[0] != module:  # the whole product, because a product of fewer rows may round differently
            change, is_dora = self._adapter.change(module), self._adapter.ranks[module].magnitude is not None
            scale = self._adapter.scale(module, self._base, change) if is_dora else None
            self._change = last = module, change, scale
        _, change, scale = last
        merged = tensor.float() + change[start:stop]
        if scale is not None:
            merged *= scale if module in self._adapter.transposed else scale[start:stop, None]
        return merged if self._is_fp32 else merged.to(tensor.dtype)

    def _module(self, name: str) -> str | None:
        """Return the adapted linear layer that a weight belongs to; ``None`` for other tensors."""
        module, _, part = name.rpartition(".")
        return module if part == "weight" and module in self._adapter.ranks else None


def open_adapter(folder: Path, architecture: Architecture) -> Adapter:
    """Open an adapter for a model.

    Args:
        architecture: the model's, with the adapter's head: see `tuned_architecture`.
    """
    require_plain(folder)
    config = read_config(folder)
    if config.get("peft_type") != "LORA":
        raise UsageError(f"{folder / ADAPTER_CONFIG}: peft_type {config.get('peft_type')} is not supported, LORA is")
    for key, plain in UNSUPPORTED.items():
        if config.get(key, plain) not in (plain, [] if plain is None else plain):
            raise UsageError(f"{folder / ADAPTER_CONFIG}: {key} {config[key]!r} is not supported")
    if str(start := config.get("init_lora_weights")).lower().startswith(CHANGING):
        raise UsageError(
            f"{folder / ADAPTER_CONFIG}: init_lora_weights {start!r} also changes the model's own weights, which is "
            "not supported; in PEFT, save it with path_initial_model_for_weight_conversion, or merge it"
        )
    shard, places = open_weights(folder), linear_layers(architecture)
    path = shard.path
    layers, ranks = architecture.skeleton, {}
    transposed = frozenset(module for module, place in places.items() if is_transposed(architecture, *place))
    is_dora = bool(config.get("use_dora"))

    def key_of(module: str, part: str) -> str:
        return _key(architecture, file_name(module, part))

    keys = set(shard.entries)  # every key must belong to a layer or the head; the rest is an error
    for module, (index, local) in places.items():
        pair = key_of(module, A), key_of(module, B)
        if not keys.issuperset(pair):
            continue
        keys -= set(pair)
        expected = widths(layers[index].get_submodule(local))
        (rank, width), (height, same) = (shard.entries[name].shape for name in pair)
        if (width, height) != expected or rank != same:
            raise DataError(
                f"{path}: the matrices for {module} do not fit: it has {expected[0]} inputs and {expected[1]} outputs"
            )
        if is_dora:
            magnitude = key_of(module, MAGNITUDE)
            if magnitude not in keys or shard.entries[magnitude].shape != (height,):
                raise DataError(f"{path}: use_dora is true, but {magnitude} is missing or not of size {height}")
            keys.remove(magnitude)
        for part in ("weight", "bias"):  # PEFT also writes those of an adapted head
            if (own := _key(architecture, f"{module}.base_layer.{part}")) in keys:
                _check_unchanged(folder, shard.read(own), f"{module}.{part}")
                keys.remove(own)
        ranks[module] = Rank(rank, _scaling(config, module, rank), "fixed" if is_dora else None)
    whole = {
        name: tuple(like.shape)
        for local, like in layers[-1].state_dict().items()
        if _key(architecture, name := architecture.family.name_of(len(layers) - 1, local, len(layers))) in keys
    }
    for name, shape in whole.items():
        keys.remove(_key(architecture, name))
        if (stored := shard.entries[_key(architecture, name)].shape) != shape:
            raise DataError(f"{path}: {name} has shape {list(stored)}, the model's head {list(shape)}")
    others = (locate_parameters(architecture).keys() | architecture.ties().keys()) - whole.keys()
    for module in config.get("modules_to_save") or ():  # PEFT also lists modules that the model does not have
        if any(f".{module}." in f".{name}" for name in others):
            raise UsageError(
                f"{folder / ADAPTER_CONFIG}: modules_to_save {module!r} is not supported: only modules of a "
                "head are, with all their weights in the file"
            )
    if keys:
        raise DataError(f"{path}: {min(keys)} belongs to no linear layer of this {architecture.family.model_type}")
    return Adapter(folder, ranks, shard, architecture, transposed, frozenset(whole))


def _check_unchanged(folder: Path, copy: Tensor, name: str) -> None:
    """Raise `UsageError` unless an adapter's copy of a parameter equals the base model's."""
    with open_checkpoint(base_folder(folder)) as base:
        is_same = name in base.names and torch.equal(copy.float(), base.read(name).float())
    if not is_same:
        raise UsageError(
            f"{folder}: its copy of {name} differs from the base model's, which is not supported; merge it in PEFT"
        )


def tuned_architecture(folder: Path) -> Architecture:
    """Read the architecture of a model; for an adapter, that of its base model with the adapter's head.

    Raises:
        UsageError, DataError: see `read_architecture`, `base_folder` and `with_head_of`.
    """
    base = base_folder(folder)
    architecture = read_architecture(base)
    return architecture if base == folder else with_head_of(folder, architecture)


def with_head_of(folder: Path, architecture: Architecture) -> Architecture:
    """Return a model's architecture with the head of an adapter.

    The adapter's ``gptj_ft.json`` gives task and labels. Without it, they are the model's own if its head has the same
    shape; else labels are LABEL_0, LABEL_1, ...

    Raises:
        UsageError, DataError: the adapter is damaged, or the family does not have its head.
    """
    kind, shard = read_config(folder).get("task_type"), open_weights(folder)
    # SEQ_CLS stands for three tasks. The first one, classification, is corrected below.
    task = next((task for task, name in TASK_TYPES.items() if name == kind and kind != "CAUSAL_LM"), None)
    path = folder / METADATA_FILE
    recorded = read_json(path).get("head") if path.is_file() else None
    labels: tuple[str, ...] = ()
    if recorded is not None:
        try:
            task, labels = recorded["task"], tuple(map(str, recorded["labels"]))
        except (TypeError, KeyError) as error:
            raise DataError(f"{path} is damaged: head {recorded!r:.200}") from error
        if task not in get_args(Task):
            raise DataError(f"{path} is damaged: there is no task {task!r:.200}")
    elif task is not None and (head := architecture.family.head_for(task)) is not None:
        outputs = (f"{_PREFIX}{head.output}.weight", f"{_PREFIX}{head.output}.out_proj.weight")
        num_outputs = next((shard.entries[name].shape[0] for name in outputs if name in shard.entries), 0)
        if architecture.head is head and num_outputs in (0, architecture.num_outputs):
            task, labels = architecture.task, architecture.labels
        # transformers, too, treats a single output as regression.
        elif task == "classification" and num_outputs == 1:
            task = "regression"
        elif task != "spans":
            labels = tuple(f"LABEL_{number}" for number in range(num_outputs))
    if task is None:
        return architecture
    architecture = architecture.with_head(task, labels)
    num_layers = len(architecture.skeleton)
    names = {
        architecture.family.name_of(num_layers - 1, local, num_layers)
        for local in architecture.skeleton[-1].state_dict()
    }
    return replace(architecture, new=frozenset(name for name in names if _key(architecture, name) in shard.entries))


def open_weights(folder: Path) -> Shard:
    """Open the file of an adapter's matrices."""
    path = next((folder / name for name in ADAPTER_WEIGHTS if (folder / name).is_file()), None)
    if path is None:
        raise UsageError(f"{folder} holds no adapter's weights: looked for {', '.join(ADAPTER_WEIGHTS)}")
    return open_shard(path)


def base_folder(folder: Path) -> Path:
    """Return the folder of an adapter's base model; a model's folder is returned unchanged."""
    if not is_adapter(folder):
        return folder
    name = str(read_config(folder).get("base_model_name_or_path"))
    try:
        base = find_model(name)
    except UsageError:
        base = folder
    if not is_model(base):
        raise UsageError(
            f"{folder} is an adapter for {name}, which does not exist: fetch it with `gptj-ft download`, or set "
            f"base_model_name_or_path in {folder / ADAPTER_CONFIG} to its folder"
        )
    return base


def weight_bytes(folder: Path) -> int:
    """Return the size of an adapter's weights; 0 for a model's folder."""
    return sum((folder / name).stat().st_size for name in ADAPTER_WEIGHTS if (folder / name).is_file())


def tokenizer_folder(folder: Path) -> Path:
    """Return the folder of the tokenizer: the model's or adapter's own, else the base model's."""
    has_own = any((folder / name).is_file() for name in TOKENIZER_FILES)
    return folder if has_own else base_folder(folder)


def write_adapter(
    folder: Path,
    base: Path,
    settings: Mapping[str, Any],
    layers: Iterable[Mapping[str, Tensor]],
    files: Mapping[str, str],
) -> None:
    """Write a new adapter folder, atomically.

    Args:
        base: folder of the base model; its tokenizer files are copied.
        settings: fields of PEFT's configuration that differ between adapters.
        layers: matrices of each layer, by PEFT's names without their prefix.
        files: texts by file name.

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


def read_config(folder: Path) -> dict[str, Any]:
    """Read PEFT's configuration of an adapter."""
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        raise UsageError(f"{folder} is no adapter: it has no {ADAPTER_CONFIG}")
    check_file(path)
    return read_json(path)


def _scaling(config: Mapping[str, Any], module: str, rank: int) -> float:
    """Return alpha / rank, or alpha / sqrt(rank) for rsLoRA (https://arxiv.org/abs/2312.03732)."""
    # PEFT matches a pattern against the end of the module's name, after a dot.
    patterns = config.get("alpha_pattern") or {}
    own = next((alpha for pattern, alpha in patterns.items() if re.match(rf"(.*\.)?({pattern})$", module)), None)
    alpha = float(config.get("lora_alpha", 8) if own is None else own)
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _key(architecture: Architecture, name: str) -> str:
    return f"{_PREFIX}{architecture.file_name(name)}"
