"""Test that oversized or endless files are rejected with file, line and limit, in little memory."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import socket
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest

from gptj_ft.config.resolve import resolve
from gptj_ft.data.readers.records import read_rows
from gptj_ft.data.readers.rows import Findings
from gptj_ft.data.readers.source import FileOptions, ReadLimits, identify
from gptj_ft.errors import DataError, UsageError

LIMIT = 2**16
MANY = 8 * 2**20  # what is packed
PACKINGS: dict[str, Callable[[bytes], bytes]] = {
    "": lambda content: content,
    ".gz": lambda content: gzip.compress(content, 1, mtime=0),
    ".xz": lambda content: lzma.compress(content, preset=0),
    ".zst": lambda content: pyarrow.compress(content, "zstd", asbytes=True),
}
GOOD = b'{"text": "a"}\n'
TABLE = b"text,label\na,b\n"
BOMBS: dict[str, tuple[str, bytes, str, int]] = {
    "zeros": ("a.jsonl", GOOD + bytes(MANY), "paragraph", 2),
    "a long text": ("a.jsonl", GOOD + b'{"text": "' + b"x" * MANY, "paragraph", 2),
    "blank lines": ("a.jsonl", GOOD + b"\n" * MANY, "paragraph", LIMIT + 2),
    "a long value": ("a.json", b'[\n{"text": "' + b"x" * MANY + b'"}]', "paragraph", 2),
    "blanks in JSON": ("a.json", b"[\n" + b" " * MANY + b"]", "paragraph", 0),
    "lines in JSON": ("a.json", b'{"data":\n' + b"\n" * MANY + b"[]}", "paragraph", 0),
    "a long cell": ("a.csv", TABLE + b'"' + b"x" * MANY, "paragraph", 3),
    "a quote that is never closed": ("a.csv", TABLE + b'"' + b"xxxxxxxxx\n" * (MANY // 10), "paragraph", 3),
    "blanks after a table": ("a.csv", TABLE + b"\n" * MANY, "paragraph", LIMIT + 3),
    "a long line": ("a.txt", b"a\n" + b"x" * MANY, "line", 2),
    "a long paragraph": ("a.txt", b"a\n\n" + b"xxxxxxxxx\n" * (MANY // 10), "paragraph", 3),
    "a long document": ("a.txt", b"xxxxxxxxx\n" * (MANY // 10), "file", 1),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("name", BOMBS)
def test_oversized_record_is_rejected_in_little_memory(name: str, packing: str, tmp_path: Path) -> None:
    file, content, documents, line = BOMBS[name]
    if packing != ".gz" and name not in ("zeros", "a long value"):
        return
    path = tmp_path / (file + packing)
    path.write_bytes(PACKINGS[packing](content))
    del content
    options = FileOptions(documents=documents, max_record=LIMIT, encoding="utf-8")
    tracemalloc.start()
    with pytest.raises(DataError) as caught:
        list(read_rows(identify(path, options)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    where, _, rest = str(caught.value).partition(": ")
    number = int(where.rpartition(":")[2])
    assert where.startswith(f"{path}:")
    assert number == line or not line
    assert rest.startswith("record longer than 65536 bytes; ")
    assert rest.endswith("--set max_record=131072")
    assert peak < MANY


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.txt"])
def test_many_blank_lines_are_rejected_soon(name: str, tmp_path: Path) -> None:
    (path := tmp_path / name).write_bytes({"a.csv": TABLE}.get(name, GOOD) + (b"\n" * 10 + GOOD) + b" \n" * 12)
    options = FileOptions(encoding="utf-8", limits=ReadLimits(blank_lines=11))
    with pytest.raises(DataError, match=rf"{name}:\d+: 11 blank lines in succession; the file may be damaged: remove"):
        list(read_rows(identify(path, options), Findings(9)))


def test_record_limit_is_an_option(tmp_path: Path) -> None:
    (path := tmp_path / "a.jsonl").write_text(json.dumps({"text": "x" * 1000}) + "\n")
    assert resolve({}, environment={}).recipe.max_record == 256 * 2**20
    assert resolve({}, None, ("max_record=2GiB",), environment={}).recipe.max_record == 2**31
    assert len(list(read_rows(identify(path, FileOptions(max_record=1013))))) == 1
    with pytest.raises(DataError, match=r"a\.jsonl:1: record longer than 1012 bytes"):
        list(read_rows(identify(path, FileOptions(max_record=1012))))


def test_compressed_parquet_is_bounded(tmp_path: Path) -> None:
    (path := tmp_path / "a.parquet.gz").write_bytes(gzip.compress(b"PAR1" + bytes(MANY), 1))
    with pytest.raises(DataError, match=r"a\.parquet\.gz: longer than .* decompress the file first"):
        list(read_rows(identify(path, FileOptions(limits=ReadLimits(parquet=LIMIT)))))


def test_special_files_are_rejected_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.jsonl")
    with socket.socket(socket.AF_UNIX) as server:
        os.chdir(tmp_path)
        server.bind("socket.jsonl")
        for path in (tmp_path / "fifo.jsonl", tmp_path / "socket.jsonl", Path("/dev/zero"), Path("/dev/null")):
            with pytest.raises(UsageError, match="is a pipe, a device or a socket"):
                list(read_rows(identify(path)))
    (tmp_path / "good.jsonl").write_bytes(GOOD)
    assert len(list(read_rows(identify(tmp_path)))) == 1, "in a folder they are passed over"
