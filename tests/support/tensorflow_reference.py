"""Write TensorFlow checkpoints, following the descriptions of LevelDB tables and tensor_bundle.proto."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

import google_crc32c
import torch
from torch import Tensor

NUMBERS = {torch.float32: 1, torch.float64: 2, torch.int32: 3, torch.int64: 9, torch.bfloat16: 14, torch.float16: 19}


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def checksum(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value) if value else b""


def message(field: int, content: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(content)) + content


def block(entries: list[tuple[bytes, bytes]], every: int) -> bytes:
    """Return a block with prefix-compressed keys and restart points."""
    out, restarts, last = bytearray(), [], b""
    for count, (key, value) in enumerate(entries):
        shared = 0
        if count % every == 0:
            restarts.append(len(out))
        else:
            while shared < min(len(key), len(last)) and key[shared] == last[shared]:
                shared += 1
        out += varint(shared) + varint(len(key) - shared) + varint(len(value)) + key[shared:] + value
        last = key
    starts = restarts or [0]
    return bytes(out) + b"".join(struct.pack("<I", each) for each in (*starts, len(starts)))


def table(entries: list[tuple[bytes, bytes]], block_entries: int, compression: int = 0) -> bytes:
    """Return a table: data blocks, an empty meta index, the index, the footer."""
    out, index = bytearray(), []

    def add(content: bytes) -> bytes:
        handle = varint(len(out)) + varint(len(content))
        trailer = bytes([compression])
        out.extend(content + trailer + checksum(content + trailer))
        return handle

    for start in range(0, len(entries), block_entries):
        part = entries[start : start + block_entries]
        index.append((part[-1][0] + b"\x00", add(block(part, 16))))
    handles = add(block([], 16)) + add(block(index, 1))
    return bytes(out) + handles.ljust(40, b"\x00") + struct.pack("<Q", 0xDB4775248B80FB57)


def write_bundle(
    prefix: Path,
    tensors: Mapping[str, Tensor],
    num_files: int = 1,
    block_entries: int = 40,
    compression: int = 0,
    header: bytes = b"",
    more: bytes = b"",
) -> Path:
    """Write ``PREFIX.index`` and its data files; ``header`` and ``more`` add fields to the messages."""
    entries = [(b"", number(1, num_files) + header + message(3, number(1, 1)))]
    data = [bytearray() for _ in range(num_files)]
    for place, name in enumerate(sorted(tensors)):
        tensor = tensors[name].contiguous()
        content, file = tensor.reshape(-1).view(torch.uint8).numpy().tobytes(), place % num_files
        shape = b"".join(message(2, number(1, size)) for size in tensor.shape)
        entry = number(1, NUMBERS[tensor.dtype]) + message(2, shape) + number(3, file) + number(4, len(data[file]))
        entry += number(5, len(content)) + varint(6 << 3 | 5) + checksum(content) + more
        entries.append((name.encode(), entry))
        data[file] += content
    prefix.with_name(prefix.name + ".index").write_bytes(table(entries, block_entries, compression))
    for file, content in enumerate(data):
        prefix.with_name(f"{prefix.name}.data-{file:05d}-of-{num_files:05d}").write_bytes(content)
    return prefix


HEADS = {"classifier.weight": "output_weights", "classifier.bias": "output_bias"}
HEADS |= {"qa_outputs.weight": "cls/squad/output_weights", "qa_outputs.bias": "cls/squad/output_bias"}
HEADS |= {"cls.predictions.bias": "cls/predictions/output_bias"}
HEADS |= {"cls.seq_relationship.weight": "cls/seq_relationship/output_weights"}
HEADS |= {"cls.seq_relationship.bias": "cls/seq_relationship/output_bias"}


def googles(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename a BERT's tensors to google-research names; kernels are (in, out)."""
    named = {}
    for name, tensor in state.items():
        if "decoder" in name or "position_ids" in name:
            continue
        if name in HEADS:
            named[HEADS[name]] = tensor
            continue
        own = name.replace("encoder.layer.", "encoder.layer_").replace(".", "/")
        if "LayerNorm" in own:
            own = own.replace("LayerNorm/weight", "LayerNorm/gamma").replace("LayerNorm/bias", "LayerNorm/beta")
        elif own.endswith("_embeddings/weight"):
            own = own.removesuffix("/weight")
        elif own.endswith("/weight"):
            own, tensor = own.removesuffix("weight") + "kernel", tensor.t()
        named[own] = tensor
    return named
