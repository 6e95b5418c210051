"""Kill ranks at random times; the resumed run, on as many or fewer ranks, gives the same bits."""

from __future__ import annotations

import json
import random
import shutil
import signal
from itertools import cycle
from pathlib import Path

import pytest
from support.fork_server import ForkServer
from support.small_run import assert_same_weights, losses_of, weights_of

from gptj_ft.config.run_folder import Run, steps_done
from gptj_ft.training.verify import verify

OPTIONS = (
    "finetune --recipe summarization --data rows.jsonl --model tiny --lr 1e-2 --batch-size 4 --set holdout=0.2 "
    "--max-steps 24 --validate-every 8 --save-every 4 --keep best --precision fp32 --set micro_batch_tokens=48 "
    "--set lanes=2 --output run"
)
# How a run is shared, and by how many processes; where by one, too, that goes on alone with what two have left.
SHARES = {
    "layers on disk": ("--set share=layers --weights disk --optimizer-state disk", (2, 2, 2, 1)),
    "layers in memory": ("--set share=layers --weights device --optimizer-state device", (2, 2, 2, 1)),
    "rows on disk": ("--set share=rows --weights disk --optimizer-state disk", (2, 2, 2, 1)),
    "replicas on disk": ("--set share=layers --set replicas=2 --weights disk --optimizer-state disk", (4,)),
}
LONGEST_SECONDS = 1.0  # a process before a kill: about as long as a run takes, and thus most find it alive
GONE_SECONDS = 3.0  # from the death of a process to the end of the others; here they share busy cores: four times that


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
    path = folder / "output.txt"  # not there yet where all were killed at once
    return path.read_text(encoding="utf-8") if path.exists() else ""


def kill_until_it_ends(server: ForkServer, straight: Run, folder: Path, share: str, draw: random.Random) -> int:
    """Kill a random rank or all of them at a random time, and resume, until the run ends; return the kills."""
    run, kills, (options, sizes) = Run(new_folder(folder) / "run"), 0, SHARES[share]
    has_ended = False
    while not has_ended:
        has_begun = run.folder.exists()
        line = f"finetune --resume run {options}" if has_begun else f"{OPTIONS} {options}"
        (folder / "output.txt").unlink(missing_ok=True)
        before = steps_done(run) if has_begun else 0
        size = draw.choice(sizes)
        ranks = draw.choice([(0,), (size - 1,), tuple(range(size))])
        delay = draw.uniform(0.2, size * LONGEST_SECONDS)
        codes, seconds = server.run_together(line, folder, size, *((delay, signal.SIGKILL, rank) for rank in ranks))
        said = output_of(folder)
        assert "Traceback" not in said, said
        if " is finished" in said:  # it was killed when its model was there, and what else it had not yet removed
            has_ended = -9 not in codes
            continue
        if -9 not in codes:
            assert codes == [0] * size, said
            has_ended = True
            continue
        kills += 1
        if has_begun and not run.model.is_dir():  # with the model, checkpoints are no longer needed
            assert steps_done(run) >= before
        if len(ranks) == size or 0 in codes:  # nobody is left to say it, or all was done
            continue
        # Where they had not met yet, the launcher has ended the others.
        has_met = 130 not in codes
        assert " is gone" in said or not has_met, said
        assert all(code in (1, -9, 130) for code in codes), (codes, said)
        assert not has_met or max(seconds) < delay + 4 * GONE_SECONDS, (seconds, delay, said)
    assert_same_weights(weights_of(run.model), weights_of(straight.model), share)
    assert losses_of(run) == losses_of(straight), share
    assert not verify(run).problems, share
    assert not list(run.folder.glob("replica-*"))
    shutil.rmtree(folder)
    return kills


def kill_at_random(server: ForkServer, straight: Run, folder: Path, kills: int, seed: int) -> None:
    """Repeat with every split until the number of kills is reached."""
    draw, done, shares = random.Random(seed), 0, cycle(SHARES)
    while done < kills:
        done += kill_until_it_ends(server, straight, folder / f"after-{done}", next(shares), draw)


@pytest.mark.thorough
def test_random_rank_kills_keep_all_bits(server, straight, tmp_path) -> None:
    kill_at_random(server, straight, tmp_path, 4, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 12))
def test_hundred_rank_kills_keep_all_bits(server, straight, tmp_path, seed) -> None:
    kill_at_random(server, straight, tmp_path, 100, seed)
