"""The command `finetune`: train a model on rows."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from gptj_ft.cli.options import (
    PLACEMENT_OPTIONS,
    Assignments,
    Config,
    Json,
    Offline,
    Quiet,
    SetOptions,
    complete_run,
    flag,
    takes_options,
)
from gptj_ft.cli.terminal.output import Output, asking
from gptj_ft.config.resolve import Resolved, resolve

if TYPE_CHECKING:
    from gptj_ft.training.finetune import PreparedRun


@takes_options(
    "recipe", "data", "model", "map", "val_data", "output", "method", "lr", "epochs", "max_steps", "batch_size",
    "max_length", "max_time", "train", "seed", "on_long", "max_bad_rows", "cache", "validate_every", "save_every",
    "keep", "export", "canaries", "report_to", *PLACEMENT_OPTIONS,
)  # fmt: skip
def finetune(
    options: SetOptions,
    config: Config = None,
    assignments: Assignments = None,
    dry_run: Annotated[bool, flag("forecast the cost and stop", "--dry-run")] = False,
    resume: Annotated[
        Path | None, flag("resume a run; needs no other option", metavar="RUN", autocompletion=complete_run)
    ] = None,
    show: Annotated[
        int | None, flag("show this many rows as the model reads them [default: 1, abridged]", min=0)
    ] = None,
    verbose: Annotated[bool, flag("show FLOPs, bytes moved and measured rates", "--verbose", "-v")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
    start: Annotated[
        str | None,
        flag(
            "with --resume: restart from step-000120, best, last, or start (step 0)",
            "--from",
            metavar="CHECKPOINT",
            more=True,
        ),
    ] = None,
    offline: Offline = False,
    nproc: Annotated[int | None, flag("share the run among this many processes of this machine", min=1)] = None,
) -> None:
    """Train a model on your rows.

    Trains every parameter, some of them (--train), a few layers at a time (--method sampled) or LoRA adapters
    (--method lora), by weight streaming.
    """
    began = time.monotonic()
    from gptj_ft.cli.several import sharing
    from gptj_ft.config.run_folder import Run, stopped
    from gptj_ft.system.signals import stop_message

    run = Run(resume) if resume is not None else None
    with stop_message(lambda: stopped(run)), sharing(nproc) as group:
        if group.rank > 0:
            from gptj_ft.distributed.worker import follow_run
            from gptj_ft.training.loop import Session

            follow_run(group, Session(owns_process=True))
            return
        out = Output(as_json, quiet)
        with out.activity():
            from gptj_ft import api
            from gptj_ft.cli.html.live_page import LivePage, finish_page
            from gptj_ft.cli.terminal.data_tables import show_rows
            from gptj_ft.cli.terminal.progress import TerminalReporter
            from gptj_ft.cli.terminal.tables import show_plan, show_prepared_run, show_training
            from gptj_ft.distributed.worker import dismiss
            from gptj_ft.training.finetune import AlreadyFinished, options_on_resume
            from gptj_ft.training.loop import Session
            from gptj_ft.training.reporter import Reporters
        notes = out.notes
        reporter = TerminalReporter(notes, verbose)

        def prepared(resolved: Resolved) -> PreparedRun:
            with reporter:
                return api.prepare_run(
                    resolved, resume=resume, start=start, offline=offline, reporter=reporter, group=group
                )

        if resume is not None:
            try:
                ready = prepared(options_on_resume(options, config, assignments))
            except AlreadyFinished:
                finish_page(Run(resume.expanduser()), notes.print)
                raise
        else:
            ready = asking(resolve(options, config, assignments), out, prepared)
            show_rows(notes, ready, show)
        if dry_run:
            dismiss(group)
            plan, remarks = ready.setup.plan, ready.setup.architecture.notes
            facts = {**plan.to_dict(), "notes": list(remarks)}
            out.finish(facts, "", lambda console: show_plan(console, plan, remarks))
            return
        show_prepared_run(notes, ready, verbose)
        with LivePage.of(ready, notes.print) as page:
            result = ready.train(Reporters(reporter, page), Session(began, owns_process=True))
        run = Run(Path(result.run))
        num_validation = len(ready.setup.validation)
        facts = {**result.to_dict(), "notes": list(ready.setup.architecture.notes)}
        settings = (ready.setup.recipe, num_validation, verbose)
        out.finish(facts, result.model, lambda console: show_training(console, result, *settings))
