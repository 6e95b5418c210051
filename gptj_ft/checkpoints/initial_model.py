"""Make the model that pre-training starts from: random weights, by a ``config.json`` and the tokenizer next to it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import torch

from gptj_ft.checkpoints.model_folder import GENERATION_CONFIG, copy_files, write_model
from gptj_ft.data.tokenization import has_tokenizer, load_tokenizer
from gptj_ft.errors import DataError, ResourceError, UsageError
from gptj_ft.models.initial_weights import initial_layer
from gptj_ft.models.layout import Layout
from gptj_ft.models.registry import Architecture, architecture_of
from gptj_ft.system.files import read_bytes, read_text
from gptj_ft.system.machine import free_disk
from gptj_ft.system.paths import TOKENIZER_FILES, is_model, make_home, models, part_of_home
from gptj_ft.system.scratch import scratch_folder
from gptj_ft.system.units import gigabytes

COPIED = (*TOKENIZER_FILES, GENERATION_CONFIG, "chat_template.jinja")


def read_config_file(config: Path) -> Architecture:
    """Read the architecture from a file in the format of ``config.json``, with the pre-training head.

    Raises:
        UsageError: the family is not supported.
        DataError: the file is not JSON, or contradicts the family.
    """
    try:
        raw = json.loads(read_text(config))
    except (ValueError, OSError, RecursionError) as error:
        raise DataError(f"{config}: not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise DataError(f"{config}: expected an object, found {type(raw).__name__}")
    return replace(architecture_of(raw, config), task=None, labels=())


def initial_model(config: Path, seed: int) -> Path:
    """Return the folder of the random model of a config; create it in the home, in fp32, with the tokenizer.

    Raises:
        UsageError: no tokenizer is next to the config, or the family is not supported.
        DataError: the config is damaged, or its vocabulary is smaller than the tokenizer's.
        ResourceError: the disk is too small.
    """
    architecture, source = read_config_file(config), config.parent
    if not has_tokenizer(source):
        raise UsageError(
            f"{source} holds no tokenizer, which a model made from {config.name} needs: copy tokenizer.json and "
            "tokenizer_config.json into that folder"
        )
    largest = max(load_tokenizer(source).get_vocab().values(), default=0)
    if largest >= architecture.config.vocab_size:
        raise DataError(
            f"{config}: vocab_size is {architecture.config.vocab_size}, but the tokenizer next to it has ids up to "
            f"{largest}: raise vocab_size to at least {largest + 1}"
        )
    digest = hashlib.sha256()
    for path in (config, *(source / name for name in COPIED)):
        digest.update(read_bytes(path) if path.is_file() else b"")
    folder = models() / f"random-{source.resolve().name}-{digest.hexdigest()[:12]}-{seed}"
    if is_model(folder):
        return folder
    make_home()
    part_of_home("models")
    needed, free = 4 * sum(Layout.of(layer).num_parameters for layer in architecture.skeleton), free_disk(models())
    if needed > free:
        raise ResourceError(
            f"{folder}: the random model needs {gigabytes(needed)}, but {gigabytes(free)} are free; set "
            "GPTJ_FT_HOME to a folder on another disk"
        )
    layers = (initial_layer(architecture, layer, seed) for layer in range(len(architecture.skeleton)))
    with scratch_folder() as temporary:
        # The model card and the origin of the config's folder describe other weights.
        copy_files(source, temporary, COPIED)
        try:
            write_model(folder, architecture, layers, dtype=torch.float32, source=temporary)
        except UsageError:
            if not is_model(folder):  # else another process was faster
                raise
    return folder
