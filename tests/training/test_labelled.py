"""Tasks with labels from the command line: finetune, evaluate, predict, and the model that is left."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

COLOURS = {"red": "rose tomato brick cherry", "blue": "sea sky ink jeans", "green": "grass leaf moss lime"}
TEXTS = 'prompt="{{ text }}" completion="{{ label }}" fields.text=[text] fields.label=[label]'
FEW = "--model tiny-bert --max-length 64 --set on_long=shorten --precision fp32 --set dropout=0 --batch-size 16"


def options(text: str) -> str:
    return " ".join(f"--set '{word}'" for word in text.split("|"))


TEXT = options("prompt={{ text }}|completion={{ label }}|fields.text=[text]|fields.label=[label]")
PAIRS = options("prompt={{ text }}|pair={{ second }}|completion={{ label }}|fields.text=[text]|fields.second=[second]")


def words_of(number: int) -> tuple[str, str]:
    """Return a colour, and things of that colour."""
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
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_label_of_a_text_is_learned_measured_and_given(shell: Any, rows: Path, tmp_path: Path) -> None:
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


def test_labels_of_pairs_are_learned(shell: Any, rows: Path, tmp_path: Path) -> None:
    finetune(shell, "classification", f"--data rows.csv {PAIRS} --set fields.label=[label] --set holdout=0.25")
    assert shell("evaluate run --json").json["model"]["scores"]["accuracy"] > 80
    assert shell('predict --model run "grass leaf" --pair "sky ink" --json').json["label"] in COLOURS
    refused = shell('predict --model run "grass leaf"')
    assert refused.code == 2
    assert "--pair" in refused.said


def test_several_labels_and_numbers_are_learned(shell: Any, rows: Path, tmp_path: Path) -> None:
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


def test_a_stopped_run_goes_on_to_the_bits_of_one_never_stopped(shell: Any, rows: Path, tmp_path: Path) -> None:
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


def test_predictions_that_were_interrupted_go_on_and_tables_are_whole(shell: Any, rows: Path, tmp_path: Path) -> None:
    finetune(shell, "classification", f"--data rows.csv {TEXT} --set holdout=0", steps=2)
    assert shell("predict --model run --input rows.csv --output whole.jsonl --quiet").code == 0
    lines = (tmp_path / "whole.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "part.jsonl").write_text("".join(lines[:0]))
    (tmp_path / "part.jsonl.settings.json").write_text((tmp_path / "whole.jsonl.settings.json").read_text())
    assert shell("predict --model run --input rows.csv --output part.jsonl --quiet").code == 0
    assert (tmp_path / "part.jsonl").read_text() == "".join(lines)
    assert shell("predict --model run --input rows.csv --output out.csv --keep id --quiet").code == 0
    with (tmp_path / "out.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["label"] for row in table] == [json.loads(line)["label"] for line in lines]
    assert float(table[0]["probability of red"]) == json.loads(lines[0])["probabilities"]["red"]


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("predict x --input rows.csv --output out.jsonl", 2, "two ways of asking"),
        ("predict --input rows.csv", 2, "--input and --output go together"),
        ("predict --model run --input rows.csv --output out.jsonl --keep idd", 2, "did you mean 'id'"),
        ("predict --model run --set task=spans x", 2, "has no head for spans, but one for classification"),
        ("finetune --set task=spans --model tiny-gpt2 --data rows.csv", 2, "prompt"),
    ],
)
def test_what_cannot_be_labelled_is_one_line(shell: Any, rows: Path, line: str, code: int, said: str) -> None:
    if "--model run" in line:
        finetune(shell, "classification", f"--data rows.csv {TEXT} --set holdout=0", steps=1)
    done = shell(line)
    assert done.code == code, done.said
    assert said in done.said


def test_a_decoder_learns_labels_too_and_transformers_opens_it(shell: Any, rows: Path, tmp_path: Path) -> None:
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


def test_a_head_that_was_tuned_elsewhere_is_measured_and_asked(shell: Any, rows: Path, tmp_path: Path) -> None:
    finetune(shell, "classification", f"--data rows.csv {TEXT} --set holdout=0.25")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "run/model")
    model.save_pretrained(tmp_path / "theirs")
    transformers.AutoTokenizer.from_pretrained(tmp_path / "run/model").save_pretrained(tmp_path / "theirs")
    found = shell("evaluate theirs --data rows.csv --json").json["model"]
    assert found["scores"]["accuracy"] == 100.0
    assert shell('predict --model theirs "sky sea ink" --json').json["label"] == "blue"
