"""Write a GGUF file a few rows at a time, and compare it with what was written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import xxhash
from torch import Tensor

from gptj_ft.checkpoints.gguf.header import GGUF_ALIGNMENT, read_header
from gptj_ft.checkpoints.weight_file import PIECE_BYTES, TensorInfo, read_tensor_rows
from gptj_ft.errors import DataError, UsageError
from gptj_ft.system.atomic import draft_of, give_name, require_new
from gptj_ft.system.files import disk_errors, sync_path
from gptj_ft.system.write_behind import PageWriter, WriteBehind

GgufType = Literal["F32", "F16", "BF16", "Q8_0"]
FLOAT_TYPES: Mapping[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
FILE_TYPES: Mapping[GgufType, int] = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}  # ``general.file_type``


@dataclass(frozen=True)
class NewTensor:
    """A tensor to write."""

    name: str
    kind: GgufType
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        import gguf

        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[self.kind]]
        return torch.Size(self.shape).numel() // int(block) * int(size)


class GgufFile:
    """Content of a new file: metadata, and the tensors in their order."""

    def __init__(
        self, metadata: Mapping[str, Any], tensors: Sequence[NewTensor], advance: Callable[[int], None]
    ) -> None:
        """Store what `write` writes.

        Args:
            metadata: values by key; ``general.architecture`` is one of them.
            advance: callback of the bytes written or verified since the last call.
        """
        self.metadata, self.tensors, self._advance = metadata, tensors, advance
        self._checksums: dict[str, str] = {}

    def write(self, path: Path, pieces_of: Callable[[NewTensor], Iterator[Tensor]]) -> None:
        """Write the file, then read it back and compare it.

        Args:
            pieces_of: function that yields a tensor's rows, in pieces; called once for each tensor, in order.

        Raises:
            DataError: the file differs from what was written.
        """
        with WriteBehind() as behind:
            file = behind.open(path)
            file.write(self._header(path))
            for tensor in self.tensors:
                file.write(bytes(-file.size % GGUF_ALIGNMENT))
                checksum, before = xxhash.xxh3_128(), file.size
                for piece in pieces_of(tensor):
                    _put(file, piece, tensor.kind, checksum)
                assert file.size - before == tensor.num_bytes, f"{tensor.name} has {file.size - before} bytes"
                self._checksums[tensor.name] = checksum.hexdigest()
                self._advance(tensor.num_bytes)
            file.write(bytes(-file.size % GGUF_ALIGNMENT))
            file.finish(lambda: None)
        self._verify(path)

    def _header(self, path: Path) -> bytes:
        """Return header and padding, made by the package ``gguf``, which writes to files only."""
        import gguf

        writer = gguf.GGUFWriter(None, self.metadata["general.architecture"])
        for key, value in self.metadata.items():
            if key == "general.architecture":
                continue
            add: Callable[[str, Any], None] = (
                writer.add_bool if isinstance(value, bool)
                else writer.add_uint32 if isinstance(value, int)
                else writer.add_float32 if isinstance(value, float)
                else writer.add_string if isinstance(value, str)
                else writer.add_array
            )  # fmt: skip
            add(key, value)
        for tensor in self.tensors:
            number = gguf.GGMLQuantizationType[tensor.kind]
            writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.num_bytes, number)
        header = path.with_name(f"{path.name}.header")
        try:
            writer.write_header_to_file(header)
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            writer.close()
            return header.read_bytes()
        finally:
            header.unlink(missing_ok=True)

    def _verify(self, path: Path) -> None:
        header = read_header(path)
        for tensor in self.tensors:
            checksum, size = xxhash.xxh3_128(), tensor.num_bytes
            place = TensorInfo(torch.uint8, (size,), header.tensors[tensor.name].offset)
            for start in range(0, size, PIECE_BYTES):
                checksum.update(read_tensor_rows(path, place, start, start + PIECE_BYTES).numpy().data)
            if checksum.hexdigest() != self._checksums[tensor.name]:
                raise DataError(f"{path}: {tensor.name} differs from what was written; is the disk faulty?")
            self._advance(size)


def _put(file: PageWriter, piece: Tensor, kind: GgufType, checksum: xxhash.xxh3_128) -> None:
    """Append numbers in a type of ggml."""
    if kind in FLOAT_TYPES:
        file.put(piece, FLOAT_TYPES[kind], checksum)
        return
    import gguf

    data = gguf.quantize(piece.float().numpy(), gguf.GGMLQuantizationType[kind]).tobytes()
    checksum.update(data)
    file.write(data)


@contextmanager
def new_files(*targets: Path) -> Iterator[list[Path]]:
    """Yield hidden names to write; give the files their names when the block ends, or remove them on an error.

    Raises:
        UsageError: one exists, or cannot be written.
        ResourceError: the disk is full.
    """
    require_new(*targets)
    drafts = [draft_of(target) for target in targets]
    with disk_errors(targets[0], "free some, or write to another disk", UsageError):
        try:
            targets[0].parent.mkdir(parents=True, exist_ok=True)
            yield drafts
            for draft, target in zip(drafts, targets, strict=True):
                give_name(draft, target)
            sync_path(targets[0].parent)
        finally:
            for draft in drafts:
                draft.unlink(missing_ok=True)
