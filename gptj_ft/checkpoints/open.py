"""Open a checkpoint of any format, by the table of formats. The only module that imports from `checkpoints.foreign`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

from gptj_ft.checkpoints import optimizer_state
from gptj_ft.checkpoints.architecture import read_architecture
from gptj_ft.checkpoints.base_model import in_home
from gptj_ft.checkpoints.foreign.cerebras import detect_cerebras, open_cerebras_source
from gptj_ft.checkpoints.foreign.config import CONFIG, GOOGLE_CONFIG, find_config, read_foreign_config
from gptj_ft.checkpoints.foreign.mesh import detect_mesh, open_mesh_source
from gptj_ft.checkpoints.foreign.mesh_writer import write_mesh
from gptj_ft.checkpoints.foreign.tensorflow import detect_tensorflow, files_of_bundle, open_tensorflow_source
from gptj_ft.checkpoints.gguf.header import files_of_gguf, is_gguf
from gptj_ft.checkpoints.gguf.source import open_gguf_source
from gptj_ft.checkpoints.model_folder import has_weights, open_checkpoint
from gptj_ft.checkpoints.source import CheckpointFormat, CheckpointSource, FormatName, OpenRequest
from gptj_ft.errors import UsageError
from gptj_ft.models.registry import architecture_of
from gptj_ft.system.files import require_plain
from gptj_ft.system.paths import is_adapter, is_tuned
from gptj_ft.system.plain_text import command_line


@contextmanager
def _open_huggingface(request: OpenRequest) -> Iterator[CheckpointSource]:
    path, config = request.path, None
    if not (path / CONFIG).is_file():  # google-research's models in a .bin have bert_config.json
        config = request.config or find_config([path], GOOGLE_CONFIG)
    architecture = architecture_of(read_foreign_config(config), config) if config else read_architecture(path)
    has_moments = optimizer_state.has_moments(path)
    opener = partial(optimizer_state.open_moments, path) if has_moments else None
    with open_checkpoint(path) as checkpoint:
        yield CheckpointSource(path, "huggingface", architecture, checkpoint, path, open_moments=opener)


# In the order of detection: Cerebras' tensors may stand in files with Hugging Face's names.
FORMATS: Mapping[FormatName, CheckpointFormat] = {
    "cerebras": CheckpointFormat(detect_cerebras, open_cerebras_source),
    "huggingface": CheckpointFormat(has_weights, _open_huggingface),
    "mesh": CheckpointFormat(detect_mesh, open_mesh_source, write_mesh),
    "tensorflow": CheckpointFormat(detect_tensorflow, open_tensorflow_source),
    "gguf": CheckpointFormat(is_gguf, open_gguf_source),
}


def detect_format(path: Path) -> FormatName:
    """Detect the format of a checkpoint."""
    for name, checkpoint_format in FORMATS.items():
        if checkpoint_format.detect(path):
            return name
    if path.is_dir() and (path / CONFIG).is_file():
        return "huggingface"  # whose reader names the missing files
    if is_adapter(path):
        merge = command_line("convert", "--merge", path)
        raise UsageError(f"{path} is an adapter; merge it into its base model first: {merge}")
    if not path.exists():
        raise UsageError(f"{path} does not exist")
    raise UsageError(
        f"{path} is no checkpoint of a known format: neither a Hugging Face folder (config.json with safetensors or "
        ".bin), nor step_N/shard_0 of mesh-transformer-jax (in a folder or a tar archive), nor a .mdl of Cerebras, nor "
        "one X.index of TensorFlow with its data, nor a .gguf"
    )


def find_source(path: Path) -> Path:
    """Return a checkpoint; if the path is none, the model of a run folder, or the one of that name in the home."""
    if is_tuned(path) or any(each.detect(path) for each in FORMATS.values()):
        return path
    return next(filter(is_tuned, (path / "model", *in_home(str(path)))), path)


def files_of(path: Path) -> list[Path]:
    """Return the files of a checkpoint; for a folder, all files in it."""
    if path.is_dir():
        return sorted(each for each in path.rglob("*") if each.is_file())
    return files_of_bundle(path) or files_of_gguf(path)


def open_source(
    path: Path, format: FormatName | None, config: Path | None, scratch: Path
) -> AbstractContextManager[CheckpointSource]:
    """Open a checkpoint.

    Args:
        format: default ``None``: detected.
        config: JSON of the model's shape in any system's terms, for checkpoints without one.
        scratch: folder for unpacked archives; it need not exist.

    Raises:
        UsageError: no such checkpoint, or its shape is not known.
        DataError: the checkpoint is damaged, or contradicts its config.
        ResourceError: not enough space to unpack an archive.
    """
    name = format or detect_format(path)
    if path.is_dir():
        require_plain(path)
    return FORMATS[name].open(OpenRequest(path, config, scratch))
