"""Test stop signals at any moment: the state is saved, and the resumed run is bit-equal."""

from __future__ import annotations

import errno
import io
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path
from types import FrameType

import pytest
import torch
from support.small_run import assert_same_weights, new_run, small_session, train, weights_of
from support.steps import around_steps, before_steps, failing, full_disk_at_export

from gptj_ft.cli.html import run_page
from gptj_ft.cli.terminal.progress import TerminalReporter
from gptj_ft.config.resolve import dump_recipe
from gptj_ft.config.run_folder import Run, steps_done, what_is_saved
from gptj_ft.errors import Interrupted, ResourceError
from gptj_ft.system import signals
from gptj_ft.system.signals import SIGNALS, StopRequest
from gptj_ft.system.streams import LastingStream, lasting_streams, open_missing
from gptj_ft.training import compute, export, loop, restore, retention, row_scores
from gptj_ft.training.finetune import saved_state_in_errors
from gptj_ft.training.nonfinite import LossWatch
from gptj_ft.training.setup import TrainSetup

STEPS = 3
PLACES = ("device", "host", "disk")
BEFORE = "stopped; nothing was trained yet; resume with"
DONE = "stopped; all steps are done, and the tuned model is in"
# Where in a run the signal comes: the function that is called there, which time, and what is said then.
POINTS = {
    "placing weights": (restore, "load_weights", 1, BEFORE),
    "first validation": (row_scores, "evaluate_losses", 1, "stopped before the first step; nothing was trained yet"),
    "a validation": (row_scores, "evaluate_losses", 2, "stopped after step 1 of 3; everything is saved; resume with"),
    "a step": (compute, "train_step", 2, "stopped after step 2 of 3; everything is saved"),
    "the last step": (compute, "train_step", 3, "stopped after step 3 of 3; everything is saved"),
    "saving": (retention.CheckpointRetention, "save_if_due", 1, "stopped after step 1 of 3; everything is saved"),
    "the last validation": (row_scores, "evaluate_losses", 4, "stopped after step 3 of 3; everything is saved"),
    "export": (export, "write_outcome", 1, DONE),
    "after export": (loop, "remember_run", 1, DONE),
}
FAST = [
    (name, place, SIGNALS[(n + m) % len(SIGNALS)]) for n, name in enumerate(POINTS) for m, place in enumerate(PLACES)
]
ALL = list(product(POINTS, PLACES, SIGNALS))


def signal_at(patch: pytest.MonkeyPatch, owner: object, name: str, call: int, *numbers: int) -> None:
    """Have the process get signals when a function is called for the n-th time."""
    original, calls = getattr(owner, name), 0

    def signalling(*arguments: object, **settings: object) -> object:
        nonlocal calls
        calls += 1
        if calls == call:
            for number in numbers:
                os.kill(os.getpid(), number)
        return original(*arguments, **settings)

    patch.setattr(owner, name, signalling)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


def session_of(model: Path, place: str, **options: object) -> TrainSetup:
    places = {"weights": place, "optimizer_state": place}
    return small_session(model, STEPS, validate_every=1, save_every=1, **places, **options)


@pytest.fixture(scope="module")
def straight(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    run = new_run(tmp_path_factory.mktemp("straight"))
    train(session_of(model, "device"), run)
    return weights_of(run.model)


def begun_run(session: TrainSetup, folder: Path) -> Run:
    run = new_run(folder)
    run.recipe_file.write_text(dump_recipe(session.recipe, {}), encoding="utf-8")
    run.start_record(session.recipe)
    return run


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("point", "place", "number"),
    [*FAST, *(pytest.param(*each, marks=pytest.mark.slow) for each in ALL if each not in FAST)],
)
def test_signal_at_any_point_resumes_bit_equal(
    point: str, place: str, number: int, model: Path, straight: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    session, (owner, name, call, said) = session_of(model, place), POINTS[point]
    run = begun_run(session, tmp_path)
    with pytest.MonkeyPatch.context() as patch, StopRequest():
        signal_at(patch, owner, name, call, number)
        with pytest.raises(Interrupted, match=said) as stop, saved_state_in_errors(run):
            train(session, run)
    assert stop.value.exit_code == 130
    assert run.model.is_dir() == (said == DONE)
    if said != DONE:
        assert str(stop.value).endswith(f"gptj-ft finetune --resume {run.folder}")
        done = int(said.split()[3]) if "after step" in said else 0
        assert steps_done(run) == done
        train(session, run)
    assert_same_weights(weights_of(run.model), straight, point, place)
    assert [line["step"] for line in run.metrics() if "loss" in line] == [1, 2, 3]


@contextmanager
def counting_calls(at: int = 0, number: int = 0) -> Iterator[list[int]]:
    """Count the calls of Python functions; have the process get a signal at one of them."""
    calls = [0]

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            calls[0] += 1
            if calls[0] == at:
                os.kill(os.getpid(), number)

    sys.setprofile(profile)
    try:
        yield calls
    finally:
        sys.setprofile(None)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_signal_at_random_call_loses_nothing(
    place: str, model: Path, straight: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    session, draw, stops = session_of(model, place), random.Random(place), 0
    run = begun_run(session, tmp_path)
    with counting_calls() as calls:
        train(session, run)
    shutil.rmtree(run.folder)
    for trial in range(60):
        run, at = begun_run(session, tmp_path), draw.randrange(1, calls[0])
        said = ""
        try:
            with StopRequest(), saved_state_in_errors(run), counting_calls(at, SIGNALS[trial % len(SIGNALS)]):
                train(session, run)
        except Interrupted as stop:
            said = str(stop)
        if said:
            stops += 1
            done = max((line["step"] for line in run.metrics() if "loss" in line), default=0)
            words = DONE if run.model.is_dir() else f"step {done}" if done else "nothing was trained yet"
            assert words in said, (at, said)
            assert run.model.is_dir() or steps_done(run) == done, (at, said)
        if not run.model.is_dir():
            train(session, run)
        assert_same_weights(weights_of(run.model), straight, at)
        assert [line["step"] for line in run.metrics() if "loss" in line] == [1, 2, 3], at
        shutil.rmtree(run.folder)
    assert stops > 50


@pytest.mark.parametrize("number", SIGNALS)
def test_stop_before_start_reports_nothing_trained(
    number: int, shell, rows_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gptj_ft.planning import resources
    from gptj_ft.training import finetune

    command = "finetune --recipe summarization --data rows.jsonl --model tiny --max-steps 2 --output 'a run'"
    for owner, name in ((finetune, "gather"), (resources, "rates"), (finetune, "save_dataset")):
        with monkeypatch.context() as patch:
            signal_at(patch, owner, name, 1, number)
            done = shell(command)
        assert (done.code, done.err.splitlines()[-1]) == (130, "gptj-ft: stopped; nothing was trained yet")
    assert not Path("a run").exists()


def test_stopped_prepare_data_names_written_files(shell, rows_file: Path, monkeypatch) -> None:
    from gptj_ft.training import prepare_command

    command = "prepare-data --recipe summarization --data rows.jsonl --model tiny --fix --output out"
    for name, said in (
        ("fix_rows", "stopped; nothing was written; repeat the command to start again"),
        ("prepare_once", "the repaired rows are in rows.fixed.jsonl: continue with the same options and"),
    ):
        with monkeypatch.context() as patch:
            signal_at(patch, prepare_command, name, 1, signal.SIGTERM)
            done = shell(command)
        assert (done.code, said in done.said) == (130, True), done.said
    assert done.err.endswith("gptj-ft prepare-data --data rows.fixed.jsonl\n")
    assert not Path("out").exists()


def test_stop_names_model_and_quotes_command(shell, rows_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = "finetune --recipe summarization --data rows.jsonl --model tiny --max-steps 2 --output 'a run'"
    with monkeypatch.context() as patch:
        signal_at(patch, compute, "train_step", 1, signal.SIGHUP)
        done = shell(command)
    assert (done.code, done.err.splitlines()[-1]) == (130, "gptj-ft finetune --resume 'a run'")
    with monkeypatch.context() as patch:
        signal_at(patch, run_page, "write_page", 1, signal.SIGTERM)
        done = shell("finetune --resume", "a run")
    assert (done.code, done.said.endswith(f"{DONE} a run/model")) == (130, True)
    assert done.out == ""


class Ended(BaseException):
    """The process would not be any more."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that nearly stands still, and an exit that can be seen."""

    def end(code: int) -> None:
        raise Ended(code)

    def tick() -> float:
        now[0] += 1e-6
        return now[0]

    now = [100.0]
    monkeypatch.setattr(signals.time, "monotonic", tick)
    monkeypatch.setattr(signals.os, "_exit", end)
    return now


@pytest.mark.parametrize(("place", "save_every"), [("host", 0), ("host", 1), ("disk", 0)])
def test_second_signal_exits_with_saved_state(
    place: str, save_every: int, model: Path, tmp_path: Path, clock: list[float], capfd: pytest.CaptureFixture[str]
) -> None:
    session = small_session(model, STEPS, save_every=save_every, weights=place, optimizer_state=place)
    run, taken = begun_run(session, tmp_path), []

    def insisting(train_step, stack, optimizer, *rest):
        taken.append(optimizer.step)
        if len(taken) == 2:
            stack.drain()  # so that what is on the disk does not depend on how fast it is
            os.kill(os.getpid(), signal.SIGINT)
            clock[0] += 1.0
            os.kill(os.getpid(), signal.SIGINT)
        return train_step(stack, optimizer, *rest)

    with pytest.MonkeyPatch.context() as patch, around_steps(insisting):
        patch.setattr(loop.Training, "_is_recorded", lambda self: False)  # of this no process would be left
        with pytest.raises(Ended, match="130"):
            train(session, run)
    saved = "nothing was saved yet" if (place, save_every) == ("host", 0) else "the run is saved at step 1"
    assert capfd.readouterr().err.endswith(
        f"gptj-ft: stopped at once; {saved}; resume with\ngptj-ft finetune --resume {run.folder}\n"
    )


@pytest.mark.parametrize(
    ("numbers", "seconds", "ends"),
    [
        ((signal.SIGINT, signal.SIGINT), 1.0, True),
        ((signal.SIGTERM, signal.SIGTERM), 1.0, True),
        ((signal.SIGTERM, signal.SIGINT), 1.0, True),
        ((signal.SIGUSR1, signal.SIGINT), 1.0, True),
        ((signal.SIGTERM, signal.SIGTERM), 0.01, False),  # `timeout` sends two
        ((signal.SIGHUP, signal.SIGHUP), 1.0, False),  # a terminal that closes, too
        ((signal.SIGTERM, signal.SIGHUP), 1.0, False),
        ((signal.SIGUSR1, signal.SIGTERM), 60.0, False),  # a batch system before it kills
    ],
)
def test_only_users_second_signal_exits(
    numbers: tuple[int, int], seconds: float, ends: bool, clock: list[float]
) -> None:
    asked: list[bool] = []
    with StopRequest(lambda: asked.append(True)) as request:
        os.kill(os.getpid(), numbers[0])
        clock[0] += seconds
        try:
            os.kill(os.getpid(), numbers[1])
            time.sleep(0)
        except Ended:
            assert ends
        else:
            assert not ends
    assert (asked, request.requested) == ([True], True)


def test_library_use_handles_only_ctrl_c(clock: list[float]) -> None:
    asked: list[bool] = []
    terminates = signal.getsignal(signal.SIGTERM)
    with StopRequest(lambda: asked.append(True), owns_process=False) as request:
        assert signal.getsignal(signal.SIGTERM) is terminates
        os.kill(os.getpid(), signal.SIGINT)
        assert (asked, request.requested) == ([True], True)
        clock[0] += 1.0
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_stopped_module_keeps_its_exit_code(tmp_path: Path) -> None:
    code = """
import os, sys
from gptj_ft.system.signals import StopRequest
StopRequest().take()
try:
    exec("os.kill(os.getpid(), 2)\\nfor _ in range(1000): pass")
except KeyboardInterrupt:
    sys.exit(130)
"""
    (tmp_path / "stopped_module.py").write_text(code, encoding="utf-8")
    assert subprocess.run([sys.executable, "-m", "stopped_module"], check=False, cwd=tmp_path).returncode == 130


def test_failing_torch_cleanup_is_still_stop() -> None:
    error = RuntimeError("trying to pop from empty mode stack")
    error.__context__ = signals.Stopping()
    with pytest.raises(Interrupted, match="kept"), signals.stop_message(lambda: "kept"):
        raise error
    with pytest.raises(RuntimeError, match="a bug"), signals.stop_message(lambda: "kept"):
        raise RuntimeError("a bug")


def lose_in_del() -> None:
    class Library:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    Library()


def lose_in_weakref_callback() -> None:
    class Library:
        pass

    library = Library()
    reference = weakref.ref(library, lambda _: os.kill(os.getpid(), signal.SIGTERM))
    del library
    assert reference() is None


def lose_in_except() -> None:
    with suppress(BaseException):
        os.kill(os.getpid(), signal.SIGTERM)


LOSERS = (lose_in_del, lose_in_weakref_callback, lose_in_except)


@pytest.mark.parametrize("lose", LOSERS)
def test_swallowed_signal_is_raised_again(lose: Callable[[], None], capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> None:
        with signals.stop_message(lambda: "kept"), StopRequest():
            lose()
            time.sleep(1)

    with pytest.raises(Interrupted, match="kept"):
        command()
    assert capsys.readouterr().err == ""
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("lose", LOSERS)
def test_swallowed_signal_reaches_inner_handler(lose: Callable[[], None]) -> None:
    asked: list[bool] = []
    with StopRequest():
        lose()
        with StopRequest(lambda: asked.append(True)) as training:
            time.sleep(3 * signals.RAISE_AGAIN_SECONDS)
    assert (asked, training.requested) == ([True], True)


STOPPED_MODULE = """
import os, sys, types
from gptj_ft.__main__ import main

def run():
    try:
        {signals}
        for _ in range(1000):
            pass
    except BaseException as error:
        made_of_it = ValueError(f"in validator: {{type(error).__name__}}")
    raise made_of_it

app = types.ModuleType("gptj_ft.cli.app")
app.main = run
sys.modules["gptj_ft.cli.app"] = app
main()
"""


def test_replaced_stop_error_still_stops(shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def validate(*arguments: object) -> None:  # as pydantic does, in Rust: no context is kept
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
        except BaseException as error:
            made_of_it = ValueError(f"in validator: {type(error).__name__}")
        raise made_of_it

    def command() -> None:
        with signals.stop_message(lambda: "kept"), StopRequest():
            validate()

    with pytest.raises(Interrupted, match="kept"):
        command()
    monkeypatch.setattr("gptj_ft.api.named_model", validate)
    done = shell("predict --model tiny-bert text")
    assert (done.code, done.err) == (130, "gptj-ft: stopped; run the same command to resume or restart\n")


@pytest.mark.parametrize(("signals", "code"), [("os.kill(os.getpid(), 15)", 130), ("raise TypeError", 1)])
def test_stop_during_import_is_no_error(signals: str, code: int) -> None:
    text = STOPPED_MODULE.format(signals=signals)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert ("Traceback" in done.stderr) == (code == 1)


def test_slow_cleanup_is_not_interrupted() -> None:
    ended = []

    @contextmanager
    def slow() -> Iterator[None]:
        try:
            yield
        finally:
            time.sleep(3 * signals.RAISE_AGAIN_SECONDS)
            ended.append("a context")

    def command() -> None:
        with signals.stop_message(lambda: "kept"), StopRequest(), slow():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(1)
            except KeyboardInterrupt:
                time.sleep(3 * signals.RAISE_AGAIN_SECONDS)
                ended.append("an except")
                raise RuntimeError("another error has come of it") from None

    with pytest.raises(Interrupted):
        command()
    assert ended == ["an except", "a context"]


def test_other_unraisable_errors_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    class Library:
        def __del__(self) -> None:
            raise ValueError("a bug in a library")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "unraisablehook", sys.__unraisablehook__)
        with StopRequest():
            Library()
        assert sys.unraisablehook is sys.__unraisablehook__
    assert "a bug in a library" in capsys.readouterr().err


def test_nohup_is_respected_and_handlers_restored() -> None:
    before, interrupt = signal.signal(signal.SIGHUP, signal.SIG_IGN), signal.getsignal(signal.SIGINT)
    try:
        with StopRequest() as request:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not request.requested
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert signal.getsignal(signal.SIGINT) == interrupt


def test_stream_survives_closed_reader_not_full_disk() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    stream = LastingStream(os.fdopen(writer, "w"))
    for _ in range(3):
        print("nobody reads this" * 1000, file=stream, flush=True)
    stream.close()
    with open("/dev/full", "w") as full, pytest.raises(OSError, match="No space"):
        LastingStream(full).write("x" * 100_000)


def test_letters_that_stdout_lacks_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(inner, encoding="latin-1"))
    with lasting_streams():
        print("naïve 日本")
    assert inner.getvalue() == b"na\xefve \\u65e5\\u672c\n"


def test_closed_terminal_fails_no_run(model: Path, straight: dict[str, torch.Tensor], tmp_path: Path) -> None:
    from rich.console import Console

    run = begun_run(session_of(model, "host"), tmp_path)
    terminal, program = os.openpty()
    stream = LastingStream(os.fdopen(program, "w"))

    with before_steps(lambda step: os.close(terminal) if step == 2 else None):
        loop.train(session_of(model, "host"), run, TerminalReporter(Console(file=stream, force_terminal=True)))
    assert_same_weights(weights_of(run.model), straight)


def test_missing_standard_streams_are_opened() -> None:
    process = os.fork()
    if process == 0:
        code = 1
        try:
            os.close(2)
            sys.stderr = None  # type: ignore[assignment]
            open_missing()
            sys.stderr.write("nowhere")
            code = 0 if os.path.samestat(os.fstat(2), os.stat(os.devnull)) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("error", [RuntimeError("a bug"), OSError(errno.ENOSPC, "No space"), SystemExit(3)])
def test_error_saves_and_explains_resume(
    place: str, error: BaseException, model: Path, straight: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    session = small_session(model, STEPS, weights=place, optimizer_state=place)
    run = begun_run(session, tmp_path)
    with failing(3, error), pytest.raises(type(error)) as stop, saved_state_in_errors(run):
        train(session, run)
    assert steps_done(run) == 2
    if isinstance(error, Exception):
        note = f"the run is saved at step 2; resume with\ngptj-ft finetune --resume {run.folder}"
        assert stop.value.__notes__[-1] == note
    train(session, run)
    assert_same_weights(weights_of(run.model), straight, place)


def test_half_updated_layer_is_never_saved(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gptj_ft.streaming.adamw import AdamW

    session = small_session(model, STEPS, weights="host", optimizer_state="host")
    run, apply, failed = begun_run(session, tmp_path), AdamW.apply, []

    def failing(self, visit, *others):
        apply(self, visit, *others)
        if self.step == 2 and not failed:
            failed.append(visit.layer)
            raise MemoryError

    monkeypatch.setattr(AdamW, "apply", failing)
    with pytest.raises(MemoryError):
        train(session, run)
    assert steps_done(run) == 0
    assert what_is_saved(run).startswith("nothing was saved yet; resume with")


def test_failed_export_leaves_checkpoint(model: Path, straight: dict[str, torch.Tensor], tmp_path: Path) -> None:
    session = small_session(model, STEPS, weights="host", optimizer_state="host")
    run = begun_run(session, tmp_path)
    with full_disk_at_export(), pytest.raises(ResourceError), saved_state_in_errors(run):
        train(session, run)
    assert steps_done(run) == STEPS
    train(session, run)
    assert_same_weights(weights_of(run.model), straight)


def test_full_disk_message_explains_resume(shell, rows_file: Path, monkeypatch) -> None:
    def full(self: Run, values: object) -> None:
        raise ResourceError(f"cannot write {self.metrics_file}: No space left on device")

    monkeypatch.setattr(Run, "append_metrics", full)
    done = shell(
        "finetune --recipe summarization --data rows.jsonl --model tiny --max-steps 2 --output run --weights disk"
        " --optimizer-state disk"
    )
    assert done.code == 4
    assert done.err.endswith("nothing was saved yet; resume with\ngptj-ft finetune --resume run\n"), done.err


def losses_of(*pieces: tuple[float, float, int]) -> list[float]:
    """Return losses around some levels: (mean, deviation, steps) for each."""
    generator = torch.Generator().manual_seed(0)
    return [mean + spread * torch.randn((), generator=generator).item() for mean, spread, n in pieces for _ in range(n)]


def warnings_of(losses: list[float]) -> list[int]:
    watch = LossWatch(50_400)
    return [step for step, loss in enumerate(losses, 1) if watch.after_step(loss)]


@pytest.mark.parametrize(
    "losses",
    [
        losses_of((2.5, 0.3, 2000)),
        losses_of((3.0, 1.0, 2000)),
        [0.05, 6.0, 0.05, 0.06, 0.05, 5.0, 0.04, 0.05] * 200,  # one row a step, some of them hard
        [10.9 - step / 100 + noise for step, noise in enumerate(losses_of((0.0, 0.3, 900)))],
        losses_of((11.5, 0.2, 100)),  # a model that knows nothing
    ],
)
def test_ordinary_losses_give_no_warning(losses: list[float]) -> None:
    assert not warnings_of(losses)


@pytest.mark.parametrize(
    ("losses", "latest"),
    [
        (losses_of((2.5, 0.3, 50), (7.5, 0.3, 100)), 66),
        (losses_of((3.0, 0.1, 6), (7.5, 0.3, 100)), 22),
        (losses_of((3.0, 0.1, 1), (40.0, 5.0, 100)), 5),
        ([2.5 + max(0, step - 50) / 10 for step in range(200)], 80),
    ],
    ids=["jump", "early jump", "at once", "slow"],
)
def test_exploding_loss_warns_once(losses: list[float], latest: int) -> None:
    (step,) = warnings_of(losses)
    assert step <= latest
    watch = LossWatch(50_400, losses[:step])
    assert not any(watch.after_step(loss) for loss in losses[step:])


def test_worse_validation_is_not_reported_again_on_resume() -> None:
    assert LossWatch(50_400, validations=[2.0, 2.5], before=2.0).after_validation(4.0, 2.0)
    assert not LossWatch(50_400, validations=[2.0, 4.0], before=2.0).after_validation(4.0, 2.0)


def test_exploding_run_warns_terminal_and_log(model: Path, tmp_path: Path) -> None:
    from rich.console import Console

    session = small_session(model, 6, lr=10.0, clip_norm=None, warmup=0.0, schedule="constant", weights="device")
    run, screen = begun_run(session, tmp_path), io.StringIO()
    loop.train(session, run, TerminalReporter(Console(file=screen, width=500)))
    assert screen.getvalue().count("warning: the ") == 1
    assert "start a new one with a lower --lr" in (run.folder / "log.txt").read_text(encoding="utf-8")


@pytest.mark.slow
def test_tests_reset_ignored_signals() -> None:
    command = f"trap '' HUP INT TERM USR1; exec '{sys.executable}' -m pytest -q '{__file__}' -k second"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
