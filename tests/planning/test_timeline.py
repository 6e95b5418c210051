"""Replayed steps in virtual time, on accelerators and on a CPU with a disk."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import pytest
import torch

from gptj_ft.config.options import Recipe
from gptj_ft.errors import UsageError
from gptj_ft.models.gptj import GPTJConfig, build_layers
from gptj_ft.models.layout import Layout
from gptj_ft.planning.constants import SYSTEM_BYTES
from gptj_ft.planning.costs import training_passes
from gptj_ft.planning.devices import DEVICES, LINKS, find_device
from gptj_ft.planning.kernel_times import with_kernel_times
from gptj_ft.planning.layer_times import NOTHING
from gptj_ft.planning.memory import Free, forecast_memory
from gptj_ft.planning.plan import NUM_REPLAYED, SAME, Plan, candidates, choose, forecast, kinds_on_disk
from gptj_ft.planning.probe import ComputeRates, DiskRates, Rates
from gptj_ft.planning.step_replay import ScheduleInputs
from gptj_ft.planning.timeline import Timeline, replay
from gptj_ft.planning.workload import LayerTimes, ModelTimes, RowLengths, SecondsByTokens, StepTokens, Workload
from gptj_ft.streaming.buffers import BufferBudget
from gptj_ft.streaming.stores.placement import Place, Placement, training_dtypes

BF16 = torch.bfloat16
RATES = Rates(
    ComputeRates(
        fp32=1e13, bf16=4e13, fp32_narrow=1e13, bf16_narrow=4e13, memory=5e11, near_memory=5e11,
        attention=2e13, to_device=1e10, from_device=1e10,
    ),
    DiskRates(read=2e9, write=2e9, mixed=2e9),
)  # fmt: skip
ON_HOST, ON_DEVICE = Placement("host", "host"), Placement("device", "device")


def make_workload(tokens: int, blocks: int = 4) -> Workload:
    """Return blocks of GPT-J, documents of 1,024 tokens, micro-batches of 2,048."""
    layers = build_layers(GPTJConfig(n_layer=blocks))
    layouts = [Layout.of(layer) for layer in layers]
    return Workload(
        layouts, 4096, BF16, StepTokens(2048, tokens, tokens, tokens), None, RowLengths(1024), layers=layers
    )


def schedule(placement: Placement = ON_HOST, clips: bool = True, **budget: int) -> ScheduleInputs:
    stored = {kind: dtype for kind, dtype in training_dtypes(BF16, BF16, BF16).items() if clips or kind != "grad"}
    return ScheduleInputs(placement, tuple(stored.items()), BufferBudget(**budget))


def test_resident_model_never_waits() -> None:
    timeline = replay(make_workload(8192), schedule(ON_DEVICE), RATES)
    assert (timeline.step.link_in, timeline.step.link_out, timeline.step.disk) == (0, 0, 0)
    assert timeline.stall < 0.01
    assert timeline.seconds == pytest.approx(timeline.step.compute, rel=0.01)
    flops = make_workload(8192).flops().hardware
    assert flops / 4e13 < timeline.step.compute < 1.6 * flops / 4e13, (
        "products, attention, and operations bound by memory"
    )


@pytest.mark.parametrize("placement", [ON_DEVICE, ON_HOST])
def test_estimate_takes_the_seconds_of_the_same_kernels(placement: Placement) -> None:
    workload = with_kernel_times(make_workload(8192), RATES.compute)
    inputs = schedule(placement, num_kept_layers=2)
    forward, backward, _ = training_passes(workload, inputs, on_cpu=False)
    timeline = replay(workload, inputs, RATES)
    # Besides, the replay starts each kernel of an update.
    assert forward.compute_seconds(RATES) == pytest.approx(timeline.forward.compute, rel=0.05)
    assert backward.compute_seconds(RATES) == pytest.approx(timeline.backward.compute, rel=3e-3)


@pytest.mark.parametrize("clips", [True, False])
def test_replay_moves_the_counted_bytes(clips: bool) -> None:
    workload, inputs = make_workload(2048), schedule(clips=clips)
    timeline = replay(workload, inputs, RATES)
    passes = training_passes(with_kernel_times(workload, RATES.compute), inputs, on_cpu=False)[:2]
    # The replay adds the time to start each copy.
    assert timeline.step.link_in * 1e10 == pytest.approx(sum(each.read["host"] for each in passes), rel=0.015)
    assert timeline.step.link_out * 1e10 == pytest.approx(
        sum(each.written.get("host", 0) for each in passes), rel=0.015
    )


@pytest.mark.parametrize("place", ["host", "disk"])
def test_slow_transfers_bound_the_step(place: Place) -> None:
    slow = replace(RATES, compute=replace(RATES.compute, to_device=2e9, from_device=2e9))
    timeline = replay(make_workload(2048), schedule(Placement(place, place)), slow)
    assert (
        timeline.step.bound
        == max(timeline.step.link_in, timeline.step.link_out, timeline.step.disk)
        > timeline.step.compute
    )
    assert timeline.share_of_bound > 0.55, "each pass waits for its own transfers"
    assert max(timeline.waits, key=lambda name: timeline.waits[name]) == {"host": "link", "disk": "disk"}[place]
    assert timeline.stall == pytest.approx(1 - timeline.step.compute / timeline.seconds, abs=0.02)


def test_suggested_tokens_hide_the_transfers() -> None:
    recipe = Recipe(moments="bf16", gradients="bf16", weights="host", optimizer_state="host", activations="recompute")
    free = Free(10**11, 10**12, 10**14, is_shared=False)

    def planned(tokens: int) -> tuple[Timeline, int]:
        workload = make_workload(tokens)
        plan = choose(recipe, workload, free, RATES)
        assert plan.timeline is not None
        assert plan.costs.seconds_per_step == plan.timeline.seconds
        return plan.timeline, plan.tokens_to_hide_stall

    short, more = planned(1024)
    assert short.stall > 0.2
    assert more > 0
    long, none = planned(1024 + more)
    assert long.stall < 0.05
    assert long.share_of_bound > 0.95
    assert none < 0.1 * more


def gptj_6b(device: str, tokens: int = 16384, **options: object) -> tuple[Recipe, Workload, Free, Rates]:
    """Return GPT-J 6B on a published device, with rows of 1,024 tokens and enough host memory."""
    card = find_device(device)
    free = Free(card.memory_bytes, 256 * 10**9, 2 * 10**12, is_shared=False)
    workload = make_workload(tokens, blocks=28).with_step(micro_batch=4096)
    return Recipe.model_validate(options), workload, free, Rates(card.rates(), RATES.disk)


@cache
def plan_of_gptj_6b(device: str) -> Plan:
    return choose(*gptj_6b(device))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("device", ["RTX 4060 8GB", "RTX 4090 24GB", "A100 80GB", "H100 80GB", "H200 141GB"])
def test_gptj_6b_step_reaches_its_bound(device: str) -> None:
    timeline = plan_of_gptj_6b(device).timeline
    assert timeline is not None
    assert timeline.share_by_pass > 0.935  # the program's time for chunks and launches takes 6 % on the fastest cards
    assert timeline.share_of_bound <= timeline.share_by_pass < 1.0001
    for name, number in asdict(timeline.step).items():
        assert number == pytest.approx(sum(getattr(each, name) for each in (timeline.forward, timeline.backward)))
    if not timeline.step.moving:
        return
    forward = timeline.forward
    assert forward.moving > timeline.backward.moving, "with clipping, forward applies all updates"
    assert (timeline.share_of_bound > 0.95) == (forward.compute > forward.moving)


@pytest.mark.thorough
def test_suggested_tokens_hide_transfers_of_gptj_6b() -> None:
    plan = plan_of_gptj_6b("RTX 4090 24GB")
    assert plan.timeline is not None
    assert plan.timeline.stall > 0.1
    assert 0 < plan.tokens_to_hide_stall < 16384
    more = choose(*gptj_6b("RTX 4090 24GB", 16384 + plan.tokens_to_hide_stall)).timeline
    assert more is not None
    assert more.stall < 0.03


@pytest.mark.thorough
@pytest.mark.parametrize("device", ["RTX 4090 24GB", pytest.param("H200 141GB", marks=pytest.mark.slow)])
def test_accelerator_gets_placement_with_fastest_replay(device: str) -> None:
    # With a split master, streamed weights move more bytes than resident ones: the gain is smaller.
    recipe, workload, free, rates = gptj_6b(device, master="fp32")
    plan = choose(recipe, workload, free, rates)
    assert not kinds_on_disk(plan.placement)
    seconds = {}
    for each in candidates(recipe, free):
        if not kinds_on_disk(each) and not forecast_memory(each, workload, recipe, free).lack:
            seconds[each] = forecast(each, workload, recipe, rates, free).costs.seconds_per_step
    assert len(seconds) > NUM_REPLAYED
    assert plan.costs.seconds_per_step == seconds[plan.placement] <= (1 + SAME) * min(seconds.values())
    assert seconds[plan.placement] < 0.96 * next(iter(seconds.values())), (
        "streamed weights leave device memory for kept graphs"
    )
    inputs = choose(recipe.model_copy(update={"weights": "device"}), workload, free, rates)
    assert inputs.placement.weights == "device"


@pytest.mark.thorough
def test_memory_is_preferred_to_any_disk() -> None:
    recipe, workload, free, rates = gptj_6b("RTX 4090 24GB")
    rates = replace(rates, disk=DiskRates(read=1e12, write=1e12, mixed=1e12))
    placements = {
        host: choose(recipe, workload, replace(free, host=host * 10**9), rates).placement for host in (105, 60)
    }
    assert (placements[105].weights, placements[105].optimizer_state) == ("device", "host"), (
        "the device has no room for both"
    )
    assert not kinds_on_disk(placements[105])
    assert kinds_on_disk(placements[60]) == {"optimizer_state"}


def test_uneven_micro_batches_leave_the_device() -> None:
    away = replay(make_workload(12799), schedule(replace(ON_HOST, boundaries="host")), RATES)
    assert away.step.link_out == pytest.approx(
        replay(make_workload(12800), schedule(replace(ON_HOST, boundaries="host")), RATES).step.link_out, rel=0.01
    )


def test_kept_graphs_and_no_clipping_save_time() -> None:
    workload = make_workload(4096)
    plain, kept, unclipped = (
        replay(workload, each, RATES) for each in (schedule(), schedule(num_kept_layers=4), schedule(clips=False))
    )
    assert kept.step.compute < 0.9 * plain.step.compute
    assert unclipped.step.link_out < plain.step.link_out


def test_boundaries_in_host_memory_cross_the_link() -> None:
    workload = make_workload(8192)
    resident, away = (
        replay(workload, schedule(replace(ON_HOST, boundaries=place)), RATES) for place in ("device", "host")
    )
    moved = 4 * 8192 * 4096 * 2 / 1e10
    assert away.step.link_out - resident.step.link_out == pytest.approx(moved, rel=0.02)


FREE_MEMORY = replace(RATES.compute, memory=1e30, near_memory=1e30)
FREE_DISK = DiskRates(1e30, 1e30, 1e30)


def timed_workload(tokens: int = 4096) -> Workload:
    """Return the same blocks with times: forward 0.01 s and 0.1 ms per token, backward twice as long."""
    workload = make_workload(tokens)
    block = LayerTimes(SecondsByTokens(0.01, 1e-4), SecondsByTokens(0.02, 2e-4))
    return replace(workload, times=ModelTimes((NOTHING, *(block,) * 4, block)))


def on_cpu(**rates: object) -> Rates:
    return replace(Rates(FREE_MEMORY, FREE_DISK, on_cpu=True), **rates)


@pytest.mark.parametrize(("kept", "micro_batches"), [(0, 0.0), (2, 0.0), (0, 2.6)])
def test_cpu_replay_takes_the_timed_seconds(kept: int, micro_batches: float) -> None:
    workload = timed_workload().with_step(micro_batches=micro_batches)
    timeline = replay(workload, schedule(Placement("disk", "disk"), num_kept_layers=kept), on_cpu())
    assert timeline.forward.compute == pytest.approx(workload.forward_seconds, rel=0.02)
    assert timeline.backward.compute == pytest.approx(workload.backward_seconds(kept), rel=0.02)
    assert timeline.stall < 1e-3


def test_cpu_transfers_slow_the_computation() -> None:
    workload, each = timed_workload(tokens=16384), 1e-10
    costly = on_cpu(disk=replace(RATES.disk, read_cpu=each, write_cpu=2 * each))
    inputs = schedule(Placement("disk", "disk"))
    passes = training_passes(workload, inputs, on_cpu=True)[:2]
    moving = each * sum(one.read["disk"] + 2 * one.written["disk"] for one in passes)
    timeline, free = (replay(workload, inputs, rates) for rates in (costly, on_cpu(disk=RATES.disk)))
    assert 0.7 * moving < timeline.step.compute - free.step.compute < moving, "idle time is not slowed down"


def test_cpu_transfers_slow_updates() -> None:
    workload, inputs = timed_workload(), schedule(Placement("disk", "disk"))
    compute = replace(FREE_MEMORY, memory=1e10)
    disks = (replace(RATES.disk, update_delay=delay) for delay in (0.0, 1e-10))
    alone, concurrent = (replay(workload, inputs, on_cpu(compute=compute, disk=disk)) for disk in disks)
    passes = training_passes(workload, inputs, on_cpu=True)[:2]
    moved = [sum((*each.read.values(), *each.written.values())) for each in passes]
    assert 0.5e-10 * moved[0] < concurrent.forward.compute - alone.forward.compute < 1e-10 * moved[0]
    assert concurrent.backward.compute - alone.backward.compute < 0.5e-10 * moved[1], "mostly products"


def test_cpu_disk_step_overlaps_imperfectly() -> None:
    # The embedding's update comes before any computation, and its gradient after all of it.
    recipe = Recipe(moments="bf16", gradients="bf16", weights="disk", optimizer_state="disk", activations="recompute")
    free, workload = Free(10**11, 10**11, 10**13, is_shared=True), timed_workload()
    plan = choose(recipe, workload, free, on_cpu(disk=RATES.disk))
    assert plan.timeline is not None
    assert plan.costs.seconds_per_step == plan.timeline.seconds
    overlapped = forecast(plan.placement, workload, recipe, plan.rates, free).estimate.seconds_per_step
    assert 1.05 * overlapped < plan.timeline.seconds < 2 * overlapped
    in_memory = recipe.model_copy(update={"weights": "device", "optimizer_state": "device"})
    assert choose(in_memory, workload, free, plan.rates).timeline is None


def test_timed_checkpoints_follow_the_replayed_step() -> None:
    recipe, free = Recipe(save_minutes=0.1), Free(10**11, 10**11, 10**13, is_shared=False)
    plan = choose(recipe, replace(make_workload(2048), num_steps=10_000), free, RATES)
    assert plan.costs.seconds_per_step != plan.estimate.seconds_per_step
    assert plan.costs.checkpoints.number == int(10_000 * plan.costs.seconds_per_step / 6)


def test_replay_is_deterministic() -> None:
    assert replay(make_workload(2048), schedule(), RATES) == replay(make_workload(2048), schedule(), RATES)


def test_published_devices_have_common_names() -> None:
    for name in ("RTX 4060 8GB", "rtx4060", "GeForce RTX 4060", "NVIDIA 4060 8 GB", "4060"):
        assert find_device(name).name == "RTX 4060 8GB", name
    assert find_device("RTX 4060 Ti").memory_gib == 16
    with pytest.raises(
        UsageError, match="'RTX 5060 8GB' is not a device that is known by name: did you mean 'RTX 4060"
    ):
        find_device("RTX 5060 8GB")
    with pytest.raises(UsageError, match="names several devices: did you mean 'A100 40GB', 'A100 80GB'"):
        find_device("a100")


def test_published_rates_are_plausible() -> None:
    for name, device in DEVICES.items():
        assert name.endswith(f" {device.memory_gib}GB")
        assert device.source.startswith("https://")
        assert 1.5 < device.half_tflops / device.fp32_tflops < 20
        rates = device.rates()
        assert rates.bf16 < device.half_tflops * 1e12
        assert rates.to_device < LINKS[device.link] * 1e9


@pytest.mark.thorough
def test_plan_forecasts_a_published_device(shell, tmp_path: Path) -> None:
    line = "plan --recipe summarization --model cerebras/Cerebras-GPT-1.3B --host-memory 64GB --disk-space 200GB"
    sized = f"{line} --max-length 512 --set batch_size=4"
    done = shell(f"{sized} --device 'RTX 4060 8GB' --json")
    assert done.code == 0, done.err
    values = done.json
    assert values["device"] == "RTX 4060 8GB"
    assert values["precision"] == "bf16"
    timeline = values["timeline"]
    assert timeline["tokens"] == 4 * 512
    assert timeline["seconds"] == values["seconds_per_step"]
    assert timeline["tokens_per_second"] == pytest.approx(timeline["tokens"] / timeline["seconds"])
    memory = {need["resource"]: need for need in values["needs"]}
    assert memory["device memory"]["need"] <= memory["device memory"]["have"] < 8 * 2**30
    assert memory["host memory"]["have"] == 64 * 10**9 - SYSTEM_BYTES
    text = shell(f"{sized} --device t4").said
    for phrase in ("T4 16GB", "fp16", "tokens/s", "fractions of published rates", "passes", "forward: compute"):
        assert phrase in text, phrase
    for name, near in (("RTX 4061 8GB", "'RTX 4060 8GB'"), ("a100", "'A100 40GB'")):
        refused = shell(f"{line} --device '{name}'")
        assert refused.code == 2
        assert near in refused.err
    assert shell(f"{line} --device t4 --precision bf16").code == 2
    trained = shell("finetune --recipe summarization --data rows.jsonl --model tiny --device 'RTX 4060 8GB'")
    assert trained.code == 2, "a device that is not in this machine cannot train"
