"""Forecast several machines: memory, disk, traffic, waiting, and the chosen split."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from rich.console import Console
from support.rates import round_rates, timed_by_flops

from gptj_ft.cli.terminal.machines import show_machines
from gptj_ft.config.options import Recipe
from gptj_ft.config.resolve import resolve
from gptj_ft.distributed.network import PAYLOAD, Network
from gptj_ft.distributed.pipeline import assign_layers
from gptj_ft.distributed.scale_out import Job, advise, divisions, forecast_share, scale_out, waiting_seconds
from gptj_ft.distributed.traffic import local_workload
from gptj_ft.distributed.training import resolve_split
from gptj_ft.errors import UsageError
from gptj_ft.models.gptj import GPTJConfig, build_layers
from gptj_ft.models.layout import Layout
from gptj_ft.models.published import find_published
from gptj_ft.models.trainable import select
from gptj_ft.planning.devices import find_device
from gptj_ft.planning.memory import Free
from gptj_ft.planning.plan import choose
from gptj_ft.planning.probe import DiskRates, Rates
from gptj_ft.planning.workload import RowLengths, StepTokens, Workload

GB = 10**9
FAST, SLOW = Network(1e11), Network(1e8)
FREE = Free(device=18 * GB, host=18 * GB, disk=10**12, is_shared=True)
RATES = round_rates(DiskRates(read=2e9, write=2e9, mixed=2e9), to_device=1e11, from_device=1e11, on_cpu=True)
RECIPE = Recipe(batch_size=32, max_length=1024, activations="recompute")


@pytest.fixture(scope="module")
def six_b() -> Workload:
    """GPT-J 6B, 32 rows of 1,024 tokens."""
    tokens = 32 * 1024
    layouts = tuple(Layout.of(layer) for layer in build_layers(GPTJConfig()))
    work = Workload(layouts, 4096, torch.float32, StepTokens(2048, tokens, tokens, tokens), 10, RowLengths(1024))
    return timed_by_flops(work)


def job_of(load: Workload, network: Network = FAST, recipe: Recipe = RECIPE, have: Free = FREE) -> Job:
    return Job(recipe, load, have, RATES, network)


@pytest.mark.parametrize(
    ("text", "bits"), [("10Gbit", 1e10), ("100Mbit", 1e8), ("2.5 gbit/s", 2.5e9), (".5Gbit", 5e8), ("64kbit", 6.4e4)]
)
def test_network_rate_is_parsed(text: str, bits: float) -> None:
    assert Network.parse(text).bits == bits
    assert Network.parse(text).rate == PAYLOAD * bits / 8


@pytest.mark.parametrize("text", ["10GB", "fast", "", "10", "0Gbit", "-1Gbit", "1e9Gbit", "10Gbits"])
def test_bad_network_rate_is_rejected(text: str, shell) -> None:
    with pytest.raises(UsageError, match="such as 10Gbit or 100Mbit"):
        Network.parse(text)


def test_single_machine_keeps_ordinary_plan(six_b: Workload) -> None:
    share, plan = forecast_share(job_of(six_b), 1, 1), choose(RECIPE, six_b, FREE, RATES)
    (node,) = share.nodes
    assert node.plan == plan
    assert (node.device_bytes, node.host_bytes, node.disk_bytes) == (
        plan.device_bytes,
        plan.host_bytes,
        plan.disk_bytes,
    )
    assert share.seconds_per_step == pytest.approx(plan.costs.seconds_per_step)
    assert share.seconds == pytest.approx(plan.costs.seconds)
    assert share.name == "alone"
    assert node.sent == node.received == share.start_seconds == share.end_seconds == 0
    found = scale_out(job_of(six_b), 1)
    assert found.chosen is found.alone
    assert found.speedup(found.chosen) == 1


@pytest.mark.thorough
def test_forecast_owners_match_runtime(
    six_b: Workload,
) -> None:
    for stages in (1, 2, 4, 7, 8):
        share = forecast_share(job_of(six_b), stages, 1)
        assert share.owners == tuple(assign_layers(six_b.layouts, stages))
        assert max(len(node.layers) for node in share.nodes) <= -(-28 // stages) + 1 + (stages < 3)
        own = [layer for node in share.nodes for layer in node.layers]
        assert len(own) == len(set(own))
    tied = find_published("Cerebras-GPT-6.7B")
    assert tied is not None
    layouts = tuple(Layout.of(layer) for layer in tied.architecture.layers())
    share = forecast_share(job_of(timed_by_flops(replace(six_b, layouts=layouts))), 4, 1)
    assert share.owners[0] == share.owners[-1]


@pytest.mark.thorough
def test_mirrors_double_checkpoint_space(six_b: Workload) -> None:
    state, have = 12 * six_b.num_parameters / 2, replace(FREE, device=200 * GB, host=200 * GB)
    for place, more in (("disk", 3), ("device", 2)):
        plain = RECIPE.model_copy(update={"weights": place, "optimizer_state": place})
        for stages, times in ((1, 0), (2, more)):
            first, mirrored = (
                forecast_share(job_of(six_b, recipe=recipe, have=have), stages, 1).most("disk_bytes")
                for recipe in (plain, plain.model_copy(update={"mirror": True}))
            )
            assert mirrored - first == pytest.approx(times * state, rel=0.1)


@pytest.mark.thorough
def test_only_shared_layers_divide_state(six_b: Workload) -> None:
    on_disk = {"weights": "disk", "optimizer_state": "disk", "boundaries": "device"}
    have = replace(FREE, device=60 * GB, host=60 * GB)
    job = job_of(six_b, recipe=RECIPE.model_copy(update=on_disk), have=have)
    alone = forecast_share(job, 1, 1)
    whole, model = alone.nodes[0], 4 * six_b.stored_elements
    for stages in (2, 4, 7, 14):
        share = forecast_share(job, stages, 1)
        assert sorted(rank for node in share.nodes for rank in node.ranks) == list(range(stages))
        # The largest machine has a block, or embedding or head, more than others.
        most = max(sum(layout.numel for layout in node.plan.workload.layouts) for node in share.nodes)
        assert most <= six_b.stored_elements / stages + 2 * max(layout.numel for layout in six_b.layouts)
        for node in share.nodes:
            part, first = node.plan.workload.stored_elements / six_b.stored_elements, 0 in node.ranks
            # The first one writes the whole tuned model, whose layers the others send it.
            replaced = 2 * 16 * max(layout.numel for layout in node.plan.workload.layouts)
            state = node.disk_bytes - (model if first else 0) - replaced
            assert state == pytest.approx(part * 16 * six_b.stored_elements)
            costs, of_all = node.plan.costs, whole.plan.costs
            assert costs.bytes_written_per_step == pytest.approx(part * of_all.bytes_written_per_step)
            assert costs.bytes_read_per_step <= part * of_all.bytes_read_per_step, "buffers hold more of fewer layers"
        assert share.most("disk_bytes") < whole.disk_bytes
        own = [layer for node in share.nodes for layer in node.layers]
        assert len(own) == len(set(own))
    rows = forecast_share(job, 1, 4)
    assert rows.nodes[0].disk_bytes == whole.disk_bytes
    # Four gradients of the largest layer, less the fewer tokens.
    largest = 4 * max(layout.numel for layout in six_b.layouts)
    assert rows.nodes[0].host_bytes == whole.host_bytes + 4 * largest


@pytest.mark.thorough
def test_step_bytes_count_hops_and_replicas(six_b: Workload) -> None:
    tokens, parameters = 32 * 1024, 6_050_882_784
    for stages in (2, 4, 7):
        share = forecast_share(job_of(six_b), stages, 1)
        hops = sum(low != high for low, high in pairwise(share.owners))
        assert hops == 29, "every layer hands on to another machine"
        for way in ("sent", "received"):
            for name in ("forward", "backward"):
                total = sum(len(node.ranks) * getattr(getattr(node, name), way) for node in share.nodes)
                assert total == pytest.approx(29 * tokens * 4096 * 4, rel=0.1), "of machines alike, the one with most"
    half = forecast_share(job_of(replace(six_b, dtype=torch.bfloat16)), 2, 1)
    assert half.most("sent") == forecast_share(job_of(six_b), 2, 1).most("sent") / 2
    for replicas in (2, 4, 8):
        (node,) = forecast_share(job_of(six_b), 1, replicas).nodes
        assert node.sent == node.received == pytest.approx(8 * parameters * (replicas - 1) / replicas)
        assert node.forward.sent == 0
    both = forecast_share(job_of(six_b), 2, 4)
    sums = sum(node.backward.sent - node.forward.sent for node in both.nodes)
    assert sums == pytest.approx(8 * parameters * 3 / 4, rel=0.05), "each of two machines sums up its own layers"


def test_backward_stops_at_lowest_trained_layer(six_b: Workload) -> None:
    layers = build_layers(GPTJConfig())
    empty = Layout.of(layers[0], ())
    trained = tuple(Layout.of(layer) if index > 20 else empty for index, layer in enumerate(layers))
    frozen = tuple(empty if index > 20 else Layout.of(layer) for index, layer in enumerate(layers))
    share = forecast_share(job_of(replace(six_b, layouts=trained, frozen=frozen)), 2, 1)
    down = sum(node.backward.sent for node in share.nodes)
    assert down / sum(node.forward.sent for node in share.nodes) == 8 / 29
    # Of a machine that trains nothing, too, there is a plan.
    head = tuple(Layout.of(layer) if index == 29 else empty for index, layer in enumerate(layers))
    frozen = tuple(empty if index == 29 else Layout.of(layer) for index, layer in enumerate(layers))
    share = forecast_share(job_of(replace(six_b, layouts=head, frozen=frozen)), 2, 1)
    assert min(node.plan.workload.num_trained for node in share.nodes) == 0
    assert all(node.backward.sent == 0 for node in share.nodes)


@pytest.mark.thorough
def test_advised_network_removes_bound(six_b: Workload) -> None:
    fast, slow = (scale_out(job_of(six_b, network), 4) for network in (FAST, SLOW))
    assert not fast.chosen.waits_for_network
    assert fast.advice == ()
    assert slow.chosen.bound == "network"
    assert slow.chosen.seconds_per_step > fast.chosen.seconds_per_step
    advised = next(text for text in slow.advice if text.startswith("a network of "))
    rate = advised.removeprefix("a network of ").split()[0]
    assert not forecast_share(
        job_of(six_b, Network.parse(rate)), slow.chosen.stages, slow.chosen.replicas
    ).waits_for_network


def test_immediate_updates_wait_for_gradients(six_b: Workload) -> None:
    have = replace(FREE, device=10**12, host=10**12)
    waiting = []
    for clip in (1.0, None):
        recipe = RECIPE.model_copy(update={"clip_norm": clip, "weights": "device", "optimizer_state": "device"})
        (node,) = forecast_share(job_of(six_b, recipe=recipe, have=have), 1, 2).nodes
        waiting.append(node.backward.waiting * FAST.rate / 4)
    embedding = six_b.layouts[0].numel
    assert waiting == [pytest.approx(embedding), pytest.approx(six_b.num_parameters)]


def test_advised_rows_hide_gradients(six_b: Workload) -> None:
    load = replace(six_b, layouts=six_b.layouts[:1] + six_b.layouts[-2:])
    job = job_of(load, Network(5e8))
    found = scale_out(job, 4)
    assert found.chosen.stages == 1, "one block cannot be shared"
    assert found.chosen.waits_for_network
    rows = int(next(text for text in found.advice if "--batch-size" in text).split()[-1])
    times = rows // RECIPE.batch_size
    for factor, waits in ((times // 2, True), (times, False)):
        tokens = factor * load.step.most
        more = load.with_step(most=tokens, mean=tokens, targets=tokens)
        assert forecast_share(replace(job, workload=more), 1, 4).waits_for_network is waits


@pytest.mark.thorough
def test_fastest_fitting_share_is_chosen(six_b: Workload) -> None:
    for network in (FAST, Network(1e9), SLOW):
        for disk in (10**12, 100 * GB, 60 * GB):
            found = scale_out(job_of(six_b, network, have=replace(FREE, disk=disk)), 8)
            assert [(each.stages, each.replicas) for each in found.shares] == [(1, 8), (2, 4), (4, 2), (8, 1)]
            fitting = [each for each in found.shares if each.fits]
            assert found.chosen.seconds_per_step == min(each.seconds_per_step for each in fitting)
            assert found.problem is None
            assert all(node.disk_bytes <= disk for node in found.chosen.nodes)


@pytest.mark.thorough
def test_four_machines_fit_larger_model(six_b: Workload) -> None:
    have = replace(FREE, disk=75 * GB)
    found = scale_out(job_of(six_b, have=have), 4)
    assert not found.alone.fits
    assert [each.name for each in found.shares if each.fits] == ["layers"]
    assert found.chosen.stages == 4
    assert found.problem is None
    tight = scale_out(job_of(six_b, have=replace(FREE, disk=20 * GB)), 4)
    assert str(tight.problem).startswith("does not fit on 4 machines: with layers shared, of one of them it needs ")
    assert tight.to_dict()["chosen"] is None
    prime = scale_out(job_of(six_b, have=have), 17)
    assert "can share only rows" in str(prime.problem)


@pytest.mark.thorough
def test_chosen_share_names_its_options(six_b: Workload) -> None:
    found = scale_out(job_of(six_b), 4)
    assert [each.settings for each in (*found.shares, found.alone)] == [
        "--set share=rows",
        "--set share=layers --set replicas=2",
        "--set share=layers --set replicas=1",
        "",
    ]
    for share in found.shares:
        recipe = resolve({}, assignments=share.settings.replace("--set ", "").split()).recipe
        recipe = resolve_split(recipe, 4, 28)
        assert (recipe.share, recipe.replicas or 1) == (
            "rows" if share.stages == 1 else "layers",
            share.replicas if share.stages > 1 else 1,
        )
    answering = job_of(six_b, recipe=RECIPE.model_copy(update={"sample_rows": 1}))
    assert [each.name for each in scale_out(answering, 4).shares] == ["rows"], "which training would refuse"


def test_too_few_rows_are_rejected(six_b: Workload) -> None:
    assert list(divisions(12, 10)) == [(1, 12), (2, 6), (3, 4), (4, 3)]
    with pytest.raises(UsageError, match="--batch-size 128 or more"):
        scale_out(job_of(six_b), 1024)
    assert scale_out(job_of(six_b, recipe=RECIPE.model_copy(update={"batch_size": 128})), 1024).shares[0].stages == 8


def test_few_micro_batches_get_advice(six_b: Workload) -> None:
    assert waiting_seconds(1, 28, 1, 100.0, 1.0) == 0
    # One micro-batch is on one of four machines at a time; sixteen come late only to begin with.
    assert waiting_seconds(4, 7, 1, 70.0, 0.0) == pytest.approx(3 * 70 + 3 * 10)
    assert waiting_seconds(4, 7, 16, 70.0, 0.0) == pytest.approx(3 * 70 / 112)
    few = six_b.with_step(micro_batch=16384)
    have = replace(FREE, device=10**12, host=10**12)
    share = forecast_share(job_of(few, have=have), 4, 1)
    assert share.micro_batches == 2
    assert share.bound == "waiting"
    (advice,) = advise(job_of(few, have=have), share, forecast_share(job_of(few), 1, 1))
    tokens = int(advice.split("micro_batch_tokens=")[1].split()[0])
    assert math.ceil(few.step.mean / tokens) >= 5
    better = forecast_share(job_of(few.with_step(micro_batch=tokens), have=have), 4, 1)
    assert better.seconds_per_step < 0.7 * share.seconds_per_step


def test_local_workloads_sum_to_whole(six_b: Workload) -> None:
    for size in (2, 4, 7):
        owners = assign_layers(six_b.layouts, size)
        parts = [local_workload(six_b, [i for i, owner in enumerate(owners) if owner == rank]) for rank in range(size)]
        assert sum(part.num_parameters for part in parts) == six_b.num_parameters
        assert sum(part.forward_seconds for part in parts) == pytest.approx(six_b.forward_seconds)
        for kept in (0, 1):
            whole = six_b.backward_seconds(size * kept)
            assert sum(part.backward_seconds(kept) for part in parts) == pytest.approx(whole)
        assert sum(part.boundary_bytes() for part in parts) == six_b.boundary_bytes()


@pytest.mark.thorough
def test_two_small_cards_need_no_disk() -> None:
    device = find_device("RTX 4090 24GB")
    published = find_published("Cerebras-GPT-2.7B")
    assert published is not None
    selection = select(published.architecture, Recipe())
    load = Workload(
        selection.trained, 2560, torch.bfloat16, StepTokens(2048, 8192, 8192, 8192), None, RowLengths(1024),
        frozen=selection.frozen, layers=selection.build(),
    )  # fmt: skip
    have = Free(int(0.93 * device.memory_bytes), 27 * GB, 10**12, is_shared=False)
    rates = Rates(device.rates(), DiskRates(read=3e9, write=2e9, mixed=3e9))
    found = scale_out(Job(Recipe(batch_size=8), load, have, rates, FAST), 2)
    assert found.alone.nodes[0].plan.timeline is not None
    assert found.alone.seconds_per_step == pytest.approx(found.alone.nodes[0].plan.costs.seconds_per_step)
    assert "disk" in str(found.alone.nodes[0].plan.placement)
    assert found.chosen.name == "layers"
    assert all("disk" not in str(node.plan.placement) for node in found.chosen.nodes)
    assert found.speedup(found.chosen) > 2


@pytest.mark.thorough
def test_plan_nodes_marks_chosen_share(shell, six_b: Workload) -> None:
    line = "plan --recipe summarization --model cerebras/Cerebras-GPT-111M --max-steps 3"
    alone, values = shell(f"{line} --json").json, shell(f"{line} --nodes 4 --network 1Gbit --json").json
    machines = values["machines"]
    assert {key: value for key, value in values.items() if key in alone and key != "have"}.keys() == alone.keys()
    assert (machines["num_nodes"], machines["network"]["bits"]) == (4, 1e9)
    assert [share["name"] for share in machines["shares"]] == ["rows", "layers x rows", "layers"]
    chosen = machines["shares"][machines["chosen"]]
    assert chosen["seconds_per_step"] == min(share["seconds_per_step"] for share in machines["shares"])
    assert machines["alone"]["seconds_per_step"] == pytest.approx(alone["seconds_per_step"], rel=0.2)
    for name in ("speedup", "memory_bytes", "disk_bytes", "sent", "received", "start_seconds", "nodes", "owners"):
        assert chosen[name] is not None
    said = shell(f"{line} --nodes 4 --network 1Gbit").said
    for phrase in (
        "What it will cost on 4 machines like this one, 1Gbit between them",
        ", chosen",
        "Chosen:",
        "bound by",
    ):
        assert phrase in said, phrase
    refused = shell(f"{line} --nodes 4 --network 10GB")
    assert refused.code == 2
    assert "such as 10Gbit" in refused.err
    assert shell(f"{line} --nodes 0").code == 2


@pytest.mark.thorough
def test_machine_table_fits_terminal(six_b: Workload) -> None:
    def shown(network: Network, have: Free = FREE) -> str:
        console = Console(file=io.StringIO(), width=80)
        show_machines(console, scale_out(job_of(six_b, network, have=have), 8))
        return console.file.getvalue()  # type: ignore[attr-defined]

    for text in (shown(FAST), shown(SLOW), shown(SLOW, replace(FREE, disk=80 * GB))):
        assert max(map(len, text.splitlines())) <= 80, text
    assert "does not fit" in text
