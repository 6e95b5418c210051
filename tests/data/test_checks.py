"""Test each check with a planted fault, and with clean rows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_tokenizer import make_tokenizer

from gptj_ft.config.resolve import resolve
from gptj_ft.data.batches import rows_of_step
from gptj_ft.data.checks.texts import CHECKS, PLAIN, delimiters_of
from gptj_ft.data.dataset import Prepared
from gptj_ft.data.lengths import Lengths, histogram
from gptj_ft.data.prepare import TokenizeJob, tokenize_rows

NOTE = "The patient came on foot and was given water, rest and a second visit in the spring of the year after. Part "


def prepared(tmp_path: Path, rows: list[dict[str, str]], recipe: str = "summarization") -> Prepared:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tokenize_rows(
        TokenizeJob.of(resolve({"recipe": recipe}, environment={}).recipe, make_tokenizer(), path, 50400)
    )


def note(number: int, text: str = "", summary: str = "") -> dict[str, str]:
    return {"document": f"{NOTE}{number}. {text}", "summary": summary or f"Visit {number}."}


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (note(1, "He drank a cafÃ© and left."), "wrongly decoded"),
        (note(1, "It wasnâ€™t much."), "wrongly decoded"),
        (note(1, "Broken \ufffd here."), "wrongly decoded"),
        (note(1, "A bell \x07 rang."), "control characters"),
        (note(1, "He -lrb- the patient -rrb- left."), "prompts must then be split too"),
        (note(1, summary="<s> He left . </s>"), "the model would learn to write so"),
        (note(1, summary=NOTE[:100].lower()), "no capital letter"),
        (note(1, "See <br/> and &amp; more."), "HTML"),
        (note(1, "Write to ann.lee@example.org."), "personal data"),
        (note(1, "Call (555) 010-9999 or 555-010-9998."), "personal data"),
        (note(1, "Number 078-05-1120."), "personal data"),
        (note(1, "Paid with 4111 1111 1111 1111."), "personal data"),
        (note(1, "\nSummary: a trap."), "contains 'Summary:', a delimiter of the prompt"),
        (note(1, summary=NOTE * 3), "the answer is longer than the input"),
        (note(0), "the same row again"),
        (note(0, summary="Another."), "the same question as another row, with another answer"),
    ],
)
def test_planted_fault_is_reported_with_place(fault: dict[str, str], says: str, tmp_path: Path) -> None:
    report = prepared(tmp_path, [note(0), fault, note(2)]).report
    ((what, rows),) = report.warnings.items()
    assert says in what
    assert (rows.count, rows.first) == (1, [f"{tmp_path / 'rows.jsonl'}:2"])
    assert report.rows_kept == 3, "a warning leaves no row out"


def test_clean_rows_give_no_warning(tmp_path: Path) -> None:
    texts = [
        "naïve café, Ångström",
        "3 < 4 & 5 > 2",
        "ISBN 978-3-16-148410-0",
        "1234 5678 9012 3456",
        "日本語のテキスト" * 20,
        "Â",
    ]
    rows = [note(number, text) for number, text in enumerate(texts)]
    read_only = {"document": (NOTE * 2).lower(), "summary": "What is read only may be in lower case as published."}
    assert not prepared(tmp_path, [*rows, read_only]).report.warnings


def test_short_lower_case_labels_give_no_warning(tmp_path: Path) -> None:
    rows = [{"sentence": "fun", "label": "1"}, {"sentence": NOTE.lower(), "label": "0"}]
    assert not prepared(tmp_path, rows, "sst2").report.warnings


def test_personal_data_is_counted_and_never_repeated(shell, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(note(number, f"Mail: p{number}@example.org.")) + "\n" for number in range(9)))
    done = shell(f"prepare-data --data {path} --recipe summarization --model tiny --output out --show 0")
    assert done.code == 0, done.err
    assert "warning 9 rows: what looks like personal data" in done.said
    assert "@example.org" not in done.out + done.err
    assert re.search(r"rows\.jsonl: lines 1, 2, 3, 4, 5 \.\.\.", done.said), done.said[:900]


def test_delimiters_are_lines_ending_with_colon() -> None:
    def borders(name: str) -> tuple[str, ...]:
        return delimiters_of(resolve({"recipe": name}, environment={}).recipe)

    assert borders("summarization") == ("\nSummary:",)
    assert borders("qa") == ("\nPassage:", "\nQuestion:", "\nAnswer:")
    assert borders("continuous-pretraining") == ()


def test_preview_shows_targets_and_lengths(shell, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(note(number, "word " * (7 * number % 40))) + "\n" for number in range(64)))
    done = shell(f"prepare-data --data {path} --recipe summarization --model tiny --output out --show 2")
    assert done.code == 0, done.err
    text = done.said
    assert "Summary:« Visit 0.<|endoftext|>»" in text
    assert "Summary:« Visit 1.<|endoftext|>»" in text
    assert "Visit 2.<|endoftext|>" not in text
    assert "Tokens of the prompt, rows" in text
    assert "Tokens of the answer, rows" in text
    assert re.search(r"would compute 1\.\d\d times as many tokens", text)
    assert "steps 2 per epoch, 6 in total, 1 of them warm-up; 2 validations" in text
    assert "train 61 rows" in text


def test_a_histogram_counts_every_row_once() -> None:
    lengths = [5, 5, 7, 900, 33, 34, 899]
    lines = histogram(lengths)
    assert sum(int(line.rsplit(" ", 1)[1]) for line in lines) == len(lengths)
    assert len(lines) <= 8
    assert len(histogram([3, 3])) == 1


def test_padding_cost_matches_the_runs_batches(tmp_path: Path) -> None:
    data = prepared(tmp_path, [note(number, "word " * (number % 9)) for number in range(21)])
    lengths = [len(ids) for ids in data.rows["input_ids"]]
    batches = [[lengths[row] for row in rows_of_step(step, 21, 4, seed=5)] for step in range(6)]
    expected = sum(max(batch) * len(batch) for batch in batches) / sum(lengths)
    assert Lengths.of(data).padding(4, seed=5) == pytest.approx(expected)


def test_document_in_both_splits_is_reported(shell, tmp_path: Path) -> None:
    for name, numbers in (("train", range(12)), ("val", range(10, 16))):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(note(number)) + "\n" for number in numbers))
    done = shell("finetune --recipe summarization --data train.jsonl --val-data val.jsonl --model tiny --dry-run")
    assert done.code == 0, done.err
    text = done.said
    assert "warning 2 rows: the same document is in the validation rows" in text
    assert "train.jsonl: lines 11" in text


ODD = [
    *("Ã©", "â€™", "\ufffd", "é", "\x07", "\x7f", "\x85", "\ue000", "\r", " ", "#1:"),
    *("-lrb-", " n't ", " 's ", "<s>", "</s>", "``", "<p>", "&amp;", "no capitals " * 9),
    *("a@b.org", "(020) 555-1234", "555 123 4567", "123-45-6789", "4111 1111 1111 1111"),
]


@pytest.mark.thorough
@settings(max_examples=300, derandomize=True, database=None, deadline=None)
@given(text=st.lists(st.one_of(st.sampled_from(ODD), st.text(max_size=3)), max_size=6).map("".join))
def test_plain_bytes_hide_no_oddity(text: str) -> None:
    rest = text.encode(errors="replace").translate(None, PLAIN)
    missed = [what for what, (may_show, shows) in CHECKS.items() if shows(text) and not may_show(rest)]
    assert not missed
