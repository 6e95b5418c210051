"""What a run ends with: the tuned model, or the adapter and, if asked for, the model with it merged in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from gptj_ft.durable import discard, hidden_name
from gptj_ft.formats.adapters import MergedCheckpoint, open_adapter, write_adapter
from gptj_ft.formats.huggingface import layer_tensors, open_checkpoint, write_model
from gptj_ft.lora import is_transposed, linear_layers, name_of
from gptj_ft.model import whole_layers
from gptj_ft.run import MERGED
from gptj_ft.selection import Selection
from gptj_ft.tuned import Trained, files_of


def write_outcome(target: Path, trained: Trained, selection: Selection, layers: Iterator[dict[str, Tensor]]) -> None:
    """Write what was trained.

    Args:
        target: the folder of the model, or of the adapter; it must not exist.
        trained: what it comes from.
        selection: what was trained of it.
        layers: that, fp32, layer by layer.

    Raises:
        UsageError, DataError, ResourceError: as `write_model` and `write_adapter`.
    """
    files, family, base = files_of(trained), trained.architecture.family, trained.base
    if not selection.adapters:
        whole = whole_layers(trained.architecture, base, selection, layers)
        write_model(target, trained.architecture, whole, dtype=None, source=base, files=files)
        return
    merges = trained.recipe.lora.merge
    draft = hidden_name(target, "unmerged") if merges else target
    if merges:
        discard(draft)
    named = (
        {name_of(family, index, local, len(selection.trained)): view for local, view in layer.items()}
        for index, layer in enumerate(layers)
    )
    write_adapter(draft, base, peft_settings(trained, selection), named, files_of(trained, is_adapter=True))
    if merges:
        # The adapter comes last: where it is, everything is.
        discard(target.with_name(MERGED))
        write_merged(target.with_name(MERGED), trained, draft, files)
        draft.rename(target)


def write_merged(target: Path, trained: Trained, adapter: Path, files: Mapping[str, str]) -> None:
    """Write a model with an adapter merged in, tensor by tensor, in the types of the model's folder."""
    architecture = trained.architecture
    with open_checkpoint(trained.base) as base:
        merged = MergedCheckpoint(base, open_adapter(adapter, architecture))
        layers = (layer_tensors(architecture, merged, index) for index in range(len(architecture.layers())))
        write_model(target, architecture, layers, dtype=None, source=trained.base, files=files)


def peft_settings(trained: Trained, selection: Selection) -> dict[str, Any]:
    """Return what PEFT's configuration says of an adapter made here.

    PEFT takes names of linear layers, whole or from any dot on, but no shell patterns.
    """
    lora, architecture = trained.recipe.lora, trained.architecture
    targets, places = lora.targets or architecture.family.lora_targets, linear_layers(architecture)
    matching = {name for name in places for target in targets if f".{name}".endswith(f".{target}")}
    return {
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": list(targets if matching == set(selection.adapters) else selection.adapters),
        "fan_in_fan_out": any(is_transposed(architecture, *places[name]) for name in selection.adapters),
    }
