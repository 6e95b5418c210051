"""Start commands that write the same names at almost the same time: each result is whole, or its command is refused."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.fork_server import ForkServer
from support.small_run import assert_same_weights, weights_of

from gptj_ft.checkpoints.tiny import make_tiny
from gptj_ft.config.run_folder import Run
from gptj_ft.system.files import is_leftover
from gptj_ft.training.verify import verify

ROWS = [{"note": f"Room {n} is cold and dark at night.", "summary": f"Room {n} is cold."} for n in range(12)]
TRAIN = (
    "finetune --recipe summarization --data rows.jsonl --model model --lr 1e-2 --batch-size 2 --set holdout=0 "
    "--max-steps 2 --precision fp32"
)
ANSWER = "generate --recipe summarization --input rows.jsonl --output answers.jsonl --max-new-tokens 4 --model"
STARTS = [0.0, 0.003, 0.01, 0.05, 0.2]  # seconds between the starts of two processes

pytestmark = pytest.mark.thorough


@pytest.fixture(params=STARTS)
def race(request: pytest.FixtureRequest, server: ForkServer, tmp_path: Path) -> Race:
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)) + "\n", encoding="utf-8")
    for seed, name in enumerate(("model", "other")):
        make_tiny(tmp_path / name, [row["note"] for row in ROWS], seed, model_type="gpt2")
    return Race(server, tmp_path, request.param)


class Race:
    """Commands that start one after the other in the same folder, with the same home."""

    def __init__(self, server: ForkServer, folder: Path, delay: float) -> None:
        self.server, self.folder, self.delay = server, folder, delay

    def run(self, *lines: str) -> list[int]:
        """Return the exit codes: at least one command ends well, the others are refused in a line."""
        with ExitStack() as stack:
            running = []
            for line in lines:
                running.append(stack.enter_context(self.server.running(line, self.folder)))
                time.sleep(self.delay)
            codes = [each.wait() for each in running]
        said = (self.folder / "output.txt").read_text(encoding="utf-8")
        assert "Traceback" not in said, said
        assert set(codes) <= {0, 2}, said
        assert 0 in codes, said
        left = [path for path in self.folder.rglob("*") if is_leftover(path.name) and "home" not in path.parts]
        assert not left, said
        return codes

    def lines_of(self, name: str) -> Sequence[dict[str, str]]:
        return [json.loads(line) for line in (self.folder / name).read_text(encoding="utf-8").splitlines()]


def test_conversions_to_one_name_leave_one_whole_result(race: Race) -> None:
    assert race.run(*["convert model copy --to huggingface"] * 3).count(0) == 1
    assert_same_weights(weights_of(race.folder / "copy"), weights_of(race.folder / "model"))
    assert race.run(*["convert model copy.gguf --to gguf"] * 3).count(0) == 1
    assert race.run("convert copy.gguf back --to huggingface") == [0]


def test_preparations_of_the_same_rows_leave_one_whole_result(race: Race) -> None:
    lines = ["prepare-data --data rows.jsonl --recipe summarization --model model --output prepared"] * 3
    assert race.run(*lines).count(0) == 1
    trained = TRAIN.replace("rows.jsonl", "prepared")
    assert race.run(f"{trained} --output run") == [0]


def test_runs_without_a_name_are_whole_or_refused(race: Race) -> None:
    codes = race.run(*[TRAIN] * 3)
    runs = sorted((race.folder / "runs").iterdir())
    assert len(runs) == codes.count(0)
    assert not [problem for run in runs for problem in verify(Run(run)).problems]
    for run in runs:
        assert_same_weights(weights_of(run / "model"), weights_of(runs[0] / "model"))


def test_answers_of_two_models_never_share_a_file(race: Race) -> None:
    names = "model", "other"
    codes = race.run(*(f"{ANSWER} {name}" for name in names))
    assert codes.count(0) == 1
    settings = json.loads((race.folder / "answers.jsonl.settings.json").read_text(encoding="utf-8"))
    (winner,) = (name for name, code in zip(names, codes, strict=True) if code == 0)
    assert Path(settings["model"]).name == winner
    answers = race.lines_of("answers.jsonl")
    assert race.run(f"{ANSWER.replace('answers', 'alone')} {winner}") == [0]
    assert answers == race.lines_of("alone.jsonl")


def test_equal_evaluations_have_equal_results(race: Race) -> None:
    line = "evaluate model --recipe summarization --data rows.jsonl --quiet --max-length 64 --output"
    assert race.run(*(f"{line} {number}.jsonl" for number in range(3))) == [0, 0, 0]
    first, *others = (race.lines_of(f"{number}.jsonl") for number in range(3))
    assert len(first) == len(ROWS)
    assert others == [first, first]


def test_pages_of_one_run_are_whole(race: Race) -> None:
    assert race.run(f"{TRAIN} --output run") == [0]
    assert race.run(*["report run"] * 4) == [0] * 4
    assert (race.folder / "run" / "report.html").read_text(encoding="utf-8").endswith("</html>\n")
