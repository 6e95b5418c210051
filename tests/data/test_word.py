"""Read Word documents, also hostile ones."""

from __future__ import annotations

import gzip
import random
import sys
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import docx
import pytest

from gptj_ft.data.readers.records import read_rows
from gptj_ft.data.readers.rows import Findings
from gptj_ft.data.readers.source import FileOptions, ReadLimits, identify
from gptj_ft.errors import DataError, UsageError

BODY = "word/document.xml"


def document(path: Path) -> Path:
    made = docx.Document()
    made.add_heading("Visit of 3 May")
    made.add_paragraph("The cough began").add_run(" in\tApril.")
    table = made.add_table(rows=2, cols=3)
    for number, cell in enumerate(cell for row in table.rows for cell in row.cells):
        cell.text = f"cell {number}"
    table.cell(0, 0).merge(table.cell(0, 1))
    table.cell(1, 2).add_paragraph("and more").add_run("\ntext")
    made.add_paragraph("Review in 2 weeks.")
    made.sections[0].header.paragraphs[0].text = "Clinic"
    made.save(str(path))
    return path


TEXT = (
    "Visit of 3 May\nThe cough began in\tApril.\n"
    "cell 0 cell 1\tcell 2\ncell 3\tcell 4\tcell 5 and more text\nReview in 2 weeks."
)


def edited(path: Path, change: Callable[[bytes], bytes], part: str = BODY) -> Path:
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name, change(content) if name == part else content)
    return path


def read(path: Path, limits: ReadLimits = ReadLimits()) -> list[dict[str, object]]:
    return [dict(row.values) for row in read_rows(identify(path, replace(FileOptions(), limits=limits)))]


def test_word_file_is_one_row_in_order(tmp_path: Path) -> None:
    document(tmp_path / "b.docx")
    document(tmp_path / "a.docx")
    assert read(tmp_path) == [{"text": TEXT}] * 2
    (tmp_path / "b.docx").rename(tmp_path / "b.txt")
    assert read(tmp_path) == [{"text": TEXT}] * 2, "recognised by its content"


def test_tracked_changes_read_as_accepted(tmp_path: Path) -> None:
    inserted = b"<w:p><w:ins><w:r><w:t>Asthma</w:t></w:r></w:ins><w:del><w:r><w:delText>Flu</w:delText></w:r></w:del>"
    moved = b"<w:moveFrom><w:r><w:t>gone</w:t></w:r></w:moveFrom></w:p>"
    control = b"<w:sdt><w:sdtContent><w:p><w:r><w:t>chosen</w:t></w:r></w:p></w:sdtContent></w:sdt>"
    path = edited(
        document(tmp_path / "a.docx"), lambda xml: xml.replace(b"<w:tbl>", inserted + moved + control + b"<w:tbl>")
    )
    assert read(path) == [{"text": TEXT.replace("cell 0", "Asthma\nchosen\ncell 0")}]


def test_equations_and_symbols_are_text(tmp_path: Path) -> None:
    def math(text: str) -> str:
        return f"<m:r><m:t>{text}</m:t></m:r>"

    fraction = f"<m:f><m:num>{math('a+b')}</m:num><m:den>{math('2')}</m:den></m:f>"
    power = f"<m:sSubSup><m:e>{math('x')}</m:e><m:sub>{math('i')}</m:sub><m:sup>{math('10')}</m:sup></m:sSubSup>"
    root = f"<m:rad><m:deg/><m:e>{math('y')}</m:e></m:rad>"
    bracket = f"<m:d><m:dPr><m:ctrlPr/></m:dPr><m:e>{math('z')}</m:e></m:d>"
    bracket += f'<m:d><m:dPr><m:begChr m:val="|"/><m:endChr m:val="|"/></m:dPr><m:e>{math("w")}</m:e></m:d>'
    sums = f'<m:nary><m:naryPr><m:chr m:val="∑"/></m:naryPr><m:sub/><m:sup/><m:e>{math("k")}</m:e></m:nary>'
    symbols = "".join(
        f'<w:sym w:font="{font}" w:char="{code}"/>'
        for font, code in (
            ("Symbol", "F06D"), ("Symbol", "F0A3"), ("Symbol", "62"), ("Arial", "2122"), ("Wingdings", "F04A"),
            ("Symbol", "F07F"), ("Arial", "zz"), ("Arial", "D83D"),
        )
    )  # fmt: skip
    space = 'xmlns:m="http://schemas.openxmlformats.org/officeDocument/2006/math"'
    added = f"<w:p><m:oMath {space}>{fraction}{power}{root}{bracket}{sums}</m:oMath><w:r>{symbols}</w:r></w:p>"
    added += f"<m:oMathPara {space}><m:oMath>{math('v')}</m:oMath></m:oMathPara>"
    path = edited(document(tmp_path / "a.docx"), lambda xml: xml.replace(b"<w:tbl>", added.encode() + b"<w:tbl>"))
    findings = Findings()
    (row,) = read_rows(identify(path), findings)
    assert row.values["text"] == TEXT.replace("cell 0", "(a+b)/2x_i^(10)√y(z)|w|∑kμ≤β™\nv\ncell 0")
    assert list(findings.notes) == [f"{path}: 4 symbols of special fonts are left out"]


LAUGHS = b"<!DOCTYPE w [<!ENTITY a 'ha'>" + b"".join(
    f"<!ENTITY {chr(letter)} '{f'&{chr(letter - 1)};' * 10}'>".encode() for letter in range(98, 108)
) + b"]>"  # fmt: skip


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda xml: xml.replace(b"<w:document", LAUGHS + b"<w:document", 1), "declares a document type"),
        (
            lambda xml: xml.replace(b"<w:document", LAUGHS + b'<w:document x="&k;"', 1),
            "damaged Word document: .*entity",
        ),
        (
            lambda xml: xml.replace(
                b"<w:document", b"<!DOCTYPE w [<!ENTITY a SYSTEM 'file:///etc/passwd'>]><w:document", 1
            ).replace(b"Review", b"&a;"),
            "declares a document type",
        ),
        (lambda xml: xml.replace(b"<w:body>", b"<w:body>" + b"<w:ins>" * 2000), "damaged Word document"),
        (lambda xml: xml[:-20], "damaged Word document"),
        (lambda xml: xml + b" " * 2**27, "too large: 128 MiB decompressed, .*limits 256 and 64 MiB"),
    ],
)
def test_hostile_word_files_are_rejected(change: Callable[[bytes], bytes], says: str, tmp_path: Path) -> None:
    path = edited(document(tmp_path / "a.docx"), change)
    with pytest.raises(DataError, match=rf"a\.docx: .*{says}"):
        read(path)


def test_unreadable_word_files_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = document(tmp_path / "a.docx")
    with pytest.raises(DataError, match="Word document too large"):
        read(path, ReadLimits(document=1000))
    docx.Document().save(str(tmp_path / "empty.docx"))
    with pytest.raises(DataError, match="has no rows"):
        read(tmp_path / "empty.docx")
    (tmp_path / "a.docx.gz").write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(DataError, match=r"a\.docx\.gz: a compressed Word document"):
        read(tmp_path / "a.docx.gz")
    monkeypatch.setitem(sys.modules, "docx", None)
    with pytest.raises(UsageError, match=r"pip install 'gptj-ft\[docx\]', or save the document as plain text"):
        read(path)


@pytest.mark.thorough
def test_word_file_with_wrong_bytes_never_crashes(tmp_path: Path) -> None:
    draw = random.Random(0)
    for _ in range(20):
        at, bad = draw.random(), draw.choice([b"", b"<", b'"', b"\xff", b"x" * 9, b"<w:p/>"])
        part = draw.choice([BODY, "[Content_Types].xml", "_rels/.rels", "word/_rels/document.xml.rels"])

        def change(xml: bytes, at: float = at, bad: bytes = bad) -> bytes:
            return xml[: int(at * len(xml))] + bad + xml[int(at * len(xml)) + 1 :]

        with suppress(DataError):
            read(edited(document(tmp_path / "a.docx"), change, part))
