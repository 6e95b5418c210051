"""Run a module with the device registered: ``python -m support.accelerator gptj_ft finetune --device sim ...``.

The rates of the simulated device are assumed, not measured.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence

from support import accelerator
from support.accelerator import SCHEDULES, Faults


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m support.accelerator", description=__doc__.splitlines()[0])
    parser.add_argument("--schedule", choices=SCHEDULES, default="random", help="order of the device's work")
    parser.add_argument("--devices", type=int, default=1, help="number of devices")
    parser.add_argument("--memory", type=int, default=80 << 30, help="bytes of each")
    parser.add_argument("--lockable", type=int, help="bytes of host memory that can be locked")
    parser.add_argument("--failing-allocation", type=int, help="number of the allocation that finds no memory")
    parser.add_argument("--lost-after", type=int, help="operations after which the device is lost")
    parser.add_argument("module", help="module to run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    chosen = parser.parse_args(arguments)
    faults = Faults(chosen.lockable, chosen.failing_allocation, chosen.lost_after)
    accelerator.install()
    accelerator.start(chosen.schedule, num_devices=chosen.devices, total_bytes=chosen.memory, faults=faults)
    assume_rates()
    sys.argv = [chosen.module, *chosen.arguments]
    runpy.run_module(chosen.module, run_name="__main__", alter_sys=True)


def assume_rates() -> None:
    """Replace measurements of the machine and the device by assumed rates."""
    import conftest
    from support.rates import layers_by

    from gptj_ft.planning import layer_times, probe

    rates = conftest.assumed_rates()
    probe.measure_compute = lambda device: rates.compute  # type: ignore[assignment]
    layer_times.time_kinds = layers_by(rates.compute)
    probe.measure_disk = lambda folder: rates.disk  # type: ignore[assignment]
    probe.core_load, probe.meter_others = (lambda: 0.0), (lambda: lambda: 0.0)  # other tests are no load


if __name__ == "__main__":
    main(sys.argv[1:])
