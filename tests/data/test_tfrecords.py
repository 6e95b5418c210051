"""Test that TFRecords of mesh-transformer-jax are read like by its loader, and damaged ones named."""

from __future__ import annotations

import gzip
import random
import struct
import zlib
from pathlib import Path

import pytest
from google_crc32c import value as crc32c
from support.token_files import example, field, masked, packed, record, text_record, varint

from gptj_ft.data.readers.records import read_rows
from gptj_ft.data.readers.rows import Findings, Row
from gptj_ft.data.readers.source import identify, record_length
from gptj_ft.errors import DataError, UsageError

WINDOWS = [[15496, 995, 50256], [0, 1, 127, 128, 16383, 16384, 50399], list(range(2049))]
# {"text": [1, 300]}, put together by hand from the format's description.
GOLDEN_EXAMPLE = bytes.fromhex("0a11 0a0f 0a04 74657874 1207 1a05 0a03 01ac02")


def one_by_one(tokens: list[int]) -> bytes:
    return field(3, b"".join(varint(1 << 3 | 0) + varint(token) for token in tokens))


def mixed(tokens: list[int]) -> bytes:
    """Mix packed and unpacked numbers, which a reader must accept:
    https://protobuf.dev/programming-guides/encoding/#packed.
    """
    half = len(tokens) // 2
    one = [varint(1 << 3 | 0) + varint(token) for token in tokens]
    return field(3, b"".join(one[:half]) + field(1, b"".join(map(varint, tokens[half:-1]))) + one[-1])


def written(path: Path, *records: bytes) -> Path:
    path.write_bytes(b"".join(records))
    return path


def ids(source: Path, findings: Findings | None = None) -> list[list[int]]:
    return [row.values["input_ids"] for row in read_rows(identify(source), findings)]


# What is read


def test_a_record_written_by_hand_is_read(tmp_path: Path) -> None:
    assert example({"text": packed([1, 300])}) == GOLDEN_EXAMPLE
    golden = bytes.fromhex("1300000000000000") + bytes.fromhex("0c91321b") + GOLDEN_EXAMPLE + bytes.fromhex("83df5d4c")
    assert golden == record(GOLDEN_EXAMPLE)
    assert ids(written(tmp_path / "a.tfrecords", golden)) == [[1, 300]]


@pytest.mark.parametrize("form", [packed, one_by_one, mixed])
def test_all_tokens_but_the_first_are_targets(form, tmp_path: Path) -> None:
    path = written(tmp_path / "a_3.tfrecords", *(record(example({"text": form(tokens)})) for tokens in WINDOWS))
    assert list(read_rows(identify(path))) == [
        Row(str(path), number, {"input_ids": tokens, "trained": [1, len(tokens)]})
        for number, tokens in enumerate(WINDOWS, 1)
    ]


def test_window_of_one_token_has_no_target(tmp_path: Path) -> None:
    (row,) = read_rows(identify(written(tmp_path / "a.tfrecords", text_record([5]))))
    assert row.values == {"input_ids": [5], "trained": []}


def test_unknown_features_and_fields_are_skipped(tmp_path: Path) -> None:
    unknown = varint(9 << 3 | 5) + b"1234" + varint(8 << 3 | 1) + b"12345678" + varint(7 << 3 | 0) + varint(1)
    payload = unknown + example({"id": packed([9]), "text": packed([1, 2]), "source": field(1, field(1, b"web"))})
    assert ids(written(tmp_path / "a.tfrecord", record(payload + unknown))) == [[1, 2]]


@pytest.mark.parametrize("name", ["pile_zstd_2.tfrecords", "a.tfrecords"])
@pytest.mark.parametrize("pack", [zlib.compress, gzip.compress], ids=["zlib", "gzip"])
def test_compressed_files_are_read_under_any_name(pack, name: str, tmp_path: Path) -> None:
    path = written(tmp_path / name, pack(b"".join(map(text_record, WINDOWS))))
    assert ids(path) == WINDOWS
    whole = path.read_bytes()
    for cut in range(1, len(whole), 97):
        path.write_bytes(whole[:cut])
        with pytest.raises(DataError, match=name):
            ids(path)


def test_tfrecords_are_recognized_by_content(tmp_path: Path) -> None:
    findings = Findings()
    # Lengths whose first bytes are those of gzip (with deflate) and of UTF-16
    for length in (0x088B1F, 0xFEFF):
        payload = example({"text": packed([1, 2]), "more": field(1, b"")})
        payload += field(9, bytes(length - len(payload) - 4))
        assert len(payload) == length
        head = struct.pack("<Q", length)
        crc = crc32c(payload)  # the definition takes a second for this
        path = written(tmp_path / "train-00001-of-00002", head, masked(head), payload)
        with path.open("ab") as opened:
            opened.write(struct.pack("<I", ((crc >> 15 | crc << 17 & 0xFFFFFFFF) + 0xA282EAD8) % 2**32))
        assert ids(path, findings) == [[1, 2]]
    assert not findings.notes
    named = written(tmp_path / "a.jsonl", text_record([1, 2]))
    assert ids(named, findings) == [[1, 2]]
    assert list(findings.notes) == [f"{named} contains tfrecords and is read as such, although its name says jsonl"]


# An index


def test_index_paths_are_relative_to_its_folder(tmp_path: Path) -> None:
    (tmp_path / "records").mkdir()
    first = written(tmp_path / "records" / "a.tfrecords", text_record([1, 2]))
    second = written(tmp_path / "b.tfrecords", text_record([3, 4]))
    index = tmp_path / "train.index"
    index.write_text(f"records/a.tfrecords\r\n\n{second}\n")
    assert [row.source for row in read_rows(identify(index))] == [str(first), str(second)]
    before = identify(index).sha256
    written(first, text_record([5, 6]))
    assert identify(index).sha256 != before, "what is cached by the index would be stale"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("b.tfrecords", r"train\.index:2: no such file: 'b\.tfrecords'; paths are relative"),
        ("gs://bucket/b.tfrecords", r"train\.index:2: no such file: 'gs://bucket/b\.tfrecords'; copy it here first"),
        ("rows.jsonl", r"train\.index:2: .*rows\.jsonl is jsonl; an index may list only TFRecords"),
        ("nul\0", r"train\.index:2: no such file"),
        ("x" * 5000, r"train\.index:2: no such file"),
    ],
)
def test_wrong_index_entry_is_named(line: str, says: str, tmp_path: Path) -> None:
    written(tmp_path / "a.tfrecords", text_record([1, 2]))
    (tmp_path / "rows.jsonl").write_text("{}")
    index = tmp_path / "train.index"
    index.write_text(f"a.tfrecords\n{line}\n")
    with pytest.raises(DataError, match=says):
        ids(index)
    index.write_text("\n")
    with pytest.raises(DataError, match="the index lists no files"):
        ids(index)


def test_index_does_not_repeat_its_files(tmp_path: Path) -> None:
    written(tmp_path / "a.tfrecords", text_record([1, 2]))
    (tmp_path / "a.index").write_text("a.tfrecords\n")
    (tmp_path / "data_params.json").write_text("{}")
    assert ids(tmp_path) == [[1, 2]]
    (tmp_path / "texts.jsonl").write_text('{"text": "a"}')
    for source in (tmp_path, tmp_path / "*.[tj]*l*"):
        if source != tmp_path:
            written(tmp_path / "b.tfl", text_record([1]))
        with pytest.raises(UsageError, match=r"has both tokens \(\w\.tf\w+\) and texts \(texts\.jsonl\)"):
            ids(source)


# What is wrong


def test_an_empty_file_is_explained(tmp_path: Path) -> None:
    path = written(tmp_path / "a_0.tfrecords")
    with pytest.raises(DataError, match=r"a_0\.tfrecords: the file is empty; .* fewer tokens than a window \(2049\)"):
        ids(path)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (record(b"\x0a\xff"), "not a protobuf message of type Example"),
        (record(b"\xff" * 11), "not a protobuf message of type Example"),
        (record(b"\x0b"), "not a protobuf message of type Example"),
        (record(b"\x0a\x05"), "not a protobuf message of type Example"),
        (record(example({"text": field(3, field(1, b"\x01\x80"))})), "not a protobuf message of type Example"),
        (
            record(example({"text": field(3, field(1, b"\x80" * 10 + b"\x01"))})),
            "not a protobuf message of type Example",
        ),
        (text_record([]), "the record has no tokens"),
        (text_record([3, -1]), "-1 is not a token id"),
        (text_record([2**31, 3]), "2147483648 is not a token id"),
        (text_record([1, 2, 3])[:-1] + b"?", "damaged: the record does not match its checksum"),
        (
            text_record([1, 2, 3]).replace(b"text", b"tent"),
            "damaged: the record does not match its checksum",
        ),
    ],
)
def test_bad_record_is_reported_others_are_read(bad: bytes, says: str, tmp_path: Path) -> None:
    path = written(tmp_path / "a.tfrecords", text_record([1, 2]), bad, text_record([3, 4]))
    findings = Findings(most_bad=1)
    assert ids(path, findings) == [[1, 2], [3, 4]]
    assert findings.bad == [(f"{path}:2", says)]
    with pytest.raises(DataError, match=r"a\.tfrecords:2: "):
        ids(path)


@pytest.mark.parametrize("number", [1, 2])
def test_implausible_length_ends_reading(number: int, tmp_path: Path) -> None:
    huge = struct.pack("<Q", 2**50)
    for header in (struct.pack("<Q", 40) + b"1234", huge + masked(huge)):
        records = [text_record([1, 2])] * (number - 1)
        path = written(tmp_path / "a.tfrecords", *records, header, bytes(100), text_record([1]))
        with pytest.raises(
            DataError, match=rf"a\.tfrecords:{number}: .*the record (has a length|is {2**50} bytes long)"
        ):
            ids(path, Findings(most_bad=9))


@pytest.mark.parametrize(
    ("features", "has"), [({"input_ids": packed([1]), "labels": packed([1])}, "input_ids, labels"), ({}, "none"),
                          ({"text": field(1, field(1, b"words"))}, "text")],
)  # fmt: skip
def test_foreign_records_are_rejected_with_features(features: dict[str, bytes], has: str, tmp_path: Path) -> None:
    path = written(tmp_path / "a.tfrecords", record(example(features)))
    with pytest.raises(DataError, match=rf"a\.tfrecords:1: the record lacks the feature 'text'.*; it has {has}$"):
        ids(path, Findings(most_bad=9))


def test_truncated_file_gives_its_complete_records(tmp_path: Path) -> None:
    windows = [[1, 2, 3], [400, 5], [70000, 6, 7, 8]]
    ends = [sum(len(text_record(tokens)) for tokens in windows[:count]) for count in range(4)]
    whole = b"".join(map(text_record, windows))
    for cut in range(len(whole)):
        path = written(tmp_path / "a.tfrecords", whole[:cut])
        complete = sum(end <= cut for end in ends[1:])
        if cut in ends[1:]:
            assert ids(path) == windows[:complete]
            continue
        with pytest.raises(DataError, match=r"a\.tfrecords"):
            ids(path)
        if complete:
            findings = Findings(most_bad=1)
            assert ids(path, findings) == windows[:complete]
            assert findings.bad == [
                (f"{path}:{complete + 1}", "the file ends within this record: it was truncated"),
            ]


@pytest.mark.parametrize("seed", range(3))
def test_damaged_record_is_never_misread(seed: int, tmp_path: Path) -> None:
    draw, windows = random.Random(seed), [[1, 2, 3], [400, 5], [70000, 6, 7, 8]]
    whole = b"".join(map(text_record, windows))
    for _ in range(200):
        data = bytearray(whole)
        at = draw.randrange(len(data))
        data[at : at + draw.choice([0, 1, 1, 3])] = draw.randbytes(draw.choice([0, 1, 1, 3]))
        path = written(tmp_path / "a.tfrecords", bytes(data))
        findings = Findings(most_bad=9)
        try:
            read = ids(path, findings)
        except DataError:
            continue
        assert all(tokens in windows for tokens in read)
        assert bytes(data) == whole or findings.bad


def test_only_one_record_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gptj_ft.data.readers import tfrecord

    one = text_record(list(range(2049)))
    path = written(tmp_path / "a.tfrecords", *[one] * 200)
    read = []
    opened_file = tfrecord.opened_file

    class Watched:
        def __init__(self, opened):
            self.opened = opened

        def read(self, count: int) -> bytes:
            read.append(count)
            return self.opened.read(count)

    from contextlib import contextmanager

    @contextmanager
    def watched(file):
        with opened_file(file) as opened:
            yield Watched(opened)

    monkeypatch.setattr(tfrecord, "opened_file", watched)
    rows = iter(read_rows(identify(path)))
    next(rows)
    assert sum(read) == len(one), "it reads ahead"
    assert sum(1 for _ in rows) == 199
    assert max(read) < len(one)


def test_tfrecord_header_is_recognized() -> None:
    assert record_length(text_record([1, 2, 3])) == len(example({"text": packed([1, 2, 3])}))
    assert record_length(b"{" * 12) is None
    assert record_length(b"short") is None
