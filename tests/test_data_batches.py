import subprocess
import sys

import pytest

from gptj_ft.data.batches import Rows, micro_batches, rows_of_step, steps_per_epoch
from gptj_ft.layers import NO_TARGET


@pytest.mark.parametrize(("num_rows", "batch_size"), [(1, 1), (1, 8), (7, 3), (8, 4), (100, 7)])
def test_an_epoch_takes_each_row_once(num_rows, batch_size):
    steps = steps_per_epoch(num_rows, batch_size)
    for epoch in range(3):
        batches = [rows_of_step(epoch * steps + step, num_rows, batch_size, seed=5) for step in range(steps)]
        assert sorted(row for batch in batches for row in batch) == list(range(num_rows))
        assert all(len(batch) == batch_size for batch in batches[:-1])
        assert 1 <= len(batches[-1]) <= batch_size


def test_any_step_can_be_addressed_without_the_ones_before():
    forward = [rows_of_step(step, 23, 4, seed=1) for step in range(30)]
    assert [rows_of_step(step, 23, 4, seed=1) for step in reversed(range(30))] == forward[::-1]
    assert rows_of_step(17, 23, 4, seed=1) == forward[17]


def test_order_depends_on_seed_and_epoch():
    orders = {
        tuple(row for step in range(5) for row in rows_of_step(epoch * 5 + step, 50, 10, seed))
        for seed in (0, 1, 2**62)
        for epoch in (0, 1)
    }
    assert len(orders) == 6


def test_order_is_the_same_on_every_machine_and_version():
    # Written down once: a resumed run must see these rows whatever numpy it finds.
    assert rows_of_step(0, 10, 10, seed=0) == [3, 2, 1, 8, 6, 0, 7, 4, 5, 9]


def test_packed_documents_have_no_padding_and_keep_their_order():
    documents = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10, 11]]
    packed = micro_batches(documents, [1, 0, 2, 1], budget_tokens=5)
    assert [batch.tokens_T.tolist() for batch in packed] == [[1, 2, 3, 4, 5], [6, 7, 8, 9], [10, 11]]
    assert [batch.cu_seqlens for batch in packed] == [(0, 3, 5), (0, 4), (0, 2)]
    assert sum(len(batch.tokens_T) for batch in packed) == sum(map(len, documents))


def test_targets_are_the_tokens_after_the_prompt():
    [batch] = micro_batches([[1, 2, 3], [4, 5], [6, 7, 8, 9]], [1, 0, 2], budget_tokens=9)
    assert batch.targets_T.tolist() == [2, 3, NO_TARGET, 5, NO_TARGET, NO_TARGET, 8, 9, NO_TARGET]
    assert batch.positions_T.tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3]


def test_a_document_above_the_budget_is_a_micro_batch_of_its_own():
    packed = micro_batches([[1], [2, 2, 2, 2], [3], [4]], [0] * 4, budget_tokens=2)
    assert [batch.tokens_T.tolist() for batch in packed] == [[1], [2, 2, 2, 2], [3, 4]]


def test_rows_of_a_data_set_are_packed_in_the_order_asked_for():
    from datasets import Dataset

    rows = Rows.of(Dataset.from_dict({"input_ids": [[1, 2], [3, 4, 5], [6, 7]], "prompt_length": [0, 1, 1]}))
    assert len(rows) == 3
    [batch] = rows.batches([2, 0], budget_tokens=9)
    assert batch.tokens_T.tolist() == [6, 7, 1, 2]
    assert batch.targets_T.tolist() == [7, NO_TARGET, 2, NO_TARGET]
    assert [len(ids) for ids in rows.documents] == [2, 3, 2]
    assert len(Rows.of(None)) == 0
    assert Rows.of(None).batches(range(0), budget_tokens=9) == []


def test_batches_import_neither_datasets_nor_transformers():
    code = "import sys, gptj_ft.data.batches; print([m for m in ('datasets', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
