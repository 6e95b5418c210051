"""Prepared data: a table of tokens with its report; saved, loaded, checked against a recipe."""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from gptj_ft.config.options import Recipe
from gptj_ft.data.columns import is_column_for
from gptj_ft.data.jinja_template import fields_of
from gptj_ft.data.table_folder import open_table, write_table
from gptj_ft.data.token_table import TokenTable
from gptj_ft.data.tokenizer import tokenizer_digest
from gptj_ft.errors import DataError, ResourceError, UsageError
from gptj_ft.system.atomic import draft_of
from gptj_ft.system.digests import digest_of_file, read_json, sealed, unsealed
from gptj_ft.system.files import discard, require_plain, write_file
from gptj_ft.system.plain_text import shortened

if TYPE_CHECKING:
    from gptj_ft.data.tokenizer import RowTokenizer

MANIFEST = "manifest.json"
# Raised whenever the same rows and recipe would give other tokens or columns, or the folder gets another form.
VERSION = 7
ROWS_DIGESTS = "rows_xxh3_128"  # in the manifest: of each file of rows
# Those that say how a file is read, and nothing of rows that were read before.
FILE_SETTINGS = ("delimiter", "encoding", "sheet")
# The options that decide what is a row and how it becomes tokens.
SETTINGS = (
    "prompt",
    "completion",
    "shorten",
    "on_long",
    "cut",
    "max_length",
    "documents",
    "quotes",
    *FILE_SETTINGS,
    "sentences",
    "labels",
    "no_answer",
)


@dataclass(frozen=True)
class Skips:
    """Rows left out, or warned of, for one reason: how many, and where the first of them are (``file:line``)."""

    count: int
    first: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """What became of the rows.

    ``rows_*`` speak of the files; ``windows``, ``tokens``, ``target_tokens`` and ``longest`` of the documents at hand,
    which are fewer once some are held out.

    Attributes:
        files: what was read.
        rows_read: ``rows_kept`` plus all that were skipped.
        rows_kept: rows that are trained on.
        rows_skipped: by reason.
        warnings: what is wrong with rows that were kept.
        rows_cut: rows of which the `shorten` field lost a part.
        tokens_cut: that were lost so.
        windows: documents in the data set; more than ``rows_kept`` if plain text was split.
        tokens: of all documents, EOS included.
        target_tokens: those that are trained on.
        longest: tokens of the longest document.
        columns: field -> column.
        data_sha256: of the file.
        tokenizer_sha256: see `tokenizer_digest`.
        notes: what is odd about the files.
        settings: the options in `SETTINGS`.
        version: of this layout.
    """

    files: tuple[str, ...]
    rows_read: int
    rows_kept: int
    rows_skipped: Mapping[str, Skips]
    warnings: Mapping[str, Skips]
    rows_cut: int
    tokens_cut: int
    windows: int
    tokens: int
    target_tokens: int
    longest: int
    columns: Mapping[str, str]
    data_sha256: str
    tokenizer_sha256: str
    notes: tuple[str, ...]
    settings: Mapping[str, Any]
    version: int = VERSION

    def __post_init__(self) -> None:
        assert self.rows_read == self.rows_kept + sum(skips.count for skips in self.rows_skipped.values())

    @property
    def settings_sha256(self) -> str:
        """Digest of templates and limits."""
        return hashlib.sha256(json.dumps(dict(self.settings), sort_keys=True).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        return {**asdict(self), "settings_sha256": self.settings_sha256}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Report:
        """Read what `to_dict` returned."""
        known = {name: values[name] for name in cls.__dataclass_fields__}
        skips, warnings = (
            {reason: Skips(s["count"], tuple(s["first"])) for reason, s in known[name].items()}
            for name in ("rows_skipped", "warnings")
        )
        return cls(
            **{
                **known,
                "files": tuple(known["files"]),
                "notes": tuple(known["notes"]),
                "rows_skipped": skips,
                "warnings": warnings,
            }
        )


@dataclass(frozen=True)
class Prepared:
    """Rows as tokens, and how they came about.

    Attributes:
        rows: ``input_ids`` (int32 list), ``prompt_length``, ``references`` (acceptable completions, for scoring),
            ``source``, ``line``, ``group`` (see `group_of`), ``label`` (empty where there is none), ``untrained``
            (see `Encoded`), ``continues`` (whether it begins with the token that the one before ends with).
        report: counts and digests.
    """

    rows: TokenTable
    report: Report


def settings_of(recipe: Recipe) -> dict[str, Any]:
    """Return the options that decide how a row becomes tokens."""
    return {name: value for name, value in recipe.to_dict().items() if name in SETTINGS}


def is_prepared(folder: Path) -> bool:
    """Tell whether a folder holds prepared data."""
    return (folder / MANIFEST).is_file()


def save(prepared: Prepared, folder: Path) -> None:
    """Write a new folder: all of it or nothing. Of several processes that write the same one, the first wins.

    Raises:
        UsageError: it exists, perhaps only since this began, or cannot be written.
        ResourceError: the disk is full.
    """
    exists = f"{folder} exists already, and prepared data is never overwritten; name another folder"
    if folder.exists():
        raise UsageError(exists)
    temporary = draft_of(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        write_table(prepared.rows, temporary)
        content = sealed({**prepared.report.to_dict(), ROWS_DIGESTS: _row_digests(temporary)})
        write_file(temporary / MANIFEST, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
        temporary.rename(folder)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise ResourceError(f"no space left for {folder}; free some, or write to another disk") from error
        if folder.exists():
            raise UsageError(exists) from error
        raise UsageError(f"cannot write {folder}: {error.strerror or error}") from error
    finally:
        discard(temporary)


def load(folder: Path) -> Prepared:
    """Open prepared data, memory-mapped, after one pass over its files to compare their digests.

    Raises:
        UsageError: the folder holds none.
        DataError: made by another version, or damaged, or a link in it leads elsewhere.
    """
    if not is_prepared(folder):
        raise UsageError(f"{folder} is not prepared data: it has no {MANIFEST}")
    require_plain(folder)
    again = "prepare the data again, or put back a copy"
    try:
        manifest = read_json(folder / MANIFEST)
        if manifest.get("version") != VERSION:
            raise DataError(f"{folder}: prepared by version {manifest.get('version')}, this is {VERSION}; {again}")
        report = Report.from_dict(unsealed(manifest, folder / MANIFEST))
        if _row_digests(folder) != manifest[ROWS_DIGESTS]:
            raise DataError(f"{folder}: damaged prepared data: the rows are not those that were written; {again}")
        rows = open_table(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{folder}: damaged prepared data ({type(error).__name__}: {error}); {again}") from error
    if [file.name for file in rows.files] != list(manifest[ROWS_DIGESTS]):
        raise DataError(f"{folder}: damaged prepared data: it names other files of rows; {again}")
    if len(rows) != report.windows:
        raise DataError(f"{folder}: {len(rows)} documents, {MANIFEST} says {report.windows}; {again}")
    return Prepared(rows, report)


def _row_digests(folder: Path) -> dict[str, str]:
    """Return the digests of the files of a table, which are read once for it: four bytes a token and a little more.

    That is before they are opened: Arrow believes what a file says of itself.
    """
    return {path.name: digest_of_file(path) for path in sorted(folder.glob("*.arrow"))}


def check_compatible(prepared: Prepared, recipe: Recipe, tokenizer: RowTokenizer) -> None:
    """Check that preparing again would give the same tokens.

    Raises:
        DataError: it would not; names what differs.
    """
    report = prepared.report
    differences = [
        f"{name} is {value!r}, was {report.settings.get(name)!r}"
        for name, value in settings_of(recipe).items()
        if value != report.settings.get(name) and name not in FILE_SETTINGS
    ]
    for field, column in report.columns.items():
        mapped = recipe.map.get(field)
        names = recipe.fields.get(field, (field,)) if mapped is None else (mapped,)
        if not is_column_for(column, names):
            differences.append(f"'{field}' was taken from column '{shortened(column)}', now from {', '.join(names)}")
    if tokenizer_digest(tokenizer) != report.tokenizer_sha256:
        differences.insert(0, "the tokenizer is another one")
    if differences:
        raise DataError(
            f"the data was prepared for something else: {'; '.join(differences)}\n"
            f"prepare it again from {', '.join(report.files)}, or use the recipe it was prepared with"
        )


def group_of(recipe: Recipe, values: Mapping[str, Any]) -> int:
    """Return a number for the document of a row: that of its `shorten` field, else of all that the model is given."""
    inputs = fields_of(recipe.prompt or recipe.completion)
    names = (recipe.shorten,) if recipe.shorten in inputs else inputs
    return number_of("\0".join(str(values[name]).strip() for name in names).encode())


def number_of(content: bytes) -> int:
    """Return a number for some content, the same for the same."""
    return xxhash.xxh3_64_intdigest(content) - 2**63
