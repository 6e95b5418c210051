"""The command `generate`: one prompt, rows of a file, a conversation."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import NOTES
from support.cli_runner import Terminal

from gptj_ft import api
from gptj_ft.checkpoints.metadata import ModelMetadata, template_of
from gptj_ft.checkpoints.model_folder import METADATA_FILE
from gptj_ft.checkpoints.tiny import make_tiny
from gptj_ft.cli.terminal.answers import _typed_lines
from gptj_ft.config.options import Generation, Recipe
from gptj_ft.config.presets import load_preset
from gptj_ft.config.resolve import build
from gptj_ft.errors import Interrupted
from gptj_ft.evaluation.row_job import OutputFile
from gptj_ft.generation import chat
from gptj_ft.generation.chat import run_chat
from gptj_ft.generation.decoding import AnswerStreamer
from gptj_ft.generation.generator import Answer, GenerationSetup, Generator, open_generator
from gptj_ft.training.reporter import Reporter

SHORT = {"max_length": 96, "device": "cpu", "precision": "fp32"}


def remember(folder: Path, recipe: Recipe) -> Path:
    """Write a recipe into a model folder, as if the model had been tuned with it."""
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


def test_file_rows_get_the_same_answers_alone(model: Path, rows: Path, shell) -> None:
    done = shell("generate --model tuned --input rows.jsonl --output out.jsonl --json")
    assert done.code == 0, done.err
    assert done.json == {"model": "tuned", "output": "out.jsonl", "rows": 12, "found": 0, "shortened": 0, "bad": 0}
    lines = lines_of(Path("out.jsonl"))
    assert [(line["row"], line["line"], line["id"]) for line in lines] == [(n, n + 1, f"n{n}") for n in range(12)]
    for line, row in list(zip(lines, lines_of(rows), strict=True))[:2]:
        assert shell("generate --model tuned", row["note"]).out.strip() == line["text"]


def test_answers_are_scored_only_with_references(model: Path, rows: Path, shell) -> None:
    assert "next:" not in shell("generate --model tuned --input rows.jsonl --output out.jsonl").out
    both = [{**line, "summary": "It stops."} for line in lines_of(rows)]
    rows.write_text("".join(json.dumps(line) + "\n" for line in both), encoding="utf-8")
    shown = shell("generate --model tuned --input rows.jsonl --output two.jsonl").out
    assert "next: gptj-ft evaluate --predictions two.jsonl --data rows.jsonl --recipe summarization" in shown


def start_output(path: Path, settings_of: Path, together: int) -> None:
    """Start an output file with the settings of another, but with batches of ``together`` tokens."""
    settings = json.loads(Path(f"{settings_of}.settings.json").read_text()) | {"together": together}
    Path(f"{path}.settings.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")


@pytest.mark.thorough
def test_truncated_output_resumes_to_the_same_bytes(model: Path, rows: Path, shell) -> None:
    command = "generate --model tuned --input rows.jsonl --temperature 2 --num-return 2 --output"
    assert shell(f"{command} one-batch.jsonl").code == 0
    for name in ("whole.jsonl", "out.jsonl"):
        start_output(Path(name), Path("one-batch.jsonl"), 200)
        assert shell(f"{command} {name}").code == 0
    whole = Path("whole.jsonl").read_bytes()
    assert Path("out.jsonl").read_bytes() == whole != Path("one-batch.jsonl").read_bytes()
    starts = [at + 1 for at, byte in enumerate(whole) if byte == ord("\n")]
    for cut in (0, 5, starts[2], starts[5] + 30, len(whole) - 1):  # inside a line and between lines
        Path("out.jsonl").write_bytes(whole[:cut])
        done = shell(f"{command} out.jsonl --json")
        assert done.json["found"] == whole[:cut].count(b"\n")
        assert Path("out.jsonl").read_bytes() == whole
    assert shell(f"{command} out.jsonl --json").json["found"] == 12


def test_interruption_says_how_to_resume(model: Path, rows: Path, shell) -> None:
    class Interrupt(Reporter):
        def on_count(self, activity: str, done: int, total: int | None, unit: str) -> None:
            if done == 3:
                raise KeyboardInterrupt

    assert shell("generate --model tuned --input rows.jsonl --output whole.jsonl").code == 0
    start_output(Path("out.jsonl"), Path("whole.jsonl"), 1)
    with pytest.raises(Interrupted, match=r"stopped: 3 of 12 rows are in out\.jsonl; the same command resumes there"):
        api.generate_file("rows.jsonl", "out.jsonl", "tuned", reporter=Interrupt())
    assert shell("generate --model tuned --input rows.jsonl --output out.jsonl --json").json["found"] == 3


def test_foreign_output_file_is_rejected(model: Path, rows: Path, shell) -> None:
    Path("mine.jsonl").write_text("{}\n")
    done = shell("generate --model tuned --input rows.jsonl --output mine.jsonl")
    assert done.code == 2
    assert "mine.jsonl exists and was not made by this command" in done.err
    assert Path("mine.jsonl").read_text() == "{}\n"
    shell("generate --model tuned --input rows.jsonl --output out.jsonl")
    done = shell("generate --model tuned --input rows.jsonl --output out.jsonl --temperature 1")
    assert done.code == 2
    assert "made with other generation" in done.err


def test_second_writer_of_a_file_is_rejected(tmp_path: Path) -> None:
    with OutputFile(tmp_path / "out.jsonl", {}), pytest.raises(Exception, match="being written by another process"):
        OutputFile(tmp_path / "out.jsonl", {})


def test_bad_rows_are_reported_up_to_limit(model: Path, shell) -> None:
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


def test_long_prompt_is_shortened_with_a_note(model: Path, shell) -> None:
    done = shell("generate --model tuned", "The lift stops. " * 300)
    assert done.code == 0
    assert "the prompt was cut to" in done.err
    done = shell("generate --model tuned --set on_long=error", "The lift stops. " * 300)
    assert done.code == 3
    assert "there is room for 88" in done.err
    done = shell("generate x --model tuned --max-new-tokens 96")
    assert done.code == 2
    assert "no room" in done.err


def test_impossible_requests_fail_with_a_reason(model: Path, shell) -> None:
    for line, code, reason in (
        ('generate "  " --model tuned', 3, "the field 'document' is empty"),
        ("generate x --chat --model tuned", 2, "exclude each other"),
        ("generate --chat --model tuned", 2, "tuned for single texts (summarization)"),
        ("generate --chat --raw --model tuned", 2, "has no template of conversations;"),
        ("generate --input rows.jsonl --model tuned", 2, "--output"),
        ("generate x --num-return 3 --model tuned", 2, "--num-beams 3"),
        ("generate x --stream --num-beams 3 --model tuned", 2, "--stream"),
        ("generate x --system 'Be brief.' --model tuned", 2, "add --chat"),
        ("generate --input rows.jsonl --output out.jsonl --stream --model tuned", 2, "leave one out"),
        ("generate --input rows.jsonl --output out.jsonl --field a=b --model tuned", 2, "--field is for a single"),
        ("generate --chat --field a=b --model tuned", 2, "--field is for a single"),
        ("generate --chat --num-return 3 --temperature 1 --model tuned", 2, "leave out --num-return"),
        ("generate x --field document=b --model tuned", 2, "give this text as the prompt"),
        ("generate x --set data=rows.jsonl --model tuned", 2, "name those to answer with --input"),
        ("generate x --set model=some", 2, "no model 'some'"),
        ("generate x --set 'prompt=Say it.' --model tuned", 2, "no field"),
        ("generate x --set generation.num_beans=3 --model tuned", 2, "num_beams"),
    ):
        done = shell(line)
        assert done.code == code, (line, done.err)
        assert reason in done.err, (line, done.err)


def test_unfit_tokenizer_is_named(model: Path, shell) -> None:
    name = model / "tokenizer_config.json"
    settings = json.loads(name.read_text(encoding="utf-8"))
    token = settings.pop("eos_token")
    name.write_text(json.dumps(settings), encoding="utf-8")
    for other in ("generation_config.json", "special_tokens_map.json"):
        (model / other).unlink()
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps({**config, "eos_token_id": None}), encoding="utf-8")
    Path("rows.jsonl").write_text('{"note": "x"}\n', encoding="utf-8")
    for line in ("generate x --raw", "generate --input rows.jsonl --output out.jsonl"):
        done = shell(f"{line} --model tuned --max-new-tokens 4")
        assert (done.code, "has no EOS token" in done.err) == (2, True), done.err
    name.write_text(json.dumps({**settings, "eos_token": token}), encoding="utf-8")
    make_tiny(Path("small"), ["a"], seed=0, vocab_target=260)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / file, Path("small", file))
    done = shell("generate 'The lift stops.' --raw --model small --max-new-tokens 4")
    assert done.code == 3, done.err
    assert "the tokenizer is not this model's" in done.err


def test_damaged_weights_are_named(model: Path, shell) -> None:
    shard = next(model.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-9])
    done = shell("generate x --model tuned")
    assert done.code == 3
    assert shard.name in done.err


@pytest.mark.thorough
def test_terminal_cuts_answers_of_tiny_models(model: Path, shell, monkeypatch: pytest.MonkeyPatch) -> None:
    untrained = model.rename("tiny-0123456789ab-0")
    line = f"generate x --raw --max-new-tokens 70 --model {untrained}"
    whole = shell(line).out
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    cut = shell(line)
    assert len(whole) > 2 * 40
    assert len(cut.out.splitlines()) == 2
    assert "(abridged: a tiny model writes noise; --quiet prints all of it)" in cut.said
    assert shell(f"{line} --quiet").out == whole
    other = untrained.rename("trained")
    tuning = json.loads((other / METADATA_FILE).read_text())
    (other / METADATA_FILE).write_text(json.dumps({**tuning, "base_model": "gpt-j-6b"}))
    assert shell(line.replace(str(untrained), "trained")).out == whole


def test_several_answers_differ_and_repeat_with_seed(model: Path, shell) -> None:
    command = "generate x --model tuned --temperature 3 --num-return 3 --json"
    texts = shell(command).json["texts"]
    assert len(set(texts)) == 3
    assert shell(command).json["texts"] == texts != shell(f"{command} --seed 1").json["texts"]
    beams = shell("generate x --model tuned --num-beams 3 --num-return 3 --json").json["texts"]
    assert beams[0] == shell("generate x --model tuned --num-beams 3 --json").json["text"]


def test_raw_prompt_equals_model_without_template(model: Path, shell) -> None:
    raw = shell('generate "The lift" --model tuned --raw --max-new-tokens 8 --json').json
    (model / METADATA_FILE).unlink()
    plain = shell('generate "The lift" --model tuned --max-new-tokens 8 --json').json
    assert raw == plain
    assert raw["prompt_tokens"] < 8


def test_streamed_text_equals_the_answer(model: Path, shell) -> None:
    for options in ("", "--temperature 1.5 --seed 4 --max-new-tokens 40", '--set "generation.stop=[e, to]"'):
        whole = shell(f"generate --model tuned {options}", "The lift stops.").out
        assert shell(f"generate --stream --model tuned {options}", "The lift stops.").out == whole


def test_streamer_never_retracts_text() -> None:
    import torch

    class ByteTokenizer:
        def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
            return bytes(tokens).decode(errors="replace")

    for text, stop in ((" yes and no END more", ("END",)), ("é è", ()), ("a\n\nUser", ("\n\nUser:",)), ("  ", ("x",))):
        shown: list[str] = []
        streamer = AnswerStreamer(ByteTokenizer(), Generation(stop=stop), shown.append)  # type: ignore[arg-type]
        streamer.put(torch.tensor([[1, 2]]))
        for byte in text.encode():
            streamer.put(torch.tensor([byte]))
        streamer.end()
        assert "".join(shown) == text.partition("END")[0].strip()
        assert len(shown) > 1 or len(text) < 4


@pytest.fixture
def generator(tmp_path: Path):
    folder = tiny(tmp_path / "chat", "chat")
    with open_generator(
        GenerationSetup.of(folder, build({**json.loads((folder / METADATA_FILE).read_text())["template"], **SHORT}))
    ) as opened:
        yield opened


class RecordingGenerator:
    """A generator that records the values of its prompts."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self.prompts: list[dict[str, Any]] = []

    def write(self, values: dict[str, Any], **more: Any) -> Answer:
        self.prompts.append(values)
        return self._generator.write(values, **more)


def test_chat_keeps_recent_messages(generator: Generator) -> None:
    recording, notes, shown = RecordingGenerator(generator), [], []
    question = "Where is the parcel?"
    inputs = ["The lift stops.", "", "/what", *[question] * 3, "/clear", "The printer blinks.", "/exit", "no"]
    run_chat(recording, inputs, "Be brief.", shown.append, notes.append)  # type: ignore[arg-type]
    prompts = recording.prompts
    questions = [[each["content"] for each in values["messages"] if each["role"] == "user"] for values in prompts]
    assert questions == [
        ["The lift stops."], *[["The lift stops."] + [question] * n for n in (1, 2, 3)], ["The printer blinks."]
    ]  # fmt: skip
    assert all(values["messages"][0] == {"role": "system", "content": "Be brief."} for values in prompts)
    assert chat.HELP in notes
    assert chat.FORGOTTEN in notes, "a prompt has room for 88 tokens"
    assert "".join(shown).count("\n") >= len(prompts)


def test_chat_reads_a_pipe(tmp_path: Path, shell) -> None:
    tiny(tmp_path / "chat", "chat")
    done = shell("generate --chat --model chat", stdin=io.StringIO("The lift stops.\nThe printer blinks.\n"))
    assert done.code == 0, done.err
    assert done.out.count("\n") >= 2
    assert "/exit" in done.err


def test_bytes_that_are_no_text_are_refused(model: Path, tmp_path: Path, shell, monkeypatch) -> None:
    tiny(tmp_path / "chat", "chat")
    monkeypatch.setattr("gptj_ft.api.open_model", None)
    undecodable = b"caf\xe9".decode(errors="surrogateescape")  # as Python decodes arguments
    for words in (
        [undecodable],
        ["x", "--field", f"document={undecodable}"],
        ["--chat", "--system", undecodable, "--model", "chat"],
    ):
        done = shell("generate --model tuned", *words)
        assert (done.code, "is not UTF-8 text" in done.err) == (3, True), done.err


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # the latter in the C locale
def test_piped_bytes_must_be_text(errors: str, tmp_path: Path, model: Path, shell) -> None:
    tiny(tmp_path / "chat", "chat")
    for command in ("generate --model tuned", "predict", "generate --chat --model chat"):
        piped = io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8", errors=errors)
        done = shell(command, stdin=piped)
        assert (done.code, "standard input is not UTF-8 text" in done.err) == (3, True), done.err


def test_chat_drops_lines_that_are_no_text(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    typed = iter([b"caf\xe9", b"tea"])

    def read(_: str) -> str:
        line = next(typed, None)
        if line is None:
            raise EOFError
        return line.decode()

    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("builtins.input", read)
    assert list(_typed_lines()) == ["tea"]
    assert "left out, because it is not text" in capsys.readouterr().err


def test_conversation_rows_answer_the_last_question(tmp_path: Path, shell) -> None:
    tiny(tmp_path / "chat", "chat")
    asked = [{"role": "user", "content": "The lift stops."}]
    answered = [*asked, {"role": "assistant", "content": "Yes."}]
    Path("rows.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in (asked, answered)))
    assert shell("generate --input rows.jsonl --output out.jsonl --model chat").code == 0
    one, other = lines_of(Path("out.jsonl"))
    assert one["text"] == other["text"]
