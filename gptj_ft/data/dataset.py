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
from gptj_ft.config.saved_values import RowsReport, checked
from gptj_ft.data.chat import MESSAGES, is_chat, opening_of
from gptj_ft.data.chat_template import has_template
from gptj_ft.data.columns import is_column_for
from gptj_ft.data.encode import tokens_digest
from gptj_ft.data.readers.rows import Occurrences
from gptj_ft.data.readers.source import ROWS_MANIFEST, is_prepared
from gptj_ft.data.table import TokenTable
from gptj_ft.data.template import fields_of
from gptj_ft.data.tokenization import RowTokenizer
from gptj_ft.errors import DataError, UsageError
from gptj_ft.system.atomic import atomic_folder
from gptj_ft.system.digests import digest_of_file, read_json, sealed, unsealed
from gptj_ft.system.files import PRIVATE_FOLDER, require_plain, write_file
from gptj_ft.system.plain_text import shortened

_ROWS = "rows.arrow"
# Increase it whenever the same rows and recipe give other tokens or columns, or the folder another layout.
VERSION = 10
# 7 differs for rows with labels only, 8 for answers of weight 0 and numbers of JSON, 9 for chats and padded tokens.
READABLE = (7, 8, 9, VERSION)
ROWS_DIGESTS = "rows_xxh3_128"  # in the manifest: file of rows -> digest
FILE_SETTINGS = ("delimiter", "encoding", "sheet")  # matter only while a file is read
SETTINGS = (  # options that decide how a file becomes rows, and a row tokens
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
VALUE_SHOWN = 400  # characters of an option in a message; a chat template has thousands
_LATER = ("labels", "label_counts", "cut_places")  # missing in earlier reports
CHAT_SETTINGS = ("chat_template", "template_options", "template_date")  # further `SETTINGS` with a chat template
TASK_SETTINGS = ("task", "pair", "stride")  # further `SETTINGS` of tasks with labels


@dataclass(frozen=True)
class Report:
    """Counts, warnings and digests of prepared rows.

    ``rows_*`` count rows of the files. ``windows``, ``tokens``, ``target_tokens`` and ``longest`` describe the
    documents of this part, e.g. after a split.
    """

    files: tuple[str, ...]  # names of the files
    rows_read: int  # ``rows_kept`` plus all ``rows_skipped``
    rows_kept: int
    rows_skipped: Mapping[str, Occurrences]  # by reason
    warnings: Mapping[str, Occurrences]  # kept rows with a warning, by warning
    rows_cut: int  # rows whose `shorten` field was truncated
    tokens_cut: int  # tokens lost by truncation
    windows: int  # documents; more than ``rows_kept`` if rows were split
    tokens: int  # of all documents, EOS included
    target_tokens: int  # targets: tokens; for tasks with labels the labelled texts, words, sentences or windows
    longest: int  # tokens of the longest document
    columns: Mapping[str, str]  # field -> column
    data_sha256: str  # SHA-256 of the files
    tokenizer_sha256: str  # see `tokens_digest`
    notes: tuple[str, ...]  # warnings about the files
    settings: Mapping[str, Any]  # the options in `SETTINGS`
    labels: tuple[str, ...] = ()  # class names in the order of their ids
    label_counts: tuple[int, ...] = ()  # rows with each label; for labelled words, the words
    cut_places: tuple[str, ...] = ()  # the first truncated rows, ``file:line``
    version: int = VERSION

    def __post_init__(self) -> None:
        assert self.rows_read == self.rows_kept + sum(skips.count for skips in self.rows_skipped.values())

    @property
    def settings_sha256(self) -> str:
        return hashlib.sha256(json.dumps(dict(self.settings), sort_keys=True).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "settings_sha256": self.settings_sha256}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Report:
        """Restore from the result of `to_dict`."""
        known = {name: values[name] for name in cls.__dataclass_fields__ if name in values or name not in _LATER}
        known |= {name: tuple(known.get(name, ())) for name in ("files", "notes", *_LATER)}
        for name in ("rows_skipped", "warnings"):
            known[name] = {reason: Occurrences(**each) for reason, each in known[name].items()}
        return cls(**known)


@dataclass(frozen=True)
class Prepared:
    """Tokenized rows with their report; `table.SCHEMA` documents the columns."""

    rows: TokenTable
    report: Report


def settings_of(recipe: Recipe) -> dict[str, Any]:
    """Return the options that decide how a row becomes tokens."""
    names: tuple[str, ...] = SETTINGS if recipe.task == "language-model" else (*SETTINGS, *TASK_SETTINGS)
    names += CHAT_SETTINGS if has_template(recipe) else ()
    return {name: value for name, value in recipe.to_dict().items() if name in names}


def save_dataset(prepared: Prepared, folder: Path) -> None:
    """Write a new folder atomically; of several processes that write the same folder, the first wins."""
    with atomic_folder(folder) as draft:
        draft.chmod(PRIVATE_FOLDER)
        prepared.rows.save(draft / _ROWS)
        content = sealed({**prepared.report.to_dict(), ROWS_DIGESTS: {_ROWS: digest_of_file(draft / _ROWS)}})
        write_file(draft / ROWS_MANIFEST, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def load_dataset(folder: Path) -> Prepared:
    """Open prepared data, memory-mapped, after verifying the digest of its rows."""
    if not is_prepared(folder):
        raise UsageError(f"{folder} is not prepared data: it has no {ROWS_MANIFEST}")
    require_plain(folder)
    again = "prepare the data again, or put back a copy"
    try:
        manifest = read_json(folder / ROWS_MANIFEST)
        if manifest.get("version") not in READABLE:
            raise DataError(f"{folder}: prepared by version {manifest.get('version')}, this is {VERSION}; {again}")
        path = folder / ROWS_MANIFEST
        report = Report.from_dict(checked(RowsReport, unsealed(manifest, path), path, again))
        ((name, digest),) = manifest[ROWS_DIGESTS].items()
        # Verify before opening: Arrow trusts the offsets in a file.
        if Path(name).name != name or not (folder / name).is_file() or digest_of_file(folder / name) != digest:
            raise DataError(f"{folder}: damaged prepared data: the rows do not match their checksum; {again}")
        rows = TokenTable.open(folder / name).validate()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{folder}: damaged prepared data ({type(error).__name__}: {error}); {again}") from error
    if len(rows) != report.windows:
        raise DataError(f"{folder}: {len(rows)} documents, but {ROWS_MANIFEST} has {report.windows}; {again}")
    return Prepared(rows, report)


def check_compatible(prepared: Prepared, recipe: Recipe, tokenizer: RowTokenizer) -> None:
    """Check that preparing the rows again would give the same tokens."""
    report = prepared.report
    differences = [
        f"{name} is {_shown(value)}, was {_shown(report.settings.get(name))}"
        for name, value in settings_of(recipe).items()
        if value != report.settings.get(name) and name not in FILE_SETTINGS
    ]
    for field, column in report.columns.items():
        mapped = recipe.map.get(field)
        names = recipe.fields.get(field, (field,)) if mapped is None else (mapped,)
        if not is_column_for(column, names):
            differences.append(f"'{field}' was taken from column '{shortened(column)}', now from {', '.join(names)}")
    if tokens_digest(recipe, tokenizer) != report.tokenizer_sha256:
        other = tokens_digest(recipe.model_copy(update={"bos": not recipe.bos}), tokenizer)
        is_bos = other == report.tokenizer_sha256
        differences.insert(0, f"bos is {recipe.bos}, was {not recipe.bos}" if is_bos else "the tokenizer differs")
    if differences:
        raise DataError(
            f"the data was prepared with other settings: {'; '.join(differences)}\n"
            f"prepare it again from {', '.join(report.files)}, or use the recipe it was prepared with"
        )


def _shown(value: Any) -> str:
    return shortened(repr(value), VALUE_SHOWN)


def document_hash(recipe: Recipe, values: Mapping[str, Any]) -> int:
    """Hash a row's document: its `shorten` field, or all input fields, of a conversation up to its first answer."""
    if is_chat(recipe):
        # Rows may be beginnings of one conversation, or different answers to one question.
        values = {**values, MESSAGES: opening_of(values[MESSAGES])}
    inputs = fields_of(recipe.prompt or recipe.completion)
    names = (recipe.shorten,) if recipe.shorten in inputs else inputs
    return content_hash("\0".join(str(values[name]).strip() for name in names).encode())


def content_hash(content: bytes) -> int:
    """Hash content to a signed 64-bit integer."""
    # Arrow's column of groups is signed.
    return xxhash.xxh3_64_intdigest(content) - 2**63
