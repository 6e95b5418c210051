"""Read TensorFlow checkpoints of google-research/bert without TensorFlow.

``X.index`` is a LevelDB table (https://github.com/google/leveldb/blob/main/doc/table_format.md). It has one protobuf
message per tensor (``tensor_bundle.proto``): type, shape, and place in ``X.data-0000S-of-0000N``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from gptj_ft.checkpoints.foreign.config import GOOGLE_CONFIG, find_config, read_foreign_config
from gptj_ft.checkpoints.foreign.joined import JoinedShard
from gptj_ft.checkpoints.model_folder import Checkpoint
from gptj_ft.checkpoints.source import CheckpointSource, OpenRequest
from gptj_ft.checkpoints.weight_file import Shard, TensorInfo, read_tensor_rows
from gptj_ft.errors import DataError, UsageError
from gptj_ft.models.registry import Family, Leaf, architecture_of
from gptj_ft.system.compression import has_checksum
from gptj_ft.system.files import inside
from gptj_ft.system.memory import bytes_of

MAGIC = (0xDB4775248B80FB57).to_bytes(8, "little")
FOOTER_BYTES, TRAILER_BYTES = 48, 5  # the trailer after a block: compression type and checksum
MOST_INDEX_BYTES = 64 << 20  # BERT's is 30 kB
# By the numbers of TensorFlow's DataType.
DTYPES = {1: torch.float32, 2: torch.float64, 14: torch.bfloat16, 19: torch.float16, 3: torch.int32, 9: torch.int64}
SUFFIX = ".index"
GLOBAL_STEP = "global_step"
UNUSED = re.compile(r".*/adam_[mv]|global_step|.*/Adam(_1)?|beta[12]_power|_CHECKPOINTABLE_OBJECT_GRAPH")
# Names of the heads in google-research's files.
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
    """Tensor in a data file of a checkpoint."""

    path: Path
    info: TensorInfo
    checksum: bytes  # of the tensor's bytes


class BundleShard(Shard):
    """Tensors of a TensorFlow checkpoint under TensorFlow's names."""

    def __init__(self, path: Path, tensors: Mapping[str, BundleTensor]) -> None:
        self.path, self._tensors = path, tensors
        self.entries = {name: tensor.info for name, tensor in tensors.items()}

    def rows_at_once(self, name: str) -> int:
        return self.entries[name].rows  # the checksum covers the whole tensor

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        stored = self._tensors[name]
        tensor = read_tensor_rows(stored.path, stored.info)
        if not has_checksum(bytes(bytes_of(tensor)), stored.checksum):
            raise DataError(f"{stored.path}: {name} is damaged: its checksum differs; get the file again")
        return tensor[start:stop] if tensor.ndim else tensor


def find_bundle(path: Path) -> Path | None:
    """Return the ``.index`` of a checkpoint.

    Args:
        path: any file of the checkpoint, their common name without suffix, or a folder with one checkpoint.
    """
    if path.is_dir():
        indices = sorted(path.glob(f"*{SUFFIX}"))
        return indices[0] if len(indices) == 1 else None
    stem = re.sub(rf"({re.escape(SUFFIX)}|\.data-\d+-of-\d+|\.meta)$", "", path.name)
    index = path.with_name(stem + SUFFIX)
    return index if index.is_file() else None


def detect_tensorflow(path: Path) -> bool:
    """Recognize a path that belongs to one checkpoint."""
    return find_bundle(path) is not None


def files_of_bundle(path: Path) -> list[Path]:
    """Return the files of the checkpoint that a path belongs to."""
    index = find_bundle(path)
    return sorted(each for each in index.parent.iterdir() if each.stem == index.stem) if index else []


@contextmanager
def open_tensorflow_source(request: OpenRequest) -> Iterator[CheckpointSource]:
    """Open a checkpoint with its architecture; the tensors decide the head.

    Raises:
        UsageError: no checkpoint or several, no config, or a checkpoint of another program.
        DataError: the checkpoint is damaged.
    """
    path, index = request.path, find_bundle(request.path)
    if index is None:
        raise UsageError(f"{path} holds no TensorFlow checkpoint, or several: name one as X.index")
    folder = index.parent
    config = request.config or find_config([folder], GOOGLE_CONFIG) or find_config([folder])
    if config is None:
        raise UsageError(f"{folder} has no {GOOGLE_CONFIG}: name the JSON of the model's shape with --config")
    raw = read_foreign_config(config)
    checkpoint, step = _open_tensors(index, architecture_of(raw, config).family)
    if "classifier.weight" in checkpoint.names:
        count = checkpoint.entry("classifier.weight").rows
        raw |= {"architectures": ["BertForSequenceClassification"], "num_labels": count}
    elif "qa_outputs.weight" in checkpoint.names:
        raw |= {"architectures": ["BertForQuestionAnswering"]}
    yield CheckpointSource(path, "tensorflow", architecture_of(raw, config), checkpoint, folder, step)


def _open_tensors(path: Path, family: Family) -> tuple[Checkpoint, int]:
    """Return the tensors under Hugging Face's names, and the step."""
    shard = open_bundle(path)
    shards: dict[str, Shard] = {}
    for own in shard.entries:
        if UNUSED.fullmatch(own):
            continue
        name = hugging_face_name(own)
        if name is None:
            raise UsageError(
                f"{path}: {own} is no tensor of google-research/bert; checkpoints of other programs are not supported"
            )
        # TensorFlow stores a dense kernel as (in, out), PyTorch as (out, in).
        shards[name] = JoinedShard(Leaf(name, "rows", own.endswith("/kernel")), [(shard, own)])
    step = int(shard.read(GLOBAL_STEP)) if GLOBAL_STEP in shard.entries and not shard.entries[GLOBAL_STEP].shape else 0
    return Checkpoint(path, shards, family.full_name), step


def hugging_face_name(own: str) -> str | None:
    """Return Hugging Face's name of a tensor of google-research/bert; ``None`` if BERT has no such tensor.

    >>> hugging_face_name("bert/encoder/layer_11/attention/self/query/kernel")
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
        DataError: the index is damaged, or a data file is missing or too short.
    """
    if index.stat().st_size > MOST_INDEX_BYTES:
        raise DataError(f"{index}: {index.stat().st_size:,} bytes are too many for the index of a checkpoint")
    tensors: dict[str, BundleTensor] = {}
    num_files = 0
    try:
        for key, value in _entries(inside(index).read_bytes()):
            entry = _Message(value)
            if not key:
                num_files = entry.number(1)  # the first entry is the BundleHeaderProto
                if entry.number(2):
                    raise UsageError(f"{index}: big-endian checkpoint; only little-endian is supported")
                continue
            name, dtype, number = key.decode(), DTYPES.get(entry.number(1)), entry.number(3)
            if dtype is None:  # strings: the graph of Keras
                continue
            if 7 in entry.parts:
                raise UsageError(f"{index}: {name} is partitioned into slices; save the model without partitions")
            shape = tuple(_Message(dim).number(1) for dim in _Message(entry.part(2)).parts.get(2, []))
            info, size = TensorInfo(dtype, shape, entry.number(4)), entry.number(5)
            if info.num_bytes != size or number >= num_files or max(shape, default=0) >= 2**63:
                raise ValueError(f"{name} of shape {list(shape)} does not take {size:,} bytes")
            path = index.with_name(f"{index.name.removesuffix(SUFFIX)}.data-{number:05d}-of-{num_files:05d}")
            # Protobuf omits fields that are 0, also a checksum.
            tensors[name] = BundleTensor(path, info, entry.part(6) or bytes(4))
    except UsageError:
        raise
    except (ValueError, IndexError) as error:
        raise DataError(f"{index}: damaged, or no TensorFlow checkpoint ({error}); get the file again") from error
    paths = {tensor.path for tensor in tensors.values()}
    sizes = {path: inside(path).stat().st_size if path.is_file() else -1 for path in paths}
    for name, tensor in tensors.items():
        if sizes[tensor.path] < tensor.info.offset + tensor.info.num_bytes:
            state = "is missing" if sizes[tensor.path] < 0 else f"is too short: it lacks {name}"
            raise DataError(f"{tensor.path} {state}; get the file again")
    return BundleShard(index, tensors)


def _entries(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the keys and values of a LevelDB table."""
    footer = data[-FOOTER_BYTES:]
    if len(footer) < FOOTER_BYTES or footer[-8:] != MAGIC:
        raise ValueError("the footer of a table is missing")
    for _ in _block(data, footer):  # the metaindex, which TensorFlow leaves empty
        pass
    # The footer has two handles, each an offset and a size: of the metaindex, then of the index.
    _, at = _varint(footer, _varint(footer, 0)[1])
    # A damaged or hostile index could name a block many times: bound the sum of block sizes by the file size.
    left = len(data)
    for _, handle in _block(data, footer[at:]):
        left -= _varint(handle, _varint(handle, 0)[1])[0] + TRAILER_BYTES
        if left < 0:
            raise ValueError("its blocks are larger than the file")
        yield from _block(data, handle)


def _block(data: bytes, handle: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the keys and values of a block.

    Keys are delta-coded: each gives the number of leading bytes that it shares with the previous key.
    """
    offset, at = _varint(handle, 0)
    size, _ = _varint(handle, at)
    # The checksum covers the block and the byte of its compression type.
    block, trailer = data[offset : offset + size + 1], data[offset + size + 1 : offset + size + TRAILER_BYTES]
    if len(trailer) < 4 or not has_checksum(block, trailer):
        raise ValueError("a block does not match its checksum")
    if block[-1]:
        raise ValueError("a block is compressed")
    # The block ends with its restart points, 4 bytes each, and their number; sequential reading does not need them.
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
    """Protobuf message: its varint fields (``numbers``) and byte fields (``parts``), by field number."""

    def __init__(self, message: bytes) -> None:
        self.numbers: dict[int, int] = {}
        self.parts: dict[int, list[bytes]] = {}
        at = 0
        while at < len(message):
            tag, at = _varint(message, at)
            # A tag is 8 * field number + wire type: 0 varint, 1 eight bytes, 2 length-prefixed, 5 four bytes.
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
        """Return a varint field; 0, protobuf's default, if it is missing."""
        return self.numbers.get(field, 0)

    def part(self, field: int) -> bytes:
        """Return the bytes of a field; empty if it is missing."""
        return b"".join(self.parts.get(field, []))


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Decode a base-128 varint; return its value and the position after it."""
    value = 0
    for place in range(10):
        byte = data[at + place]
        value |= (byte & 127) << (7 * place)
        if byte < 128:
            return value, at + place + 1
    raise ValueError("a number has more than 64 bits")
