"""One layer's training state as one safetensors file: page-aligned data, one flat tensor per kind.

The header is padded with spaces (the format allows it), so that the data starts on a 4096-byte boundary, and so does
each kind, because flat tensors are whole pages. ``__metadata__`` holds the step and where each parameter lies in the
flat tensors.
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from gptj_ft.errors import DataError
from gptj_ft.stores import Kind, Layout, allocate
from gptj_ft.stores.blockio import PAGE, read_bytes, write_bytes

DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class StateFile:
    """The form of a layer's file: which kinds it holds, of which type, where."""

    layout: Layout
    kinds: Mapping[Kind, torch.dtype]

    @cached_property
    def offsets(self) -> dict[Kind, int]:
        """Byte offset of each kind in the file."""
        offsets, offset = {}, self.header_bytes
        for kind, dtype in self.kinds.items():
            offsets[kind] = offset
            offset += self.layout.numel * dtype.itemsize
        return offsets

    @cached_property
    def header_bytes(self) -> int:
        return -(-len(self._header(2**63)) // PAGE) * PAGE

    @cached_property
    def num_bytes(self) -> int:
        return self.header_bytes + sum(self.layout.numel * dtype.itemsize for dtype in self.kinds.values())

    def write_header(self, descriptor: int, step: int) -> None:
        """Write the header, stamped with the step."""
        text = self._header(step)
        body = text.ljust(self.header_bytes - 8)
        page = allocate(self.header_bytes, torch.uint8, torch.device("cpu"))  # aligned, as direct transfers must be
        view = _bytes_of(page)
        view[:] = struct.pack("<Q", len(body)) + body
        write_bytes(descriptor, view, 0)

    def write(self, descriptor: int, kind: Kind, values: Tensor) -> None:
        """Write one kind's flat tensor."""
        write_bytes(descriptor, _bytes_of(values), self.offsets[kind])

    def read(self, descriptor: int, kind: Kind, out: Tensor) -> None:
        """Read one kind into a flat tensor.

        Raises:
            DataError: the file ends early.
        """
        view = _bytes_of(out)
        count = read_bytes(descriptor, view, self.offsets[kind])
        if count < len(view):
            raise DataError(f"state file is cut short: {kind} lacks {len(view) - count} bytes")

    def check(self, path: Path) -> int:
        """Return the step stamped in a file.

        Raises:
            DataError: missing, cut short, or of another form.
        """
        try:
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
                header = json.loads(file.read(min(length, 1 << 24)))
                step = int(header["__metadata__"]["step"])
        except FileNotFoundError as error:
            raise DataError(f"{path} is missing: this is not a whole checkpoint") from error
        except (ValueError, KeyError, OSError) as error:
            raise DataError(f"{path} is not a state file of a run: {error}") from error
        expected = json.loads(self._header(step))
        if header != expected or path.stat().st_size != self.num_bytes:
            raise DataError(f"{path} is cut short or belongs to another model or precision")
        return step

    def damage(self, path: Path) -> list[str]:
        """Return a line for each tensor of a file that is not what was written.

        Raises:
            DataError: as `check`.
        """
        self.check(path)
        return []

    def _header(self, step: int) -> bytes:
        tensors: dict[str, object] = {}
        start = 0
        for kind, dtype in self.kinds.items():
            end = start + self.layout.numel * dtype.itemsize
            tensors[kind] = {"dtype": DTYPE_NAMES[dtype], "shape": [self.layout.numel], "data_offsets": [start, end]}
            start = end
        places = {name: [self.layout.offsets[name], *shape] for name, shape in self.layout.shapes.items()}
        metadata = {"format": "gptj-ft state 1", "step": str(step), "offset and shape": json.dumps(places)}
        return json.dumps({"__metadata__": metadata, **tensors}).encode()


def layer_path(prefix: Path, layer: int) -> Path:
    """Return the name of a layer's file: ``PREFIX-003.safetensors``."""
    return prefix.with_name(f"{prefix.name}-{layer:03d}.safetensors")


def _bytes_of(values: Tensor) -> memoryview:
    assert values.device.type == "cpu"
    assert values.is_contiguous()
    return memoryview(values.view(torch.uint8).numpy())  # type: ignore[arg-type]
