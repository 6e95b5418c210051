"""TFRecords of mesh-transformer-jax -> rows that are tokens already. TensorFlow is not needed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from gptj_ft.data.readers.rows import Findings, Row, token_row
from gptj_ft.data.readers.source import HEADER_BYTES, File, has_checksum, opened_file, record_length
from gptj_ft.errors import DataError

FEATURE = "text"
FOOTER_BYTES = 4  # the checksum of a payload
MOST_BYTES = 2**28  # of a record; one of 2049 tokens has 6 KB
LARGEST_ID = 2**31 - 1
# Wire types of protobuf (https://protobuf.dev/programming-guides/encoding).
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
VARINT_BYTES = 10  # at most, with seven bits each


def read_tfrecords(file: File, findings: Findings) -> Iterator[Row]:
    """Records whose int64 feature `text` holds a window of tokens; the number of a record stands for its line.

    As in that system, every token is trained on but the first, which has nothing before it.

    Raises:
        DataError: empty, not TFRecords, of other features, or damaged so that no further record can be found.
    """
    for number, payload in _payloads(file, findings):
        tokens = _tokens(file, number, payload)
        if isinstance(tokens, str):
            findings.add(file, number, tokens)
        else:
            yield token_row(file, number, tokens, [1, len(tokens)] if len(tokens) > 1 else [])


def _payloads(file: File, findings: Findings) -> Iterator[tuple[int, bytes]]:
    """Yield (number from 1, payload) of the records that agree with their checksums."""
    number = 0
    with opened_file(file) as opened:
        while header := opened.read(HEADER_BYTES):
            number += 1
            payload = _payload(file, number, header, opened)
            if isinstance(payload, str):
                findings.add(file, number, payload)
            else:
                yield number, payload
    if not number:
        raise DataError(
            f"{file.path}: the file is empty, as create_finetune_tfrecords.py leaves it when the texts have "
            "fewer tokens than a window (2049)\ngive the texts themselves to --data, or make it again from more"
        )


def _payload(file: File, number: int, header: bytes, opened: BinaryIO) -> bytes | str:
    """Return what a record holds, or what is wrong with it."""
    if len(header) < HEADER_BYTES:
        return "the file ends within this record: it was cut short"
    length = record_length(header)
    if length is None or length > MOST_BYTES:
        why = f"is {length} bytes long" if length else "has a length that its checksum disagrees with"
        what = "not TFRecords, or damaged" if number == 1 else "damaged: where the next record starts cannot be known"
        raise DataError(f"{file.path}:{number}: {what} (the record {why})")
    record = opened.read(length + FOOTER_BYTES)
    if len(record) < length + FOOTER_BYTES:
        return "the file ends within this record: it was cut short"
    payload = record[:length]
    return payload if has_checksum(payload, record[length:]) else "damaged: the record disagrees with its checksum"


def _tokens(file: File, number: int, payload: bytes) -> list[int] | str:
    """Return the tokens in a record, or what is wrong with it.

    The payload is an `Example`: field 1 `Features`, of which field 1 is a map: entries of 1 name, 2 `Feature`. Of a
    `Feature` field 3 is a list of int64, whose field 1 has the numbers, packed or one by one
    (https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/example/feature.proto).

    Raises:
        DataError: it is another kind of record.
    """
    names, tokens = [], None
    try:
        for features in _children(memoryview(payload), 1):
            for entry in _children(features, 1):
                name = b"".join(_children(entry, 1)).decode(errors="replace")
                names.append(name)
                lists = [items for feature in _children(entry, 2) for items in _children(feature, 3)]
                if name == FEATURE and lists:
                    tokens = _int64s(lists)
    except _Malformed as error:
        return f"not an Example: {error}"
    if tokens is None:
        raise DataError(
            f"{file.path}:{number}: the record has no feature '{FEATURE}' of tokens, as create_finetune_tfrecords.py "
            f"writes it; it has {', '.join(sorted(names)[:10]) or 'none'}"
        )
    if not len(tokens):
        return "there are no tokens in the record"
    wrong = tokens[(tokens < 0) | (tokens > LARGEST_ID)]
    return f"{wrong[0]} is no token id" if len(wrong) else tokens.tolist()


class _Malformed(Exception):
    """Bytes that are no protobuf message."""


def _int64s(lists: list[memoryview]) -> NDArray[np.int64]:
    parts = [np.empty(0, np.int64)]
    for items in lists:
        alone: list[int] = []
        for number, value in _fields(items):
            if number != 1:
                continue
            if isinstance(value, int):
                alone.append(value)
            else:
                parts += [_signed(alone), _unpacked(value)]
                alone = []
        parts.append(_signed(alone))
    return np.concatenate(parts)


def _signed(values: list[int]) -> NDArray[np.int64]:
    return np.array(values, np.uint64).view(np.int64)


def _unpacked(packed: memoryview) -> NDArray[np.int64]:
    """Decode varints that follow each other: seven bits a byte, the lowest first, the eighth says that more follow."""
    data = np.frombuffer(packed, np.uint8)
    if not len(data):
        return np.empty(0, np.int64)
    last = np.flatnonzero(data < 0x80)
    if not len(last) or last[-1] != len(data) - 1:
        raise _Malformed("a number is cut short")
    first = np.concatenate([[0], last[:-1] + 1])
    lengths = last - first + 1
    if lengths.max() > VARINT_BYTES:
        raise _Malformed("a number has too many bytes")
    shifts = 7 * (np.arange(len(data)) - np.repeat(first, lengths))
    return np.add.reduceat((data & 0x7F).astype(np.uint64) << shifts.astype(np.uint64), first).view(np.int64)


def _children(message: memoryview, number: int) -> Iterator[memoryview]:
    """Yield the values of a field that are bytes: texts, messages, packed numbers."""
    return (value for found, value in _fields(message) if found == number and not isinstance(value, int))


def _fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield (field number, value) of a message: an int, or bytes."""
    position = 0
    while position < len(message):
        tag, position = _varint(message, position)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == VARINT:
            value, position = _varint(message, position)
            yield number, value
            continue
        if wire_type == BYTES:
            length, position = _varint(message, position)
        elif wire_type in (FIXED64, FIXED32):
            length = 8 if wire_type == FIXED64 else 4
        else:
            raise _Malformed(f"a field of unknown type {wire_type}")
        if position + length > len(message):
            raise _Malformed("a field is longer than the message around it")
        yield number, message[position : position + length]
        position += length


def _varint(message: memoryview, position: int) -> tuple[int, int]:
    """Return an unsigned number of 64 bits, and where it ends."""
    value = 0
    for index in range(VARINT_BYTES):
        if position + index >= len(message):
            raise _Malformed("a number is cut short")
        byte = message[position + index]
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, position + index + 1
    raise _Malformed("a number has too many bytes")
