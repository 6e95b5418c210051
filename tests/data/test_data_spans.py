"""Test questions about passages against the windows, targets and offsets of transformers' run_qa."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.real_data import real_data
from support.tiny_tokenizer import make_tokenizer
from support.tiny_wordpiece import make_wordpiece
from transformers import AutoTokenizer, BertTokenizer, RobertaTokenizer

from gptj_ft.config.options import Recipe
from gptj_ft.config.resolve import resolve
from gptj_ft.data.checks.tokens import check_tokens
from gptj_ft.data.dataset import Prepared
from gptj_ft.data.prepare import TokenizeJob, tokenize_rows
from gptj_ft.data.split import first_rows, split
from gptj_ft.data.tokenization import load_tokenizer
from gptj_ft.errors import DataError, UsageError

TASK: dict[str, Any] = {
    "task": "spans", "prompt": "{{ question }}", "pair": "{{ context }}", "completion": "{{ answers }}",
    "max_length": 24, "stride": 6,
}  # fmt: skip
PASSAGE = (
    "The patient came from the village by the river with a cough; rest was good (café), and the lifts stopped in "
    "riverville. The doctors came and the patient came to rest, 猫 and all, with a bad cough."
)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_wordpiece(tmp_path_factory.mktemp("bert"))


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def prepared(tokenizer: Any, rows: list[dict[str, Any]], needs_target: bool = True, **options: Any) -> Prepared:
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    recipe = Recipe(**{**TASK, **options})
    done = tokenize_rows(TokenizeJob.of(recipe, tokenizer, Path("rows.jsonl"), 1000, needs_target=needs_target))
    check_tokens(done, Path("rows"), 1000, recipe.max_length)
    assert done.rows.num_targets() == done.report.target_tokens == done.report.windows
    return done


def questions(*answers: str, passage: str = PASSAGE) -> list[dict[str, Any]]:
    return [
        {"question": f" where did the patient {n} rest", "context": passage,
         "answers": {"text": [answer, "another"], "answer_start": [passage.index(answer), 0]}}
        for n, answer in enumerate(answers)
    ]  # fmt: skip


def features_of_run_qa(tokenizer: Any, rows: list[dict[str, Any]], length: int, stride: int) -> list[dict[str, Any]]:
    """Make features as run_qa's `prepare_train_features` does, but for two slips.

    At the last token of a window it goes on to the [SEP], whose offsets are (0, 0), and finds that at or before the
    answer, too. And where a character is several tokens, its spans end before they begin.
    """
    done = tokenizer(
        [row["question"].lstrip() for row in rows], [row["context"] for row in rows], truncation="only_second",
        max_length=length, stride=stride, return_overflowing_tokens=True, return_offsets_mapping=True,
        return_token_type_ids=True, split_special_tokens=True,
    )  # fmt: skip
    features = []
    for number, offsets in enumerate(done["offset_mapping"]):
        of = done.sequence_ids(number)
        row = rows[done["overflow_to_sample_mapping"][number]]
        text, start = row["answers"]["text"][0], row["answers"]["answer_start"][0]
        end = start + len(text)
        first, last = of.index(1), len(of) - 1 - of[::-1].index(1)
        place = [0, 0]
        if offsets[first][0] <= start and offsets[last][1] >= end:
            top = last
            while first <= top and offsets[first][0] <= start:
                first += 1
            while offsets[last][1] >= end:
                last -= 1
            place = sorted((first - 1, last + 1))
        flat = [each if side == 1 else (-1, -1) for each, side in zip(offsets, of, strict=True)]
        features.append(
            {
                "input_ids": done["input_ids"][number], "types": done["token_type_ids"][number], "targets": place,
                "offsets": [bound for each in flat for bound in each],
            }
        )  # fmt: skip
    return features


def shown(done: Prepared) -> list[dict[str, Any]]:
    return [
        {
            "input_ids": row["input_ids"], "targets": row["targets"], "offsets": row["offsets"],
            "types": [sum(border <= at for border in row["borders"]) % 2 for at in range(len(row["input_ids"]))],
        }
        for row in done.rows
    ]  # fmt: skip


ANSWERS = (
    "The patient", "river", "rest was good (café)", "lifts", "猫", "bad cough.", "cough; rest was good (café), and",
    PASSAGE, "riverville. The", "é", "ver", "patient came from the village by the river with a cough",
)  # fmt: skip


@pytest.mark.parametrize("kind", ["bert", "roberta"])
@pytest.mark.parametrize(("length", "stride"), [(24, 6), (20, 0), (22, 9), (40, 12), (300, 50)])
def test_span_windows_match_run_qa(kind: str, length: int, stride: int, tmp_path: Path) -> None:
    if kind == "bert":
        ours, theirs = make_wordpiece(tmp_path), BertTokenizer(vocab=str(tmp_path / "vocab.txt"))
    else:
        length, stride = length * 3, stride * 3
        saved = json.loads(make_tokenizer(eos=None).backend_tokenizer.to_str())["model"]
        vocabulary = {token: number for number, token in enumerate(["<s>", "<pad>", "</s>", "<unk>", *saved["vocab"]])}
        merges = [tuple(pair) for pair in saved["merges"]]
        RobertaTokenizer(vocab=vocabulary, merges=merges).save_pretrained(tmp_path)
        ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    rows = questions(*ANSWERS)
    assert shown(prepared(ours, rows, max_length=length, stride=stride)) == features_of_run_qa(
        theirs, rows, length, stride
    )


@pytest.mark.parametrize("count", [1, 2, 9])
def test_first_rows_keep_all_windows(count: int, bert: Any) -> None:
    done = prepared(bert, questions("river", "lifts", "cough"))
    lines, chosen = list(done.rows["line"]), list(first_rows(done, count).rows["line"])
    assert len(lines) > 3
    assert chosen == [line for line in lines if line <= count]


COUNTS = {
    "dev-v1.1.json": (10_570, 10_784, 1_897_568, 183),
    "train-v1.1-subset.json": (9_240, 9_319, 1_468_210, 79),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["dev-v1.1.json", pytest.param("train-v1.1-subset.json", marks=pytest.mark.slow)])
def test_squad_window_count_matches_transformers(name: str) -> None:
    tokenizer = load_tokenizer(real_data("tokenizers/bert-base-uncased/vocab.txt").parent)
    recipe = resolve({"recipe": "squad-bert"}, environment={}).recipe
    done = tokenize_rows(TokenizeJob.of(recipe, tokenizer, real_data(f"squad/{name}"), 30522))
    report = done.report
    several = {line for line, is_more in zip(done.rows["line"], done.rows["continues"], strict=True) if is_more}
    assert (report.rows_kept, report.windows, report.tokens, len(several)) == COUNTS[name]
    assert not report.rows_skipped
    if name.startswith("train"):
        assert sum(targets == [0, 0] for targets in done.rows["targets"]) == 67
        rows = [
            {"question": question["question"], "context": paragraph["context"],
             "answers": {key: [answer[key] for answer in question["answers"]] for key in ("text", "answer_start")}}
            for article in json.loads(real_data(f"squad/{name}").read_text(encoding="utf-8"))["data"]
            for paragraph in article["paragraphs"] for question in paragraph["qas"]
        ]  # fmt: skip
        theirs = features_of_run_qa(BertTokenizer(vocab=tokenizer.get_vocab()), rows, 384, 128)
        assert shown(done) == theirs


def test_window_spans_read_as_the_answer(bert: Any) -> None:
    done = prepared(bert, questions(*ANSWERS))
    found = 0
    for row in done.rows:
        start, end = row["targets"]
        (passage,) = row["texts"]
        assert passage == PASSAGE
        if (start, end) != (0, 0):
            text = passage[row["offsets"][2 * start] : row["offsets"][2 * end + 1]]
            assert row["references"][0] in text
            found += 1
    assert found > len(ANSWERS)
    row = next(iter(done.rows))
    assert (row["references"], row["label"], row["marks"]) == (["The patient", "another"], "", [])


def test_unanswerable_question_is_skipped_or_learnt(bert: Any) -> None:
    rows = [*questions("river"), {"question": "why", "context": PASSAGE, "answers": {"text": [], "answer_start": []}}]
    done = prepared(bert, rows)
    assert {why: of.count for why, of in done.report.rows_skipped.items()} == {"no value for column 'answers'": 1}
    done = prepared(bert, rows, no_answer="none")
    last = [row for row in done.rows if row["line"] == 2]
    assert len(last) > 1
    assert all(row["targets"] == [0, 0] and row["references"] == [""] for row in last)


def test_misplaced_answers_are_searched(bert: Any) -> None:
    place = PASSAGE.rindex("came")
    rows = [
        {"question": "a", "context": PASSAGE, "answers": {"text": ["came"], "answer_start": [place - 3]}},
        {"question": "b", "context": PASSAGE, "answers": "came"},
        {"question": "c", "context": PASSAGE, "answers": ["came", "river"]},
        {"question": "d", "context": PASSAGE, "answers": [{"text": "came", "answer_start": place}]},
        {"question": "e", "context": PASSAGE, "answers": {"text": ["went"], "answer_start": [4]}},
        {"question": "f", "context": PASSAGE, "answers": {"text": ["came"], "answer_start": place}},
        {"question": "g", "context": PASSAGE, "answers": ["came", "\ud83d"]},
    ]
    done = prepared(bert, rows, max_length=200)
    starts = [row["offsets"][2 * row["targets"][0]] for row in done.rows]
    assert starts == [place, PASSAGE.index("came"), PASSAGE.index("came"), place, place]
    skipped = {why: of.first for why, of in done.report.rows_skipped.items()}
    assert skipped == {
        "the answer is not in its passage": ["rows.jsonl:5"],
        "column 'answers': unpaired surrogate (invalid Unicode)": ["rows.jsonl:7"],
    }
    warned = {why: of.first for why, of in done.report.warnings.items() if "answer" in why and "row" not in why}
    assert warned == {
        "the answer is not at answer_start: its nearest occurrence is used": ["rows.jsonl:1"],
        "no answer_start: the answer's first occurrence is used": ["rows.jsonl:2", "rows.jsonl:3"],
    }


def test_rows_to_predict_need_no_answer(bert: Any) -> None:
    done = prepared(bert, [{"question": "where", "context": PASSAGE}], needs_target=False)
    assert len(done.rows) > 1
    assert all(row["targets"] == [0, 0] and row["references"] == [] for row in done.rows)


def test_oversized_questions_and_strides_are_reported(bert: Any) -> None:
    rows = [*questions("river"), {**questions("river")[0], "question": "the " * 30}]
    done = prepared(bert, rows)
    reasons = list(done.report.rows_skipped)
    assert reasons == ["too long: besides its other text there is no room for windows that share 6 tokens"]
    with pytest.raises(UsageError, match="stride: windows of at most 21 tokens"):
        prepared(bert, rows, stride=21)
    with pytest.raises(UsageError, match="pair: for task=spans, pair must be the passage alone"):
        prepared(bert, rows, pair="Passage: {{ context }}")
    done = prepared(
        bert, questions("river", "cough.", "with a cough; rest was good (café), and the lifts"), on_long="shorten"
    )
    assert done.report.windows == 1
    assert {why: of.first for why, of in done.report.rows_skipped.items()} == {
        "too long: the answer is cut off": ["rows.jsonl:2", "rows.jsonl:3"]
    }
    assert prepared(bert, questions("cough."), needs_target=False, on_long="shorten").report.windows == 1
    with pytest.raises(DataError, match=r"rows\.jsonl:1: 6 tokens of the question"):
        prepared(bert, questions("river"), on_long="error")


def test_gpt_separates_question_and_passage_by_newline() -> None:
    tokenizer = make_tokenizer()
    row = next(iter(prepared(tokenizer, questions("river"), max_length=300).rows))
    assert tokenizer.decode(row["input_ids"]) == "where did the patient 0 rest\n" + PASSAGE
    start, end = row["targets"]
    assert tokenizer.decode(row["input_ids"][start : end + 1]).strip() == "river"


def test_questions_of_a_passage_stay_together(bert: Any) -> None:
    rows = [row for n in range(12) for row in questions("river", "cough", passage=f"{n} the river and a cough")]
    train, held = split(prepared(bert, rows), 0.25, 0)
    assert held is not None
    assert not {tuple(row["texts"]) for row in train.rows} & {tuple(row["texts"]) for row in held.rows}
