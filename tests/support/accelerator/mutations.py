"""Remove every wait, event and stream mark of the accelerator path, one at a time: does the simulator notice?

``python -m support.accelerator.mutations [--sample N] [--only REGEX]`` prints a JSON line per mutation: place, change,
and the symptom: a race, other numbers, an error or a hang. Syntax trees yield the mutations; only the interface names
are listed by hand.

Each mutation runs in a fork of a process that has imported everything except the package. The fork imports a changed
copy of the package and runs cases of `support.simulated` until one shows the mutation.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import json
import os
import random
import re
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from support import accelerator, simulated, simulated_several

ROOT = Path(__file__).resolve().parents[3]
SHARED = ("pipeline.py", "row_shards.py", "exchange.py")
SOURCES = (
    "streaming/**/*.py", "system/accelerator.py", "system/block_reader.py", *(f"distributed/{name}" for name in SHARED),
)  # fmt: skip
WAITS = {"wait_for", "_wait", "wait", "wait_event", "synchronize", "result", "record", "ended"}
MARKS = {
    "transfers",
    "reads",
    "earlier",
    "_last_update",
    "_after",
    "zeroed",
}  # lists of transfers that a later user of the memory waits for
AFTER = re.compile(
    r"(after|span\.after|ended\(span\.after\)|events|zeroed|store\.zeroed|(self|weights)\.earlier|(lease|slot|buffer)\.transfers|chunk\.reads"
    r"|(tuple|list)\((after|weights\.earlier|(slot|buffer|lease)\.transfers)\))"
)
LAST_COMMIT = ", *self._last_commit(layer)"
# The first three measure time and protect no memory. `drain` waits for writes to the disk: tests of power cuts and of
# kills check it.
NOT_OURS = {"StallTimer", "synchronize", "timed", "drain"}
# Mutations without effect, by function, kind and source, each with the reason. A transfer of another thread blocks the
# program until its bytes are there; only events leave something to wait for on a stream.
OWN_EVENTS = "the events are that stream's own, the transfers block the program"
EQUIVALENT = {
    ("OffloadedActivations._wait", "the wrong stream", "current_stream(self._device)"): OWN_EVENTS,
    ("OffloadedModel.read_chunks", "the wrong stream", "self.compute_stream"): OWN_EVENTS,
    ("OffloadedModel.write_chunks", "the wrong stream", "self.compute_stream"): OWN_EVENTS,
    ("UpdatePump.advance", "the wrong stream", "self._model.compute_stream"): OWN_EVENTS,
    ("LoadedLayer.finish", "the wrong stream", "self._model.compute_stream"): OWN_EVENTS,
    ("LayerGradient._cleared", "the wrong stream", "self._model.compute_stream"): OWN_EVENTS,
    ("WeightSlot._request_trained", "a mark is left out", "lease.transfers.append(self.reads[-1])"): (
        "the layer waits for the transfer itself; the mark is for a step that is broken off in between"
    ),
    (
        "HostStore.read_rows",
        "what it comes after is left out",
        "ended(span.after)",
    ): "copied on the stream that zeroed the rows",
    (
        "FolderStore.read_rows",
        "what it comes after is left out",
        "events",
    ): "likewise, where no threads read blocks",
    ("PipelineChannel.send", "a wait is left out", "self._sending.popleft().wait()"): (
        "what was sent is kept to the end of the pass then; that it is not has a test of its own"
    ),
}
SEAM = "__import__('gptj_ft.system.accelerator', fromlist=['x'])"
HANGS_AFTER = 150.0  # seconds for a case


@dataclass(frozen=True)
class Mutation:
    """A change of a source."""

    path: str  # file, inside the package
    line: int
    function: str  # enclosing function
    what: str  # kind of the change, in words
    before: str  # source text
    after: str  # replacement
    start: int  # offset of the text in the file, in characters

    def apply(self, source: str) -> str:
        assert source[self.start :].startswith(self.before)
        return source[: self.start] + self.after + source[self.start + len(self.before) :]

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.function}: {self.what}: {self.before}"


class Finder(ast.NodeVisitor):
    """Collect the mutations of a file."""

    def __init__(self, path: str, source: str) -> None:
        self._path, self._source = path, source
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line.encode()))
        self._bytes = source.encode()
        self._functions: list[str] = []
        self.found: list[Mutation] = []
        self.visit(ast.parse(source))

    def _text(self, node: ast.AST) -> str:
        return ast.get_source_segment(self._source, node) or ""

    def _add(self, node: ast.AST, what: str, after: str) -> None:
        at = self._starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        start, function = len(self._bytes[:at].decode()), ".".join(self._functions)
        made = Mutation(self._path, node.lineno, function, what, self._text(node), after, start)  # type: ignore[attr-defined]
        if not NOT_OURS & set(self._functions) and made not in self.found:
            self.found.append(made)

    def _inside(self, node: Any) -> None:
        self._functions.append(node.name)
        self.generic_visit(node)
        self._functions.pop()

    visit_FunctionDef = visit_ClassDef = _inside

    def visit_Expr(self, node: ast.Expr) -> None:
        call = node.value
        if isinstance(call, ast.Call):
            name = _name(call)
            if name == "append" and isinstance(call.func, ast.Attribute) and _name(call.func.value) in MARKS:
                self._add(node, "a mark is left out", self._text(call.args[0]))
            elif name in WAITS:
                kept = self._text(call.func.value) if name == "result" and isinstance(call.func, ast.Attribute) else ""
                is_call = kept.endswith(")")
                what = "an event is not recorded" if name == "record" else "a wait is left out"
                self._add(node, what, kept if is_call else "pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if _name(node.target) in MARKS and _name(node.value) != "record_event":
            self._add(node, "a mark is left out", "pass")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            if not isinstance(target, ast.Attribute):
                continue
            if target.attr in MARKS and self._text(node.value) != "[]" and _name(node.value) != "record_event":
                self._add(node.value, "a mark is left out", "[]")
            elif target.attr == "compute_stream":
                self._add(
                    node.value, "the wrong stream", self._text(node.value).replace("current_stream", "new_stream")
                )
        self.generic_visit(node)

    def visit_With(self, node: ast.With) -> None:
        for item in node.items:
            text = self._text(item.context_expr)
            if _name(item.context_expr) == "on_stream" and text.endswith(".update_stream)"):
                of = text.removeprefix("on_stream(").removesuffix(".update_stream)")
                other = f"{SEAM}.on_stream({SEAM}.new_stream({of}.device))"
                self._add(item.context_expr, "the wrong stream", other)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = _name(node)
        if name == "record_event":
            self._add(node, "an event is left out", "[]")
        elif name == "fresh":
            self._add(node, "an event is left out", f"({self._text(node)}[0], [])")
        elif name in ("wait_for", "_wait", "wait", "record") and node.args:
            self._move(node.args[-1])
        elif name not in ("ended", "tuple", "list"):
            for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
                text = self._text(argument)
                if AFTER.fullmatch(text):
                    nothing = "[]" if text.startswith("list(") else "()"
                    self._add(argument, "what it comes after is left out", nothing)
                elif text.startswith("[*after, "):
                    self._add(argument, "what it comes after is left out", text.replace("*after, ", ""))
                if isinstance(argument, ast.List) and LAST_COMMIT in text:
                    self._add(argument, "the last commit is left out", text.replace(LAST_COMMIT, ""))
        self.generic_visit(node)

    def _move(self, stream: ast.expr) -> None:
        """Move a wait or mark to another stream."""
        text = self._text(stream)
        if "compute_stream" in text:
            self._add(stream, "the wrong stream", text.replace("compute_stream", "update_stream"))
        elif "update_stream" in text:
            self._add(stream, "the wrong stream", text.replace("update_stream", "compute_stream"))
        elif text.startswith("current_stream("):
            self._add(stream, "the wrong stream", f"{SEAM}.new_stream{text.removeprefix('current_stream')}")
        elif text == "stream":
            self._add(stream, "the wrong stream", f"{SEAM}.module_of(stream.device).Stream(stream.device)")


def _name(node: ast.AST) -> str:
    """Return the last part of a dotted name or call."""
    if isinstance(node, ast.Call):
        return _name(node.func)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def find_mutations(package: Path = ROOT / "gptj_ft") -> list[Mutation]:
    """Return every mutation of the accelerator path."""
    paths = sorted({path for pattern in SOURCES for path in package.glob(pattern)})
    return [
        mutation
        for path in paths
        if path.name != "fake.py"  # it holds nothing
        for mutation in Finder(str(path.relative_to(package)), path.read_text(encoding="utf-8")).found
    ]


# ------------------------------------------------------------------ cases, most telling first


def cases_for(path: str) -> Iterator[simulated.Case]:
    """Yield cases for a mutation of a file, best coverage first."""
    seen = set()
    shared = [simulated_several.case_of(way, "device", "late") for way in ("direct", "rows")]
    telling = shared if Path(path).name in SHARED and Path(path).parent.name == "distributed" else list(_telling())
    words = {
        "host.py": "host", "disk.py": "disk", "folder.py": "strided", "block_reader.py": "frozen on disk",
        "queue.py": "disk", "device.py": "frozen on device", "open.py": "frozen on",
        "activations.py": "device/device/host",
    }.get(Path(path).name, "")  # fmt: skip
    telling.sort(key=lambda case: words not in f"{case.scenario} {case.group} {case.label}")
    for case in (*telling, *simulated.reduced(list(simulated.SCENARIOS))):
        key = case.scenario, case.group, case.label, case.schedule
        if key not in seen:
            seen.add(key)
            yield case


def _telling() -> Iterator[simulated.Case]:
    for scenario, dtype, schedule, labels in (
        ("full", "bf16", "late", ("host/host/host, 0 kept, 2 late",)),
        ("lora", "fp32", "late", ("frozen on disk, state on disk, 1 kept", "frozen on host, state on device, 0 kept")),
        ("full", "bf16", "late", ("disk/disk/disk, 0 kept, 0 late",)),
        ("full", "fp32", "late", ("device/device/host, 0 kept, 0 late",)),
        ("tied", "fp32", "late", ("host/host/host", "disk/disk/disk")),
        ("read", "fp32", "late", ("on disk", "on device", "on host")),
        ("part", "fp32", "late", ("frozen on device, state on host", "frozen on disk, state on disk")),
        ("full", "fp32", "late", ("host/host/host, 1 kept, 0 late", "device/host/device, 1 kept, 0 late")),
        ("full", "fp32", "compute late", ("host/host/host, 1 kept, 0 late", "disk/disk/disk, 1 kept, 2 late")),
        ("full", "fp32", "others late", ("host/host/host, 1 kept, 0 late", "disk/host/disk, 0 kept, 2 late")),
        ("lora", "fp32", "compute late", ("frozen on host, state on device, 0 kept",)),
        ("lora", "fp32", "others late", ("frozen on device, state on disk, 1 kept",)),
        ("run", "fp32", "late", ("on host, cut off and resumed", "on disk, cut off and resumed")),
    ):
        yield from (
            case
            for case in simulated.SCENARIOS[scenario]((dtype,), (schedule,))  # type: ignore[operator]
            if case.label in labels
        )


# ------------------------------------------------------------------ running one


class Server:
    """Run mutations in forks of this process, from a copy of the package."""

    def __init__(self) -> None:
        simulated.prepare()
        for name in simulated.SHAPES:
            simulated.model_folder(name)
        self._folder = Path(tempfile.mkdtemp(prefix="mutations-", dir=simulated.memory()))
        self._package = self._folder / "gptj_ft"
        shutil.copytree(ROOT / "gptj_ft", self._package, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(ROOT / "recipes", self._folder / "recipes")
        compileall.compile_dir(self._package, quiet=2)

        for case in [case for case in cases_for("") if case.scenario == "write"][:1]:
            simulated.run_case(case)  # imports the rest of the package; no backward runs before the fork
        for name in [name for name in sys.modules if name.split(".")[0] == "gptj_ft" or name == "support.small_run"]:
            del sys.modules[name]
        sys.path.insert(0, str(self._folder))
        sys.dont_write_bytecode = True
        self.numbers: dict[str, str] = {}

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def learn(self, cases: Sequence[simulated.Case]) -> list[str]:
        """Run cases on the unchanged sources; return their failures."""
        wrong = []
        for found in self._fork(cases, stops=False):
            if found["error"] or found["races"]:
                wrong.append(f"{found['scenario']} {found['case']}: {found['error'] or found['races']}")
            self.numbers[_key(found)] = found["numbers"]
        return wrong

    def run(self, mutation: Mutation, cases: Sequence[simulated.Case]) -> dict[str, Any]:
        """Return the symptom of a mutation."""
        path = self._package / mutation.path
        source, started = path.read_text(encoding="utf-8"), time.monotonic()
        for cached in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
            cached.unlink()
        path.write_text(mutation.apply(source), encoding="utf-8")
        found_by, number = None, 0
        try:
            for found in self._fork(cases, stops=True):
                number += 1
                found_by = self._verdict(found)
                if found_by:
                    break
        finally:
            path.write_text(source, encoding="utf-8")
        seconds = round(time.monotonic() - started, 1)
        reason = EQUIVALENT.get((mutation.function, mutation.what, mutation.before))
        return {
            **asdict(mutation), "found_by": found_by, "num_cases": number, "seconds": seconds,
            "changes_nothing": reason,
        }  # fmt: skip

    def _verdict(self, found: dict[str, Any]) -> str | None:
        where = f"{found['scenario']} {found['group']}, {found['case']}, {found['schedule']}"
        if found["races"]:
            return f"race in {where}"
        if found["error"]:
            return f"error in {where}: {found['error'].strip().splitlines()[-1][:100]}"
        if found["numbers"] != self.numbers.get(_key(found), found["numbers"]):
            return f"numbers of {where}"
        return None

    def _fork(self, cases: Sequence[simulated.Case], stops: bool) -> Iterator[dict[str, Any]]:
        """Run cases in a fork and yield the outcome of each; ``stops`` lets the reader end early."""
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            with os.fdopen(writer, "w") as pipe:
                try:
                    simulated.prepare()
                    for case in cases:
                        found = simulated.run_case(case)
                        pipe.write(json.dumps(found) + "\n")
                        pipe.flush()
                        if stops and self._verdict(found):
                            break
                except BaseException as error:
                    pipe.write(json.dumps(_failure(f"{type(error).__name__}: {error}")) + "\n")
                    pipe.flush()
                finally:
                    os._exit(0)
        os.close(writer)
        try:
            with os.fdopen(reader) as pipe:
                while True:
                    if not select.select([pipe], [], [], HANGS_AFTER)[0]:
                        yield _failure("hangs")
                        return
                    line = pipe.readline()
                    if not line:
                        return
                    yield json.loads(line)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _failure(error: str) -> dict[str, Any]:
    return {"scenario": "", "group": "", "case": "", "schedule": "", "numbers": None, "error": error, "races": []}


def _key(found: dict[str, Any]) -> str:
    return f"{found['scenario']}, {found['group']}"


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, help="so many, drawn by a fixed seed")
    parser.add_argument("--only", default="", help="those whose description has this regular expression")
    parser.add_argument("--cases", type=int, default=64, help="most cases for a mutation; default 64")
    parser.add_argument("--list", action="store_true", help="print them and run none")
    chosen = parser.parse_args(arguments)
    mutations = [mutation for mutation in find_mutations() if re.search(chosen.only, str(mutation))]
    if chosen.sample is not None:
        mutations = random.Random(0).sample(mutations, min(chosen.sample, len(mutations)))
    if chosen.list:
        for mutation in mutations:
            print(mutation, "->", mutation.after)
        return
    server = Server()
    try:
        cases = {mutation.path: list(cases_for(mutation.path))[: chosen.cases] for mutation in mutations}
        known = {str(case): case for some in cases.values() for case in some}
        wrong = server.learn(list(known.values()))
        if wrong:
            raise SystemExit("\n".join(["the sources as they are fail:", *wrong]))
        for mutation in mutations:
            print(json.dumps(server.run(mutation, cases[mutation.path])), flush=True)
    finally:
        server.close()
        simulated.clean_up()


if __name__ == "__main__":
    accelerator.install()
    main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)
