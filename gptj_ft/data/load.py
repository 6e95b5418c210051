"""Load the rows of a run: prepared data directly, files through a cache of tokenized rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gptj_ft.data.checks.tokens import check_tokens
from gptj_ft.data.dataset import VERSION, Prepared, check_compatible, load_dataset, save_dataset, settings_of
from gptj_ft.data.encode import check_templates, tokens_digest
from gptj_ft.data.hub_dataset import is_reference, local_folder
from gptj_ft.data.labelled.label_order import with_labels
from gptj_ft.data.prepare import TokenizeJob, tokenize_rows
from gptj_ft.data.readers.source import ROWS_MANIFEST, is_prepared
from gptj_ft.errors import DataError, ResourceError, UsageError
from gptj_ft.system.digests import read_json
from gptj_ft.system.files import discard, disk_bytes, files_in, keep_folder
from gptj_ft.system.paths import make_home, part_of_home

Tokenizer = Callable[[TokenizeJob, Callable[[int], None] | None], Prepared]


@dataclass(frozen=True)
class CacheEntry:
    """A cache entry: folder, bytes on disk, source files, number of rows."""

    folder: Path
    bytes: int
    files: tuple[str, ...]
    rows: int


def prepare_once(
    job: TokenizeJob, progress: Callable[[int], None] | None = None, tokenize: Tokenizer = tokenize_rows
) -> Prepared:
    """Return tokenized rows from the cache; tokenize and cache them first if they are missing.

    If the cache cannot be written (no space, no permission), return the rows without caching. If another process has
    cached the same rows meanwhile, use its copy.
    """
    check_templates(job.recipe)  # whether the rows are cached or not
    if not job.recipe.cache:
        return tokenize(job, progress)
    folder = cache_folder() / _key(job)
    if is_prepared(folder):
        try:
            # A link may lead out of the private cache.
            if not folder.is_symlink():
                return load_dataset(folder)
        except DataError:  # damaged
            pass
        discard(folder)
    prepared = tokenize(job, progress)
    with suppress(ResourceError, UsageError, OSError):
        make_home()
        keep_folder(cache_folder())
        save_dataset(prepared, folder)
    # The saved copy is memory-mapped, and may be another process's. Without one, keep the rows of the scratch file.
    try:
        return load_dataset(folder)
    except (DataError, UsageError):
        return prepared


def cache_entries() -> list[CacheEntry]:
    """List the cache entries, the largest first."""
    entries = []
    for folder in cache_folder().glob("*"):
        if is_prepared(folder):
            try:
                manifest = read_json(folder / ROWS_MANIFEST)
                files, rows = tuple(map(str, manifest["files"])), int(manifest["rows_kept"])
            except (ValueError, KeyError, TypeError):
                files, rows = (), 0
            entries.append(CacheEntry(folder, disk_bytes(files_in(folder)), files, rows))
    return sorted(entries, key=lambda entry: -entry.bytes)


def remove_prepared_rows() -> int:
    """Empty the cache; return the bytes freed."""
    size = disk_bytes(files_in(cache_folder()))
    discard(cache_folder())
    return size


def cache_folder() -> Path:
    """Return the cache folder of prepared data."""
    return part_of_home("data")


def _key(job: TokenizeJob) -> str:
    """Return the cache key: a digest of all settings that the result depends on."""
    recipe = job.recipe
    labels = [list(job.labels), list(job.known_labels), job.needs_target]
    parts = {
        "version": VERSION,
        "source": str(job.source.path.resolve()),  # every row of the report names it
        "data": job.source.sha256,
        "notes": list(job.source.notes),
        "guarded": [file.path.name for file in job.source.files if file.is_guarded],
        "tokenizer": tokens_digest(recipe, job.tokenizer),
        "settings": settings_of(recipe),
        "fields": {name: list(columns) for name, columns in recipe.fields.items()},
        "map": dict(recipe.map),
        "max_bad_rows": recipe.max_bad_rows,
        "header": list(recipe.header),
        "vocab_size": job.vocab_size,
        "asked": labels if recipe.task != "language-model" else [],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def data_path(data: str | None) -> Path:
    """Return the path of the rows; for a dataset on the Hub, its local folder."""
    if data is None:
        raise UsageError(
            "no data: add --data FILE (jsonl, json, csv, tsv, xlsx, docx, parquet, txt, tfrecords, h5, a folder, or "
            "prepared data) or --data hub:owner/name"
        )
    return local_folder(data) if is_reference(data) else Path(data).expanduser()


def read_or_prepare(job: TokenizeJob) -> Prepared:
    """Load prepared rows and check that they fit the job; tokenize any other rows."""
    if not job.source.is_prepared:
        prepared = prepare_once(job)
        if job.needs_target and prepared.report.rows_kept and not prepared.report.target_tokens:
            raise DataError(
                f"{job.source.path}: no row has a token to train on; the tokenizer makes {prepared.report.tokens:,} "
                f"tokens of {prepared.report.rows_kept:,} rows: does it belong to the model?"
            )
        return prepared
    check_templates(job.recipe)
    prepared, folder = load_dataset(job.source.path), job.source.path
    check_compatible(prepared, job.recipe, job.tokenizer)
    check_tokens(prepared, folder, job.vocab_size, job.recipe.max_length)
    return with_labels(prepared, job.labels, folder) if job.labels else prepared
