"""Writing a Hugging Face model folder: one safetensors shard per layer, complete or not there at all.

What is written is at once the streaming layout and a checkpoint that ``AutoModelForCausalLM.from_pretrained`` opens.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptj_ft.checkpoints.download import SOURCE, read_origin
from gptj_ft.checkpoints.formats.safetensors import write_safetensors
from gptj_ft.errors import ResourceError, UsageError
from gptj_ft.models.registry import Architecture
from gptj_ft.system.digests import FOLDER_DIGESTS, folder_digests
from gptj_ft.system.files import SHARED_FILE, discard, hidden_name, read_bytes, remove, sync_path, write_file
from gptj_ft.system.paths import TOKENIZER_FILES

INDEX = "model.safetensors.index.json"
TUNING = "gptj_ft.json"
DESCRIPTION = ("README.md", "LICENSE", "chat_template.jinja")


def write_model(
    folder: Path,
    architecture: Architecture,
    layers: Iterable[Mapping[str, Tensor]],
    *,
    dtype: torch.dtype | None,
    source: Path | None = None,
    extra: Mapping[str, Any] | None = None,
    files: Mapping[str, str] | None = None,
) -> None:
    """Write a model folder; it appears under its name only when it is whole and on the disk.

    Args:
        folder: where to; it must not exist.
        architecture: the model's; its raw config is stored with the type of the weights set.
        layers: for each layer in streaming order, its tensors by their names in the layer; taken one at a time.
        dtype: the type to store; ``None`` keeps each tensor's own.
        source: a model folder whose tokenizer files, generation settings and origin are copied.
        extra: written as ``gptj_ft.json``.
        files: texts by file name; with them it is another model than the source, so that what that says of itself is
            not copied, and it gets digests of its own.

    Raises:
        UsageError: the folder exists, or cannot be written.
        ResourceError: the disk is full.
    """
    if os.path.lexists(folder):
        raise UsageError(f"output folder {folder} exists; name another or remove it")
    partial = partial_name(folder)
    try:
        with writing(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(folder)
            partial.mkdir()
        stored, digests = _write_weights(folder, partial, architecture, layers, dtype)
        with writing(folder):
            write_companions(partial, architecture, stored, source, extra)
            if source is not None:
                copy_origin(source, partial)
            for name, text in (files or {}).items():
                write_file(partial / name, text, SHARED_FILE)
            if files is None and source is not None:
                copy_description(source, partial)
            if files is not None:
                write_json(partial / FOLDER_DIGESTS, folder_digests(partial, digests))
            sync_path(partial)
        with writing(folder):
            partial.rename(folder)
            sync_path(folder.parent)
    except BaseException:
        discard(partial)
        raise


def _write_weights(
    folder: Path,
    partial: Path,
    architecture: Architecture,
    layers: Iterable[Mapping[str, Tensor]],
    dtype: torch.dtype | None,
) -> tuple[torch.dtype, dict[str, str]]:
    """Write the shards and the index; return the type that holds every stored value, and the shards' digests."""
    expected, name_of = [layer.state_dict() for layer in architecture.layers()], architecture.family.name_of
    weight_map: dict[str, str] = {}
    digests: dict[str, str] = {}
    total_size, index, stored = 0, 0, dtype
    for tensors in layers:  # not enumerate(), which keeps the layer before in memory while the next is made
        assert tensors.keys() == expected[index].keys(), f"layer {index} has {sorted(tensors)}"
        named = {}
        for local, like in expected[index].items():
            tensor = tensors[local]
            assert tensor.shape == like.shape, f"layer {index}: {local} has shape {list(tensor.shape)}"
            stored = dtype or (torch.promote_types(stored, tensor.dtype) if stored else tensor.dtype)
            named[name_of(index, local, len(expected))] = tensor
        file_name = f"model-{index + 1:05d}-of-{len(expected):05d}.safetensors"
        with writing(folder):
            size, digests[file_name] = write_safetensors(partial / file_name, named, dtype)
        total_size += size
        weight_map |= dict.fromkeys(named, file_name)
        index += 1
        del tensors, named, tensor  # for the same reason
    assert index == len(expected), f"{index} layers, expected {len(expected)}"
    assert stored is not None
    with writing(folder):
        write_json(partial / INDEX, {"metadata": {"total_size": total_size}, "weight_map": weight_map})
    return stored, digests


def write_companions(
    partial: Path, architecture: Architecture, stored: torch.dtype, source: Path | None, extra: Mapping[str, Any] | None
) -> None:
    """Write all that a model folder has beside its weights."""
    for name in TOKENIZER_FILES:
        if source is not None and (source / name).is_file():
            write_file(partial / name, read_bytes(source / name), SHARED_FILE)
    if source is not None and (source / "generation_config.json").is_file():
        write_file(partial / "generation_config.json", read_bytes(source / "generation_config.json"), SHARED_FILE)
    else:
        tokens = {key: getattr(architecture.config, key, None) for key in ("bos_token_id", "eos_token_id")}
        write_json(
            partial / "generation_config.json", {key: value for key, value in tokens.items() if value is not None}
        )
    if extra is not None:
        write_json(partial / TUNING, extra)
    # transformers 5 reads `dtype`, version 4 `torch_dtype`. Last, for a folder without config.json is no model.
    name = str(stored).removeprefix("torch.")
    raw = {key: value for key, value in architecture.raw.items() if key != "_name_or_path"}  # somebody's folder
    own = {"architectures": [architecture.family.class_name], "dtype": name, "torch_dtype": name}
    write_json(partial / "config.json", {**raw, **own})


def copy_origin(source: Path, partial: Path) -> None:
    """Copy what a folder says of the repository that its weights stem from.

    Raises:
        DataError: that is damaged.
    """
    if origin := read_origin(source):
        write_file(partial / SOURCE, replace(origin, files=()).to_text(), SHARED_FILE)


def copy_description(source: Path, partial: Path) -> None:
    """Copy what a model says of itself, and how to talk to it."""
    for name in DESCRIPTION:
        if (source / name).is_file():
            write_file(partial / name, read_bytes(source / name), SHARED_FILE)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn what goes wrong while writing into the error the user sees."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ResourceError(f"disk full while writing {folder}; nothing was kept. Make room and repeat") from error
        raise UsageError(f"cannot write {folder}: {error.strerror or error}") from error


def partial_name(folder: Path) -> Path:
    """Return the hidden name, of this process alone, under which a model folder is written."""
    return hidden_name(folder, f"partial-{os.getpid()}")


def remove_leftovers(folder: Path) -> None:
    """Remove what writers of the same folder left that were killed."""
    import psutil

    for left in folder.parent.glob(f".{folder.name}.partial-*"):
        process = left.name.rpartition("-")[2]
        # After a restart of the machine, this process may have the number of the one that was killed.
        if process.isdigit() and (int(process) == os.getpid() or not psutil.pid_exists(int(process))):
            remove(left)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file, onto the disk."""
    write_file(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n", SHARED_FILE)
