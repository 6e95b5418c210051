"""Save and load prepared data (a table of tokens with its report); check it against a recipe."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from gptj_ft.config.options import Recipe
from gptj_ft.data.columns import is_column_for
from gptj_ft.data.readers.rows import Occurrences
from gptj_ft.data.readers.source import ROWS_MANIFEST, is_prepared
from gptj_ft.data.table import TokenTable
from gptj_ft.data.template import fields_of
from gptj_ft.data.tokenization import RowTokenizer, tokenizer_digest
from gptj_ft.errors import DataError, UsageError
from gptj_ft.system.atomic import atomic_folder
from gptj_ft.system.digests import digest_of_file, read_json, sealed, unsealed
from gptj_ft.system.files import PRIVATE_FOLDER, require_plain, write_file
from gptj_ft.system.plain_text import shortened

_ROWS = "rows.arrow"
# Raised whenever the same rows and recipe would give other tokens or columns, or the folder gets another form.
VERSION = 8
READABLE = (7, VERSION)  # of rows without labels, 7 is the same
ROWS_DIGESTS = "rows_xxh3_128"  # in the manifest: file of rows -> digest
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
_LATER = ("labels", "label_counts")  # what reports of older folders lack
# And those of tasks with labels.
TASK_SETTINGS = ("task", "pair", "stride")


@dataclass(frozen=True)
class Report:
    """Counts, warnings and digests of prepared rows.

    ``rows_*`` speak of the files; ``windows``, ``tokens``, ``target_tokens`` and ``longest`` of the documents at hand,
    which are fewer once some are held out.

    Attributes:
        files: names of the files read.
        rows_read: ``rows_kept`` plus all that were skipped.
        rows_kept: rows that are trained on.
        rows_skipped: rows left out, by reason.
        warnings: rows that were kept with a warning, by warning.
        rows_cut: rows of which the `shorten` field lost a part.
        tokens_cut: tokens lost by truncation.
        windows: documents in the data set; more than ``rows_kept`` if plain text was split.
        tokens: tokens of all documents, EOS included.
        target_tokens: those that are trained on; of tasks with labels, what has one: texts, words, sentences, windows.
        longest: tokens of the longest document.
        columns: field -> column.
        data_sha256: SHA-256 of the files that the rows came from.
        tokenizer_sha256: see `tokenizer_digest`.
        notes: warnings about the files.
        settings: the options in `SETTINGS`.
        labels: names of the classes in the order of their ids; empty where there are none.
        label_counts: rows that have each label; of labelled words, the words.
        version: version of this layout.
    """

    files: tuple[str, ...]
    rows_read: int
    rows_kept: int
    rows_skipped: Mapping[str, Occurrences]
    warnings: Mapping[str, Occurrences]
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
    labels: tuple[str, ...] = ()
    label_counts: tuple[int, ...] = ()
    version: int = VERSION

    def __post_init__(self) -> None:
        assert self.rows_read == self.rows_kept + sum(skips.count for skips in self.rows_skipped.values())

    @property
    def settings_sha256(self) -> str:
        """Digest of templates and limits."""
        return hashlib.sha256(json.dumps(dict(self.settings), sort_keys=True).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON values."""
        return {**asdict(self), "settings_sha256": self.settings_sha256}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Report:
        """Restore from the values of `to_dict`."""
        known = {name: values[name] for name in cls.__dataclass_fields__ if name in values or name not in _LATER}
        known |= {name: tuple(known.get(name, ())) for name in ("files", "notes", *_LATER)}
        for name in ("rows_skipped", "warnings"):
            known[name] = {reason: Occurrences(**each) for reason, each in known[name].items()}
        return cls(**known)


@dataclass(frozen=True)
class Prepared:
    """Tokenized rows with their report.

    Attributes:
        rows: ``input_ids`` (int32 list), ``prompt_length``, ``references`` (acceptable completions, for scoring),
            ``source``, ``line``, ``group`` (see `document_hash`), ``label`` (empty where there is none), ``untrained``
            (see `Encoded`), ``continues`` (whether it begins with the token that the one before ends with; of tasks
            with labels, whether it is a later window of the same row). Of tasks with labels also ``borders`` (tokens
            at which the token type flips), ``marks`` (tokens that the head reads; none: all), ``targets`` (class ids
            of the marks; of spans, start and end token), ``values`` (0 or 1 for each label, or one number), ``texts``
            (context, words or sentences) and ``offsets`` (of each token, its characters in the context).
        report: counts and digests.
    """

    rows: TokenTable
    report: Report


def settings_of(recipe: Recipe) -> dict[str, Any]:
    """Return the options that decide how a row becomes tokens."""
    names = SETTINGS if recipe.task == "language-model" else (*SETTINGS, *TASK_SETTINGS)
    return {name: value for name, value in recipe.to_dict().items() if name in names}


def save_dataset(prepared: Prepared, folder: Path) -> None:
    """Write a new folder atomically; of several processes that write the same one, the first wins.

    Raises:
        UsageError: it exists, perhaps only since this began, or cannot be written.
        ResourceError: the disk is full.
    """
    with atomic_folder(folder) as draft:
        draft.chmod(PRIVATE_FOLDER)
        prepared.rows.save(draft / _ROWS)
        content = sealed({**prepared.report.to_dict(), ROWS_DIGESTS: {_ROWS: digest_of_file(draft / _ROWS)}})
        write_file(draft / ROWS_MANIFEST, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def load_dataset(folder: Path) -> Prepared:
    """Open prepared data, memory-mapped, after comparing the digest of its rows.

    Raises:
        UsageError: the folder holds none.
        DataError: made by another version, or damaged, or a link in it leads elsewhere.
    """
    if not is_prepared(folder):
        raise UsageError(f"{folder} is not prepared data: it has no {ROWS_MANIFEST}")
    require_plain(folder)
    again = "prepare the data again, or put back a copy"
    try:
        manifest = read_json(folder / ROWS_MANIFEST)
        if manifest.get("version") not in READABLE:
            raise DataError(f"{folder}: prepared by version {manifest.get('version')}, this is {VERSION}; {again}")
        report = Report.from_dict(unsealed(manifest, folder / ROWS_MANIFEST))
        ((name, digest),) = manifest[ROWS_DIGESTS].items()
        # Before it is opened: Arrow believes what a file says of itself.
        if Path(name).name != name or not (folder / name).is_file() or digest_of_file(folder / name) != digest:
            raise DataError(f"{folder}: damaged prepared data: the rows are not those that were written; {again}")
        rows = TokenTable.open(folder / name).validate()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{folder}: damaged prepared data ({type(error).__name__}: {error}); {again}") from error
    if len(rows) != report.windows:
        raise DataError(f"{folder}: {len(rows)} documents, {ROWS_MANIFEST} says {report.windows}; {again}")
    return Prepared(rows, report)


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


def document_hash(recipe: Recipe, values: Mapping[str, Any]) -> int:
    """Hash the document of a row: its `shorten` field, else the whole input of the model."""
    inputs = fields_of(recipe.prompt or recipe.completion)
    names = (recipe.shorten,) if recipe.shorten in inputs else inputs
    return content_hash("\0".join(str(values[name]).strip() for name in names).encode())


def content_hash(content: bytes) -> int:
    """Hash content to a signed 64-bit integer."""
    return xxhash.xxh3_64_intdigest(content) - 2**63
