"""Compare `gptj-ft search` with training every candidate to the end, and kill the search twice.

In one process: the search, then each of its candidates by `finetune` with the same options. The best of these by
validation loss is compared with the search's choice on the validation rows, by the paired bootstrap of `evaluate`. Then
the search runs again as a command, gets SIGKILL after two shares of its time, and is resumed each time.

    python benchmarks/search.py --model MODEL --data train.tsv --val-data dev.tsv --recipe classification \
        --set max_steps=120 --set batch_size=16 --work /tmp/search

Options of the runs go to --set. WORK keeps the finished runs; the search starts again. Prints Markdown. Seconds are
those of a machine that may be shared; steps are not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gptj_ft
from gptj_ft.config.resolve import Resolved, resolve
from gptj_ft.config.run_folder import Run
from gptj_ft.training.search import SearchResult

KILLS = (0.3, 0.4)  # shares of the search's seconds after which a session is killed


def main() -> None:
    """Search, train all candidates, compare, and kill."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--val-data", required=True)
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--by", default="loss")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--work", type=Path, required=True)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    for folder in ("search", "killed"):
        shutil.rmtree(options.work / folder, ignore_errors=True)
    resolved = resolve(
        {"recipe": options.recipe, "data": options.data, "val_data": options.val_data, "model": options.model},
        assignments=options.set,
    )
    result, seconds = searched(resolved, options.by, options.work)
    whole, whole_seconds = trained(resolved, result, options.work)
    compare(result, whole, (seconds, whole_seconds), options.val_data)
    killed(options, result, seconds)


def searched(resolved: Resolved, by: str, work: Path) -> tuple[SearchResult, float]:
    """Search; return the result and its seconds."""
    start = time.monotonic()
    result = gptj_ft.search(with_options(resolved, output=str(work / "search")), by=by)
    seconds = time.monotonic() - start
    print(f"\n| candidate | steps | {by} | difference to the leader | state |\n|---|---|---|---|---|")
    for each in result.to_dict()["candidates"]:
        numbers = shown(each["score"]), shown(each["difference"])
        print("|", " | ".join([each["candidate"], str(each["step"]), *numbers, each["state"]]), "|")
    return result, seconds


def trained(resolved: Resolved, result: SearchResult, work: Path) -> tuple[dict[str, Run], float]:
    """Train every candidate to the end; return the runs by name, and the seconds. Finished ones are not repeated."""
    total, runs = 0.0, {}
    for candidate in result.plan.candidates:
        run, clock = Run(work / "all" / candidate.folder), work / "all" / f"{candidate.folder}.seconds"
        if not clock.is_file():
            shutil.rmtree(run.folder, ignore_errors=True)
            start, recipe = time.monotonic(), candidate.recipe(resolved.recipe)
            try:
                own = Resolved(recipe, resolved.origins, resolved.typed)
                gptj_ft.finetune(with_options(own, output=str(run.folder)))
            except gptj_ft.GptjFtError as error:
                print(f"\n{candidate.name}: {error}")
            clock.write_text(str(time.monotonic() - start))
        total += float(clock.read_text())
        if run.model.is_dir():
            runs[candidate.name] = run
    return runs, total


def compare(result: SearchResult, whole: dict[str, Run], seconds: tuple[float, float], rows: str) -> None:
    """Print the losses of all candidates at the end, the choices, and the shares of time and steps."""
    by = result.plan.by
    scores = {name: gptj_ft.evaluate(run.folder, rows, baseline="none") for name, run in whole.items()}
    ends = {name: each.comparison.scores[by].value for name, each in scores.items()}
    is_lower_better = by == "loss"
    best = min(ends, key=lambda name: ends[name] if is_lower_better else -ends[name])
    print("\nAll to the end: " + ", ".join(f"{name} {value:.4f}" for name, value in ends.items()))
    chosen = whole[result.best].folder
    difference: Any = None
    if best != result.best:
        pair = gptj_ft.evaluate(chosen, rows, baseline=whole[best].folder)
        difference = vars(pair.comparison.differences[by])
    steps = result.num_steps, len(result.plan.candidates) * result.plan.num_steps
    print(f"\nSearch chose {result.best}, the best at the end is {best}; difference {shown(difference)}")
    print(f"Same weights as a run of its own: {digest(Path(result.model)) == digest(whole[result.best].model)}")
    print(f"Steps: {steps[0]} of {steps[1]}, {steps[0] / steps[1]:.1%}")
    print(f"Seconds: {seconds[0]:.0f} of {seconds[1]:.0f}, {seconds[0] / seconds[1]:.1%}", flush=True)


def killed(options: argparse.Namespace, result: SearchResult, seconds: float) -> None:
    """Kill the same search twice and resume it; print whether choice, table and weights are the same."""
    folder = options.work / "killed"
    names = {"recipe": options.recipe, "data": options.data, "val-data": options.val_data, "model": options.model}
    words = [word for name, value in names.items() for word in (f"--{name}", value)]
    words += [word for each in options.set for word in ("--set", each)]
    command = [sys.executable, "-m", "gptj_ft", "search", *words, "--by", options.by, "--output", str(folder), "--json"]
    for share in KILLS:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            process.wait(share * seconds)
            print("ended before the kill")
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            state = json.loads((folder / "search.json").read_text()) if (folder / "search.json").is_file() else {}
            print(f"killed after {share * seconds:.0f} s, with {len(state.get('decisions', []))} decisions")
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    ours = result.to_dict()
    print(f"Same choice after two kills: {found['best'] == result.best}")
    print(f"Same table: {found['candidates'] == json.loads(json.dumps(ours['candidates']))}")
    print(f"Same weights: {digest(Path(found['model'])) == digest(Path(result.model))}")


def with_options(resolved: Resolved, **options: object) -> Resolved:
    """Return resolved options with some replaced."""
    return Resolved(resolved.recipe.model_copy(update=options), resolved.origins, resolved.typed)


def digest(model: Path) -> str:
    """Return the SHA-256 of the weight files of a model."""
    total = hashlib.sha256()
    for path in sorted(model.glob("*.safetensors")):
        total.update(path.read_bytes())
    return total.hexdigest()


def shown(value: Any) -> str:
    """Format a score or a difference with its interval."""
    if isinstance(value, dict):
        return f"{value['value']:+.4f} [{value['low']:+.4f}, {value['high']:+.4f}]"
    return "" if value is None else f"{value:.4f}"


if __name__ == "__main__":
    main()
