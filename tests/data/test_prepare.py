import csv
import dataclasses
import gc
import json
import os
from collections import Counter
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet
from support.tiny_tokenizer import make_tokenizer

from gptj_ft.config.resolve import resolve
from gptj_ft.data.dataset import VERSION, Prepared, Report, check_compatible, load_dataset, save_dataset
from gptj_ft.data.encoder import RowEncoder
from gptj_ft.data.prepare import TokenizeJob, tokenize_rows
from gptj_ft.data.readers.source import is_prepared
from gptj_ft.data.split import select_rows, split
from gptj_ft.errors import DataError, ResourceError, UsageError
from gptj_ft.system.paths import home

VOCAB = 400
WORDS = "the patient came from the village with a cough and was given water "


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def recipe(name="summarization", **options):
    return resolve({"recipe": name, **options}, environment={}).recipe


def json_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def notes(tmp_path):
    return json_lines(tmp_path / "notes.jsonl", [{"note": f"{WORDS}{i}", "summary": f"cough {i}"} for i in range(20)])


@pytest.fixture
def prepared(tokenizer, notes):
    return tokenize_rows(TokenizeJob.of(recipe(), tokenizer, notes, VOCAB))


# Rows


@pytest.mark.parametrize("folder", [False, True])
def test_file_name_may_be_latin_1(folder, tokenizer, tmp_path):
    """A name in another encoding becomes text in reports and tables, and opens the file nevertheless."""
    path = tmp_path / os.fsdecode(b"M\xfcller.jsonl")
    path.write_text('{"note": "The river", "summary": "cough"}\n{"note": "a"}\noops\n', encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"note": "The lift", "summary": "cough"}\n', encoding="utf-8")
    source = tmp_path if folder else path
    done = tokenize_rows(TokenizeJob.of(recipe(max_bad_rows=1), tokenizer, source, VOCAB))
    assert done.rows["source"][0] == f"{tmp_path}/M\\xfcller.jsonl"
    save_dataset(done, tmp_path / "saved")
    assert list(load_dataset(tmp_path / "saved").rows) == list(done.rows)


def test_rows_carry_tokens_references_and_origin(tokenizer, notes, prepared):
    row = list(prepared.rows)[3]
    assert row["source"] == str(notes)
    assert row["line"] == 4
    assert row["references"] == ["cough 3"]
    assert tokenizer.decode(row["input_ids"][: row["prompt_length"]]).endswith(f"{WORDS}3\n\nSummary:")
    assert tokenizer.decode(row["input_ids"][row["prompt_length"] :]) == " cough 3<|endoftext|>"


def test_every_row_ends_with_eos(tokenizer, prepared):
    for ids in prepared.rows["input_ids"]:
        assert ids[-1] == tokenizer.eos_token_id
        assert Counter(ids)[tokenizer.eos_token_id] == 1


def test_lost_rows_of_a_table_are_an_error(tokenizer, notes, monkeypatch):
    finish = RowEncoder.finish
    monkeypatch.setattr(RowEncoder, "finish", lambda *args: finish(*args).select(range(19)))
    with pytest.raises(DataError, match=r"notes\.jsonl: only 20 of 20 rows and 19 of 20 documents were written"):
        tokenize_rows(TokenizeJob.of(recipe(), tokenizer, notes, VOCAB))


def test_report_counts_add_up(tokenizer, tmp_path):
    rows = [
        {"note": WORDS, "summary": "cough"},
        {"note": WORDS * 30, "summary": "cough"},
        {"note": None, "summary": "cough"},
        {"summary": "cough"},
        {"note": "  ", "summary": "cough"},
        {"note": WORDS, "summary": ""},
        {"note": WORDS, "summary": WORDS * 30},
        {"note": {"a": 1}, "summary": "cough"},
    ]
    path = json_lines(tmp_path / "a.jsonl", rows)
    seen = []
    done = tokenize_rows(TokenizeJob.of(recipe(max_length=100), tokenizer, path, VOCAB), progress=seen.append)
    report = done.report
    assert (report.rows_read, report.rows_kept, report.rows_cut, report.windows) == (8, 2, 1, 2)
    assert {reason: (skips.count, skips.first) for reason, skips in report.rows_skipped.items()} == {
        "no value for column 'note'": (2, [f"{path}:3", f"{path}:4"]),
        "the field 'document' is empty": (1, [f"{path}:5"]),
        "the completion is empty": (1, [f"{path}:6"]),
        "too long: no room for any part of 'document'": (1, [f"{path}:7"]),
        "column 'note': an object where text is expected": (1, [f"{path}:8"]),
    }
    assert report.tokens == sum(map(len, done.rows["input_ids"]))
    assert report.longest == max(map(len, done.rows["input_ids"])) <= 100
    lengths = zip(done.rows["input_ids"], done.rows["prompt_length"], strict=True)
    assert report.target_tokens == sum(len(ids) - prompt for ids, prompt in lengths)
    assert report.columns == {"document": "note", "summary": "summary"}
    assert list(done.rows["line"]) == [1, 2]
    assert seen == [8]


def test_inconsistent_report_is_impossible(prepared):
    with pytest.raises(AssertionError):
        dataclasses.replace(prepared.report, rows_read=21)


def test_chunks_neither_lose_nor_mix_rows(tokenizer, notes, prepared):
    seen = []
    small = tokenize_rows(TokenizeJob.of(recipe(), tokenizer, notes, VOCAB), seen.append, chunk_rows=3)
    assert list(small.rows) == list(prepared.rows)
    assert small.report == prepared.report
    assert seen == [3, 6, 9, 12, 15, 18, 20]


def test_one_row_is_enough(tokenizer, tmp_path):
    done = tokenize_rows(
        TokenizeJob.of(recipe(), tokenizer, json_lines(tmp_path / "a.jsonl", [{"note": "x", "summary": "y"}]), VOCAB)
    )
    assert (len(done.rows), done.report.rows_kept) == (1, 1)
    assert split(done, 0.5, seed=0) == (done, None)


def test_split_windows_train_every_token_once(tokenizer, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("\n\n".join(WORDS * n for n in (1, 9, 4)))
    done = tokenize_rows(TokenizeJob.of(recipe("continuous-pretraining", max_length=16), tokenizer, path, VOCAB))
    trained = [token for ids in done.rows["input_ids"] for token in ids[1:]]
    texts = [[*tokenizer((WORDS * n).rstrip("\n"))["input_ids"], tokenizer.eos_token_id] for n in (1, 9, 4)]
    assert trained == [token for ids in texts for token in ids[1:]]
    assert done.report.target_tokens == len(trained)
    assert (done.report.rows_read, done.report.rows_kept) == (3, 3)
    assert done.report.windows == len(done.rows) > 3
    assert set(done.rows["prompt_length"]) == {0}
    assert all(references == [] for references in done.rows["references"])


def test_labels_of_transformers_are_targets(tokenizer, tmp_path):
    padded = {"input_ids": [0, 5, 6, 7, 8, 0, 0], "attention_mask": [0, 1, 1, 1, 1, 0, 0], "text": "words"}
    labels = [-100, -100, -100, 7, 8, -100, 0]
    bad = [[-100] * 7, [-100] * 6, [-100, -100, -100, 8, 7, -100, -100]]
    rows = [{**padded, "labels": labels}, padded, {**padded, "labels": 1}, {**padded, "trained": [1, 3]}]
    rows += [{**padded, "labels": each} for each in bad]
    rows += [{**padded, "attention_mask": each} for each in ([1, 1], [0] * 7, [2] * 7)]
    path = json_lines(tmp_path / "rows.jsonl", rows)
    done = tokenize_rows(TokenizeJob.of(recipe("continuous-pretraining"), tokenizer, path, VOCAB))
    assert [(row["input_ids"], row["prompt_length"]) for row in done.rows.select(range(4))] == [
        ([5, 6, 7, 8], 2), ([5, 6, 7, 8], 0), ([5, 6, 7, 8], 0), ([0, 5, 6], 0),
    ]  # fmt: skip
    assert done.report.target_tokens == 2 + 3 + 3 + 2
    assert {reason: found.count for reason, found in done.report.rows_skipped.items()} == {
        "no token that is trained on": 1,
        "labels are not a list with a label for each token": 1,
        "a label is neither its token of input_ids nor -100": 1,
        "attention_mask is not a list of 0 or 1 for each token": 2,
        "no tokens": 1,
    }
    (found,) = (found for warning, found in done.report.warnings.items() if "not the text next to them" in warning)
    assert found.count == len(rows)


def test_unanswerable_questions_are_reported(tokenizer, tmp_path):
    questions = [
        {"id": "1", "question": "Where from?", "answers": [{"text": "the village"}, {"text": "village"}]},
        {"id": "2", "question": "Why?", "answers": [], "is_impossible": True},
    ]
    path = tmp_path / "squad.json"
    path.write_text(json.dumps({"data": [{"title": "t", "paragraphs": [{"context": WORDS, "qas": questions}]}]}))
    done = tokenize_rows(TokenizeJob.of(recipe("qa"), tokenizer, path, VOCAB))
    assert done.rows["references"][0] == ["the village", "village"]
    assert tokenizer.decode(done.rows["input_ids"][0][done.rows["prompt_length"][0] : -1]) == " the village"
    assert done.report.rows_skipped["no value for column 'answers'"].first == [f"{path}:2"]


def test_late_column_is_found_but_loses(tokenizer, tmp_path):
    rows = [{"note": "a", "summary": "x"}] * 3
    late = json_lines(tmp_path / "late.jsonl", [*rows, {"document": "b", "note": "c", "summary": "x"}])
    job = TokenizeJob.of(recipe(), tokenizer, late, VOCAB)
    assert tokenize_rows(job, survey_rows=2).report.columns["document"] == "note"
    only_late = json_lines(tmp_path / "only.jsonl", [{"summary": "x"}] * 3 + rows)
    job = TokenizeJob.of(recipe(), tokenizer, only_late, VOCAB)
    assert tokenize_rows(job, survey_rows=2).report.rows_kept == 3


def test_pattern_columns_may_appear_late(tokenizer, tmp_path):
    path = json_lines(tmp_path / "a.jsonl", [{"note": "a", "s1": "x"}, {"note": "b", "s1": "x", "s2": "y"}])
    done = tokenize_rows(TokenizeJob.of(recipe(map="summary=s*"), tokenizer, path, VOCAB), survey_rows=1)
    assert list(done.rows["references"]) == [["x"], ["x", "y"]]
    check_compatible(done, recipe(map="summary=s*"), tokenizer)


def test_csv_with_quoted_newlines_keeps_its_lines(tokenizer, tmp_path):
    path = tmp_path / "a.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["dialogue", "summary"], ["one\ntwo", "x"], ["three", "y"]])
    assert list(tokenize_rows(TokenizeJob.of(recipe(), tokenizer, path, VOCAB)).rows["line"]) == [2, 4]


# What is refused


def test_unreadable_lines_fail_before_tokenizing(tokenizer, tmp_path):
    path = json_lines(tmp_path / "a.jsonl", [{"note": "a", "summary": "b"}] * 5)
    path.write_text(path.read_text() + "oops\n")
    seen = []
    with pytest.raises(DataError, match=r"a\.jsonl:6: not JSON"):
        tokenize_rows(TokenizeJob.of(recipe(), tokenizer, path, VOCAB), progress=seen.append)
    assert seen == []


def test_a_missing_column_names_the_file(tokenizer, tmp_path):
    path = json_lines(tmp_path / "a.jsonl", [{"story": "a", "summary": "b"}])
    with pytest.raises(DataError, match=r"a\.jsonl: no column for 'document'.*\n.*--map document=COLUMN"):
        tokenize_rows(TokenizeJob.of(recipe(), tokenizer, path, VOCAB))


def test_skipping_all_rows_says_why(tokenizer, tmp_path):
    path = json_lines(tmp_path / "a.jsonl", [{"note": " ", "summary": "b"}, {"note": "x", "summary": ""}])
    with pytest.raises(
        DataError, match=r"none of the 2 rows.*'document' is empty \(1, first at .*:1\); the completion"
    ):
        tokenize_rows(TokenizeJob.of(recipe(), tokenizer, path, VOCAB))


def test_long_row_error_names_file_and_line(tokenizer, tmp_path):
    path = json_lines(tmp_path / "a.jsonl", [{"note": "a", "summary": "b"}, {"note": WORDS * 9, "summary": "b"}])
    with pytest.raises(DataError, match=r"a\.jsonl:2: \d+ tokens with EOS, max_length is 60"):
        tokenize_rows(TokenizeJob.of(recipe(on_long="error", max_length=60), tokenizer, path, VOCAB))


def test_foreign_token_is_rejected(tokenizer, notes):
    with pytest.raises(DataError, match=r"notes\.jsonl:1: token id \d+, but the model's ids end at 279"):
        tokenize_rows(TokenizeJob.of(recipe(), tokenizer, notes, vocab_size=280))


def test_missing_eos_fails_before_reading(notes):
    with pytest.raises(UsageError, match="has no EOS token"):
        tokenize_rows(TokenizeJob.of(recipe(), make_tokenizer(eos=None), notes, VOCAB))


# The folder


def test_saved_data_loads_as_it_was(prepared, tmp_path):
    folder = tmp_path / "new" / "data"
    save_dataset(prepared, folder)
    assert is_prepared(folder)
    assert not is_prepared(tmp_path)
    again = load_dataset(folder)
    assert again.report == prepared.report
    assert list(again.rows) == list(prepared.rows)
    assert [path.name for path in folder.parent.iterdir()] == ["data"]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["settings"]["max_length"] == 1024
    assert len(manifest["data_sha256"]) == len(manifest["settings_sha256"]) == len(manifest["tokenizer_sha256"]) == 64
    assert manifest | json.loads(json.dumps(Report.from_dict(manifest).to_dict())) == manifest


def test_prepared_data_is_never_overwritten(prepared, tmp_path):
    save_dataset(prepared, tmp_path / "data")
    with pytest.raises(UsageError, match="exists"):
        save_dataset(prepared, tmp_path / "data")


def test_unwritable_folder_is_usage_error(prepared, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        save_dataset(prepared, tmp_path / "file" / "data")


def test_full_disk_leaves_no_files(prepared, tmp_path, fill_disk):
    fill_disk()
    with pytest.raises(ResourceError, match="no space left"):
        save_dataset(prepared, tmp_path / "data")
    assert [path.name for path in tmp_path.iterdir() if path.name != "home"] == ["notes.jsonl"]


def test_unsaved_rows_are_deleted_after_crash(tokenizer, notes):
    (home() / ".rows-999999999-x.arrow").parent.mkdir(parents=True, exist_ok=True)
    (home() / ".rows-999999999-x.arrow").touch()
    made = tokenize_rows(TokenizeJob.of(recipe(), tokenizer, notes, VOCAB))
    assert [path.name.split("-")[1] for path in home().glob(".rows-*")] == [str(os.getpid())]
    del made
    gc.collect()
    assert not [*home().iterdir()]


def test_saving_links_an_existing_file(tokenizer, notes, tmp_path):
    made = tokenize_rows(TokenizeJob.of(recipe(), tokenizer, notes, VOCAB))
    save_dataset(made, tmp_path / "a")
    save_dataset(load_dataset(tmp_path / "a"), tmp_path / "b")
    (file,) = (tmp_path / "b").glob("*.arrow")
    assert file.stat().st_ino == (tmp_path / "a" / file.name).stat().st_ino
    save_dataset(select_rows(made, range(len(made.rows))), tmp_path / "c")
    save_dataset(select_rows(made, range(1, 3)), tmp_path / "part")
    assert list(load_dataset(tmp_path / "part").rows) == list(made.rows)[1:3]
    for folder in ("a", "b", "c"):
        loaded = load_dataset(tmp_path / folder)
        assert list(loaded.rows) == list(made.rows)
        assert loaded.report == made.report


def test_folder_without_manifest_is_rejected(tmp_path):
    with pytest.raises(UsageError, match=r"not prepared data: it has no manifest\.json"):
        load_dataset(tmp_path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "manifest.json").write_text("{"), "damaged"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "damaged"),
        (lambda folder: next(folder.glob("*.arrow")).unlink(), "damaged"),
        (lambda folder: next(folder.glob("*.arrow")).write_bytes(b"x"), "damaged"),
        (lambda folder: _edit(folder, version=99), "prepared by version 99"),
        (lambda folder: _edit(folder, windows=19), "manifest.json is damaged"),
        (lambda folder: _edit(folder, rows_read=7), "damaged"),
    ],
)
def test_damaged_prepared_data_is_a_data_error(prepared, tmp_path, damage, message):
    save_dataset(prepared, tmp_path / "data")
    damage(tmp_path / "data")
    with pytest.raises(DataError, match=message):
        load_dataset(tmp_path / "data")


def _edit(folder, **changes):
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# Fit for a recipe


def test_same_recipe_is_compatible(prepared, tokenizer):
    check_compatible(prepared, recipe(lr=1.0, epochs=9), tokenizer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 512}, "max_length is 512, was 1024"),
        ({"prompt": "{{ document }}\n\nTL;DR:"}, "prompt is "),
        ({"completion": "{{ summary }}"}, "completion is "),
        ({"on_long": "skip"}, "on_long is 'skip', was 'shorten'"),
        ({"fields": {"document": ["body"]}}, "'document' was taken from column 'note', now from body"),
    ],
)
def test_another_template_or_limit_is_named(prepared, tokenizer, options, message):
    with pytest.raises(DataError, match="the data was prepared with other settings") as caught:
        check_compatible(prepared, recipe(**options), tokenizer)
    assert message in str(caught.value)


def test_rows_of_earlier_versions_are_readable(prepared, tmp_path):
    for version in (7, 8, 9, VERSION, 6, VERSION + 1):
        folder = tmp_path / f"version-{version}"
        report = dataclasses.replace(prepared.report, version=version)
        save_dataset(Prepared(prepared.rows, report), folder)
        if 7 <= version <= VERSION:
            assert load_dataset(folder).report.version == version
        else:
            with pytest.raises(DataError, match=f"prepared by version {version}, this is {VERSION}"):
                load_dataset(folder)


def test_another_tokenizer_is_named(prepared):
    with pytest.raises(DataError, match="the tokenizer differs"):
        check_compatible(prepared, recipe(), make_tokenizer(vocab_size=300))


# Holding out


@pytest.mark.parametrize(("holdout", "held_rows"), [(0.05, 1), (0.001, 1), (0.25, 5), (1.0, 19)])
def test_both_splits_get_rows_none_is_lost(prepared, holdout, held_rows):
    train, held = split(prepared, holdout, seed=3)
    assert len(held.rows) == held_rows
    assert sorted([*train.rows["line"], *held.rows["line"]]) == list(range(1, 21))


def test_two_rows_split_one_stays_whole(prepared):
    assert [len(part.rows) for part in split(select_rows(prepared, [0, 1]), 0.5, seed=3)] == [1, 1]
    assert split(select_rows(prepared, [0]), 0.5, seed=3)[1] is None


def test_a_split_depends_on_the_seed_alone(prepared):
    lines = [list(split(prepared, 0.3, seed)[1].rows["line"]) for seed in (0, 0, 1)]
    assert lines[0] == lines[1] != lines[2]


def test_zero_holdout_holds_out_nothing(prepared):
    assert split(prepared, 0.0, seed=0) == (prepared, None)


def rows_of_contract(tokenizer, folder, order):
    """Prepare six documents with five questions each, in some order."""
    rows = [
        {"context": f"{WORDS} {document}", "question": f"{number}?", "answer": "yes"}
        for document in range(6)
        for number in range(5)
    ]
    folder.mkdir()
    path = folder / "a.jsonl"
    path.write_text("".join(json.dumps(rows[index]) + "\n" for index in order))
    return tokenize_rows(TokenizeJob.of(recipe("qa"), tokenizer, path, VOCAB)), [rows[index] for index in order]


def test_shared_documents_stay_together_in_any_order(tokenizer, tmp_path):
    held = []
    for name, order in (("a", range(30)), ("b", range(29, -1, -1))):
        done, rows = rows_of_contract(tokenizer, tmp_path / name, order)
        train, validation = split(done, 0.34, seed=0)
        contexts = [{rows[line - 1]["context"] for line in part.rows["line"]} for part in (train, validation)]
        assert contexts[0].isdisjoint(contexts[1])
        assert (len(contexts[1]), len(validation.rows)) == (2, 10)
        held.append(contexts[1])
    assert held[0] == held[1]


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        pytest.param((60, 30, 10), (6, 3, 1), id="whole shares"),
        pytest.param((54, 29, 17), (5, 3, 2), id="what rounding down leaves goes to those that lost most"),
    ],
)
def test_each_label_is_held_out_proportionally(counts, expected, tokenizer, tmp_path):
    path = tmp_path / "a.jsonl"
    names = ("positive", "negative", "neutral")
    labels = [name for name, count in zip(names, counts, strict=True) for _ in range(count)]
    path.write_text("".join(json.dumps({"text": f"t {n}", "label": label}) + "\n" for n, label in enumerate(labels)))
    done = tokenize_rows(TokenizeJob.of(recipe("sentiment"), tokenizer, path, VOCAB))
    _, held = split(done, 0.1, seed=0)
    found = list(held.rows["label"])
    assert tuple(found.count(name) for name in names) == expected
    assert done.rows["references"][0] == ["positive"]


def test_windows_of_a_document_stay_together(tokenizer, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("\n\n".join(f"{number} {WORDS * 5}" for number in range(6)))
    done = tokenize_rows(TokenizeJob.of(recipe("continuous-pretraining", max_length=16), tokenizer, path, VOCAB))
    train, held = split(done, 0.5, seed=0)
    assert set(train.rows["line"]).isdisjoint(held.rows["line"])
    assert len(set(train.rows["line"])) == len(set(held.rows["line"])) == 3


def test_single_document_splits_by_window(tokenizer, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(WORDS * 9)
    done = tokenize_rows(TokenizeJob.of(recipe("continuous-pretraining", max_length=16), tokenizer, path, VOCAB))
    train, held = split(done, 0.1, seed=0)
    assert len(held.rows) >= 1
    assert len(train.rows) + len(held.rows) == done.report.windows


def test_held_out_part_is_counted_and_saved(prepared, tmp_path):
    parts = split(prepared, 0.3, seed=0)
    for name in ("tokens", "target_tokens", "windows"):
        assert sum(getattr(part.report, name) for part in parts) == getattr(prepared.report, name)
    save_dataset(parts[1], tmp_path / "held")
    assert list(load_dataset(tmp_path / "held").rows) == list(parts[1].rows)


def test_selected_documents_have_their_own_counts(prepared):
    first = select_rows(prepared, [4, 2])
    assert list(first.rows["line"]) == [5, 3]
    assert first.report.longest == max(map(len, first.rows["input_ids"]))
    assert (first.report.windows, first.report.rows_read) == (2, 20)
    assert select_rows(prepared, range(20)).report == prepared.report


# Real files


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "recipe_name", "kept"),
    [
        ("summarization/mts-dialog/val.csv", "summarization", 100),
        ("squad/hf-fixture-sample.json", "qa", 8),
        ("lm/wikitext-2/valid.txt", "continuous-pretraining", 1160),
    ],
)
def test_real_files_are_prepared_with_the_presets(name, recipe_name, kept):
    from gptj_ft.data.tokenization import load_tokenizer

    folder = Path(os.environ.get("GPTJ_FT_TEST_DATA") or Path(__file__).parents[3] / "shared" / "data")
    if not (folder / name).exists():
        pytest.skip(f"real data not found: {folder / name} (set GPTJ_FT_TEST_DATA)")
    done = tokenize_rows(
        TokenizeJob.of(recipe(recipe_name), load_tokenizer(folder / "tokenizers" / "gpt2"), folder / name, 50400)
    )
    assert isinstance(done, Prepared)
    assert done.report.rows_kept == kept


def test_all_null_column_is_reported_empty(tmp_path, tokenizer):
    columns = {"document": ["A note."] * 100, "summary": pyarrow.nulls(100, pyarrow.string())}
    parquet.write_table(pyarrow.table(columns), tmp_path / "rows.parquet")
    for options in ({}, {"map": "summary=summary"}):
        with pytest.raises(DataError, match=r"rows\.parquet: column 'summary' is empty in all 100 rows$"):
            tokenize_rows(TokenizeJob.of(recipe(**options), tokenizer, tmp_path / "rows.parquet", 50400))
