"""Start and resume a run: read its inputs, plan it, make its folder, and train it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from gptj_ft.checkpoints.architecture import vocab_size_of
from gptj_ft.checkpoints.base_model import find_model, is_config
from gptj_ft.checkpoints.fingerprint import check_unchanged, fingerprint
from gptj_ft.config import yaml
from gptj_ft.config.options import FREE_ON_RESUME, Options, Recipe
from gptj_ft.config.resolve import RESUMED, Resolved, build, check_effects, dump_recipe, resolve
from gptj_ft.config.run_folder import (
    START,
    Run,
    choose_folder,
    environment_changes,
    steps_done,
    stopped,
    what_is_saved,
)
from gptj_ft.config.saved_values import BaseDigests, checked
from gptj_ft.data.batches import Rows
from gptj_ft.data.checks.tokens import check_tokens
from gptj_ft.data.dataset import Prepared, Report, load_dataset, save_dataset
from gptj_ft.errors import DataError, Interrupted, NotFinite, UsageError
from gptj_ft.models.products import Products, has_mkl
from gptj_ft.planning.machine_profile import are_known, is_known
from gptj_ft.planning.resources import Target
from gptj_ft.system.accelerator import is_accelerator
from gptj_ft.system.digests import read_sealed, write_sealed
from gptj_ft.system.dtypes import PRECISION_NAMES
from gptj_ft.system.files import (
    discard,
    hidden_name,
    keep_folder,
    remove,
    replace_text,
    sync_path,
    sync_tree,
    write_file,
)
from gptj_ft.system.lock import LOCK, locked
from gptj_ft.system.machine import choose_device
from gptj_ft.system.paths import RUNS, is_model, is_tuned, remember_start
from gptj_ft.system.signals import StopRequest, stop_message
from gptj_ft.system.units import clock
from gptj_ft.training.inputs import gather
from gptj_ft.training.loop import Session, TrainResult, train, warn
from gptj_ft.training.parallel import ONE_PROCESS, Parallel
from gptj_ft.training.reporter import Reporter
from gptj_ft.training.retention import check_keep, find_checkpoint, go_back
from gptj_ft.training.runs import tidy
from gptj_ft.training.setup import TrainSetup, make_setup
from gptj_ft.training.trackers import check_tracker
from gptj_ft.training.verify import Checker

LONG_START_SECONDS = 5.0
# Options that the model may decide.
OF_THE_MODEL = ("chat_template", "template_date", "prompt", "completion", "generation", "max_length", "stride")
FIRST_ON_DEVICE = "first run on this device: `gptj-ft doctor` checks it in two minutes"


class AlreadyFinished(UsageError):
    """The run to resume is finished."""


@dataclass(frozen=True)
class PreparedRun:
    """A planned run, new or to be resumed; nothing is written before `train`."""

    setup: TrainSetup  # recipe, model, rows and plan
    report: Report  # on all rows, held-out ones included
    resolved: Resolved  # recipe with the origin of each option
    rows: tuple[Prepared, Prepared | None]  # training and validation rows
    run: Run | None  # None for a new run
    start: int | None = None  # step of the checkpoint to return to; None: resume from the newest state

    def train(self, reporter: Reporter | None = None, session: Session | None = None) -> TrainResult:
        """Train the run, see `train_run`."""
        return train_run(self, reporter, session)


def planning_activity(device: torch.device, folder: Path) -> str:
    """Name the activity of planning a run, for messages."""
    return "planning" if are_known(device, folder) else "measuring this machine, once, up to 10 s"


def prepare_new_run(
    resolved: Resolved, reporter: Reporter | None = None, target: Target | None = None, parallel: Parallel = ONE_PROCESS
) -> PreparedRun:
    """Read the inputs of a new run and plan it; writes at most a tiny model.

    Args:
        target: device and resources to plan for; default: this machine.
        parallel: ranks that share the run.
    """
    recipe, reporter = resolved.recipe, reporter or Reporter()
    check_effects(resolved)
    check_tracker(recipe.report_to)
    use_threads(recipe, parallel, reporter)
    folder = choose_folder(recipe)
    if recipe.model is not None and is_config(recipe.model):
        reporter.on_message(f"training starts from random weights, since --model names the config {recipe.model}")
    # A device that cannot be used is an error before the rows are read.
    device = None if target else _choose_device(recipe, parallel, reporter)
    reporter.on_activity("reading the rows")
    inputs = gather(resolved)
    if inputs.note:
        reporter.on_message(inputs.note)
    reporter.on_activity("planning" if device is None else planning_activity(device, folder))
    final = inputs.recipe.model_copy(update={"model": str(inputs.model.resolve()), "output": str(folder)})
    setup = make_run_setup(final, inputs.model, (inputs.train, inputs.validation), folder, target, parallel)
    if "packing" in resolved.typed and recipe.packing != "off" and setup.train.windows is None:
        reporter.on_message(f"packing={recipe.packing} has no effect: only rows without a prompt are packed")
    origins = dict(resolved.origins)
    for key in OF_THE_MODEL:
        if getattr(final, key) != getattr(recipe, key):
            origins[key] = "the model"
    for key in ("precision", "products"):
        if getattr(final, key) == "auto":
            origins[key] = "chosen by measuring"
    _measure_network(setup.parallel, reporter)
    resolved, rows = replace(resolved, recipe=setup.recipe, origins=origins), (inputs.train, inputs.validation)
    return PreparedRun(setup, inputs.report, resolved, rows, None)


def _measure_network(parallel: Parallel, reporter: Reporter) -> None:
    if parallel.world.size > 1:
        reporter.on_activity("measuring the network")
        parallel.measure_network()


def use_threads(recipe: Recipe, parallel: Parallel, reporter: Reporter) -> None:
    """Set the recipe's number of threads; by default, report if several processes on this machine share its cores."""
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    elif warning := parallel.thread_warning():
        reporter.on_message(warning)


def _choose_device(recipe: Recipe, parallel: Parallel, reporter: Reporter) -> torch.device:
    """Choose the device of a run; suggest `doctor` for an unknown accelerator."""
    device = choose_device(recipe.device, recipe.device_memory, parallel.world.local_rank)
    if is_accelerator(device) and not is_known(device):
        reporter.on_message(FIRST_ON_DEVICE)
    return device


def resume_run(
    folder: Path,
    options: Resolved,
    start: str | None = None,
    parallel: Parallel = ONE_PROCESS,
    reporter: Reporter | None = None,
) -> PreparedRun:
    """Read a run folder and plan the rest of the run.

    Args:
        options: changed options only, see `options_on_resume`; only options that change no number may change.
        start: name of the checkpoint to return to, see `retention.find_checkpoint`.
        parallel: ranks that share the run from now on.

    Raises:
        AlreadyFinished: the run is done; its leftovers are removed.
        UsageError: not a run folder, a run in use, a moved model, or an option that would change the result.
        DataError: a file is missing, damaged, or not the one that the run started with.
    """
    run = Run(folder.expanduser())
    saved = run.recipe()
    with locked(run.folder, "training"):  # fail now if another process trains it, not after reading all rows
        if is_finished := is_tuned(run.model):
            tidy(run)
    if is_finished:
        raise AlreadyFinished(f"{folder} is finished: its model is {run.model}; for more, finetune --model {run.model}")
    changes = _changes_on_resume(options.recipe, saved, run)
    if (named := changes.pop("model", None)) is not None:
        changes["model"] = str(find_model(named).resolve())
    recipe = build({**saved.model_dump(), **changes, "output": str(run.folder)})
    run.check_recipe(recipe)
    if start is None:
        run.check_saved()
    check_tracker(recipe.report_to)
    use_threads(recipe, parallel, reporter or Reporter())
    model = Path(recipe.model or "")
    if not is_model(model):
        raise UsageError(
            f"the model that this run started from is not in {model} any more; if it is elsewhere now, add --model PATH"
        )
    check_unchanged(model, checked(BaseDigests, read_sealed(run.base_file), run.base_file))
    if recipe.patience and start is None and (problems := run.metrics_problems(steps_done(run))):
        raise DataError(
            "\n".join([*problems, "patience counts validations there: put back a copy, or add --from start"])
        )
    train, validation = run.data / "train", run.data / "validation"
    rows = (load_dataset(train), load_dataset(validation) if validation.exists() else None)
    for part, where in zip(rows, (train, validation), strict=True):
        if part is not None:
            check_tokens(part, where, vocab_size_of(model), recipe.max_length)
    step = None if start is None else 0 if start == START else find_checkpoint(run, start)
    setup = make_run_setup(recipe, model, rows, run.folder, parallel=parallel, done=step)
    _measure_network(setup.parallel, reporter or Reporter())
    return PreparedRun(setup, rows[0].report, Resolved(recipe, {}), rows, run, step)


def _changes_on_resume(options: Recipe, saved: Recipe, run: Run) -> dict[str, Any]:
    """Return the options that change; raise `UsageError` if one would change the result or has another folder."""
    if options.output is not None and Path(options.output).expanduser().resolve() != run.folder.resolve():
        raise UsageError(f"output: a resumed run stays in its folder, {run.folder}: leave output out")
    free = FREE_ON_RESUME | {"model"}
    for key in sorted(options.model_fields_set - free):
        value = getattr(options, key)
        # Of a group, only the options that the user named: the others have their defaults here.
        names = [f"{key}.{name}" for name in sorted(value.model_fields_set)] if isinstance(value, Options) else [key]
        for name in names:
            was, now = attrgetter(name)(saved), attrgetter(name)(options)
            if was != now:
                raise UsageError(
                    f"{name} is {'not set' if was is None else repr(was)} in this run; {now!r} would change its "
                    "result: leave it out, or start a new run"
                )
    return {key: getattr(options, key) for key in options.model_fields_set & free}


def options_on_resume(
    options: Mapping[str, Any], config: Path | None = None, assignments: Sequence[str] | None = None
) -> Resolved:
    """Resolve the options that a resume changes; all others are in the run folder, and the environment has none."""
    return resolve(options, config, assignments, environment={}, base=RESUMED)


def train_run(prepared: PreparedRun, reporter: Reporter | None = None, session: Session | None = None) -> TrainResult:
    """Make the run folder of a new run, or return to the chosen checkpoint of an old one, and train.

    Errors are those of `loop.train` and `opened_run`.
    """
    reporter, session = reporter or Reporter(), session or Session()
    prepared = _with_free_name(prepared, reporter)
    with opened_run(prepared, reporter, session) as run:
        return train(prepared.setup, run, reporter, session)


def _with_free_name(prepared: PreparedRun, reporter: Reporter) -> PreparedRun:
    """Give a run without a name of its own the next one, if another process has taken the planned one meanwhile."""
    setup, planned = prepared.setup, Path(prepared.setup.recipe.output or "")
    if prepared.run is not None or "output" in prepared.resolved.typed or planned.parent != RUNS:
        return prepared
    folder = choose_folder(setup.recipe.model_copy(update={"output": None}))
    if folder == planned:
        return prepared
    reporter.on_message(f"another process has taken {planned} meanwhile: this run is {folder}")
    recipe = setup.recipe.model_copy(update={"output": str(folder)})
    return replace(prepared, setup=replace(setup, recipe=recipe), resolved=replace(prepared.resolved, recipe=recipe))


@contextmanager
def opened_run(prepared: PreparedRun, reporter: Reporter, session: Session) -> Iterator[Run]:
    """Make the run folder of a new run, or return to the chosen checkpoint of an old one; lock it in the block.

    Raises:
        UsageError: another process trains the run.
        DataError: the chosen checkpoint is damaged.
    """
    run = prepared.run or Run(Path(prepared.setup.recipe.output or ""))
    # Before the folder exists: the other ranks plan while rank 0 makes it.
    prepared.setup.parallel.announce(prepared.setup, run, prepared.start)
    folder = new_run_folder(prepared) if prepared.run is None else locked(prepared.run.folder, "training")
    with saved_state_in_errors(run, session.owns_process), folder:
        if prepared.run is not None:
            warn_of_changes(run, prepared.setup, reporter)
        if prepared.start is not None:
            checker = Checker(run, prepared.setup.selection.trained, prepared.setup.choice)
            if damage := list(checker.checkpoint(prepared.start)) if prepared.start else []:
                raise DataError("\n".join([*damage, "nothing was changed; name another checkpoint with --from"]))
            go_back(run, prepared.start)
            reporter.on_message(f"back to step {prepared.start}; what came after it is done again")
        if prepared.run is not None:
            move_model(run, prepared.setup.model)
            for problem in run.metrics_problems(steps_done(run)):
                warn(run, reporter, problem)
        if (start := prepared.setup.plan.costs.start.seconds) > LONG_START_SECONDS:
            reporter.on_message(f"putting weights and state in their places, about {clock(start)}")
        prepared.setup.parallel.share_folder(run)
        remember_start(run.folder)
        yield run


def warn_of_changes(run: Run, setup: TrainSetup, reporter: Reporter) -> None:
    """Warn that a run resumes with other versions, threads or kernels, before anything is written."""
    warn(run, reporter, environment_changes(run, str(setup.device), torch.get_num_threads()))
    products = Products.parse(setup.recipe.products)
    dtype = torch.float32 if products.widens else setup.dtype
    if setup.device.type == "cpu" and products.uses_mkl and not has_mkl(dtype):
        missing = f"this torch offers no MKL for {PRECISION_NAMES[dtype]}, with which the run began ({products})"
        warn(run, reporter, f"{missing}: oneDNN replaces it, and results differ in their last bits")


def move_model(run: Run, model: Path) -> None:
    """Update the model's folder in the run's recipe."""
    if run.recipe().model != str(model):
        lines = run.recipe_file.read_text(encoding="utf-8").splitlines()
        moved = [yaml.dump({"model": str(model)}) if line.startswith("model:") else line for line in lines]
        replace_text(run.recipe_file, "\n".join(moved) + "\n")


@contextmanager
def saved_state_in_errors(run: Run, owns_process: bool = True) -> Iterator[None]:
    """Tell the user which state is saved and how to resume, when a signal or an unexpected error ends the block."""
    with stop_message(partial(stopped, run)), StopRequest(saved=partial(what_is_saved, run), owns_process=owns_process):
        try:
            yield
        except (Interrupted, UsageError, DataError, NotFinite):  # their messages say it, or resuming would not help
            raise
        except Exception as error:
            error.add_note(what_is_saved(run))
            raise


@contextmanager
def new_run_folder(prepared: PreparedRun) -> Iterator[None]:
    """Make the run folder under a hidden name, fill it, then rename it, so that a named folder can always be resumed.

    The lock moves with it: no other process can train the run in between.

    Raises:
        UsageError: it exists, another process is making it, or it cannot be written.
        ResourceError: the disk is full.
    """
    final = Path(prepared.setup.recipe.output or "")
    draft = Run(hidden_name(final, "starting"))
    try:
        keep_folder(draft.folder)
    except OSError as error:
        raise _not_made(final, error) from error
    # Lock the draft: two starts with the same name must not fill it together.
    with locked(draft.folder, "training"):
        for path in draft.folder.iterdir():  # left by a killed process
            if path.name != LOCK:
                remove(path)
        write_file(draft.recipe_file, dump_recipe(prepared.resolved.recipe, prepared.resolved.origins))
        keep_folder(draft.data)
        for name, rows in zip(("train", "validation"), prepared.rows, strict=True):
            if rows is not None:
                save_dataset(rows, draft.data / name)
        draft.start_record(prepared.resolved.recipe)
        write_sealed(draft.base_file, fingerprint(prepared.setup.model))
        sync_tree(draft.folder)
        try:
            draft.folder.rename(final)
        except OSError as error:
            discard(draft.folder)
            if os.path.lexists(final):
                raise UsageError(f"another process has made {final} meanwhile; repeat the command") from error
            raise _not_made(final, error) from error
        sync_path(final.parent)
        yield


def _not_made(folder: Path, error: OSError) -> UsageError:
    return UsageError(f"cannot make the run folder {folder}: {error.strerror}; name another with --output")


def make_run_setup(
    recipe: Recipe,
    model: Path,
    rows: tuple[Prepared, Prepared | None],
    folder: Path,
    target: Target | None = None,
    parallel: Parallel = ONE_PROCESS,
    done: int | None = None,
) -> TrainSetup:
    """Set up a run from its prepared rows, see `make_setup`."""
    train, validation = rows
    check_keep(recipe, len(validation.rows) if validation else 0, Run(folder).recipe_file.is_file())
    return make_setup(
        recipe,
        model,
        Rows.of(train.rows, recipe.packing, recipe.max_length),
        Rows.of(validation.rows if validation else None, length=recipe.max_length),
        train.report.data_sha256,
        folder,
        target,
        train.report.labels,
        parallel,
        done,
    )
