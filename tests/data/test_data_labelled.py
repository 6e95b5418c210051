"""Test rows of tasks that label texts and pairs: tokens, labels, warnings."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from support.awkward_text import AWKWARD
from support.tiny_tokenizer import make_tokenizer
from support.tiny_wordpiece import SPECIAL, make_wordpiece, write_vocabulary
from transformers import AutoTokenizer, BertTokenizer, RobertaTokenizer

from gptj_ft.cli.data_facts import data_rows
from gptj_ft.config.options import Recipe
from gptj_ft.data.checks.tokens import check_tokens
from gptj_ft.data.dataset import Prepared, save_dataset
from gptj_ft.data.labelled.assembly import longest_first, windows_of
from gptj_ft.data.labelled.labels import LabelSet
from gptj_ft.data.load import read_or_prepare
from gptj_ft.data.prepare import TokenizeJob, tokenize_rows
from gptj_ft.data.split import split
from gptj_ft.data.tokenization import load_tokenizer, tokenize
from gptj_ft.errors import DataError, UsageError

VOCABULARY = 1000
CLS, SEP = SPECIAL.index("[CLS]"), SPECIAL.index("[SEP]")
PLAIN: dict[str, Any] = {"prompt": "{{ text }}", "completion": "{{ label }}", "max_length": 64, "on_long": "shorten"}
PAIR: dict[str, Any] = {**PLAIN, "prompt": "{{ one }}", "pair": "{{ other }}"}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_wordpiece(tmp_path_factory.mktemp("bert"))


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(rows: list[dict[str, Any]], name: str = "rows.jsonl") -> Path:
    path = Path(name)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def prepared(
    tokenizer: Any, rows: list[dict[str, Any]], asked: dict[str, Any] | None = None, **options: Any
) -> Prepared:
    recipe = Recipe(**{"task": "classification", **PLAIN, **options})
    done = tokenize_rows(TokenizeJob.of(recipe, tokenizer, write(rows), VOCABULARY, **asked or {}))
    assert done.rows.num_targets() == done.report.target_tokens
    assert len(done.rows) == done.report.windows
    check_tokens(done, Path("rows"), VOCABULARY, recipe.max_length)
    return done


def labelled(*labels: Any) -> list[dict[str, Any]]:
    """Make rows with these labels, each with another text."""
    return [{"text": f"the patient came {number}", "label": label} for number, label in enumerate(labels)]


def types_of(row: dict[str, Any]) -> list[int]:
    return [sum(border <= at for border in row["borders"]) % 2 for at in range(len(row["input_ids"]))]


def robertas(folder: Path) -> Path:
    saved = json.loads(make_tokenizer(eos=None).backend_tokenizer.to_str())["model"]
    vocabulary = {token: number for number, token in enumerate(["<s>", "<pad>", "</s>", "<unk>", *saved["vocab"]])}
    merges = [tuple(pair) for pair in saved["merges"]]
    RobertaTokenizer(vocab=vocabulary, merges=merges).save_pretrained(folder)
    return folder


@pytest.mark.sampled(10)
@pytest.mark.parametrize("kind", ["bert", "roberta"])
@pytest.mark.parametrize("length", [7, 8, 64])
def test_pair_tokens_and_types_match_transformers(kind: str, length: int, tmp_path: Path) -> None:
    if kind == "bert":
        ours, theirs = make_wordpiece(tmp_path), BertTokenizer(vocab=str(tmp_path / "vocab.txt"))
    else:
        ours, theirs = load_tokenizer(robertas(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)
    awkward = [text for text in AWKWARD.values() if len(text) < 500]  # transformers makes all windows of what it cuts
    texts = [*awkward, "the river", "a [SEP] </s> cough came from the village"]
    pairs = [(one, other) for one, other in product(texts, texts) if tokenize(ours, [one, other])[0]]
    rows = [{"one": one, "other": other, "label": number % 2} for number, (one, other) in enumerate(pairs)]
    done = prepared(ours, rows, **PAIR | {"max_length": length})
    kept = [row for row in rows if row["one"].strip() and row["other"].strip()]
    kept = [row for row in kept if all(tokenize(ours, [row["one"], row["other"]]))]
    wanted = theirs(
        [row["one"] for row in kept], [row["other"] for row in kept], truncation=True, max_length=length,
        return_token_type_ids=True, split_special_tokens=True,
    )  # fmt: skip
    got = list(done.rows)
    assert [row["input_ids"] for row in got] == wanted["input_ids"]
    assert [types_of(row) for row in got] == wanted["token_type_ids"]
    assert all(row["marks"] == [0] for row in got)
    assert done.report.rows_kept == len(kept)


def test_single_text_tokens_match_transformers(bert: Any) -> None:
    done = prepared(bert, labelled("a", "b"), max_length=6)
    (ids,) = tokenize(bert, ["the patient came 0"])
    assert next(iter(done.rows))["input_ids"] == [CLS, *ids[:4], SEP]
    assert next(iter(done.rows))["borders"] == []


def test_pair_truncation_matches_tokenizers_library(bert: Any) -> None:
    backend = BertTokenizer(vocab=bert.get_vocab()).backend_tokenizer
    texts = [" ".join(["the"] * count) for count in range(1, 15)]
    differing = 0
    for room in (6, 7, 11):
        backend.enable_truncation(room + 3, strategy="longest_first")
        for one, other in product(range(1, 15), repeat=2):
            types = backend.encode(texts[one - 1], texts[other - 1]).sequence_ids
            assert longest_first(one, other, room) == (types.count(0), types.count(1)), (one, other, room)
            google = [one, other]
            while sum(google) > room:
                google[0 if google[0] > google[1] else 1] -= 1
            differing += tuple(google) != longest_first(one, other, room)
    assert differing > 0, "Google's way is another, and this would not tell"


@pytest.mark.parametrize(("room", "stride"), [(5, 2), (5, 0), (4, 3), (9, 1)])
def test_windows_match_the_tokenizers_library(room: int, stride: int, bert: Any) -> None:
    backend = BertTokenizer(vocab=bert.get_vocab()).backend_tokenizer
    backend.enable_truncation(room + 2, stride=stride)
    for count in range(1, 30):
        whole = backend.encode(" ".join(["the"] * count))
        spans = [[offset for offset in each.offsets if offset != (0, 0)] for each in [whole, *whole.overflowing]]
        assert [(each[0][0] // 4, each[-1][0] // 4 + 1) for each in spans] == windows_of(count, room, stride)


def test_long_text_becomes_labelled_windows(bert: Any) -> None:
    rows = [*labelled("a", "b"), {"text": "the " * 11, "label": "b"}]
    done = prepared(bert, rows, on_long="split", stride=2, max_length=7)
    last = list(done.rows)[-3:]
    (the,) = tokenize(bert, ["the"])[0]
    assert [row["input_ids"] for row in last] == [[CLS, *[the] * 5, SEP]] * 3
    assert [row["continues"] for row in last] == [False, True, True]
    assert {tuple(row["targets"]) for row in last} == {(1,)}
    assert {(row["line"], row["group"]) for row in last} == {(3, last[0]["group"])}
    assert done.report.label_counts == (1, 2)
    pair = {"one": "the river", "other": "cough " * 7, "label": 1}
    done = prepared(bert, [pair, {**pair, "label": 0}], **PAIR | {"on_long": "split", "stride": 1, "max_length": 8})
    ids = next(iter(done.rows))["input_ids"]
    assert ids[:4] == [CLS, *tokenize(bert, ["the river"])[0], SEP], "the first text is in every window"
    assert done.report.windows == 2 * 3


def test_impossible_windows_are_reported(bert: Any) -> None:
    with pytest.raises(UsageError, match="stride: windows of at most 128 tokens"):
        prepared(bert, labelled("a", "b"), on_long="split", max_length=130)
    rows = [{"one": "the " * 20, "other": "a cough came from the river", "label": "a"}]
    with pytest.raises(DataError, match="too long: besides its other text there is no room"):
        prepared(bert, rows, **PAIR | {"on_long": "split", "stride": 4, "max_length": 20})


@pytest.mark.parametrize(
    ("cut", "kept"), [("end", "the a of and"), ("start", "of and in to"), ("middle", "the a in to")]
)
def test_cut_option_chooses_the_truncated_part(cut: str, kept: str, bert: Any) -> None:
    rows = [{"text": "the a of and in to", "label": label} for label in "ab"]
    done = prepared(bert, rows, cut=cut, max_length=6)
    assert next(iter(done.rows))["input_ids"][1:-1] == tokenize(bert, [kept])[0]
    assert (done.report.rows_cut, done.report.tokens_cut) == (2, 4)


def test_only_the_shorten_text_is_truncated(bert: Any) -> None:
    rows = [{"one": "the a of and", "other": "in to is was where", "label": label} for label in "ab"]
    for shorten, lengths in (("one", (2, 5)), ("other", (4, 3)), ("", (3, 4))):
        done = prepared(bert, rows, **PAIR | {"shorten": shorten, "max_length": 10})
        row = next(iter(done.rows))
        assert (types_of(row).count(0) - 2, types_of(row).count(1) - 1) == lengths
    with pytest.raises(DataError, match="no room for any part of 'one'"):
        prepared(bert, rows, **PAIR | {"shorten": "one", "max_length": 8})


def test_long_rows_are_skipped_or_rejected(bert: Any) -> None:
    rows = [*labelled("a", "b"), {"text": "the " * 11, "label": "b"}]
    done = prepared(bert, rows, on_long="skip", max_length=8)
    assert {why: of.count for why, of in done.report.rows_skipped.items()} == {"longer than max_length": 1}
    with pytest.raises(DataError, match=r"rows\.jsonl:3: 13 tokens, max_length is 8"):
        prepared(bert, rows, on_long="error", max_length=8)


def test_gpt_labels_at_last_token() -> None:
    tokenizer = make_tokenizer()
    done = prepared(tokenizer, labelled("a", "b"), max_length=5)
    (ids,) = tokenize(tokenizer, ["the patient came 0"])
    row = next(iter(done.rows))
    assert (row["input_ids"], row["marks"], row["borders"]) == (ids[:5], [4], [])
    done = prepared(tokenizer, [{"one": "the river", "other": "a cough", "label": n} for n in "ab"], **PAIR)
    row = next(iter(done.rows))
    assert tokenizer.decode(row["input_ids"]) == "the river\na cough"
    assert row["marks"] == [len(row["input_ids"]) - 1]
    assert row["prompt_length"] == len(row["input_ids"])


@pytest.mark.parametrize(
    ("labels", "options", "asked", "wanted"),
    [
        (["b", "a", "c", "a"], {}, {}, ("a", "b", "c")),
        ([10, 9, 2, "2.0"], {}, {}, ("2", "9", "10")),
        ([1.0, 0, 1, -1], {}, {}, ("-1", "0", "1")),
        ([True, False], {}, {}, ("false", "true")),
        (["b", "a", "c"], {}, {"known_labels": ("c", "b", "a")}, ("c", "b", "a")),
        (["b", "a", "c"], {}, {"known_labels": ("c", "b", "a", "d")}, ("a", "b", "c")),
        (["b", "a"], {}, {"known_labels": ("c", "b", "a")}, ("a", "b")),
        ([1, 0, "1.0"], {"labels": {"0": "no", "1": "yes"}}, {"known_labels": ("yes", "no")}, ("no", "yes")),
        (["Yes", "NO"], {"labels": {"1": "yes", "0": "no"}}, {}, ("yes", "no")),
        (["a", "b", "x"], {}, {"labels": ("b", "a", "c")}, ("b", "a", "c")),
        ([["a"], ["b"]], {}, {}, ("a", "b")),
    ],
)
def test_label_order_has_four_sources(
    labels: list[Any], options: dict[str, Any], asked: dict[str, Any], wanted: tuple[str, ...], bert: Any
) -> None:
    done = prepared(bert, labelled(*labels), asked, **options)
    assert done.report.labels == wanted
    rows = list(done.rows)
    for row in rows:
        assert row["references"] == [row["label"]] == [wanted[row["targets"][0]]]
    counts = [sum(row["label"] == name for row in rows) for name in wanted]
    assert done.report.label_counts == tuple(counts)
    skipped = done.report.rows_skipped
    assert sum(of.count for of in skipped.values()) == len(labels) - len(rows) == (1 if "x" in labels else 0)
    if skipped:
        assert list(skipped) == ["label 'x' is none of 'b', 'a', 'c', the labels of the training rows"]


def test_unlabelled_rows_are_skipped_with_reason(bert: Any) -> None:
    rows = [*labelled("a", "b", None, "", "  ", ["a", "b"], {"of": "a"}), {"text": " ", "label": "a"}, {"text": "the"}]
    done = prepared(bert, rows)
    assert {why: of.first for why, of in done.report.rows_skipped.items()} == {
        "no value for column 'label'": [f"rows.jsonl:{line}" for line in (3, 4, 5, 9)],
        "several labels in one row, which is for task=multi-label": ["rows.jsonl:6"],
        "an object where text is expected": ["rows.jsonl:7"],
        "the field 'text' is empty": ["rows.jsonl:8"],
    }
    labels = {"entailment": "entailment", "neutral": "neutral"}
    done = prepared(bert, labelled("-", "neutral", "entailment"), labels=labels)
    assert list(done.report.rows_skipped) == ["label '-' is none of entailment, neutral"]


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("classification", "the label has an unpaired surrogate (invalid Unicode)"),
        ("multi-label", "the label has an unpaired surrogate (invalid Unicode)"),
        ("regression", r"'1\ud83d' is not a number"),
    ],
)
def test_label_with_lone_surrogate_is_skipped(task: str, said: str, bert: Any) -> None:
    done = prepared(bert, labelled("1", "2", "1\ud83d"), task=task)
    assert {why: of.first for why, of in done.report.rows_skipped.items()} == {said: ["rows.jsonl:3"]}
    save_dataset(done, Path("folder"))


@pytest.mark.parametrize(
    ("labels", "options", "said"),
    [
        (["a"] * 3, {}, "rows.jsonl: of the 3 rows all have the label 'a': there is nothing to tell apart"),
        ([0] * 3, {"labels": {"0": "no", "1": "yes"}}, "of the 3 rows all have the label 'no'"),
        ([f"text {n}" for n in range(60)], {}, "60 labels in 60 rows, e.g. 'text 0', 'text 1', 'text 2'"),
        ([n / 7 for n in range(60)], {}, "for measurements use --set task=regression"),
    ],
)
def test_unlearnable_labels_are_rejected(labels: list[Any], options: dict[str, Any], said: str, bert: Any) -> None:
    with pytest.raises(DataError) as caught:
        prepared(bert, labelled(*labels), **options)
    assert said in str(caught.value)


def test_many_labels_with_enough_rows_pass(bert: Any) -> None:
    assert len(prepared(bert, labelled(*[f"fold {n % 60}" for n in range(300)])).report.labels) == 60


def test_odd_labels_are_warned_of_with_places(bert: Any) -> None:
    done = prepared(bert, labelled(*"aaaaaabbA"), labels={"a": "a", "A ": "A", "b": "b", "c": "c"})
    found = {what: (of.count, of.first) for what, of in done.report.warnings.items()}
    assert found["labels of fewer than 5 rows: 'b' 2"] == (2, ["rows.jsonl:7", "rows.jsonl:8"])
    assert found["labels that no row has: 'a', 'c'"] == (2, [])
    done = prepared(bert, labelled(*"aaaaaabbA"))
    found = {what: (of.count, of.first) for what, of in done.report.warnings.items()}
    assert found["labels that differ in upper and lower case only: 'a', 'A'"] == (1, ["rows.jsonl:9"])
    assert found["labels of fewer than 5 rows: 'b' 2, 'A' 1"] == (3, [f"rows.jsonl:{line}" for line in (7, 8, 9)])


def test_equal_text_with_other_label_warns(bert: Any) -> None:
    rows = [*labelled("a", "b"), {"text": "the patient came 0", "label": "b"}]
    assert "the same question as another row, with another answer" in prepared(bert, rows).report.warnings


@pytest.mark.parametrize(
    ("cells", "wanted"),
    [
        ([["b", "a"], [], ["c"]], [{"a", "b"}, set(), {"c"}]),
        (["b; a", "", "c"], [{"a", "b"}, set(), {"c"}]),
        (["b|a", "c, d|a", "c"], [{"a", "b"}, {"c, d", "a"}, {"c"}]),
        (["b,a", "c", "b"], [{"a", "b"}, {"c"}, {"b"}]),
        (["['b', 'a']", "[]", '["c"]'], [{"a", "b"}, set(), {"c"}]),
        (["['b' 'a']", "['c']"], [{"a", "b"}, {"c"}]),
        (["[ 3 11]", "[2]"], [{"3", "11"}, {"2"}]),
        (["c, d", "b", "c, d; a", "b|a"], [{"c, d"}, {"b"}, {"c, d", "a"}, {"b|a"}]),
        ([[3, 11], 2, "11,3"], [{"3", "11"}, {"2"}, {"3", "11"}]),
        ([{"a": 1, "b": True, "c": 0}, {"a": "no"}, {"c": "yes"}], [{"a", "b"}, set(), {"c"}]),
    ],
)
def test_label_sets_come_in_several_forms(cells: list[Any], wanted: list[set[str]], bert: Any) -> None:
    done = prepared(bert, labelled(*cells), task="multi-label")
    names = done.report.labels
    assert list(names) == sorted(set.union(*wanted), key=int if "11" in names else str)
    rows = list(done.rows)
    assert [{name for name, said in zip(names, row["values"], strict=True) if said} for row in rows] == wanted
    assert [set(row["references"]) for row in rows] == wanted
    assert {number for row in rows for number in row["values"]} <= {0.0, 1.0}
    assert {(*row["targets"], *row["marks"]) for row in rows} == {(0, 0)}
    assert done.report.label_counts == tuple(sum(name in row for row in wanted) for name in names)


def test_split_label_texts_are_reported(bert: Any) -> None:
    done = prepared(bert, labelled("a,b", "b"), task="multi-label")
    assert done.report.warnings["a text with several labels, separated by ','"].count == 1
    done = prepared(bert, labelled("a,b", "b", "c; d"), task="multi-label")
    assert done.report.warnings["labels with ',' in their names, because other rows separate labels by ';'"].count == 1
    done = prepared(bert, labelled("a,b", "b"), {"labels": ("a,b", "b")}, task="multi-label")
    assert [row["values"] for row in done.rows] == [[1.0, 0.0], [0.0, 1.0]]
    labels = {"arts, crafts": "arts, crafts", "sport": "sport"}
    done = prepared(bert, labelled("arts, crafts", "sport; arts, crafts"), task="multi-label", labels=labels)
    assert [row["values"] for row in done.rows] == [[1.0, 0.0], [1.0, 1.0]]


def test_label_columns_hold_yes_or_no(bert: Any) -> None:
    rows = [
        {"text": "the", "rude": 1, "kind": "0"}, {"text": "a", "rude": "false", "kind": True},
        {"text": "of", "rude": 0, "kind": None}, {"text": "and", "rude": "perhaps", "kind": 1},
    ]  # fmt: skip
    done = prepared(bert, rows, task="multi-label", map={"label": "rude+kind"})
    assert done.report.labels == ("kind", "rude")
    assert "'rude+kind' (1 in a column: the row has its label)" in dict(data_rows(done.report.to_dict()))["columns"]
    assert [row["values"] for row in done.rows] == [[0.0, 1.0], [1.0, 0.0], [0.0, 0.0]]
    assert list(done.report.rows_skipped) == ["column 'rude' has 'perhaps', which is neither 1 nor 0"]


def test_numbers_are_targets_others_are_skipped(bert: Any) -> None:
    done = prepared(bert, labelled(3, "2.50", -1e-3, "nan", "inf", "0,5", None, "good"), task="regression")
    assert [row["values"] for row in done.rows] == [[3.0], [2.5], [-0.001]]
    assert [(row["label"], row["references"]) for row in done.rows] == [("", ["3.0"]), ("", ["2.5"]), ("", ["-0.001"])]
    assert (done.report.labels, done.report.label_counts) == ((), ())
    assert set(done.report.rows_skipped) == {
        "'nan' is not a finite number", "'inf' is not a finite number", "'0,5' is not a number",
        "'good' is not a number",
        "no value for column 'label'",
    }  # fmt: skip


@pytest.mark.parametrize("task", ["classification", "multi-label", "regression"])
def test_rows_to_predict_need_no_label(task: str, bert: Any) -> None:
    rows = [{"text": "the river", "other": 1}, {"text": "a cough", "label": "strange"}]
    asked = {"labels": () if task == "regression" else ("b", "a"), "needs_target": False}
    done = prepared(bert, rows, asked, task=task)
    assert done.report.labels == asked["labels"]
    assert done.report.columns == {"text": "text"}
    assert [(row["targets"], row["values"], row["references"], row["label"]) for row in done.rows] == [
        ([0], [], [], "")
    ] * 2
    assert not done.report.warnings


@pytest.mark.parametrize("task", ["classification", "multi-label"])
def test_unused_label_does_not_reject_rows(task: str, bert: Any) -> None:
    recipe = Recipe(task=task, **PLAIN, labels={"a": "a", "b": "b", "x": "x"})
    save_dataset(
        tokenize_rows(TokenizeJob.of(recipe, bert, write(labelled("a", "b", "b")), VOCABULARY)), Path("folder")
    )
    done = read_or_prepare(TokenizeJob.of(recipe, bert, Path("folder"), VOCABULARY, labels=("a", "b")))
    assert done.report.label_counts == (1, 2)
    said = [row["targets"] if task == "classification" else row["values"] for row in done.rows]
    assert said == ([[0], [1], [1]] if task == "classification" else [[1, 0], [0, 1], [0, 1]])


@pytest.mark.parametrize("task", ["classification", "multi-label"])
def test_prepared_rows_adopt_training_label_order(task: str, bert: Any) -> None:
    recipe = Recipe(task=task, **PLAIN)
    save_dataset(
        tokenize_rows(TokenizeJob.of(recipe, bert, write(labelled("a", "b", "b")), VOCABULARY)), Path("folder")
    )
    done = read_or_prepare(TokenizeJob.of(recipe, bert, Path("folder"), VOCABULARY, labels=("c", "b", "a")))
    assert (done.report.labels, done.report.label_counts) == (("c", "b", "a"), (0, 2, 1))
    if task == "classification":
        assert [row["targets"] for row in done.rows] == [[2], [1], [1]]
    else:
        assert [row["values"] for row in done.rows] == [[0, 0, 1], [0, 1, 0], [0, 1, 0]]
    with pytest.raises(DataError, match="folder: rows have the label 'b', but the training rows have: a, c"):
        read_or_prepare(TokenizeJob.of(recipe, bert, Path("folder"), VOCABULARY, labels=("a", "c")))


def test_cache_distinguishes_label_arguments(bert: Any) -> None:
    recipe, path = Recipe(task="classification", **PLAIN), write(labelled("a", "b", "b"))
    for asked in (
        {},
        {"labels": ("b", "a")},
        {"known_labels": ("b", "a")},
        {"labels": ("b", "a"), "needs_target": False},
    ):
        wanted = tokenize_rows(TokenizeJob.of(recipe, bert, path, VOCABULARY, **asked))
        for _ in range(2):
            found = read_or_prepare(TokenizeJob.of(recipe, bert, path, VOCABULARY, **asked))
            assert list(found.rows) == list(wanted.rows)
            assert found.report == wanted.report


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"prompt": ""}, "prompt: task=classification needs a text to read"),
        ({"completion": "yes"}, "completion: 'yes' has no field"),
        ({"shorten": "txt"}, "shorten: prompt and pair have no field 'txt' (did you mean 'text'?)"),
        ({"cut": "answer"}, "cut: 'answer' is for task=language-model"),
        ({"packing": "apart"}, "packing: windows of several documents are for task=language-model"),
        ({"task": "language-model", "pair": "{{ other }}"}, "pair: only tasks that label pairs of texts"),
        ({"task": "spans"}, "pair: task=spans needs the text that contains the answer"),
        ({"task": "token-labels", "pair": "{{ other }}"}, "pair: task=token-labels reads one text"),
        ({"max_length": 2}, "max_length: 2 tokens leave no room for a text"),
    ],
)
def test_unusable_task_templates_are_rejected(options: dict[str, Any], said: str, bert: Any) -> None:
    with pytest.raises(UsageError) as caught:
        prepared(bert, labelled("a", "b"), **options)
    assert said in str(caught.value)


def test_labels_are_held_out_proportionally(bert: Any) -> None:
    done = prepared(bert, labelled(*"a" * 60, *"b" * 30, *"c" * 9, "d"))
    for seed in range(5):
        train, held = split(done, 0.1, seed)
        assert held is not None
        counts = {name: list(held.rows["label"]).count(name) for name in "abcd"}
        assert counts == {"a": 6, "b": 3, "c": 1, "d": 0}
        assert "d" in list(train.rows["label"])
    many = prepared(bert, labelled(*"a" * 20, *(f"rare {n}" for n in range(20))))
    train, held = split(many, 0.4, 0)
    assert held is not None
    assert (len(held.rows), set(held.rows["label"])) == (16, {"a"})
    single = prepared(bert, labelled(*"abc"))
    train, held = split(single, 0.5, 0)
    assert held is not None
    assert (len(train.rows), len(held.rows)) == (1, 2) or (len(train.rows), len(held.rows)) == (2, 1)


def test_rows_sharing_first_text_stay_together(bert: Any) -> None:
    rows = [{"one": f"the {n // 3}", "other": f"a {n}", "label": n % 3} for n in range(60)]
    train, held = split(prepared(bert, rows, **PAIR), 0.2, 0)
    assert held is not None
    assert not set(train.rows["group"]) & set(held.rows["group"])


def test_label_set_counts_added_labels() -> None:
    labels = LabelSet()
    assert [labels.add(labels.name_of(text), "f:1") for text in ("b", " a ", "b")] == [0, 1, 0]
    assert labels.order() == ("a", "b")
    assert labels.renumbering().tolist() == [1, 0]
    assert labels.counts() == (1, 2)


def test_oversized_vocabulary_is_rejected(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "bert"))
    with pytest.raises(DataError, match=r"rows\.jsonl:1: token id \d+, but the model's ids end at 9"):
        tokenize_rows(TokenizeJob.of(Recipe(task="classification", **PLAIN), tokenizer, write(labelled("a", "b")), 10))
    report = prepared(tokenizer, labelled("a", "b")).report
    assert replace(report) == report


def test_terminal_shows_label_counts(bert: Any) -> None:
    from io import StringIO

    from rich.console import Console

    from gptj_ft.cli.terminal.data_tables import show_data, show_lengths

    done = prepared(bert, labelled(*"aab", "b" * 3), max_length=5)
    console = Console(file=StringIO(), width=200)
    show_data(console, done.report)
    show_lengths(console, done, Recipe(task="classification", **PLAIN))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "a 2, b 1, bbb 1" in text
    assert "4 places labelled" in text
    assert "4 rows by 4 tokens, to fit in max_length " in text
    assert "answer" not in text
