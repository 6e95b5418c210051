"""Test the tests by mutation: does a test fail when a line of the core changes?

``make mutants`` samples mutants of the modules below, runs the tests that reach each mutated line, and prints the
survivors. A mutant changes one expression or statement: a comparison, operator, number or boolean, a negated condition,
an omitted call. ``equivalent_mutants.json`` lists mutants that change no behaviour, with the reason; they do not count.

A trace finds the tests that reach a line, once, and is kept in ``.mutants/``. Each mutant runs in a fork of a process
that has imported torch and pytest but not the package. An import hook provides the changed module; no file changes.

``planted_bugs.json`` lists bugs of whole features, which no single expression shows: a rule of a paper, a mask, a count
after a resume. Each names the nearest test files, which must fail; ``--planted`` runs these alone.
"""

from __future__ import annotations

import argparse
import ast
import copy
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import FrameType
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
PACKAGE = ROOT / "gptj_ft"
KEPT = ROOT / ".mutants"
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.json")
PLANTED = Path(__file__).with_name("planted_bugs.json")
QUICK = "not slow and not thorough"  # the tests of `make test`

SOURCES = (
    "streaming/step.py",
    "streaming/scoring.py",
    "streaming/kept_activations.py",
    "streaming/exchange.py",
    "streaming/offloaded_model.py",
    "streaming/transfers.py",
    "streaming/loaded_layer.py",
    "streaming/update_pump.py",
    "streaming/objective.py",
    "streaming/schedule.py",
    "streaming/prefetch.py",
    "streaming/buffers.py",
    "streaming/activations.py",
    "streaming/adamw.py",
    "streaming/update_check.py",
    "training/checkpoint.py",
    "streaming/stores/base.py",
    "streaming/stores/device.py",
    "streaming/stores/host.py",
    "streaming/stores/disk.py",
    "streaming/stores/folder.py",
    "streaming/stores/queue.py",
    "streaming/stores/state_file.py",
    "system/block_reader.py",
    "streaming/stores/placement.py",
    "data/encode.py",
    "data/split.py",
    "data/batches.py",
    "evaluation/metrics/__init__.py",
    "evaluation/metrics/statistic.py",
    "evaluation/metrics/accuracy.py",
    "evaluation/metrics/language_model.py",
    "evaluation/metrics/relations.py",
    "evaluation/metrics/rouge.py",
    "evaluation/metrics/squad.py",
)  # fmt: skip
SUITE = (
    "streaming/test_streaming.py",
    "streaming/test_exchange.py",
    "streaming/test_state_file.py",
    "streaming/test_adamw.py",
    "streaming/test_lora.py",
    "streaming/test_freezing.py",
    "models/test_gpt2.py",
    "system/test_block_reader.py",
    "checkpoints/test_optimizer_state.py",
    "training/test_retention.py",
    "faults/test_crash.py",
    "data/test_template.py",
    "data/test_chat.py",
    "data/test_batches.py",
    "data/test_prepare.py",
    "evaluation/test_metrics.py",
    "generation/test_decoding.py",
    "evaluation/test_evaluate.py",
    "planning/test_plan.py",
    "training/test_runs.py",
    "training/test_finetune.py",
    "streaming/test_draws.py",
)  # fmt: skip
LEAST_TESTS = 12  # first tests of a mutant: the fastest of those that reach its line,
MOST_SECONDS = 40.0  # and more up to this time; the remaining tests run only if these pass
PATIENCE = 90.0  # a mutant hangs after this and four times its tests' usual seconds
COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.Pow: ast.Mult,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change of one module.

    Attributes:
        line, text: number and text of the first line of the node.
        before, after: source of the node.
    """

    file: str  # path of the module in the package
    line: int
    text: str
    before: str
    after: str
    source: str  # mutated source of the whole module

    @property
    def key(self) -> list[str]:
        """Identify a mutant without its line number, which shifts."""
        return [self.file, self.text, self.before, self.after]

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.before}  ->  {self.after}"


def mutants_of(file: str) -> list[Mutant]:
    """Return every mutant of a module."""
    text = (PACKAGE / file).read_text(encoding="utf-8")
    starts, lines = [0], text.splitlines()
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for node in _nodes(ast.parse(text)):
        for changed in _changes(node):
            begin = starts[node.lineno - 1] + node.col_offset
            end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
            raw, after = text.encode(), ast.unparse(changed)
            replacement = after if isinstance(node, ast.stmt) else f"({after})"
            source = (raw[:begin] + replacement.encode() + raw[end:]).decode()
            found.append(Mutant(file, node.lineno, lines[node.lineno - 1].strip(), ast.unparse(node), after, source))
    return found


def _nodes(tree: ast.AST) -> Iterator[Any]:
    """Yield nodes that affect behaviour: no annotations, error messages, assertions or docstrings."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list", "type_comment"):
            continue
        for node in value if isinstance(value, list) else [value]:
            is_skipped = isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom)
            is_typing = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            is_check = isinstance(node, ast.keyword) and node.arg == "strict"  # of `zip`: an assertion
            if isinstance(node, ast.AST) and not (is_skipped or is_typing or is_check):
                if hasattr(node, "lineno"):
                    yield node
                yield from _nodes(node)


def _changes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the possible mutations of a node."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARED:
        yield _with(node, ops=[COMPARED[type(node.ops[0])](), *node.ops[1:]])
    elif isinstance(node, ast.BinOp) and type(node.op) in COMPUTED:
        if not (isinstance(node.left, ast.Constant) and isinstance(node.left.value, str)):
            yield _with(node, op=COMPUTED[type(node.op)]())
    elif isinstance(node, ast.BoolOp):
        yield _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield ast.Constant(node.value + 1)
    elif isinstance(node, ast.IfExp):
        yield _with(node, body=node.orelse, orelse=node.body)
    elif isinstance(node, ast.AugAssign):
        yield _with(node, op=COMPUTED[type(node.op)]()) if type(node.op) in COMPUTED else ast.Pass()
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield ast.Pass()
    elif isinstance(node, ast.Break):
        yield ast.Continue()
    elif isinstance(node, ast.Continue):
        yield ast.Pass()


def _with(node: ast.AST, **fields: Any) -> ast.AST:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


class Reached:
    """Record, as a pytest plugin, the source lines that each test runs on any thread, and its seconds."""

    def __init__(self) -> None:
        self.tests: dict[str, dict[str, Any]] = {}
        self._lines: set[tuple[str, int]] = set()
        self._names = {str(PACKAGE / file): file for file in SOURCES}

    def _enter(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        name = self._names.get(frame.f_code.co_filename)
        if name is None:
            return None

        def line(frame: FrameType, event: str, argument: object) -> Any:
            if event == "line":
                self._lines.add((name, frame.f_lineno))
            return line

        return line

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._lines, self._began = set(), time.monotonic()
        threading.settrace(self._enter)
        sys.settrace(self._enter)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        lines = defaultdict(list)
        for file, number in sorted(self._lines):
            lines[file].append(number)
        self.tests[nodeid] = {"seconds": time.monotonic() - self._began, "lines": lines}


class Changed(importlib.abc.MetaPathFinder):
    """Import one module of the package in its mutated form."""

    def __init__(self, mutant: Mutant) -> None:
        path = PACKAGE / mutant.file
        names = ["gptj_ft", *Path(mutant.file).with_suffix("").parts]
        self._name = ".".join(names[:-1] if names[-1] == "__init__" else names)
        self._source, self._path, self._is_package = mutant.source, str(path), names[-1] == "__init__"

    def find_spec(self, fullname: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        source = self._source

        class Loader(importlib.machinery.SourceFileLoader):
            def get_code(self, fullname: str) -> Any:
                return compile(source, self.path, "exec", dont_inherit=True)

        places = [str(Path(self._path).parent)] if self._is_package else None
        loader = Loader(fullname, self._path)
        return importlib.util.spec_from_file_location(
            fullname, self._path, loader=loader, submodule_search_locations=places
        )


def in_fork(work: Callable[[], int], seconds: float) -> int | None:
    """Run a function in a silent fork; return its exit code, or ``None`` if it hung."""
    child = os.fork()
    if child == 0:
        os.setsid()
        silence = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(silence, descriptor)
        code = 70
        try:
            code = int(work())
        finally:
            os._exit(code)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def trace() -> dict[str, dict[str, Any]]:
    """Return the lines that each test reaches; repeats the trace if a source or test has changed."""
    files = sorted([*(PACKAGE / name for name in SOURCES), *(TESTS / name for name in SUITE)])
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    path = KEPT / f"reached-{digest}.json"
    if not path.is_file():
        KEPT.mkdir(exist_ok=True)

        def work() -> int:
            import pytest

            plugin = Reached()
            code = pytest.main(["-q", "-m", QUICK, "-p", "no:cacheprovider", *_suite()], plugins=[plugin])
            new = path.with_suffix(".new")
            new.write_text(json.dumps(plugin.tests), encoding="utf-8")
            new.rename(path)
            return int(code)

        print("tracing which tests reach which lines, once: some minutes", flush=True)
        if code := in_fork(work, 3600):
            print(f"some tests failed while they were traced (exit code {code}): they are left in", flush=True)
    found: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _suite() -> list[str]:
    return [str(TESTS / name) for name in SUITE]


def tests_for(mutant: Mutant, reached: dict[str, dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Return the tests that reach a mutant's line, or its file for import-time lines: the fastest, then the rest."""
    by_line = [name for name, facts in reached.items() if mutant.line in facts["lines"].get(mutant.file, ())]
    names = by_line or [name for name, facts in reached.items() if mutant.file in facts["lines"]]
    names.sort(key=lambda name: float(reached[name]["seconds"]))
    seconds = accumulate(float(reached[name]["seconds"]) for name in names)
    count = sum(number < LEAST_TESTS or total <= MOST_SECONDS for number, total in enumerate(seconds))
    return names[:count], names[count:]


def try_mutant(mutant: Mutant, reached: dict[str, dict[str, Any]]) -> str:
    """Return ``caught``, ``hung``, ``survived`` or ``not reached``."""
    result = "not reached"
    for names in filter(None, tests_for(mutant, reached)):

        def work(names: Sequence[str] = names) -> int:
            import pytest

            sys.meta_path.insert(0, Changed(mutant))
            return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *(str(ROOT / name) for name in names)]))

        code = in_fork(work, 4 * sum(float(reached[name]["seconds"]) for name in names) + PATIENCE)
        if code != 0:
            return "hung" if code is None else "caught"
        result = "survived"
    return result


@dataclass(frozen=True)
class PlantedBug:
    """A bug written by hand."""

    bug: str  # wrong behaviour, in words
    file: str  # path of the module in the package
    before: str  # source text, once in the file
    after: str
    tests: Sequence[str]  # nearest test files

    @property
    def mutant(self) -> Mutant:
        source = (PACKAGE / self.file).read_text(encoding="utf-8")
        assert source.count(self.before) == 1, f"{self.file} has {self.before!r} {source.count(self.before)} times"
        line = source[: source.index(self.before)].count("\n")
        changed = source.replace(self.before, self.after)
        return Mutant(self.file, line + 1, source.splitlines()[line].strip(), self.before, self.after, changed)


def planted_bugs() -> list[PlantedBug]:
    """Return the bugs of the list."""
    return [PlantedBug(**each) for each in json.loads(PLANTED.read_text(encoding="utf-8"))]


class FirstFailure:
    """Write the name of the first test that fails, as a pytest plugin."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self._path.write_text(report.nodeid, encoding="utf-8")


def try_planted(planted: PlantedBug) -> tuple[str, float]:
    """Return the first test that fails, or ``survived``, and the seconds."""
    start, mutant = time.monotonic(), planted.mutant  # here, as an outdated bug in the fork would look caught
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "failed")

        def work() -> int:
            import pytest

            sys.meta_path.insert(0, Changed(mutant))
            tests = [str(TESTS / name) for name in planted.tests]
            options = ["-x", "-q", "-m", QUICK, "-p", "no:cacheprovider"]
            return int(pytest.main([*options, *tests], plugins=[FirstFailure(path)]))

        code = in_fork(work, 600)
        if code == 0:
            return "survived", time.monotonic() - start
        name = path.read_text(encoding="utf-8") if path.is_file() else f"exit code {code}"
        return name, time.monotonic() - start


def run_planted(threads: ThreadPoolExecutor, only: str) -> int:
    """Test the planted bugs, print the test that catches each, and count the survivors."""
    survived, bugs = 0, [each for each in planted_bugs() if only in each.bug]
    for each, (found, seconds) in zip(bugs, threads.map(try_planted, bugs), strict=True):
        survived += found == "survived"
        print(f"{each.bug}: {found} ({seconds:.0f} s)", flush=True)
    print(f"{len(bugs) - survived} of {len(bugs)} planted bugs were caught", flush=True)
    return survived


def main(arguments: Sequence[str] | None = None) -> int:
    """Test the planted bugs; then sample mutants, test each, print the survivors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, default=300, help="mutants to draw; 0: all")
    parser.add_argument("--skip", type=int, default=0, help="of them, the first, which have been tried")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="of this module alone, e.g. streaming/adamw.py")
    parser.add_argument("--planted", nargs="?", const="", metavar="WORDS", help="only planted bugs, with these words")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT), str(TESTS)]
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
    import pytest  # noqa: F401
    import torch
    import transformers

    _ = transformers.GPTJForCausalLM, transformers.GPT2LMHeadModel, transformers.AutoTokenizer
    torch.set_num_threads(1)
    with ThreadPoolExecutor(options.jobs) as threads:
        survived = run_planted(threads, options.planted or "") if options.only is None else 0
    if options.planted is not None:
        return int(survived > 0)
    reached = trace()
    equivalent = {tuple(each["mutant"]) for each in json.loads(EQUIVALENT.read_text(encoding="utf-8"))}
    every = [mutant for file in SOURCES for mutant in mutants_of(file)]
    for key in equivalent - {tuple(mutant.key) for mutant in every}:
        print(f"listed as equivalent, but there is no such mutant any more: {key}", flush=True)
    drawn = [mutant for mutant in every if options.only in (None, mutant.file)]
    random.Random(options.seed).shuffle(drawn)
    drawn = [each for each in drawn[options.skip : options.sample or None] if tuple(each.key) not in equivalent]
    results: dict[str, list[Mutant]] = defaultdict(list)
    with ThreadPoolExecutor(options.jobs) as threads:
        for mutant, result in zip(drawn, threads.map(lambda each: try_mutant(each, reached), drawn), strict=True):
            results[result].append(mutant)
            if result != "caught":  # one that hung is no proof on a busy machine
                print(f"{result}: {mutant}", flush=True)
    caught = len(results["caught"]) + len(results["hung"])
    print(f"{caught} of {len(drawn)} mutants were caught, {100 * caught / max(1, len(drawn)):.1f} %", flush=True)
    return int(survived > 0 or caught < 0.95 * len(drawn))


if __name__ == "__main__":
    sys.exit(main())
