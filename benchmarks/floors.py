"""Check a small version of each quick claim in RESULTS.md against a floor; exit with 1 if one is worse.

    python benchmarks/floors.py --data data/ --tokenizer gpt2/ --vocabulary bert/ --work /tmp/floors
    python benchmarks/floors.py ... --only disk,parity

Each measurement is a benchmark of this folder in a small form, 10 to 16 minutes in all on two cores. Numbers are
ratios of two programs that ran side by side, never seconds, so floors hold on other machines of the same kind. They
belong to these small versions, which are worse than full size: RESULTS.md has the claims. A figure 10 % worse than
its floor is measured once more, for machines are shared; if it is again, the claim is named and the exit code is 1. So
is a claim whose benchmark fails or prints something else; its folder stays in WORK, and the others go on.

Left out, because they take longer or need another machine or a network: 6 billion parameters, DeepSpeed, forecasts of
time, several processes, the tables of learned scores, `predict`. Bits over kills and placements: `make test`, too.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

HERE = Path(__file__).parent
WORSE = 0.10
SHOWN_LINES = 15  # of what a benchmark that failed has printed last
LEAST, MOST = "at least", "at most"
# Of the small forms, machine C (2 cores of an AMD EPYC with AVX-512 and bf16), 2026-11-23.
FLOORS: Mapping[str, tuple[str, float]] = {
    "parity: relative difference of losses from transformers": (MOST, 1e-6),
    "disk: seconds of a step, times those in RAM": (MOST, 1.35),
    "disk: memory, times that in RAM": (MOST, 0.75),
    "bf16: seconds of a step from disk, times those in RAM": (MOST, 1.45),
    "kept: seconds of a step with activations kept, times those recomputed": (MOST, 0.90),
    "loop: examples/s, times a plain transformers loop": (LEAST, 2.0),
    "loop: memory, times its": (MOST, 0.80),
    "peft: examples/s of LoRA, times peft in a plain loop": (LEAST, 1.5),
    "peft: memory, times its": (MOST, 0.60),
    "depth: memory of four times the blocks, times what their inputs add": (MOST, 1.10),
    "planned: memory of a killed and resumed run, times the forecast": (MOST, 0.85),
    "forecast: memory is forecast 0 to 10 % above what a run takes": (LEAST, 1.0),
    "prove: a killed run from disk has the bits of one in RAM": (LEAST, 1.0),
    "generate: tokens/s of one row, times transformers.generate": (LEAST, 1.2),
    "evaluate: rows/s, times a transformers loop": (LEAST, 1.2),
    "prepare: tokens/s of prepare-data, times the bare tokenizer": (LEAST, 0.6),
    "ragged: speed-up by no padding, share of the padding saved": (LEAST, 0.9),
    "encoder: rows/s of MiniLM on SST-2, times a plain transformers loop": (LEAST, 2.5),
}
Objects = Sequence[Mapping[str, Any]]  # JSON that a benchmark printed


@dataclass(frozen=True)
class Measurement:
    """A small version of a benchmark.

    Attributes:
        names: of its figures, in the order of `FLOORS`: what stands there before the colon.
        script: file in this folder; empty: the command line of the program.
        words: arguments; ``{data}``, ``{tokenizer}``, ``{vocabulary}`` and ``{work}`` are filled in.
        read: returns the figures, from JSON and from all that was printed.
    """

    names: Sequence[str]
    script: str
    words: str
    read: Callable[[Objects, str], Sequence[float]]

    def run(self, places: Mapping[str, Path]) -> dict[str, float]:
        """Run it in its own folder; return its values by name.

        Raises:
            subprocess.CalledProcessError: it failed.
            Exception: any other, it has not printed what is read.
        """
        places = {**places, "work": places["work"] / "-".join(self.names)}
        program = [str(HERE / self.script)] if self.script else ["-m", "gptj_ft"]
        command = [sys.executable, *program, *(word.format(**places) for word in self.words.split())]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        named = [name for name in FLOORS if name.partition(":")[0] in self.names]
        found = dict(zip(named, self.read(list(objects(done.stdout)), done.stdout), strict=True))
        shutil.rmtree(places["work"], ignore_errors=True)
        return found


def objects(text: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects at the beginnings of lines of a benchmark's output."""
    decoder, position = json.JSONDecoder(), 0
    while (start := re.compile(r"^\{", re.MULTILINE).search(text, position)) is not None:
        try:
            value, position = decoder.raw_decode(text, start.start())
        except ValueError:
            position = start.end()
            continue
        yield value


def parity(found: Objects, text: str) -> list[float]:
    """Read `dialogsum_parity.py`."""
    return [found[0]["largest_difference"] / found[0]["last_loss"]]


def placements(found: Objects, text: str) -> list[float]:
    """Read `streamed_vs_resident.py`: in RAM, from disk, in RAM with activations kept."""
    ram, disk, kept = found
    seconds, peaks = (lambda of: min(of["seconds"][1:])), (lambda of: of["peak_rss_bytes"])
    return [seconds(disk) / seconds(ram), peaks(disk) / peaks(ram), seconds(kept) / seconds(ram)]


def from_disk(found: Objects, text: str) -> list[float]:
    """Read `streamed_vs_resident.py`: in RAM, from disk."""
    ram, disk = (min(each["seconds"][1:]) for each in found)
    return [disk / ram]


def beside_a_loop(found: Objects, text: str) -> list[float]:
    """Read the output of `side_by_side.report`: gptj-ft and a loop."""
    results = found[0]["results"]
    ours = next(of for name, of in results.items() if name.startswith("gptj-ft"))
    loop = next(of for name, of in results.items() if not name.startswith("gptj-ft"))
    return [ours[key] / loop[key] for key in ("examples_per_second", "peak_rss_bytes")]


def depth(found: Objects, text: str) -> list[float]:
    """Read `depth.py`: the deepest model compared with the shallowest plus the layer inputs between them."""
    return [1 + float(re.findall(r"([-+][\d.]+)%", text)[-1]) / 100]


def planned(found: Objects, text: str) -> list[float]:
    """Read `full_size.py`."""
    assert not found[0]["verified"]["problems"], found[0]["verified"]["problems"]
    return [max(found[0]["peak_rss_bytes"]) / found[0]["forecast"]["memory_bytes"]]


def forecast(found: Objects, text: str) -> list[float]:
    """Read `forecast.py`; print the deviations to stderr."""
    told, was = (found[0][when]["memory"] for when in ("forecast", "measured"))
    print(f"forecast: {told / was - 1:+.1%} of the memory that was measured", file=sys.stderr)
    return [float(was <= told <= 1.1 * was)]


def proven(found: Objects, text: str) -> list[float]:
    """Read `gptj-ft prove --json`."""
    return [float(found[0]["holds"])]


def generated(found: Objects, text: str) -> list[float]:
    """Read part a of `decoding.py`."""
    return [found[0]["a"]["batch 1, beams 1"]["ratio"]]


def evaluated(found: Objects, text: str) -> list[float]:
    """Read `evaluation.py`."""
    return [float(re.findall(r"([\d.]+) times the rows a second", text)[0])]


def prepared(found: Objects, text: str) -> list[float]:
    """Read part a of `prepare_data.py`: the mean over the forms of files."""
    return [fmean(of["rates"][0] / of["rates"][1] for of in found if "rates" in of)]


def ragged(found: Objects, text: str) -> list[float]:
    """Read `ragged_vs_padded.py`."""
    return [found[0]["reached"]]


def encoder(found: Objects, text: str) -> list[float]:
    """Read `encoders.py loop`."""
    rates = {name: median(of) for name, of in found[0]["rates"].items()}
    return [rates["gptj-ft"] / rates["transformers"]]


LOOP = "--data {data}/summarization/dialogsum/train.jsonl --tokenizer {tokenizer} --work {work}"
MEASUREMENTS = [
    Measurement(["parity"], "dialogsum_parity.py", f"{LOOP} --steps 4", parity),
    Measurement(
        ["disk", "kept"], "streamed_vs_resident.py",
        "--work {work} --layers 12 --width 1024 --tokens 512 --steps 3 --variants device,disk,device:kept=12",
        placements,
    ),
    Measurement(
        ["bf16"], "streamed_vs_resident.py",
        "--work {work} --layers 2 --width 1024 --tokens 512 --steps 3 --compute bf16", from_disk,
    ),
    Measurement(
        ["loop"], "transformers_loop.py",
        f"{LOOP} --places auto --loops plain --steps 3 --warm-up 1 --batch-size 4 --max-length 512 --width 512",
        beside_a_loop,
    ),
    Measurement(
        ["peft"], "lora_vs_peft.py",
        f"{LOOP} --places auto --loops plain --steps 4 --warm-up 1 --batch-size 4 --width 512", beside_a_loop,
    ),
    # Fewer than 8 of such blocks do not fill the pool of 24 chunks.
    Measurement(["depth"], "depth.py", "--work {work} --layers 8,32 --width 1024 --tokens 128", depth),
    Measurement(
        ["planned"], "full_size.py",
        "--work {work} --layers 4 --width 1024 --tokens 512 --micro-batch 512 --memory 3", planned,
    ),
    Measurement(["forecast"], "forecast.py", f"{LOOP} --only 1 --steps 3", forecast),
    Measurement(["prove"], "", "prove --size tiny --output {work} --json", proven),
    Measurement(
        ["generate"], "decoding.py", "a --work {work} --layers 4 --width 1024 --tokens 16 --runs 2", generated
    ),
    Measurement(
        ["evaluate"], "evaluation.py", "--data {data} --tokenizer {tokenizer} --work {work} --small --asked 0",
        evaluated,
    ),
    Measurement(
        ["prepare"], "prepare_data.py",
        "--data {data} --tokenizer {tokenizer} --work {work} --only a --megabytes 1 --repetitions 1", prepared,
    ),
    Measurement(
        ["ragged"], "ragged_vs_padded.py",
        "--data {data} --tokenizer {tokenizer} --work {work} --recipes dialogsum --width 512 --steps 2 --turns 2 "
        "--asked 0", ragged,
    ),
    Measurement(
        ["encoder"], "encoders.py",
        "loop --data {data} --tokenizer {vocabulary} --work {work} --tasks sst2 --shapes minilm --precisions fp32 "
        "--steps 3 --turns 1 --trainers gptj-ft,transformers", encoder,
    ),
]  # fmt: skip


def is_worse(name: str, value: float) -> bool:
    """Tell whether a value is 10 % worse than its floor."""
    side, floor = FLOORS[name]
    return value < floor * (1 - WORSE) if side == LEAST else value > floor * (1 + WORSE)


def better(name: str, one: float, other: float) -> float:
    """Return the better of two values."""
    return (max if FLOORS[name][0] == LEAST else min)(one, other)


def measure(measurement: Measurement, places: Mapping[str, Path]) -> dict[str, float]:
    """Run a measurement, and repeat it if a value is below its floor; keep the better value."""
    found = measurement.run(places)
    if any(is_worse(name, value) for name, value in found.items()):
        again = measurement.run(places)
        found = {name: better(name, value, again[name]) for name, value in found.items()}
    return found


def what_failed(error: Exception) -> str:
    """Summarize an error in one line; print a failed benchmark's last lines to stderr."""
    if not isinstance(error, subprocess.CalledProcessError):
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    lines = (error.stderr or "").strip().splitlines()
    print(*lines[-SHOWN_LINES:], sep="\n", file=sys.stderr)
    return f"exit code {error.returncode}: {lines[-1] if lines else 'it said nothing'}"


def main() -> None:
    """Measure every claim, print a table, and name those below their floor."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with summarization/, squad/, sentiment/")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with GPT-2's vocab.json and merges.txt")
    parser.add_argument("--vocabulary", type=Path, required=True, help="folder with BERT's vocab.txt")
    parser.add_argument("--work", type=Path, required=True, help="new folder")
    parser.add_argument("--only", help="comma-separated names of measurements: parity,disk")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True)
    places = {name: getattr(arguments, name).resolve() for name in ("data", "tokenizer", "vocabulary", "work")}
    wanted = set(arguments.only.split(",")) if arguments.only else None
    began, worse = time.monotonic(), list[str]()
    print("| claim, in a small form | measured | floor | |\n|---|---|---|---|", flush=True)
    for measurement in MEASUREMENTS:
        if wanted is not None and not wanted & set(measurement.names):
            continue
        start = time.monotonic()
        try:
            found = measure(measurement, places)
        except Exception as error:
            worse += measurement.names
            print(f"| {', '.join(measurement.names)} | failed: {what_failed(error)} | | worse |", flush=True)
            continue
        for name, value in found.items():
            side, floor = FLOORS[name]
            worse += [name] if is_worse(name, value) else []
            verdict = "worse" if is_worse(name, value) else "ok"
            print(f"| {name} | {value:.3g} | {side} {floor:g} | {verdict} |", flush=True)
        print(f"{', '.join(measurement.names)}: {time.monotonic() - start:.0f} s", file=sys.stderr)
    print(f"{(time.monotonic() - began) / 60:.1f} minutes in all")
    if not any(arguments.work.iterdir()):
        arguments.work.rmdir()
    if worse:
        sys.exit(f"failed, or worse than its floor by more than {WORSE:.0%}: {'; '.join(worse)}")


if __name__ == "__main__":
    main()
