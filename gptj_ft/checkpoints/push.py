"""Push a model folder to a repository of the Hub: its own files and nothing else, listed before anything is sent."""

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
ADAPTER_BASE = "base_model_name_or_path"  # of adapters: there it becomes the base's name on the Hub
PATHS = ("_name_or_path", "name_or_path", "tokenizer_file", "special_tokens_map_file", "base_model", ADAPTER_BASE)


@dataclass(frozen=True)
class UploadFile:
    """File as it is sent.

    Attributes:
        name: name in the repository.
        content: the file, or the bytes where they differ from the folder's.
        bytes: size.
        left_out: keys of JSON whose values were removed: names of local folders and files.
    """

    name: str
    content: Path | bytes
    bytes: int
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class PushReport:
    """Result of a push: address, commit, and whether only its owner can see it."""

    url: str
    commit: str
    is_private: bool


def files_to_push(folder: Path) -> list[UploadFile]:
    """List the files of a model folder that `push` sends.

    Raises:
        UsageError: not a model, or adapter, with safetensors weights, or the base of an adapter is not there.
        DataError: the weights are damaged, a text file is not JSON, or a file is a link to elsewhere.
    """
    require_plain(folder)
    weights = _adapter_weights(folder) if is_adapter(folder) else _model_weights(folder)
    if not all(name.endswith(".safetensors") for name in weights):
        raise UsageError(
            f"{folder} has its weights in {weights[0]}: turn it into safetensors first with `gptj-ft convert`"
        )
    index = [] if "model.safetensors" in weights or is_adapter(folder) else [INDEX]
    names = [*_COMPANIONS, ADAPTER_CONFIG if is_adapter(folder) else "config.json", *index, *weights]
    there = [name for name in names if os.path.lexists(folder / name)]
    base = read_origin(base_folder(folder))
    return [_parcel(folder / name, base.repository if base else "") for name in there]


def _model_weights(folder: Path) -> list[str]:
    """Return the names of the files of a model's weights, whose headers have been checked."""
    architecture = read_architecture(folder)
    with open_checkpoint(folder) as checkpoint:
        check_tensors(architecture, checkpoint)
        return sorted({checkpoint.file_of(name).name for name in checkpoint.names})


def _adapter_weights(folder: Path) -> list[str]:
    """Return the same of an adapter."""
    open_adapter(folder, tuned_architecture(folder))
    return [name for name in ADAPTER_WEIGHTS if (folder / name).is_file()][:1]


def files_left_out(folder: Path, parcels: list[UploadFile]) -> list[str]:
    """Return the names in a folder that are not sent."""
    sent = {parcel.name for parcel in parcels}
    return sorted(path.name for path in folder.iterdir() if path.name not in sent)


def push(
    parcels: list[UploadFile],
    repository: str,
    *,
    is_public: bool = False,
    endpoint: str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> PushReport:
    """Send files as one commit; repeated after an interruption, weights that have arrived are not sent again.

    Args:
        parcels: result of `files_to_push`.
        repository: ``owner/name``; created if there is none.
        is_public: whether everybody may see it; default false.
        endpoint: the Hub's address; default ``HF_ENDPOINT``, else https://huggingface.co. The token is that in
            ``HF_TOKEN``.
        progress: callback of bytes done and total bytes; default: none.

    Raises:
        UsageError: no token, no network allowed, a wrong name, or a public repository where none was asked for.
        NetworkError: no connection, no right to write, a server's fault.
    """
    if not re.fullmatch(r"[^/\s]+/[^/\s]+", repository):
        raise UsageError(f"'{repository}' is not a repository's name; write owner/name")
    if not os.environ.get("HF_TOKEN"):
        raise UsageError("to push, set HF_TOKEN to a token that may write (https://huggingface.co/settings/tokens)")
    from huggingface_hub import CommitOperationAdd

    api, total, done = hub_api(endpoint), sum(parcel.bytes for parcel in parcels), 0
    with open_network(), hub_errors(repository, api.endpoint, wants="write"), _plainly():
        api.create_repo(repository, private=not is_public, exist_ok=True)
        is_private = bool(api.model_info(repository).private)
        if not (is_private or is_public):
            raise UsageError(f"{repository} is public, so everybody would see the model: add --public if that is meant")
        operations = [
            CommitOperationAdd(each.name, each.content if isinstance(each.content, bytes) else str(each.content))
            for each in parcels
        ]
        for parcel, operation in zip(parcels, operations, strict=True):
            if parcel.name.endswith(".safetensors"):  # one at a time: what has arrived stays there
                api.preupload_lfs_files(repository, [operation])
                progress(done := done + parcel.bytes, total)
        commit = api.create_commit(repository, operations, commit_message="Model, by gptj-ft")
    progress(total, total)
    return PushReport(f"{api.endpoint}/{repository}", commit.oid, is_private)


@contextmanager
def _plainly() -> Iterator[None]:
    """Disable huggingface_hub's progress bars, and send by git-lfs, which every server of this kind knows."""
    from huggingface_hub import constants
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    before, had_bars = constants.HF_HUB_DISABLE_XET, not are_progress_bars_disabled()
    constants.HF_HUB_DISABLE_XET = True
    disable_progress_bars()
    try:
        yield
    except RuntimeError as error:  # says which file it was, and not what
        raise error.__cause__ or error from error
    except ValueError as error:
        if "metadata" in str(error):
            raise DataError(f"the Hub does not take the head of README.md: {' '.join(str(error).split())}") from error
        raise
    finally:
        constants.HF_HUB_DISABLE_XET = before
        if had_bars:
            enable_progress_bars()


def _parcel(path: Path, base: str) -> UploadFile:
    """Return a file as it is sent; of JSON, without what names folders of this machine."""
    size = path.stat().st_size
    if path.suffix != ".json" or path.name in (INDEX, "tokenizer.json", "vocab.json", "added_tokens.json"):
        return UploadFile(path.name, path, size)
    values = read_json(path)
    local = {key: base if key == ADAPTER_BASE else "" for key in PATHS if _is_path(values.get(key))}
    if path.name == METADATA_FILE and "file" in (data := dict(values.get("data") or {})):  # of an older version
        local["data"] = {key: value for key, value in data.items() if key != "file"}  # type: ignore[assignment]
    if not local:
        return UploadFile(path.name, path, size)
    content = (json.dumps({**values, **local}, indent=2, ensure_ascii=False) + "\n").encode()
    return UploadFile(path.name, content, len(content), tuple(local))


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and bool(re.match(r"/|~|\.{1,2}[/\\]|\\\\|[A-Za-z]:[/\\]", value))
