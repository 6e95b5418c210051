"""Push the files of a model folder, and nothing else, to a repository on the Hub."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptj_ft.checkpoints.adapter import ADAPTER_WEIGHTS, base_folder, open_adapter, tuned_architecture
from gptj_ft.checkpoints.architecture import read_architecture
from gptj_ft.checkpoints.download import SOURCE, read_origin
from gptj_ft.checkpoints.model_folder import DESCRIPTION, INDEX, METADATA_FILE, check_tensors, open_checkpoint
from gptj_ft.errors import DataError, UsageError
from gptj_ft.system.digests import read_json
from gptj_ft.system.files import require_plain
from gptj_ft.system.hub import hub_api, hub_errors, open_network
from gptj_ft.system.paths import ADAPTER_CONFIG, TOKENIZER_FILES, is_adapter

_COMPANIONS = (*TOKENIZER_FILES, *DESCRIPTION, "generation_config.json", METADATA_FILE, SOURCE)
ADAPTER_BASE = "base_model_name_or_path"  # of adapters; replaced by the base model's name on the Hub
PATHS = ("_name_or_path", "name_or_path", "tokenizer_file", "special_tokens_map_file", "base_model", ADAPTER_BASE)


@dataclass(frozen=True)
class UploadFile:
    """File to upload."""

    name: str  # in the repository
    content: Path | bytes  # the bytes if they differ from the local file
    bytes: int
    left_out: tuple[str, ...] = ()  # JSON keys whose values were removed because they name local paths


@dataclass(frozen=True)
class PushReport:
    """Result of a push."""

    url: str
    commit: str
    is_private: bool


def files_to_push(folder: Path) -> list[UploadFile]:
    """List the files of a model folder for `push`.

    Raises:
        UsageError: no model or adapter with safetensors weights, or an adapter's base model is missing.
        DataError: the weights are damaged, a JSON file is invalid, or a file is a link out of the folder.
    """
    require_plain(folder)
    weights = _adapter_weights(folder) if is_adapter(folder) else _model_weights(folder)
    if not all(name.endswith(".safetensors") for name in weights):
        raise UsageError(
            f"{folder} has its weights in {weights[0]}: convert them to safetensors first with `gptj-ft convert`"
        )
    index = [] if "model.safetensors" in weights or is_adapter(folder) else [INDEX]
    names = [*_COMPANIONS, ADAPTER_CONFIG if is_adapter(folder) else "config.json", *index, *weights]
    present = [name for name in names if os.path.lexists(folder / name)]
    base = read_origin(base_folder(folder))
    return [_upload_file(folder / name, base.repository if base else "") for name in present]


def _model_weights(folder: Path) -> list[str]:
    """Check a model's weights against its config; return the names of their files."""
    architecture = read_architecture(folder)
    with open_checkpoint(folder) as checkpoint:
        check_tensors(architecture, checkpoint)
        return sorted({checkpoint.file_of(name).name for name in checkpoint.names})


def _adapter_weights(folder: Path) -> list[str]:
    """Check an adapter's weights; return the name of their file."""
    open_adapter(folder, tuned_architecture(folder))
    return [name for name in ADAPTER_WEIGHTS if (folder / name).is_file()][:1]


def files_left_out(folder: Path, files: list[UploadFile]) -> list[str]:
    """Return the names in a folder that are not uploaded."""
    sent = {file.name for file in files}
    return sorted(path.name for path in folder.iterdir() if path.name not in sent)


def check_push(repository: str) -> None:
    """Check what `push` needs and no network tells.

    Raises:
        UsageError: an invalid name, or no token.
    """
    if not re.fullmatch(r"[^/\s]+/[^/\s]+", repository):
        raise UsageError(f"'{repository}' is not a repository name; write owner/name")
    if not os.environ.get("HF_TOKEN"):
        raise UsageError("to push, set HF_TOKEN to a token with write access (https://huggingface.co/settings/tokens)")


def push(
    files: list[UploadFile],
    repository: str,
    *,
    is_public: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> PushReport:
    """Upload files as one commit. After an interruption, weights that the Hub has are not sent again.

    The access token comes from ``HF_TOKEN``.

    Args:
        files: result of `files_to_push`.
        repository: ``owner/name``; created as private if it does not exist.
        is_public: create or use a public repository.
        progress: callback of bytes done and total bytes.

    Raises:
        UsageError: no token, network forbidden, an invalid name, or the repository is public and ``is_public`` is not.
        NetworkError: no connection, no write access, a server error.
    """
    check_push(repository)
    from huggingface_hub import CommitOperationAdd

    api, total, done = hub_api(), sum(file.bytes for file in files), 0
    with open_network(), hub_errors(repository, api.endpoint, wants="write"), _plain_upload():
        api.create_repo(repository, private=not is_public, exist_ok=True)
        is_private = bool(api.model_info(repository).private)
        if not (is_private or is_public):
            raise UsageError(f"{repository} is public, so everybody would see the model: add --public to allow that")
        operations = [
            CommitOperationAdd(each.name, each.content if isinstance(each.content, bytes) else str(each.content))
            for each in files
        ]
        for file, operation in zip(files, operations, strict=True):
            if file.name.endswith(".safetensors"):  # one at a time: the Hub keeps each one that has arrived
                api.preupload_lfs_files(repository, [operation])
                progress(done := done + file.bytes, total)
        # One commit: the repository never shows a half model.
        commit = api.create_commit(repository, operations, commit_message="Model, by gptj-ft")
    progress(total, total)
    return PushReport(f"{api.endpoint}/{repository}", commit.oid, is_private)


@contextmanager
def _plain_upload() -> Iterator[None]:
    """Disable huggingface_hub's progress bars, and upload by git-lfs, which every Hub server supports."""
    from huggingface_hub import constants
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    before, had_bars = constants.HF_HUB_DISABLE_XET, not are_progress_bars_disabled()
    constants.HF_HUB_DISABLE_XET = True
    disable_progress_bars()
    try:
        yield
    except RuntimeError as error:  # names the file, but its cause has the reason
        raise error.__cause__ or error from error
    except ValueError as error:
        if "metadata" in str(error):
            raise DataError(f"the Hub rejects the metadata of README.md: {' '.join(str(error).split())}") from error
        raise
    finally:
        constants.HF_HUB_DISABLE_XET = before
        if had_bars:
            enable_progress_bars()


def _upload_file(path: Path, base: str) -> UploadFile:
    """Return a file to upload; remove local paths from JSON."""
    size = path.stat().st_size
    # The keys of vocabularies are tokens: one of them may be called like a field with a path.
    if path.suffix != ".json" or path.name in (INDEX, "tokenizer.json", "vocab.json", "added_tokens.json"):
        return UploadFile(path.name, path, size)
    values = read_json(path)
    local = {key: base if key == ADAPTER_BASE else "" for key in PATHS if _is_path(values.get(key))}
    if path.name == METADATA_FILE and "file" in (data := dict(values.get("data") or {})):  # written by older versions
        local["data"] = {key: value for key, value in data.items() if key != "file"}  # type: ignore[assignment]
    if not local:
        return UploadFile(path.name, path, size)
    content = (json.dumps({**values, **local}, indent=2, ensure_ascii=False) + "\n").encode()
    return UploadFile(path.name, content, len(content), tuple(local))


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and bool(re.match(r"/|~|\.{1,2}[/\\]|\\\\|[A-Za-z]:[/\\]", value))
