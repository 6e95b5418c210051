"""Which files are read, how they are packed, and what is said when a file is not what its name says."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import random
import tarfile
import zipfile
from pathlib import Path

import pytest

from gptj_ft.data.readers.compression import peeked
from gptj_ft.data.readers.records import FileOptions, Findings, read_rows, sha256_of
from gptj_ft.errors import DataError, UsageError

ROWS = [{"text": f"row {number}", "n": number} for number in range(2500)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def values(source: Path, findings: Findings | None = None, **options: str) -> list[dict[str, object]]:
    return [row.values for row in read_rows(source, findings, FileOptions(**options))]


def packed_by_zstandard(content: bytes) -> bytes:
    import pyarrow

    return pyarrow.compress(content, codec="zstd", asbytes=True)


def zip_of(name: str, content: bytes = b"x") -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr(name, content)
    return out.getvalue()


PACKERS = {".gz": gzip.compress, ".xz": lzma.compress, ".zst": packed_by_zstandard}


@pytest.mark.parametrize("suffix", PACKERS)
def test_packed_files_are_read_and_keep_their_line_numbers(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"rows.jsonl{suffix}"
    path.write_bytes(PACKERS[suffix](LINES))
    rows = list(read_rows(path))
    assert [row.values for row in rows] == ROWS
    assert rows[-1].where == f"{path}:2500"


@pytest.mark.parametrize("suffix", PACKERS)
def test_a_packed_file_that_is_cut_short_or_damaged_is_named(suffix: str, tmp_path: Path) -> None:
    whole = PACKERS[suffix](LINES)
    path = tmp_path / f"rows.jsonl{suffix}"
    for content in (whole[: len(whole) // 2], whole[:40] + bytes(20) + whole[60:]):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"rows\.jsonl\.\w+"):
            values(path)


def test_a_packed_file_under_a_plain_name_is_read_and_that_is_said(tmp_path: Path) -> None:
    path, findings = tmp_path / "rows.jsonl", Findings()
    path.write_bytes(gzip.compress(LINES))
    assert values(path, findings) == ROWS
    assert list(findings.notes) == [f"{path} is packed by gzip, which its name does not say"]
    plain = tmp_path / "plain.jsonl.gz"
    plain.write_bytes(LINES)
    assert values(plain, findings) == ROWS
    assert f"{plain} is not packed by gzip as its name says" in findings.notes


@pytest.mark.parametrize(
    ("name", "content", "read_as"),
    [
        ("a.jsonl", b'[\n{"a": "1"},\n{"a": "2"}\n]', "json"),
        ("a.jsonl", b'[{"a": "1"}, {"a": "2"}]', "json"),
    ],
)
def test_a_wrong_suffix_is_recognised_and_said(name: str, content: bytes, read_as: str, tmp_path: Path) -> None:
    path, findings = tmp_path / name, Findings()
    path.write_bytes(content)
    assert [row["a"] for row in values(path, findings)] == ["1", "2"]
    (note,) = findings.notes
    assert note == f"{path} is read as {read_as}, which it is, not as the {path.suffix[1:]} of its name"


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
        (zip_of("word/document.xml"), "Word document: save it as plain text"),
        (zip_of("xl/workbook.bin"), "binary Excel workbook: save it as .xlsx"),
        (zip_of("mimetype", b"application/vnd.oasis.opendocument.spreadsheet"), "OpenDocument spreadsheet"),
        (zip_of("notes.txt"), "zip archive: unpack it"),
    ],
)
def test_files_of_other_kinds_are_refused_with_what_to_do(content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"a.csv is an? {says}"):
        values(path)


def test_a_document_of_an_office_is_told_by_its_name_where_its_content_does_not(tmp_path: Path) -> None:
    old = b"\xd0\xcf\x11\xe0old"
    for name, content, says in [
        ("a.doc", old, "an old Word document"),
        ("a.xlsx", old, "a workbook with a password"),
        ("a.docx", b"x", "by its name a Word document"),
        ("a.xls", b"<html>", "by its name an old"),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=f"{name} is {says}.*: save it as"):
            values(tmp_path / name)


def test_a_mark_and_the_line_endings_of_windows_are_said(tmp_path: Path) -> None:
    path, findings = tmp_path / "a.jsonl", Findings()
    path.write_bytes(b'\xef\xbb\xbf{"a": "1"}\r\n{"a": "2"}\r\n')
    assert [row["a"] for row in values(path, findings)] == ["1", "2"]
    assert [note.removeprefix(f"{path} ").split(",")[0] for note in findings.notes] == [
        "has the line endings of Windows",
        "begins with a byte-order mark",
    ]


# Several files


def test_a_folder_and_a_pattern_are_all_their_files_in_order(tmp_path: Path) -> None:
    for name, text in [("b.jsonl", "2"), ("a.txt", "1"), ("sub/c.csv", "text\n3"), (".hidden.txt", "x"), ("x.md", "x")]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"text": text}) if name.endswith("jsonl") else text)
    assert [row["text"] for row in values(tmp_path)] == ["1", "2", "3"]
    assert [row["text"] for row in values(tmp_path / "*.txt")] == ["1"]
    assert [row["text"] for row in values(tmp_path / "**" / "*.[ct]*")] == ["1", "3"]
    with pytest.raises(UsageError, match="no file matches"):
        values(tmp_path / "*.parquet")


def test_a_folder_without_rows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "readme.md").write_text("x")
    with pytest.raises(UsageError, match="nor are there files of rows in it"):
        values(tmp_path)


def test_the_digest_of_a_folder_changes_with_each_of_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "a.txt").write_text("a")
    digests = {sha256_of(folder)}
    (folder / "b.txt").write_text("b")
    digests.add(sha256_of(folder))
    (folder / "b.txt").write_text("c")
    digests.add(sha256_of(folder))
    (folder / "b.txt").rename(folder / "c.txt")
    digests.add(sha256_of(folder))
    assert len(digests) == 4


# Tables


def test_parquet_is_read_in_batches_with_the_number_of_each_row(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    rows = list(read_rows(path))
    assert [row.values for row in rows] == ROWS
    assert rows[1500].where == f"{path}:1501"
    (tmp_path / "named.csv").write_bytes(path.read_bytes())
    assert values(tmp_path / "named.csv") == ROWS
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"rows\.parquet: not a whole Parquet file"):
        values(path)


def test_a_saved_dataset_is_read_and_of_several_splits_train(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    train, other = Dataset.from_list(ROWS), Dataset.from_list(ROWS[:3])
    train.save_to_disk(str(tmp_path / "one"))
    assert values(tmp_path / "one") == ROWS
    findings = Findings()
    DatasetDict({"test": other, "train": train}).save_to_disk(str(tmp_path / "many"))
    assert values(tmp_path / "many", findings) == ROWS
    assert list(findings.notes) == [f"{tmp_path / 'many'}: the split train is read; there are also test"]
    assert values(tmp_path / "many" / "test") == ROWS[:3]
    DatasetDict({"test": other}).save_to_disk(str(tmp_path / "none"))
    with pytest.raises(DataError, match=r"no split called train; name one of .*none/test"):
        values(tmp_path / "none")


@pytest.mark.parametrize(("name", "quotes", "first"), [
    ("a.csv", "auto", "x,y"), ("a.csv", "off", '"x'), ("a.tsv", "auto", '"x'), ("a.tsv", "on", "x\ty"),
])  # fmt: skip
def test_quotes_enclose_cells_where_that_is_asked_for(name: str, quotes: str, first: str, tmp_path: Path) -> None:
    separator = "," if name.endswith("csv") else "\t"
    path = tmp_path / name
    header = "a" if first.startswith("x") else f"a{separator}b"
    path.write_text(f'{header}\n"x{separator}y"\n')
    assert values(path, quotes=quotes)[0]["a"] == first


# Archives


def tar_of(members: dict[str, bytes | str], form: int = tarfile.GNU_FORMAT) -> bytes:
    """An archive; a text as content stands for a link to it, a name that ends in / for a folder."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            if name.endswith("/"):
                member.type = tarfile.DIRTYPE
            elif isinstance(content, str):
                member.type, member.linkname = tarfile.SYMTYPE, content
            else:
                member.size = len(content)
            archive.addfile(member, io.BytesIO(content) if isinstance(content, bytes) else None)
    return out.getvalue()


MEMBERS: dict[str, bytes | str] = {
    "b/": "",
    "b/first.jsonl": LINES,
    "./a.txt": b"one\n\ntwo\n",
    "/abs/../c.csv": b"text\nthree\n",
    "packed.jsonl.zst": packed_by_zstandard(b'{"text": "four"}\n'),
    "lines.json": b'{"text": "five"}\n\n{"text": "six"}\n',
    "é" * 90 + "/" + "x" * 120 + ".jsonl": b'{"text": "seven"}',
}
PLACES = ["b/first.jsonl:2500", "a.txt:1", "a.txt:3", "abs/../c.csv:2", "packed.jsonl.zst:1", "lines.json:1",
          "lines.json:3", "é" * 90 + "/" + "x" * 120 + ".jsonl:1"]  # fmt: skip
AROUND = {".tar": bytes, ".tar.gz": gzip.compress, ".tgz": gzip.compress, ".tar.xz": lzma.compress,
          ".tar.zst": packed_by_zstandard}  # fmt: skip


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("suffix", AROUND)
def test_the_members_of_an_archive_are_read_in_their_order(suffix: str, form: int, tmp_path: Path) -> None:
    path, findings = tmp_path / f"rows{suffix}", Findings()
    members = MEMBERS
    if form == tarfile.USTAR_FORMAT:  # has no room for long names
        members = {name: content for name, content in MEMBERS.items() if len(name) < 100}
    path.write_bytes(AROUND[suffix](tar_of(members, form)))
    rows = list(read_rows(path, findings))
    assert [row.values for row in rows[:2500]] == ROWS
    assert [row.values["text"] for row in rows[2500:]] == ["one", "two", "three", "four", "five", "six", "seven"][
        : len(rows) - 2500
    ]
    assert [row.where for row in rows[2499:]] == [f"{path}/{place}" for place in PLACES[: len(rows) - 2499]]
    assert len(rows) == 2507 - (form == tarfile.USTAR_FORMAT)
    assert not findings.notes


def test_bytes_looked_at_are_still_there_to_be_read() -> None:
    content = random.Random(0).randbytes(10_000)
    for count in (1, 4095, 5000):
        head, stream = peeked(io.BytesIO(content))
        assert head == content[:4096]
        assert b"".join(iter(lambda: stream.raw.read(count), b"")) == content  # noqa: B023
        head, stream = peeked(io.BytesIO(content))
        assert b"".join(iter(lambda: stream.read(count), b"")) == content  # noqa: B023


def test_what_is_left_out_of_an_archive_is_noted(tmp_path: Path) -> None:
    path, findings = tmp_path / "rows.tar.gz", Findings()
    members: dict[str, bytes | str] = {
        "a.jsonl": b'{"text": "one"}', "link.jsonl": "a.jsonl", "empty.txt": b"", "picture.png": b"\x89PNG",
        "._a.jsonl": b"\x00\x05\x16\x07", ".git/a.txt": b"hidden", "a.pdf": b"%PDF-1.7",
        "a.h5": b"\x89HDF\r\n\x1a\n", "a.parquet": b"PAR1", "names.index": b"a.tfrecords",
    }  # fmt: skip
    path.write_bytes(gzip.compress(tar_of(members)))
    assert values(path, findings) == [{"text": "one"}]
    (note,) = findings.notes
    assert note.startswith(f"{path}: left out, as they are empty, links, or of no kind that is read from an archive: ")
    assert note.endswith(": link.jsonl, empty.txt, picture.png and 4 more")
    path.write_bytes(gzip.compress(tar_of({"picture.png": b"\x89PNG"})))
    with pytest.raises(DataError, match=r"rows\.tar\.gz: there are no rows in it"):
        values(path)


def test_an_archive_in_an_archive_is_read_but_none_in_that(tmp_path: Path) -> None:
    path, findings = tmp_path / "web.tar", Findings()
    innermost = tar_of({"c.txt": b"three"})
    inner = lzma.compress(tar_of({"b.txt": b"two", "innermost.tar": innermost}))
    path.write_bytes(tar_of({"a.txt": b"one", "part-1.tar.xz": inner, "d.txt": b"four"}))
    assert [row["text"] for row in values(path, findings)] == ["one", "two", "four"]
    (note,) = findings.notes
    assert note.startswith(f"{path}/part-1.tar.xz: left out, ")
    assert note.endswith(": innermost.tar")


def test_archives_joined_end_to_end_are_all_read(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(tar_of({"a.txt": b"one"}) + tar_of({"b.txt": b"two"}))
    assert [row["text"] for row in values(path)] == ["one", "two"]


def test_a_bad_record_in_an_archive_is_named_by_member_and_line(tmp_path: Path) -> None:
    path, findings = tmp_path / "a.tar", Findings(most_bad=1)
    path.write_bytes(tar_of({"b/a.jsonl": b'{"text": "one"}\noops\n', "c.txt": b"two"}))
    assert [row["text"] for row in values(path, findings)] == ["one", "two"]
    assert [where for where, _ in findings.bad] == [f"{path}/b/a.jsonl:2"]
    path.write_bytes(tar_of({"a.txt": b"one", "bad.txt": b"caf\xe9"}))
    with pytest.raises(DataError, match=r"a\.tar/bad\.txt:1: not UTF-8"):
        values(path)


@pytest.mark.parametrize("suffix", AROUND)
def test_an_archive_that_is_cut_short_is_refused_wherever_that_is(suffix: str, tmp_path: Path) -> None:
    members: dict[str, bytes | str] = {f"{n}.txt": random.Random(n).randbytes(300).hex().encode() for n in range(3)}
    whole = AROUND[suffix](tar_of(members))
    path = tmp_path / f"a{suffix}"
    # An archive that is not packed ends with blocks of zeros, of which one is enough.
    needed = 3 * (512 + 1024) + 512 if suffix == ".tar" else len(whole)
    for cut in sorted({*range(1, needed, 101), *range(512, needed, 512), needed - 1}):
        path.write_bytes(whole[:cut])
        with pytest.raises(DataError, match=rf"a\{suffix}"):
            values(path)
    path.write_bytes(whole)
    assert len(values(path)) == 3


def test_a_damaged_header_is_not_taken_for_the_end(tmp_path: Path) -> None:
    whole = tar_of({f"{n}.txt": b"text" for n in range(4)})
    path = tmp_path / "a.tar"
    for at in (0, 1024, 2048 + 124, 3072 + 257):
        path.write_bytes(whole[:at] + b"\xff" + whole[at + 1 :])
        with pytest.raises(DataError, match=r"a\.tar: damaged or cut short"):
            values(path)


def test_a_damaged_archive_is_refused_or_read_but_never_breaks(tmp_path: Path) -> None:
    wholes = [tar_of({name: content[:1500] for name, content in MEMBERS.items()}, form) for form in (1, 2)]
    draw, refused, path = random.Random(0), 0, tmp_path / "a.tar"
    for _ in range(300):
        data = bytearray(draw.choice(wholes))
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(data))
            data[at : at + draw.choice([1, 1, 8])] = draw.randbytes(draw.choice([0, 1, 1, 8]))
        path.write_bytes(data[: draw.choice([len(data), draw.randrange(len(data))])])
        try:
            values(path, Findings(most_bad=99))
        except DataError:
            refused += 1
    assert 0 < refused < 300


# Plain text


def test_a_document_is_a_paragraph_a_line_or_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\r\ntwo\r\n\r\nthree\r\n")
    assert [row["text"] for row in values(path)] == ["one\ntwo", "three"]
    assert [row["text"] for row in values(path, documents="line")] == ["one", "two", "three"]
    assert [row["text"] for row in values(path, documents="file")] == ["one\ntwo\n\nthree"]


# Records that cannot be read


def test_some_unreadable_records_are_allowed_if_that_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\noops\n{"a": 2}\n[3]\n')
    findings = Findings(most_bad=2)
    assert [row["a"] for row in values(path, findings)] == [1, 2]
    assert [where for where, _ in findings.bad] == [f"{path}:2", f"{path}:4"]
    with pytest.raises(DataError, match=r"a\.jsonl:2: not JSON: .*; 1 more bad line"):
        values(path, Findings(most_bad=1))


# Memory


@pytest.mark.parametrize("form", ["[{}]", '{{"data": [{}]}}'], ids=["list", "data"])
def test_a_long_json_list_is_never_held_as_a_whole(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gptj_ft.data.readers import json, rows

    monkeypatch.setattr(rows, "CHUNK_BYTES", 1000)
    longest = 0
    more = json.JsonText._more

    def watched(self: json.JsonText) -> bool:
        nonlocal longest
        result = more(self)
        longest = max(longest, len(self._buffer))
        return result

    monkeypatch.setattr(json.JsonText, "_more", watched)
    path = tmp_path / "a.json"
    path.write_text(form.format(",".join(json.dumps({"text": "é" * (number % 900)}) for number in range(800))))
    assert [len(str(row["text"])) for row in values(path)] == [number % 900 for number in range(800)]
    assert path.stat().st_size > 1_000_000
    assert longest < 20_000


@pytest.mark.parametrize("chunk", [1, 2, 3, 7])
def test_where_a_text_is_cut_into_pieces_makes_no_difference(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gptj_ft.data.readers import rows

    content = '{"v": 1, "data": [\n {"a": 123.5e2, "é": "\\u00e9x"},\n  {"a": -17, "b": [true, null]}, {"a": "ü"}\n]}'
    expected = json.loads(content)["data"]
    path = tmp_path / "a.json"
    path.write_text(content)
    monkeypatch.setattr(rows, "CHUNK_BYTES", chunk)
    found = list(read_rows(path))
    assert [row.values for row in found] == expected
    path.write_bytes(content.encode()[:60] + b"\xff" + content.encode()[60:])
    with pytest.raises(DataError, match=r"a\.json:3: not UTF-8: byte 0xff"):
        values(path)
