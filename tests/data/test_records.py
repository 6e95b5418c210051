import json
import os
from pathlib import Path

import pytest

from gptj_ft.data.readers.records import read_rows
from gptj_ft.data.readers.rows import Findings, format_places
from gptj_ft.data.readers.source import FileOptions, ReadLimits, identify
from gptj_ft.errors import DataError, UsageError


@pytest.fixture
def write(tmp_path):
    def write(name, content):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def rows(path):
    return [(row.line, row.values) for row in read_rows(identify(path))]


def real_data(name):
    folder = Path(os.environ.get("GPTJ_FT_TEST_DATA") or Path(__file__).parents[3] / "shared" / "data")
    if not (folder / name).exists():
        pytest.skip(f"real data not found: {folder / name} (set GPTJ_FT_TEST_DATA)")
    return folder / name


# What is read


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.ndjson", "rows.json", "ROWS.JSONL"])
def test_json_lines_skip_blanks_and_keep_numbers(write, name):
    path = write(name, '{"a": 1}\n\n{"a": "two"}\n')
    assert rows(path) == [(1, {"a": 1}), (3, {"a": "two"})]
    assert [row.where for row in read_rows(identify(path))] == [f"{path}:1", f"{path}:3"]


@pytest.mark.parametrize("name", ["one.jsonl", "one.json"])
def test_one_row_without_newline_is_read(write, name):
    assert rows(write(name, '{"a": "b"}')) == [(1, {"a": "b"})]


@pytest.mark.parametrize("chunk", [1, 3, 2**20])
def test_json_lines_named_json_are_read(write, chunk):
    path = write("a.json", '\n{"a": 1}\r\n\n{"a": "\\u00e9"}\n{"a": 3}')
    source = identify(path, FileOptions(limits=ReadLimits(text_chunk=chunk)))
    expected = [(2, {"a": 1}), (4, {"a": "é"}), (5, {"a": 3})]
    assert [(row.line, row.values) for row in read_rows(source)] == expected
    findings = Findings(most_bad=1)
    found = read_rows(identify(write("b.json", '{"a": 1}\noops\n{"a": 2}\n')), findings)
    assert [row.values["a"] for row in found] == [1, 2]
    assert [where.rpartition(":")[2] for where, _ in findings.bad] == ["2"]
    with pytest.raises(DataError, match=r"c\.json:1: not JSON: more text after the end of the object"):
        rows(write("c.json", '{"a": 1} {"a": 2}\n'))


def test_a_byte_order_mark_is_accepted(write):
    assert rows(write("a.jsonl", b'\xef\xbb\xbf{"a": 1}\n')) == [(1, {"a": 1})]
    assert rows(write("a.json", b'\xef\xbb\xbf[{"a": 1}]')) == [(1, {"a": 1})]
    assert rows(write("a.tsv", b"\xef\xbb\xbfa\tb\n1\t2\n")) == [(2, {"a": "1", "b": "2"})]


def test_json_list_keeps_line_of_each_object(write):
    text = json.dumps([{"a": "x\n}"}, {"a": [1, {"b": 2}]}], indent=1)
    assert rows(write("a.json", "\n" + text)) == [(3, {"a": "x\n}"}), (6, {"a": [1, {"b": 2}]})]


def test_json_on_one_line_counts_records_instead(write):
    assert rows(write("a.json", '[{"a": 1}, {"a": 2}]')) == [(1, {"a": 1}), (2, {"a": 2})]


def test_flat_rows_under_data_are_rows(write):
    path = write("a.json", '{"version": 2, "data": [\n{"question": "q"},\n{"question": "r"}\n]}')
    assert rows(path) == [(2, {"question": "q"}), (3, {"question": "r"})]


@pytest.mark.parametrize("indent", [None, 1])
def test_wrapped_rows_are_read_and_noted(write, indent):
    items = [{"document": "a", "tags": [{"n": 1}]}, {"document": "b"}]
    path = write("wrap.json", json.dumps({"version": 2, "items": items, "empty": [], "about": {"n": 1}}, indent=indent))
    findings = Findings()
    found = list(read_rows(identify(path), findings))
    assert [row.values for row in found] == items
    lines = path.read_text().splitlines()
    expected = [1, 2] if indent is None else [n for n, line in enumerate(lines, 1) if line == "  {"]
    assert [row.line for row in found] == expected
    assert list(findings.notes) == [f"{path}: the rows are taken from the list 'items'"]
    with pytest.raises(
        DataError, match=r"wrap\.json: the rows may be in any of 'a', 'b': write the right list to a file"
    ):
        rows(write("wrap.json", json.dumps({"a": items, "b": items, "c": 1})))


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "x"}]},
        {"conversations": [{"from": "human", "value": "x"}], "tools": [{}]},
        {"document": "x" * 101, "tags": [{"n": 1}]},
        {"a": 1},
        {"a": ["x"]},
        {"a": ["x", "y"], "b": "z"},
        {"input_ids": [5, 6], "labels": [5, 6]},
        {"a": [{"b": 1}, 2]},
    ],
)
def test_single_object_is_one_row(write, row):
    assert rows(write("a.json", json.dumps(row))) == [(1, row)]
    several = json.dumps(row) + "\n" + json.dumps({"a": [{"b": 1}]}) + "\n"
    assert [values for _, values in rows(write("a.json", several))] == [row, {"a": [{"b": 1}]}]


def test_formatted_places_name_a_file_once():
    assert format_places(["/a/val.csv:49"], 1) == "val.csv:49"
    assert format_places(["/a/val.csv:49", "/a/val.csv:140", "/a/val.csv:155"], 9) == "val.csv: lines 49, 140, 155 ..."
    assert format_places(["/a/x.csv:1", "/b/y.csv:7", "/a/x.csv:3"], 3) == "x.csv: lines 1, 3; y.csv:7"
    assert format_places(["/a/x.csv:1", "/b/x.csv:7"], 3) == "/a/x.csv:1; /b/x.csv:7 ..."


def test_squad_gives_one_row_per_question(write):
    squad = {
        "version": "v2.0",
        "data": [
            {
                "title": "Rivers",
                "paragraphs": [
                    {
                        "context": "The Aa is short.",
                        "qas": [
                            {
                                "id": "q1",
                                "question": "What is short?",
                                "answers": [{"text": "The Aa", "answer_start": 0}, {"text": "Aa", "answer_start": 4}],
                            },
                            {"id": "q2", "question": "Who is tall?", "is_impossible": True, "answers": []},
                        ],
                    }
                ],
            },
            {"title": "Empty", "paragraphs": []},
        ],
    }
    first, second = rows(write("squad.json", json.dumps(squad)))
    assert first == (
        1,
        {
            "title": "Rivers",
            "context": "The Aa is short.",
            "question": "What is short?",
            "id": "q1",
            "answers": {"text": ["The Aa", "Aa"], "answer_start": [0, 4]},
        },
    )
    assert second[0] == 2
    assert second[1]["answers"] == {"text": [], "answer_start": []}
    pretty = json.dumps(squad, indent=1)
    lines = [line for line, _ in rows(write("pretty.json", pretty))]
    assert [pretty.splitlines()[line - 1].strip() for line in lines] == ['"id": "q1",', '"id": "q2",']


def test_csv_cells_may_hold_newlines_and_commas(write):
    long = "x" * 200_000
    path = write("a.csv", f'id,text\r\n1,"one\r\ntwo, ""three"""\r\n\r\n2,{long}\r\n')
    assert rows(path) == [(2, {"id": "1", "text": 'one\ntwo, "three"'}), (5, {"id": "2", "text": long})]


def test_tsv_takes_quotes_as_text(write):
    assert rows(write("a.tsv", 'a\tb\n"x\ty"z\n')) == [(2, {"a": '"x', "b": 'y"z'})]


def test_text_is_split_at_blank_lines(write):
    path = write("a.txt", "\none\r\n two\n \n\n\nthree")
    assert rows(path) == [(2, {"text": "one\n two"}), (7, {"text": "three"})]


# What is refused


def test_a_missing_file_names_its_nearest_sibling(write, tmp_path):
    write("train.jsonl", "{}")
    with pytest.raises(UsageError, match=r"no such file: .*trian\.jsonl \(did you mean 'train\.jsonl'\?\)"):
        rows(tmp_path / "trian.jsonl")
    with pytest.raises(UsageError, match="no such file"):
        rows(tmp_path / "nowhere" / "a.jsonl")


def test_broken_link_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").symlink_to(tmp_path / "gone.jsonl")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("rows.jsonl", "loop"):
        with pytest.raises(UsageError, match=f"{name} is a link to a file that does not exist"):
            identify(tmp_path / name)


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"has no files of rows .* and is not prepared data"):
        rows(tmp_path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.tsv", "a.txt"])
def test_an_empty_file_is_refused(write, name):
    with pytest.raises(DataError, match="file is empty"):
        rows(write(name, ""))
    with pytest.raises(DataError, match="no rows"):
        rows(write(name, "\n \n" if name[2] not in "ct" else "\n"))


@pytest.mark.parametrize(("name", "content"), [("a.csv", "a,b\n"), ("a.json", "[]"), ("a.json", '{"data": []}')])
def test_a_file_without_rows_is_refused(write, name, content):
    with pytest.raises(DataError, match="no rows"):
        rows(write(name, content))


def test_an_unknown_suffix_names_the_known_ones(write):
    with pytest.raises(DataError, match=r"unknown suffix '\.wav'; supported are \.jsonl, .*\.txt"):
        rows(write("a.wav", "x"))


def test_first_bad_json_line_is_named(write):
    path = write("a.jsonl", '{"a": 1}\n{"a": \n{"a": 2}\n[1]\noops\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2: not JSON: Expecting value \(column 7\); 2 more bad lines"):
        rows(path)


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' is there twice"),
        ('{"a": Infinity}', "Infinity is no number"),
        ('{"a": [-1e999]}', "the number -1e999 is too large"),
    ],
)
def test_json_with_two_meanings_is_rejected(write, name, row, reason):
    with pytest.raises(DataError, match=rf"{name}:2: not JSON: {reason}"):
        rows(write(name, f'{{"a": NaN}}\n{row}\n'))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"items": [{"a": 1}],\n"items": [{"a": 2}]}', ":2: not JSON: the key 'items' is there twice"),
        ('{"data": [{"a": 1}],\n"data": [{"a": 2}]}', ":2: not JSON: the key 'data' is there twice"),
        ('{"data": [{"a": 1}], "more": [{"a": 2}]}', ": the rows may be in any of 'data', 'more': write the right"),
        ('{"document": ["x", "y"], "n": [1, 2]}', r": its lists may be columns of many rows, or cells of one: write"),
    ],
)
def test_json_that_would_lose_rows_is_rejected(write, content, reason):
    with pytest.raises(DataError, match=rf"a\.json{reason}"):
        rows(write("a.json", content))


def test_lists_are_cells_of_a_row(write):
    row = {"tokens": ["x", "y"], "tags": [1, 2]}
    assert rows(write("a.json", json.dumps([row]))) == rows(write("a.jsonl", json.dumps(row))) == [(1, row)]
    path = write("a.json", json.dumps(row))
    assert [each.values for each in read_rows(identify(path, FileOptions(task="token-labels")))] == [row]


def test_nan_is_a_missing_value(write):
    assert rows(write("a.jsonl", '{"a": NaN, "b": 1e9}\n')) == [(1, {"a": None, "b": 1e9})]


def test_json_line_without_object_is_rejected(write):
    with pytest.raises(DataError, match=r"a\.jsonl:1: expected an object \{\.\.\.\}, found a list$"):
        rows(write("a.jsonl", '["x"]\n'))
    with pytest.raises(DataError, match=r"a\.json:2: expected an object \{\.\.\.\}, found a number"):
        rows(write("a.json", '[{"a": 1},\n3]'))
    with pytest.raises(DataError, match=r"a\.json: expected objects, found a string"):
        rows(write("a.json", '"x"'))


@pytest.mark.parametrize(
    ("content", "line"),
    [('[{"a": 1},\n{"a" 2}]', 2), ('[{"a": 1}\n{"a": 2}]', 2), ('[{"a": 1},\n', 2), ('{\n"a": }', 2)],
)
def test_broken_json_is_named_with_its_line(write, content, line):
    with pytest.raises(DataError, match=rf"a\.json:{line}: not JSON"):
        rows(write("a.json", content))


@pytest.mark.parametrize("content", ["[" * 100_000, '{"a": ' + "[" * 100_000, '{"a": ' + "1" * 10_000 + "}"])
@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_hostile_json_raises_data_error(write, name, content):
    with pytest.raises(DataError, match=r"not JSON"):
        rows(write(name, content))


def test_incomplete_squad_is_rejected(write):
    with pytest.raises(DataError, match=r"not SQuAD's format: data\[0\], after question 0: KeyError\('qas'\)"):
        rows(write("a.json", '{"data": [{"paragraphs": [{"context": "c"}]}]}'))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.tsv", "a.txt"])
def test_broken_utf8_is_named_with_column(write, name):
    with pytest.raises(DataError, match=rf"{name}:2: not UTF-8: byte 0xe9 at column 4\nsave it as UTF-8"):
        rows(write(name, b"a\ncaf\xe9\x81\n") if name != "a.jsonl" else write(name, b"{}\ncaf\xe9\x81\n"))


def test_csv_row_of_other_width_is_rejected(write):
    path = write("a.csv", 'a,b\n1,"x\ny"\n1,2,3\n4,5\n6\n')
    with pytest.raises(DataError, match=r"a\.csv:4: 3 cells, the header has 2; 1 more bad line"):
        rows(path)


def test_unclosed_quote_is_named_at_its_start(write):
    with pytest.raises(DataError, match=r"a\.csv:3: malformed table: unexpected end of data"):
        rows(write("a.csv", 'a,b\n1,2\n3,"x\n5,6\n'))


def test_repeated_column_name_is_rejected(write):
    with pytest.raises(DataError, match="names column 'a' twice"):
        rows(write("a.csv", "a,b,a\n1,2,3\n"))


def test_digest_covers_bytes_and_files_only(write, tmp_path):
    assert identify(write("a.txt", "abc")).sha256 == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    with pytest.raises(UsageError, match=r"no such file: .*b\.txt \(did you mean 'a\.txt'\?\)"):
        _ = identify(tmp_path / "b.txt").sha256


# Real files


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("summarization/dialogsum/val.jsonl", 500),
        ("summarization/mts-dialog/train.csv", 1201),
        ("summarization/scitldr-a/val.jsonl", 619),
        ("summarization/xsum-sample/sample.json", 10),
        ("squad/dev-v1.1.json", 10570),
        ("squad/hf-fixture-sample.json", 14),
        ("nli/mrpc-sample/dev.tsv", 6),
        ("sentiment/sst2/dev.tsv", 6735),
    ],
)
def test_real_files_have_known_rows(name, count):
    assert len(rows(real_data(name))) == count
