"""Data on the command line: ambiguous columns, packing, conversations, rows of token ids."""

from __future__ import annotations

import json
from contextlib import redirect_stderr
from pathlib import Path

import pytest
from support.cli_runner import Terminal
from support.token_files import sample, text_record, write_hdf5

from gptj_ft.data.dataset import load_dataset


def write(name: str, rows: list[dict[str, object]]) -> Path:
    path = Path(name)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


NOTES = [{"body": f"The patient came {n} times with a cough.", "article": "x", "tl_dr": f"cough {n}"} for n in range(8)]


def test_ambiguous_column_error_suggests_map(shell) -> None:
    write("notes.jsonl", NOTES)
    command = "prepare-data --data notes.jsonl --recipe summarization --model tiny"
    told = shell(command)
    assert told.code == 3
    assert "'document' may be any of the columns article, body; there are: body, article, tl_dr" in told.err
    assert "--map document=article" in told.err
    assert not Path("notes.jsonl.prepared").exists()
    done = shell(f"{command} --map document=body,summary=tl_dr")
    assert done.code == 0
    assert "document = column 'body'" in done.said


def test_repeated_map_flags_add_up(shell) -> None:
    write("notes.jsonl", NOTES)
    command = "prepare-data --data notes.jsonl --recipe summarization --model tiny"
    named = shell(f"{command} --map document=body --map summary=tl_dr")
    assert named.code == 0, named.said
    assert load_dataset(Path("notes.jsonl.prepared")).report.columns == {"document": "body", "summary": "tl_dr"}
    twice = shell(f"{command} --map document=body --map document=article")
    assert twice.code == 2
    assert "document is both body and article: use one; several right answers: document=body+article" in twice.err


def test_terminal_asks_for_ambiguous_columns(shell) -> None:
    write("notes.jsonl", NOTES)
    command = "prepare-data --data notes.jsonl --recipe summarization --model tiny"
    keyboard, screen = Terminal("nothing\n"), Terminal()
    with redirect_stderr(screen):
        done = shell(command, stdin=keyboard)
    assert (done.code, "Aborted" in screen.getvalue()) == (2, False)
    assert "no column chosen for 'document': add --map document=COLUMN" in " ".join(screen.getvalue().split())
    keyboard.write("\nbody\ntl_dr\n")
    keyboard.seek(0)
    with redirect_stderr(screen):
        done = shell(command, stdin=keyboard)
    assert done.code == 0
    for line in ("column for 'document' (article, body): no column 'nothing'; type one of the names above",
                 "column for 'document' (article, body): ", "column for 'summary' (article, tl_dr): "):  # fmt: skip
        assert line in screen.getvalue()
    assert load_dataset(Path("notes.jsonl.prepared")).report.columns == {"document": "body", "summary": "tl_dr"}
    with redirect_stderr(screen):  # --json asks nothing
        assert shell(f"{command} --output other --json", stdin=keyboard).code == 3


@pytest.mark.parametrize("packing", ["apart", "joined"])
def test_plain_text_is_packed_into_windows(shell, packing) -> None:
    write("texts.jsonl", [{"text": f"A short text, number {n}."} for n in range(40)])
    options = f"--recipe continuous-pretraining --model tiny --set packing={packing} --max-length 64 --set holdout=0"
    told = shell(
        f"finetune {options} --data texts.jsonl --batch-size 2 --epochs 1 --set schedule=constant --output run --json"
    )
    assert told.code == 0, told.err
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "tokens" in line and "loss" in line]
    tokens = load_dataset(Path("run/data/train")).report.tokens
    windows = -(-tokens // 64)
    assert len(steps) in (-(-windows // 2), -(-(windows + 1) // 2)), "two windows a step, the last one short"
    assert all(126 <= line["tokens"] <= 128 for line in steps[:-2])
    trained = sum(line["target_tokens"] for line in steps)
    assert trained == tokens - (1 if packing == "joined" else 40)


@pytest.mark.thorough
def test_chat_rows_train_evaluate_and_generate(shell) -> None:
    turns = [("user", "Who came?"), ("assistant", "A patient."), ("user", "Why?"), ("assistant", "A cough.")]
    messages = [{"role": role, "content": text} for role, text in turns]
    write("chats.jsonl", [{"messages": messages}, {"messages": messages[:2]}] * 4)
    shown = shell("prepare-data --data chats.jsonl --recipe chat --model tiny --show 1")
    assert shown.code == 0, shown.err
    assert "Assistant:« A patient.»\n\nUser: Why?\n\nAssistant:« A cough.<|endoftext|>»" in shown.out
    assert "no chat template: conversations are written as 'User: ...' and 'Assistant: ...'" in shown.said
    planned = shell("plan --recipe chat --model tiny --data chats.jsonl --json")
    assert any("no chat template" in note for note in planned.json["notes"])
    trained = shell("finetune --recipe chat --model tiny --data chats.jsonl --output run --max-steps 1")
    assert trained.code == 0, trained.err
    assert "no chat template" in trained.said
    measured = shell("evaluate run --limit 1 --set generation.max_new_tokens=2 --json")
    assert measured.code == 0, measured.err
    assert shell('generate "Who came?" --model run --max-new-tokens 2').code == 0


def test_token_rows_are_used_unchanged(shell) -> None:
    write("texts.jsonl", [{"text": "The patient came with a cough."}] * 3)
    assert shell("prepare-data --data texts.jsonl --recipe continuous-pretraining --model tiny").code == 0
    model = next((Path("home") / "models").iterdir())
    write(
        "tokens.jsonl",
        [{"input_ids": [5, 6, 7, 8], "trained": [2, 4]}, {"input_ids": [5, "x"]}, {"input_ids": [9, 10]}],
    )
    told = shell(f"prepare-data --data tokens.jsonl --recipe summarization --model {model}")
    assert told.code == 0, told.err
    assert "skipped 1 row: input_ids is not a list of token ids (tokens.jsonl:2)" in told.said
    prepared = load_dataset(Path("tokens.jsonl.prepared"))
    assert list(prepared.rows["input_ids"]) == [[5, 6, 7, 8], [9, 10]]
    assert list(prepared.rows["prompt_length"]) == [2, 0]
    assert prepared.report.target_tokens == 3


def test_foreign_token_files_keep_their_loss_mask(shell, tmp_path) -> None:
    write("texts.jsonl", [{"text": "The patient came with a cough."}] * 3)
    assert shell("prepare-data --data texts.jsonl --recipe continuous-pretraining --model tiny").code == 0
    model = next((Path("home") / "models").iterdir())
    (tmp_path / "windows.tfrecords").write_bytes(b"".join(text_record(list(range(n, n + 9))) for n in range(1, 5)))
    write_hdf5(tmp_path / "samples.h5", [sample([5, 6, 7, 8], {2, 3}, 8), sample([9, 10, 11], {1}, 8)])
    options = f"--recipe continuous-pretraining --model {model} --max-length 8"
    told = shell(f"prepare-data --data windows.tfrecords {options}")
    assert told.code == 0, told.err
    windows = load_dataset(Path("windows.tfrecords.prepared"))
    assert windows.report.target_tokens == 4 * 8, "2049 tokens are 2048 targets there, and are so here"
    assert [windows.report.windows, *map(len, windows.rows["input_ids"])] == [4, 9, 9, 9, 9]
    assert shell(f"prepare-data --data samples.h5 {options}").code == 0
    samples = load_dataset(Path("samples.h5.prepared"))
    assert list(samples.rows["input_ids"]) == [[5, 6, 7, 8], [9, 10]]
    assert list(samples.rows["prompt_length"]) == [2, 0]
    done = shell(f"finetune --data samples.h5 {options} --max-steps 1 --set schedule=constant --output run --json")
    assert done.code == 0, done.err


def test_token_rows_need_no_tokenizer(shell, tmp_path) -> None:
    write("texts.jsonl", [{"text": "The patient came with a cough."}] * 3)
    assert shell("prepare-data --data texts.jsonl --recipe continuous-pretraining --model tiny").code == 0
    model = next((Path("home") / "models").iterdir())
    size = json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    write("tokens.jsonl", [{"input_ids": [5, size - 1, 6, 7, 5 + n]} for n in range(3)])
    told = shell(f"prepare-data --recipe summarization --data tokens.jsonl --model {model} --json")
    assert [found["count"] for what, found in told.json["warnings"].items() if "its tokenizer lacks" in what] == [3]
    measured = shell(f"evaluate {model} --recipe summarization --data tokens.jsonl --json")
    assert measured.code == 0, measured.err
    lacking = measured.json["model"]
    assert lacking["scores"].keys() == {"loss", "perplexity", "token_accuracy"}
    assert "the tokenizer lacks their ids" in lacking["notes"][-1]
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (model / name).unlink(missing_ok=True)
    told = shell(f"finetune --recipe summarization --data tokens.jsonl --model {model} --max-steps 1 --output run")
    assert told.code == 0, told.err
    assert not list(Path("run/model").glob("tokenizer*"))
    assert shell("evaluate run --data tokens.jsonl --json").json["baseline"]["loss"] == lacking["loss"]
    for command in (f"finetune --data texts.jsonl --model {model}", 'generate --model run "Who?"'):
        refused = shell(command)
        assert refused.code == 2
        assert "has no tokenizer" in refused.err


@pytest.mark.thorough
def test_new_rows_are_not_cut_around_answers(shell) -> None:
    rows = [
        {
            "context": f"It was cold. {'A word. ' * 200}The room had number {n}.",
            "question": "Which?",
            "answer": f"number {n}",
        }
        for n in range(8)
    ]
    write("qa.jsonl", rows)
    options = "--recipe qa --model tiny --max-length 120 --set generation.max_new_tokens=2 --max-steps 1"
    assert shell(f"finetune {options} --data qa.jsonl --output run --json").code == 0
    held_out = shell("evaluate run --baseline none")
    assert "rows were shortened around their answers" in held_out.said
    assert "shortened around" not in shell("evaluate run --baseline none --data qa.jsonl").said
    seen = shell("evaluate run --baseline none --data qa.jsonl --show 1 --json")
    assert seen.code == 0
    assert seen.json["model"]["notes"] == []


def test_tiny_model_is_made_from_rows_with_lone_surrogates(shell, tmp_path: Path) -> None:
    rows = [{"document": f"The lift stops at {n}.", "summary": "A lift.", "extra": "\ud800"} for n in range(9)]
    (tmp_path / "odd.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    done = shell("prepare-data --recipe summarization --data odd.jsonl --model tiny --output rows --json")
    assert done.code == 0, done.err
