"""List and remove the models in the home folder; find the runs that need them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from gptj_ft.checkpoints.architecture import read_architecture
from gptj_ft.checkpoints.download import SOURCE, Origin, read_origin
from gptj_ft.checkpoints.metadata import read_metadata
from gptj_ft.checkpoints.model_folder import check_tensors, open_checkpoint
from gptj_ft.checkpoints.weight_file import dtype_name
from gptj_ft.config.run_folder import Run
from gptj_ft.errors import GptjFtError, UsageError, did_you_mean, listed
from gptj_ft.system.files import disk_bytes, files_in, remove_folder
from gptj_ft.system.paths import RUNS, is_model, models, newest_run
from gptj_ft.system.units import gigabytes


@dataclass(frozen=True)
class Entry:
    """A model in the home folder."""

    name: str  # of its folder, as commands take it
    folder: str
    family: str  # architecture; empty if unreadable
    parameters: int | None  # None if unreadable
    dtype: str  # of the stored weights, or ``mixed``
    bytes: int  # size on disk
    origin: str  # repository or model that it was made from
    problem: str | None = None  # reason why it cannot be used

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def models_in_home() -> list[Entry]:
    """Return the models from `download` and `convert`, and incomplete downloads, sorted by name."""
    folders = sorted(models().iterdir()) if models().is_dir() else []
    return [_entry(path) for path in folders if _is_ours(path)]


def model_rows(entries: Sequence[Entry]) -> list[tuple[str, ...]]:
    """Return models as rows of a table, after a row of column names."""
    rows: list[tuple[str, ...]] = [("model", "family", "parameters", "dtype", "disk", "origin")]
    for entry in entries:
        count = f"{entry.parameters:,}" if entry.parameters is not None else "-"
        origin = entry.origin + (f"  {entry.problem}" if entry.problem else "")
        rows.append((entry.name, entry.family or "-", count, entry.dtype or "-", gigabytes(entry.bytes), origin))
    return rows


def find(name: str) -> Entry:
    """Return a model of the home folder by name; raise `UsageError` if there is none."""
    folder = models() / name
    if Path(name).name != name or not folder.is_dir() or not _is_ours(folder):
        known = [entry.name for entry in models_in_home()]
        raise UsageError(
            f"no model '{name}' in {models()}{did_you_mean(name, known)}; `gptj-ft models` lists them. "
            "This command removes models of that folder only"
        )
    return _entry(folder)


def remove_entry(entry: Entry, force: bool = False) -> None:
    """Remove a model, or only the link if its folder is one.

    Raises:
        UsageError: a run needs it and ``force`` is not set, or it cannot be removed.
    """
    if needing := [] if force else [str(run.folder) for run in runs_that_need(Path(entry.folder))]:
        raise UsageError(
            f"{listed(needing, 1)} was started from {entry.name} and cannot be resumed or exported without it; "
            "--force removes it anyway"
        )
    folder = Path(entry.folder)
    try:
        if folder.is_symlink():
            folder.unlink()
        else:
            remove_folder(folder)
    except OSError as error:
        raise UsageError(f"cannot remove {folder}: {error.strerror or error}") from error


def runs_that_need(model: Path) -> list[Run]:
    """Return the runs that need a model for a resume or an export; searches ``runs`` and the newest run's folder."""
    newest = newest_run()
    folders = {folder.resolve() for folder in (RUNS, *((newest.parent,) if newest else ())) if folder.is_dir()}
    runs = []
    for run in (Run(path) for folder in sorted(folders) for path in sorted(folder.iterdir())):
        # A tuned model stands alone; an adapter and the export of a checkpoint need the base model.
        if not run.recipe_file.is_file() or (is_model(run.model) and not run.whole_checkpoints()):
            continue
        try:
            base = run.recipe().model
        except GptjFtError:
            continue
        if base and Path(base).resolve() == model.resolve():
            runs.append(run)
    return runs


def _is_ours(path: Path) -> bool:
    return path.name[:1] != "." and (is_model(path) or (path / SOURCE).is_file())


def _entry(folder: Path) -> Entry:
    family, parameters, dtype, origin, problem = "", None, "", "", None
    try:
        source = read_origin(folder)
        origin = _origin_of(folder, source)
        if not is_model(folder):
            problem = f"incomplete: `gptj-ft download {source.repository if source else ''}` resumes the download"
        else:
            family, parameters, dtype = _contents(folder)
    except GptjFtError as error:
        problem = str(error)
    size = disk_bytes(files_in(folder))
    return Entry(folder.name, str(folder), family, parameters, dtype, size, origin, problem)


def _contents(folder: Path) -> tuple[str, int, str]:
    """Read family, number of parameters and type from the headers of the weight files."""
    architecture = read_architecture(folder)
    with open_checkpoint(folder) as checkpoint:
        dropped = set(check_tensors(architecture, checkpoint))
        kept = [checkpoint.entry(name) for name in checkpoint.names if name not in dropped]
    return architecture.family.model_type, sum(prod(entry.shape) for entry in kept), dtype_name(kept)


def _origin_of(folder: Path, source: Origin | None) -> str:
    stem = f"{source.repository}@{source.commit[:12]}" if source else ""
    if is_model(folder) and (tuning := read_metadata(folder)):
        return f"tuned from {tuning.base_model or stem or 'a model elsewhere'}"
    if source is None:
        return "made here"
    return f"{'downloaded' if source.files else 'converted'} from {stem}"
