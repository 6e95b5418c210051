"""Forecast a step of GPT-J 6B on every published card with 32, 64 and 128 GB of RAM.

    python benchmarks/cards.py

Rows of 1,024 tokens, 16,384 tokens a step, default options; the disk reads and writes 5 GB/s. Nothing is measured: each
step is replayed on the card's published rates. The third column is the same plan with nothing of a kind that is on disk
in memory. Prints Markdown.
"""

from __future__ import annotations

from dataclasses import replace

from gptj_ft.config.options import Recipe
from gptj_ft.errors import ResourceError
from gptj_ft.models.gptj import GPTJConfig, build_layers
from gptj_ft.models.layout import Layout
from gptj_ft.planning.devices import DEVICES, PublishedDevice
from gptj_ft.planning.memory import Free
from gptj_ft.planning.plan import choose, forecast
from gptj_ft.planning.probe import DiskRates, Rates
from gptj_ft.planning.workload import RowLengths, StepTokens, Workload

GB = 10**9
DISK = DiskRates(read=5e9, write=4e9, mixed=5e9)
LAYERS = build_layers(GPTJConfig())


def main() -> None:
    """Print a row for each card and size of RAM."""
    print("| card | RAM | all on disk | a step | blocks in RAM | written to disk |\n|---|---|---|---|---|---|")
    for card in DEVICES.values():
        for ram in (32, 64, 128):
            print(row(card, ram), flush=True)


def row(card: PublishedDevice, ram: int) -> str:
    """Return the table's row of a card and gigabytes of RAM."""
    tokens, rates = StepTokens(2048, 16384, 16384.0, 4096.0), Rates(card.rates(), DISK)
    layouts = [Layout.of(layer) for layer in LAYERS]
    workload = Workload(layouts, 4096, card.half, tokens, 100, layers=LAYERS, rows=RowLengths(1024))
    free = Free.of_accelerator(card.memory_bytes, ram * GB, 10**13)
    try:
        plan = choose(Recipe(), workload, free, rates)
    except ResourceError:
        return f"| {card.name} | {ram} GB | does not fit | | | |"
    number = len(plan.placement.in_memory)
    before = ""
    if number:
        on_disk = replace(plan.placement, in_memory=())
        before = f"{forecast(on_disk, workload, Recipe(), rates, plan.have).costs.seconds_per_step:.1f} s"
    costs = plan.costs
    written = f"{costs.disk_bytes_written_per_step / GB:.0f} GB"
    return f"| {card.name} | {ram} GB | {before} | {costs.seconds_per_step:.1f} s | {number} of 28 | {written} |"


if __name__ == "__main__":
    main()
