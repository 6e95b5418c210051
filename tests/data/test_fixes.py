"""Test which texts `prepare-data --fix` repairs, drops or leaves unchanged, and that every row is accounted for."""

from __future__ import annotations

import csv
import errno
import gzip
import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.os_calls import wrap_calls

from gptj_ft.config.resolve import resolve
from gptj_ft.data.checks.repair import FIXES, RepairReport, choose_target, fix_rows, fix_texts
from gptj_ft.data.checks.texts import CONTROL, TAG
from gptj_ft.data.readers.records import read_rows
from gptj_ft.data.readers.source import identify
from gptj_ft.errors import DataError, UsageError

RECIPE = resolve({"recipe": "summarization"}, environment={}).recipe
TYPED = "prepare-data --recipe summarization --model tiny --show 0"
# What the fixes look for, whole and in pieces that may come together when something between them goes.
PIECES = [
    *("Ã©", "â€™", "â€", "Ã", "Â", "\xa0", "©", "€", "™", "ƒ", "Ð", "Ÿ", "ï»¿", "\ufffd", "é", "日", "”", "\x83"),
    *("\x07", "\x85", "\x92", "\ue000", "\ud800", "\r", "\n", "\r\n", "<p>", "</p>", "<br/>", "<td>", "<", "b", ">"),
    *("&amp;", "&", "amp;", "lt;", "#60;", "&#0;", "&#x92;", "&#13;", "-lrb-", "-RRB-", "-", "lrb-", "``", "'", "''"),
    *(" n't", " 's ", " ", "  ", "\t", "<s>", "</s>", "s", ".", ",", "(", ")", "$", "5", "a", "Z", "a word. "),
]
texts = st.lists(st.sampled_from(PIECES), max_size=24).map("".join) | st.text(max_size=20)


def fixed(text: str) -> str:
    return fix_texts([text])[0].text


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def fix(
    source: Path, target: Path | None = None, recipe: str = "summarization"
) -> tuple[RepairReport, list[dict[str, Any]]]:
    """Fix a file; return the report and the rows of the new one."""
    target = target or choose_target(source, None)
    report = fix_rows(resolve({"recipe": recipe}, environment={}).recipe, identify(source), target)
    return report, [json.loads(line) for line in target.read_text(encoding="utf-8").split("\n")[:-1]]


# A text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("He drank a cafÃ© and left.", "He drank a café and left."),
        ("It wasnâ€™t much, â€œhe saidâ€\x9d.", "It wasn’t much, “he said”."),
        ("naïve café; cafÃ© — it’s wonâ€™t", "naïve café; café — it’s won’t"),
        ("Ã–sterreich, StraÃŸe", "Österreich, Straße"),
        ("Ã©à€€ cafÃ©", "Ã©à€€ café"),
        ("“MENÜ“ cafÃ© “AMANHÔ", "“MENÜ“ café “AMANHÔ"),
        ("voilÃ\xa0 ÃƒÂ©tÃ©", "voilà été"),
        ("ÐŸÑ€Ð¸Ð²ÐµÑ‚ ä½\xa0å¥½ ðŸ˜€", "Привет 你好 😀"),
        ("ï»¿Start \ufffd cafÃ©", "Start \ufffd café"),
        ("A bell \x07 rang.\x00\tIt\x92s late.\n", "A bell  rang.\tIt’s late.\n"),
        ("one\r\ntwo\rthree\n", "one\ntwo\nthree\n"),
        ("<p>One.</p>\n<p>Two <b>bold</b> <a href='x'>link</a>.<br>Three</p>", "One.\n\nTwo bold link.\nThree"),
        ("<ul><li>a</li><li>b</li></ul><table><tr><td>c</td><td>d</td></tr></table>", "a\nb\nc d"),
        ("Tom &amp; Ann&#8217;s &lt; 5&nbsp;kg &#x2014;", "Tom & Ann’s < 5 kg —"),
        ("&amp;amp; twice", "& twice"),
        ("He -lrb- the man -rrb- did n't go , `` no '' he said .", 'He (the man) didn\'t go, "no" he said.'),
        ("<s> it 's $ 5 ... </s> <s> fine ! </s>\n<s> well . </s>", "it's $5... fine!\nwell."),
    ],
)
def test_text_is_repaired(before: str, after: str) -> None:
    assert fixed(before) == after


@pytest.mark.parametrize(
    "text",
    [
        "naïve café, Ångström, “AMANHÔ, MANHÔ… «MAÇû MENÜ“ NÃO Â É”…",
        "i<a and b>c, 3 < 4 & 5 > 2, R&D; <stdio.h> &c.",
        "the dogs ' tails , one token 's mark and no more",
        "日本語のテキスト\tП р и в е т\n",
        "It was there &#0; in -lrb- once.",
    ],
)
def test_similar_text_is_not_repaired(text: str) -> None:
    assert fix_texts([text])[0].text == text
    assert fix_texts([text])[0].fixes == ()


def test_texts_of_a_row_are_joined_together() -> None:
    answer, passage = fix_texts(["did n't go", "<s> He did n't go to -lrb- X -rrb- . </s>"])
    assert answer.text == "didn't go"
    assert answer.text in passage.text


@settings(deadline=None, max_examples=200)
@given(st.lists(texts, min_size=1, max_size=3))
def test_repair_is_idempotent(row: list[str]) -> None:
    once = [each.text for each in fix_texts(row)]
    again = fix_texts(once)
    assert [each.text for each in again] == once
    assert all(not each.fixes for each in again)
    for text in once:
        assert not CONTROL.search(text)
        assert not TAG.search(text)
        assert "\r" not in text


WINDOWS = {chr(byte): bytes([byte]).decode("cp1252", errors="ignore") or chr(byte) for byte in range(0x80, 0xA0)}
WORDS = [
    "été",
    "là",
    "Öl",
    "Straße",
    "it’s",
    "“so”",
    "€5",
    "Привет",
    "你好",
    "😀",
    "plain",
    "£3",
    "naïve",
    "—",
    "½",
    "\n",
]


def decode_wrongly(text: str) -> str:
    return "".join(WINDOWS.get(letter, letter) for letter in text.encode(errors="replace").decode("latin-1"))


@settings(deadline=None, max_examples=200)
@given(st.lists(st.sampled_from(WORDS), max_size=8).map(" ".join), st.lists(st.sampled_from(WORDS)).map(" ".join))
def test_mojibake_is_repaired_beside_correct_text(wrong: str, right: str) -> None:
    for text in (wrong, wrong.upper()):
        assert fixed(f"{decode_wrongly(text)} {right}") == f"{text} {right}"
        assert fixed(decode_wrongly(decode_wrongly(text))) == text


@settings(deadline=None, max_examples=150)
@given(texts)
@example("\xe2\u20ac\xc2\u20ac\xc3\xa9")
def test_only_reversible_letters_are_decoded_again(text: str) -> None:
    before = "".join(WINDOWS.get(letter, letter) for letter in text.replace("ï»¿", ""))

    def ends(letter: str, starts: set[int], depth: int = 4) -> set[int]:
        """Draw the last letter of a word, or a misdecoded form that may continue in the next word."""
        shown = WINDOWS.get(letter, letter)
        found = {start + 1 for start in starts if before[start : start + 1] == shown}
        # A control letter is shown as another letter, and either may have been decoded wrongly once more.
        for form in {letter, shown} if starts and depth else ():
            if not form.isascii():
                inner = starts
                for piece in form.encode(errors="replace").decode("latin-1"):
                    inner = ends(piece, inner, depth - 1)
                found |= inner
        return found

    position = {0}
    for letter in FIXES["wrongly decoded letters"][1](text):
        position = ends(letter, position)
    assert len(before) in position


# A file


def test_only_recipe_columns_are_repaired(tmp_path: Path) -> None:
    row = {
        "id": 7,
        "other": "cafÃ©",
        "note": "cafÃ©\x07",
        "deep": {"a": [1, None, "\x07"]},
        "summary": "<b>x</b>",
        "f": 0.5,
    }
    _, (written,) = fix(write_rows(tmp_path / "rows.jsonl", [row]))
    assert written == {**row, "note": "café", "summary": "x"}
    assert list(written) == list(row)


def test_nested_texts_are_repaired_in_place(tmp_path: Path) -> None:
    row = {"context": "cafÃ© here", "question": "Where?", "answers": {"text": ["cafÃ©"], "answer_start": [0]}}
    _, (written,) = fix(write_rows(tmp_path / "rows.jsonl", [row]), recipe="qa")
    assert written == {"context": "café here", "question": "Where?", "answers": {"text": ["café"], "answer_start": [0]}}


def test_lists_of_treebank_tokens_become_sentences(tmp_path: Path) -> None:
    words = {"src": [["It", "is", "n't", "-lrb-", "1", "-rrb-", "."], ["Ok", "."]], "tgt": [["No", "."]]}
    _, lines = fix(write_rows(tmp_path / "words.jsonl", [words]), recipe="cnn-dailymail")
    assert lines == [{"src": ["It isn't (1).", "Ok."], "tgt": ["No."]}]
    plain = {"src": [["It", "is", "."]], "tgt": [["No", "."]]}
    assert fix(write_rows(tmp_path / "plain.jsonl", [plain]), recipe="cnn-dailymail")[1] == [plain]


def test_diff_lists_dropped_and_changed_rows(tmp_path: Path) -> None:
    rows = [
        {"note": "One.", "summary": "1"},
        {"note": "Two\x07.", "summary": "2"},
        "{broken",
        {"note": " \x07", "summary": "3"},
        {"note": "Four.", "summary": None},
        {"note": "One.", "summary": "1 ", "id": "another"},
        "[1]",
        {"note": "Five, a cafÃ©.", "summary": "5"},
    ]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    report, written = fix(source)
    assert [row["note"] for row in written] == ["One.", "Two.", "Five, a café."]
    assert (report.rows_read, report.rows_written, report.rows_changed) == (8, 3, 2)
    assert {reason: (found.count, found.first) for reason, found in report.rows_dropped.items()} == {
        "cannot be read": (2, [f"{source}:3", f"{source}:7"]),
        "a field is empty": (2, [f"{source}:4", f"{source}:5"]),
        "the same row again": (1, [f"{source}:6"]),
    }
    assert {fix: cells for fix, cells in report.cells.items() if cells} == {
        "control characters": 1,
        "wrongly decoded letters": 1,
    }
    assert Path(report.diff).read_text().split("\n") == [
        f"--- {source}",
        f"+++ {report.file}",
        f"@@ {source}:2, now line 2, column 'note': control characters @@",
        r"-Two\x07.",
        "+Two.",
        f"@@ {source}:3 dropped: cannot be read: not JSON: Expecting property name enclosed in double quotes "
        "(column 2) @@",
        f"@@ {source}:4 dropped: a field is empty: column 'note' @@",
        f"@@ {source}:5 dropped: a field is empty: column 'summary' @@",
        f"@@ {source}:6 dropped: the same row again: as {source}:1 @@",
        f"@@ {source}:7 dropped: cannot be read: expected an object {{...}}, found a list @@",
        f"@@ {source}:8, now line 3, column 'note': wrongly decoded letters @@",
        "-Five, a cafÃ©.",
        "+Five, a café.",
        "",
    ]


def test_diff_of_long_line_shows_the_change(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", [{"note": "a" * 5000 + " cafÃ© " + "b" * 5000, "summary": "x"}])
    report, _ = fix(source)
    *_, removed, added, _ = Path(report.diff).read_text().split("\n")
    assert removed.startswith("-…aaa")
    assert removed.endswith("bbb…")
    assert "cafÃ©" in removed
    assert "café" in added
    assert len(added) < 150


def test_ambiguous_text_is_left_unchanged(tmp_path: Path) -> None:
    rows = [
        {"note": "Where is it?", "summary": "Here."},
        {"note": "Where is it?", "summary": "There, which is an answer longer than its document."},
        {"note": "Write to ann.lee@example.org, 4111 1111 1111 1111.", "summary": "Mail."},
        {"note": "no capital letter in a text of some length, from the beginning to its very end", "summary": "low"},
        {"note": {"an": "object"}, "summary": "y"},
    ]
    report, written = fix(write_rows(tmp_path / "rows.jsonl", rows))
    assert written == rows
    assert (report.rows_changed, report.rows_dropped) == (0, {})
    labels = [{"sentence": "Good.", "label": label} for label in ("positive", "splendid", "7")]
    _, written = fix(write_rows(tmp_path / "labels.jsonl", labels), recipe="sentiment")
    assert written == labels


def test_duplicate_is_found_wherever_it_stands(tmp_path: Path) -> None:
    row = json.dumps({"note": "a", "summary": "b"})
    (tmp_path / "rows.json").write_text(f"[\n{row}, {row},\n{row}]\n")
    report, written = fix(tmp_path / "rows.json")
    assert len(written) == 1
    assert report.rows_dropped["the same row again"].count == 2


def test_rows_with_other_references_are_distinct(tmp_path: Path) -> None:
    rows = [{"context": "c", "question": "q", "answers": {"text": answers}} for answers in (["a"], ["a", "b"], ["a"])]
    _, written = fix(write_rows(tmp_path / "rows.jsonl", rows), recipe="qa")
    assert written == rows[:2]


ASKED, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("recipe", "options", "rows"),
    [
        ("pairs", {}, [{"text1": "a b", "text2": text, "label": "l"} for text in "xy"]),
        ("squad-bert", {}, [{"question": "q", "context": f"{x} z", "answers": {"text": ["z"]}} for x in "ab"]),
        ("squad2-bert", {}, [{"question": "q", "context": x, "answers": {"text": []}} for x in "ab"]),
        (
            "token-labels",
            {},
            [{"tokens": ["a", "b", "c"], "tags": tags} for tags in (["X", "O", "O"], ["X", "X", "O"])],
        ),
        ("token-labels", {}, [{"tokens": words, "tags": ["X", "O"]} for words in (["a b", "c"], ["a", "b c"])]),
        ("multi-label", {}, [{"text": "a", "labels": labels} for labels in (["x"], ["x", "y"], [])]),
        (
            "multi-label",
            {"map": {"label": "x+y"}},
            [{"text": "a", "x": x, "y": y} for x, y in ((0, 1), (0, 0), (1, 0), (1, 1))],
        ),
        ("chat", {"chat_template": "x"}, [{"messages": [ASKED, {**ANSWER, "thinking": thought}]} for thought in "ab"]),
        ("chat", {"chat_template": "x"}, [{"messages": [ASKED, ANSWER], "tools": tools} for tools in ([], [{"a": 1}])]),
    ],
)
def test_rows_that_train_otherwise_are_distinct(recipe: str, options: Any, rows: list[Any], tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", [*rows, *rows])
    resolved = resolve({"recipe": recipe, **options}, environment={})
    report = fix_rows(resolved.recipe, identify(source), tmp_path / "fixed.jsonl")
    assert [row.values for row in read_rows(identify(tmp_path / "fixed.jsonl"))] == rows
    assert report.rows_dropped["the same row again"].count == len(rows)


def test_row_without_label_is_dropped(tmp_path: Path) -> None:
    for recipe, label in (("pairs", ""), ("multi-label", None), ("regression", None), ("squad-bert", {"text": []})):
        row = {"text": "a", "text1": "a", "text2": "b", "question": "q", "context": "c", "label": "1", "answers": "c"}
        source = write_rows(tmp_path / f"{recipe}.jsonl", [row, {**row, "label": label, "answers": label}])
        report, written = fix(source, recipe=recipe)
        assert (written, list(report.rows_dropped)) == ([row], ["a field is empty"])


cells = texts | st.none() | st.integers() | st.lists(texts, max_size=2) | st.dictionaries(texts, texts, max_size=1)
rows = st.fixed_dictionaries({"note": cells, "summary": texts}, optional={"id": st.floats(), "other": cells})
lines = st.lists(rows | st.sampled_from(["{broken", "[1]", "", "7"]), max_size=8)


@pytest.mark.thorough
@settings(deadline=None, max_examples=150)
@given(lines)
def test_fixing_is_complete_and_idempotent(tmp_path_factory: Any, lines: list[Any]) -> None:
    folder = tmp_path_factory.mktemp("fix")
    source = write_rows(folder / "rows.jsonl", [{"note": "Good.", "summary": "fine", "id": 1}, *lines])
    report, written = fix(source)
    assert report.rows_read == sum(line != "" for line in lines) + 1
    assert report.rows_read == report.rows_written + sum(found.count for found in report.rows_dropped.values())
    assert report.rows_written == len(written)
    again, same = fix(Path(report.file), folder / "again.jsonl")
    assert (folder / "again.jsonl").read_bytes() == Path(report.file).read_bytes()
    assert (again.rows_changed, again.rows_dropped, same) == (0, {}, written)


def in_every_format(folder: Path, rows: list[dict[str, Any]]) -> dict[str, Path]:
    import datasets
    import pyarrow
    from pyarrow import parquet

    for name, delimiter in (("a.csv", ","), ("a.tsv", "\t")):
        with (folder / name).open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, delimiter=delimiter, quoting=csv.QUOTE_MINIMAL).writerows(
                [list(rows[0]), *(row.values() for row in rows)]
            )
    (folder / "a.json").write_text(json.dumps(rows))
    (folder / "a.jsonl.gz").write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "a.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(str(folder / "saved"))
    (folder / "many").mkdir()
    for name, part in (("1.jsonl", rows[:1]), ("2.json", rows[1:])):
        (folder / "many" / name).write_text(json.dumps(part[0]) + "\n" if name == "1.jsonl" else json.dumps(part))
    names = ["a.csv", "a.tsv", "a.json", "a.jsonl.gz", "a.parquet", "saved", "many"]
    return {name: folder / name for name in names}


def test_rows_are_equal_in_every_format(tmp_path: Path) -> None:
    rows = [{"id": str(n), "note": f"A cafÃ© in room {n}.", "summary": f"Room {n}."} for n in range(3)]
    for name, source in in_every_format(tmp_path, rows).items():
        target = tmp_path / f"{name}.new.jsonl"
        _, written = fix(source, target)
        assert written == [{**row, "note": row["note"].replace("Ã©", "é")} for row in rows], name
        assert [row.values for row in read_rows(identify(target))] == written


def test_squad_and_plain_text_become_rows(tmp_path: Path) -> None:
    question = {"id": "1", "question": "Where?", "answers": [{"text": "a cafÃ©", "answer_start": 3}]}
    squad = tmp_path / "squad.json"
    squad.write_text(
        json.dumps({"data": [{"title": "t", "paragraphs": [{"context": "In a cafÃ©.", "qas": [question]}]}]})
    )
    _, (written,) = fix(squad, recipe="qa")
    assert (written["context"], written["answers"]["text"], written["title"]) == ("In a café.", ["a café"], "t")
    (tmp_path / "a.txt").write_text("One cafÃ©.\nmore\n\nTwo.\n\nTwo.\n")
    _, written = fix(tmp_path / "a.txt", recipe="continuous-pretraining")
    assert written == [{"text": "One café.\nmore"}, {"text": "Two."}]


def test_cells_beyond_json_are_written(tmp_path: Path) -> None:
    import datetime

    import pyarrow
    from pyarrow import parquet

    row = {"note": "a", "summary": "b", "day": datetime.date(2021, 3, 4), "raw": b"\x00\xff", "no": float("nan")}
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "a.parquet")
    _, (written,) = fix(tmp_path / "a.parquet")
    assert written == {"note": "a", "summary": "b", "day": "2021-03-04", "raw": "AP8=", "no": None}


@pytest.mark.thorough
def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    with source.open("w") as file:
        for number in range(100):
            file.write(json.dumps({"note": f"{number} cafÃ© " + "word " * 10_000, "summary": "x"}) + "\n")
    tracemalloc.start()
    fix_rows(RECIPE, identify(source), tmp_path / "new.jsonl")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert source.stat().st_size > 5_000_000
    assert peak < 2_000_000


# Refused, and interrupted


def test_nothing_is_overwritten(tmp_path: Path, shell: Any) -> None:
    source = write_rows(tmp_path / "rows.jsonl", [{"note": "a", "summary": "b"}])
    for name in ("rows.fixed.jsonl", "rows.fixed.diff"):
        (tmp_path / name).write_text("mine")
        done = shell(f"{TYPED} --fix --data {source}")
        assert (done.code, name in done.err) == (2, True)
        assert (tmp_path / name).read_text() == "mine"
        (tmp_path / name).unlink()
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["rows.jsonl"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--fixed new.jsonl", "--fixed needs --fix"),
        ("--fix --fixed new.csv", "its name must end with .jsonl"),
        ("--fix --data 'rows*.jsonl'", "name the new file with --fixed"),
        ("--fix --data folder --fixed folder/new.jsonl", "rows twice"),
        ("--fix --data absent.jsonl", "no such file"),
        ("--fix --fixed no/such/folder/new.jsonl", "new.jsonl: No such file or directory"),
    ],
)
def test_wrong_use_is_rejected_without_writing(options: str, says: str, tmp_path: Path, shell: Any) -> None:
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "rows.jsonl", tmp_path / "folder" / "a.jsonl"):
        write_rows(path, [{"note": "a", "summary": "b"}])
    data = "" if "--data" in options else "--data rows.jsonl"
    done = shell(f"{TYPED} {data} {options}")
    assert done.code == 2
    assert says in done.err
    left = {path.name for path in tmp_path.rglob("*") if path.is_file() and "home" not in path.parts}
    assert left == {"rows.jsonl", "a.jsonl"}


def test_missing_model_is_reported_before_writing(tmp_path: Path, shell: Any) -> None:
    source = write_rows(tmp_path / "rows.jsonl", [{"note": "a", "summary": "b"}])
    done = shell(f"prepare-data --recipe summarization --model absent --fix --data {source}")
    assert done.code == 2
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["rows.jsonl"]


@pytest.mark.parametrize("call", [1, 2])
def test_a_full_disk_leaves_nothing(call: int, tmp_path: Path, shell: Any, fill_disk: Callable[..., None]) -> None:
    source = write_rows(tmp_path / "rows.jsonl", [{"note": "a", "summary": "b"}])
    fill_disk(after=call - 1)
    done = shell(f"{TYPED} --fix --data {source}")
    assert done.code == 4
    assert "no space left on the disk while writing" in done.err
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["rows.jsonl"]


def test_failed_second_name_undoes_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_rows(tmp_path / "rows.jsonl", [{"note": "a", "summary": "b"}])

    def failing(call: Callable[[Path, Path], None]) -> Callable[[Path, Path], None]:
        def name(path: Path, target: Path) -> None:
            if target.suffix == ".jsonl":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            call(path, target)

        return name

    wrap_calls(monkeypatch, ["link", "rename"], failing)
    with pytest.raises(UsageError, match="cannot write"):
        fix(source)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_file_without_remaining_rows_is_rejected(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", [{"note": "a", "summary": " "}, "{broken"])
    with pytest.raises(DataError, match=r"none of the 2 rows is left: a field is empty \(1\), cannot be read \(1\)"):
        fix(source)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


# As typed


def test_prepare_data_continues_with_fixed_file(tmp_path: Path, shell: Any) -> None:
    note = {"note": "The cafÃ© of the <b>first</b> floor is closed.", "summary": "Closed."}
    lines = [note, "{broken", "[]", note, {"note": "Open.\r\n", "summary": "Open."}]
    source = write_rows(tmp_path / "rows.jsonl", lines)
    refused = shell(f"{TYPED} --data {source} --output refused")
    assert refused.code == 3
    warned = shell(f"{TYPED} --data {source} --output warned --max-bad-rows 2")
    text = warned.said
    for offer in ("repairs what can be", "HTML tags or entities; `prepare-data --fix` repairs", "--fix` drops it"):
        assert offer in text
    done = shell(f"{TYPED} --data {source} --fix")
    assert done.code == 0, done.err
    text = done.said
    assert f"file {tmp_path}/rows.fixed.jsonl rows 5 read = 2 written + 3 dropped; 2 changed" in text
    assert "fixed 1 cell: wrongly decoded letters fixed 1 cell: carriage returns fixed 1 cell: HTML" in text
    assert "dropped 2 rows: cannot be read (rows.jsonl: lines 2, 3)" in text
    assert "Fixed file, described below" in text
    assert f"file {tmp_path}/rows.fixed.jsonl rows 2 read = 2 kept + 0 skipped" in text
    assert "warning" not in text
    assert (tmp_path / "rows.fixed.jsonl.prepared").is_dir()
    assert "caf" not in text, "nothing of the texts is printed"


def test_the_counts_are_in_the_json(tmp_path: Path, shell: Any) -> None:
    source = write_rows(tmp_path / "rows.jsonl", [{"note": "a\x07", "summary": "b"}, {"note": "", "summary": "b"}])
    done = shell(f"{TYPED} --data {source} --fix --fixed {tmp_path / 'new.jsonl'} --json")
    assert done.code == 0, done.err
    fixes = done.json["fixes"]
    assert (fixes["file"], fixes["diff"]) == (str(tmp_path / "new.jsonl"), str(tmp_path / "new.diff"))
    assert (fixes["rows_read"], fixes["rows_written"], fixes["cells"]["control characters"]) == (2, 1, 1)
    assert fixes["rows_dropped"] == {"a field is empty": {"count": 1, "first": [f"{source}:2"]}}
    assert done.json["files"] == [str(tmp_path / "new.jsonl")]
    assert done.json["rows_read"] == 1
