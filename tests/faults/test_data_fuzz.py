"""Fuzz data files of every format: rejected by name, or every row accounted for.

The examples are derived from the test's source, so that a failure repeats. Independent readers count the rows.
"""

from __future__ import annotations

import csv
import datetime
import gzip
import io
import json
import lzma
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from support.tiny_tokenizer import make_tokenizer

from gptj_ft.config.resolve import resolve
from gptj_ft.data.dataset import Report
from gptj_ft.data.prepare import TokenizeJob, tokenize_rows
from gptj_ft.data.readers.records import read_rows
from gptj_ft.data.readers.source import FileOptions, identify, identify_file, opened_file
from gptj_ft.data.readers.tables import SAMPLE_LINES, choose_dialect
from gptj_ft.errors import DataError, UsageError

TOKENIZER = make_tokenizer()
PATIENCE_SECONDS = 30
MESSAGE_CHARACTERS = 2000  # of an error, two lines of a terminal and long paths


@dataclass(frozen=True)
class Case:
    """Hold one file and the options that prepare it."""

    name: str
    content: bytes
    recipe: str
    options: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Case({self.name!r}, {self.content[:600]!r}, {self.recipe!r}, {self.options})"


# Contents of rows.

WORDS = st.sampled_from(
    ["a note", "It rains.", "café", "“so”", "x,y", 'say "it"', "two\nlines", "tab\there", "cr\rhere", " ", "", "0",
     "1", "nul\0here", "\ufeffmark", "\u2028", "\x85", "\x1c", "naïve e\u0301", "👩‍👩‍👧", "<|endoftext|>", "{document}",
     "{{x}}", "null", "NaN", "Passage:", "\n\nSummary:", "Ã©", "-lrb- x -rrb-", "a" * 300, "'", "\\", "\\u0041", "#"]
)  # fmt: skip
TEXTS = st.lists(WORDS, min_size=1, max_size=4).map(" ".join)
ANY_TEXT = st.one_of(TEXTS, st.text(max_size=20), st.text(st.characters(), max_size=8))  # with halves of pairs
ODD = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 10**20), st.floats(), ANY_TEXT, st.just("word " * 30_000)
)  # fmt: skip
VALUES = st.recursive(
    ODD, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=5
)
COLUMNS = st.sampled_from(["document", "summary", "Document", "summary ", "text", "article", "", "extra", "context"])
GOOD = st.fixed_dictionaries({"document": TEXTS, "summary": TEXTS})
ROWS = st.lists(
    st.one_of(GOOD, GOOD, st.dictionaries(COLUMNS, VALUES, max_size=4), st.tuples(GOOD, VALUES).map(
        lambda pair: {**pair[0], "summary": pair[1]}
    )),
    min_size=1,
    max_size=8,
)  # fmt: skip
ANSWERS = st.lists(st.fixed_dictionaries({"text": TEXTS, "answer_start": st.integers(-1, 99)}), max_size=2)
QUESTIONS = st.fixed_dictionaries(
    {"id": TEXTS, "question": TEXTS, "answers": ANSWERS}, optional={"is_impossible": st.booleans()}
)
PARAGRAPHS = st.fixed_dictionaries({"context": TEXTS, "qas": st.lists(QUESTIONS, max_size=3)})
ARTICLES = st.fixed_dictionaries({"paragraphs": st.lists(PARAGRAPHS, max_size=3)}, optional={"title": TEXTS})
CELLS: dict[str, tuple[Any, st.SearchStrategy[Any]]] = {
    "text": (pyarrow.string(), st.one_of(st.none(), st.text(max_size=20), TEXTS)),
    "large": (pyarrow.large_string(), TEXTS),
    "number": (pyarrow.int64(), st.one_of(st.none(), st.integers(-9, 9))),
    "fraction": (pyarrow.float64(), st.one_of(st.none(), st.floats())),
    "bytes": (pyarrow.binary(), st.binary(max_size=9)),
    "list": (pyarrow.list_(pyarrow.string()), st.lists(TEXTS, max_size=3)),
    "struct": (pyarrow.struct([("text", pyarrow.list_(pyarrow.string()))]), st.just({"text": ["a", "b"]})),
    "map": (pyarrow.map_(pyarrow.string(), pyarrow.int32()), st.just([("a", 1)])),
    "time": (pyarrow.timestamp("ns"), st.one_of(st.none(), st.integers(0, 10**18 + 1))),
    "date": (pyarrow.date32(), st.just(datetime.date(2020, 1, 2))),
    "decimal": (pyarrow.decimal128(9, 2), st.just(Decimal("1.50"))),
    "null": (pyarrow.null(), st.none()),
}


# Files of rows.


def in_lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def in_a_list(rows: list[dict[str, Any]]) -> bytes:
    return json.dumps(rows, indent=1).encode()


def in_commas(rows: list[dict[str, Any]]) -> bytes:
    out = io.StringIO()
    csv.writer(out).writerows(cells_of(rows))
    return out.getvalue().encode(errors="surrogatepass")


def in_tabs(rows: list[dict[str, Any]]) -> bytes:
    lines = ("\t".join(re.sub("[\t\r\n]", " ", str(cell)) for cell in cells) for cells in cells_of(rows))
    return "".join(line + "\n" for line in lines).encode(errors="surrogatepass")


def cells_of(rows: list[dict[str, Any]]) -> list[list[Any]]:
    header = list(dict.fromkeys(name for row in rows for name in row)) or ["document"]
    return [header, *([row.get(name, "") for name in header] for row in rows)]


@st.composite
def tables(draw: st.DrawFn) -> bytes:
    """Draw tables for Parquet, with one type a column."""
    kinds = draw(st.dictionaries(COLUMNS, st.sampled_from(sorted(CELLS)), max_size=2))
    kinds = {"document": "text", "summary": "text", **kinds}
    count = draw(st.integers(0, 6))
    columns = {
        name: pyarrow.array(draw(st.lists(CELLS[kind][1], min_size=count, max_size=count)), CELLS[kind][0])
        for name, kind in kinds.items()
    }
    out = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), out, row_group_size=draw(st.integers(1, 4)))
    return out.getvalue()


@st.composite
def nested(draw: st.DrawFn) -> bytes:
    """Draw SQuAD objects, sometimes with one part replaced."""
    whole: Any = {"version": "v2.0", "data": draw(st.lists(ARTICLES, min_size=1, max_size=3))}
    if draw(st.booleans()):
        at = draw(st.sampled_from(places(whole)))
        *path, last = at
        parent = whole
        for key in path:
            parent = parent[key]
        parent[last] = draw(VALUES)
    return json.dumps(whole, indent=draw(st.sampled_from([None, 1]))).encode()


def places(value: Any) -> list[tuple[Any, ...]]:
    """Return the paths to all parts of a JSON value."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [path for key in keys for path in [(key,), *((key, *rest) for rest in places(value[key]))]]


CONTENTS: dict[str, tuple[str, st.SearchStrategy[bytes]]] = {
    "jsonl": ("summarization", ROWS.map(in_lines)),
    "json": ("summarization", ROWS.map(in_a_list)),
    "squad.json": ("squad", nested()),
    "csv": ("summarization", ROWS.map(in_commas)),
    "tsv": ("summarization", ROWS.map(in_tabs)),
    "parquet": ("summarization", tables()),
    "txt": ("autocomplete", st.lists(TEXTS, min_size=1).map(lambda texts: "\n\n".join(texts).encode())),
}
PACKINGS: dict[str, Callable[[bytes], bytes]] = {
    "": lambda content: content,
    ".gz": lambda content: gzip.compress(content, 1, mtime=0),
    ".xz": lambda content: lzma.compress(content, preset=0),
    ".zst": lambda content: pyarrow.compress(content, "zstd", asbytes=True),
}


# Damage.

PIECES = st.one_of(
    st.binary(min_size=1, max_size=12),
    st.sampled_from(
        [b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b'"', b"'", b"}\n{", b"\r", b"\r\n", b"\n\n", b"\n", b"\t", b",", b"\x1a",
         b"[" * 2000, b'{"a":' * 2000, b"\xed\xa0\x80", b"\\u12", b"\\ud800", b"x" * 200_000, b"1e999", b"-", b"NaN",
         b"]", b"}", b'{"document": "a", "document": "b", "summary": "c"}\n', b'"data": [', b"\xe2\x80\xa8",
         b"9" * 5000, b"PAR1"]
    ),
)  # fmt: skip
LINES = st.sampled_from(
    [b"[1]", b'"text"', b"null", b"7", b"{", b"}", b"[" * 2000, b"a,b,c,d", b"a\tb\tc\td", b"a", b" ", b"\t", b"\x1c",
     b'{"document": "a", "document": "b", "summary": "c"}', b'{"document": {"text": "a"}, "summary": ["b", 7]}', b"{}",
     b"\0", b'"']
)  # fmt: skip
ENCODINGS = ("utf-16", "utf-16-le", "utf-32", "latin-1", "cp1252", "utf-8-sig", "utf-7")
LINE_ENDS = (b"\r\n", b"\r", b"\n\r", b"\n\n", b" \n", b"\xc2\x85", b"\xe2\x80\xa8", b"\0\n")


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """Apply one damage that a program, disk or cable could cause."""
    kind = draw(st.sampled_from(["flip", "cut", "insert", "double", "end", "encoding", "ends", "line", "line"]))
    at, length = draw(st.integers(0, max(len(content) - 1, 0))), draw(st.integers(1, 60))
    if kind == "flip" and content:
        return content[:at] + bytes([content[at] ^ 1 << draw(st.integers(0, 7))]) + content[at + 1 :]
    if kind == "cut":
        return content[:at] + content[at + length :]
    if kind == "insert":
        return content[:at] + draw(PIECES) + content[at:]
    if kind == "double":
        return content[: at + length] + content[at:]
    if kind == "line":
        before, newline, after = content[:at].rpartition(b"\n")
        return before + newline + draw(LINES) + b"\n" + after + content[at:]
    if kind == "encoding":
        return content.decode(errors="replace").encode(draw(st.sampled_from(ENCODINGS)), errors="replace")
    if kind == "ends":
        return content.replace(b"\n", draw(st.sampled_from(LINE_ENDS)))
    return content[:at]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw a file of any format, compressed or not, damaged up to three times before or after compression."""
    form = draw(st.sampled_from(sorted(CONTENTS)))
    recipe, contents = CONTENTS[form]
    content = draw(contents)
    for _ in range(draw(st.integers(0, 2))):
        content = draw(damaged(content))
    packing = draw(st.sampled_from(["", "", "", *PACKINGS]))
    content = PACKINGS[packing](content)
    if packing and draw(st.booleans()):
        content = draw(damaged(content))
    ending = packing if draw(st.integers(0, 9)) else draw(st.sampled_from(list(PACKINGS)))
    options: dict[str, Any] = {"max_bad_rows": draw(st.sampled_from([0, 3, 10**6, 10**6]))}
    if form == "txt":
        options["documents"] = draw(st.sampled_from(["paragraph", "line", "file"]))
    if form in ("csv", "tsv"):
        options["quotes"] = draw(st.sampled_from(["auto", "on", "off"]))
    return Case(f"rows.{form}{ending}", content, recipe, options)


# Checks.


@contextmanager
def patience(seconds: int = PATIENCE_SECONDS) -> Iterator[None]:
    """Fail if the block takes too long, which means an endless loop."""

    def give_up(*_: object) -> None:
        raise AssertionError(f"still at it after {seconds} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def check(case: Case, folder: Path) -> None:
    """Prepare a file: it must be rejected, or its rows must match an independent count."""
    path = folder / case.name
    path.write_bytes(case.content)
    report = prepared(path, case.recipe, case.options)
    if report is not None:
        expected = count_rows(path, case.options)
        assert expected is None or report.rows_read == expected, f"{report.rows_read} rows were read, not {expected}"


def prepared(path: Path, preset: str, options: dict[str, Any]) -> Report | None:
    """Return the report for a path, or None if it was rejected with a message that names it."""
    recipe = resolve({"recipe": preset, "cache": False, **options}, environment={}).recipe
    with patience():
        try:
            report = tokenize_rows(TokenizeJob.of(recipe, TOKENIZER, path, 50400)).report
        except (DataError, UsageError) as error:
            message = str(error)
            assert path.name in message, f"the message does not name the file: {message[:300]}"
            assert len(message) < MESSAGE_CHARACTERS, f"a message of {len(message)} characters: {message[:300]}"
            return None
    assert report.rows_read == report.rows_kept + sum(skips.count for skips in report.rows_skipped.values())
    return report


def count_rows(path: Path, options: dict[str, Any]) -> int | None:
    """Count the rows of a file; None where only the reader under test can tell."""
    file = identify_file(path, FileOptions(quotes=options.get("quotes", "auto")))
    with opened_file(file) as opened:
        content = opened.read()
    if file.encoding or (file.format != "parquet" and not is_utf8(content)):
        return None  # read in another encoding, which a reader that shares nothing does not know
    text = content.decode("utf-8-sig") if file.format != "parquet" else ""
    if file.format == "parquet":
        return parquet.read_table(io.BytesIO(content), columns=[]).num_rows
    if file.format == "jsonl":
        return sum(1 for line in text.split("\n") if line.strip())
    if file.format == "txt":
        documents = options["documents"]
        if documents == "line":
            return sum(1 for line in text.split("\n") if line.strip())
        blocks = [text] if documents == "file" else re.split(r"\n(?:[^\S\n]*\n)+", text)
        return sum(1 for block in blocks if block.strip())
    if file.format in ("csv", "tsv"):
        lines = list(io.StringIO(text, newline="\n"))
        delimiter, quotes = choose_dialect(file, lines[:SAMPLE_LINES])
        quoting = csv.QUOTE_MINIMAL if quotes else csv.QUOTE_NONE
        reader, count = csv.reader(lines, delimiter=delimiter, quoting=quoting, strict=quotes), -1  # without the header
        while True:
            try:
                count += bool(next(reader))
            except StopIteration:
                return count
            except csv.Error:  # a malformed record counts too
                count += 1
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(whole, dict) and isinstance(whole.get("data"), list):
        whole = whole["data"]
    if isinstance(whole, dict):
        return 1
    nested_rows = (
        sum(len(paragraph["qas"]) for paragraph in row["paragraphs"]) if "paragraphs" in row else 1
        for row in whole
        if isinstance(row, dict)
    )
    return sum(nested_rows) + sum(1 for row in whole if not isinstance(row, dict))


def is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


QUIET = {"derandomize": True, "database": None, "deadline": None, "suppress_health_check": list(HealthCheck)}


@pytest.mark.thorough
@settings(max_examples=150, **QUIET)
@given(case=cases())
def test_fuzzed_file_is_rejected_or_fully_counted(tmp_path: Path, case: Case) -> None:
    check(case, tmp_path)


@pytest.mark.slow
@settings(max_examples=2000, **QUIET)
@given(case=cases())
def test_thousands_of_fuzzed_files(tmp_path: Path, case: Case) -> None:
    check(case, tmp_path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder saved by `datasets`."""
    folder = tmp_path_factory.mktemp("fuzz") / "saved"
    rows = [{"document": f"Note {n} is long.", "summary": f"Short {n}", "tags": ["a", None]} for n in range(20)]
    datasets.disable_progress_bars()
    datasets.DatasetDict(train=datasets.Dataset.from_list(rows)).save_to_disk(str(folder))
    return folder


@settings(max_examples=60, **QUIET)
@given(data=st.data())
def test_damaged_datasets_folder_is_rejected(saved: Path, tmp_path: Path, data: st.DataObject) -> None:
    folder = tmp_path / "copy"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(saved, folder)
    path = data.draw(st.sampled_from(sorted(path for path in folder.rglob("*") if path.is_file())))
    # A new name each time: Arrow still maps the previous copy.
    path.write_bytes(data.draw(damaged(path.read_bytes())))
    report = prepared(folder, "summarization", {})
    assert report is None or report.rows_read == 20


def test_non_unicode_parquet_text_is_rejected(tmp_path: Path) -> None:
    names = pyarrow.array([b"a", b"caf\xe9"]).view(pyarrow.binary()).cast(pyarrow.string(), safe=False)
    parquet.write_table(pyarrow.table({"document": names, "summary": names}), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"rows\.parquet: damaged Parquet file: 'utf-8' codec can't decode"):
        list(read_rows(identify(tmp_path / "rows.parquet")))


def test_error_omits_text_in_header_position(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(f"{'secret ' * 900},{'words ' * 900}\na,b\n", encoding="utf-8")
    recipe = resolve({"recipe": "summarization"}, environment={}).recipe
    with pytest.raises(DataError, match=r"looks like a row, not like column names") as refused:
        tokenize_rows(TokenizeJob.of(recipe, TOKENIZER, tmp_path / "rows.csv", 50400))
    assert "secret" not in str(refused.value)
