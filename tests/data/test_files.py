"""Test detection of files, formats and compression, and notes on misleading names."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import struct
import tarfile
import zipfile
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from gptj_ft.data.columns import cell_text
from gptj_ft.data.readers.records import read_rows
from gptj_ft.data.readers.rows import Findings
from gptj_ft.data.readers.source import MOST_LIST_BYTES, FileOptions, ReadLimits, identify, names_in_zip
from gptj_ft.errors import DataError, UsageError

ROWS = [{"text": f"row {number}", "n": number} for number in range(2500)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def values(source: Path, findings: Findings | None = None, **options: Any) -> list[dict[str, object]]:
    return [row.values for row in read_rows(identify(source, FileOptions(**options)), findings)]


def packed_by_zstandard(content: bytes) -> bytes:
    import pyarrow

    return pyarrow.compress(content, codec="zstd", asbytes=True)


def zip_of(name: str, content: bytes = b"x") -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr(name, content)
    return out.getvalue()


def as_zip64(content: bytes, size: int | None = None) -> bytes:
    """Add the ZIP64 records that some programs write in small archives, too; ``size``: of the directory."""
    end = struct.unpack("<4s4H2LH", content[-22:])
    record = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, end[3], end[4], size or end[5], end[6])
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, len(content) - 22, 1)
    fields = struct.pack("<4s4H2LH", end[0], 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    return content[:-22] + record + locator + fields


PACKERS = {".gz": gzip.compress, ".xz": lzma.compress, ".zst": packed_by_zstandard}


@pytest.mark.parametrize("suffix", PACKERS)
def test_compressed_files_keep_line_numbers(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"rows.jsonl{suffix}"
    path.write_bytes(PACKERS[suffix](LINES))
    rows = list(read_rows(identify(path)))
    assert [row.values for row in rows] == ROWS
    assert rows[-1].where == f"{path}:2500"


@pytest.mark.parametrize("suffix", PACKERS)
def test_damaged_compressed_file_is_named(suffix: str, tmp_path: Path) -> None:
    whole = PACKERS[suffix](LINES)
    path = tmp_path / f"rows.jsonl{suffix}"
    for content in (whole[: len(whole) // 2], whole[:40] + bytes(20) + whole[60:]):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"rows\.jsonl\.\w+"):
            values(path)


def test_compressed_file_with_plain_name_is_noted(tmp_path: Path) -> None:
    path, findings = tmp_path / "rows.jsonl", Findings()
    path.write_bytes(gzip.compress(LINES))
    assert values(path, findings) == ROWS
    assert list(findings.notes) == [f"{path} is compressed with gzip, although its name does not say so"]
    plain = tmp_path / "plain.jsonl.gz"
    plain.write_bytes(LINES)
    assert values(plain, findings) == ROWS
    assert f"{plain} is not compressed with gzip, although its name says so" in findings.notes


@pytest.mark.parametrize(
    ("name", "content", "read_as"),
    [
        ("a.jsonl", b'[\n{"a": "1"},\n{"a": "2"}\n]', "json"),
        ("a.jsonl", b'[{"a": "1"}, {"a": "2"}]', "json"),
    ],
)
def test_misleading_suffix_is_noted(name: str, content: bytes, read_as: str, tmp_path: Path) -> None:
    path, findings = tmp_path / name, Findings()
    path.write_bytes(content)
    assert [row["a"] for row in values(path, findings)] == ["1", "2"]
    (note,) = findings.notes
    assert note == f"{path} contains {read_as} and is read as such, although its name says {path.suffix[1:]}"


@pytest.mark.parametrize("suffix", ["", ".data"])
def test_json_is_recognised_without_a_suffix(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(LINES)
    assert values(path) == ROWS


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"PK\x03\x04rest", "zip archive: unpack it"),
        (b"%PDF-1.7", "PDF: convert it"),
        (b"\xd0\xcf\x11\xe0old", "old Excel workbook: save it as .xlsx"),
        (b"{\\rtf1", "document in rich text: save it as plain text"),
        (zip_of("ppt/presentation.xml"), "presentation: save its outline as plain text"),
        (zip_of("xl/workbook.bin"), "binary Excel workbook: save it as .xlsx"),
        (zip_of("mimetype", b"application/vnd.oasis.opendocument.spreadsheet"), "OpenDocument spreadsheet"),
        (zip_of("notes.txt"), "zip archive: unpack it"),
        (tarfile.TarInfo("rows.jsonl").tobuf(), "tar archive: unpack it"),
    ],
)
def test_foreign_files_are_rejected_with_advice(content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"a.csv is an? {says}"):
        values(path)


def test_office_document_is_recognized_by_name(tmp_path: Path) -> None:
    old = b"\xd0\xcf\x11\xe0old"
    for name, content, says in [
        ("a.doc", old, "is an old Word document"),
        ("a.xlsx", old, "is a workbook with a password"),
        ("a.docx", old, "is a document with a password"),
        ("a.odt", b"x", "is an OpenDocument text"),
        ("a.xls", b"<html>", "is an old"),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=f"{name}.* {says}.*: save it as"):
            values(tmp_path / name)


def test_small_zip64_archive_is_read(tmp_path: Path) -> None:
    content = zip_of("xl/workbook.xml")
    for raw in (content, as_zip64(content), as_zip64(content)[:-2] + b"\3\0PK!"):
        assert names_in_zip(io.BytesIO(raw)) == {"xl/workbook.xml"}
    for raw in (as_zip64(content, MOST_LIST_BYTES + 1), as_zip64(content).replace(b"PK\6\6", b"PK\6\0")):
        assert not names_in_zip(io.BytesIO(raw))


def test_byte_order_mark_and_crlf_are_noted(tmp_path: Path) -> None:
    path, findings = tmp_path / "a.jsonl", Findings()
    path.write_bytes(b'\xef\xbb\xbf{"a": "1"}\r\n{"a": "2"}\r\n')
    assert [row["a"] for row in values(path, findings)] == ["1", "2"]
    assert [note.removeprefix(f"{path} ").split(",")[0] for note in findings.notes] == [
        "has Windows line endings",
        "begins with a byte-order mark",
    ]


# Several files


def test_folder_and_pattern_give_sorted_files(tmp_path: Path) -> None:
    for name, text in [("b.jsonl", "2"), ("a.txt", "1"), ("sub/c.csv", "text\n3"), (".hidden.txt", "x"), ("x.md", "x")]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"text": text}) if name.endswith("jsonl") else text)
    assert [row["text"] for row in values(tmp_path)] == ["1", "2", "3"]
    assert [row["text"] for row in values(tmp_path / "*.txt")] == ["1"]
    assert [row["text"] for row in values(tmp_path / "**" / "*.[ct]*")] == ["1", "3"]
    with pytest.raises(UsageError, match="no file matches"):
        values(tmp_path / "*.parquet")


def test_unread_files_of_a_folder_are_noted(tmp_path: Path) -> None:
    for name in ("a.txt", "README.md", "LICENSE", ".cache/x.html", "x.index"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    values(tmp_path, findings := Findings())
    assert not findings.notes
    for name in ("b.md", "c.pdf", "sub/d.pdf", "e"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    values(tmp_path, findings)
    assert list(findings.notes) == [
        f"{tmp_path}: 4 files are not read: 2 .pdf (convert it to plain text first, e.g. with `pdftotext`), "
        "1 .md, 1 without suffix"
    ]


def test_a_folder_without_rows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "readme.md").write_text("x")
    with pytest.raises(UsageError, match="has no files of rows"):
        values(tmp_path)


def test_folder_digest_covers_every_file(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "a.txt").write_text("a")
    digests = {identify(folder).sha256}
    (folder / "b.txt").write_text("b")
    digests.add(identify(folder).sha256)
    (folder / "b.txt").write_text("c")
    digests.add(identify(folder).sha256)
    (folder / "b.txt").rename(folder / "c.txt")
    digests.add(identify(folder).sha256)
    assert len(digests) == 4


# Tables


def test_parquet_rows_are_numbered(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    rows = list(read_rows(identify(path)))
    assert [row.values for row in rows] == ROWS
    assert rows[1500].where == f"{path}:1501"
    (tmp_path / "named.csv").write_bytes(path.read_bytes())
    assert values(tmp_path / "named.csv") == ROWS
    parquet.write_table(pyarrow.Table.from_pylist([{"text": Decimal("-0.0000001")}]), path)
    (number,) = values(path)
    assert cell_text(number["text"]) == "-0.0000001"
    parquet.write_table(pyarrow.table([["a"], ["b"]], names=["text", "text"]), path)
    with pytest.raises(DataError, match=r"rows\.parquet: there are two columns 'text': rename or remove one"):
        values(path)
    twice = [pyarrow.field("a", pyarrow.string())] * 2
    pairs = pyarrow.StructArray.from_arrays([pyarrow.array(["x"]), pyarrow.array(["y"])], fields=twice)
    parquet.write_table(pyarrow.table({"text": pairs}), path)
    with pytest.raises(DataError, match=r"rows\.parquet: a value has no form in Python: .* duplicate field names"):
        values(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"rows\.parquet: damaged Parquet file"):
        values(path)


def test_saved_dataset_gives_its_train_split(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    train, other = Dataset.from_list(ROWS), Dataset.from_list(ROWS[:3])
    train.save_to_disk(str(tmp_path / "one"))
    assert values(tmp_path / "one") == ROWS
    findings = Findings()
    DatasetDict({"test": other, "train": train}).save_to_disk(str(tmp_path / "many"))
    assert values(tmp_path / "many", findings) == ROWS
    assert list(findings.notes) == [f"{tmp_path / 'many'}: reading the split train; there are also test"]
    assert values(tmp_path / "many" / "test") == ROWS[:3]
    DatasetDict({"test": other}).save_to_disk(str(tmp_path / "none"))
    with pytest.raises(DataError, match=r"no split 'train'; name one of .*none/test"):
        values(tmp_path / "none")


@pytest.mark.parametrize(("name", "quotes", "first"), [
    ("a.csv", "auto", "x,y"), ("a.csv", "off", '"x'), ("a.tsv", "auto", '"x'), ("a.tsv", "on", "x\ty"),
])  # fmt: skip
def test_quotes_enclose_cells_if_requested(name: str, quotes: str, first: str, tmp_path: Path) -> None:
    separator = "," if name.endswith("csv") else "\t"
    path = tmp_path / name
    header = "a" if first.startswith("x") else f"a{separator}b"
    path.write_text(f'{header}\n"x{separator}y"\n')
    assert values(path, quotes=quotes)[0]["a"] == first


# Plain text


def test_document_is_paragraph_line_or_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\r\ntwo\r\n\r\nthree\r\n")
    assert [row["text"] for row in values(path)] == ["one\ntwo", "three"]
    assert [row["text"] for row in values(path, documents="line")] == ["one", "two", "three"]
    assert [row["text"] for row in values(path, documents="file")] == ["one\ntwo\n\nthree"]


# Records that cannot be read


def test_some_unreadable_records_can_be_allowed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\noops\n{"a": 2}\n[3]\n')
    findings = Findings(most_bad=2)
    assert [row["a"] for row in values(path, findings)] == [1, 2]
    assert [where for where, _ in findings.bad] == [f"{path}:2", f"{path}:4"]
    with pytest.raises(DataError, match=r"a\.jsonl:2: not JSON: .*; 1 more bad line"):
        values(path, Findings(most_bad=1))


def test_malformed_records_of_tables_can_be_allowed(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('text,n\n"good",1\n"bad" quote,0\nfine,1\n"two\nlines"x,2\n\n"last",3\n"bad"x,4\n')
    findings = Findings(most_bad=3)
    rows = list(read_rows(identify(path), findings))
    assert [(row.line, row.values["text"]) for row in rows] == [(2, "good"), (4, "fine"), (8, "last")]
    assert [where for where, _ in findings.bad] == [f"{path}:{line}" for line in (3, 5, 9)]
    assert findings.bad[1][1].endswith("; its quotes enclose everything up to line 6")
    with pytest.raises(DataError, match=r"a\.csv:3: malformed table: ',' expected after '\"'; 2 more bad lines"):
        values(path, Findings(most_bad=2))
    for text, line in (('"text"x,n\na,1\n', 1), ('text,n\na,1\n"open,2\nb,3\n', 3)):
        path.write_text(text)
        with pytest.raises(DataError, match=rf"a\.csv:{line}: malformed table"):
            values(path, Findings(most_bad=9))


# Memory


@pytest.mark.parametrize("form", ["[{}]", '{{"data": [{}]}}'], ids=["list", "data"])
def test_long_json_list_is_streamed(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gptj_ft.data.readers.json import JsonText

    longest = 0
    more = JsonText._more

    def watched(self: JsonText) -> bool:
        nonlocal longest
        result = more(self)
        longest = max(longest, len(self._buffer))
        return result

    monkeypatch.setattr(JsonText, "_more", watched)
    path = tmp_path / "a.json"
    path.write_text(form.format(",".join(json.dumps({"text": "é" * (number % 900)}) for number in range(800))))
    rows = values(path, limits=ReadLimits(text_chunk=1000))
    assert [len(str(row["text"])) for row in rows] == [number % 900 for number in range(800)]
    assert path.stat().st_size > 1_000_000
    assert longest < 20_000


@pytest.mark.parametrize("chunk", [1, 2, 3, 7])
def test_chunk_boundaries_do_not_change_rows(chunk: int, tmp_path: Path) -> None:
    limits = ReadLimits(text_chunk=chunk)
    content = '{"v": 1, "data": [\n {"a": 123.5e2, "é": "\\u00e9x"},\n  {"a": -17, "b": [true, null]}, {"a": "ü"}\n]}'
    expected = json.loads(content)["data"]
    path = tmp_path / "a.json"
    path.write_text(content)
    assert values(path, limits=limits) == expected
    path.write_bytes(content.encode()[:60] + b"\xff" + content.encode()[60:])
    with pytest.raises(DataError, match=r"a\.json:3: not UTF-8: byte 0xff"):
        values(path, limits=limits)
