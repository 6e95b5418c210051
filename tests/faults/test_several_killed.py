"""Kill processes of a run that several share, at random instants: resumed, by as many or fewer, it ends the same."""

from __future__ import annotations

import json
import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fork_server import ForkServer
from support.small_run import assert_same_weights, weights_of

from gptj_ft.config.run_folder import Run, steps_done
from gptj_ft.training.verify import verify

OPTIONS = (
    "finetune --recipe summarization --data rows.jsonl --model tiny --lr 1e-2 --batch-size 4 --set holdout=0.2 "
    "--max-steps 8 --validate-every 4 --save-every 2 --keep best --precision fp32 --set micro_batch_tokens=48 "
    "--set lanes=2 --output run"
)
SHARES = {
    "layers on disk": "--set share=layers --weights disk --optimizer-state disk",
    "layers in memory": "--set share=layers --weights device --optimizer-state device",
    "rows on disk": "--set share=rows --weights disk --optimizer-state disk",
}
REPLICAS = "--set share=layers --set replicas=2 --weights disk --optimizer-state disk"  # of four processes
GONE_SECONDS = 3.0  # from the death of a process to the end of the others; here they share busy cores: four times that


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture(scope="module")
def straight(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = new_folder(tmp_path_factory.mktemp("straight") / "straight")
    assert server.run(OPTIONS, folder)[0] == 0, output_of(folder)
    return Run(folder / "run")


def new_folder(folder: Path) -> Path:
    folder.mkdir()
    rows = [{"note": f"Room {n} is cold and dark at night.", "summary": f"Room {n} is cold."} for n in range(20)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return folder


def output_of(folder: Path) -> str:
    return (folder / "output.txt").read_text(encoding="utf-8")


def losses_of(run: Run) -> list[tuple[object, ...]]:
    return [(line["step"], line.get("loss"), line.get("validation_loss")) for line in run.metrics()]


def kill_and_resume(
    server: ForkServer, straight: Run, folder: Path, share: str, kills: list[tuple[float, tuple[int, ...]]], size: int
) -> int:
    """Kill some ranks of a run again and again, then let one process end it; return how many kills found it alive."""
    run, ends = Run(new_folder(folder) / "run"), 0
    for delay, ranks in kills:
        if run.model.is_dir():
            break
        line = f"finetune --resume run {share}" if run.folder.exists() else f"{OPTIONS} {share}"
        (folder / "output.txt").unlink(missing_ok=True)
        before = steps_done(run) if run.folder.exists() else 0
        codes, seconds = server.run_together(line, folder, size, *((delay, signal.SIGKILL, rank) for rank in ranks))
        said = output_of(folder)
        assert "Traceback" not in said, said
        if -9 not in codes:
            assert codes == [0] * size, said
            continue
        ends += 1
        if len(ranks) < size and 0 in codes:
            continue  # it was killed when all was done
        if len(ranks) < size:
            # Where they had not met yet, the launcher has ended the others.
            has_met = 130 not in codes
            assert " is gone" in said or not has_met, said
            assert all(code in (1, -9, 130) for code in codes), (codes, said)
            assert not has_met or max(seconds) < delay + 4 * GONE_SECONDS, (seconds, delay, said)
        assert steps_done(run) >= before if run.folder.exists() else True
    if not run.model.is_dir():
        line = f"finetune --resume run {share}" if run.folder.exists() else f"{OPTIONS} {share}"
        assert server.run(line, folder)[0] == 0, output_of(folder)
    assert_same_weights(weights_of(run.model), weights_of(straight.model), share, kills)
    assert losses_of(run) == losses_of(straight), (share, kills)
    assert not verify(run).problems, (share, kills)
    assert not list(run.folder.glob("replica-*"))
    shutil.rmtree(folder)
    return ends


def kill_at_random(server: ForkServer, straight: Run, folder: Path, trials: int, seed: int) -> int:
    """Kill a random rank, the first, or all, once or twice, of so many runs; return how many kills there were."""
    # A run on two processes is that of one: for layers without lanes it would be another run.
    draw, ends = random.Random(seed), 0
    timed = new_folder(folder / "timed")
    _, seconds = server.run_together(f"{OPTIONS} {SHARES['layers on disk']}", timed, 2)
    shutil.rmtree(timed)
    for trial in range(trials):
        share = list(SHARES.values())[trial % len(SHARES)]
        kills = [
            (draw.uniform(0.3, 1.0) * max(seconds), draw.choice([(0,), (1,), (0, 1)]))
            for _ in range(draw.choice((1, 2)))
        ]
        ends += kill_and_resume(server, straight, folder / f"run-{trial}", share, kills, 2)
    return ends


def test_runs_whose_processes_are_killed_at_random_instants_end_the_same(server, straight, tmp_path) -> None:
    assert kill_at_random(server, straight, tmp_path, 3, seed=0) >= 1


def test_four_processes_of_two_replicas_one_of_which_is_killed_end_the_same(server, straight, tmp_path) -> None:
    kill_and_resume(server, straight, tmp_path / "run", REPLICAS, [(1.5, (2,))], 4)


@pytest.mark.slow
def test_replicas_whose_processes_are_killed_at_random_instants_end_the_same(server, straight, tmp_path) -> None:
    draw, ends = random.Random(0), 0
    for trial in range(30):
        kills = [(draw.uniform(0.8, 3.5), draw.choice([(0,), (1,), (2,), (3,), (2, 3), (0, 1, 2, 3)]))]
        ends += kill_and_resume(server, straight, tmp_path / f"run-{trial}", REPLICAS, kills, 4)
    assert ends >= 15


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11))
def test_a_hundred_runs_each_whose_processes_are_killed_end_the_same(server, straight, tmp_path, seed) -> None:
    assert kill_at_random(server, straight, tmp_path, 100, seed) >= 50
