"""Show the plan and the result of a search."""

from __future__ import annotations

from rich.console import Console

from gptj_ft.cli.terminal.screen import next_steps, panel, table, whole
from gptj_ft.cli.terminal.tables import cautions, plan_rows
from gptj_ft.system.plain_text import command_line
from gptj_ft.system.units import clock
from gptj_ft.training.halving import STATES
from gptj_ft.training.search import PreparedSearch, SearchResult, difference_text, resume_command


def show_search_plan(console: Console, search: PreparedSearch, verbose: bool = False) -> None:
    """Show rows, candidates, rungs and forecast of a search, and the cost of one run."""
    plan, facts = search.plan, search.plan.facts()
    train, validation = (len(part.rows) for part in search.rows)
    counts = zip(plan.rungs, facts["most_candidates"], strict=True)
    share = facts["steps"] / facts["steps_of_all"]
    times = f"{clock(facts['seconds'])} of {clock(facts['seconds_of_all'])}"
    limit = "" if plan.max_time is None else f"; --max-time {clock(plan.max_time)}"
    rows = [
        ("data", f"{train:,} training rows, {validation:,} validation rows; recipe {plan.recipe.recipe}"),
        *(("warning", text) for text in cautions(train, validation, plan.recipe.batch_size)),
        ("candidates", f"{len(plan.candidates)}: {'; '.join(facts['candidates'])}"),
        ("rungs", ", ".join(f"at most {count} to step {step:,}" for step, count in counts)),
        ("compared by", f"{plan.by}, on the same validation rows"),
        (
            "steps",
            f"at most {facts['steps']:,} of {facts['steps_of_all']:,} for all candidates to the end ({share:.0%})",
        ),
        ("time", f"about {times}{limit}"),
        ("results", f"in {search.folder}; states of dropped candidates are deleted"),
        ("to resume", whole(resume_command(search.folder))),
    ]
    panel(console, "The search", rows)
    if search.first is not None:
        setup = search.first.setup
        panel(console, "Each run", plan_rows(setup.plan, setup.architecture.notes, verbose))


def show_search(console: Console, result: SearchResult, page: str) -> None:
    """Show the table of candidates and the chosen files."""
    rows = [("candidate", "steps", result.plan.by, "to the leader", "state")]
    for step, standing in result.standings:
        is_dropped = step < result.plan.num_steps
        state = (
            f"dropped: {STATES[standing.fate]}" if is_dropped and standing.fate != "budget" else STATES[standing.fate]
        )
        score = "" if standing.score is None else f"{standing.score:.4f}"
        rows.append((standing.candidate, f"{step:,}", score, difference_text(standing.difference), state))
    table(console, "Candidates", rows, right=(1, 2))
    share = result.num_steps / (len(result.plan.candidates) * result.plan.num_steps)
    facts = [
        ("chosen", result.best),
        ("model", result.model),
        ("recipe", result.config),
        ("page", page),
        ("steps", f"{result.num_steps:,}, {share:.0%} of all candidates to the end"),
        ("time", f"{clock(result.seconds)} in this session"),
        *(("warning", text) for text in result.warnings),
    ]
    panel(console, "Search", [fact for fact in facts if fact[1]])
    next_steps(console, command_line("evaluate", result.run), command_line("finetune", "--config", result.config))
