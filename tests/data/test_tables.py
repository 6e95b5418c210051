"""Test that a table has the same rows in every separator, encoding, line ending and quoting."""

from __future__ import annotations

import csv
import datetime
import gzip
import io
import json
import random
import re
import sys
import zipfile
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import openpyxl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.tiny_tokenizer import make_tokenizer

from gptj_ft.config.options import Recipe
from gptj_ft.config.resolve import resolve
from gptj_ft.data.dataset import check_compatible
from gptj_ft.data.load import prepare_once
from gptj_ft.data.prepare import TokenizeJob, find_columns
from gptj_ft.data.readers.cells import guarded, unguarded
from gptj_ft.data.readers.encodings import encoding_by_head, guess_encoding
from gptj_ft.data.readers.records import read_rows
from gptj_ft.data.readers.rows import Findings
from gptj_ft.data.readers.source import FileOptions, ReadLimits, identify
from gptj_ft.errors import DataError, UsageError

Table = list[dict[str, str]]
TEXTS: dict[str, list[str]] = {
    "German": [
        "Der Patient klagt über Schmerzen; seit gestern, sagt er, „sehr“.",
        "Größe 1,80 m | Süßes",
        "Ja.\n\nNein.",
    ],
    "French": ["L’été, c'est « très » beau ; où ça ?", "Ça va\tbien, n'est-ce pas ?", "Œuvre d’un cœur : 3,50 €"],
    "Spanish": ["¿Cómo está? ¡Muy bien!", "El niño; la niña", "Él dijo \"sí\", ella dijo 'no'"],
    "Polish": ["Zażółć gęślą jaźń; było źle.", "Łódź | Kraków", "Święta, pięć"],
    "Japanese": ["患者は「痛い」と言った。", "東京、大阪；京都", "はい\nいいえ"],
}
WESTERN = ("German", "French", "Spanish")
ENCODINGS = ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "cp1252")
SEPARATORS = {",": "commas", ";": "';'", "\t": "tabs", "|": "'|'"}
QUIET: dict[str, Any] = {"derandomize": True, "database": None, "deadline": None,
                         "suppress_health_check": list(HealthCheck)}  # fmt: skip


def rows_of(texts: list[str]) -> Table:
    return [{"id": str(n), "document": text, "summary": texts[-1 - n]} for n, text in enumerate(texts)]


def written(rows: Table, separator: str, ending: str, quoting: int, encoding: str) -> bytes:
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, list(rows[0]), delimiter=separator, lineterminator=ending, quoting=quoting)
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().encode(encoding)


def read(path: Path, findings: Findings | None = None, **options: Any) -> Table:
    return [row.values for row in read_rows(identify(path, FileOptions(**options)), findings)]


def recipe_of(**flags: Any) -> Recipe:
    return resolve({"recipe": "summarization", **flags}, environment={}).recipe


def columns(path: Path, **flags: Any) -> dict[str, str]:
    recipe = recipe_of(**flags)
    return find_columns(identify(path, FileOptions.of(recipe)), recipe)


# Separators, encodings, line endings, quotes


@pytest.mark.parametrize("language", TEXTS)
def test_table_rows_are_equal_in_any_dialect(language: str, tmp_path: Path) -> None:
    rows, count = rows_of(TEXTS[language]), 0
    for separator, ending, quoting in product(SEPARATORS, ("\n", "\r\n"), (csv.QUOTE_ALL, csv.QUOTE_MINIMAL)):
        for encoding in ENCODINGS:
            if encoding == "cp1252" and language not in WESTERN:
                continue
            for suffix in ("csv", "tsv") if quoting == csv.QUOTE_ALL or separator != "\t" else ("csv",):
                path, findings = tmp_path / f"a.{suffix}", Findings()
                path.write_bytes(written(rows, separator, ending, quoting, encoding))
                assert read(path, findings) == rows, (separator, ending, quoting, encoding, suffix)
                said = "\n".join(findings.notes)
                by_name = separator == ("," if suffix == "csv" else "\t")
                assert (f"{path} is separated by {SEPARATORS[separator]}" in said) == (not by_name)
                assert ("assuming Windows-1252 (Western Europe)" in said) == (encoding == "cp1252")
                assert ("is encoded in UTF-16" in said) == encoding.startswith("utf-16")
                count += 1
    assert count >= 140


CELLS = st.text(st.sampled_from("ab Zäöüßéèñ€’“”,;|\t\n\"'.!?-"), max_size=12)


@pytest.mark.slow
@settings(max_examples=1500, **QUIET)
@given(data=st.data())
def test_random_table_is_read_in_any_dialect(tmp_path: Path, data: st.DataObject) -> None:
    table = data.draw(st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=6))
    rows = [{"document": one, "summary": two} for one, two in table]
    encoding = data.draw(st.sampled_from(ENCODINGS))
    separator, ending = data.draw(st.sampled_from(list(SEPARATORS))), data.draw(st.sampled_from(["\n", "\r\n"]))
    quoting = data.draw(st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_MINIMAL]))
    path = tmp_path / "a.csv"
    path.write_bytes(written(rows, separator, ending, quoting, encoding))
    # That a text of a few letters is Windows-1252, its letters may not tell.
    told = {"encoding": "cp1252"} if encoding == "cp1252" else {}
    assert read(path, **told) == rows
    workbook(tmp_path / "a.xlsx", {"Sheet": [["document", "summary"], *([f"_{one}", f"_{two}"] for one, two in table)]})
    assert read(tmp_path / "a.xlsx") == [{"document": f"_{one}", "summary": f"_{two}"} for one, two in table]


def test_bad_row_line_survives_any_encoding(tmp_path: Path) -> None:
    text = 'document;summary\r\n"größer\r\nals";b\r\n\r\nzu;viel;hier\r\n'
    for encoding in ENCODINGS:
        path = tmp_path / f"{encoding}.csv"
        path.write_bytes(text.encode(encoding))
        with pytest.raises(DataError, match=r"\.csv:5: 3 cells, the header has 2"):
            read(path, delimiter=";")
    path.write_bytes("größer\n".encode("utf-16-le") * 30_000 + b"\0\xd8\n\0")
    with pytest.raises(DataError, match=r"\.csv:30001: not UTF-16: invalid byte 0x00"):
        read(path)


def test_named_and_excel_separators_are_used(tmp_path: Path) -> None:
    path, findings = tmp_path / "a.csv", Findings()
    path.write_text("a^b\nx,y^1\n")
    assert read(path, findings, delimiter="^") == [{"a": "x,y", "b": "1"}]
    assert not findings.notes
    path.write_text("sep=;\r\na;b\r\nx,y;1\r\n2;3;4\r\n", newline="")
    with pytest.raises(DataError, match=r"a\.csv:4: 3 cells, the header has 2"):
        read(path)
    for typed, meant in {"comma": ",", "semicolon": ";", "tab": "\t", "\\t": "\t", "pipe": "|", "^": "^"}.items():
        assert Recipe(delimiter=typed).delimiter == meant
    with pytest.raises(UsageError, match=r"delimiter: expected comma, semicolon, tab, pipe or one character"):
        resolve({"delimiter": "--"}, environment={})


def test_separators_in_texts_do_not_mislead(tmp_path: Path) -> None:
    path, findings = tmp_path / "a.csv", Findings(most_bad=9)
    for text in ("text\none; two\nthree; four | five\n", "a,b\nx;y,1\nz;w,2\n", "a;x,b;y\n1;2,3;4\n",
                 "a,b\n1,2\n3\n4\n", "note; free text\none\ntwo; three\n"):  # fmt: skip
        path.write_text(text)
        names = text.partition("\n")[0].split(",")
        assert list(read(path, findings)[0]) == names
    (tmp_path / "a.tsv").write_text("text\none, two\n")
    assert read(tmp_path / "a.tsv", findings) == [{"text": "one, two"}]
    assert not findings.notes


@pytest.mark.parametrize("form", ["jsonl", "json", "txt"])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_texts_and_json_support_all_encodings(form: str, encoding: str, tmp_path: Path) -> None:
    texts = [text.replace("\n", " ") for text in TEXTS["French"]]
    path, findings = tmp_path / f"a.{form}", Findings()
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts] if form != "txt" else texts
    whole = "[\n" + ",\n".join(lines) + "]" if form == "json" else "\n".join(lines)
    path.write_bytes(whole.encode(encoding))
    found = list(read_rows(identify(path, FileOptions(documents="line")), findings))
    assert [row.values["text"] for row in found] == texts
    assert [row.line for row in found] == ([2, 3, 4] if form == "json" else [1, 2, 3])
    assert bool(findings.notes) == (encoding != "utf-8")


# What is assumed, and what is not


@pytest.mark.parametrize(("encoding", "language", "is_taken"), [
    ("cp1252", "German", True), ("cp1252", "French", True), ("cp1252", "Spanish", True), ("cp1250", "Polish", False),
    ("iso8859-2", "Polish", False), ("cp1251", "Russian", False), ("shift_jis", "Japanese", False),
    ("euc_jp", "Japanese", False), ("mac_roman", "French", False), ("cp850", "German", False),
    ("cp1253", "Greek", False),
])  # fmt: skip
def test_unlikely_windows_1252_is_not_assumed(encoding: str, language: str, is_taken: bool, tmp_path: Path) -> None:
    texts = {"Russian": ["Привет, как дела?"], "Greek": ["Καλημέρα σας, τι κάνετε"],
             "French": ["L'été a été très long, déjà", "Où ça ?"]}.get(language) or TEXTS[language]  # fmt: skip
    path = tmp_path / "a.txt"
    content = "\n".join(texts).encode(encoding, "ignore")
    path.write_bytes(content)
    assert (guess_encoding(lambda: [content]) == "cp1252") == is_taken
    if not is_taken:
        with pytest.raises(
            DataError, match=r"a\.txt:\d: not UTF-8: byte 0x..(?s:.*)in Excel: Save as, CSV UTF-8(?s:.*)"
        ):
            read(path)
    assert read(path, encoding=encoding, documents="file") == [{"text": content.decode(encoding)}]


@pytest.mark.parametrize(("pieces", "encoding"), [
    ([b"caf\xe9"], "cp1252"), ([b"caf\xc3", b"\xa9 ", b"ol\xc3\xa9"], "utf-8"), ([b"\xc3", b"ab", b"\xa9"], "cp1252"),
    ([b"abc", b""], "utf-8"), ([], "utf-8"),
])  # fmt: skip
def test_guessed_encoding_ignores_chunk_boundaries(pieces: list[bytes], encoding: str) -> None:
    assert guess_encoding(lambda: pieces) == encoding


def test_damaged_utf8_stays_utf8(tmp_path: Path) -> None:
    content = ("déjà vu, " * 9).encode() + b"\xe9 " + "été".encode()
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.txt:1: not UTF-8: byte 0xe9 at column 100"):
        read(path)
    (tmp_path / "b.txt").write_bytes(b"caf\xe9 \x81")
    with pytest.raises(DataError, match=r"b\.txt:1: not UTF-8: byte 0xe9 at column 4"):
        read(tmp_path / "b.txt")


def test_named_encoding_is_used(tmp_path: Path) -> None:
    path, findings = tmp_path / "a.csv", Findings()
    path.write_bytes("document,summary\nZażółć gęślą,jaźń\n".encode("cp1250"))
    assert read(path, findings, encoding="cp1250") == [{"document": "Zażółć gęślą", "summary": "jaźń"}]
    assert not findings.notes
    path.write_bytes("document,summary\nä,ö\n".encode("utf-16"))
    assert read(path, encoding="utf-16") == [{"document": "ä", "summary": "ö"}]
    path.write_bytes("document,summary\nZażółć gęślą,jaźń\n".encode("cp1250"))
    with pytest.raises(DataError, match=r"a\.csv:2: not ascii: invalid byte 0xbf"):
        read(path, encoding="ascii")
    for name in ("nonsense", "hex", "a\0b"):
        with pytest.raises(UsageError, match="encoding: expected a text encoding of Python"):
            resolve({"encoding": name}, environment={})


def test_unmarked_utf16_is_recognized_only_if_certain() -> None:
    japanese = "document,summary\n" + "患者は「痛い」と言った。\u3000はい,はい\n" * 40
    for text, encoding in product([japanese, "a,b\n1,2\n", "größer"], ["utf-16-le", "utf-16-be"]):
        assert encoding_by_head(text.encode(encoding)) == encoding
    for head in (
        b"",
        b"a",
        b"a\0",
        b"nul\0here, nul\0there",
        bytes(64),
        "患者は「痛い」".encode("utf-16-le"),
        b"\x01\0\x02\0" * 9,
    ):
        assert encoding_by_head(head) == ""


def test_recoding_streams_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gptj_ft.data.readers import encodings

    path, longest = tmp_path / "a.txt", 0
    path.write_bytes("füß\n".encode("utf-16") * 100_000)
    utf8 = encodings.as_utf8

    class Watched(io.RawIOBase):
        def __init__(self, raw: Any) -> None:
            self.raw = raw

        def read(self, size: int = -1) -> bytes:
            nonlocal longest
            assert size >= 0
            longest = max(longest, size)
            return self.raw.read(size)

    monkeypatch.setattr("gptj_ft.data.readers.rows.as_utf8", lambda raw, *rest: utf8(Watched(raw), *rest))
    count = sum(1 for _ in read_rows(identify(path, FileOptions(documents="line"))))
    assert (count, 0 < longest <= 2**20) == (100_000, True)


# Names of columns


@pytest.mark.parametrize("content", [
    "Doctor: When did it begin? \nPatient: Monday,Pain\n".replace("\n", " ", 1) + "x,y\n",
    '"Doctor: When did it begin?\nPatient: On Monday.",secret pain\nx,y\n', "17,secret\n18,y\n",
    "a secret text,positive\nb,negative\nc,positive\n", "secret。,b\nx,y\n", "2024-05-01,secret\n2024-05-02,b\n",
    "secret,secret word,secret\nx,y,x\nz,secret word,z\n",
])  # fmt: skip
def test_missing_header_is_reported_without_row_texts(content: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(content)
    with pytest.raises(
        DataError, match=r"looks like a row, not like column names: add a header line, e\.g\. document,summary"
    ) as told:
        columns(path)
    assert "secret" not in str(told.value).lower()
    assert "Doctor" not in str(told.value)


@pytest.mark.parametrize("header", ["id,note,summary", "document,summary,2020", "0,1", "Patient no.,Dr. says", ",a,b"])
def test_column_names_are_not_a_row(header: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    row = ",".join("xyz"[: header.count(",") + 1])
    path.write_text(f"{header}\n{row}\n{header}\n{row}\n")
    findings = Findings()
    read(path, findings)
    assert not findings.headless


def test_form_header_can_be_mapped(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("What brings you here today, in short?;Say more\nx;y\n")
    chosen = {"document": "Say more", "summary": "What brings you here today, in short?"}
    assert columns(path, map=chosen) == chosen


@pytest.mark.parametrize(("content", "says"), [
    ("my notes^x;y\nb\n", r"--set delimiter=';'$"), ("my notes\nb\n", r"--map 'document=my notes'$"),
    ('"a\tb"\nb\n', r"--set delimiter=tab$"), ("x\nb\n", r"--map document=x$"),
    ("a,b\n1,2\n", r"--map document=COLUMN$"),
    ("n" * 40 + "\nb\n", r"there are: n{30}\.\.\.\nname yours with --map document=COLUMN$"),
])  # fmt: skip
def test_suggested_option_can_be_typed(content: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(content)
    with pytest.raises(DataError, match=says):
        columns(path)


def test_read_options_key_cache_not_prepared_rows(tmp_path: Path) -> None:
    path, tokenizer = tmp_path / "a.csv", make_tokenizer()
    path.write_text("document;summary\na long note;short\n")
    prepared = [
        prepare_once(TokenizeJob.of(recipe_of(delimiter=each), tokenizer, path, 50400)) for each in ("auto", ";")
    ]
    assert prepared[0].report.settings["delimiter"] == "auto"
    assert prepared[1].report.settings["delimiter"] == ";"
    for options in ({"delimiter": ";"}, {"encoding": "cp1252"}, {"sheet": "Notes"}):
        check_compatible(prepared[0], recipe_of(**options), tokenizer)


def test_long_column_names_are_shortened(tmp_path: Path, shell: Any) -> None:
    name = "What was said when you came in to see us on Monday"
    (tmp_path / "a.csv").write_text(f"{name};summary\na long note;short\n" + "note;x\n" * 9)
    (tmp_path / "c.yaml").write_text(json.dumps({"map": {"document": name}}))
    done = shell(
        "prepare-data --recipe summarization --model tiny --data a.csv --config c.yaml --report r.html --show 0"
    )
    assert done.code == 0, done.err
    page = (tmp_path / "r.html").read_text()
    for shown in (done.said, page):
        assert name not in shown
        assert f"{name[:30]}..." in shown
    assert "a.csv is separated by &#39;;&#39;" in page
    assert "a.csv is separated by ';'" in done.said


# Workbooks


def workbook(path: Path, sheets: dict[str, list[list[Any]]], hidden: tuple[str, ...] = ()) -> Path:
    book = openpyxl.Workbook()
    book.remove(book.active)
    for name, rows in sheets.items():
        sheet = book.create_sheet(name)
        for row in rows:
            sheet.append(row)
        sheet.sheet_state = "hidden" if name in hidden else "visible"
    book.save(path)
    return path


def edited(path: Path, part: str, change: Callable[[str], str]) -> Path:
    """Change a part of a workbook, as another program or a person might."""
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    parts[part] = change(parts[part].decode()).encode()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    return path


SHEET = "xl/worksheets/sheet1.xml"


@pytest.mark.parametrize("language", TEXTS)
def test_workbook_rows_equal_text_table_rows(language: str, tmp_path: Path) -> None:
    rows, findings = rows_of(TEXTS[language]), Findings()
    path = workbook(tmp_path / "a.xlsx", {"Sheet": [list(rows[0]), *(list(row.values()) for row in rows)]})
    assert read(path, findings) == rows
    assert [row.line for row in read_rows(identify(path))] == list(range(2, 2 + len(rows)))
    assert not findings.notes
    wrong = tmp_path / "wrong.csv"
    wrong.write_bytes(path.read_bytes())
    assert read(wrong, findings) == rows
    assert list(findings.notes) == [f"{wrong} contains xlsx and is read as such, although its name says csv"]


def test_cells_are_read_as_displayed(tmp_path: Path) -> None:
    cells: dict[Any, str] = {
        7: "7", -3.0: "-3", 2.5: "2.5", 0.1 + 0.2: "0.3", 1e20: "1e+20", True: "true", None: "", "": "",
        datetime.date(2024, 5, 1): "2024-05-01", datetime.datetime(2024, 5, 1, 14, 30): "2024-05-01 14:30:00",
        datetime.time(8, 15): "08:15:00", " a ": " a ", "0012": "0012", "x_x000D_\ny": "x\ny", "#N/A": "", "=1+1": "2",
    }  # fmt: skip
    rows = [["id", "cell"], *([f"r{n}", cell] for n, cell in enumerate(cells))]
    path = edited(workbook(tmp_path / "a.xlsx", {"Sheet": rows}), SHEET, lambda xml: xml.replace(
        "<f>1+1</f><v />", "<f>1+1</f><v>2</v>").replace("<f>1+1</f><v></v>", "<f>1+1</f><v>2</v>"))  # fmt: skip
    assert [row["cell"] for row in read(path)] == list(cells.values())


def test_cells_around_the_table_are_ignored(tmp_path: Path) -> None:
    rows = [[], [], [None, "document", "summary", None], [None, "one", "1", None, "aside"], [], ["x", "two", 2]]
    path, findings = workbook(tmp_path / "a.xlsx", {"Sheet": rows}), Findings()
    found = list(read_rows(identify(path), findings))
    assert [(row.line, row.values) for row in found] == [
        (4, {"document": "one", "summary": "1"}), (6, {"document": "two", "summary": "2"}),
    ]  # fmt: skip
    assert not findings.notes
    edited(workbook(path, {"Sheet": [["document", "summary"], ["one", "1", "aside"]]}), SHEET, lambda xml: xml.replace(
        'ref="A1:C2"', 'ref="A1"'))  # fmt: skip
    assert read(path, findings) == [{"document": "one", "summary": "1"}]
    assert list(findings.notes) == [f"{path}: cells to the right of the last named column are ignored"]


def test_merged_and_hidden_cells_are_read(tmp_path: Path) -> None:
    path = workbook(
        tmp_path / "a.xlsx", {"Sheet": [["document", "summary"], ["one", "1"], ["two", "2"], ["three", "3"]]}
    )
    book = openpyxl.load_workbook(path)
    book.active.merge_cells("A2:A3")
    book.active.row_dimensions[4].hidden = True
    book.save(path)
    assert [row["document"] for row in read(path)] == ["one", "", "three"]


def test_first_visible_or_named_sheet_is_read(tmp_path: Path) -> None:
    sheets = {name: [["document", "summary"], [name, "x"]] for name in ("Lists", "Notes", "2023")}
    path, findings = workbook(tmp_path / "a.xlsx", sheets, hidden=("Lists",)), Findings()
    assert read(path, findings)[0]["document"] == "Notes"
    assert list(findings.notes) == [
        f"{path}: reading the sheet 'Notes' of 'Lists', 'Notes', '2023'; --set sheet=NAME reads another"
    ]
    named = resolve({}, assignments=("sheet=2023",), environment={}).recipe
    assert read(path, Findings(), sheet=named.sheet)[0]["document"] == "2023"
    assert read(path, Findings(), sheet="Lists")[0]["document"] == "Lists"
    with pytest.raises(
        UsageError, match=r"a\.xlsx has no sheet 'Note' \(did you mean 'Notes'\?\); there are: 'Lists', "
    ):
        read(path, sheet="Note")


def test_workbook_without_header_is_reported(tmp_path: Path) -> None:
    path = workbook(tmp_path / "a.xlsx", {"Sheet": [["Doctor: where does it hurt today, please?", 17], ["x", 18]]})
    with pytest.raises(
        DataError, match=r"looks like a row, not like column names: .* e\.g\. document, summary"
    ) as told:
        columns(path)
    assert "hurt" not in str(told.value)
    for rows in ([], [[]], [["document", "summary"]]):
        with pytest.raises(DataError, match="the file has no rows"):
            read(workbook(path, {"Sheet": rows}))
    with pytest.raises(DataError, match=r"a\.xlsx:1: the header names column 'a' twice"):
        read(workbook(path, {"Sheet": [["a", "a"], ["x", "y"]]}))


def test_damaged_or_huge_workbook_is_rejected(tmp_path: Path) -> None:
    limits = ReadLimits(other_parts=2**21, sheet_piece=2**20, sheet_rows=2**13)
    rows = [["document", "summary"], ["one", "1"]]

    def made(part: str, change: Callable[[str], str]) -> Path:
        return edited(workbook(tmp_path / "a.xlsx", {"Sheet": rows}), part, change)

    laughs = "".join(f'<!ENTITY l{n} "{f"&l{n - 1};" * 10}">' for n in range(1, 12))
    bomb = f'<!DOCTYPE x [<!ENTITY l0 "ha">{laughs}]><x>&l11;</x>'
    odd: list[tuple[str, Callable[[str], str], str]] = [
        (SHEET, lambda xml: bomb, "damaged workbook"),
        ("xl/workbook.xml", lambda xml: bomb, "damaged workbook"),
        (SHEET, lambda xml: xml.replace('"2"', '"99999999999"').replace('"A2"', '"A99999999999"'), "rows|whole"),
        (SHEET, lambda xml: xml.replace('r="2">', 'r="2">' + " " * 2**23), "workbook too large: a row or text above"),
        ("xl/styles.xml", lambda xml: xml + " " * 2**22, "workbook too large: .* decompressed"),
        (SHEET, lambda xml: xml[:-80], "damaged workbook"),
        ("[Content_Types].xml", lambda xml: "x", "damaged workbook"),
    ]  # fmt: skip
    for part, change, says in odd:
        with pytest.raises(DataError, match=rf"a\.xlsx: .*({says})"):
            read(made(part, change), limits=limits)
    whole = workbook(tmp_path / "a.xlsx", {"Sheet": rows}).read_bytes()
    (tmp_path / "a.xlsx").write_bytes(whole[:-30])
    with pytest.raises(DataError, match=r"a\.xlsx: damaged workbook"):
        read(tmp_path / "a.xlsx")
    (tmp_path / "a.xlsx.gz").write_bytes(gzip.compress(whole))
    with pytest.raises(
        DataError, match=r"a\.xlsx\.gz: a compressed workbook cannot be read; decompress the file \(gzip\)"
    ):
        read(tmp_path / "a.xlsx.gz")


@pytest.mark.parametrize("seed", range(3))
def test_workbook_with_wrong_bytes_never_crashes(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    rows = [["document", "summary"], *([f"Note {n}", n] for n in range(9))]
    path = workbook(tmp_path / "a.xlsx", {"Sheet": rows})
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    for _ in range(40):
        name = draw.choice(sorted(parts))
        changed = bytearray(parts[name])
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(changed))
            changed[at : at + draw.choice([1, 1, 9])] = draw.choice([b"", b"<", b"9", b'"', b"\xff", b"-1", b"x" * 9])
        with zipfile.ZipFile(path, "w") as archive:
            for part, content in parts.items():
                archive.writestr(part, bytes(changed) if part == name else content)
        with suppress(DataError):
            read(path, Findings(most_bad=99))


def test_missing_openpyxl_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = workbook(tmp_path / "a.xlsx", {"Sheet": [["a"], ["b"]]})
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    with pytest.raises(UsageError, match=r"pip install 'gptj-ft\[xlsx\]', or save the sheet as CSV UTF-8"):
        read(path)


HOSTILE = (
    "=1+1", "+cmd|' /C calc'!A0", "-2+3", '@SUM("A1")', "\t=1", "\r=1", "\uff1d1+1", " \ufeff=1", "'=1", "''-x", "-",
    "a;=1", "a\n- b\n'- c", "a\r=1", 'a;"=1', "x\t'+y", "-0.5", "+1e-3", "-1-1", "'-5", "", "it's; 'ok'", "\n\n=",
)  # fmt: skip


def test_guarded_cells_compute_nothing_and_come_back() -> None:
    draw = random.Random(0)
    for text in (*HOSTILE, *("".join(draw.choices("=+-@\uff1d '\";\t\r\n0a.\u200b", k=8)) for _ in range(500))):
        assert unguarded(guarded(text)) == text
        line = io.StringIO(newline="")
        csv.writer(line, quoting=csv.QUOTE_NONNUMERIC).writerow([guarded(text), -0.5])
        (cells,) = csv.reader(io.StringIO(line.getvalue(), newline=""))
        # A spreadsheet in another language separates cells by semicolons, and quotes mean less there.
        cells += re.split("[;\t\r\n]", guarded(text))
        starts = {cell.strip(' \x00"\u200b\ufeff')[:1] for cell in cells if not is_number(cell)}
        assert not starts & set("=+-@\t\r\n\uff1d"), cells


def is_number(cell: str) -> bool:
    with suppress(ValueError):
        return bool(float(cell)) or True
    return False
