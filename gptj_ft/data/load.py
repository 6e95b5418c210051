"""Load the rows of a run: prepared data as it is; files are prepared on the spot, and kept in a cache."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptj_ft.config.options import Recipe
from gptj_ft.data.checks.tokens import check_tokens
from gptj_ft.data.dataset import (
    VERSION,
    Prepared,
    check_compatible,
    load_dataset,
    save_dataset,
    settings_of,
)
from gptj_ft.data.hub_dataset import is_reference, local_folder
from gptj_ft.data.labelled.encoder import with_labels
from gptj_ft.data.prepare import tokenize_rows
from gptj_ft.data.readers.source import ROWS_MANIFEST, FileOptions, Source, identify, is_prepared
from gptj_ft.data.tokenization import RowTokenizer, tokenizer_digest
from gptj_ft.errors import DataError, ResourceError, UsageError
from gptj_ft.system.digests import read_json
from gptj_ft.system.files import discard, disk_bytes, files_in, keep_folder
from gptj_ft.system.paths import make_home, part_of_home


@dataclass(frozen=True)
class CacheEntry:
    """A cache entry: folder, bytes on disk, source files, number of rows."""

    folder: Path
    bytes: int
    files: tuple[str, ...]
    rows: int


def prepare_once(
    recipe: Recipe,
    tokenizer: RowTokenizer,
    source: Path | Source,
    vocab_size: int,
    progress: Callable[[int], None] | None = None,
    *,
    labels: Sequence[str] = (),
    known_labels: Sequence[str] = (),
    needs_target: bool = True,
) -> Prepared:
    """Return prepared rows from the cache; else prepare them, and add them to the cache.

    What cannot be kept (no space, no permission) is made all the same. Where another process has made the same
    meanwhile, that is taken. The arguments are those of `tokenize_rows`.
    """
    source = identify(source, FileOptions.of(recipe))

    def prepare() -> Prepared:
        return tokenize_rows(
            recipe, tokenizer, source, vocab_size, progress,
            labels=labels, known_labels=known_labels, needs_target=needs_target,
        )  # fmt: skip

    if not recipe.cache:
        return prepare()
    asked = [list(labels), list(known_labels), needs_target]
    folder = cache_folder() / _key(recipe, tokenizer, source, vocab_size, asked)
    if is_prepared(folder):
        try:
            if not folder.is_symlink():
                return load_dataset(folder)
        except DataError:  # damaged
            pass
        discard(folder)
    prepared = prepare()
    with suppress(ResourceError, UsageError, OSError):
        make_home()
        keep_folder(cache_folder())
        save_dataset(prepared, folder)
    try:
        return load_dataset(folder)
    except (DataError, UsageError):
        return prepared


def cache_entries() -> list[CacheEntry]:
    """List the cache entries, the largest first."""
    found = []
    for folder in cache_folder().glob("*"):
        if is_prepared(folder):
            try:
                manifest = read_json(folder / ROWS_MANIFEST)
                files, rows = tuple(map(str, manifest["files"])), int(manifest["rows_kept"])
            except (ValueError, KeyError, TypeError):
                files, rows = (), 0
            found.append(CacheEntry(folder, disk_bytes(files_in(folder)), files, rows))
    return sorted(found, key=lambda each: -each.bytes)


def remove_prepared_rows() -> int:
    """Empty the cache; return the bytes freed."""
    size = disk_bytes(files_in(cache_folder()))
    discard(cache_folder())
    return size


def cache_folder() -> Path:
    """Return the cache folder of prepared data."""
    return part_of_home("data")


def _key(recipe: Recipe, tokenizer: RowTokenizer, source: Source, vocab_size: int, asked: Sequence[Any]) -> str:
    """Return the cache key: a digest of everything that the result depends on."""
    parts = {
        "version": VERSION,
        "source": str(source.path.resolve()),  # the report names it, row by row
        "data": source.sha256,
        "tokenizer": tokenizer_digest(tokenizer),
        "settings": settings_of(recipe),
        "fields": {name: list(columns) for name, columns in recipe.fields.items()},
        "map": dict(recipe.map),
        "max_bad_rows": recipe.max_bad_rows,
        "header": list(recipe.header),
        "vocab_size": vocab_size,
        "asked": asked if recipe.task != "language-model" else [],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def data_path(data: str | None) -> Path:
    """Return the path of the rows; of those on the Hub, their local folder.

    Raises:
        UsageError: none were named, or they have not been fetched.
    """
    if data is None:
        raise UsageError(
            "no rows are named: add --data FILE (jsonl, json, csv, tsv, xlsx, parquet, txt, tfrecords, h5, a folder, "
            "or prepared) or --data hub:owner/name"
        )
    return local_folder(data) if is_reference(data) else Path(data).expanduser()


def read_or_prepare(
    recipe: Recipe,
    tokenizer: RowTokenizer,
    vocab_size: int,
    source: Path | Source,
    *,
    labels: Sequence[str] = (),
    known_labels: Sequence[str] = (),
    needs_target: bool = True,
) -> Prepared:
    """Load prepared rows and check that they fit recipe, tokenizer and labels; prepare any others.

    Args:
        recipe: options of the run.
        tokenizer: tokenizer of the model.
        vocab_size: rows of its embedding.
        source: prepared rows, or others.
        labels, known_labels, needs_target: as in `tokenize_rows`; prepared rows get their class ids in this order.

    Raises:
        UsageError, DataError: as `tokenize_rows`, `load_dataset` and the checks.
    """
    source = identify(source, FileOptions.of(recipe))
    if source.is_prepared:
        prepared = load_dataset(source.path)
        check_compatible(prepared, recipe, tokenizer)
        check_tokens(prepared, source.path, vocab_size, recipe.max_length)
        return with_labels(prepared, labels, source.path) if labels else prepared
    return prepare_once(
        recipe, tokenizer, source, vocab_size, labels=labels, known_labels=known_labels, needs_target=needs_target
    )
