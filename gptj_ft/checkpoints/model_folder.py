"""Read Hugging Face model folders of any layout; write them with one safetensors shard per layer.

The written folder is the streaming layout, and ``AutoModelForCausalLM.from_pretrained`` opens it, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptj_ft.checkpoints.download import SOURCE, read_origin
from gptj_ft.checkpoints.quantized import QuantizedTensor, with_matrices
from gptj_ft.checkpoints.weight_file import Shard, TensorInfo, open_shard, write_safetensors
from gptj_ft.data.tokenization import has_tokenizer, load_tokenizer
from gptj_ft.data.wordpiece import is_cased, read_vocabulary
from gptj_ft.errors import DataError, UsageError
from gptj_ft.models.layout import Layout, StoredSize
from gptj_ft.models.lora import transposed_parameters
from gptj_ft.models.registry import Architecture, Family, architecture_of, families, full_name
from gptj_ft.system.atomic import atomic_folder
from gptj_ft.system.block_reader import Extent
from gptj_ft.system.digests import FOLDER_DIGESTS, folder_digests, read_json
from gptj_ft.system.dtypes import NUMPY_CODES
from gptj_ft.system.files import SHARED_FILE, inside, read_bytes, write_file
from gptj_ft.system.ordered_tasks import SizedTask
from gptj_ft.system.paths import TOKENIZER_FILES

INDEX = "model.safetensors.index.json"
METADATA_FILE = "gptj_ft.json"
GENERATION_CONFIG = "generation_config.json"
WORD_PIECES = "vocab.txt"
DESCRIPTION = ("README.md", "LICENSE", "chat_template.jinja")
# Best first: safetensors needs no unpickling and is checked against its own header.
WEIGHTS = ("model.safetensors", INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")
PROBLEMS_SHOWN = 3
RowRange = tuple[int, int]  # start and end, as in a slice


class Checkpoint(AbstractContextManager["Checkpoint"]):
    """Tensors of a model, read one at a time; use it in a ``with`` block or close it.

    Names are those of a whole Hugging Face model, even if the files hold only its trunk, without the prefix.
    """

    def __init__(
        self, folder: Path, shards: Mapping[str, Shard], rename: Callable[[str], str | None] = full_name
    ) -> None:
        """Open a checkpoint.

        Args:
            folder: name in messages.
            shards: file of each tensor, by its name in the file.
            rename: name in the file -> Hugging Face's; ``None`` leaves the tensor out.

        Raises:
            DataError: two tensors of the same name.
        """
        self.folder = folder
        self._shards: dict[str, Shard] = {}
        self._own_names: dict[str, str] = {}
        for own, shard in shards.items():
            name = rename(own)
            if name in self._shards:
                raise DataError(f"{folder}: the weights hold {own} twice, also as {self._own_names[name]}")
            if name is not None:
                self._shards[name], self._own_names[name] = shard, own
        self.names = tuple(self._shards)
        self._names_by_layer: list[dict[str, str]] = []

    def names_of(self, architecture: Architecture, layer: int) -> Mapping[str, str]:
        """Map the names of a layer's parameters to their tensors in the checkpoint."""
        if not self._names_by_layer:  # for all layers, once: building them takes longer than reading a small tensor
            layers, name_of = architecture.skeleton, architecture.family.name_of
            self._names_by_layer = [
                {local: name_of(index, local, len(layers)) for local in layers[index].state_dict()}
                for index in range(len(layers))
            ]
        return self._names_by_layer[layer]

    def entry(self, name: str) -> TensorInfo:
        return self._shards[name].entries[self._own_names[name]]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return self.entry(name).dtype

    def file_of(self, name: str) -> Path:
        return self._shards[name].path

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Return rows ``start`` to ``stop`` of a tensor, by default all, in CPU memory that nothing else uses."""
        return self._shards[name].read(self._own_names[name], start, stop)

    def extent(self, name: str) -> Extent | None:
        """Return a tensor's place in its file; ``None`` if it is not contiguous there."""
        shard, own = self._shards[name], self._own_names[name]
        entry = shard.entries[own]
        return Extent(shard.path, entry.offset, entry.dtype) if entry.offset else None

    def stored(self, name: str) -> tuple[Shard, str] | None:
        """Return a tensor's file and its name there; ``None`` for computed tensors."""
        shard = self._shards.get(name)
        return None if shard is None else (shard, self._own_names[name])

    def matrix(self, name: str) -> QuantizedTensor | None:
        """Return the stored form of a quantized matrix; ``None`` for other tensors, computed ones included."""
        shard = self._shards.get(name)
        return shard if isinstance(shard, QuantizedTensor) else None

    @property
    def quantization(self) -> str | None:
        """Name of the quantization of some matrices; ``None``: all tensors are plain."""
        matrices = (shard for shard in self._shards.values() if isinstance(shard, QuantizedTensor))
        return next((matrix.form.codec.name for matrix in matrices), None)

    def rows_at_once(self, name: str) -> int:
        """Return the number of rows of a tensor to read at a time."""
        return self._shards[name].rows_at_once(self._own_names[name])

    def row_ranges(self, name: str, rows: int | None = None) -> Iterator[RowRange]:
        """Yield ranges of ``rows`` rows of a tensor, by default `rows_at_once`; a scalar is one row."""
        num_rows, rows = self.entry(name).rows, rows or self.rows_at_once(name)
        for start in range(0, num_rows, rows):
            yield start, min(start + rows, num_rows)

    def read_task(self, name: str, rows: RowRange) -> SizedTask[Tensor]:
        """Return a task for `run_ordered` that reads some rows."""
        entry = self.entry(name)
        return entry.num_bytes * (rows[1] - rows[0]) // entry.rows, partial(self.read, name, *rows)

    def close(self) -> None:
        self._shards = {}

    def __exit__(self, *error: object) -> None:
        self.close()


def has_weights(path: Path) -> bool:
    """Tell whether a path is a folder with the files of a model's weights."""
    return path.is_dir() and any((path / name).is_file() for name in WEIGHTS)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open the weights of a model folder: safetensors if it has them, else ``.bin``; one file or shards.

    Raises:
        UsageError: the folder holds no weights.
        DataError: a file is truncated, corrupt or missing, or the index and the shards contradict each other.
    """
    config = folder / "config.json"
    raw = read_json(config) if config.is_file() else {}
    shards, rename = weights_of(folder), partial(full_name, family=families().get(str(raw.get("model_type"))))
    if raw.get("quantization_config"):
        transposed = transposed_parameters(architecture_of(raw, config))
        shards = with_matrices(shards, {name for name in shards if rename(name) in transposed})
    return Checkpoint(folder, shards, rename)


def weights_of(folder: Path) -> dict[str, Shard]:
    """Return the file of each tensor of a model folder, by its name in the file. Raises as `open_checkpoint`."""
    for file_name in WEIGHTS:
        path = folder / file_name
        if path.is_file():
            return _indexed(path) if path.suffix == ".json" else _single(path)
    raise UsageError(f"{folder} holds no weights: looked for {', '.join(WEIGHTS)}")


def _single(path: Path) -> dict[str, Shard]:
    shard = open_shard(inside(path))
    return dict.fromkeys(shard.entries, shard)


def _indexed(index: Path) -> dict[str, Shard]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise DataError(f"{index}: no weight_map in this index of weights; get the file again")
    shards: dict[str, Shard] = {}
    for file_name in sorted({str(value) for value in weight_map.values()}):
        # The index is data from elsewhere: it must not name a file outside of the folder.
        path = index.parent / file_name
        if Path(file_name).name != file_name or not path.is_file():
            raise DataError(f"{index}: names {file_name}, which is not in {index.parent}; get the file again")
        shards[file_name] = open_shard(inside(path))
    for name, file_name in weight_map.items():
        if name not in shards[file_name].entries:
            raise DataError(f"{shards[file_name].path}: lacks {name}, which {index.name} lists for it")
    for file_name, shard in shards.items():
        for name in shard.entries:
            if weight_map.get(name) != file_name:
                raise DataError(f"{shard.path}: holds {name}, which {index.name} does not list for it")
    return {name: shards[file_name] for name, file_name in weight_map.items()}


def check_tensors(architecture: Architecture, checkpoint: Checkpoint) -> list[str]:
    """Check that a checkpoint holds exactly the tensors of an architecture, with their shapes, in floating point.

    A tied tensor may appear twice if both copies are equal. Optional tensors may be missing.

    Returns:
        The names of tensors that are dropped on purpose.

    Raises:
        DataError: the tensors do not fit; names the first problems and counts the rest.
    """
    if (num_layers := architecture.config.n_layer) > len(checkpoint.names):  # before building so many layers
        name = next((name for name in ("num_hidden_layers", "n_layer") if name in architecture.raw), "n_layer")
        raise DataError(
            f"{checkpoint.folder}: the weights do not fit config.json: its {name} is {num_layers}, but there are only "
            f"{len(checkpoint.names)} tensors"
        )
    family, layers = architecture.family, architecture.skeleton
    expected = {
        family.name_of(index, local, len(layers)): tuple(tensor.shape)
        for index, layer in enumerate(layers)
        for local, tensor in layer.state_dict().items()
    }
    # Each tensor is expected, tied, dropped on purpose, or a problem.
    ties, present = architecture.ties(), set(checkpoint.names)
    dropped, problems = [], []
    for name in checkpoint.names:
        file, shape = checkpoint.file_of(name).name, checkpoint.shape(name)
        if name in ties:
            dropped.append(name)
            if ties[name] in present and not _are_equal(checkpoint, name, ties[name]):
                problems.append(f"{name} in {file} differs from {ties[name]}, but config.json sets tie_word_embeddings")
        elif name in architecture.new or (name not in expected and is_of_other_head(architecture, name)):
            dropped.append(name)
        elif name not in expected:
            if is_dropped(family, name, len(layers)):
                dropped.append(name)
            else:
                problems.append(f"{name} in {file} is no tensor of this {family.model_type}")
        elif shape != expected[name]:
            problems.append(f"{name} in {file} has shape {list(shape)}, config.json says {list(expected[name])}")
        elif (dtype := checkpoint.dtype(name)) not in NUMPY_CODES or not dtype.is_floating_point:
            problems.append(f"{name} in {file} is {dtype}, not fp32, bf16 or fp16")
    known = present | architecture.new | (family.optional if architecture.task is None else frozenset())
    problems += [f"{name} of shape {list(expected[name])} is missing" for name in expected if name not in known]
    if problems:
        shown = "; ".join(problems[:PROBLEMS_SHOWN])
        more = f"; and {len(problems) - PROBLEMS_SHOWN} more" if len(problems) > PROBLEMS_SHOWN else ""
        raise DataError(f"{checkpoint.folder}: the weights do not fit config.json: {shown}{more}")
    return dropped


def with_new(architecture: Architecture, checkpoint: Checkpoint, source: Architecture) -> Architecture:
    """Mark the head parameters that a run must initialize, because its checkpoint does not hold them.

    Args:
        architecture: the model with the head to train.
        checkpoint: the weights to start from.
        source: the architecture of those weights.
    """
    if architecture.head is None:
        return architecture
    layers, head = architecture.skeleton, architecture.head
    is_same = (architecture.task, architecture.labels) == (source.task, source.labels)
    new = set()
    for local, like in layers[-1].state_dict().items():
        name = architecture.family.name_of(len(layers) - 1, local, len(layers))
        is_present = name in checkpoint.names and checkpoint.shape(name) == tuple(like.shape)
        # Outputs for other labels are new even if their shape fits.
        if local not in head.kept and (not is_present or (not is_same and local.startswith(f"{head.output}."))):
            new.add(name)
    return replace(architecture, new=frozenset(new))


def heads_left_out(architecture: Architecture, dropped: Iterable[str]) -> tuple[str, ...]:
    """Return those of the dropped names that are weights of another head; masks and tied copies are not."""
    family, ties = architecture.family, architecture.ties()
    return tuple(
        name
        for name in dropped
        if name not in ties and (is_of_other_head(architecture, name) or not name.startswith(family.prefix))
    )


def is_of_other_head(architecture: Architecture, name: str) -> bool:
    """Tell whether a tensor belongs to a head of the family that this model does not have."""
    home = architecture.family.keys.get(name)
    return architecture.task is not None and home is not None and home[0] == "head"


def _are_equal(checkpoint: Checkpoint, one: str, other: str) -> bool:
    forms = {(checkpoint.shape(name), checkpoint.dtype(name)) for name in (one, other)}
    return len(forms) == 1 and all(
        torch.equal(checkpoint.read(one, *rows), checkpoint.read(other, *rows)) for rows in checkpoint.row_ranges(one)
    )


def is_dropped(family: Family, name: str, num_layers: int) -> bool:
    """Tell whether a tensor is dropped on purpose, such as the attention masks in old files."""
    try:
        return family.locate(name, num_layers) is None
    except KeyError:
        return False


def layer_tensor(architecture: Architecture, checkpoint: Checkpoint, layer: int, local: str) -> Tensor:
    """Read one tensor by its layer and its name in the layer, in the checkpoint's type."""
    return checkpoint.read(_name_in(checkpoint, architecture, layer, local))


def tensor_source(
    architecture: Architecture, checkpoint: Checkpoint, layer: int, local: str
) -> Extent | QuantizedTensor | Callable[[], Tensor]:
    """Return a tensor's place in its file, or its quantized form; else a function that reads it."""
    name = _name_in(checkpoint, architecture, layer, local)
    return checkpoint.matrix(name) or checkpoint.extent(name) or partial(checkpoint.read, name)


def with_stored_sizes(
    architecture: Architecture, checkpoint: Checkpoint, layouts: Sequence[Layout]
) -> tuple[Layout, ...]:
    """Return layouts of frozen weights with their sizes in a checkpoint."""
    sized = []
    for layer, layout in enumerate(layouts):
        names = [_name_in(checkpoint, architecture, layer, local) for local in layout.shapes]
        names = [name for name in names if name in checkpoint.names]  # a run initializes others
        forms = {name: matrix.form for name in names if (matrix := checkpoint.matrix(name)) is not None}
        codes = sum(form.num_bytes for form in forms.values())
        plain = sum(checkpoint.entry(name).num_bytes for name in names if name not in forms)
        quantized = sum(form.shape.numel() for form in forms.values())
        sized.append(replace(layout, stored=StoredSize(plain + codes, codes, quantized)) if names else layout)
    return tuple(sized)


def check_trainable(architecture: Architecture, checkpoint: Checkpoint, layouts: Sequence[Layout]) -> None:
    """Reject a run that trains quantized weights.

    Args:
        layouts: trained parameters of each layer.
    """
    for layer in range(len(architecture.skeleton)):
        for local, name in checkpoint.names_of(architecture, layer).items():
            if local in layouts[layer].shapes and name in checkpoint.names and (matrix := checkpoint.matrix(name)):
                raise UsageError(
                    f"{checkpoint.folder} is quantized ({matrix.form.codec.name}), so only adapters can be trained: "
                    "use --method lora, or name the model that it was made from"
                )


def _name_in(checkpoint: Checkpoint, architecture: Architecture, layer: int, local: str) -> str:
    name = checkpoint.names_of(architecture, layer).get(local)
    if name is None:  # tied to a tensor of another layer
        name = architecture.ties()[architecture.family.name_of(layer, local, len(architecture.skeleton))]
    return name


def layer_tensors(architecture: Architecture, checkpoint: Checkpoint, layer: int) -> dict[str, Tensor]:
    """Read a layer's tensors by their names in the layer, in the checkpoint's types."""
    return {
        local: layer_tensor(architecture, checkpoint, layer, local)
        for local in checkpoint.names_of(architecture, layer)
    }


def write_model(
    folder: Path,
    architecture: Architecture,
    layers: Iterable[Mapping[str, Tensor]],
    *,
    dtype: torch.dtype | None,
    source: Path | None = None,
    files: Mapping[str, str] | None = None,
) -> None:
    """Write a new model folder, atomically.

    Args:
        layers: tensors of each layer in streaming order, by their names in the layer; consumed one layer at a time.
        dtype: type to store; ``None``: each tensor's own.
        source: model folder whose tokenizer files, generation settings and origin are copied.
        files: texts by file name, for a model that differs from the source. Then digests are written, and the source's
            model card is not copied.

    Raises:
        UsageError: the folder exists, or cannot be written.
        ResourceError: the disk is full.
    """
    # `atomic_folder` writes under a temporary name and renames at the end: a killed writer leaves no half model.
    with atomic_folder(folder) as draft:
        stored, digests = _write_weights(draft, architecture, layers, dtype)
        write_companions(draft, architecture, stored, source)
        if source is not None:
            copy_origin(source, draft)
        if files is not None:
            for name, text in files.items():
                write_file(draft / name, text, SHARED_FILE)
            write_json_file(draft / FOLDER_DIGESTS, folder_digests(draft, digests))
        elif source is not None:
            copy_files(source, draft, DESCRIPTION)


def _write_weights(
    folder: Path, architecture: Architecture, layers: Iterable[Mapping[str, Tensor]], dtype: torch.dtype | None
) -> tuple[torch.dtype, dict[str, str]]:
    """Write the shards and the index; return a type that holds every stored value, and the shards' digests."""
    expected, name_of = [layer.state_dict() for layer in architecture.skeleton], architecture.family.name_of
    weight_map: dict[str, str] = {}
    digests: dict[str, str] = {}
    total_size, index, stored = 0, 0, dtype
    for tensors in layers:  # not enumerate(): it keeps the previous layer in memory while the next is made
        assert tensors.keys() == expected[index].keys(), f"layer {index} has {sorted(tensors)}"
        for local, like in expected[index].items():
            assert tensors[local].shape == like.shape, f"layer {index}: {local} has shape {list(tensors[local].shape)}"
        named = {
            architecture.file_name(name_of(index, local, len(expected))): tensors[local] for local in expected[index]
        }
        if dtype is None:
            for kind in {tensor.dtype for tensor in named.values()}:
                stored = torch.promote_types(stored, kind) if stored else kind
        file_name = f"model-{index + 1:05d}-of-{len(expected):05d}.safetensors"
        size, digests[file_name] = write_safetensors(folder / file_name, named, dtype)
        total_size += size
        weight_map |= dict.fromkeys(named, file_name)
        index += 1
        del tensors, named  # for the same reason
    assert index == len(expected), f"{index} layers, expected {len(expected)}"
    assert stored is not None
    write_index(folder, weight_map, total_size)
    return stored, digests


def write_index(folder: Path, weight_map: Mapping[str, str], total_size: int) -> None:
    """Write the index of a sharded model: the file of each tensor, and the total bytes."""
    write_json_file(folder / INDEX, {"metadata": {"total_size": total_size}, "weight_map": weight_map})


def write_companions(
    folder: Path,
    architecture: Architecture,
    stored: torch.dtype,
    source: Path | None,
    quantization: Mapping[str, Any] | None = None,
    generation: Path | None = None,
) -> None:
    """Write tokenizer, generation settings and ``config.json`` of a new model folder.

    Args:
        architecture: its raw config is stored, except the type.
        stored: a type that holds every stored value.
        source: folder whose tokenizer files and generation settings are copied, if it has them.
        quantization: ``quantization_config`` of quantized weights.
        generation: folder of the generation settings; ``None``: the source.
    """
    generates, generation = architecture.task is None and not architecture.family.is_encoder, generation or source
    if source is not None:
        copy_files(source, folder, TOKENIZER_FILES)
    if generation is not None and generates:
        copy_files(generation, folder, (GENERATION_CONFIG,))
    if architecture.family.is_encoder and any((folder / name).is_file() for name in TOKENIZER_FILES):
        _describe_tokenizer(folder, architecture)
    if generates and (generation is None or not (generation / GENERATION_CONFIG).is_file()):
        tokens = {key: getattr(architecture.config, key, None) for key in ("bos_token_id", "eos_token_id")}
        write_json_file(folder / GENERATION_CONFIG, {key: value for key, value in tokens.items() if value is not None})
    # transformers 5 reads `dtype`, version 4 `torch_dtype`. Written last: a folder without config.json is no model.
    name = str(stored).removeprefix("torch.")
    raw = {key: value for key, value in architecture.raw.items() if key != "_name_or_path"}  # may name a local folder
    own: dict[str, Any] = {"architectures": [architecture.class_name], "dtype": name, "torch_dtype": name}
    if architecture.task is not None and not architecture.family.is_encoder and has_tokenizer(folder):
        own |= _choose_padding(folder, architecture)
    if quantization is not None:
        own["quantization_config"] = quantization
    write_json_file(folder / "config.json", {**raw, **own})


def _describe_tokenizer(folder: Path, architecture: Architecture) -> None:
    """Add the maximum length and the case handling to ``tokenizer_config.json`` if they are missing."""
    path, has_vocabulary = folder / "tokenizer_config.json", (folder / WORD_PIECES).is_file()
    is_alone = has_vocabulary and not (folder / "tokenizer.json").is_file()
    settings: dict[str, Any] = (
        read_json(path) if path.is_file() else {"tokenizer_class": "BertTokenizer"} if is_alone else {}
    )
    longest = architecture.config.n_positions
    # transformers writes 1e30 for an unknown length.
    if not isinstance(settings.get("model_max_length"), int) or settings["model_max_length"] > longest:
        settings["model_max_length"] = longest
    if settings.get("do_lower_case") is None and is_alone:
        settings["do_lower_case"] = not is_cased(read_vocabulary(folder / WORD_PIECES))
    if not path.is_file() or settings != read_json(path):
        write_json_file(path, settings)


def _choose_padding(folder: Path, architecture: Architecture) -> dict[str, int]:
    """Complete ``tokenizer_config.json``; return the padding token for ``config.json``.

    `transformers` finds the last token of a padded text by it, so that both files must name the same token.
    """
    tokenizer = load_tokenizer(folder)
    number = tokenizer.pad_token_id
    if number is None:
        number = architecture.raw.get("pad_token_id", tokenizer.eos_token_id)
    token = None if number is None else tokenizer.convert_ids_to_tokens(number)
    if not isinstance(token, str):
        return {}
    path = folder / "tokenizer_config.json"
    settings: dict[str, Any] = read_json(path) if path.is_file() else {}
    # Padding on the left would move the learned positions.
    write_json_file(path, {**settings, "pad_token": token, "padding_side": "right"})
    return {"pad_token_id": number}


def copy_origin(source: Path, folder: Path) -> None:
    """Copy ``source.json``, which names the weights' repository on the Hub; its list of files is left out."""
    if origin := read_origin(source):
        write_file(folder / SOURCE, replace(origin, files=()).to_text(), SHARED_FILE)


def copy_files(source: Path, folder: Path, names: Iterable[str]) -> None:
    """Copy the existing ones of some files, synced to disk."""
    for name in names:
        if (source / name).is_file():
            write_file(folder / name, read_bytes(source / name), SHARED_FILE)


def write_json_file(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file, synced to disk."""
    write_file(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n", SHARED_FILE)
