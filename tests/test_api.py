"""Python API: same numbers as the commands, no output, lazy torch import, any thread."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path
from threading import Thread

import pytest
from conftest import write_rows
from support.cli_runner import Shell
from support.small_run import assert_same_weights, weights_of
from support.steps import failing

import gptj_ft
from gptj_ft import api
from gptj_ft.config.run_folder import Run
from gptj_ft.errors import Interrupted, UsageError

TINY = {"recipe": "summarization", "data": "rows.jsonl", "model": "tiny", "max_steps": 3, "batch_size": 4}
LINE = "--recipe summarization --data rows.jsonl --model tiny --max-steps 3 --batch-size 4"


class Notebook(gptj_ft.Reporter):
    """Reporter that records events and losses."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.losses: list[float] = []

    def on_activity(self, text: str) -> None:
        self.events.append(text)

    def on_count(self, what: str, done: int, total: int | None, unit: str) -> None:
        self.events.append(f"{what} in {unit}")

    def on_start(self, progress: gptj_ft.Progress) -> None:
        self.events.append(f"start at {progress.step} of {progress.num_steps}")

    def on_step(self, step: gptj_ft.StepReport, progress: gptj_ft.Progress) -> None:
        self.losses.append(step.loss)
        assert (progress.step, progress.num_steps) == (step.step, 3)

    def on_end(self) -> None:
        self.events.append("end")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a run made by the API, and its home."""
    folder = tmp_path_factory.mktemp("api")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("GPTJ_FT_HOME", str(folder / "home"))
        write_rows(folder / "rows.jsonl")
        gptj_ft.finetune(**TINY, output="run")
    return folder


@pytest.fixture
def shell(capfd: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capfd)


@pytest.fixture
def in_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(run)
    monkeypatch.setenv("GPTJ_FT_HOME", str(run / "home"))
    return run


def test_every_public_name_is_documented() -> None:
    for name in gptj_ft.__all__:
        value = getattr(gptj_ft, name)
        assert value.__doc__, name
        if name[0].islower():
            assert value is getattr(api, name)
            assert ">>>" in value.__doc__ or "`finetune`" in value.__doc__ or "`evaluate`" in value.__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'train_everything'"):
        gptj_ft.train_everything  # noqa: B018


def test_type_checkers_see_every_public_name() -> None:
    tree = ast.parse(Path(gptj_ft.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    imports = (node for node in block.body if isinstance(node, ast.ImportFrom))
    assert {alias.name for node in imports for alias in node.names} == set(gptj_ft.__all__)


def test_importing_the_package_imports_no_torch() -> None:
    code = "import gptj_ft, sys; gptj_ft.finetune, gptj_ft.Reporter; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_api_run_equals_command_and_prints_nothing(in_run: Path, shell, capfd) -> None:
    notebook = Notebook()
    capfd.readouterr()
    result = gptj_ft.finetune(**TINY, output="watched", reporter=notebook)
    assert capfd.readouterr() == ("", "")
    with pytest.raises(FrozenInstanceError):
        result.steps = 4  # type: ignore[misc]
    typed = shell(f"finetune {LINE} --output typed --json").json
    assert (result.loss_before, result.loss_after) == (typed["loss_before"], typed["loss_after"])
    assert result.to_dict().keys() | {"notes"} == typed.keys()
    assert_same_weights(weights_of(Path("watched/model")), weights_of(Path("typed/model")))
    assert notebook.losses == [line["loss"] for line in Run(Path("typed")).metrics() if "loss" in line]
    assert [text for text in notebook.events if "start" in text or text in ("end", "reading the rows")] == [
        "reading the rows", "start at 0 of 3", "end",
    ]  # fmt: skip


def test_run_writes_its_live_page(in_run: Path) -> None:
    class Reader(Notebook):
        def on_step(self, step: gptj_ft.StepReport, progress: gptj_ft.Progress) -> None:
            super().on_step(step, progress)
            self.events.append(Path("paged/report.html").read_text(encoding="utf-8"))

    reader, said = Reader(), list[str]()
    prepared = gptj_ft.prepare_run(**TINY, output="paged")
    with gptj_ft.LivePage.of(prepared, said.append) as page:
        result = prepared.train(gptj_ft.Reporters(page, reader))
    assert (len(reader.losses), said) == (3, [])
    pages = [text for text in reader.events if "<html" in text]
    assert len(pages) == 3
    assert all("of 3" in text and 'http-equiv="refresh"' in text for text in pages)
    report = Path("paged/report.html").read_text(encoding="utf-8")
    assert 'http-equiv="refresh"' not in report
    assert f"{result.loss_after:.4f}" in report


def test_run_in_a_thread_stops_and_resumes(in_run: Path) -> None:
    errors: list[BaseException] = []

    def train() -> None:
        try:
            gptj_ft.finetune(**TINY, output="stopped")
        except BaseException as error:
            errors.append(error)

    thread = Thread(target=train)
    with failing(2, KeyboardInterrupt()):
        thread.start()
        thread.join()
    (error,) = errors
    assert isinstance(error, Interrupted)
    assert "the run is saved at step 1" in str(error)
    result = gptj_ft.finetune(resume="stopped")
    assert result.steps == 3
    assert_same_weights(weights_of(Path("stopped/model")), weights_of(Path("run/model")))
    with pytest.raises(gptj_ft.GptjFtError, match="stopped is finished"):
        gptj_ft.finetune(resume="stopped")


def test_rows_are_prepared_as_by_the_command(in_run: Path, shell, capfd) -> None:
    notebook = Notebook()
    capfd.readouterr()
    done = gptj_ft.prepare("rows.jsonl", "prepared", "summarization", model="tiny", cache=False, reporter=notebook)
    assert capfd.readouterr() == ("", "")
    assert set(notebook.events) == {"rows in rows"}
    typed = shell("prepare-data --recipe summarization --data rows.jsonl --model tiny --output typed-rows --json").json
    assert {**json.loads(json.dumps(done.to_dict(), default=str)), "folder": ""} == {**typed, "folder": ""}
    assert gptj_ft.prepare_run("summarization", data="prepared", model="tiny").report.rows_kept == 40
    with pytest.raises(gptj_ft.GptjFtError, match="prepared exists"):
        gptj_ft.prepare("rows.jsonl", "prepared", "summarization", model="tiny")


def test_a_plan_is_that_of_the_command(in_run: Path, shell, capfd) -> None:
    capfd.readouterr()
    forecast = gptj_ft.plan(**TINY)
    assert capfd.readouterr() == ("", "")
    typed = shell(f"plan {LINE} --json").json
    facts = forecast.to_dict()
    assert facts.keys() == typed.keys()
    for name in ("placement", "num_parameters", "tokens_per_step", "num_steps", "device_bytes"):
        assert facts[name] == typed[name], name


def test_predict_takes_a_list_of_texts(in_run: Path) -> None:
    assert gptj_ft.predict([], "run") == []
    with pytest.raises(gptj_ft.GptjFtError, match="texts is one text"):
        gptj_ft.predict("excellent", "run")


def test_api_evaluation_equals_command(in_run: Path, shell, capfd) -> None:
    notebook, settings = Notebook(), {"max_new_tokens": 2}
    capfd.readouterr()
    found = gptj_ft.evaluate("run", limit=2, generation=settings, reporter=notebook)
    assert capfd.readouterr() == ("", "")
    assert "reading the rows" in notebook.events
    assert {"baseline in rows", "model in rows"} <= set(notebook.events)
    typed = shell("evaluate run --limit 2 --set generation.max_new_tokens=2 --json").json
    assert found.to_dict(texts=False)["model"]["scores"] == typed["model"]["scores"]
    assert found.baseline is not None


def test_predictions_are_scored_as_by_the_command(in_run: Path, shell) -> None:
    Path("answers.jsonl").write_text('{"prediction": "a b", "references": ["a c"]}\n')
    found = gptj_ft.evaluate_predictions("answers.jsonl", recipe="summarization")
    typed = shell("evaluate --predictions answers.jsonl --recipe summarization --json").json
    assert found.to_dict(texts=False)["model"]["scores"] == typed["model"]["scores"]


def test_repeated_generation_equals_command(in_run: Path, shell, capfd) -> None:
    settings = {"max_new_tokens": 4, "temperature": 0.9}
    pieces: list[str] = []
    capfd.readouterr()
    with gptj_ft.load("run", generation=settings) as model:
        answer = model.generate("The lift stops.")
        assert model.generate("The lift stops.", on_text=pieces.append) == answer
    with pytest.raises(UsageError, match="closed"):
        model.generate("The lift stops.")
    assert capfd.readouterr() == ("", "")
    typed = shell("generate --model run --max-new-tokens 4 --temperature 0.9 --json", "The lift stops.").json
    assert answer.texts == typed["texts"]
    assert "".join(pieces) == answer.texts[0]
    done = gptj_ft.generate_file("rows.jsonl", "out.jsonl", "run", generation={"max_new_tokens": 2})
    assert done.rows == len(Path("out.jsonl").read_text().splitlines()) == 40


def test_api_error_suggests_nearest_option() -> None:
    with pytest.raises(gptj_ft.GptjFtError, match="did you mean 'lr'"):
        gptj_ft.plan(model="tiny", lrr=1.0)
    with pytest.raises(gptj_ft.GptjFtError, match="needs --resume RUN"):
        gptj_ft.finetune(**TINY, start="best")
