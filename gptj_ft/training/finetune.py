"""Gather what a run reads, plan it and train it, fresh or resumed from its folder; forecast one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gptj_ft.checkpoints.architecture import read_architecture, vocab_size_of
from gptj_ft.checkpoints.base_model import choose_model, find_model
from gptj_ft.checkpoints.fingerprint import check_unchanged, fingerprint
from gptj_ft.config import yaml
from gptj_ft.config.options import FREE_ON_RESUME, Recipe
from gptj_ft.config.resolve import Resolved, build, dump_recipe, resolve
from gptj_ft.config.run_folder import (
    START,
    Run,
    choose_folder,
    environment_changes,
    steps_done,
    stopped,
    what_is_saved,
)
from gptj_ft.data.batches import Rows
from gptj_ft.data.checks.tokens import check_tokens
from gptj_ft.data.dataset import Prepared, Report, load_dataset, save_dataset
from gptj_ft.data.load import data_path, read_or_prepare
from gptj_ft.data.prepare import TokenizeJob
from gptj_ft.data.readers.rows import PLACES_SHOWN, Occurrences, format_places
from gptj_ft.data.readers.source import FileOptions, identify
from gptj_ft.data.split import split
from gptj_ft.data.tokenization import load_row_tokenizer
from gptj_ft.errors import DataError, Interrupted, NotFinite, UsageError
from gptj_ft.models.published import Published, find_published
from gptj_ft.models.registry import Architecture
from gptj_ft.models.supported import DEFAULT_REPOSITORY, TINY_MODELS
from gptj_ft.models.trainable import select
from gptj_ft.planning.devices import is_published_name
from gptj_ft.planning.machine_profile import are_known, is_known, rates
from gptj_ft.planning.plan import DoesNotFit, Plan, choose
from gptj_ft.planning.resources import Target
from gptj_ft.planning.workload import RowLengths, StepTokens, Workload
from gptj_ft.system.accelerator import is_accelerator
from gptj_ft.system.digests import read_sealed, write_sealed
from gptj_ft.system.files import hidden_name, keep_folder, remove, replace_text, sync_path, sync_tree, write_file
from gptj_ft.system.lock import LOCK, locked
from gptj_ft.system.machine import choose_device
from gptj_ft.system.paths import is_model, is_tuned
from gptj_ft.system.signals import StopRequest, stop_says
from gptj_ft.system.units import clock
from gptj_ft.training.loop import Session, TrainResult, train, warn
from gptj_ft.training.parallel import ONE_PROCESS, Parallel
from gptj_ft.training.reporter import Reporter
from gptj_ft.training.retention import check_keep, find_checkpoint, go_back
from gptj_ft.training.runs import tidy
from gptj_ft.training.setup import TrainSetup, make_setup
from gptj_ft.training.trackers import check_tracker
from gptj_ft.training.verify import Checker

LONG_START = 5.0  # seconds
FIRST_ON_DEVICE = "first run on this device: `gptj-ft doctor` checks it in two minutes"


class AlreadyFinished(UsageError):
    """A run that is to be resumed has nothing left to do."""


@dataclass(frozen=True)
class Inputs:
    """The model to start from and the rows, ready to be packed.

    Attributes:
        model: folder.
        train: rows to train on.
        validation: rows to measure on.
        report: report on the rows that ``data`` names, whichever of them are held out.
    """

    model: Path
    train: Prepared
    validation: Prepared | None
    report: Report


def gather(recipe: Recipe) -> Inputs:
    """Find the model and prepare the rows of a run; without validation rows, hold some out.

    Args:
        recipe: options; ``data`` must be set.

    Raises:
        UsageError, DataError: as their parts.
    """
    source = identify(data_path(recipe.data), FileOptions.of(recipe))
    model = choose_model(recipe, source)
    read_architecture(model).family.head_for(recipe.task)
    tokenizer = load_row_tokenizer(model)
    vocab_size = vocab_size_of(model)
    known = read_architecture(model).labels if recipe.task != "language-model" else ()
    rows = read_or_prepare(TokenizeJob(recipe, tokenizer, source, vocab_size, known_labels=known))
    if recipe.val_data is not None:
        path, labels = data_path(recipe.val_data), rows.report.labels
        validation = read_or_prepare(TokenizeJob.of(recipe, tokenizer, path, vocab_size, labels=labels))
        train = warn_of_shared(note_left_out(rows, validation), validation)
        return Inputs(model, train, validation, train.report)
    train, held_out = split(rows, recipe.holdout, recipe.seed)
    return Inputs(model, train, held_out, rows.report)


def note_left_out(train: Prepared, validation: Prepared) -> Prepared:
    """Return the training rows with a note in their report on each reason why validation rows were left out."""
    notes = tuple(
        f"validation rows left out, {skips.count:,}: {reason} ({format_places(skips.first, skips.count)})"
        for reason, skips in validation.report.rows_skipped.items()
    )
    return replace(train, report=replace(train.report, notes=(*train.report.notes, *notes)))


def warn_of_shared(train: Prepared, validation: Prepared) -> Prepared:
    """Return the training rows with a warning in their report if the validation rows have documents of theirs."""
    held = set(validation.rows["group"])
    columns = (train.rows[name] for name in ("group", "source", "line"))
    places = dict.fromkeys(f"{source}:{line}" for group, source, line in zip(*columns, strict=True) if group in held)
    if not places:
        return train
    what = "the same document is in the validation rows, which then do not tell how well the model does on others"
    warnings = {**train.report.warnings, what: Occurrences(len(places), list(places)[:PLACES_SHOWN])}
    return replace(train, report=replace(train.report, warnings=warnings))


@dataclass(frozen=True)
class PreparedRun:
    """A run that is ready to start: nothing has been written for it yet, or it is resumed.

    Attributes:
        setup: recipe, model, rows and plan for `loop.train`.
        report: report on the rows, held-out ones included.
        resolved: the recipe with origins, to be saved in a new run folder.
        rows: training and validation rows, to be saved there.
        run: the folder, when it exists already.
        start: step of the checkpoint that it goes back to first; ``None``: it goes on where it stopped.
    """

    setup: TrainSetup
    report: Report
    resolved: Resolved
    rows: tuple[Prepared, Prepared | None]
    run: Run | None
    start: int | None = None

    def train(self, reporter: Reporter | None = None, session: Session | None = None) -> TrainResult:
        """Train the run, see `train_run`."""
        return train_run(self, reporter, session)


def planning(device: torch.device, folder: Path) -> str:
    """Name the activity of planning a run, for messages."""
    return "planning" if are_known(device, folder) else "measuring this machine, once, up to 10 s"


def prepare_new_run(
    resolved: Resolved, reporter: Reporter | None = None, target: Target | None = None, parallel: Parallel = ONE_PROCESS
) -> PreparedRun:
    """Read everything that a new run needs, and plan it; writes nothing but a tiny model.

    Args:
        resolved: options with their origins.
        reporter: receiver of activities.
        target: device and resources to plan for; default: this machine, which it can then be trained on.
        parallel: ranks that share it.

    Raises:
        GptjFtError: whatever stands in its way.
    """
    recipe, reporter = resolved.recipe, reporter or Reporter()
    check_tracker(recipe.report_to)
    use_threads(recipe, parallel, reporter)
    folder = choose_folder(recipe)
    reporter.on_activity("reading the rows")
    inputs = gather(recipe)
    reporter.on_activity("planning" if target else planning(_local_device(recipe, parallel, reporter), folder))
    final = recipe.model_copy(update={"model": str(inputs.model.resolve()), "output": str(folder)})
    setup = make_run_setup(final, inputs.model, (inputs.train, inputs.validation), folder, target, parallel)
    origins = dict(resolved.origins)
    if final.precision == "auto":
        origins["precision"] = "chosen by measuring"
    _measure_network(setup.parallel, reporter)
    resolved, rows = Resolved(setup.recipe, origins), (inputs.train, inputs.validation)
    return PreparedRun(setup, inputs.report, resolved, rows, None)


def _measure_network(parallel: Parallel, reporter: Reporter) -> None:
    if parallel.world.size > 1:
        reporter.on_activity("measuring the network")
        parallel.measure_network()


def use_threads(recipe: Recipe, parallel: Parallel, reporter: Reporter) -> None:
    """Compute with as many threads as a recipe says, or report that several processes have fewer each than one."""
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    elif warning := parallel.thread_warning():
        reporter.on_message(warning)


def _local_device(recipe: Recipe, parallel: Parallel, reporter: Reporter) -> torch.device:
    """Choose the device of a run, and offer its check-up where it has never been seen."""
    device = choose_device(recipe.device, recipe.device_memory, parallel.world.local_rank)
    if is_accelerator(device) and not is_known(device):
        reporter.on_message(FIRST_ON_DEVICE)
    return device


def resume_run(
    folder: Path,
    given: Resolved,
    start: str | None = None,
    parallel: Parallel = ONE_PROCESS,
    reporter: Reporter | None = None,
) -> PreparedRun:
    """Read a run folder; options that change no number may be given anew.

    Args:
        folder: run folder.
        given: options given anew, and no others, see `options_on_resume`.
        start: name of the checkpoint to go back to, see `retention.find_checkpoint`.
        parallel: ranks that share the run from now on.
        reporter: receiver of messages.

    Raises:
        AlreadyFinished: the run is done; what it had left if it was cut off in its last moments has been removed.
        UsageError: not a run folder, one that another process is training, a model that has moved, or an option that
            would change the result.
        DataError: a file that the run goes on from is missing, damaged, or not the one that it began with.
    """
    run = Run(folder.expanduser())
    saved = run.recipe()
    with locked(run.folder, "training"):  # refused at once, not when all rows are read
        if is_finished := is_tuned(run.model):
            tidy(run)
    if is_finished:
        raise AlreadyFinished(f"{folder} is finished: its model is {run.model}; for more, finetune --model {run.model}")
    changes = {key: getattr(given.recipe, key) for key in given.recipe.model_fields_set}
    for key, value in changes.items():
        if key not in FREE_ON_RESUME | {"model"} and value != getattr(saved, key):
            was = getattr(saved, key)
            raise UsageError(
                f"{key} is {'not set' if was is None else repr(was)} in this run; {value!r} would make another run of "
                "it: leave it out, or start a new run"
            )
    if changes.get("model") is not None:
        changes["model"] = str(find_model(changes["model"]).resolve())
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
    check_unchanged(model, read_sealed(run.base_file))
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
    setup = make_run_setup(recipe, model, rows, run.folder, parallel=parallel)
    _measure_network(setup.parallel, reporter or Reporter())
    return PreparedRun(setup, rows[0].report, Resolved(recipe, {}), rows, run, step)


def options_on_resume(
    options: Mapping[str, Any], config: Path | None = None, assignments: Sequence[str] | None = None
) -> Resolved:
    """Resolve the options given to a run that goes on: the run has all others, the environment has none."""
    return resolve(options, config, assignments, environment={}, base=("run", {}))


def train_run(prepared: PreparedRun, reporter: Reporter | None = None, session: Session | None = None) -> TrainResult:
    """Make the run folder if there is none, and train.

    Args:
        prepared: run to train.
        reporter: receiver of events.
        session: process that trains.

    Raises:
        UsageError: another process is training it.
        DataError: the checkpoint to go back to is damaged.
        GptjFtError: as `loop.train`.
    """
    reporter, session = reporter or Reporter(), session or Session()
    run = prepared.run or Run(Path(prepared.setup.recipe.output or ""))
    parallel = prepared.setup.parallel
    parallel.announce(prepared.setup, run, prepared.start)
    folder = new_run_folder(prepared) if prepared.run is None else locked(prepared.run.folder, "training")
    with going_on(run, session.owns_process), folder:
        if prepared.run is not None:
            warn_of_changes(run, prepared.setup, reporter)
        if prepared.start is not None:
            checker = Checker(run, prepared.setup.selection.trained)
            if damage := list(checker.checkpoint(prepared.start)) if prepared.start else []:
                raise DataError("\n".join([*damage, "nothing was changed; name another checkpoint with --from"]))
            go_back(run, prepared.start)
            reporter.on_message(f"back to step {prepared.start}; what came after it is done again")
        if prepared.run is not None:
            move_model(run, prepared.setup.model)
            for problem in run.metrics_problems(steps_done(run)):
                warn(run, reporter, problem)
        if (start := prepared.setup.plan.costs.start.seconds) > LONG_START:
            reporter.on_message(f"putting weights and state in their places, about {clock(start)}")
        parallel.share_folder(run)
        return train(prepared.setup, run, reporter, session)


def warn_of_changes(run: Run, setup: TrainSetup, reporter: Reporter) -> None:
    """Warn, before anything is written, that a run goes on with other versions, threads or kernels."""
    warn(run, reporter, environment_changes(run, str(setup.device), torch.get_num_threads()))


def move_model(run: Run, model: Path) -> None:
    """Write into a run's recipe where its model is now, if that has changed."""
    if run.recipe().model != str(model):
        lines = run.recipe_file.read_text(encoding="utf-8").splitlines()
        moved = [yaml.dump({"model": str(model)}) if line.startswith("model:") else line for line in lines]
        replace_text(run.recipe_file, "\n".join(moved) + "\n")


@contextmanager
def going_on(run: Run, owns_process: bool = True) -> Iterator[None]:
    """Say what is saved, and how to go on, when a signal or something unforeseen ends what is done with a run."""
    with stop_says(partial(stopped, run)), StopRequest(saved=partial(what_is_saved, run), owns_process=owns_process):
        try:
            yield
        except (Interrupted, UsageError, DataError, NotFinite):  # they say it; or resumed, it would end so again
            raise
        except Exception as error:
            error.add_note(what_is_saved(run))
            raise


@contextmanager
def new_run_folder(prepared: PreparedRun) -> Iterator[None]:
    """Make the run folder; it appears under its name, and locked, when it holds all that resuming needs.

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
    with locked(draft.folder, "training"):
        for left in draft.folder.iterdir():  # by a process that was killed
            if left.name != LOCK:
                remove(left)
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
            raise _not_made(final, error) from error
        sync_path(final.parent)
        yield


def _not_made(folder: Path, error: OSError) -> UsageError:
    return UsageError(f"cannot make the run folder {folder}: {error.strerror}; name another with --output")


@dataclass(frozen=True)
class Forecast:
    """What a run would cost.

    Attributes:
        plan: plan of the run; where none fits, the nearest.
        problem: reason why it does not fit.
        notes: notes on the treatment of the model.
        published: the model as it was published, if it is one of those that are known by name.
    """

    plan: Plan
    problem: DoesNotFit | None = None
    notes: tuple[str, ...] = ()
    published: Published | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return all of it for `--json`."""
        published = self.published.to_dict() if self.published else None
        problem = {"error": str(self.problem), "exit_code": self.problem.exit_code} if self.problem else {}
        return {**self.plan.to_dict(), "notes": list(self.notes), "published": published, **problem}


def forecast_run(resolved: Resolved, measure_again: bool = False, reporter: Reporter | None = None) -> Forecast:
    """Plan a run, from its rows if they are named, else for rows of the greatest length.

    Without rows, a published model need not be there: see `published`. Where none is named or downloaded, it is GPT-J.

    Args:
        resolved: options with their origins.
        measure_again: measure what the machine does in a second, though it is known.
        reporter: receiver of activities.

    Raises:
        GptjFtError: there are no such rows, or no such model.
    """
    recipe, reporter = resolved.recipe, reporter or Reporter()
    use_threads(recipe, ONE_PROCESS, reporter)
    folder = choose_folder(recipe)
    is_here = not is_published_name(recipe.device)
    if measure_again:
        reporter.on_activity("measuring this machine, up to 10 s")
        rates(choose_device(recipe.device if is_here else "cpu"), folder, again=True)
    elif is_here and recipe.data is None:
        reporter.on_activity(planning(choose_device(recipe.device, recipe.device_memory), folder))
    if recipe.data is not None:
        target = None if is_here else Target.of(recipe, folder)
        name = target.name if target else ""
        try:
            setup = prepare_new_run(resolved, reporter, target).setup
        except DoesNotFit as problem:
            return Forecast(replace(problem.nearest, device=name), problem)
        return Forecast(replace(setup.plan, device=name), notes=setup.architecture.notes)
    if recipe.model in TINY_MODELS:
        raise UsageError("the tiny model is made from the rows: add --data FILE")
    published = find_published(recipe.model or DEFAULT_REPOSITORY)
    architecture = _architecture(recipe, published)
    architecture = architecture.with_head(recipe.task, tuple(recipe.labels.values()) or ("0", "1"))
    architecture = architecture.with_dropout(recipe.dropout, recipe.attention_dropout)
    target = Target.of(recipe, folder)
    length = min(recipe.max_length, architecture.config.n_positions)
    tokens = recipe.batch_size * length
    selection = select(architecture, recipe)
    workload = Workload(
        layouts=selection.trained,
        frozen=selection.frozen,
        layers=selection.build(),
        width=architecture.config.n_embd,
        dtype=torch.float32,
        step=StepTokens(max(recipe.micro_batch_tokens, length), tokens, tokens, tokens),
        num_steps=recipe.max_steps,
        rows=RowLengths(length),
        context=architecture.config.n_positions,
    )
    workload = target.settled(workload, recipe)
    try:
        plan = choose(recipe, workload, target.free, target.rates)
    except DoesNotFit as problem:
        return Forecast(replace(problem.nearest, device=target.name), problem, architecture.notes, published)
    return Forecast(replace(plan, device=target.name), None, architecture.notes, published)


def _architecture(recipe: Recipe, published: Published | None) -> Architecture:
    """Return the architecture of a recipe's model: of what is here, else as it was published."""
    try:
        return read_architecture(choose_model(recipe, None))
    except UsageError:
        if published is None or (recipe.model is not None and Path(recipe.model).exists()):
            raise
        return published.architecture


def make_run_setup(
    recipe: Recipe,
    model: Path,
    rows: tuple[Prepared, Prepared | None],
    folder: Path,
    target: Target | None = None,
    parallel: Parallel = ONE_PROCESS,
) -> TrainSetup:
    """Set up a run from its prepared rows."""
    train, validation = rows
    check_keep(recipe, len(validation.rows) if validation else 0)
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
    )
