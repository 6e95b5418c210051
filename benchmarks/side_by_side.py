"""Run trainers in separate processes and monitor them from outside, for comparisons with other programs.

A trainer adds a JSON line to a file after each step. Its times are those at which the lines appear, and its memory is
what the kernel says, so that neither depends on what a trainer says of itself. Linux only.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from same_work import Work

from gptj_ft.config.run_folder import Run

POLL_SECONDS = 0.02
LOOK_SECONDS = 0.25  # at memory and children: a look costs milliseconds of a core that the trainer computes on
SAME_LOSS = 1e-3


@dataclass(frozen=True)
class Watched:
    """Measurements of a finished trainer.

    Attributes:
        lines: what it wrote, one per step.
        arrivals: when each line appeared, in seconds of one clock.
        peak_rss_bytes: most resident memory of the process and its children together.
        written_bytes: what the process has had written to disks, its children not counted.
    """

    lines: list[dict[str, Any]]
    arrivals: list[float]
    peak_rss_bytes: int
    written_bytes: int = 0


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return the parser with the common options."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--data", type=Path, help="DialogSum's train.jsonl")
    options.add_argument("--tokenizer", type=Path, help="folder with GPT-2's vocab.json and merges.txt")
    options.add_argument("--work", type=Path, required=True, help="new folder")
    options.add_argument("--steps", type=int, default=12)
    options.add_argument("--warm-up", type=int, default=2, help="untimed first steps, at least one")
    options.add_argument("--batch-size", type=int, default=8)
    options.add_argument("--max-length", type=int, default=1024)
    options.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="an option of gptj-ft's recipe"
    )
    return options


def command(name: str, options: Mapping[str, Any]) -> list[str]:
    """Return a command line of `gptj-ft`, with options of its recipe."""
    words = [word for key, value in options.items() for word in ("--set", f"{key}={value}")]
    return [sys.executable, "-m", "gptj_ft", name, *words]


def run_of(arguments: argparse.Namespace, variant: str) -> Run:
    """Return the run folder of a variant in WORK."""
    return Run(arguments.work / f"run-{variant.replace(':', '-').replace('=', '-')}")


def finetune(arguments: argparse.Namespace, variant: str) -> tuple[Watched, Run]:
    """Run `gptj-ft finetune` on ``WORK/model``; keep no tuned model.

    Args:
        arguments: of the benchmark.
        variant: where weights and state are, and what sets it apart: ``disk:activations=keep:device_memory=4GiB``.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    place, *different = variant.split(":")
    run = run_of(arguments, variant)
    options = {
        "recipe": "summarization",
        "model": arguments.work / "model",
        "data": arguments.data,
        "output": run.folder,
        "holdout": 0,
        "max_steps": arguments.steps,
        "batch_size": arguments.batch_size,
        "max_length": arguments.max_length,
        "precision": "fp32",
        "device": "cpu",
        "weights": place,
        "optimizer_state": place,
        **dict(word.split("=", 1) for word in (*arguments.set, *different)),
    }
    watched = watch(command("finetune", options), run.metrics_file)
    shutil.rmtree(run.model)
    return watched, run


def watch(words: Sequence[str], lines: Path, environment: Mapping[str, str] | None = None) -> Watched:
    """Run a trainer to its end, with its output on stderr.

    Args:
        words: its command line.
        lines: the file to which it adds a JSON line per step.
        environment: its variables; by default those of this process.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    arrivals: list[float] = []
    peak = written_bytes = 0
    next_look = time.perf_counter()
    with psutil.Popen(words, stdout=sys.stderr, env=environment) as process:
        is_running = True
        while is_running:
            is_running = process.poll() is None
            if is_running and time.perf_counter() >= next_look:
                next_look = time.perf_counter() + LOOK_SECONDS
                family = [process.pid, *(child.pid for child in process.children(recursive=True))]
                # The high-water mark misses nothing between two looks, but is known for each process alone.
                peak = max(peak, sum(memory(pid, "VmRSS") for pid in family), *(memory(pid, "VmHWM") for pid in family))
                with suppress(psutil.Error):
                    written_bytes = process.io_counters().write_bytes
            written = lines.read_bytes().count(b"\n") if lines.exists() else 0
            arrivals += [time.perf_counter()] * (written - len(arrivals))
            time.sleep(POLL_SECONDS)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, list(words))
    return Watched(
        [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()], arrivals, peak, written_bytes
    )


def memory(pid: int, key: str) -> int:
    """Return a size in bytes from /proc/PID/status; 0 for a process that has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(f"{key}:")), 0)


def report(
    runs: Mapping[str, Watched], work: Work, warm_up: int, facts: Mapping[str, Any], same_loss: float = SAME_LOSS
) -> None:
    """Print a JSON line and a table; the first run is the reference.

    Raises:
        AssertionError: the runs did not do the same work: other tokens, or losses apart by ``same_loss``.
    """
    reference = next(iter(runs))
    results, timed = {}, work.steps[warm_up:]
    for name, run in runs.items():
        differences = []
        for line, other in zip(run.lines, runs[reference].lines, strict=True):
            assert all(line[key] == other[key] for key in ("step", "tokens", "target_tokens")), f"{name}: {line}"
            differences.append(abs(line["loss"] - other["loss"]))
        seconds = [end - start for start, end in zip(run.arrivals[warm_up - 1 :], run.arrivals[warm_up:], strict=False)]
        assert len(seconds) == len(timed), f"{name}: {len(run.arrivals)} steps were seen"
        results[name] = {
            "examples_per_second": sum(len(step.documents) for step in timed) / sum(seconds),
            "target_tokens_per_second": sum(step.num_targets for step in timed) / sum(seconds),
            "peak_rss_bytes": run.peak_rss_bytes,
            "largest_difference_of_loss": max(differences),
            "step_seconds": [round(x, 2) for x in seconds],
            "losses": [line["loss"] for line in run.lines],
        }
    tokens = {
        "tokens": sum(step.num_tokens for step in work.steps),
        "padded_tokens": sum(step.num_padded for step in work.steps),
        "target_tokens": sum(step.num_targets for step in work.steps),
    }
    print(json.dumps({"results": results, **tokens, **facts}))
    print(f"{'':<36}{'examples/s':>11}{'':>7}{'targets/s':>10}{'peak RSS':>11}{'':>7}{'loss within':>12}")
    base = results[reference]
    for name, result in results.items():
        speed, peak = result["examples_per_second"], result["peak_rss_bytes"]
        print(
            f"{name:<36}{speed:>11.3f}{speed / base['examples_per_second']:>6.2f}x"
            f"{result['target_tokens_per_second']:>10.1f}{peak / 1e9:>8.2f} GB{peak / base['peak_rss_bytes']:>6.2f}x"
            f"{result['largest_difference_of_loss']:>12.1e}"
        )
    print(", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in tokens.items()))
    apart = {name: result["largest_difference_of_loss"] for name, result in results.items()}
    assert max(apart.values()) < same_loss, f"not the same losses: {apart}"


def facts_of(run: Run) -> dict[str, Any]:
    """Return the environment that a run recorded."""
    environment = json.loads((run.folder / "environment.json").read_text(encoding="utf-8"))
    return {key: environment[key] for key in ("torch", "transformers", "threads", "platform")}
