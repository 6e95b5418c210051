"""Show the forecast of a run on several machines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console

from gptj_ft.cli.terminal.screen import panel, table, time_after
from gptj_ft.distributed.network import bits_text
from gptj_ft.distributed.scale_out import NodePass, ScaleOut, Share
from gptj_ft.planning.memory import Need
from gptj_ft.system.units import clock, gigabytes

BOUND = {"compute": "computing", "waiting": "waiting", "transfer": "moving bytes", "network": "network"}
SHOWN = 0.01  # least share of a pass to show


def show_machines(console: Console, forecast: ScaleOut, notes: Sequence[str] = ()) -> None:
    """Show a table of all ways to share the run, and a panel of the chosen one with notes on the model."""
    others = [share for share in forecast.shares if share is not forecast.alone]
    rows = [_row(forecast, share) for share in (forecast.alone, *others)]
    names = ("layers x rows", "a step", "speed", "memory", "disk", "network", "bound by")
    network = bits_text(forecast.network.bits)
    title = f"What it will cost on {forecast.num_nodes:,} machines like this one, {network} between them"
    table(console, title, [names, *rows], right=range(1, 6))
    verdict = "Chosen" if forecast.chosen.fits else "Nearest"
    panel(console, f"{verdict}: {_split(forecast.chosen)}", [*_chosen(forecast), *(("note", note) for note in notes)])


def _row(forecast: ScaleOut, share: Share) -> tuple[str, ...]:
    bound = BOUND[share.bound] if share.fits else "does not fit"
    own = f"{share.stages} x {share.replicas}" if share is not forecast.alone else "alone"
    return (
        own + (", chosen" if share is forecast.chosen and share.fits else ""),
        _seconds(share.seconds_per_step),
        f"x {forecast.speedup(share):.2g}",
        gigabytes(share.most("memory_bytes")),
        gigabytes(share.most("disk_bytes")),
        gigabytes(max(share.most("sent"), share.most("received"))),
        bound,
    )


def _chosen(forecast: ScaleOut) -> Iterator[tuple[str, str]]:
    share = forecast.chosen
    if share.settings:
        yield "options", share.settings
    yield "placement", f"{share.nodes[-1].plan.placement}, in {share.nodes[-1].plan.precision}"
    most: dict[str, Need] = {}
    for need in (need for node in share.nodes for need in node.needs):
        most[need.resource] = max(most.get(need.resource, need), need, key=lambda each: each.need)
    for need in most.values():
        yield need.resource, f"at most about {gigabytes(need.need)} of {gigabytes(need.have)} on a machine"
    sent, received = share.most("sent"), share.most("received")
    yield "network", f"a machine sends {gigabytes(sent)} and gets {gigabytes(received)} a step"
    yield "passes", f"forward {_parts(share.forward)}; backward {_parts(share.backward)}"
    if share.seconds is not None:
        yield "finish", f"after about {clock(share.seconds)}: {time_after(share.seconds)} if it starts now"
    copies = {"of the weights to machines without them": share.start_seconds, "of the results": share.end_seconds}
    copies["of the state of a run that one machine has begun"] = share.moved / forecast.network.rate
    texts = [f"{name} {_seconds(seconds)}" for name, seconds in copies.items() if seconds > 1]
    if texts:
        yield "copies", ", ".join(texts)
    for text in forecast.advice:
        yield "advice", text


def _split(share: Share) -> str:
    if share.name == "alone":
        return "one machine"
    parts = [f"{share.stages} machines share the layers"] if share.stages > 1 else []
    parts += [f"{share.replicas} of these share the rows" if parts else f"{share.replicas} machines share the rows"]
    return ", ".join(parts if share.replicas > 1 else parts[:1])


def _parts(each: NodePass) -> str:
    parts = {
        "computing": each.compute,
        "waiting for other machines": each.waiting,
        "moving bytes": each.transfer,
        "network": each.network,
    }
    return ", ".join(f"{name} {_seconds(part)}" for name, part in parts.items() if part > SHOWN * each.seconds)


def _seconds(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 10 else clock(seconds)
