"""What `evaluate --tasks` does: lm-eval's tasks, on a model and its baseline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gptj_ft.commands.terminal import bar, console_for, print_json
from gptj_ft.recipe import Recipe

if TYPE_CHECKING:
    from gptj_ft.harness import Chosen
    from gptj_ft.verdict import Gate, Verdict


def measure_tasks(
    models: tuple[Path, str], options: Recipe, chosen: Chosen, gates: Sequence[str], shown: tuple[bool, bool, bool]
) -> tuple[Verdict, list[Gate]] | None:
    """Measure a model, and what it was tuned from, by tasks; nothing on a dry run.

    Args:
        models: the model's folder, and what --baseline says.
        options: how the models are read.
        chosen: the tasks.
        gates: scores that are asked for.
        shown: whether JSON alone is printed, whether it is a dry run, and whether there is to be no network.
    """
    from gptj_ft.evaluate import choose_baseline
    from gptj_ft.harness import ask, judge_tasks, load_tasks, plan_tasks
    from gptj_ft.report import show_reading
    from gptj_ft.verdict import parse_gates

    (folder, baseline), (as_json, dry_run, offline) = models, shown
    loaded = load_tasks(chosen, offline)
    asked = parse_gates(gates, loaded.score_names)
    other = choose_baseline(folder, baseline)
    named = {"baseline": other, "model": folder} if other is not None else {"model": folder}
    planned = {name: plan_tasks(each, options) for name, each in named.items()}
    most = max((each.plan for each in planned.values()), key=lambda plan: plan.device_bytes + plan.host_bytes)
    show_reading(console_for(quiet=as_json), most)
    if dry_run:
        if as_json:
            print_json(most.to_dict())
        return None
    found, journals = {}, []
    for name, each in planned.items():
        with bar(name, not as_json) as advance:
            found[name], own = ask(each, loaded, chosen.limit, advance)
        journals += own
    verdict = judge_tasks(found["model"], found.get("baseline"), options.seed)
    for journal in journals:
        journal.close()
    return verdict, asked
