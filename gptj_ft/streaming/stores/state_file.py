"""Safetensors file with one layer's training state: one flat, page-aligned tensor per kind.

Spaces pad the header, as the format allows, so that the data starts on a 4096-byte boundary. Flat tensors are whole
pages, if need be with zeros at their end, so each kind starts on such a boundary as well. ``__metadata__`` contains the
step, the offset and shape of each parameter in the flat tensors, and the XXH3-64 digest of each chunk.
Format: https://github.com/huggingface/safetensors#format, https://github.com/Cyan4973/xxHash
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptj_ft.errors import DataError
from gptj_ft.models.layout import Kind, Layout
from gptj_ft.streaming.moments import items_of, num_bytes, num_elements, num_items
from gptj_ft.streaming.stores.base import chunks
from gptj_ft.system.direct_io import PAGE, open_direct, read_direct, write_bytes
from gptj_ft.system.dtypes import SAFETENSORS_CODES
from gptj_ft.system.memory import allocate

NO_DIGEST = "0" * 16
Digests = dict[Kind, list[str]]


@dataclass(frozen=True)
class StateFile:
    """Format of a layer's file. Transfers are of whole chunks."""

    layout: Layout
    kinds: Mapping[Kind, torch.dtype]
    chunk_numel: int

    @cached_property
    def offsets(self) -> dict[Kind, int]:
        """Byte offset of each kind in the file."""
        offsets, offset = {}, self.header_bytes
        for kind, dtype in self.kinds.items():
            offsets[kind] = offset
            offset += self._num_bytes(dtype)
        return offsets

    @cached_property
    def header_bytes(self) -> int:
        # Room for the longest step number: the header has the same size in every step.
        # Its unused digits also leave room for the eight bytes of the length.
        return -(-len(self._header(2**63, self.no_digests())) // PAGE) * PAGE

    @cached_property
    def num_bytes(self) -> int:
        return self.header_bytes + sum(self._num_bytes(dtype) for dtype in self.kinds.values())

    def no_digests(self) -> Digests:
        """Return the digests of an empty file."""
        return {kind: [NO_DIGEST] * len(chunks(self.layout.numel, self.chunk_numel)) for kind in self.kinds}

    def write_header(self, descriptor: int, step: int, digests: Digests) -> None:
        body = self._header(step, digests).ljust(self.header_bytes - 8)
        page = allocate(self.header_bytes, torch.uint8, torch.device("cpu"))  # aligned, for direct I/O
        view = _bytes_of(page)
        view[:] = struct.pack("<Q", len(body)) + body
        write_bytes(descriptor, view, 0)

    def write(
        self, descriptor: int, kind: Kind, values: Tensor, start: int, noted: Digests, digests: Sequence[str] = ()
    ) -> None:
        """Write elements of one kind from ``start`` on, and note the digests of their chunks.

        Args:
            noted: digests of the whole file; the chunks' digests are put into it.
            digests: digests of the chunks, if the caller has computed them already.
        """
        parts = list(self._chunks_of(start, values))
        known = digests or [digest(_bytes_of(part)) for _, part in parts]
        for (index, _), each in zip(parts, known, strict=True):
            noted[kind][index] = each
        view, at = _bytes_of(values), self.offsets[kind] + num_bytes(start, values.dtype)
        last = self._last_page(start, values)
        whole = len(view) if last is None else len(view) // PAGE * PAGE
        write_bytes(descriptor, view[:whole], at)
        if last is not None:
            last[: len(view) - whole] = view[whole:]
            write_bytes(descriptor, last, at + whole)

    def read(self, descriptor: int, kind: Kind, out: Tensor, start: int, digests: Digests | None = None) -> None:
        """Read elements of one kind from ``start`` on.

        Args:
            out: flat target.
            digests: expected digests of the file; None: no check.

        Raises:
            DataError: the file is too short, or a digest differs.
        """
        view, at = _bytes_of(out), self.offsets[kind] + num_bytes(start, out.dtype)
        last = self._last_page(start, out)
        whole = len(view) if last is None else len(view) // PAGE * PAGE
        count = read_direct(descriptor, view[:whole], at)
        if last is not None and count == whole:
            count += min(read_direct(descriptor, last, at + whole), len(view) - whole)
            view[whole:] = last[: len(view) - whole]
        if count < len(view):
            raise DataError(f"state file is cut short: {kind} lacks {len(view) - count} bytes")
        if digests is None:
            return
        for index, part in self._chunks_of(start, out):
            if digest(_bytes_of(part)) != digests[kind][index]:
                raise DataError(f"{kind} is damaged: the checksum of {self._name_chunk(index)} differs")

    def check(self, path: Path) -> tuple[int, Digests]:
        """Return the step of a file, and the digests of its tensors.

        Raises:
            DataError: the file is missing, cut short, or has another format.
        """
        try:
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
                # A damaged length must not make this read gigabytes.
                header = json.loads(file.read(min(length, 1 << 24)))
            step = int(header["__metadata__"]["step"])
            digests = {kind: text.split() for kind, text in json.loads(header["__metadata__"]["xxh3_64"]).items()}
        except FileNotFoundError as error:
            raise DataError(f"{path} is missing: the checkpoint is incomplete") from error
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            raise DataError(f"{path} is not a state file of a run: {error}") from error
        # Step and digests determine the whole header, so any difference means another model or format.
        expected = json.loads(self._header(step, digests))
        lengths = {kind: len(of) for kind, of in self.no_digests().items()}
        is_whole = {kind: len(of) for kind, of in digests.items()} == lengths
        if header != expected or not is_whole or path.stat().st_size != self.num_bytes:
            raise DataError(f"{path} is cut short or belongs to another model, precision or version of gptj-ft")
        return step, digests

    def damage(self, path: Path) -> list[str]:
        """Verify a whole file; return a line for each damaged tensor.

        Raises:
            DataError: as `check`.
        """
        _, digests = self.check(path)
        lines = []
        descriptor = open_direct(path, os.O_RDONLY)
        try:
            for kind, dtype in self.kinds.items():
                numel = min(self.chunk_numel, self.layout.numel)
                buffer = allocate(num_items(numel, dtype), dtype, torch.device("cpu"))
                damaged = set()
                for index, span in enumerate(chunks(self.layout.numel, self.chunk_numel)):
                    try:
                        part = buffer[: num_items(span.stop - span.start, dtype)]
                        self.read(descriptor, kind, part, span.start, digests)
                    except DataError:
                        damaged.add(self._name_chunk(index))
                lines += [f"{kind} ({names})" for names in sorted(damaged)]
        finally:
            os.close(descriptor)
        return lines

    def _chunks_of(self, start: int, values: Tensor) -> Iterator[tuple[int, Tensor]]:
        assert start % self.chunk_numel == 0, "internal error: transfer starts inside a chunk"
        numel = num_elements(values)
        assert numel % self.chunk_numel == 0 or self._ends(start, values), (
            "internal error: transfer ends inside a chunk"
        )
        for span in chunks(numel, self.chunk_numel):
            yield (start + span.start) // self.chunk_numel, values[items_of(span, values.dtype)]

    def _ends(self, start: int, values: Tensor) -> bool:
        """Tell whether a transfer ends the layer. Its last page may be a part of one."""
        return start + num_elements(values) == self.layout.numel

    def _last_page(self, start: int, values: Tensor) -> memoryview | None:
        """Return zeros in place of a transfer's last page, with the padding behind it; None: it needs none."""
        rest = values.nbytes % PAGE
        padding = self._num_bytes(values.dtype) - num_bytes(self.layout.numel, values.dtype)
        if not padding or not self._ends(start, values):
            return None
        return _bytes_of(allocate(rest + padding, torch.uint8, torch.device("cpu")))

    def _num_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of a kind of this type; zeros fill its last page."""
        return -(-num_bytes(self.layout.numel, dtype) // PAGE) * PAGE

    def _name_chunk(self, index: int) -> str:
        start, stop = index * self.chunk_numel, (index + 1) * self.chunk_numel
        ends = {name: offset + self.layout.shapes[name].numel() for name, offset in self.layout.offsets.items()}
        return ", ".join(name for name, at in self.layout.offsets.items() if at < stop and ends[name] > start)

    def _header(self, step: int, digests: Digests) -> bytes:
        tensors: dict[str, object] = {}
        start = 0
        for kind, dtype in self.kinds.items():
            end = start + self._num_bytes(dtype)
            tensors[kind] = {
                "dtype": SAFETENSORS_CODES[dtype],
                "shape": [(end - start) // dtype.itemsize],
                "data_offsets": [start, end],
            }
            start = end
        places = {name: [self.layout.offsets[name], *shape] for name, shape in self.layout.shapes.items()}
        metadata: dict[str, Any] = {
            "format": "gptj-ft state 2",
            "step": str(step),
            "offset and shape": json.dumps(places),
            "part": str(self.chunk_numel),
            "xxh3_64": json.dumps({kind: " ".join(of) for kind, of in digests.items()}),
        }
        return json.dumps({"__metadata__": metadata, **tensors}).encode()


def digest(view: memoryview) -> str:
    """Return the XXH3-64 digest of some bytes."""
    import xxhash  # only stores on disk need it

    return xxhash.xxh3_64_hexdigest(view)


class ChunkDigest:
    """Digest of a chunk, computed block by block while the blocks are in a processor's cache."""

    # Measured: the digest of a gigabyte takes 0.05 core-seconds from memory, and 0.01 to 0.02 from a cache.

    def __init__(self) -> None:
        import xxhash

        self._state = xxhash.xxh3_64()
        self._num_bytes = 0

    def add(self, block: Tensor) -> None:
        """Add the next elements."""
        self._state.update(_bytes_of(block))
        self._num_bytes += block.nbytes

    def of(self, part: Tensor) -> str:
        """Return the digest of a chunk after all its blocks were added."""
        assert self._num_bytes == part.nbytes, "internal error: digest of an incomplete chunk"
        return self._state.hexdigest()


def layer_path(prefix: Path, layer: int) -> Path:
    """Return the name of a layer's file: ``PREFIX-003.safetensors``."""
    return prefix.with_name(f"{prefix.name}-{layer:03d}.safetensors")


def stamp_of(path: Path) -> int | None:
    """Return the step of a file; None if it is missing or incomplete."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(length, 1 << 24)))
        step = int(header.pop("__metadata__")["step"])
        # Safetensors counts data_offsets from the end of the header.
        end = max(int(entry["data_offsets"][1]) for entry in header.values())
        return step if path.stat().st_size == 8 + length + end else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error):
        return None


def _bytes_of(values: Tensor) -> memoryview:
    assert values.device.type == "cpu"
    assert values.is_contiguous()
    return memoryview(values.view(torch.uint8).numpy())  # type: ignore[arg-type]
