"""Replace `torch.cuda`: the module that `torch.get_device_module` returns for a simulated device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from support.accelerator.memory import Region, is_mapped
from support.accelerator.simulation import LOCK, NAME, Event, Operation, Stream, merge, now

OUT_OF_MEMORY, INVALID_VALUE, ALREADY_REGISTERED = 2, 1, 712  # cudaError_t
FREED = "host memory is freed", "it is unpinned later"


class CudaRuntime:
    """Stand for `cudart()`: registers host memory with the current device."""

    @staticmethod
    def cudaHostRegister(address: int, size: int, flags: int) -> int:
        simulation = now()
        simulation.check()
        simulation.touch(simulation.device_index)
        limit, locked = simulation.faults.lockable_bytes, sum(region.size for region in simulation.locked.values())
        if limit is not None and locked + size > limit:
            simulation.set_last_error("out of memory")
            return OUT_OF_MEMORY
        with LOCK:
            if any(other < address + size and address < other + own.size for other, own in simulation.locked.items()):
                simulation.set_last_error("part or all of the requested memory range is already mapped")
                return ALREADY_REGISTERED
            simulation.locked[address] = Region(size, has_data=False)
        return 0

    @staticmethod
    def cudaHostUnregister(address: int) -> int:
        with LOCK:
            if now().locked.pop(address, None) is None:
                now().set_last_error("invalid argument")
                return INVALID_VALUE
        if not is_mapped(address):
            now().races[FREED] += 1
            now().examples[FREED] = "the next memory there may be pinned before, which is refused"
        return 0


class Module:
    """Provide the functions of `torch.cuda` that a program may use; any other name raises."""

    Stream, Event = Stream, Event

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"torch.{NAME}.{name} is not simulated")

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return self.device_count() > 0

    def device_count(self) -> int:
        return len(now().devices)

    def current_device(self) -> int:
        return now().device_index

    def set_device(self, device: Any) -> None:
        if isinstance(device, torch.device) and device.index is None:  # as torch.cuda.set_device
            raise ValueError(f"Expected a torch.device with a specified index or an integer, but got:{device}")
        now().check()
        now().device_index = now().index_of(device)
        now().touch(now().device_index)

    @contextlib.contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before = now().device_index
        now().device_index = now().index_of(device)
        try:
            yield
        finally:
            now().device_index = before

    def current_stream(self, device: Any = None) -> Stream:
        return now().stream(now().index_of(device))

    def default_stream(self, device: Any = None) -> Stream:
        return now().defaults[now().index_of(device)]

    def set_stream(self, stream: Stream) -> None:
        now().set_stream(stream)

    @contextlib.contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        device = now().device_index
        before = now().stream(stream.device_index)
        now().set_stream(stream)
        try:
            yield
        finally:
            now().set_stream(before)
            now().device_index = device

    def synchronize(self, device: Any = None) -> None:
        simulation = now()
        simulation.check()
        simulation.note_wait("synchronize")
        index = simulation.index_of(device)
        with LOCK:
            for stream in [stream for stream in simulation.streams if stream.device_index == index]:
                stream.run_until(None)
                merge(simulation.clock(), stream.clock)
            simulation.check()

    def cudart(self) -> type[CudaRuntime]:
        return CudaRuntime

    def _sleep(self, cycles: int) -> None:
        now().check_launch()
        now().stream().put(Operation("sleep", kind="sleep"))

    # memory

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        now().check()
        found = now().devices[now().index_of(device)]
        return found.total_bytes - found.taken - found.allocated, found.total_bytes

    def memory_allocated(self, device: Any = None) -> int:
        return now().devices[now().index_of(device)].allocated

    def memory_reserved(self, device: Any = None) -> int:
        return now().devices[now().index_of(device)].reserved

    def max_memory_allocated(self, device: Any = None) -> int:
        return now().devices[now().index_of(device)].peak

    def max_memory_reserved(self, device: Any = None) -> int:
        return now().devices[now().index_of(device)].peak_reserved

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        found = now().devices[now().index_of(device)]
        found.peak, found.peak_reserved = found.allocated, found.reserved

    def empty_cache(self) -> None:
        for device in now().devices:
            device.reserved -= sum(region.size for pool in device.regions.values() for region in pool)
            device.regions.clear()

    def set_per_process_memory_fraction(self, fraction: float, device: Any = None) -> None:
        if not 0 <= fraction <= 1:
            raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
        now().devices[now().index_of(device)].limit = fraction

    # properties

    def get_device_name(self, device: Any = None) -> str:
        now().index_of(device)
        return "simulated accelerator"

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        return (8, 9) if now().supports_bf16 else (7, 5)

    def get_arch_list(self) -> list[str]:
        return ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90"]

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        found = now().devices[now().index_of(device)]
        major, minor = self.get_device_capability(device)
        return SimpleNamespace(
            name=self.get_device_name(device), total_memory=found.total_bytes, major=major, minor=minor,
            multi_processor_count=24,
        )  # fmt: skip

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        return now().supports_bf16

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, *([torch.bfloat16] if now().supports_bf16 else [])]

    # random numbers: a seed and a counter, as Philox has

    def manual_seed(self, seed: int) -> None:
        now().devices[now().device_index].seed, now().devices[now().device_index].offset = seed, 0

    def manual_seed_all(self, seed: int) -> None:
        for device in now().devices:
            device.seed, device.offset = seed, 0

    def get_rng_state(self, device: Any = NAME) -> torch.Tensor:
        found = now().devices[now().index_of(device)]
        return torch.tensor([found.seed, found.offset], dtype=torch.int64).view(torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: Any = NAME) -> None:
        found = now().devices[now().index_of(device)]
        found.seed, found.offset = state.view(torch.int64).tolist()

    def _is_in_bad_fork(self) -> bool:
        return False
