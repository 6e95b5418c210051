"""What `evaluate --tasks` does: lm-eval's tasks, on a model and its baseline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gptj_ft.commands.terminal import MEASURED, Output
from gptj_ft.recipe import Recipe
from gptj_ft.stopping import stop_says

if TYPE_CHECKING:
    from gptj_ft.harness import Chosen
    from gptj_ft.verdict import Gate, Verdict


def measure_tasks(
    models: tuple[Path, str], options: Recipe, chosen: Chosen, gates: Sequence[str], shown: tuple[Output, bool, bool]
) -> tuple[Verdict, list[Gate]] | None:
    """Measure a model, and what it was tuned from, by tasks; nothing on a dry run.

    Args:
        models: the model's folder, and what --baseline says.
        options: how the models are read.
        chosen: the tasks.
        gates: scores that are asked for.
        shown: where, whether it is a dry run, and whether there is to be no network.
    """
    from gptj_ft.evaluate import choose_baseline
    from gptj_ft.harness import ask, judge_tasks, load_tasks, plan_tasks
    from gptj_ft.report import show_reading
    from gptj_ft.screen import whole
    from gptj_ft.verdict import parse_gates

    (folder, baseline), (out, dry_run, offline) = models, shown
    loaded = load_tasks(chosen, offline)
    asked = parse_gates(gates, loaded.score_names)
    other = choose_baseline(folder, baseline)
    named = {"baseline": other, "model": folder} if other is not None else {"model": folder}
    planned = {name: plan_tasks(each, options) for name, each in named.items()}
    most = max((each.plan for each in planned.values()), key=lambda plan: plan.device_bytes + plan.host_bytes)
    about = [
        ("model", whole(str(folder))),
        ("baseline", whole(str(other)) if other else "none"),
        ("tasks", ", ".join(chosen.names)),
    ]
    if dry_run:
        out.finish(most.to_dict(), "", lambda console: show_reading(console, "The evaluation", about, most))
        return None
    show_reading(out.notes, "The evaluation", about, most)
    found, journals = {}, []
    for name, each in planned.items():
        with stop_says(lambda: MEASURED), out.bar(name, "questions") as advance:
            found[name], own = ask(each, loaded, chosen.limit, advance)
        journals += own
    verdict = judge_tasks(found["model"], found.get("baseline"), options.seed)
    for journal in journals:
        journal.close()
    return verdict, asked
