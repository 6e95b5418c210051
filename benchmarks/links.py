"""Measure, forecast and simulate the steps of two processes that share a run over a shaped link.

    sudo python benchmarks/links.py --tokenizer gpt2/ --data dialogues.jsonl --work /tmp/links

Two network namespaces of this machine are two machines, joined by a link that `tc` shapes: as it is, at 1 Gbit/s, at
100 Mbit/s. Each process has one core and one thread, and the whole state in memory. A model of 12 blocks of width 1024
with GPT-J's vocabulary (254 million parameters, random), fp32, 8 rows per step in micro-batches of 256 tokens: all
parameters by `share: layers`, LoRA by `share: rows`. The first step is left out: it has no update to apply.

* bytes: what the link has carried in a step, against the plan's;
* seconds: those of ``metrics.jsonl``, against `gptj-ft plan --nodes 2 --network RATE`;
* two runs of one process each at once, that share nothing but the machine: what two of its cores do against one is the
  most that sharing can give there, since they have one memory and one cache;
* the seconds of each layer in these are measured, too, and are what `scaling.py --measured` simulates with.

All of that alternating; numbers are means over turns, with the least and most.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from same_work import make_model
from side_by_side import memory

SHAPE = {"vocab_size": 50400, "n_positions": 2048, "n_embd": 1024, "n_layer": 12, "n_head": 8, "rotary_dim": 64}
PLACES = ("gptj-ft-a", "gptj-ft-b")  # names of the namespaces
ADDRESSES = ("10.77.0.1", "10.77.0.2")
RATES = {"unshaped": None, "1Gbit": 1e9, "100Mbit": 1e8}
SHARES = {
    "layers": ("--set share=layers", {"stages": 2, "replicas": 1}),
    "rows": ("--set method=lora --set share=rows --set lanes=2", {"stages": 1, "replicas": 2}),
}
PAYLOAD = 1448 / 1514  # of a full packet, as `tc` counts it
TIMED = """
import json, sys, time
from gptj_ft.streaming import prefetch
from gptj_ft.training import compute
steps, plain, step = [], prefetch.Prefetcher.__next__, compute.train_step
def timed(self):
    loaded = plain(self)
    if steps and self.model is steps[-1][0]:
        steps[-1][1].append((time.perf_counter(), loaded.index))
    return loaded
def train_step(model, optimizer, batches, *more):
    steps.append((model, [], len(batches)))
    found = step(model, optimizer, batches, *more)
    steps[-1][1].append((time.perf_counter(), -1))
    return found
prefetch.Prefetcher.__next__, compute.train_step = timed, train_step
from gptj_ft.__main__ import main
try:
    main()
finally:
    json.dump([more for _, *more in steps], open(sys.argv[-1] + ".times", "w"))
"""


def main() -> None:
    """Make the model, and measure each way to share at each rate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with GPT-2's tokenizer")
    parser.add_argument("--data", type=Path, required=True, help="rows with dialogue and summary")
    parser.add_argument("--work", type=Path, required=True, help="new folder, with 8 GB free")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--shares", nargs="+", choices=SHARES, default=list(SHARES))
    given = parser.parse_args()
    work = given.work.resolve()
    work.mkdir(parents=True)
    model = work / "model"
    make_model(model, given.tokenizer, SHAPE)
    options = (
        f"--recipe dialogsum --model {model} --data {given.data.resolve()} --max-steps {given.steps} --batch-size 8 "
        "--set micro_batch_tokens=256 --set holdout=0 --precision fp32 --weights device --optimizer-state device "
        "--activations recompute --set threads=1 --set lr=1e-5 --max-length 256"
    )
    points = []
    for share in given.shares:
        points += measure(work, f"{options} {SHARES[share][0]}", share, given.turns)
    if not points:
        return
    (work.parent / "links.json").write_text(json.dumps(points, indent=1), encoding="utf-8")
    shutil.rmtree(work)
    subprocess.run(
        [sys.executable, Path(__file__).with_name("scaling.py"), "--measured", work.parent / "links.json"], check=True
    )


def measure(work: Path, options: str, share: str, turns: int) -> list[dict[str, float]]:
    """Measure one way to share, and print it; return the inputs of the simulation."""
    alone, beside = list[float](), list[float]()
    kinds, together = list[dict[str, float]](), {name: list[float]() for name in RATES}
    said = dict[str, str]()
    for turn in range(turns):
        (seconds,), peak, _ = run_alone(work, options, 1)
        alone.append(seconds)
        both, _, layers = run_alone(work, options, 2)
        beside.append(statistics.mean(both))
        kinds.append(layers)
        for name, rate in RATES.items():
            with link(rate):
                seconds, sent, peaks = run_together(work, options)
            together[name].append(seconds)
            said[name] = f"sent {sent / 1e6:.1f} MB; {' and '.join(f'{each:.2f}' for each in peaks)} GB"
        print(f"{share}, turn {turn}:", alone[-1], beside[-1], {name: each[-1] for name, each in together.items()})
    layers = {name: statistics.mean(each[name] for each in kinds) for name in kinds[0]}
    forecast, _ = planned(work, options, layers["tokens"])
    print(f"{share}: one process {spread(alone)} a step, planned {forecast:.2f}; {peak:.2f} GB")
    ratio = 2 * statistics.mean(alone) / statistics.mean(beside)
    print(f"  two runs at once {spread(beside)}: two cores do {ratio:.2f} times what one does")
    points, base = [], statistics.mean(together["unshaped"])
    for name, rate in RATES.items():
        mean = statistics.mean(together[name])
        text = f"  {name}: {spread(together[name])}, {statistics.mean(alone) / mean:.2f} times, {base / mean:.2f} of"
        text += f" unshaped; {said[name]}"
        if rate:
            network = f"--nodes 2 --network {name}"
            forecast, sent = planned(work, f"{options} {network}", layers["tokens"], SHARES[share][1])
            text += f"; forecast {forecast:.2f} s, {sent / 1e6:.1f} MB"
            if share == "layers":
                measured = {"link_bytes_per_s": rate / 8 * PAYLOAD, "seconds_step_measured": mean}
                points.append({**layers, **measured, "ranks": 2})
        print(text, flush=True)
    return points


def spread(seconds: list[float]) -> str:
    """Format the mean of seconds with minimum and maximum."""
    return f"{statistics.mean(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})"


def run_alone(work: Path, options: str, copies: int) -> tuple[list[float], float, dict[str, float]]:
    """Train in one process, or in several independent ones at once.

    Returns:
        Seconds of a step of each; memory of the first; mean seconds of each kind of layer, those of a step beside
        blocks and head (an embedding's, while the others wait), and what else a simulation takes.
    """
    os.sync()  # else this run computes beside the writing of the model of the one before
    outputs = [work / f"run-{core}" for core in range(copies)]
    processes, peak = list[subprocess.Popen[bytes]](), 0.0
    for core, output in enumerate(outputs):
        shutil.rmtree(output, ignore_errors=True)
        command = ["taskset", "-c", str(core), sys.executable, "-c", TIMED, "finetune", *options.split(), "--quiet"]
        processes.append(subprocess.Popen([*command, "--output", output], env=environment(), stdout=subprocess.DEVNULL))
    while any(each.poll() is None for each in processes):
        peak = max(peak, memory(processes[0].pid, "VmHWM") / 1e9)
        time.sleep(0.1)
    assert not any(each.wait() for each in processes)
    steps = [steps_of(output) for output in outputs]
    top, ahead, back, head, rest = SHAPE["n_layer"] + 1, list[float](), list[float](), list[float](), list[float]()
    for output, lines in zip(outputs, steps, strict=True):
        layers = json.loads(Path(f"{output}.times").read_text(encoding="utf-8"))
        for (times, micro_batches), line in list(zip(layers, lines, strict=True))[1:]:
            spent = [(index, after - now) for (now, index), (after, _) in pairwise(times)][: 2 * top + 1]
            ahead += [seconds / micro_batches for index, seconds in spent[1:top]]
            head.append(spent[top][1] / micro_batches)
            back += [seconds / micro_batches for index, seconds in spent[top + 1 :] if index]
            rest.append(line["seconds"] - sum(seconds for index, seconds in spent if index))
    means = {"forward_block": ahead, "backward_block": back, "head": head, "beside": rest}
    found = {f"seconds_{name}": statistics.mean(each) for name, each in means.items()}
    tokens = statistics.mean(line["tokens"] for line in steps[0][1:])
    found |= {"blocks": SHAPE["n_layer"], "micro_batches": micro_batches, "tokens": tokens}
    found["bytes_hop"] = 4.0 * SHAPE["n_embd"] * tokens / micro_batches
    return [mean_seconds(each) for each in steps], peak, found


def run_together(work: Path, options: str) -> tuple[float, float, list[float]]:
    """Train in two namespaces; return seconds per step, bytes sent by the busier one per step, and memory."""
    os.sync()
    output = work / "run"
    shutil.rmtree(output, ignore_errors=True)
    processes = []
    for rank, place in enumerate(PLACES):
        facts = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        facts |= {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29400"}
        line = ["ip", "netns", "exec", place, "taskset", "-c", str(rank), sys.executable, "-m", "gptj_ft", "finetune"]
        line += [*options.split(), "--quiet", "--output", str(output)]
        processes.append(subprocess.Popen(line, env=environment() | facts, stdout=subprocess.DEVNULL))
    carried, peaks = dict[int, list[int]](), [0.0, 0.0]
    while processes[0].poll() is None:
        done = len(steps_of(output))
        carried.setdefault(done, [sent_bytes(place) for place in PLACES])
        peaks = [max(peak, memory(each.pid, "VmHWM") / 1e9) for peak, each in zip(peaks, processes, strict=True)]
        time.sleep(0.1)
    assert [each.wait() for each in processes] == [0, 0]
    steps = steps_of(output)
    first, last = carried[1], carried[max(number for number in carried if number <= len(steps))]
    count = max(carried) - 1
    sent = max(after - before for before, after in zip(first, last, strict=True)) / count
    return mean_seconds(steps), sent, peaks  # a device counts what it is given at once, with one header


def planned(work: Path, options: str, tokens: float, split: dict[str, int] | None = None) -> tuple[float, float]:
    """Return the forecast of a step: seconds, and bytes sent by the busier process."""
    command = ["taskset", "-c", "0", sys.executable, "-m", "gptj_ft", "plan", *options.split(), "--json"]
    said = subprocess.run(command, check=True, env=environment(), capture_output=True, text=True, cwd=work).stdout
    found = json.loads(said)
    share = tokens / found["tokens_per_step"]  # the forecast is of the average step
    if split is None:
        return share * float(found["seconds_per_step"]), 0.0
    shares = found["machines"]["shares"]
    (way,) = (each for each in shares if all(each[key] == value for key, value in split.items()))
    return share * float(way["seconds_per_step"]), share * float(way["sent"])


def environment() -> dict[str, str]:
    """Return environment variables for one thread."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def steps_of(output: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's steps."""
    try:
        text = (output / "metrics.jsonl").read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return [line for line in map(json.loads, text.splitlines()) if "loss" in line]


def mean_seconds(steps: list[dict[str, Any]]) -> float:
    """Return the mean seconds of steps, except the first."""
    return statistics.mean(line["seconds"] for line in steps[1:])


@contextmanager
def link(rate: float | None) -> Iterator[None]:
    """Join two namespaces by a link of a rate in bits/s each way; ``None``: unshaped."""
    remove()
    for name in PLACES:
        ip(f"netns add {name}")
    try:
        ip(f"link add gptj-a netns {PLACES[0]} type veth peer name gptj-b netns {PLACES[1]}")
        for name, device, address in zip(PLACES, ("gptj-a", "gptj-b"), ADDRESSES, strict=True):
            ip(f"-n {name} link set lo up")
            ip(f"-n {name} address add {address}/24 dev {device}")
            ip(f"-n {name} link set {device} up")
            if rate:
                shape = f"tc qdisc add dev {device} root tbf rate {rate:.0f}bit burst 256kb latency 50ms"
                subprocess.run(["ip", "netns", "exec", name, *shape.split()], check=True)
        yield
    finally:
        remove()


def remove() -> None:
    """Remove the namespaces, and the link with them."""
    for name in PLACES:
        subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def ip(words: str) -> None:
    """Run a command of iproute2."""
    subprocess.run(["ip", *words.split()], check=True)


def sent_bytes(place: str) -> int:
    """Return the bytes sent so far by a namespace's end of the link."""
    said = subprocess.run(["ip", "-n", place, "-s", "-j", "link", "show"], check=True, capture_output=True).stdout
    (found,) = (each for each in json.loads(said) if each["ifname"] != "lo")
    return int(found["stats64"]["tx"]["bytes"])


if __name__ == "__main__":
    main()
