"""Compute the hours for 10,000 rows on several machines: the tables in README.md and docs/planning.md.

    python benchmarks/hours.py

Rows as in DialogSum (260 tokens, 36 of them trained on), one epoch, 32 rows per step, GPT-J 6B. Computed by the planner
that `gptj-ft plan` runs, from the rates below. They are assumptions, well below the data sheets; `gptj-ft plan`
measures those of your machine. Only the rates of the first two machines, and their seconds for a step of 2,048 tokens,
were measured (benchmarks/RESULTS.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from unittest.mock import patch

from gptj_ft.config.resolve import resolve
from gptj_ft.models.published import find_published
from gptj_ft.models.trainable import select
from gptj_ft.planning.machine_profile import BF16_GAIN
from gptj_ft.planning.memory import Free
from gptj_ft.planning.plan import Plan, choose
from gptj_ft.planning.probe import ComputeRates, DiskRates, Rates
from gptj_ft.planning.workload import RowLengths, StepTokens, Workload
from gptj_ft.system.dtypes import PRECISIONS

ROWS, ROW_TOKENS, ROW_TARGETS, BATCH = 10_000, 260, 36, 32
GB, TERA = 10**9, 10**12
METHODS = ("full", "lora")
MEASURED_STEP_TOKENS = 2048  # RESULTS.md, "All 6 billion parameters in 6 GiB"


@dataclass(frozen=True)
class Machine:
    """A machine and its rates.

    Attributes:
        name: what it is, in a few words.
        ram: free RAM, bytes.
        gpu_memory: free GPU memory, bytes; 0: computes on the CPU.
        fp32, bf16: FLOP/s of matrix products at GPT-J's width.
        memory: bytes/s read and written in the memory of the device.
        link: bytes/s between RAM and GPU, each way.
        disk: bytes/s of reads and writes.
        step_seconds: seconds that a step of `MEASURED_STEP_TOKENS` took on such a machine; 0: not measured.
    """

    name: str
    ram: int
    gpu_memory: int
    fp32: float
    bf16: float
    memory: float
    link: float
    disk: float
    step_seconds: int = 0

    @property
    def precision(self) -> str:
        return "bf16" if self.bf16 >= BF16_GAIN * self.fp32 else "fp32"

    @property
    def products(self) -> str:
        return f"{max(self.fp32, self.bf16) / TERA:.3g} TFLOP/s {self.precision}"

    @property
    def rates(self) -> Rates:
        fastest = max(self.fp32, self.bf16)
        compute = ComputeRates(
            fp32=self.fp32,
            bf16=self.bf16,
            fp32_narrow=self.fp32,
            bf16_narrow=self.bf16,
            memory=self.memory,
            near_memory=self.memory,
            attention=fastest / 5,
            to_device=self.link,
            from_device=self.link,
        )
        cpu = 0.0 if self.gpu_memory else 0.1 / GB  # seconds of a core per byte moved
        return Rates(compute, DiskRates(self.disk, self.disk, self.disk, cpu, cpu), on_cpu=not self.gpu_memory)

    @property
    def free(self) -> Free:
        if self.gpu_memory:
            return Free.of_accelerator(self.gpu_memory, self.ram, 10 * TERA)
        return Free(self.ram, self.ram, 10 * TERA, is_shared=True)


MACHINES = [
    Machine("2 CPU cores (AVX2), 24 GB RAM", 22 * GB, 0, 0.145 * TERA, 0.02 * TERA, 37 * GB, 18 * GB, 1.35 * GB, 649),
    Machine("2 CPU cores (AVX-512), 24 GB RAM", 22 * GB, 0, 0.4 * TERA, 0.75 * TERA, 50 * GB, 25 * GB, 3.6 * GB, 178),
    Machine("8 CPU cores (AVX2), 32 GB RAM", 28 * GB, 0, 0.5 * TERA, 0.07 * TERA, 60 * GB, 30 * GB, 3 * GB),
    Machine("32 CPU cores (AMX), 256 GB RAM", 240 * GB, 0, 2 * TERA, 8 * TERA, 250 * GB, 100 * GB, 3 * GB),
    Machine("8 GB GPU, 32 GB RAM", 28 * GB, 7 * GB, 7 * TERA, 12 * TERA, 250 * GB, 10 * GB, 3 * GB),
    Machine("24 GB GPU, 64 GB RAM", 60 * GB, 22 * GB, 30 * TERA, 60 * TERA, 900 * GB, 20 * GB, 5 * GB),
    Machine("80 GB GPU, 256 GB RAM", 240 * GB, 78 * GB, 30 * TERA, 300 * TERA, 3000 * GB, 40 * GB, 5 * GB),
]


@cache
def plan_for(machine: Machine, method: str) -> Plan:
    """Return the plan of the run on a machine."""
    options = {"recipe": "summarization", "method": method, "batch_size": BATCH, "epochs": 1.0}
    recipe = resolve(options, environment={}).recipe
    published = find_published("EleutherAI/gpt-j-6b")
    assert published is not None
    selection = select(published.architecture, recipe)
    num_steps = recipe.num_steps(ROWS)
    load = Workload(
        layouts=selection.trained,
        frozen=selection.frozen,
        layers=selection.build(),
        width=4096,
        dtype=PRECISIONS[machine.precision],
        step=StepTokens(
            recipe.micro_batch_tokens,
            BATCH * ROW_TOKENS,
            mean=ROWS * ROW_TOKENS / num_steps,
            targets=ROWS * ROW_TARGETS / num_steps,
        ),
        num_steps=num_steps,
        rows=RowLengths(ROW_TOKENS),
    )
    # A plan asks this machine's processor for its unit; here it is another's.
    with patch("gptj_ft.planning.memory.bf16_unit", lambda: "AMX" if "AMX" in machine.name else "AVX-512"):
        return choose(recipe, load, machine.free, machine.rates)


def duration(plan: Plan) -> str:
    """Format the duration of a run in minutes, hours or days."""
    return rounded((plan.costs.seconds or 0.0) / 3600)


def rounded(hours: float) -> str:
    """Write a duration with two significant digits."""
    if hours < 1:
        return f"{60 * hours:.0f} min"
    return f"{hours:.2g} h" if hours < 72 else f"{hours / 24:.2g} days"


def table() -> str:
    """Return the table of README.md."""
    lines = ["| machine | products | all parameters | LoRA | |", "|---|---|---|---|---|"]
    num_steps = ROWS * ROW_TOKENS / MEASURED_STEP_TOKENS
    for machine in MACHINES:
        full, lora = (duration(plan_for(machine, method)) for method in METHODS)
        head = f"| {machine.name} | {machine.products} |"
        if machine.step_seconds:
            measured = rounded(num_steps * machine.step_seconds / 3600)
            lines.append(f"{head} {measured} | | a step measured, times their number |")
        lines.append(f"{head} {full} | {lora} | forecast |")
    return "\n".join(lines)


def details() -> str:
    """Return the table of docs/planning.md: rates, placements, memory and disk space."""
    lines = [
        "| machine | products | disk | link | method | placement | GPU memory | RAM | disk space | a step | all |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for machine in MACHINES:
        for method in METHODS:
            plan = plan_for(machine, method)
            weights = plan.placement.of("frozen" if method == "lora" else "weight")
            state = "adapters" if method == "lora" else "state"
            placement = f"weights on {weights}, {state} on {plan.placement.of('exp_avg')}"
            if number := len(plan.placement.in_memory):
                placement += f" ({number} of {len(plan.workload.layouts) - 2} blocks in RAM)"
            gpu, ram = plan.device_bytes, plan.host_bytes
            memory = f"{gpu / GB:.0f} GB | {ram / GB:.0f} GB" if machine.gpu_memory else f"| {(gpu + ram) / GB:.0f} GB"
            link = f"{machine.link / GB:.0f} GB/s" if machine.gpu_memory else ""
            seconds = plan.costs.seconds_per_step
            cells = [
                machine.name, machine.products, f"{machine.disk / GB:.3g} GB/s", link, method, placement, memory,
                f"{plan.disk_bytes / GB:.0f} GB", f"{seconds:.{seconds < 10:d}f} s", duration(plan),
            ]  # fmt: skip
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(), details(), sep="\n\n")
