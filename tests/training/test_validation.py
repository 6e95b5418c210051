"""Test sampled answers, the best state by a score, and patience."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.small_run import assert_same_weights, new_run, small_session, weights_of
from support.small_stack import oracle_loss
from transformers import GPTJForCausalLM

from gptj_ft.config.resolve import build
from gptj_ft.config.run_folder import Run
from gptj_ft.data.batches import Rows
from gptj_ft.errors import UsageError
from gptj_ft.training.restore import open_state
from gptj_ft.training.retention import check_keep, is_better
from gptj_ft.training.row_scores import validate

LINE = (
    "finetune --recipe summarization --data rows.jsonl --model tiny --lr 5e-3 --batch-size 8 --max-steps 4 "
    "--max-length 128 --set holdout=0.2 --set generation.max_new_tokens=4"
)


def test_validation_loss_is_transformers_token_mean(tmp_path: Path) -> None:
    setup, run = small_session(tmp_path, dropout=0.5, weights="device", optimizer_state="device"), new_run(tmp_path)
    documents, prompts = [list(range(1, end)) for end in (5, 9, 25, 7)], [1, 6, 3, 0]
    run.start_record(setup.recipe)
    stack, *_ = open_state(setup, run)
    losses = [validate(stack, Rows(documents, prompts), tokens, span_tokens=30).mean for tokens in (1, 16, 100)]
    stack.close()
    with torch.no_grad():
        expected = oracle_loss(GPTJForCausalLM.from_pretrained(tmp_path).eval(), documents, prompts=prompts)
    assert losses == [pytest.approx(expected.item(), rel=1e-6)] * 3


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("place", "settings"), [("host", "--set generation.temperature=1.0"), ("disk", "--set generation.num_beams=2")]
)
def test_validation_changes_no_training_bit(place: str, settings: str, shell, rows_file: Path) -> None:
    line = f"{LINE} --weights {place} --optimizer-state {place} {settings} --json"
    torch.manual_seed(5)
    before = torch.get_rng_state()
    plain = shell(f"{line} --output plain")
    assert plain.code == 0, plain.err
    watched = shell(f"{line} --output watched --validate-every 1 --set sample_rows=3")
    assert watched.code == 0, watched.err
    assert torch.equal(torch.get_rng_state(), before)
    assert_same_weights(weights_of(Path("watched/model")), weights_of(Path("plain/model")))
    losses = [[each["loss"] for each in Run(Path(name)).metrics() if "loss" in each] for name in ("plain", "watched")]
    assert losses[0] == losses[1]


def test_sample_answers_are_saved_but_not_logged(shell, rows_file: Path) -> None:
    done = shell(f"{LINE} --output run --validate-every 2 --set sample_rows=3")
    assert done.code == 0, done.err
    files = sorted(path.name for path in Path("run/samples").iterdir())
    assert files == ["step-000000.jsonl", "step-000002.jsonl", "step-000004.jsonl"]
    rows = [[json.loads(text) for text in (Path("run/samples") / name).read_text().splitlines()] for name in files]
    assert [[row["place"] for row in each] for each in rows] == [[row["place"] for row in rows[0]]] * 3
    assert len(rows[0]) == 3
    lines = [line for line in Run(Path("run")).metrics() if "validation_loss" in line]
    assert all(
        set(line["scores"]) == {"rouge1", "rouge2", "rougeL", "rougeLsum", "rougeLsum_sentences"} for line in lines
    )
    assert "rougeL" in done.err
    assert rows[0][0]["references"][0] not in done.err + done.out
    again = shell(
        "evaluate --predictions run/samples/step-000004.jsonl --recipe summarization --allow-empty --json"
    ).json
    assert again["model"]["scores"] == pytest.approx(lines[-1]["scores"])
    assert "rougeL of the sample" in Path("run/report.html").read_text(encoding="utf-8")


def test_patience_ends_training_at_best_score(shell, rows_file: Path, monkeypatch) -> None:
    from gptj_ft.training import validation
    from gptj_ft.training.validation import ValidationSample

    scores = {
        0: 9.0,
        1: 3.0,
        2: 5.0,
        3: 5.0,
        4: 1.0,
    }  # before training does not count, nor the same once more

    class Told:
        def __init__(self, *_: object) -> None:
            pass

        def take(self, stack, step: int) -> ValidationSample:
            return ValidationSample({"rougeL": scores[step]}, "", "")

    monkeypatch.setattr(validation, "ValidationSamples", Told)
    options = "--validate-every 1 --set sample_rows=1 --set best_by=rougeL --set patience=2 --export best"
    done = shell(f"{LINE} --max-steps 9 --output run {options} --json".replace("--max-steps 4 ", ""))
    assert done.code == 0, done.err
    assert done.json["steps"] == 4
    assert done.json["exported_step"] == 2
    assert done.json["best"]["rougeL"] == 5.0
    assert "no better state in 2 validations" in Path("run/log.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"patience": 2}, "add --validate-every"),
        ({"sample_rows": 2}, "scored by the recipe's metrics"),
        ({"best_by": "rougeL"}, "set sample_rows"),
        ({"best_by": "rougel", "sample_rows": 2, "metrics": ["rouge"]}, "did you mean 'rougeL'"),
    ],
)
def test_patience_without_validations_is_rejected(options: dict, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        check_keep(build(options), num_validation_rows=3)


def test_lower_losses_and_higher_scores_are_better() -> None:
    assert is_better("validation_loss", 1.0, 2.0)
    assert not is_better("validation_loss", 2.0, 2.0)
    assert is_better("mse", 0.1, 0.5)
    assert not is_better("mse", 0.5, 0.1)
    assert is_better("f1", 2.0, 1.0)
    assert not is_better("f1", 1.0, 1.0)
    assert is_better("f1", 0.0, float("nan")), "the best so far was chosen by something else"
