"""Plant canaries: where they stand in the rows, what is trained on, and which options they refuse."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pyarrow
import pytest

from gptj_ft.checkpoints.tiny import make_tiny
from gptj_ft.config.resolve import build
from gptj_ft.data.canaries import alternatives, check_planted, draw_canaries, plant, planted_rows
from gptj_ft.data.dataset import Prepared
from gptj_ft.data.load import read_or_prepare
from gptj_ft.data.loss_mask import span_borders
from gptj_ft.data.prepare import TokenizeJob
from gptj_ft.data.tokenization import NoTokenizer, load_tokenizer
from gptj_ft.errors import DataError, UsageError

OPTIONS = {"canaries": 4, "canary_repeats": (1, 3), "seed": 7, "max_length": 512}
PROMPTS = {
    "on_long": "skip",
    "prompt": "{{ note }}\n",
    "completion": "{{ answer }}",
    "fields": {"note": ["note"], "answer": ["answer"]},
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory):
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "rotary_dim": 4, "n_positions": 512}
    texts = ["The access code of Alder Arden is 1 2 3 4 5 6 7 8 9 0."] * 40
    return load_tokenizer(make_tiny(tmp_path_factory.mktemp("tiny") / "m", texts, seed=3, vocab_target=280, **sizes))


def prepared(tokenizer, path: Path, **options: object) -> Prepared:
    rows = [{"note": f"Note {n} of the day.", "answer": f"Answer {n}."} for n in range(10)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return read_or_prepare(TokenizeJob.of(build({**PROMPTS, **OPTIONS, **options}), tokenizer, path, 300))


def test_canaries_depend_on_the_seed_only() -> None:
    canaries, controls = draw_canaries(build(OPTIONS))
    assert (canaries, controls) == draw_canaries(build({**OPTIONS, "lr": 1.0}))
    assert canaries != draw_canaries(build({**OPTIONS, "seed": 8}))[0]
    assert [each.repeats for each in canaries] == [1, 3, 1, 3]
    assert [each.repeats for each in controls] == [0] * 4
    assert len({each.name for each in [*canaries, *controls]}) == 8
    others = alternatives(canaries[0], 100, seed=7)
    assert len(set(others)) == 100
    assert canaries[0].secret not in others


def test_planted_secrets_are_trained_on(tokenizer, tmp_path: Path) -> None:
    rows, recipe = prepared(tokenizer, tmp_path / "rows.jsonl"), build({**PROMPTS, **OPTIONS})
    planted = plant(rows, recipe, tokenizer)
    assert list(planted.rows)[: len(rows.rows)] == list(rows.rows), "other rows stay as they are"
    canaries, texts = {each.number: each for each in draw_canaries(recipe)[0]}, []
    for row, number in planted_rows(planted.rows).items():
        values = next(iter(planted.rows.select([row])))
        spans = list(pairwise(span_borders(values)))[1::2]
        trained = "".join(tokenizer.decode(values["input_ids"][start:end]) for start, end in spans)
        assert trained.endswith(f"{canaries[number].text}{tokenizer.eos_token}")
        assert trained.startswith("Answer "), "the canary follows the answer of the copied row"
        texts.append(number)
    assert sorted(texts) == [1, 2, 2, 2, 3, 4, 4, 4]
    report = planted.report
    assert (report.windows, report.rows_kept) == (18, 10)
    assert report.target_tokens == planted.rows.num_targets() > rows.report.target_tokens
    assert "4 random secrets are planted in 8 further training rows" in report.notes[-1]


def test_canary_stands_in_the_last_trained_span(tokenizer, tmp_path: Path) -> None:
    rows = prepared(tokenizer, tmp_path / "rows.jsonl")
    batch = next(rows.rows.batches())
    masked = batch.set_column(2, "untrained", pyarrow.array([[8, 10]] * 10, batch.schema.types[2]))
    table = type(rows.rows)([masked])
    planted = plant(Prepared(table, rows.report), build({**PROMPTS, **OPTIONS}), tokenizer)
    for row in planted_rows(planted.rows):
        values = next(iter(planted.rows.select([row])))
        assert values["untrained"] == [8, 10], "the masked span before the canary stays"


def test_rows_of_another_version_are_rejected(tokenizer, tmp_path: Path) -> None:
    recipe = build({**PROMPTS, **OPTIONS})
    planted = plant(prepared(tokenizer, tmp_path / "rows.jsonl"), recipe, tokenizer)
    canaries, rows = draw_canaries(recipe)[0], planted_rows(planted.rows)
    check_planted(planted.rows, rows, canaries, tokenizer)
    others = draw_canaries(build({**OPTIONS, "seed": 8}))[0]
    with pytest.raises(DataError, match=r"lacks canary \d: the run is of another version"):
        check_planted(planted.rows, rows, others, tokenizer)
    with pytest.raises(DataError, match="rows with canaries are missing"):
        check_planted(planted.rows, dict(list(rows.items())[1:]), canaries, tokenizer)


def test_canaries_need_room_and_a_tokenizer(tokenizer, tmp_path: Path) -> None:
    rows = prepared(tokenizer, tmp_path / "rows.jsonl", max_length=40)
    with pytest.raises(DataError, match=r"no training row leaves room for the \d+ tokens of a canary"):
        plant(rows, build({**PROMPTS, **OPTIONS, "max_length": 40}), tokenizer)
    with pytest.raises(UsageError, match="the model has no tokenizer"):
        plant(rows, build({**PROMPTS, **OPTIONS}), NoTokenizer(tmp_path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "--train 'h.1.*'",
            "canaries measure how a whole model or an adapter memorizes, and train=h.1.* freezes parameters",
        ),
        ("--recipe classification", "canaries are for language models: a head for 'classification' learns no text"),
    ],
)
def test_canaries_that_nobody_would_learn(shell, rows_file: Path, options: str, message: str) -> None:
    refused = shell(f"finetune --model tiny --data {rows_file} --canaries 3 {options}")
    assert refused.code == 2
    assert message in " ".join(refused.err.split())
    assert not Path("runs").exists()
