"""Keep tensors on disk, in one file per layer. A commit replaces the file as a whole."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from threading import Lock, local

import torch
from torch import Tensor

from gptj_ft.errors import DataError
from gptj_ft.models.layout import Kind, Layout
from gptj_ft.streaming.moments import items_of, num_elements
from gptj_ft.streaming.stores.base import LayerStore, Span, chunks
from gptj_ft.streaming.stores.queue import TransferQueue
from gptj_ft.streaming.stores.state_file import Digests, StateFile, layer_path
from gptj_ft.system.accelerator import StreamEvent, copy, pin
from gptj_ft.system.direct_io import RESUME, open_direct, sync, sync_folder
from gptj_ft.system.files import disk_error, new_name, remove
from gptj_ft.system.memory import allocate

SPARE = ".spare.new"  # suffix of a replaced file, whose blocks the next layers reuse


def replaced_files(prefix: Path, layouts: Sequence[Layout]) -> list[Path]:
    """List the replaced files that an earlier process left in the folder.

    Args:
        prefix: folder and start of the file names.
        layouts: layout of each layer. Files of layers without elements belong to another process.
    """
    own = (layer_path(prefix, layer) for layer, layout in enumerate(layouts) if layout.numel)
    return [path for each in own if (path := each.with_suffix(SPARE)).exists()]


class DiskStore(LayerStore):
    """Store in files named ``PREFIX-003.safetensors``.

    New values go to a new file next to the old one. `commit` stamps it with the step and renames it over the old file.
    Until then, reads return the old content. Reads of an earlier process's file check its digests. Stores with a common
    queue commit in order.

    Args:
        prefix: existing folder and start of the file names.
        kinds: type of each kind in the store.
        durable: whether each commit reaches the disk before the next one starts.
        chunk_numel: elements per digest; maximum elements of a transfer.
        replaced: files to reuse, see `replaced_files`.
    """

    # The next layers write over replaced files: a file system takes that two to three times as fast as allocating new
    # blocks and freeing old ones.

    def __init__(
        self,
        prefix: Path,
        layouts: Sequence[Layout],
        kinds: Mapping[Kind, torch.dtype],
        queue: TransferQueue,
        durable: bool,
        chunk_numel: int,
        replaced: Sequence[Path],
    ) -> None:
        self._queue, self._durable, self.digest_numel = queue, durable, chunk_numel
        self._files = [StateFile(layout, kinds, chunk_numel) for layout in layouts]
        self._paths = [layer_path(prefix, layer) for layer in range(len(layouts))]
        self._new: dict[int, tuple[int, Digests]] = {}  # layer -> descriptor and digests of the file being written
        # Files of other layers belong to another process.
        self._own_paths = [path for path, layout in zip(self._paths, layouts, strict=True) if layout.numel]
        self._spare = list(replaced)  # replaced files to write over
        self._lock = Lock()
        self._chunk_numel, self._staging = chunk_numel, local()
        self._unchecked: dict[int, Digests | None] = dict.fromkeys(range(len(layouts)))  # files of an earlier process

    def read(self, span: Span, out: Tensor) -> Future[Tensor]:
        layer = span.layer

        def load(events: Sequence[StreamEvent]) -> Tensor:
            path, file = self._paths[layer], self._files[layer]
            # A file of an earlier process may be damaged: compare its digests until this process replaces the file.
            if layer in self._unchecked and self._unchecked[layer] is None:
                self._unchecked[layer] = file.check(path)[1]
            descriptor = open_direct(path, os.O_RDONLY)
            try:
                for at, part, host in self._through_host(out, span.start):
                    file.read(descriptor, span.kind, host, at, self._unchecked.get(layer))
                    if host is not part:
                        copy(host, part, events)
            except DataError as error:
                raise DataError(f"{path}: {error}; resume from a checkpoint or from a copy of the run") from error
            finally:
                os.close(descriptor)
            return out

        return self._queue.read(layer, span.after, load)

    def write(self, span: Span, values: Tensor, digests: Sequence[str] = ()) -> Future[None]:
        layer = span.layer

        def save(events: Sequence[StreamEvent]) -> None:
            file = self._files[layer]
            # Threads write chunks of the same layer: the first one creates the file.
            with self._lock:
                if layer not in self._new:
                    self._new[layer] = self._create(layer), file.no_digests()
            descriptor, noted = self._new[layer]
            for at, part, host in self._through_host(values, span.start):
                if host is not part:
                    copy(part, host, events)
                file.write(descriptor, span.kind, host, at, noted, digests)

        return self._queue.write(layer, span.after, save)

    def commit(self, layer: int, step: int) -> None:
        def rename() -> None:
            descriptor, digests = self._new.pop(layer)
            try:
                self._files[layer].write_header(descriptor, step, digests)
                if self._durable:
                    sync(descriptor, self._new_path(layer))
            finally:
                os.close(descriptor)
            replaced = self._keep_replaced(layer)
            os.replace(self._new_path(layer), self._paths[layer])
            self._unchecked.pop(layer, None)
            if self._durable:
                sync_folder(self._paths[layer].parent)
            with self._lock:  # only after the sync: until then a power cut can restore the old file
                self._spare += replaced

        self._queue.commit(layer, rename)

    def then(self, task: Callable[[], None]) -> Future[None]:
        return self._queue.then(task)

    def drain(self) -> None:
        self._queue.drain()

    def close(self) -> None:
        self._queue.close()
        # After a failed write or an interrupted step, files without a commit are left.
        for descriptor, _ in self._new.values():
            os.close(descriptor)
        for path in (
            *(path.with_suffix(suffix) for path in self._own_paths for suffix in (".new", SPARE)),
            *self._spare,
        ):
            path.unlink(missing_ok=True)
        self._new.clear()
        self._spare.clear()

    def _through_host(self, values: Tensor, start: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield the parts of a transfer: first element, values, and host memory for the file's bytes.

        On a CPU the values are host memory. From a device, each part goes through a staging buffer of this thread.
        """
        if values.device.type == "cpu":
            yield start, values, values
            return
        if not hasattr(self._staging, "memory"):
            self._staging.memory = allocate(self._chunk_numel, torch.float32, torch.device("cpu"))
            pin(self._staging.memory, values.device)  # until the thread ends
        for span in chunks(num_elements(values), self._chunk_numel):
            part = values[items_of(span, values.dtype)]
            yield start + span.start, part, self._staging.memory.view(values.dtype)[: len(part)]

    def _new_path(self, layer: int) -> Path:
        return new_name(self._paths[layer])

    def _keep_replaced(self, layer: int) -> list[Path]:
        """Link a file that is about to be replaced under its spare name."""
        spare = self._paths[layer].with_suffix(SPARE)
        with self._lock:
            if spare in self._spare:
                return []  # its spare file is not used up yet
        try:
            remove(spare)
            os.link(self._paths[layer], spare)
        except OSError:  # no old file, or no hard links on this file system
            return []
        return [spare]

    def _create(self, layer: int) -> int:
        path = self._new_path(layer)
        try:
            remove(path)
            while self._spare:
                spare, flags = self._spare.pop(), os.O_RDWR
                # Reuse the blocks only if this is the file's last name: a checkpoint may have a link to it.
                status = spare.lstat()
                if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
                    os.replace(spare, path)
                    break
                remove(spare)
            else:
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
            descriptor = open_direct(path, flags)
            # A spare file of another layer may be longer or shorter.
            os.truncate(descriptor, self._files[layer].num_bytes)
        except OSError as error:
            raise disk_error(error, path, RESUME) from error
        return descriptor
