"""Read TFRecords of mesh-transformer-jax: rows of tokens. TensorFlow is not needed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, BinaryIO

import numpy as np

from gptj_ft.data.readers.rows import Findings, Row, token_row
from gptj_ft.data.readers.source import HEADER_BYTES, File, opened_file, record_length
from gptj_ft.errors import DataError
from gptj_ft.system.compression import has_checksum

FEATURE = "text"
FOOTER_BYTES = 4  # checksum of the payload
_MOST_BYTES = 2**28  # of a record; 2049 tokens take 6 KB
_LARGEST_ID = 2**31 - 1
# The part of https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/example/feature.proto that holds
# token ids. There `feature` is a map, which has the same wire format.
_EXAMPLE = """
    name: "example.proto" syntax: "proto3"
    message_type { name: "Int64List" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64 } }
    message_type { name: "Feature" field { name: "int64_list" number: 3 type: TYPE_MESSAGE type_name: "Int64List" } }
    message_type { name: "Entry" field { name: "key" number: 1 type: TYPE_STRING }
                                 field { name: "value" number: 2 type: TYPE_MESSAGE type_name: "Feature" } }
    message_type { name: "Features" field { name: "feature" number: 1 label: LABEL_REPEATED
                                            type: TYPE_MESSAGE type_name: "Entry" } }
    message_type { name: "Example" field { name: "features" number: 1 type: TYPE_MESSAGE type_name: "Features" } }
"""


def read_tfrecords(file: File, findings: Findings) -> Iterator[Row]:
    """Read records whose int64 feature `text` is a window of tokens; a row's line is its record number.

    As in mesh-transformer-jax, all tokens except the first are targets.
    """
    for number, payload in _payloads(file, findings):
        tokens = _tokens(file, number, payload)
        if isinstance(tokens, str):
            findings.add(file, number, tokens)
        else:
            yield token_row(file, number, tokens, [1, len(tokens)] if len(tokens) > 1 else [])


def _payloads(file: File, findings: Findings) -> Iterator[tuple[int, bytes]]:
    """Yield (number from 1, payload) of the records with matching checksums."""
    number = 0
    with opened_file(file) as opened:
        while header := opened.read(HEADER_BYTES):
            number += 1
            # A damaged payload costs one record. The header has a checksum of its own, so the next record is still
            # found.
            payload = _payload(file, number, header, opened)
            if isinstance(payload, str):
                findings.add(file, number, payload)
            else:
                yield number, payload
    if not number:
        raise DataError(
            f"{file.path}: the file is empty; create_finetune_tfrecords.py writes such a file if the texts have fewer "
            "tokens than a window (2049)\npass the texts themselves to --data, or make the file from more texts"
        )


def _payload(file: File, number: int, header: bytes, opened: BinaryIO) -> bytes | str:
    """Return a record's payload, or a description of the problem."""
    if len(header) < HEADER_BYTES:
        return "the file ends within this record: it was truncated"
    length = record_length(header)
    if length is None or length > _MOST_BYTES:
        why = f"is {length} bytes long" if length else "has a length that does not match its checksum"
        problem = "not TFRecords, or damaged" if number == 1 else "damaged: cannot find the start of the next record"
        raise DataError(f"{file.path}:{number}: {problem} (the record {why})")
    record = opened.read(length + FOOTER_BYTES)
    if len(record) < length + FOOTER_BYTES:
        return "the file ends within this record: it was truncated"
    payload = record[:length]
    return payload if has_checksum(payload, record[length:]) else "damaged: the record does not match its checksum"


def _tokens(file: File, number: int, payload: bytes) -> list[int] | str:
    """Return a record's tokens, or a description of the problem."""
    from google.protobuf.message import DecodeError

    try:
        features = _example_class().FromString(payload).features.feature
    except DecodeError:
        return "not a protobuf message of type Example"
    lists = [each.value.int64_list for each in features if each.key == FEATURE and each.value.HasField("int64_list")]
    if not lists:
        names = ", ".join(sorted(each.key for each in features)[:10])
        raise DataError(
            f"{file.path}:{number}: the record lacks the feature '{FEATURE}' (int64 tokens) that "
            f"create_finetune_tfrecords.py writes; it has {names or 'none'}"
        )
    # Protobuf: the last entry of a repeated map key wins.
    tokens = np.array(lists[-1].value, np.int64)
    if not len(tokens):
        return "the record has no tokens"
    wrong = tokens[(tokens < 0) | (tokens > _LARGEST_ID)]
    return f"{wrong[0]} is not a token id" if len(wrong) else tokens.tolist()


@cache
def _example_class() -> Any:
    """Build the message class of `Example`, with token features only."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

    # An own pool cannot clash with messages that other packages registered in the default one.
    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(_EXAMPLE, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("Example"))
