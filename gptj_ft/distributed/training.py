"""Train one run on several ranks: shared layers, shared rows, or both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Timer

import torch

from gptj_ft.checkpoints.fingerprint import fingerprint
from gptj_ft.config.options import Recipe
from gptj_ft.config.run_folder import Run, note_layers
from gptj_ft.distributed.environment import check_same_environment, local_environment, thread_warning
from gptj_ft.distributed.exchange import DistributedExchange, scattered
from gptj_ft.distributed.files import share_folder
from gptj_ft.distributed.migrate import Migration
from gptj_ft.distributed.mirror import DiskMirrors
from gptj_ft.distributed.network import Network, measure_network
from gptj_ft.distributed.pipeline import Partition, assign_layers
from gptj_ft.distributed.process_group import subgroup
from gptj_ft.distributed.scatter import serve
from gptj_ft.distributed.straggler import StragglerWatch
from gptj_ft.distributed.traffic import local_workload, most_step_bytes, with_mirrors
from gptj_ft.errors import UsageError
from gptj_ft.models.layout import MOMENTS, Layout
from gptj_ft.models.trainable import Selection
from gptj_ft.planning.workload import Workload
from gptj_ft.streaming.adamw import AdamW
from gptj_ft.streaming.exchange import Exchange
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.system.files import discard
from gptj_ft.system.group import ALONE, Group
from gptj_ft.system.units import gigabytes
from gptj_ft.training.parallel import Mirrors, OpenedModel, Parallel, ResumePoint, StepWork, Validated
from gptj_ft.training.restore import load_start, make_optimizer, open_offloaded
from gptj_ft.training.run_state import RunState
from gptj_ft.training.setup import TrainSetup
from gptj_ft.training.validation import ValidationSample

COMMIT_SECONDS = 10.0  # after an error, for commits in progress; then the other ranks are told


@dataclass(eq=False)
class DistributedTraining(Parallel):
    """The ranks of a run: number of ranks = replicas x ranks that share the layers of a replica.

    One rank is allowed: it resumes runs with row shards or mirrors that several ranks have started.
    """

    world: Group = ALONE
    replicas: Group = ALONE
    partition: Partition = field(default_factory=Partition)
    num_shards: int = 1  # row shards of a step
    network: Network | None = None  # measured
    step_bytes: tuple[float, float] = (0.0, 0.0)  # most that a rank sends and receives in a step
    stragglers: StragglerWatch | None = None

    __repr__ = Parallel.__repr__

    @property
    def pipeline(self) -> Group:  # type: ignore[override]
        return self.partition.group

    # Setup and plan

    def assign(
        self, recipe: Recipe, whole: Selection, width: int, is_resumed: bool
    ) -> tuple[DistributedTraining, Recipe]:
        world, layouts = self.world, whole.trained
        recipe = resolve_split(recipe, world.size, len(layouts) - 2, is_resumed)
        num_replicas = world.size if recipe.share == "rows" else recipe.replicas or 1
        stages = world.size // num_replicas if world.size > 1 else 1
        # Consecutive ranks share the layers of a replica; every `stages`-th rank has the same layers.
        first, stage = world.rank - world.rank % stages, world.rank % stages
        partition = Partition()
        if stages > 1:
            group = subgroup(world, range(first, first + stages))
            partition = Partition(group, tuple(assign_layers(layouts, stages)), width)
        replicas = subgroup(world, range(stage, world.size, stages))
        share = replace(self, replicas=replicas, partition=partition, num_shards=recipe.lanes or 1)
        return share, recipe

    def local_layouts(self, layouts: Sequence[Layout]) -> Sequence[Layout]:
        return self.partition.local_layouts(layouts)

    def local_job(self, recipe: Recipe, workload: Workload) -> tuple[Recipe, Workload]:
        num_layers = len(workload.layouts)
        owners = self.partition.owners or (0,) * num_layers
        self.step_bytes = most_step_bytes(workload, owners, self.replicas.size)
        if self.pipeline.size > 1:
            workload = local_workload(workload, [layer for layer in range(num_layers) if self.partition.has(layer)])
        return with_mirrors(recipe, self.pipeline.size), workload

    def describe(self, recipe: Recipe) -> dict[str, str]:
        if self.world.size == 1:
            return {}
        several = recipe.share == "layers" and self.replicas.size > 1
        between = f" in {self.replicas.size} replicas" if several else ""
        return {"processes": f"{self.world.size}, sharing {recipe.share}{between}"}

    def thread_warning(self) -> str:
        return thread_warning(self.world)

    def measure_network(self) -> None:
        self.network = measure_network(self.world)

    def traffic(self, setup: TrainSetup) -> str | None:
        network, (sent, received) = self.network, self.step_bytes
        if network is None:
            return None
        seconds = max(sent, received) / network.rate
        bound = ", longer than computing it" if seconds > setup.plan.costs.seconds_per_step else ""
        return (
            f"a process sends {gigabytes(sent)} and gets {gigabytes(received)} a step at most: {seconds:.2g} s{bound}; "
            f"measured {gigabytes(network.rate)}/s each way, {1e3 * network.latency:.2g} ms a message"
        )

    def announce(self, setup: TrainSetup, run: Run, start: int | None) -> None:
        if self.world.size == 1:
            return
        plan = {
            "folder": str(run.folder.resolve()),
            "recipe": with_placement(setup).model_dump(mode="json"),
            "base": fingerprint(setup.model),
            "start": start,
        }
        messages = self.world.gather("plan", {"facts": local_environment(), "plan": plan})
        check_same_environment(messages, setup.recipe.threads)
        # A worker that cannot follow the plan fails before this point, and nothing is written yet.
        self.world.barrier("agreed")

    def share_folder(self, run: Run) -> None:
        if self.world.size > 1:
            share_folder(self.world, run)

    # State

    def find_resume_point(self, setup: TrainSetup, run: Run) -> ResumePoint:
        if self.pipeline.size == 1 and not setup.recipe.mirror:
            return super().find_resume_point(setup, run)
        return Migration(setup, run, self.partition).find_resume_point()

    @contextmanager
    def opened(self, setup: TrainSetup, run: Run, open_saved: Callable[[], OpenedModel]) -> Iterator[OpenedModel]:
        if self.pipeline.size > 1:
            transport = self.pipeline.connect(setup.device, self.partition.links)
            run.log(f"hidden states go from process to process {transport}")
        model, optimizer, state = self._open_replica(setup, run) if self.is_replica else open_saved()
        try:
            if not self.is_replica:
                self._send_state(model, optimizer, state)
                note_layers(run, self.partition.layers_by_rank)
            yield model, optimizer, state
        except BaseException as error:
            # Closing waits for commits, which wait for the other ranks. These may be waiting for this one.
            timer = Timer(COMMIT_SECONDS, self.world.fail, [error])
            timer.start()
            try:
                model.close()
            finally:
                timer.cancel()
            raise
        else:
            model.close()
        finally:
            if self.is_replica:
                discard(run.state)

    def _send_state(self, model: OffloadedModel, optimizer: AdamW, state: RunState) -> None:
        """Send the restored state to the other replicas."""
        group = self.replicas
        if group.size == 1:
            return
        if state.step:
            optimizer.flush()
        group.broadcast("state", state.to_dict())
        if state.step == 0:
            return  # they load the same start
        for layer in model.trained:
            for kind in (kind for kind in model.dtypes if kind != "grad"):
                for _, part in model.read_chunks(kind, layer):
                    values = part.to("cpu").contiguous()
                    for transfer in [group.send(rank, values) for rank in range(1, group.size)]:
                        transfer.wait()

    def _open_replica(self, setup: TrainSetup, run: Run) -> OpenedModel:
        """Open the stores of a replica and copy the state of replica 0 into them."""
        state = RunState.of(self.replicas.broadcast("state", {}))
        discard(run.state)  # left by a killed process
        model = open_offloaded(setup, run, setup.plan.placement)
        try:
            if state.step == 0:
                load_start(setup, model)
            else:
                self._receive_state(model, state.step)
            return model, make_optimizer(setup, model, state), state
        except BaseException:
            model.close()
            raise

    def _receive_state(self, model: OffloadedModel, step: int) -> None:
        kinds = tuple(kind for kind in model.dtypes if kind != "grad")
        assert set(MOMENTS) < set(kinds)

        def fill(start: int, part: torch.Tensor) -> None:
            values = part if part.device.type == "cpu" else torch.empty(len(part), dtype=part.dtype)
            self.replicas.recv(0, values).wait()
            if values is not part:
                part.copy_(values)

        for layer in model.trained:
            for kind in kinds:
                model.write_chunks(kind, layer, partial(fill))
            model.transfers.commit(kinds, layer, model.choice.last_step(layer, step))
        model.drain()
        model.free_filling_pools()

    def exchange(self) -> Exchange:
        if self.world.size == 1 and self.num_shards == 1:
            return super().exchange()
        return DistributedExchange(self.partition, self.replicas, self.num_shards)

    def open_mirrors(self, setup: TrainSetup, run: Run) -> Mirrors:
        if not setup.recipe.mirror or self.pipeline.size == 1 or self.is_replica:
            return super().open_mirrors(setup, run)
        assert setup.whole is not None
        trained = [layer for layer, layout in enumerate(setup.whole.trained) if layout.numel]
        return DiskMirrors(self.partition, run, trained, setup.choice)

    # Loop

    def validate(self, setup: TrainSetup, model: OffloadedModel, compute: Callable[[], Validated]) -> Validated:
        if self.world.size == 1:
            return compute()
        # Replicas of one rank share the work; of replicas with several ranks, only the first validates.
        are_whole = self.replicas.size == self.world.size
        loss, sample = 0.0, None
        if self.is_replica and are_whole:
            from gptj_ft.distributed.serving import Replica  # imports all of generation

            serve(self.replicas, Replica(setup.recipe, setup.model, setup.architecture, model).works)
        elif not self.is_replica:
            with scattered(model, self.replicas if are_whole else ALONE):
                loss, sample = compute()
        first = self.world.broadcast("validation", {"loss": loss, "scores": sample.scores if sample else {}})
        if sample is None and first["scores"]:
            sample = ValidationSample(first["scores"], "", "")
        return first["loss"], sample

    def agree_on_time(self, step: int, is_in_time: bool, work: StepWork) -> tuple[bool, str | None]:
        if self.world.size == 1:
            return is_in_time, None
        if self.stragglers is None:
            self.stragglers = StragglerWatch(self.world.names)
        messages = self.world.gather("in time", {"is": is_in_time, "work": work})
        return messages[0]["is"], self.stragglers.after_step(step, [each["work"] for each in messages])


def with_placement(setup: TrainSetup) -> Recipe:
    """Return the recipe with the placement that rank 0 has planned."""
    place, lora = setup.plan.placement, setup.recipe.method == "lora"
    chosen = {
        "weights": place.of("frozen") if lora else place.weights,
        "optimizer_state": place.optimizer_state,
        "boundaries": place.boundaries,
        "activations": setup.plan.budget.num_kept_layers,
    }
    return setup.recipe.model_copy(update=chosen)


def resolve_split(recipe: Recipe, size: int, num_blocks: int, is_resumed: bool = False) -> Recipe:
    """Resolve how ranks share a run: options ``share``, ``replicas`` and ``lanes``.

    Args:
        is_resumed: whether the run was started before; its number of lanes stays.
    """
    if size == 1:
        return recipe
    share, replicas = recipe.share, recipe.replicas
    # A run that began without lanes had one: its bits must stay the same.
    lanes = recipe.lanes or (1 if is_resumed else None)
    divisors = [each for each in range(1, size + 1) if size % each == 0]
    if share == "auto":
        # Share layers where every rank would need the whole optimizer state otherwise.
        if replicas is None and recipe.method != "lora" and recipe.shares_layers:
            possible = [each for each in divisors if each <= (lanes or size)]
            replicas = next((each for each in possible if 2 * (size // each) <= num_blocks), possible[-1])
        share = "rows" if (replicas or size) == size else "layers"
    if share == "rows" and recipe.replicas not in (None, size):
        raise UsageError(
            f"share: rows makes {size} processes {size} replicas, and replicas says {recipe.replicas}: leave it out "
            "(null), or use --set share=layers"
        )
    replicas = size if share == "rows" else replicas or 1
    if replicas not in divisors:
        raise UsageError(
            f"{size} processes are not {replicas} replicas of as many each: use another number of processes, or --set "
            f"replicas=N, where N is one of {', '.join(map(str, divisors))}"
        )
    stages = size // replicas
    if stages > 1 and not recipe.shares_layers:
        what = "sample_rows" if recipe.task == "language-model" else f"a head for {recipe.task}"
        raise UsageError(f"share: layers does not go together with {what} yet: use --set share=rows")
    if stages == 1 and recipe.mirror:
        raise UsageError(
            "mirror: true is for processes that share the layers: use --set share=layers, or --set mirror=false"
        )
    if stages > num_blocks:
        raise UsageError(
            f"{stages} processes cannot share {num_blocks} blocks: use fewer, more replicas of the model (--set "
            "replicas=N), or --set share=rows"
        )
    lanes = lanes or replicas
    if lanes < replicas:
        who = "processes" if share == "rows" else "replicas"
        raise UsageError(
            f"{replicas} {who} cannot share the rows of {lanes} lane{'s' if lanes > 1 else ''}: use {lanes}; lanes "
            "decide the last bits of a run, so that they stay what they were when it began"
        )
    if replicas == 1:
        return recipe.model_copy(update={"share": share})
    return recipe.model_copy(update={"share": share, "replicas": replicas if stages > 1 else None, "lanes": lanes})
