"""The command that writes: one prompt, rows of a file, a conversation."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from conftest import NOTES

from gptj_ft.checkpoints.metadata import ModelMetadata, template_of
from gptj_ft.checkpoints.model_folder import METADATA_FILE
from gptj_ft.checkpoints.tiny import make_tiny
from gptj_ft.config.options import Generation, Recipe
from gptj_ft.config.presets import load_preset
from gptj_ft.config.resolve import build
from gptj_ft.evaluation.row_job import OutputFile
from gptj_ft.generation import chat, decoding
from gptj_ft.generation.chat import run_chat
from gptj_ft.generation.decoding import AnswerStreamer
from gptj_ft.generation.generator import GenerationSetup, Generator, open_generator

SHORT = {"max_length": 96, "device": "cpu", "precision": "fp32"}


def remember(folder: Path, recipe: Recipe) -> Path:
    """Have a model folder remember a recipe as if it had been tuned with it."""
    tuning = ModelMetadata("base", template_of(recipe), {}, {})
    (folder / METADATA_FILE).write_text(json.dumps(tuning.to_dict()), encoding="utf-8")
    return folder


def tiny(folder: Path, preset: str, **generation: object) -> Path:
    options = load_preset(preset)
    options["generation"] = {"max_new_tokens": 8, "temperature": 0.0, **generation}
    make_tiny(folder, [text for pair in NOTES for text in pair] * 20, seed=0, n_positions=128)
    return remember(folder, build({**options, **SHORT, "recipe": preset}))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny(tmp_path / "tuned", "summarization")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    lines = [{"id": f"n{n}", "note": "The lift stops. " * (1 + n * 7 % 5)} for n in range(12)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_every_row_of_a_file_gets_the_answer_that_it_gets_alone(model: Path, rows: Path, shell) -> None:
    done = shell("generate --model tuned --input rows.jsonl --output out.jsonl --json")
    assert done.code == 0, done.err
    assert done.json == {"model": "tuned", "output": "out.jsonl", "rows": 12, "found": 0, "shortened": 0, "bad": 0}
    lines = lines_of(Path("out.jsonl"))
    assert [(line["row"], line["line"], line["id"]) for line in lines] == [(n, n + 1, f"n{n}") for n in range(12)]
    for line, row in list(zip(lines, lines_of(rows), strict=True))[:2]:
        assert shell("generate --model tuned", row["note"]).out.strip() == line["text"]


def test_what_was_killed_goes_on_and_ends_as_if_it_had_not_been(
    model: Path, rows: Path, shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gptj_ft.planning.inference_plan.BATCH_TOKENS", 200)  # some batches
    command = "generate --model tuned --input rows.jsonl --temperature 2 --num-return 2 --output"
    assert shell(f"{command} straight.jsonl").code == 0
    straight = Path("straight.jsonl").read_bytes()
    assert shell(f"{command} out.jsonl").code == 0
    written = Path("out.jsonl").read_bytes()
    assert written == straight
    starts = [at + 1 for at, byte in enumerate(written) if byte == ord("\n")]
    for cut in (0, 5, starts[2], starts[5] + 30, len(written) - 1):  # in a line, between lines
        Path("out.jsonl").write_bytes(written[:cut])
        done = shell(f"{command} out.jsonl --json")
        assert done.json["found"] == written[:cut].count(b"\n")
        assert Path("out.jsonl").read_bytes() == straight
    assert shell(f"{command} out.jsonl --json").json["found"] == 12


def test_a_signal_says_how_to_go_on(model: Path, rows: Path, shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gptj_ft.planning.inference_plan.BATCH_TOKENS", 1)
    generate, calls = decoding.generate_tokens, []

    def interrupted(*arguments: object) -> object:
        calls.append(1)
        if len(calls) == 4:
            os.kill(os.getpid(), signal.SIGHUP)
        return generate(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(decoding, "generate_tokens", interrupted)
        done = shell("generate --model tuned --input rows.jsonl --output out.jsonl")
    assert done.code == 130
    assert "3 of 12 rows are in out.jsonl; the same command goes on" in done.err
    assert shell("generate --model tuned --input rows.jsonl --output out.jsonl --json").json["found"] == 3


def test_no_file_is_written_into_that_is_of_something_else(model: Path, rows: Path, shell) -> None:
    Path("mine.jsonl").write_text("{}\n")
    done = shell("generate --model tuned --input rows.jsonl --output mine.jsonl")
    assert done.code == 2
    assert "mine.jsonl is there already" in done.err
    assert Path("mine.jsonl").read_text() == "{}\n"
    shell("generate --model tuned --input rows.jsonl --output out.jsonl")
    done = shell("generate --model tuned --input rows.jsonl --output out.jsonl --temperature 1")
    assert done.code == 2
    assert "made with other generation" in done.err


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    with OutputFile(tmp_path / "out.jsonl", {}), pytest.raises(Exception, match="being written by another process"):
        OutputFile(tmp_path / "out.jsonl", {})


def test_bad_rows_are_named_and_counted_and_stop_everything_beyond_what_is_allowed(model: Path, shell) -> None:
    good = json.dumps({"note": "The lift stops."})
    Path("rows.jsonl").write_text(f'{good}\n{{"note": " "}}\nno json\n{good}\n{{"note": null}}\n')
    done = shell("generate --model tuned --input rows.jsonl --output out.jsonl --max-bad-rows 2")
    assert done.code == 3
    assert "rows.jsonl:2" in done.err
    assert not Path("out.jsonl").exists()
    done = shell("generate --model tuned --input rows.jsonl --output out.jsonl --max-bad-rows 3")
    assert done.code == 0
    assert [line for line in done.err.splitlines() if line.startswith("rows.jsonl:")] == [
        "rows.jsonl:2: the field 'document' is empty",
        "rows.jsonl:3: not JSON: Expecting value (column 1)",
        "rows.jsonl:5: no value for column 'note'",
    ]
    assert "3 bad rows" in done.out
    assert [(line["line"], "error" in line) for line in lines_of(Path("out.jsonl"))] == [
        (1, False), (2, True), (4, False), (5, True)
    ]  # fmt: skip


def test_a_prompt_beyond_the_window_is_shortened_and_that_is_said(model: Path, shell) -> None:
    done = shell("generate --model tuned", "The lift stops. " * 300)
    assert done.code == 0
    assert "shortened to" in done.err
    done = shell("generate --model tuned --set on_long=error", "The lift stops. " * 300)
    assert done.code == 3
    assert "there is room for 88" in done.err
    done = shell("generate x --model tuned --max-new-tokens 96")
    assert done.code == 2
    assert "no room" in done.err


def test_what_cannot_be_answered_is_refused_with_a_reason(model: Path, shell) -> None:
    for line, code, reason in (
        ('generate "  " --model tuned', 3, "the field 'document' is empty"),
        ("generate x --chat --model tuned", 2, "three ways"),
        ("generate --chat --model tuned", 2, "tuned for single texts (summarization)"),
        ("generate --chat --raw --model tuned", 2, "has no template of conversations;"),
        ("generate --input rows.jsonl --model tuned", 2, "--output"),
        ("generate x --num-return 3 --model tuned", 2, "--num-beams 3"),
        ("generate x --stream --num-beams 3 --model tuned", 2, "--stream"),
        ("generate x --set 'prompt=Say it.' --model tuned", 2, "no field"),
        ("generate x --set generation.num_beans=3 --model tuned", 2, "num_beams"),
    ):
        done = shell(line)
        assert done.code == code, (line, done.err)
        assert reason in done.err, (line, done.err)
    shard = next(model.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-9])
    done = shell("generate x --model tuned")
    assert done.code == 3
    assert shard.name in done.err


def test_a_long_answer_of_a_tiny_model_is_cut_on_a_terminal_and_nowhere_else(
    model: Path, shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    untrained = model.rename("tiny-0123456789ab-0")
    line = f"generate x --raw --max-new-tokens 70 --model {untrained}"
    whole = shell(line).out
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    cut = shell(line)
    assert len(whole) > 2 * 40
    assert len(cut.out.splitlines()) == 2
    assert "(cut: the tiny model only shows the steps; --quiet shows all that it writes)" in cut.said
    assert shell(f"{line} --quiet").out == whole
    other = untrained.rename("trained")
    tuning = json.loads((other / METADATA_FILE).read_text())
    (other / METADATA_FILE).write_text(json.dumps({**tuning, "base_model": "gpt-j-6b"}))
    assert shell(line.replace(str(untrained), "trained")).out == whole


def test_several_answers_differ_and_come_again_with_the_seed(model: Path, shell) -> None:
    command = "generate x --model tuned --temperature 3 --num-return 3 --json"
    texts = shell(command).json["texts"]
    assert len(set(texts)) == 3
    assert shell(command).json["texts"] == texts != shell(f"{command} --seed 1").json["texts"]
    beams = shell("generate x --model tuned --num-beams 3 --num-return 3 --json").json["texts"]
    assert beams[0] == shell("generate x --model tuned --num-beams 3 --json").json["text"]


def test_raw_continues_the_text_and_a_model_without_template_does_so_too(model: Path, shell) -> None:
    raw = shell('generate "The lift" --model tuned --raw --max-new-tokens 8 --json').json
    (model / METADATA_FILE).unlink()
    plain = shell('generate "The lift" --model tuned --max-new-tokens 8 --json').json
    assert raw == plain
    assert raw["prompt_tokens"] < 8


def test_an_answer_shown_as_it_is_written_is_the_answer(model: Path, shell) -> None:
    for options in ("", "--temperature 1.5 --seed 4 --max-new-tokens 40", '--set "generation.stop=[e, to]"'):
        whole = shell(f"generate --model tuned {options}", "The lift stops.").out
        assert shell(f"generate --stream --model tuned {options}", "The lift stops.").out == whole


def test_what_is_shown_is_never_taken_back() -> None:
    import torch

    class Letters:
        def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
            return bytes(tokens).decode(errors="replace")

    for text, stop in ((" yes and no END more", ("END",)), ("é è", ()), ("a\n\nUser", ("\n\nUser:",)), ("  ", ("x",))):
        shown: list[str] = []
        typewriter = AnswerStreamer(Letters(), Generation(stop=stop), shown.append)  # type: ignore[arg-type]
        typewriter.put(torch.tensor([[1, 2]]))
        for byte in text.encode():
            typewriter.put(torch.tensor([byte]))
        typewriter.end()
        assert "".join(shown) == text.partition("END")[0].strip()
        assert len(shown) > 1 or len(text) < 4


@pytest.fixture
def generator(tmp_path: Path):
    folder = tiny(tmp_path / "chat", "chat")
    with open_generator(
        GenerationSetup.of(folder, build({**json.loads((folder / METADATA_FILE).read_text())["template"], **SHORT}))
    ) as opened:
        yield opened


def test_a_conversation_goes_on_from_what_was_said_and_forgets_the_oldest(
    generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, notes, shown = [], [], []
    generate = chat.Generator.write
    monkeypatch.setattr(
        chat.Generator, "write", lambda self, values, **more: prompts.append(values) or generate(self, values, **more)
    )
    question = "Where is the parcel?"
    said = ["The lift stops.", "", "/what", *[question] * 3, "/clear", "The printer blinks.", "/exit", "no"]
    run_chat(generator, said, "Be brief.", shown.append, notes.append)
    asked = [[message["content"] for message in values["messages"] if message["role"] == "user"] for values in prompts]
    assert asked == [
        ["The lift stops."], *[["The lift stops."] + [question] * n for n in (1, 2, 3)], ["The printer blinks."]
    ]  # fmt: skip
    assert all(values["messages"][0] == {"role": "system", "content": "Be brief."} for values in prompts)
    assert chat.HELP in notes
    assert chat.FORGOTTEN in notes, "the window is 88 tokens"
    assert "".join(shown).count("\n") >= len(prompts)


def test_chat_answers_what_comes_through_a_pipe(tmp_path: Path, shell, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny(tmp_path / "chat", "chat")
    monkeypatch.setattr(sys, "stdin", io.StringIO("The lift stops.\nThe printer blinks.\n"))
    done = shell("generate --chat --model chat")
    assert done.code == 0, done.err
    assert done.out.count("\n") >= 2
    assert "/exit" in done.err


def test_rows_of_conversations_are_answered_from_their_last_question(tmp_path: Path, shell) -> None:
    tiny(tmp_path / "chat", "chat")
    asked = [{"role": "user", "content": "The lift stops."}]
    answered = [*asked, {"role": "assistant", "content": "Yes."}]
    Path("rows.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in (asked, answered)))
    assert shell("generate --input rows.jsonl --output out.jsonl --model chat").code == 0
    one, other = lines_of(Path("out.jsonl"))
    assert one["text"] == other["text"]
