"""Export a run as a tuned model, or as an adapter and optionally the merged model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from gptj_ft.checkpoints.adapter import TASK_TYPES, MergedCheckpoint, open_adapter, weight_norms, write_adapter
from gptj_ft.checkpoints.metadata import TunedModel, metadata_files
from gptj_ft.checkpoints.model_folder import layer_tensors, open_checkpoint, write_model
from gptj_ft.config.run_folder import MERGED, Run
from gptj_ft.data.dataset import load_dataset
from gptj_ft.errors import DataError, UsageError
from gptj_ft.models.layer_sampling import layer_choice
from gptj_ft.models.lora import MAGNITUDE, is_transposed, name_of, targets_in
from gptj_ft.models.trainable import Selection, select
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.streaming.open import trained_parameters, whole_layers
from gptj_ft.system.atomic import require_new
from gptj_ft.system.files import discard, hidden_name, sync_path
from gptj_ft.system.paths import is_model
from gptj_ft.training.checkpoint import parameters
from gptj_ft.training.retention import find_checkpoint
from gptj_ft.training.run_state import RunState
from gptj_ft.training.setup import TrainSetup, trained_architecture
from gptj_ft.training.verify import Checker


@dataclass(frozen=True)
class ExportedState:
    """The state of a run that becomes the tuned model."""

    step: int  # optimizer steps
    validation_loss: float | None  # nats per target token; None without validation rows


def export_model(
    setup: TrainSetup, run: Run, offloaded: OffloadedModel, state: RunState, exported: ExportedState
) -> None:
    """Write the tuned model of a run.

    Args:
        run: has a checkpoint of the exported state, unless that is the last state.
        offloaded: flushed model in its last state.
        state: last state of the run.
    """
    data = {"sha256": setup.data_sha256, "rows": len(setup.train), "validation_rows": len(setup.validation)}
    metrics = {
        "validation_loss": exported.validation_loss,
        "baseline_validation_loss": state.loss_before,
        "steps": exported.step,
        "best": state.best.to_dict() if state.best else None,
        "updates_before": state.updates_before,
    }
    trained = TunedModel(setup.recipe, setup.model, setup.architecture, data, metrics)
    is_last, whole = exported.step == state.step, setup.whole or setup.selection
    # The best state may be older than the stores: read it from its checkpoint.
    own = trained_parameters(offloaded) if is_last else parameters(run.checkpoint(exported.step), offloaded.layouts)
    layers = offloaded.exchange.gather_layers(own, whole.trained)
    if setup.parallel.world.rank == 0:
        merged = run.folder / MERGED
        if whole.adapters and setup.recipe.lora.merge:
            discard(merged)  # a killed process may have written it
        write_outcome(run.model, merged, trained, whole, layers)
    elif not setup.parallel.is_replica:
        # Iterating sends this rank's layers to rank 0; replicas have the same ones.
        for _ in layers:
            pass


def write_outcome(
    target: Path, merged: Path, trained: TunedModel, selection: Selection, layers: Iterator[dict[str, Tensor]]
) -> None:
    """Write a tuned model, or an adapter and the merged model if the recipe wants it.

    Args:
        target: new folder.
        merged: new folder of the merged model.
        selection: trained parameters.
        layers: trained parameters by layer, fp32.
    """
    files, base = metadata_files(trained), trained.base
    if not selection.adapters:
        whole = whole_layers(trained.architecture, base, selection, layers)
        write_model(target, trained.architecture, whole, dtype=None, source=base, files=files)
        return
    merges = trained.recipe.lora.merge
    draft = hidden_name(target, "unmerged") if merges else target
    if merges:
        discard(draft)
    files_of_adapter = metadata_files(trained, is_adapter=True)
    write_adapter(draft, base, peft_settings(trained, selection), peft_layers(trained, layers), files_of_adapter)
    if merges:
        # Rename the adapter last: its folder marks the run as finished.
        write_merged(merged, trained, draft, files)
        draft.rename(target)
        sync_path(target.parent)


def peft_layers(trained: TunedModel, layers: Iterable[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Yield each layer's adapters by PEFT's names; a magnitude is the trained difference plus the frozen norms."""
    architecture = trained.architecture
    with open_checkpoint(trained.base) as base:
        for index, layer in enumerate(layers):
            named = {}
            for local, view in layer.items():
                name = name_of(architecture.family, index, local, len(architecture.skeleton))
                module, _, part = name.rpartition(".")
                if part == MAGNITUDE:
                    turned = is_transposed(architecture, index, local.removesuffix(f".{MAGNITUDE}"))
                    view = view + weight_norms(base, module, turned)
                named[architecture.file_name(name)] = view
            yield named


def write_merged(target: Path, trained: TunedModel, adapter: Path, files: Mapping[str, str]) -> None:
    """Write the base model with an adapter merged in, tensor by tensor, in the base model's types."""
    architecture = trained.architecture
    with open_checkpoint(trained.base) as base:
        merged = MergedCheckpoint(base, open_adapter(adapter, architecture))
        layers = (layer_tensors(architecture, merged, index) for index in range(len(architecture.skeleton)))
        write_model(target, architecture, layers, dtype=None, source=trained.base, files=files)


def peft_settings(trained: TunedModel, selection: Selection) -> dict[str, Any]:
    """Build PEFT's configuration of an adapter."""
    lora, architecture = trained.recipe.lora, trained.architecture
    places = targets_in(architecture)
    prefix = architecture.family.prefix
    heads = sorted({name.removeprefix(prefix).partition(".")[0] for name in architecture.trained_whole})
    return {
        "task_type": TASK_TYPES.get(architecture.task or "language-model"),
        **({"modules_to_save": heads} if heads else {}),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "use_dora": lora.dora,
        "target_modules": shortest_endings(selection.adapters, places),
        "fan_in_fan_out": any(is_transposed(architecture, *places[name]) for name in selection.adapters),
    }


def shortest_endings(chosen: Iterable[str], names: Iterable[str]) -> list[str]:
    """Return the shortest endings that match the chosen names and no others, in order.

    PEFT matches whole names of linear layers or their endings after a dot, and no shell patterns.
    """
    chosen, names, depth = set(chosen), list(names), 0
    while True:
        depth += 1
        endings = {name: ".".join(name.split(".")[-depth:]) for name in names}
        wanted = {f".{endings[name]}" for name in chosen}
        # Compare whole names: the ending of a short name may match a longer name too.
        if all((name in chosen) == any(f".{name}".endswith(each) for each in wanted) for name in names):
            return list(dict.fromkeys(endings[name] for name in names if name in chosen))


def export_checkpoint(run: Run, name: str, target: Path) -> int:
    """Write a checkpoint as a tuned model; return its step.

    Args:
        name: name of the checkpoint, see `retention.find_checkpoint`.
        target: new model folder; a merged model gets this name with ``-merged``.

    Raises:
        UsageError: no such checkpoint, a folder to write exists, or the base model has moved.
    """
    recipe, step = run.recipe(), find_checkpoint(run, name)
    require_new(target)
    merged = target.with_name(f"{target.name}-merged")
    if recipe.method == "lora" and recipe.lora.merge:
        require_new(merged)
    run.check_recipe(recipe)
    source = Path(recipe.model or "")
    if not is_model(source):
        raise UsageError(
            f"the model that {run.folder} started from is not in {source} any more: its tokenizer is needed"
        )
    report = load_dataset(run.data / "train").report
    architecture = trained_architecture(recipe, source, report.labels)
    selection = select(architecture, recipe)
    choice = layer_choice(recipe, len(selection.trained))
    if damage := list(Checker(run, selection.trained, choice).checkpoint(step)):
        raise DataError("\n".join(damage))
    losses = {line["step"]: line["validation_loss"] for line in run.metrics() if "validation_loss" in line}
    held_out = run.data / "validation"
    data = {
        "sha256": report.data_sha256, "rows": report.windows,
        "validation_rows": load_dataset(held_out).report.windows if held_out.exists() else 0,
    }  # fmt: skip
    metrics = {"validation_loss": losses.get(step), "baseline_validation_loss": losses.get(0), "steps": step}
    trained = TunedModel(recipe, source, architecture, data, metrics)
    write_outcome(target, merged, trained, selection, parameters(run.checkpoint(step), selection.trained))
    return step
