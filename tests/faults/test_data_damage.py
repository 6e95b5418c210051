"""Damage data files of every format: each row is trained on or reported, or the file is rejected."""

from __future__ import annotations

import csv
import gzip
import io
import json
import lzma
import random
from pathlib import Path

import pytest
from support.tiny_tokenizer import make_tokenizer

from gptj_ft.config.resolve import resolve
from gptj_ft.data.prepare import TokenizeJob, tokenize_rows
from gptj_ft.errors import GptjFtError

ROWS = [
    {"document": f"Note {n}: café, “quoted” and\nlong {'word ' * n}", "summary": f'Short {n}, "so"'} for n in range(12)
]
SQUAD = {"data": [{"title": "t", "paragraphs": [{"context": "It rains.", "qas": [
    {"id": str(n), "question": f"Q{n}?", "answers": [{"text": "It", "answer_start": 0}]} for n in range(5)
]}]}]}  # fmt: skip
VARIANTS = 125  # of each form


def as_csv(delimiter: str) -> bytes:
    out = io.StringIO()
    writer = csv.DictWriter(out, ["document", "summary"], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(ROWS)
    return out.getvalue().encode()


def as_parquet() -> bytes:
    import pyarrow
    from pyarrow import parquet

    out = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), out)
    return out.getvalue()


LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
FORMS = {
    "a.jsonl": ("summarization", LINES),
    "a.json": ("summarization", json.dumps(ROWS, indent=1).encode()),
    "squad.json": ("squad", json.dumps(SQUAD).encode()),
    "a.csv": ("summarization", as_csv(",")),
    "a.tsv": ("summarization", as_csv("\t").replace(b'"', b"")),
    "a.txt": ("autocomplete", b"\n\n".join(row["document"].encode() for row in ROWS)),
    "a.jsonl.gz": ("summarization", gzip.compress(LINES, mtime=0)),
    "a.jsonl.xz": ("summarization", lzma.compress(LINES)),
    "a.parquet": ("summarization", as_parquet()),
}


def damaged(content: bytes, draw: random.Random) -> bytes:
    """Apply up to three damages: flip bits, delete, insert, duplicate or truncate."""
    data = bytearray(content)
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(data) + 1)
        kind = draw.randrange(6)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del data[at : at + draw.randint(1, 40)]
        elif kind == 2:
            data[at:at] = draw.choice(
                [b"\xff\xfe", b"\x00", b'"', b"}\n{", b"\r", b"[" * 2000, b"\xed\xa0\x80", b"\n\n", b"\\u12"]
            )
        elif kind == 3:
            data[at:at] = data[at : at + draw.randint(1, 200)]
        elif kind == 4:
            del data[at:]
        else:
            data[at:at] = bytes(draw.randrange(256) for _ in range(draw.randint(1, 12)))
        if not data:
            break
    return bytes(data)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FORMS)
def test_damaged_file_loses_no_row_silently(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPTJ_FT_HOME", str(tmp_path / "home"))
    preset, content = FORMS[name]
    tokenizer, path = make_tokenizer(), tmp_path / name
    draw, refused = random.Random(name), 0
    for number in range(VARIANTS):
        path.write_bytes(damaged(content, draw) if number else content)
        recipe = resolve({"recipe": preset, "max_bad_rows": draw.choice([0, 3])}, environment={}).recipe
        try:
            report = tokenize_rows(TokenizeJob.of(recipe, tokenizer, path, 50400)).report
        except GptjFtError:
            refused += 1
            continue
        assert report.rows_read == report.rows_kept + sum(skips.count for skips in report.rows_skipped.values())
        assert number or report.rows_kept == report.rows_read
    assert 0 < refused < VARIANTS, "too little damage, or nothing else"
