"""Replace every name that a command opens by a symlink: received files must not reach outside their folder."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.cli_runner import Shell, run_command
from support.os_calls import Call, wrap_calls
from support.steps import failing

from gptj_ft.config.run_folder import Run, environment_changes
from gptj_ft.errors import DataError, ResourceError, UsageError
from gptj_ft.system import atomic, files
from gptj_ft.system.jsonl import JsonLines
from gptj_ft.training.finetune import options_on_resume, resume_run

RUN = "--recipe summarization --model tiny --max-length 96 --batch-size 2 --precision fp32 --device cpu"
DISK = "--weights disk --optimizer-state disk"
OPENING = {
    "open",
    "os.mkdir",
    "os.rename",
    "os.link",
    "os.remove",
    "os.rmdir",
    "os.truncate",
    "os.listdir",
    "os.scandir",
}
SECRET = "kept as it is\n"


class Trace:
    """Record every path that this process opens, creates, renames or removes.

    Python's audit hooks cannot be removed, so one hook is installed once and switched on for a block.
    """

    def __init__(self) -> None:
        self._found: set[str] | None = None
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[object, ...]) -> None:
        if self._found is not None and event in OPENING:
            self._found |= {os.fsdecode(each) for each in arguments[:2] if isinstance(each, str | bytes | os.PathLike)}

    @contextmanager
    def under(self, folder: Path, found: set[str]) -> Iterator[None]:
        """Collect the names below a folder that the block uses or leaves there."""
        self._found = set()
        try:
            yield
        finally:
            paths, self._found = self._found, None
        paths |= {str(path) for path in folder.rglob("*")}
        whole = (Path(os.path.abspath(path)) for path in paths)
        found |= {str(path.relative_to(folder)) for path in whole if path.is_relative_to(folder) and path != folder}


@pytest.fixture(scope="session")
def trace() -> Trace:
    return Trace()


def write_rows(path: Path) -> Path:
    lines = [{"document": f"The lift stops at floor {n}.", "summary": f"Lift, floor {n}."} for n in range(8)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


@dataclass(frozen=True)
class Outside:
    """Provide a file and a folder that no command may touch or use."""

    folder: Path

    def begin(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        (self.folder / "inner").mkdir(parents=True)
        (self.folder / "file").write_text(SECRET)
        (self.folder / "inner" / "file").write_text(SECRET)

    def is_untouched(self) -> bool:
        found = sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*"))
        texts = [path.read_text() for path in self.folder.rglob("file")]
        return found == ["file", "inner", "inner/file"] and set(texts) == {SECRET}


@dataclass(frozen=True)
class Made:
    """A world of small things, each made once: rows, a home, a run that stopped, a run that is finished.

    Attributes:
        folder: with ``rows.jsonl``, ``home``, ``stopped`` and ``finished``.
        resumed: names in a run that resuming it uses.
        others: names in all of the folder that an evaluation, a conversion and a preparation use.
    """

    folder: Path
    resumed: list[str]
    others: dict[str, list[str]]


COMMANDS = {
    "evaluate": "evaluate finished --data rows.jsonl --device cpu --precision fp32 --baseline none",
    "convert": "convert finished/model converted --dtype bf16",
    "prepare": f"prepare-data --data rows.jsonl {RUN.partition('--batch')[0]} --output prepared",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, trace: Trace, request: pytest.FixtureRequest) -> Made:
    folder = tmp_path_factory.mktemp("made")
    write_rows(folder / "rows.jsonl")
    resumed: set[str] = set()
    others: dict[str, set[str]] = {name: set() for name in COMMANDS}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("GPTJ_FT_HOME", "home")
        with failing(3, KeyboardInterrupt()):
            typed(f"finetune {RUN} {DISK} --max-steps 4 --save-every 1 --keep 1 --data rows.jsonl --output stopped")
        shutil.copytree("stopped", "finished")
        with trace.under(folder / "finished", resumed):
            assert typed("finetune --resume finished") == 0
        for name, line in COMMANDS.items():
            before = set(folder.rglob("*"))
            with trace.under(folder, others[name]):
                assert typed(line) == 0
            for path in set(folder.rglob("*")) - before:
                files.remove(path)
    return Made(folder, sorted(resumed), {name: sorted(found) for name, found in others.items()})


def typed(line: str) -> int:
    """Run a command in this process; return its exit code."""
    try:
        return run_command(shlex.split(line))
    except KeyboardInterrupt:
        return 130


@contextmanager
def linked(path: Path, outside: Outside, kept: Path, made_of_dots: bool = False) -> Iterator[None]:
    """Replace a file or folder by a symlink that leaves its folder, for the time of a block."""
    outside.begin()
    if existed := os.path.lexists(path):
        path.rename(kept)
    missing = [parent for parent in path.parents if not parent.is_dir()]
    path.parent.mkdir(parents=True, exist_ok=True)
    target = outside.folder / ("inner" if kept.is_dir() else "file")
    path.symlink_to(os.path.relpath(target, path.parent.resolve()) if made_of_dots else target)
    try:
        yield
    finally:
        files.remove(path)
        for parent in missing[-1:]:
            files.remove(parent)
        if existed and path.parent.is_dir():
            kept.rename(path)


@pytest.mark.thorough
def test_symlink_in_received_run_is_rejected_first(made: Made, tmp_path: Path, shell: Shell) -> None:
    outside, run = Outside(tmp_path / "outside"), tmp_path / "run"
    assert {"log.txt", ".metrics.jsonl.sorted", "run.lock", "state", "state/.direct", "state/layer-001.spare.new"} <= {
        *made.resumed
    }
    shutil.copytree(made.folder / "stopped", run)
    for number, name in enumerate(made.resumed):
        with linked(run / name, outside, tmp_path / "kept", made_of_dots=number % 2 == 0):
            with pytest.raises(DataError, match=r"is a link to .*outside/(file|inner)"):
                resume_run(run, options_on_resume({}))
            for command in ("finetune --resume", "runs verify", "report") if name in ("log.txt", "state") else ():
                outcome = shell(command, run)
                assert outcome.code == DataError.exit_code, (name, command, outcome)
                assert len(outcome.err.splitlines()) == 1, outcome
            assert outside.is_untouched(), name


@pytest.mark.slow
def test_symlink_created_after_check_is_not_followed(made: Made, tmp_path: Path) -> None:
    outside, run = Outside(tmp_path / "outside"), tmp_path / "run"
    for name in made.resumed:
        shutil.copytree(made.folder / "stopped", run)
        if not (run / name).is_dir() and (run / name).parent.is_dir():
            with linked(run / name, outside, tmp_path / "kept"), pytest.MonkeyPatch.context() as patch:
                patch.chdir(made.folder)
                patch.setenv("GPTJ_FT_HOME", "home")
                wrap_calls(patch, ["walk"], lambda _: lambda folder: ())
                typed(f"finetune --resume {shlex.quote(str(run))}")
                assert outside.is_untouched(), name
        shutil.rmtree(run)
        files.remove(tmp_path / "kept")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("stride", [23, pytest.param(1, marks=pytest.mark.slow)])
def test_no_command_follows_symlinks_outside(
    command: str, stride: int, made: Made, tmp_path: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside, world, given = Outside(tmp_path / "outside"), tmp_path / "world", {"rows.jsonl", "finished", "home"}
    shutil.copytree(made.folder, world)
    monkeypatch.chdir(world)
    monkeypatch.setenv("GPTJ_FT_HOME", "home")
    names = [name for name in made.others[command] if name not in given and not name.startswith("stopped")]
    assert len(names) > 20
    for name in names[1::stride]:
        before = set(world.rglob("*"))
        with linked(world / name, outside, tmp_path / "kept"):
            outcome = shell(COMMANDS[command])
            assert outcome.code in (0, UsageError.exit_code, DataError.exit_code), (name, outcome)
            assert outside.is_untouched(), name
            assert SECRET.strip() not in outcome.said
            for path in set(world.rglob("*")) - before:
                files.remove(path)


def test_received_run_appends_to_no_user_file(made: Made, tmp_path: Path, shell: Shell) -> None:
    run, profile = tmp_path / "got", tmp_path / "bashrc"
    shutil.copytree(made.folder / "stopped", run)
    environment = json.loads((run / "environment.json").read_text())
    (run / "environment.json").write_text(json.dumps({**environment, "torch": "x\ntouch PWNED #\x1b[2J"}))
    profile.write_text("# mine\n")
    (run / "log.txt").rename(tmp_path / "log.txt")
    (run / "log.txt").symlink_to("../bashrc")
    assert shell("finetune --resume", run).code == DataError.exit_code
    assert profile.read_text() == "# mine\n"
    (run / "log.txt").unlink()
    (tmp_path / "log.txt").rename(run / "log.txt")
    Run(run).log(environment_changes(Run(run), "cpu", 1) or "")
    (line,) = [line for line in (run / "log.txt").read_text().splitlines() if "PWNED" in line]
    assert "torch x\\ntouch PWNED #\\x1b[2J, now" in line


@pytest.mark.parametrize("kind", ["link", "dangling", "folder", "pipe"])
def test_links_and_pipes_in_runs_stay_unopened(kind: str, tmp_path: Path) -> None:
    def put(path: Path) -> None:
        files.remove(path)
        if kind in ("link", "dangling"):
            path.symlink_to(tmp_path / ("secret" if kind == "link" else "nowhere"))
        elif kind == "folder":
            path.mkdir()
        else:
            os.mkfifo(path)

    folder = tmp_path / "run"
    folder.mkdir()
    (tmp_path / "secret").write_text(SECRET)
    for name in ("metrics.jsonl", "run.lock"):
        put(folder / name)
        with pytest.raises((DataError, ResourceError)):
            JsonLines(folder / name).append({"more": 1})
        with pytest.raises((DataError, FileNotFoundError)):
            files.read_text(folder / name)
        files.remove(folder / name)
    put(folder / "metrics.new")
    files.replace_text(folder / "metrics.jsonl", "all\n")
    assert (folder / "metrics.jsonl").read_text() == "all\n"
    put(folder / ".report.md.writing")
    with atomic.atomic_files(folder / "report.md") as (file,):
        file.write("report")
    put(folder / "copy")
    files.copy_file(folder / "report.md", folder / "copy")
    assert (folder / "copy").read_text() == "report"
    put(folder / ".next.starting")
    files.create_folder(folder / ".next.starting")
    assert (tmp_path / "secret").read_text() == SECRET
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("target", ["/etc", "../../..", "../../../run-2", "nowhere/../../../../passwd", "circle/x"])
def test_nested_symlink_is_found(target: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "state" / "deep").mkdir(parents=True)
    (tmp_path / "run-2").mkdir()
    (folder / "inner").symlink_to("state/deep")  # trackers make such
    (tmp_path / "named").symlink_to(folder)
    files.require_plain(tmp_path / "named")
    (folder / "state" / "deep" / "circle").symlink_to("../../../named/../run-2")
    (folder / "state" / "deep" / "x").symlink_to(target)
    with pytest.raises(DataError, match=r"deep/(x|circle) is a link .*"):
        files.require_plain(folder)
    if target != "circle/x":
        (folder / "state" / "deep" / "circle").unlink()
        with pytest.raises(DataError, match=r"deep/x is a link to .*, out of the folder"):
            files.require_plain(folder)


def modes_in(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*")}


def test_file_permissions_private_or_umask(made: Made) -> None:
    parts = ("data", "samples", "state", "checkpoints")
    for name in ("stopped", "finished"):
        run = made.folder / name
        private = {
            path: mode for path, mode in modes_in(run).items() if path.partition("/")[0] in parts or "/" not in path
        }
        private.pop("model", None)
        assert not {path: oct(mode) for path, mode in private.items() if mode & 0o077}
        assert stat.S_IMODE(run.stat().st_mode) == 0o700
    home = {path: mode for path, mode in modes_in(made.folder / "home").items() if not path.startswith("models")}
    assert not {path: oct(mode) for path, mode in home.items() if mode & 0o077}
    assert stat.S_IMODE((made.folder / "home").stat().st_mode) == 0o700
    umask = os.umask(0)
    os.umask(umask)
    shared = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (made.folder / "finished" / "model").iterdir()}
    assert set(shared.values()) == {0o666 & ~umask}, shared


def test_leftovers_of_a_kill_are_cleaned(made: Made, tmp_path: Path, shell: Shell) -> None:
    done, stopped = tmp_path / "done", tmp_path / "stopped"
    shutil.copytree(made.folder / "finished", done)
    shutil.copytree(made.folder / "stopped", stopped)
    ends = {*modes_in(done), *modes_in(stopped), "run.lock"}
    whole = re.compile(r"checkpoints/step-\d+(/(layer-\d+\.safetensors|manifest\.json))?")
    passing = [name for name in made.resumed if name not in ends and not whole.fullmatch(name)]
    tops = {name for name in passing if not any(str(parent) in passing for parent in Path(name).parents)}
    assert {".metrics.jsonl.sorted", "report.new", "state/.direct", "state/layer-000.spare.new"} <= tops
    for form in (r"\.model\.[^/]+\.\d+\.writing", r"checkpoints/step-\d+\.tmp"):
        assert [name for name in tops if re.fullmatch(form, name)], form
    assert not [name for name in tops if not files.is_leftover(Path(name).name)]
    beside = files.hidden_name(tmp_path / "done", "starting")
    for run in (done, stopped):
        before = content(run)
        for name in tops:
            (run / name).parent.mkdir(exist_ok=True)
            (run / name).write_bytes(b"x")
        if run == stopped:
            assert shell("runs clean", run).code == 0
        else:
            beside.mkdir()
            (run / "report.html").unlink()
            assert shell("finetune --resume", run).code == UsageError.exit_code
            assert (run / "report.html").is_file()
            assert not beside.exists()
        assert content(run).keys() == before.keys()
        assert {name: data for name, data in content(run).items() if name not in ("report.html", "run.lock")} == {
            name: data for name, data in before.items() if name not in ("report.html", "run.lock")
        }


def content(folder: Path) -> dict[str, bytes]:
    whole = (path for path in folder.rglob("*") if path.is_file() and not files.is_leftover(path.name))
    return {str(path.relative_to(folder)): path.read_bytes() for path in whole}


def refusing(number: int, *names: str) -> Callable[[Call], Call]:
    """Return a wrapper of `os.open` that fails for these names."""

    def wrap(opened: Call) -> Call:
        def refuse(path: str | Path, *others: int, **more: int | None) -> int:
            if Path(path).name in names:
                raise OSError(number, os.strerror(number), str(path))
            return opened(path, *others, **more)

        return refuse

    return wrap


def test_denied_operations_give_one_line_errors(
    made: Made, tmp_path: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made.folder)
    monkeypatch.setenv("GPTJ_FT_HOME", "home")
    run = tmp_path / "run"
    for number, code in ((errno.EACCES, 2), (errno.EROFS, 4), (errno.EIO, 4)):
        shutil.copytree(made.folder / "stopped", run)
        with monkeypatch.context() as patch:
            wrap_calls(patch, ["open"], refusing(number, "log.txt"))
            outcome = shell("finetune --resume", run)
        assert outcome.code == code, outcome
        assert f"{run}/log.txt: {os.strerror(number)}; " in outcome.err
        assert "Traceback" not in outcome.err
        shutil.rmtree(run)
    shutil.copytree(made.folder / "stopped", run)
    with monkeypatch.context() as patch:
        wrap_calls(patch, ["open"], refusing(errno.EACCES, "newest-run.new", "machine.new"))
        assert shell("finetune --resume", run).code == 0
    (tmp_path / "circle").symlink_to("circle")
    for line in (
        f"finetune {RUN} --data rows.jsonl --output rows.jsonl/run",
        f"finetune {RUN} --data rows.jsonl --output {'x' * 300}",
        f"finetune {RUN} --data {tmp_path}/circle",
        f"evaluate {'x' * 5000}",
        f"finetune --resume {'x' * 300}",
        f"runs verify {tmp_path}/circle",
        "prepare-data --data rows.jsonl --model tiny --recipe summarization --output rows.jsonl/prepared",
        f"convert finished/model rows.jsonl/{'x' * 300}",
    ):
        outcome = shell(line)
        assert outcome.code == UsageError.exit_code, (line, outcome)
