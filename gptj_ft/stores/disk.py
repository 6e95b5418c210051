"""Tensors on disk: one file per layer, replaced as a whole when the layer's new state is complete."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

import torch
from torch import Tensor

from gptj_ft.stores import Kind, Layout
from gptj_ft.stores.blockio import disk_error, open_direct, sync, sync_folder
from gptj_ft.stores.queue import TransferQueue
from gptj_ft.stores.statefile import StateFile, layer_path


class DiskStore:
    """Keeps its kinds in ``PREFIX-003.safetensors``.

    New values go to a new file beside the old one; `commit` stamps it with the step and renames it over the old.
    Between the first write of a layer and its commit, the layer must not be read.

    A durable store has every commit on the disk before the next transfer of its queue is written. Stores that share a
    queue are written in one order: that of the calls.
    """

    resident = False

    def __init__(
        self,
        prefix: Path,
        layouts: Sequence[Layout],
        kinds: Mapping[Kind, torch.dtype],
        queue: TransferQueue,
        durable: bool,
    ) -> None:
        self._queue, self._durable = queue, durable
        self._files = [StateFile(layout, kinds) for layout in layouts]
        self._paths = [layer_path(prefix, layer) for layer in range(len(layouts))]
        self._open: dict[int, int] = {}  # layer -> descriptor of its new file
        prefix.parent.mkdir(parents=True, exist_ok=True)

    def read(self, kind: Kind, layer: int, out: Tensor | None, after: Sequence[Future[None]] = ()) -> Future[Tensor]:
        assert out is not None

        def load() -> Tensor:
            assert layer not in self._open, f"layer {layer} is read between its write and its commit"
            staging = out if out.device.type == "cpu" else torch.empty_like(out, device="cpu", pin_memory=True)
            descriptor = open_direct(self._paths[layer], os.O_RDONLY)
            try:
                self._files[layer].read(descriptor, kind, staging)
            finally:
                os.close(descriptor)
            return out if staging is out else out.copy_(staging)

        return self._queue.read(layer, after, load)

    def write(self, kind: Kind, layer: int, values: Tensor) -> Future[None]:
        def save() -> None:
            if layer not in self._open:
                self._open[layer] = self._create(layer)
            self._files[layer].write(self._open[layer], kind, values.cpu())

        return self._queue.write(layer, save)

    def commit(self, layer: int, step: int) -> None:
        def rename() -> None:
            descriptor = self._open.pop(layer)
            try:
                self._files[layer].write_header(descriptor, step)
                if self._durable:
                    sync(descriptor, self._new(layer))
            finally:
                os.close(descriptor)
            os.replace(self._new(layer), self._paths[layer])
            if self._durable:
                sync_folder(self._paths[layer].parent)

        self._queue.write(layer, rename)

    def drain(self) -> None:
        self._queue.drain()

    def close(self) -> None:
        self._queue.close()
        # A write failed, or the run was cut off before the commit.
        for layer, descriptor in self._open.items():
            os.close(descriptor)
            self._new(layer).unlink(missing_ok=True)
        self._open.clear()

    def _new(self, layer: int) -> Path:
        return self._paths[layer].with_suffix(".new")

    def _create(self, layer: int) -> int:
        try:
            descriptor = open_direct(self._new(layer), os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            os.truncate(descriptor, self._files[layer].num_bytes)
        except OSError as error:
            raise disk_error(error, str(self._new(layer))) from error
        return descriptor
