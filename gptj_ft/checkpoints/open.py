"""Open a checkpoint of any format: tensors under Hugging Face's names, and an architecture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from gptj_ft.checkpoints import optimizer_state
from gptj_ft.checkpoints.architecture import read_architecture
from gptj_ft.checkpoints.formats.cerebras import has_cerebras_names, open_cerebras
from gptj_ft.checkpoints.formats.cerebras_hdf5 import is_hdf5
from gptj_ft.checkpoints.formats.mesh_archive import is_archive, unpack
from gptj_ft.checkpoints.formats.mesh_reader import MeshShards, find_step, open_mesh
from gptj_ft.checkpoints.formats.shapes import GPTJ_6B, read_foreign_config
from gptj_ft.checkpoints.formats.tensorflow import find_bundle, open_tensorflow
from gptj_ft.checkpoints.model_folder import WEIGHTS, Checkpoint, check_tensors, open_checkpoint
from gptj_ft.checkpoints.optimizer_state import Moments
from gptj_ft.errors import DataError, UsageError
from gptj_ft.models.layout import MOMENTS
from gptj_ft.models.registry import Architecture, architecture_of, families
from gptj_ft.system.files import require_plain

Opener = Callable[[], Moments]
CheckpointFormat = Literal["huggingface", "mesh", "cerebras", "tensorflow"]
_CONFIG, GOOGLE_CONFIG = "config.json", "bert_config.json"


@dataclass(frozen=True)
class CheckpointSource:
    """Opened checkpoint.

    Attributes:
        path: path as the user named it.
        form: its format.
        architecture: architecture of the model.
        checkpoint: its tensors.
        folder: folder that may hold tokenizer files.
        step: optimizer step; 0 if it does not say.
        open_moments: function that opens the optimizer's moments (raises UsageError, DataError); ``None``: it has none.
    """

    path: Path
    form: CheckpointFormat
    architecture: Architecture
    checkpoint: Checkpoint
    folder: Path
    step: int = 0
    open_moments: Opener | None = None


def form_of(path: Path) -> CheckpointFormat:
    """Detect the format of a checkpoint.

    Raises:
        UsageError: none that is known.
    """
    if path.is_dir() and any((path / name).is_file() for name in WEIGHTS):
        return "cerebras" if has_cerebras_names(path) else "huggingface"
    if is_hdf5(path):
        return "cerebras"
    if is_archive(path) or (path.is_dir() and find_step(path) is not None):
        return "mesh"
    if find_bundle(path) is not None:
        return "tensorflow"
    if path.is_dir() and (path / _CONFIG).is_file():
        return "huggingface"  # which will say what it lacks
    if not path.exists():
        raise UsageError(f"{path} does not exist")
    raise UsageError(
        f"{path} is no checkpoint that is known: neither a Hugging Face folder (config.json with safetensors or .bin), "
        "nor step_N/shard_0 of mesh-transformer-jax (in a folder or a tar archive), nor a .mdl of Cerebras, nor one "
        "X.index of TensorFlow with its data"
    )


def files_of(path: Path) -> list[Path]:
    """Return the files of a checkpoint, and what else is in its folder if that was named."""
    index = find_bundle(path)
    if path.is_dir():
        return sorted(each for each in path.rglob("*") if each.is_file())
    return [path] if index is None else sorted(each for each in index.parent.iterdir() if each.stem == index.stem)


@contextmanager
def open_source(
    path: Path, form: CheckpointFormat | None, config: Path | None, scratch: Path
) -> Iterator[CheckpointSource]:
    """Open a checkpoint.

    Args:
        path: folder or file.
        form: format; ``None``: detected.
        config: JSON of the model's shape, of any system, where the checkpoint does not say it.
        scratch: folder for unpacked archives; it need not exist.

    Raises:
        UsageError: no such checkpoint, or its shape is not known.
        DataError: it is damaged, or contradicts its config.
        ResourceError: no room to unpack it.
    """
    form = form or form_of(path)
    opener: Opener | None = None
    if path.is_dir():
        require_plain(path)
    if form == "huggingface":
        own = None if (path / _CONFIG).is_file() else config or _config_in([path], GOOGLE_CONFIG)
        architecture = architecture_of(read_foreign_config(own), own) if own else read_architecture(path)
        if optimizer_state.has_moments(path):
            opener = partial(optimizer_state.open_moments, path)
        with open_checkpoint(path) as checkpoint:
            yield CheckpointSource(path, form, architecture, checkpoint, path, open_moments=opener)
    elif form == "cerebras":
        config = config or _config_in([path if path.is_dir() else path.parent])
        family = architecture_of(read_foreign_config(config), config).family if config else families()["gptj"]
        checkpoint, mdl = open_cerebras(path, family)
        architecture, step = _architecture(config, checkpoint), mdl.step if mdl else None
        if mdl and optimizer_state.has_cerebras_moments(mdl):
            opener = partial(optimizer_state.read_cerebras_moments, mdl, family)
        yield CheckpointSource(path, form, architecture, checkpoint, path, step or 0, opener)
    elif form == "tensorflow":
        yield _open_tensorflow(path, config)
    else:
        if is_archive(path):
            unpack(path, scratch)
        folder = scratch if is_archive(path) else find_step(path)
        if folder is None:
            raise UsageError(f"{path} holds no checkpoint of mesh-transformer-jax: no shard_0 in it")
        mesh = open_mesh(folder, families()["gptj"])
        with _checkpoint(path, mesh.parameters) as checkpoint:
            found = None if folder == scratch else _config_in([folder, folder.parent])
            architecture = _architecture(config or found, checkpoint)
            home = found.parent if found else folder
            checkpoints = (_checkpoint(path, part) for part in mesh.moments)
            loaded = Moments(mesh.updates, dict(zip(MOMENTS, checkpoints, strict=True))) if mesh.moments else None
            opener = (lambda: loaded) if loaded else None
            yield CheckpointSource(path, form, architecture, checkpoint, home, mesh.step, opener)


def _open_tensorflow(path: Path, config: Path | None) -> CheckpointSource:
    """Open a checkpoint of google-research/bert, with the head that its tensors are of."""
    index = find_bundle(path)
    if index is None:
        raise UsageError(f"{path} holds no checkpoint of TensorFlow, or several: name one as X.index")
    folder = index.parent
    config = config or _config_in([folder], GOOGLE_CONFIG) or _config_in([folder])
    if config is None:
        raise UsageError(f"{folder} has no {GOOGLE_CONFIG}: name the JSON of the model's shape with --config")
    raw = read_foreign_config(config)
    checkpoint, step = open_tensorflow(index, architecture_of(raw, config).family)
    if "classifier.weight" in checkpoint.names:
        count = checkpoint.entry("classifier.weight").rows
        raw |= {"architectures": ["BertForSequenceClassification"], "num_labels": count}
    elif "qa_outputs.weight" in checkpoint.names:
        raw |= {"architectures": ["BertForQuestionAnswering"]}
    return CheckpointSource(path, "tensorflow", architecture_of(raw, config), checkpoint, folder, step)


def _checkpoint(path: Path, shards: MeshShards) -> Checkpoint:
    return Checkpoint(path, dict.fromkeys(shards.entries, shards))


def _config_in(folders: list[Path], name: str = _CONFIG) -> Path | None:
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def _architecture(config: Path | None, checkpoint: Checkpoint) -> Architecture:
    """Return the architecture of a config; without one, GPT-J 6B if every shape is its."""
    if config is not None:
        return architecture_of(read_foreign_config(config), config)
    architecture = architecture_of(GPTJ_6B, checkpoint.folder)
    try:
        check_tensors(architecture, checkpoint)
    except DataError as error:
        raise UsageError(
            f"{checkpoint.folder} does not say the shape of its model, and it is not GPT-J 6B's; "
            f"name the JSON of its shape with --config ({str(error).partition('config.json: ')[2].partition(';')[0]})"
        ) from error
    return architecture
