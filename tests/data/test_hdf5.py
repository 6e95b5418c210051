"""Test HDF5 samples of the Cerebras model zoo: the targets are exactly those of its loss mask."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest
from support.token_files import EOS, PAD, SEP, sample, write_hdf5

from gptj_ft.data.readers import hdf5
from gptj_ft.data.readers.records import read_rows
from gptj_ft.data.readers.rows import Findings, Row
from gptj_ft.data.readers.source import FileOptions, ReadLimits, identify
from gptj_ft.errors import DataError, UsageError

h5py = pytest.importorskip("h5py")
np = pytest.importorskip("numpy")


def read(
    path: Path, findings: Findings | None = None, limits: ReadLimits = ReadLimits()
) -> list[tuple[list[int], list[int]]]:
    rows = read_rows(identify(path, FileOptions(limits=limits)), findings)
    return [(row.values["input_ids"], row.values["trained"]) for row in rows]


# Samples


def test_packed_window_includes_its_last_label(tmp_path: Path) -> None:
    path = write_hdf5(tmp_path / "a.h5", [sample([7, 8, EOS, 9, 10], {1, 2, 3, 4}, 4)] * 3, stated=3)
    assert list(read_rows(identify(path))) == [
        Row(str(path), number, {"input_ids": [7, 8, EOS, 9, 10], "trained": [1, 5]}) for number in (1, 2, 3)
    ]


def test_summary_targets_are_completion_and_eos(tmp_path: Path) -> None:
    prompt, completion = [1, 2, 3], [4, 5]
    tokens = [*prompt, SEP, *completion, EOS]
    # Where the input ends in EOS (mask 0) and its label is the first padding, as that system writes it.
    rows = sample([*tokens, PAD], {4, 5, 6}, 12)
    assert rows[1] == [0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0]
    path = write_hdf5(tmp_path / "a.hdf5", [rows, sample([6, *tokens], {5, 6, 7}, 12, pad=0)])
    assert read(path) == [(tokens, [4, 7]), ([6, *tokens], [5, 8])]


def test_dialogue_answers_become_separate_spans(tmp_path: Path) -> None:
    tokens = list(range(100, 112))
    path = write_hdf5(tmp_path / "a.h5", [sample(tokens, {3, 4, 5, 8, 10, 11}, 11)])
    assert read(path) == [(tokens, [3, 6, 8, 9, 10, 12])]


def test_sample_without_target_is_kept_whole(tmp_path: Path) -> None:
    path = write_hdf5(tmp_path / "a.h5", [sample([1, 2, 3], set(), 4)])
    assert read(path) == [([1, 2, PAD, PAD], [])]


def test_sample_count_is_compared_with_attribute(tmp_path: Path) -> None:
    one = sample([1, 2, 3], {1, 2}, 4)
    for stated, notes in [(2, 0), (np.int64(2), 0), (3, 1), ("many", 1), ([2, 2], 1), (None, 0)]:
        findings = Findings()
        path = write_hdf5(tmp_path / "a.h5", [one] * 2, stated=stated)
        assert len(read(path, findings)) == 2
        assert len(findings.notes) == notes
        assert all("n_examples" in note and "has 2" in note for note in findings.notes)


# Several samples in a row


def several(documents: list[tuple[list[int], set[int]]], length: int, joined: bool = False) -> list[list[int]]:
    """Five rows, in the two ways that system writes them.

    Either each document ends with a label of its own, or (``joined``) all are in the input one after another, and the
    last position of each, the very last one excepted, has mask 0 and the next document's first token as its label.
    """
    ids, mask, labels, spans, positions = [], [], [], [], []
    for number, (tokens, trained) in enumerate(documents):
        inputs = tokens if joined and number < len(documents) - 1 else tokens[:-1]
        ids += inputs
        mask += [int(index + 1 in trained) for index in range(len(inputs))]
        labels += tokens[1:] + ([documents[number + 1][0][0]] if len(inputs) == len(tokens) else [])
        spans += reversed(range(len(inputs)))
        positions += range(len(inputs))
    padding = [0] * (length - len(ids))
    rest = [PAD] * len(padding)
    return [ids + rest, mask + padding, labels + rest, spans + padding, positions + padding]


@pytest.mark.parametrize("joined", [False, True])
def test_packed_samples_are_separate_documents(joined: bool, tmp_path: Path) -> None:
    documents = [([1, 2, 3, EOS], {2, 3}), ([5, 6, EOS], {1, 2}), ([8, 9, 10, 11, EOS], {4})]
    path = write_hdf5(tmp_path / "a.h5", [several(documents, 14, joined), several(documents[:1], 14, joined)])
    rows = list(read_rows(identify(path)))
    assert [row.line for row in rows] == [1, 1, 1, 2]
    assert [row.values["input_ids"] for row in rows] == [tokens for tokens, _ in [*documents, documents[0]]]
    assert [row.values["trained"] for row in rows] == [[2, 4], [1, 3], [4, 5], [2, 4]]


def test_targetless_sample_is_not_padding(tmp_path: Path) -> None:
    path = write_hdf5(tmp_path / "a.h5", [several([([1, 2, 3], set()), ([5, 6, EOS], {1, 2})], 9)])
    assert read(path) == [([1, 2], []), ([5, 6, EOS], [1, 3])]


def test_padding_alone_is_a_row_too(tmp_path: Path) -> None:
    assert read(write_hdf5(tmp_path / "a.h5", [several([], 3)])) == [([PAD] * 3, [])]


# A corpus


@pytest.mark.parametrize("count", [1, 2, 9, 10, 11, 12, 20, 21, 25])
def test_corpus_tokens_are_targets_once(count: int, tmp_path: Path) -> None:
    corpus = list(range(1000, 1000 + count))
    rows = read(write_hdf5(tmp_path / "a.h5", corpus, dtype="uint16"), limits=ReadLimits(corpus_row=10))
    targets = [ids[index] for ids, bounds in rows if bounds for index in range(*bounds)]
    assert targets == corpus[1:]
    assert rows[0][0][0] == corpus[0]
    assert all(len(ids) <= 11 for ids, _ in rows)


# What is wrong


@pytest.mark.parametrize(
    ("row", "at", "value", "says"),
    [
        (0, 0, -1, "-1 is not a token id"),
        (0, 2, 99, "the labels are not the input ids shifted by one"),
        (2, 1, 99, "the labels are not the input ids shifted by one"),
        (1, 1, 2, "the mask has values other than 0 and 1"),
        (4, 3, 7, "positions neither continue nor restart at 0"),
        (4, 0, 3, "positions neither continue nor restart at 0"),
    ],
)
def test_bad_sample_is_reported_others_are_read(row: int, at: int, value: int, says: str, tmp_path: Path) -> None:
    good = several([([1, 2, 3, EOS], {1, 2, 3}), ([5, 6, EOS], {1, 2})], 9)
    bad = [list(cells) for cells in good]
    bad[row][at] = value
    path = write_hdf5(tmp_path / "a.h5", [good, bad, good])
    findings = Findings(most_bad=1)
    assert len(read(path, findings)) == 4
    assert findings.bad == [(f"{path}:2", says)]
    with pytest.raises(DataError, match=r"a\.h5:2: "):
        read(path)


@pytest.mark.parametrize(("data", "dtype", "found"), [
    (np.zeros((2, 4, 5)), "int32", r"int32, \(2, 4, 5\)"), (np.zeros((2, 5)), "int32", r"int32, \(2, 5\)"),
    (np.zeros((2, 3, 5)), "float32", r"float32, \(2, 3, 5\)"), (np.zeros((2, 3, 0)), "int32", r"int32, \(2, 3, 0\)"),
    (3, "int32", r"int32, \(\)"),
])  # fmt: skip
def test_other_layout_is_rejected_with_expected_one(data: object, dtype: str, found: str, tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as opened:
        opened.create_dataset("data", data=np.array(data, dtype))
    expected = r"a\.h5: expected 'data' of integers, \(N, 3, S\) or \(N, 5, S\) samples, or \(T\) tokens; found "
    with pytest.raises(DataError, match=expected + found):
        read(path)


def test_foreign_hdf5_is_rejected_with_content(tmp_path: Path) -> None:
    path = tmp_path / "model.mdl"
    with h5py.File(path, "w") as opened:
        for number in range(12):
            opened[f"model.{number:02}"] = [1.0]
    with pytest.raises(DataError, match=r"found model\.00, .*model\.09 and 2 more$"):
        read(path)
    with h5py.File(path, "w") as opened:
        opened.create_group("data")
    with pytest.raises(DataError, match=r"found data$"):
        read(path)
    with h5py.File(path, "w") as opened:
        opened["data"] = h5py.Empty("int32")
    with pytest.raises(DataError, match=r"found int32, \(\)$"):
        read(path)


def test_a_file_without_samples_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.h5: the file has no rows"):
        read(write_hdf5(tmp_path / "a.h5", np.zeros((0, 3, 4)), chunks=None, compression=None))


def test_compressed_hdf5_is_rejected_with_advice(tmp_path: Path) -> None:
    import gzip

    path = tmp_path / "a.h5.gz"
    path.write_bytes(gzip.compress(write_hdf5(tmp_path / "a.h5", [1, 2, 3]).read_bytes()))
    with pytest.raises(
        DataError, match=r"a\.h5\.gz: compressed HDF5 cannot be read; decompress the file \(gzip\) first"
    ):
        read(path)


def test_missing_h5py_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_hdf5(tmp_path / "a.h5", [1, 2, 3])
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(UsageError, match=r"pip install 'gptj-ft\[hdf5\]'"):
        read(path)


def test_hdf5_is_recognized_by_content(tmp_path: Path) -> None:
    findings = Findings()
    path = write_hdf5(tmp_path / "a.jsonl", [1, 2, 3])
    assert read(path, findings) == [([1, 2, 3], [1, 3])]
    assert list(findings.notes) == [f"{path} contains hdf5 and is read as such, although its name says jsonl"]
    named = tmp_path / "b.h5"
    for content in (b"", b"text", path.read_bytes()[:1000], path.read_bytes()[100:]):
        named.write_bytes(content)
        with pytest.raises(DataError, match=r"b\.h5: truncated or corrupt HDF5"):
            read(named)


def test_damaged_hdf5_never_crashes(tmp_path: Path) -> None:
    documents = [([1, 2, 3, EOS], {2, 3}), ([5, 6, EOS], {1, 2})]
    whole = write_hdf5(tmp_path / "a.h5", [several(documents, 9)] * 20, stated=20).read_bytes()
    draw, refused = random.Random(0), 0
    for _ in range(250):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(data))
            data[at : at + draw.choice([1, 1, 8])] = draw.randbytes(draw.choice([0, 1, 1, 8]))
        path = tmp_path / "b.h5"
        path.write_bytes(data[: draw.choice([len(data), draw.randrange(len(data))])])
        try:
            read(path, Findings(most_bad=draw.choice([0, 99])))
        except DataError:
            refused += 1
    assert 0 < refused < 250


# Memory


def test_slices_are_bounded_chunks_read_once(tmp_path: Path) -> None:
    limits = ReadLimits(samples=20 * 3 * 4 * 4, hdf5_chunk=100 * 3 * 4 * 4)
    one = sample([1, 2, 3, 4, 5], {1, 2, 3, 4}, 4)
    for chunk, expected in [(1, 20), (7, 14), (50, 50), (1000, 20)]:
        path = write_hdf5(tmp_path / "a.h5", [one] * 1000, chunks=(chunk, 3, 4))
        with h5py.File(path) as opened:
            assert hdf5.samples_at_once(opened["data"], limits) == expected
        assert len(read(path, limits=limits)) == 1000


def test_folder_ignores_data_params(tmp_path: Path) -> None:
    write_hdf5(tmp_path / "b.h5", [4, 5])
    write_hdf5(tmp_path / "a.h5", [1, 2])
    (tmp_path / "data_params.json").write_text(json.dumps({"n_examples": 2}))
    assert read(tmp_path) == [([1, 2], [1, 2]), ([4, 5], [1, 2])]
