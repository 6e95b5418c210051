"""Train, evaluate and predict labels from the command line; compare the saved model with transformers."""

from __future__ import annotations

import csv
import json
import string
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from gptj_ft import api
from gptj_ft.checkpoints.model_defaults import within_context
from gptj_ft.checkpoints.tiny import make_tiny
from gptj_ft.config.resolve import resolve
from gptj_ft.data.readers.records import read_rows
from gptj_ft.data.readers.source import identify
from gptj_ft.errors import UsageError
from gptj_ft.evaluation.label_evaluation import plan_labelled

COLOURS = {"red": "rose tomato brick cherry", "blue": "sea sky ink jeans", "green": "grass leaf moss lime"}
TEXTS = 'prompt="{{ text }}" completion="{{ label }}" fields.text=[text] fields.label=[label]'
FEW = "--model tiny-bert --max-length 64 --set on_long=shorten --precision fp32 --set dropout=0 --batch-size 16"


def options(text: str) -> str:
    return " ".join(f"--set '{word}'" for word in text.split("|"))


TEXT = options("prompt={{ text }}|completion={{ label }}|fields.text=[text]|fields.label=[label]")
PAIRS = options("prompt={{ text }}|pair={{ second }}|completion={{ label }}|fields.text=[text]|fields.second=[second]")


def words_of(number: int) -> tuple[str, str]:
    """Return a colour and four words for things of that colour."""
    generator = np.random.default_rng(number)
    colour = list(COLOURS)[number % 3]
    return colour, " ".join(generator.choice(COLOURS[colour].split(), 4))


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "text", "second", "label", "several", "number"])
        for number in range(96):
            colour, text = words_of(number)
            other, second = words_of(number * 7 % 96)
            several = ";".join(sorted({colour, other}))
            writer.writerow([f"r{number}", text, second, colour, several, len(colour) + 0.5])
    return tmp_path / "rows.csv"


def finetune(shell: Any, task: str, more: str, steps: int = 60) -> Any:
    done = shell(f"finetune --set task={task} {more} {FEW} --max-steps {steps} --set lr=3e-3 --output run --quiet")
    assert done.code == 0, done.said
    return done


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def test_text_classification_end_to_end(shell: Any, rows: Path, tmp_path: Path) -> None:
    finetune(shell, "classification", f"--data rows.csv {TEXT} --set holdout=0.25")
    found = shell("evaluate run --json").json
    assert found["model"]["scores"]["accuracy"] == 100.0
    assert found["model"]["scores"]["loss"] < 0.1
    assert {each["name"] for each in found["model"]["labels"]["classes"]} == set(COLOURS)

    given = shell('predict --model run "grass moss leaf" --json').json
    assert given["label"] == "green"
    assert sum(given["probabilities"].values()) == pytest.approx(1.0, abs=1e-5)
    assert shell("predict --model run --input rows.csv --output out.jsonl --keep id,label --quiet").code == 0
    lines = lines_of(tmp_path / "out.jsonl")
    assert [line["id"] for line in lines] == [f"r{number}" for number in range(96)]

    config = json.loads((tmp_path / "run/model/config.json").read_text())
    assert config["id2label"] == {str(n): name for n, name in enumerate(sorted(COLOURS))}
    assert not (tmp_path / "run/model/generation_config.json").exists()
    pipeline = transformers.pipeline("text-classification", str(tmp_path / "run/model"))
    texts = [words_of(number)[1] for number in range(96)]
    for theirs, ours in zip(pipeline(texts), lines, strict=True):
        assert theirs["label"] == ours["label"]
        assert theirs["score"] == pytest.approx(max(ours["probabilities"].values()), abs=1e-4)


def test_evaluation_in_several_passes_covers_all_rows(shell: Any, rows: Path, tmp_path: Path) -> None:
    finetune(shell, "classification", f"--data rows.csv {TEXT} --set holdout=0", steps=2)
    folder = tmp_path / "run/model"
    one = plan_labelled(folder, api.model_options(folder, {}).recipe, rows, None)
    several = replace(one, plan=replace(one.plan, together=replace(one.plan.together, read=64)))
    done = list[tuple[int, int]]()
    evaluation = several.run(lambda *counts: done.append(counts))
    assert done == [(number, 96) for number in range(1, 97)]
    assert evaluation.places == one.run().places == [f"{rows}:{line}" for line in range(2, 98)]
    assert evaluation.scores == pytest.approx(one.run().scores)


def test_preset_length_becomes_models_context(shell: Any, rows: Path, tmp_path: Path) -> None:
    make_tiny(tmp_path / "small", ["rose sea grass"], 0, model_type="bert", max_position_embeddings=32)
    line = "--data rows.csv --recipe classification --set fields.label=[label] --model small"
    done = shell(f"finetune {line} --max-steps 1 --output run")
    assert done.code == 0, done.said
    assert "max_length is 32, the context of the model, and not 512" in " ".join(done.said.split())
    assert "\nmax_length: 32  # the model\n" in (tmp_path / "run/recipe.yaml").read_text()
    prepared = shell(f"prepare-data {line} --output rows")
    assert "max_length is 32, the context of the model, and not 512" in " ".join(prepared.said.split())
    again = shell(f"plan {line.replace('rows.csv', 'rows')} --json")
    assert again.code == 0, again.said


@pytest.mark.parametrize("way", ["flag", "--set", "file", "environment", "api"])
def test_typed_length_above_context_is_rejected(way, shell: Any, rows: Path, tmp_path: Path, monkeypatch) -> None:
    make_tiny(tmp_path / "small", ["rose sea grass"], 0, model_type="bert", max_position_embeddings=32)
    (tmp_path / "c.yaml").write_text("max_length: 64\n")
    if way == "environment":
        monkeypatch.setenv("GPTJ_FT_MAX_LENGTH", "64")
    if way == "api":
        options = {"fields": {"label": ["label"]}, "model": "small", "data": "rows.csv", "max_length": 64}
        with pytest.raises(UsageError, match="max_length 64 is above the model's context of 32 tokens"):
            api.prepare_run("classification", **options)
        return
    more = {"flag": "--max-length 64", "--set": "--set max_length=64", "file": "--config c.yaml"}.get(way, "")
    done = shell(f"plan --data rows.csv --recipe classification --set fields.label=[label] --model small {more}")
    assert done.code == 2
    assert "max_length 64 is above the model's context of 32 tokens" in done.said


def test_stride_follows_lowered_length(tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "small", ["rose sea grass"], 0, model_type="roberta", max_position_embeddings=34)
    resolved = resolve({"recipe": "squad-bert"}, environment={})
    lowered, note = within_context(resolved.recipe, model, resolved.typed)
    assert (lowered.max_length, lowered.stride) == (32, 10)
    assert note == "max_length is 32, the context of the model, and not 384; stride is 10, and not 128"
    typed = resolve({"recipe": "squad-bert", "stride": 4}, environment={})
    assert within_context(typed.recipe, model, typed.typed)[0].stride == 4


@pytest.mark.thorough
def test_pair_classification_end_to_end(shell: Any, rows: Path, tmp_path: Path) -> None:
    finetune(shell, "classification", f"--data rows.csv {PAIRS} --set fields.label=[label] --set holdout=0.25")
    assert shell("evaluate run --json").json["model"]["scores"]["accuracy"] > 80
    assert shell('predict --model run "grass leaf" --pair "sky ink" --json').json["label"] in COLOURS
    refused = shell('predict --model run "grass leaf"')
    assert refused.code == 2
    assert "--pair" in refused.said


@pytest.mark.thorough
def test_multi_label_and_regression_end_to_end(shell: Any, rows: Path, tmp_path: Path) -> None:
    finetune(shell, "multi-label", f"--data rows.csv {PAIRS} --set fields.label=[several] --set holdout=0.25")
    found = shell("evaluate run --json").json["model"]
    assert found["scores"]["micro_f1"] > 70
    given = shell('predict --model run "grass leaf moss lime" --pair "sky ink sea jeans" --json').json
    assert isinstance(given["label"], list)
    config = json.loads((tmp_path / "run/model/config.json").read_text())
    assert config["problem_type"] == "multi_label_classification"
    (tmp_path / "run").rename(tmp_path / "first")
    more = f"--data rows.csv {TEXT} --set fields.label=[number] --set holdout=0.25".replace("fields.label=[label]", "a")
    finetune(shell, "regression", more.replace("--set 'a'", ""))
    assert shell("evaluate run --json").json["model"]["scores"]["pearson"] > 80
    assert shell('predict --model run "grass leaf moss lime" --json').json["score"] == pytest.approx(5.5, abs=1.5)


@pytest.mark.thorough
def test_resumed_run_with_dropout_is_bit_equal(shell: Any, rows: Path, tmp_path: Path) -> None:
    line = f"finetune --set task=classification --data rows.csv {TEXT} {FEW} --set holdout=0.25 --set lr=1e-3"
    line = line.replace("--set dropout=0", "--set dropout=0.3")
    whole = shell(f"{line} --max-steps 8 --output whole --quiet --set weights=disk --set optimizer_state=disk")
    assert whole.code == 0, whole.said
    stopped = shell(f"{line} --max-steps 8 --output stopped --quiet --set max_time=0.001 --set save_every=1")
    assert stopped.code != 0
    done = shell("finetune --resume stopped --quiet --set max_time=null")
    assert done.code == 0, done.said
    for name in ("loss", "grad_norm"):
        curves = [
            [line[name] for line in lines_of(tmp_path / run / "metrics.jsonl") if name in line]
            for run in ("whole", "stopped")
        ]
        assert curves[0] == curves[1]


@pytest.mark.thorough
def test_truncated_predictions_resume_to_the_same_bytes(shell: Any, rows: Path, tmp_path: Path) -> None:
    finetune(shell, "classification", f"--data rows.csv {TEXT} --set holdout=0", steps=2)
    assert shell("predict --model run --input rows.csv --output whole.jsonl --quiet").code == 0
    lines = (tmp_path / "whole.jsonl").read_text().splitlines(keepends=True)
    assert len(lines) == 96
    settings = json.loads((tmp_path / "whole.jsonl.settings.json").read_text()) | {"read": 64}  # tokens per pass
    given = b""
    for cut in (0, 1, 5000, 9000, 9001):  # bytes left by a crash
        (tmp_path / "part.jsonl").write_bytes(given[:cut])
        (tmp_path / "part.jsonl.settings.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
        assert shell("predict --model run --input rows.csv --output part.jsonl --quiet").code == 0
        given = given or (tmp_path / "part.jsonl").read_bytes()
        assert given.count(b"\n") == 96
        assert (tmp_path / "part.jsonl").read_bytes() == given, cut
    assert shell("predict --model run --input rows.csv --output out.csv --keep id --quiet").code == 0
    with (tmp_path / "out.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["label"] for row in table] == [json.loads(line)["label"] for line in lines]
    assert float(table[0]["probability of red"]) == json.loads(lines[0])["probabilities"]["red"]


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("predict x --input rows.csv --output out.jsonl", 2, "a text and --input exclude each other"),
        ("predict --input rows.csv", 2, "--input and --output go together"),
        ("predict --model run --input rows.csv --output out.jsonl --keep idd", 2, "did you mean 'id'"),
        ("predict --model run --set task=spans x", 2, "has no head for spans, but one for classification"),
        ("finetune --set task=spans --model tiny-gpt2 --data rows.csv", 2, "prompt"),
    ],
)
def test_impossible_predictions_fail_with_one_line(shell: Any, rows: Path, line: str, code: int, message: str) -> None:
    if "--model run" in line:
        finetune(shell, "classification", f"--data rows.csv {TEXT} --set holdout=0", steps=1)
    done = shell(line)
    assert done.code == code, done.said
    assert message in done.said


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def texts_with(labels: Sequence[Any]) -> list[dict[str, Any]]:
    return [{"text": words_of(number)[1], "label": label} for number, label in enumerate(labels)]


@pytest.mark.parametrize(
    ("rows_of", "recipe", "model", "code", "message"),
    [
        (texts_with(["same"] * 9), "classification", "tiny-bert", 3, "all have the label 'same': there is nothing to"),
        (texts_with([""] * 9), "classification", "tiny-bert", 3, "none of the 9 rows can be trained on: no value for"),
        ([{"text": "red sky"}] * 9, "classification", "tiny-bert", 3, "target, output; there is no other column"),
        (texts_with(["much"] * 9), "regression", "tiny-bert", 3, "'much' is not a number (9, first at bad.jsonl:1)"),
        ([{"tokens": ["a", "b"], "tags": ["O"]}] * 9, "token-labels", "tiny-bert", 3, "not as many labels as words"),
        ([{"tokens": ["a", "b"], "tags": ["O"]}] * 9, "token-labels", "tiny", 2, "a gptj model cannot be trained for"),
        ([{"text": "A. B.", "summary": "A."}] * 9, "bertsum", "tiny-gpt2", 2, "cannot be trained for task 'sentences'"),
        ([{"text": "A. B.", "summary": "A."}] * 9, "summarization", "tiny-bert", 2, "for task 'language-model'"),
        (texts_with([n % 2 for n in range(9)]), "squad-bert", "tiny-bert", 3, "no column for 'question'"),
    ],
)
def test_unusable_training_rows_leave_no_run(
    shell: Any, tmp_path: Path, rows_of: list[dict[str, Any]], recipe: str, model: str, code: int, message: str
) -> None:
    write_lines(tmp_path / "bad.jsonl", rows_of)
    done = shell(f"finetune --recipe {recipe} --data bad.jsonl --model {model} --output run")
    assert done.code == code, done.said
    assert message in done.said
    assert done.err.count("\n") <= 2
    assert not (tmp_path / "run").exists()


def test_undefined_scores_are_null_in_metrics(shell: Any, tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", texts_with(range(30)))
    write_lines(tmp_path / "val.jsonl", texts_with([3, 3, 3]))
    done = shell(
        f"finetune --recipe regression --data train.jsonl --val-data val.jsonl {FEW} --max-steps 1 --output run --quiet"
    )
    assert done.code == 0, done.said
    first = lines_of(tmp_path / "run/metrics.jsonl")[0]["scores"]
    assert (first["pearson"], first["spearman"]) == (None, None)
    assert first["mse"] > 0


def test_best_by_a_score_that_rows_lack_is_explained(shell: Any, tmp_path: Path) -> None:
    write_lines(tmp_path / "three.jsonl", texts_with([words_of(number)[0] for number in range(30)]))
    line = (
        f"finetune --recipe classification --data three.jsonl {FEW} --max-steps 2 --set validate_every=1 --output run"
    )
    done = shell(f"{line} --set best_by=roc_auc")
    assert done.code == 2, done.said
    assert "best_by: these rows have no score 'roc_auc'; choose from validation_loss, accuracy" in done.said
    assert not (tmp_path / "run/model").exists()


def test_validation_rows_with_unknown_labels_are_skipped(shell: Any, tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", texts_with([words_of(number)[0] for number in range(30)]))
    line = f"finetune --recipe classification --data train.jsonl --val-data val.jsonl {FEW} --dry-run"
    write_lines(tmp_path / "val.jsonl", texts_with(["red", "violet", "blue", "violet"]))
    done = shell(line)
    assert done.code == 0, done.said
    assert "validation rows left out, 2: label 'violet' is none of 'blue', 'green', 'red'" in done.said
    write_lines(tmp_path / "val.jsonl", texts_with(["violet", "pink"]))
    done = shell(line)
    assert done.code == 3
    assert "label 'pink' is none of 'blue', 'green', 'red', the labels of the training rows" in done.said


def test_odd_rows_are_labelled_or_counted(shell: Any, rows: Path, tmp_path: Path) -> None:
    finetune(shell, "classification", f"--data rows.csv {TEXT} --set holdout=0", steps=1)
    odd = [
        {"text": "", "label": "red", "row": "a"},
        {"text": 'sky; "ink",\nsea\u2028jeans', "label": "blue", "row": "b", "=a": "@b\rc", "n": -1, "bad": "é\ud83d"},
    ]
    write_lines(tmp_path / "odd.jsonl", [*odd, {"label": "green", "row": "c"}])
    ask = "predict --model run --input odd.jsonl --output"
    for output, read in (
        ("out.jsonl", lines_of),
        ("out.csv", lambda path: list(csv.DictReader(path.open(newline="")))),
    ):
        done = shell(f"{ask} {output} --keep label,row,text")
        assert done.code == 0, done.said
        assert "1; 1 left out: the field 'text' is empty; 1 left out: no value" in done.said
        (line,) = read(tmp_path / output)
        assert (str(line["row"]), str(line["line"]), line["kept_row"], line["kept_label"]) == ("0", "2", "b", "blue")
        assert line["text"] == odd[1]["text"]
        assert line["label"] in COLOURS
        before = (tmp_path / output).read_bytes()
        again = shell(f"{ask} {output} --keep label,row,text")
        assert (again.code, "1; 1 of them by an earlier session; 1 left out" in again.said) == (0, True), again.said
        assert (tmp_path / output).read_bytes() == before
    hostile = "--keep =a,n --quiet"
    assert shell(f"{ask} guarded.csv {hostile}").code == shell(f"{ask} raw.csv {hostile} --raw-cells").code == 0
    for name, expected in (("guarded.csv", ("'=a", "'@b\rc")), ("raw.csv", ("=a", "@b\rc"))):
        (line,) = csv.DictReader((tmp_path / name).open(newline=""))
        assert (line[expected[0]], line["n"]) == (expected[1], "-1")
        (row,) = read_rows(identify(tmp_path / name))
        assert row.values["=a"] == "@b\rc"
    for name, expected in (("bad.jsonl", "é\ud83d"), ("bad.csv", "é\\ud83d")):
        assert shell(f"{ask} {name} --keep bad --quiet").code == 0
        (row,) = read_rows(identify(tmp_path / name))
        assert row.values["bad"] == expected
    outputs = [path for name in ("out*", "guarded*", "raw*") for path in tmp_path.glob(name)]
    assert {path.stat().st_mode & 0o777 for path in outputs} == {0o600}, "they hold texts"
    assert {path.name for path in tmp_path.glob("out.csv*")} == {"out.csv", "out.csv.settings.json"}
    (tmp_path / "table.csv").write_text("mine")
    for line, code, message in (
        ('predict --model run " "', 3, "the text is empty"),
        (f"{ask} out.txt", 2, "ends in .jsonl or .csv"),
        (f"{ask} odd.jsonl", 2, "odd.jsonl exists and was not made by this command"),
        (f"{ask} out.csv", 2, "out.csv exists and was made with other keep; name a new --output"),
        (f"{ask} guarded.csv {hostile} --raw-cells", 2, "made with other cells"),
        (f"{ask} out2.jsonl --raw-cells", 2, "--raw-cells is for .csv"),
        (f"{ask} table.csv", 2, "table.csv exists and was not made by this command; name a new --output"),
        (f"{ask} out.jsonl --keep row", 2, "made with other keep"),
        (f"{ask} out.jsonl --keep label,row,text --precision bf16", 2, "made with other precision"),
        (f"{ask} none/out.jsonl", 2, "cannot write none/out.jsonl"),
        ("predict --model tiny-bert text", 2, "name that run or its model folder"),
        ("generate --model run text", 2, "writes no text"),
        ("evaluate run --recipe summarization --data rows.csv", 2, "writes no text"),
        ("finetune --resume run --data odd.jsonl", 2, "run is finished"),
    ):
        done = shell(line)
        assert (done.code, message in done.said) == (code, True), (line, done.said)
    assert len(lines_of(tmp_path / "odd.jsonl")) == 3


def write_squad(path: Path) -> dict[str, list[str]]:
    """Write questions in SQuAD v2.0's format, one article per line; return the accepted answers by id."""
    truth: dict[str, list[str]] = {}
    articles = []
    for article in range(3):
        paragraphs = []
        for number in range(2):
            text = (
                f"Room {article} on floor {number} has {article + number} beds. " + "Nobody sleeps in it. " * 9 * number
            )
            questions = [
                {"id": f"q{article}{number}{n}", "question": question, "is_impossible": not start, "answers": [
                    {"text": text[start:start + 6], "answer_start": start}] if start else []}
                for n, (question, start) in enumerate([("Which room?", 0), ("Which floor?", 10), ("How?", 21)])
            ]  # fmt: skip
            truth |= {each["id"]: [answer["text"] for answer in each["answers"]] for each in questions}
            paragraphs.append({"context": text, "qas": questions})
        articles.append(json.dumps({"title": "rooms", "paragraphs": paragraphs}))
    path.write_text('{"version": "v2.0", "data": [\n' + ",\n".join(articles) + "]}\n", encoding="utf-8")
    return truth


def official_squad2(predictions: dict[str, str], truth: dict[str, list[str]]) -> dict[str, float]:
    """Score as evaluate-v2.0.py does: a question without an answer expects an empty prediction."""

    def words(text: str) -> list[str]:
        kept = "".join(each for each in text.lower() if each not in string.punctuation)
        return [word for word in kept.split() if word not in ("a", "an", "the")]

    def f1(given: list[str], right: list[str]) -> float:
        if not given or not right:
            return float(given == right)
        same = sum((Counter(given) & Counter(right)).values())
        return 2 * same / (len(given) + len(right))

    exact = [float(any(words(predictions[id]) == words(each) for each in texts or [""])) for id, texts in truth.items()]
    overlap = [max(f1(words(predictions[id]), words(each)) for each in texts or [""]) for id, texts in truth.items()]
    return {"exact_match": 100 * sum(exact) / len(exact), "f1": 100 * sum(overlap) / len(overlap)}


@pytest.mark.thorough
def test_answers_by_id_match_squads_script(shell: Any, tmp_path: Path) -> None:
    truth = write_squad(tmp_path / "dev.json")
    line = f"finetune --recipe squad2-bert --data dev.json --val-data dev.json {FEW} --max-steps 30 --set lr=3e-3"
    done = shell(f"{line} --set stride=8 --output run --quiet")
    assert done.code == 0, done.said
    ask = "predict --model run --input dev.json --output"
    assert shell(f"{ask} predictions.json").code == 0
    given = json.loads((tmp_path / "predictions.json").read_text(encoding="utf-8"))
    odds = json.loads((tmp_path / "predictions.null_odds.json").read_text(encoding="utf-8"))
    assert list(given) == list(odds) == list(truth)
    assert [text == "" for text in given.values()] == [each > 0 for each in odds.values()]
    assert {"", *given.values()} != {""}
    official = official_squad2(given, truth)
    for scores in (
        shell("evaluate run --data dev.json --json").json["model"]["scores"],
        shell("evaluate --predictions predictions.json --data dev.json --recipe squad --json").json["model"]["scores"],
    ):
        assert {name: scores[name] for name in official} == pytest.approx(official)

    assert shell(f"{ask} lines.jsonl --keep id").code == 0
    assert [line["id"] for line in lines_of(tmp_path / "lines.jsonl")] == list(truth), "a line has many questions"
    before = (tmp_path / "predictions.json").read_bytes()
    again = shell(f"{ask} predictions.json")
    assert (again.code, f"{len(truth)} of them by an earlier session" in again.said) == (0, True)
    assert (tmp_path / "predictions.json").read_bytes() == before


def test_answers_by_id_need_unique_ids(shell: Any, rows: Path, tmp_path: Path) -> None:
    write_squad(tmp_path / "dev.json")
    questions = [{"question": "Which?", "context": "A room.", "id": id} for id in ("a", "b", "a")]
    write_lines(tmp_path / "twice.jsonl", questions)
    write_lines(tmp_path / "none.jsonl", [{name: row[name] for name in ("question", "context")} for row in questions])
    text = (tmp_path / "dev.json").read_text(encoding="utf-8")
    (tmp_path / "empty.json").write_text(text.replace("Which floor?", " ", 1), encoding="utf-8")
    line = f"finetune --recipe squad2-bert --data dev.json {FEW} --max-steps 1 --set stride=8 --set holdout=0"
    assert shell(f"{line} --output asked").code == 0
    finetune(shell, "classification", f"--data rows.csv {TEXT} --set holdout=0", steps=1)
    (tmp_path / "there.null_odds.json").write_text("mine")
    for line, message in (
        ("predict --model asked --input twice.jsonl --output out.json", "2 questions have the id 'a'"),
        ("predict --model asked --input none.jsonl --output out.json", "no such column"),
        ("predict --model asked --input dev.json --output out.json --keep title", "without --keep"),
        ("predict --model asked --input dev.json --output there.json", "there.null_odds.json exists"),
        ("predict --model asked --input empty.json --output out.json", "empty.json:2: 6 rows are on this line"),
        ("predict --model run --input rows.csv --output out.json", ".json is for answers to questions"),
    ):
        done = shell(line)
        assert (done.code, message in done.said) == (2, True), (line, done.said)
    assert not list(tmp_path.glob("out.json*"))
    assert (tmp_path / "there.null_odds.json").read_text() == "mine"


def test_gpt_classifier_matches_transformers(shell: Any, rows: Path, tmp_path: Path) -> None:
    few = FEW.replace("tiny-bert", "tiny-gpt2")
    line = f"finetune --set task=classification --data rows.csv {TEXT} {few} --max-steps 60 --set lr=3e-3"
    done = shell(f"{line} --set holdout=0.25 --output run --quiet")
    assert done.code == 0, done.said
    assert shell("evaluate run --json").json["model"]["scores"]["accuracy"] > 90
    assert shell("predict --model run --input rows.csv --output out.jsonl --quiet").code == 0
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "run/model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "run/model")
    for number, line in enumerate(lines_of(tmp_path / "out.jsonl")[:9]):
        with torch.no_grad():
            logits = model(**tokenizer(words_of(number)[1], return_tensors="pt")).logits[0]
        assert model.config.id2label[int(logits.argmax())] == line["label"]
        assert logits.softmax(0).max().item() == pytest.approx(max(line["probabilities"].values()), abs=1e-4)


@pytest.mark.thorough
def test_foreign_head_is_evaluated_and_asked(shell: Any, rows: Path, tmp_path: Path) -> None:
    finetune(shell, "classification", f"--data rows.csv {TEXT} --set holdout=0.25")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "run/model")
    model.save_pretrained(tmp_path / "theirs")
    transformers.AutoTokenizer.from_pretrained(tmp_path / "run/model").save_pretrained(tmp_path / "theirs")
    found = shell("evaluate theirs --data rows.csv --json").json["model"]
    assert found["scores"]["accuracy"] == 100.0
    assert shell('predict --model theirs "sky sea ink" --json').json["label"] == "blue"
    converted = shell("convert theirs mine")
    following = 'next: gptj-ft predict --model mine "text"\n      gptj-ft evaluate mine --data test.jsonl\n'
    assert (converted.code, converted.out.endswith(following)) == (0, True), converted.out
