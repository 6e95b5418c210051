"""Delay kernels and copies at random: correct synchronization gives the same bits under any timing."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gptj_ft.diagnostics.parity import HOST, Mismatch, Skipped, deterministic
from gptj_ft.diagnostics.trial import SmallModel, Trial, run
from gptj_ft.streaming.stores.base import LayerStore, Span
from gptj_ft.streaming.stores.placement import Placement
from gptj_ft.system.accelerator import StreamEvent, module_of, new_stream, on_stream, record_event
from gptj_ft.system.machine import choose_device

SHARE = 0.2  # of kernels and copies that are delayed
MAX_CYCLES = 300_000  # of the device's clock: 0.2 ms
NUM_SIDE_STREAMS = 4
FROZEN_ON_DISK = Placement("device", "device", "device", frozen="disk")
SANITIZER_SECONDS = 120
RACE = "CSAN detected a possible data race"  # torch/cuda/_sanitizer.py


class Shaker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Insert waits of random length before kernels, on the stream of each kernel; `store` delays copies.

    A delayed copy waits for an event of a side stream that only sleeps. So the delay adds no ordering between the copy
    and the computation: only the program's own events do.

    Args:
        device: device whose torch module has ``_sleep``.
    """

    def __init__(self, device: torch.device, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self._random = device, random.Random(seed)
        self._sleep = module_of(device)._sleep
        self._side_streams = [new_stream(device) for _ in range(NUM_SIDE_STREAMS)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._wait_at_random()
        return func(*args, **(kwargs or {}))

    def delay(self) -> list[StreamEvent]:
        """Return at random a late event, or none."""
        if self._random.random() >= SHARE:
            return []
        # On a stream that nothing else uses, so that the event depends only on its sleep.
        with on_stream(self._random.choice(self._side_streams)):
            self._sleep(self._random.randrange(MAX_CYCLES))
            return record_event(self._device)

    def store(self, store: LayerStore) -> LayerStore:
        return ShakenStore(store, self)

    def _wait_at_random(self) -> None:
        if self._random.random() < SHARE:
            self._sleep(self._random.randrange(MAX_CYCLES))


class ShakenStore(LayerStore):
    """Delay the transfers of another store at random, see `Shaker`."""

    def __init__(self, store: LayerStore, shaker: Shaker) -> None:
        self._store, self._shaker, self.digest_numel = store, shaker, store.digest_numel
        self.own, self.in_host, self.commit, self.then = store.own, store.in_host, store.commit, store.then  # type: ignore[method-assign]
        self.drain, self.close = store.drain, store.close  # type: ignore[method-assign]

    def read(self, span: Span, out: Tensor) -> Future[Tensor]:
        return self._store.read(self._delayed(span), out)

    def read_rows(self, span: Span, name: str, rows: Sequence[int], out: Tensor) -> None:
        self._store.read_rows(self._delayed(span), name, rows, out)

    def write(self, span: Span, values: Tensor, digests: Sequence[str] = ()) -> Future[None]:
        return self._store.write(self._delayed(span), values, digests)

    def _delayed(self, span: Span) -> Span:
        return span._replace(after=(*span.after, *self._shaker.delay()))


def shaken_trials(device: torch.device, precision: str, num_steps: int = 3) -> list[Trial]:
    """Return the configurations to train under random delays."""
    return [
        Trial(device, precision, HOST, num_deferred=2, num_steps=num_steps),
        Trial(device, precision, HOST, num_kept=1, is_clipped=precision == "fp16", num_steps=num_steps),
        Trial(device, precision, FROZEN_ON_DISK, is_lora=True, num_steps=num_steps),
    ]


def check_shaken(model: SmallModel, trials: Sequence[Trial], num_seeds: int, seconds: float) -> dict[str, Any]:
    """Train under random delays and compare the bits with a run without delays.

    Args:
        trials: configurations, alternating from seed to seed.
        seconds: time after which no further seed starts.

    Raises:
        Mismatch: different bits.
    """
    start, done = time.monotonic(), 0
    with deterministic():
        expected = [run(model, trial) for trial in trials]
        for seed in range(num_seeds):
            # Each configuration runs once, however long it takes.
            if seed >= len(trials) and time.monotonic() - start > seconds:
                break
            trial = trials[seed % len(trials)]
            shaker = Shaker(trial.device, seed)
            with shaker:
                outcome = run(model, trial, shaker.store)
            if difference := outcome.difference(expected[seed % len(trials)]):
                raise Mismatch(f"{trial}, with random waits of seed {seed}: {difference}, compared with none")
            done += 1
    return {"seeds": done}


def run_sanitizer(
    folder: Path, device: torch.device, precision: str, run_process: Callable[..., Any] = subprocess.run
) -> dict[str, Any]:
    """Train once under `torch.cuda._sanitizer` in a separate process; return the number of possible races.

    The sanitizer follows events and the kernels of the training and autograd threads, not the copies of other threads.

    Raises:
        Skipped: the process failed or took too long, which proves nothing about the device.
    """
    command = [sys.executable, "-P", "-m", __name__, str(folder), str(device), precision]
    environment = {**os.environ, "TORCH_CUDA_SANITIZER": "1"}
    try:
        done = run_process(
            command, capture_output=True, text=True, timeout=SANITIZER_SECONDS, check=False, env=environment
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Skipped(f"torch's sanitizer did not finish: {type(error).__name__}") from error
    races = done.stderr.count(RACE)
    if done.returncode and not races:
        raise Skipped(f"torch's sanitizer ended with {done.returncode}")
    places = re.findall(r'File ".*?(gptj_ft/[^"]+)", line (\d+)', done.stderr)
    return {"possible_races": races, "places": list(dict.fromkeys(map(":".join, places)))}


def _main(folder: str, device: str, precision: str) -> None:
    """Train in the sanitizer's process; torch starts the sanitizer when it is imported."""
    is_done = StreamEvent.done

    def done(event: StreamEvent) -> bool:
        if not is_done(event):
            return False
        event.synchronize()  # the sanitizer takes no notice of a query; this returns at once
        return True

    StreamEvent.done = done  # type: ignore[method-assign, assignment]
    for trial in shaken_trials(choose_device(device), precision, num_steps=2):
        run(SmallModel.read(Path(folder)), trial)


if __name__ == "__main__":
    _main(*sys.argv[1:])
