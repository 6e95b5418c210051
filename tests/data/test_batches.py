import subprocess
import sys

import pytest
from support.tables import table_of

from gptj_ft.data.batches import Rows, micro_batches, rows_of_step, steps_per_epoch, windows_apart, windows_joined
from gptj_ft.data.loss_mask import num_inputs, num_targets
from gptj_ft.models.batch import NO_TARGET


@pytest.mark.parametrize(("num_rows", "batch_size"), [(1, 1), (1, 8), (7, 3), (8, 4), (100, 7)])
def test_an_epoch_takes_each_row_once(num_rows, batch_size):
    steps = steps_per_epoch(num_rows, batch_size)
    for epoch in range(3):
        batches = [rows_of_step(epoch * steps + step, num_rows, batch_size, seed=5) for step in range(steps)]
        assert sorted(row for batch in batches for row in batch) == list(range(num_rows))
        assert all(len(batch) == batch_size for batch in batches[:-1])
        assert 1 <= len(batches[-1]) <= batch_size


def test_any_step_is_addressable_directly():
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


def test_order_is_platform_independent():
    # Written down once: a resumed run must see these rows whatever numpy it finds.
    assert rows_of_step(0, 10, 10, seed=0) == [3, 2, 1, 8, 6, 0, 7, 4, 5, 9]


def packed_ids(documents, budget):
    return [batch.tokens_T.tolist() for batch in micro_batches(documents, [0] * len(documents), budget)]


def test_packing_wastes_few_micro_batches():
    documents = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10, 11]]
    packed = micro_batches(documents, [0] * 4, budget_tokens=6)
    assert [batch.tokens_T.tolist() for batch in packed] == [[1, 2, 3, 10, 11], [4, 5, 6, 7, 8, 9]]
    assert [batch.cu_seqlens for batch in packed] == [(0, 3, 5), (0, 2, 6)]
    assert packed_ids(documents, 11) == [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]]


@pytest.mark.parametrize("budget", [1, 7, 40, 100])
def test_every_document_fits_one_micro_batch(budget):
    documents = [[index] * (index * 37 % 41 + 1) for index in range(60)]
    packed = packed_ids(documents, budget)
    assert sorted(token for batch in packed for token in batch) == sorted(token for ids in documents for token in ids)
    assert all(len(batch) <= budget or len(set(batch)) == 1 for batch in packed)
    tokens = sum(map(len, documents))
    alone = sum(len(ids) > budget for ids in documents)
    assert len(packed) <= alone + 11 / 9 * -(-tokens // budget) + 1 or budget < 41


def test_targets_are_the_tokens_after_the_prompt():
    [batch] = micro_batches([[1, 2, 3], [4, 5], [6, 7, 8, 9]], [1, 0, 2], budget_tokens=9)
    assert batch.targets_T.tolist() == [2, 3, NO_TARGET, 5, NO_TARGET, NO_TARGET, 8, 9, NO_TARGET]
    assert batch.positions_T.tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3]


def test_masked_spans_are_no_targets():
    [batch] = micro_batches([[9, 9], [1, 2, 3, 4, 5, 6, 7]], [0, 2], 9, [[], [3, 5]])
    assert batch.targets_T.tolist() == [9, *[NO_TARGET] * 2, 3, *[NO_TARGET] * 2, 6, 7, NO_TARGET]
    assert batch.num_targets == num_targets(2, 0) + num_targets(7, 2, [3, 5]) == 4


def test_oversized_document_gets_own_micro_batch():
    assert packed_ids([[1], [2, 2, 2, 2], [3], [4]], 2) == [[1, 3], [2, 2, 2, 2], [4]]


LENGTHS = [3, 9, 2, 1, 14, 5, 5, 2, 30]


@pytest.mark.parametrize("length", [2, 3, 7, 8, 100])
def test_apart_windows_are_full_with_all_targets(length):
    windows = windows_apart(LENGTHS, length)
    targets = [(document, at) for window in windows for document, start, end in window for at in range(start + 1, end)]
    assert targets == [(document, at) for document, tokens in enumerate(LENGTHS) for at in range(1, tokens)]
    # A target may stand behind a window that one document fills.
    sizes = [sum(num_inputs(end - start, length) for _, start, end in window) for window in windows]
    assert all(length - 1 <= size <= length for size in sizes[:-1])
    assert 2 <= sizes[-1] <= length
    assert all(end - start > 1 for window in windows for _, start, end in window)


@pytest.mark.parametrize("length", [2, 3, 7, 8, 100])
def test_joined_windows_have_all_targets_once(length):
    # The third document begins with the token that the second ends with, which is not read twice.
    continues = [number == 2 for number in range(len(LENGTHS))]
    windows = windows_joined(LENGTHS, continues, length)
    stream = [(document, at) for document, tokens in enumerate(LENGTHS) for at in range(continues[document], tokens)]
    read = [[(document, at) for document, start, end in window for at in range(start, end)] for window in windows]
    assert [token for window in read for token in window[1:]] == stream[1:]
    assert all(len(window) == length for window in read[:-1])
    assert 2 <= len(read[-1]) <= length


def test_packing_mode_decides_attention_boundaries():
    rows = table_of(input_ids=[[1, 2, 3], [4, 5], [6, 7]])
    of = {packing: Rows.of(rows, packing, 4) for packing in ("off", "apart", "joined")}
    assert {packing: len(each) for packing, each in of.items()} == {"off": 3, "apart": 2, "joined": 2}
    assert [batch.cu_seqlens for batch in of["apart"].batches([0], 9)] == [(0, 3)]
    assert [batch.cu_seqlens for batch in of["apart"].batches([1], 9)] == [(0, 2, 4)]
    assert [batch.cu_seqlens for batch in of["joined"].batches([1], 9)] == [(0, 4)]
    for each in of.values():
        batches = each.batches(range(len(each)), 5)
        assert each.num_targets == sum(batch.num_targets for batch in batches)
        assert each.lengths == [sum(len(x.ids) for x in each.row(index)) for index in range(len(each))]
    assert of["joined"].num_targets == 6


def test_row_longer_by_one_keeps_last_target():
    table = table_of(input_ids=[[1, 2, 3, 4, 5], [6, 7, 8, 9], [1, 2, 3, 4, 5]], prompt_length=[0, 0, 3])
    rows = Rows.of(table, length=4)
    assert (rows.lengths, rows.num_targets) == ([4, 4, 4], 4 + 3 + 2)
    [batch] = rows.batches([0, 1, 2], budget_tokens=12)
    assert batch.tokens_T.tolist() == [1, 2, 3, 4, 6, 7, 8, 9, 1, 2, 3, 4]
    assert batch.targets_T.tolist() == [2, 3, 4, 5, 7, 8, 9, NO_TARGET, NO_TARGET, NO_TARGET, 4, 5]
    assert batch.positions_T.tolist() == [0, 1, 2, 3] * 3
    assert batch.cu_seqlens == (0, 4, 8, 12)
    assert [batch.cu_seqlens for batch in rows.batches([1, 2], budget_tokens=4)] == [(0, 4), (0, 4)]


def test_foreign_windows_equal_packed_rows():
    windows = [list(range(9))] * 3
    rows = Rows.of(table_of(input_ids=[*windows, [1, 2, 3], *windows[:1]]), "apart", 8)
    assert rows.windows == [[(0, 0, 9)], [(1, 0, 9)], [(2, 0, 9)], [(3, 0, 3), (4, 0, 5)], [(4, 4, 9)]]
    assert rows.lengths == [8, 8, 8, 8, 5]
    batches = rows.batches(range(5), 8)
    assert rows.num_targets == sum(batch.num_targets for batch in batches) == 4 * 8 + 2
    assert max(len(batch.tokens_T) for batch in batches) == 8


def test_rows_with_prompts_are_never_packed():
    rows = table_of(input_ids=[[1, 2], [3, 4]], prompt_length=[0, 1])
    assert len(Rows.of(rows, "apart", 8)) == 2


def test_chat_prompt_ends_before_last_answer():
    rows = Rows([[1, 2, 3, 4, 5, 6]] * 2, [2, 2], [[3, 4], []])
    assert [rows.prompt(index) for index in range(2)] == [[1, 2, 3, 4], [1, 2]]


def test_table_rows_are_packed_in_order():
    rows = Rows.of(table_of(input_ids=[[1, 2], [3, 4, 5], [6, 7]], prompt_length=[0, 1, 1]))
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
