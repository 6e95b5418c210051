"""Save and load prepared data (a table of tokens with its report); check it against a recipe and a model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import xxhash
from numpy.typing import NDArray

from gptj_ft.config.options import Recipe
from gptj_ft.data.columns import is_column_for
from gptj_ft.data.readers.rows import Occurrences
from gptj_ft.data.readers.source import ROWS_MANIFEST, is_prepared
from gptj_ft.data.table import TokenTable, bounds_of, numbers_of
from gptj_ft.data.template import fields_of
from gptj_ft.data.tokenization import RowTokenizer, tokenizer_digest
from gptj_ft.errors import DataError, UsageError
from gptj_ft.system.atomic import atomic_folder
from gptj_ft.system.digests import digest_of_file, read_json, sealed, unsealed
from gptj_ft.system.files import PRIVATE_FOLDER, require_plain, write_file
from gptj_ft.system.plain_text import shortened

_ROWS = "rows.arrow"
# Raised whenever the same rows and recipe would give other tokens or columns, or the folder gets another form.
VERSION = 7
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


@dataclass(frozen=True)
class Report:
    """Counts, warnings and digests of prepared rows.

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
        known = {name: values[name] for name in cls.__dataclass_fields__}
        known |= {name: tuple(known[name]) for name in ("files", "notes")}
        for name in ("rows_skipped", "warnings"):
            known[name] = {reason: Occurrences(**each) for reason, each in known[name].items()}
        return cls(**known)


@dataclass(frozen=True)
class Prepared:
    """Tokenized rows with their report.

    Attributes:
        rows: ``input_ids`` (int32 list), ``prompt_length``, ``references`` (acceptable completions, for scoring),
            ``source``, ``line``, ``group`` (see `document_hash`), ``label`` (empty where there is none), ``untrained``
            (see `Encoded`), ``continues`` (whether it begins with the token that the one before ends with).
        report: counts and digests.
    """

    rows: TokenTable
    report: Report


def settings_of(recipe: Recipe) -> dict[str, Any]:
    """Return the options that decide how a row becomes tokens."""
    return {name: value for name, value in recipe.to_dict().items() if name in SETTINGS}


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
        if manifest.get("version") != VERSION:
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


CHECKED = ("input_ids", "prompt_length", "untrained")


def check_tokens(prepared: Prepared, where: Path, vocab_size: int, max_length: int) -> None:
    """Check token ids, lengths and masks of prepared rows against a model.

    Args:
        prepared: the rows.
        where: their folder.
        vocab_size: token ids that the model has.
        max_length: inputs of a row; its last target may be one token beyond.

    Raises:
        DataError: the first bad row, what is wrong with it, and how many more there are.
    """
    bad, targetless, first, start = 0, 0, "", 0
    for batch in prepared.rows.batches(*CHECKED):
        problems = dict(_problems(batch, vocab_size, max_length))
        if problems and not first:
            row = min(problems)
            first = f"{where}:{start + row + 1}: {problems[row]}"
        bad += len(problems)
        targetless += sum(what == _NO_TARGET for what in problems.values())
        start += batch.num_rows
    if start and targetless == start:
        raise DataError(f"{where}: no row has a token to train on")
    if bad:
        more = f"; {bad - 1:,} more bad row{'s' if bad > 2 else ''}" if bad > 1 else ""
        raise DataError(f"{first}{more}\nthese rows were not made for this model, or are damaged: prepare them again")


_NO_TARGET = "no token that is trained on"


def _problems(batch: pyarrow.RecordBatch, vocab_size: int, max_length: int) -> Iterator[tuple[int, str]]:
    """Yield (row, problem); of several problems of a row the most basic comes last."""
    tokens, prompts, untrained = (batch.column(name) for name in CHECKED)
    starts, gap_starts = bounds_of(tokens), bounds_of(untrained)
    ids = numbers_of(tokens.flatten())
    borders = numbers_of(untrained.flatten()).astype(np.int64)
    lengths, counts = np.diff(starts), np.diff(gap_starts)
    first_target = np.maximum(numbers_of(prompts), 1)

    of = np.repeat(np.arange(len(counts)), counts)  # the row that each border is of
    later = of[1:] == of[:-1]
    steps = np.diff(borders)
    is_odd = counts % 2 == 1
    is_wrong = is_odd.copy()
    is_wrong[of[1:][later & (steps < 0)]] = True
    is_wrong[of[(borders < first_target[of]) | (borders > lengths[of])]] = True
    signs = np.where(np.arange(len(borders)) - (gap_starts[:-1] - gap_starts[0])[of] & 1, 1, -1)
    left_out = np.bincount(of, borders * signs, len(counts))
    yield from _each(lengths - first_target - left_out < 1, _NO_TARGET)
    yield from _each(is_wrong, "its untrained tokens are no (start, end) pairs in order, after the prompt")
    yield from _each(numbers_of(prompts) < 0, "a prompt of fewer than no tokens")
    yield from _each(lengths > max_length + 1, f"longer than max_length ({max_length})")
    yield from _each(lengths < 1, "no tokens")
    wrong = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    rows = np.searchsorted(starts - starts[0], wrong, side="right") - 1
    for row, id_ in dict(zip(rows[::-1].tolist(), ids[wrong[::-1]].tolist(), strict=True)).items():
        yield row, f"token id {id_}, but the model's ids are 0 to {vocab_size - 1}"


def _each(is_bad: NDArray[Any], what: str) -> Iterator[tuple[int, str]]:
    for row in np.flatnonzero(is_bad).tolist():
        yield row, what
