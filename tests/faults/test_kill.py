"""Signal the command at random instants: after resumes or restarts it must end with the same bits."""

from __future__ import annotations

import json
import random
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.fork_server import ForkServer
from support.small_run import assert_same_weights, losses_of, weights_of

from gptj_ft.config.run_folder import Run, steps_done
from gptj_ft.system.signals import SIGNALS
from gptj_ft.training.verify import verify

OPTIONS = (
    "finetune --recipe summarization --data rows.jsonl --model tiny --lr 1e-2 --batch-size 2 --set holdout=0.2 "
    "--max-steps 6 --validate-every 2 --save-every 2 --keep best,all --precision fp32 --output run"
)
LABELLED = (
    "finetune --map text=note --data rows.jsonl --model tiny-bert --lr 1e-2 --batch-size 2 --set holdout=0.2 "
    "--max-steps 6 --validate-every 2 --save-every 2 --keep best,all --precision fp32 --set dropout=0.2 --output run"
)
LORA = "--method lora --set lora.dropout=0.1"
KILL = (signal.SIGKILL,)
PLACES = ("--weights disk --optimizer-state disk", "--weights host --optimizer-state device", "--weights device")


@pytest.fixture(scope="module")
def straight(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_straight(server, tmp_path_factory.mktemp("straight"), OPTIONS)


def run_straight(server: ForkServer, folder: Path, options: str) -> Run:
    folder = new_folder(folder / "straight")
    assert server.run(options, folder)[0] == 0, output_of(folder)
    return Run(folder / "run")


def new_folder(folder: Path) -> Path:
    folder.mkdir()
    rows = [
        {"note": f"Room {n} is cold and dark at night.", "summary": f"Room {n} is cold.", "label": n % 2}
        for n in range(10)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return folder


def output_of(folder: Path) -> str:
    file = folder / "output.txt"
    return file.read_text(encoding="utf-8") if file.exists() else ""  # killed before it was made


def interrupt_and_resume(
    server: ForkServer, straight: Run, folder: Path, place: str, signals: list[tuple[float, int]], options: str
) -> int:
    """Interrupt a run at each given instant and then let it end; return how many signals found it alive."""
    run, ends = Run(new_folder(folder) / "run"), 0
    for delay, number in [*signals, (None, 0)]:
        if run.model.is_dir():
            break
        line = f"finetune --resume run {place}" if run.folder.exists() else f"{options} {place}"
        (folder / "output.txt").unlink(missing_ok=True)
        sent = [] if delay is None else [(delay, number)]
        if number == signal.SIGINT:  # as a shell does that hands on what the whole group has got
            sent.append((delay + 0.002, number))
        code, _ = server.run(line, folder, *sent)
        said = output_of(folder)
        assert code in (0, -9 if number == signal.SIGKILL else 130), said
        assert "Traceback" not in said, said
        if code == 130:
            check_said(run, said)
        ends += code != 0
    assert_same_weights(weights_of(run.model), weights_of(straight.model), place, signals)
    assert losses_of(run) == losses_of(straight), (place, signals)
    if all(number == signal.SIGKILL for _, number in signals):
        assert run.whole_checkpoints().keys() >= straight.whole_checkpoints().keys(), (place, signals)
    assert not verify(run).problems, (place, signals)
    shutil.rmtree(folder)
    return ends


def check_said(run: Run, said: str) -> None:
    """Check that a stopped command's last message is true and that no finished step is lost."""
    words = said.strip().rpartition("gptj-ft: stopped")[2]
    done = max((line["step"] for line in run.metrics() if "loss" in line), default=0)
    if words.endswith(("before anything was done", "to resume or restart")):
        return  # while its libraries loaded, or behind its last line: true of every command
    if run.model.is_dir():
        assert words.endswith("all steps are done, and the tuned model is in run/model"), said
    elif not run.folder.exists():
        assert words.endswith("nothing was trained yet"), said
    else:
        assert words.endswith("resume with\ngptj-ft finetune --resume run"), said
        assert steps_done(run) == done, said
        assert (f"step {done}" in words) == (done > 0), said


def interrupt_at_random(
    server: ForkServer, straight: Run, folder: Path, trials: int, numbers: Sequence[int], options: str = OPTIONS
) -> None:
    """Interrupt several runs at one or two random instants each, rotating placements and signals."""
    seconds = server.run(options, new_folder(folder / "timed"))[1]
    draw, ends = random.Random(len(numbers)), 0
    for trial in range(trials):
        number, place = numbers[trial // len(PLACES) % len(numbers)], PLACES[trial % len(PLACES)]
        signals = [(draw.uniform(0.0, seconds), number) for _ in range(draw.choice((1, 1, 2)))]
        ends += interrupt_and_resume(server, straight, folder / str(trial), place, signals, options)
    print(f"{ends} interruptions in {trials} runs")
    assert ends > trials / 4, "most were over before they were to be interrupted"


@pytest.mark.slow
@pytest.mark.parametrize("numbers", [KILL, SIGNALS], ids=["kill", "signals"])
def test_200_random_interrupts_keep_all_bits(
    server: ForkServer, straight: Run, tmp_path: Path, numbers: Sequence[int]
) -> None:
    interrupt_at_random(server, straight, tmp_path, 200, numbers)


@pytest.mark.slow
@pytest.mark.parametrize("numbers", [KILL, SIGNALS], ids=["kill", "signals"])
def test_60_random_interrupts_keep_adapter_bits(server: ForkServer, tmp_path: Path, numbers: Sequence[int]) -> None:
    options = f"{OPTIONS} {LORA}"
    interrupt_at_random(server, run_straight(server, tmp_path, options), tmp_path, 60, numbers, options)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["classification", "multi-label", "regression"])
def test_40_random_interrupts_keep_dropout_bits(server: ForkServer, tmp_path: Path, recipe: str) -> None:
    options = f"{LABELLED} --recipe {recipe}"
    interrupt_at_random(server, run_straight(server, tmp_path, options), tmp_path, 40, SIGNALS, options)


@pytest.mark.slow
def test_40_random_interrupts_keep_predictions(server: ForkServer, tmp_path: Path) -> None:
    folder = run_straight(server, tmp_path, f"{LABELLED} --recipe classification").folder.parent
    rows = [{"id": n, "note": f"Room {n} is cold and dark {'at night ' * (n % 9)}."} for n in range(9000)]
    (folder / "many.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    line = "predict --model run --input many.jsonl --keep id --quiet --output"
    seconds = max(server.run(f"{line} whole{suffix}", folder)[1] for suffix in (".jsonl", ".csv"))
    draw, ends = random.Random(7), 0
    for trial in range(40):
        output, number = f"out{trial}{('.jsonl', '.csv')[trial % 2]}", (*KILL, *SIGNALS)[trial // 2 % 5]
        code, tries = 1, 0
        while code != 0:
            sent = [(draw.uniform(0.0, seconds), number)] if tries < 3 else []
            code, tries = server.run(f"{line} {output}", folder, *sent)[0], tries + 1
            assert code in (0, -9, 130), output_of(folder)
            ends += code != 0
        assert (folder / output).read_bytes() == (folder / f"whole{Path(output).suffix}").read_bytes(), (output, number)
        (folder / output).unlink()
    assert "Traceback" not in output_of(folder)
    assert ends > 10, "most were over before they were to be interrupted"
