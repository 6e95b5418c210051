"""Read TensorFlow's checkpoints of google-research/bert, without TensorFlow.

``X.index`` is a table of LevelDB (https://github.com/google/leveldb/blob/main/doc/table_format.md) with a message for
each tensor (``tensor_bundle.proto``): its type, its shape, and its place in ``X.data-0000S-of-0000N``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from gptj_ft.checkpoints.formats.cerebras import JoinedShard
from gptj_ft.checkpoints.formats.tensor_info import Shard, TensorInfo, read_tensor_rows
from gptj_ft.checkpoints.model_folder import Checkpoint
from gptj_ft.errors import DataError, UsageError
from gptj_ft.models.registry import Family, Leaf
from gptj_ft.system.compression import has_checksum
from gptj_ft.system.files import inside
from gptj_ft.system.memory import bytes_of

MAGIC = (0xDB4775248B80FB57).to_bytes(8, "little")
FOOTER_BYTES, TRAILER_BYTES = 48, 5  # behind a block: its compression, and a checksum
MOST_INDEX_BYTES = 64 << 20  # BERT's is 30 kB
# By TensorFlow's numbers of them.
DTYPES = {1: torch.float32, 2: torch.float64, 14: torch.bfloat16, 19: torch.float16, 3: torch.int32, 9: torch.int64}
SUFFIX = ".index"
GLOBAL_STEP = "global_step"
UNUSED = re.compile(r".*/adam_[mv]|global_step|.*/Adam(_1)?|beta[12]_power|_CHECKPOINTABLE_OBJECT_GRAPH")
# Whole names of the heads, and those before the last part, in google-research's files.
HEADS = {
    "output_weights": "classifier.weight",
    "output_bias": "classifier.bias",
    "cls/squad/output_weights": "qa_outputs.weight",
    "cls/squad/output_bias": "qa_outputs.bias",
    "cls/predictions/output_bias": "cls.predictions.bias",
    "cls/seq_relationship/output_weights": "cls.seq_relationship.weight",
    "cls/seq_relationship/output_bias": "cls.seq_relationship.bias",
}


class BundleTensor(NamedTuple):
    """Tensor in a checkpoint: its file, type, shape and offset there, and the checksum of its bytes."""

    path: Path
    info: TensorInfo
    checksum: bytes


class BundleShard(Shard):
    """Tensors of a TensorFlow checkpoint, by their names in there."""

    def __init__(self, path: Path, tensors: Mapping[str, BundleTensor]) -> None:
        self.path, self._tensors = path, tensors
        self.entries = {name: tensor.info for name, tensor in tensors.items()}

    def rows_at_once(self, name: str) -> int:
        return self.entries[name].rows  # the checksum is of all of it

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        found = self._tensors[name]
        tensor = read_tensor_rows(found.path, found.info)
        if not has_checksum(bytes(bytes_of(tensor)), found.checksum):
            raise DataError(f"{found.path}: {name} is damaged: its checksum differs; get the file again")
        return tensor[start:stop] if tensor.ndim else tensor


def find_bundle(path: Path) -> Path | None:
    """Return the ``.index`` of the checkpoint that a path means: a file of it, its name without suffix, its folder."""
    if path.is_dir():
        found = sorted(path.glob(f"*{SUFFIX}"))
        return found[0] if len(found) == 1 else None
    stem = re.sub(rf"({re.escape(SUFFIX)}|\.data-\d+-of-\d+|\.meta)$", "", path.name)
    index = path.with_name(stem + SUFFIX)
    return index if index.is_file() else None


def open_tensorflow(path: Path, family: Family) -> tuple[Checkpoint, int]:
    """Open a checkpoint, its tensors under Hugging Face's names; return it and its step.

    Raises:
        UsageError: it is of another program.
        DataError: it is damaged.
    """
    shard = open_bundle(path)
    shards: dict[str, Shard] = {}
    for own in shard.entries:
        if UNUSED.fullmatch(own):
            continue
        name = our_name(own)
        if name is None:
            raise UsageError(f"{path}: holds {own}, which google-research/bert has not: only its checkpoints are read")
        shards[name] = JoinedShard(Leaf(name, "rows", own.endswith("/kernel")), [(shard, own)])
    step = int(shard.read(GLOBAL_STEP)) if GLOBAL_STEP in shard.entries and not shard.entries[GLOBAL_STEP].shape else 0
    return Checkpoint(path, shards, family.full_name), step


def our_name(own: str) -> str | None:
    """Return Hugging Face's name of a tensor of google-research/bert; ``None``: there is no such one.

    >>> our_name("bert/encoder/layer_11/attention/self/query/kernel")
    'bert.encoder.layer.11.attention.self.query.weight'
    """
    if own in HEADS:
        return HEADS[own]
    if not own.startswith(("bert/", "cls/predictions/")):
        return None
    name = re.sub(r"/layer_(\d+)/", r"/layer/\1/", own)
    name = re.sub(r"/kernel$", "/weight", re.sub(r"_embeddings$", "_embeddings/weight", name))
    return name.replace("/", ".")


def open_bundle(index: Path) -> BundleShard:
    """Open a checkpoint by its ``.index``.

    Raises:
        DataError: it is damaged, or a file of it is missing.
        UsageError: it holds what is not read here: tensors in slices, or numbers with the highest byte first.
    """
    if index.stat().st_size > MOST_INDEX_BYTES:
        raise DataError(f"{index}: {index.stat().st_size:,} bytes are more than the index of a checkpoint has")
    tensors: dict[str, BundleTensor] = {}
    num_files = 0
    try:
        for key, value in _entries(inside(index).read_bytes()):
            entry = _Message(value)
            if not key:
                num_files = entry.number(1)
                if entry.number(2):
                    raise UsageError(f"{index}: written on a machine with the highest byte of a number first")
                continue
            name, dtype, number = key.decode(), DTYPES.get(entry.number(1)), entry.number(3)
            if dtype is None:  # texts: the graph of Keras
                continue
            if 7 in entry.parts:
                raise UsageError(f"{index}: {name} is in slices; save the model in one piece")
            shape = tuple(_Message(dim).number(1) for dim in _Message(entry.part(2)).parts.get(2, []))
            info, size = TensorInfo(dtype, shape, entry.number(4)), entry.number(5)
            if info.num_bytes != size or number >= num_files or max(shape, default=0) >= 2**63:
                raise ValueError(f"{name} of shape {list(shape)} does not take {size:,} bytes")
            path = index.with_name(f"{index.name.removesuffix(SUFFIX)}.data-{number:05d}-of-{num_files:05d}")
            tensors[name] = BundleTensor(path, info, entry.part(6) or bytes(4))
    except UsageError:
        raise
    except (ValueError, IndexError) as error:
        raise DataError(f"{index}: damaged, or no checkpoint of TensorFlow ({error}); get the file again") from error
    paths = {tensor.path for tensor in tensors.values()}
    sizes = {path: inside(path).stat().st_size if path.is_file() else -1 for path in paths}
    for name, tensor in tensors.items():
        if sizes[tensor.path] < tensor.info.offset + tensor.info.num_bytes:
            state = "is missing" if sizes[tensor.path] < 0 else f"is too short: it lacks {name}"
            raise DataError(f"{tensor.path} {state}; get the file again")
    return BundleShard(index, tensors)


def _entries(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the entries of a table."""
    footer = data[-FOOTER_BYTES:]
    if len(footer) < FOOTER_BYTES or footer[-8:] != MAGIC:
        raise ValueError("its last bytes are not those of a table")
    for _ in _block(data, footer):  # the index of meta data, of which there are none
        pass
    _, at = _varint(footer, _varint(footer, 0)[1])
    left = len(data)  # no block is read twice
    for _, handle in _block(data, footer[at:]):
        left -= _varint(handle, _varint(handle, 0)[1])[0] + TRAILER_BYTES
        if left < 0:
            raise ValueError("its blocks are more than there is")
        yield from _block(data, handle)


def _block(data: bytes, handle: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the entries of a block; a key begins with so many bytes of the one before."""
    offset, at = _varint(handle, 0)
    size, _ = _varint(handle, at)
    block, trailer = data[offset : offset + size + 1], data[offset + size + 1 : offset + size + TRAILER_BYTES]
    if len(trailer) < 4 or not has_checksum(block, trailer):
        raise ValueError("the checksum of a block differs")
    if block[-1]:
        raise ValueError("a block of it is compressed")
    restarts = int.from_bytes(block[-5:-1], "little")
    end, at, key = len(block) - 5 - 4 * restarts, 0, b""
    while at < end:
        shared, at = _varint(block, at)
        rest, at = _varint(block, at)
        length, at = _varint(block, at)
        if shared > len(key) or at + rest + length > end:
            raise ValueError("an entry goes beyond its block")
        key = key[:shared] + block[at : at + rest]
        yield key, block[at + rest : at + rest + length]
        at += rest + length


class _Message:
    """Message in Protocol Buffers' coding: its numbers, and its parts of bytes, by the numbers of the fields."""

    def __init__(self, message: bytes) -> None:
        self.numbers: dict[int, int] = {}
        self.parts: dict[int, list[bytes]] = {}
        at = 0
        while at < len(message):
            tag, at = _varint(message, at)
            if tag & 7 == 0:
                self.numbers[tag >> 3], at = _varint(message, at)
                continue
            size = {1: 8, 5: 4}.get(tag & 7, 0)
            if tag & 7 == 2:
                size, at = _varint(message, at)
            if (tag & 7) not in (1, 2, 5) or at + size > len(message):
                raise ValueError("a field goes beyond its message")
            self.parts.setdefault(tag >> 3, []).append(message[at : at + size])
            at += size

    def number(self, field: int) -> int:
        """Return the number of a field; 0, which is not written, where it is not there."""
        return self.numbers.get(field, 0)

    def part(self, field: int) -> bytes:
        """Return the bytes of a field; none where it is not there."""
        return b"".join(self.parts.get(field, []))


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number that begins at a byte, seven bits in each, and where it ends."""
    value = 0
    for place in range(10):
        byte = data[at + place]
        value |= (byte & 127) << (7 * place)
        if byte < 128:
            return value, at + place + 1
    raise ValueError("a number has more than 64 bits")
