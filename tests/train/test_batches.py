"""Batches: each row once an epoch, resumable by number; packed sequences keep rows apart."""

import numpy as np
import pytest

from spd_jax.models.distill import IGNORED
from train.batches import (
    bucket_len,
    fill_sequences,
    make_batch,
    make_packed_batch,
    ordered_batches,
    training_batches,
)
from train.data import Row


def make_row(n, number=0):
    ids = np.full(n, number, np.int32)
    return Row(ids, np.ones(n, bool), 0.7, number)


def test_labels_are_the_scored_ids():
    row = Row(np.array([7, 8, 9], np.int32), np.array([False, True, True]), 0.0, 4)
    batch = make_batch([row], n_rows=2, length=4)
    assert batch["input_ids"].tolist() == [[7, 8, 9, 0], [0, 0, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [0, 0, 0, 0]]
    assert batch["labels"].tolist() == [[IGNORED, 8, 9, IGNORED], [IGNORED] * 4]
    assert batch["row_numbers"].tolist() == [4, -1]


def test_lengths_are_multiples_of_64_up_to_the_longest():
    assert [bucket_len(n, 160) for n in (1, 64, 65, 128, 129, 160)] == [64, 64, 128, 128, 160, 160]
    assert [bucket_len(n, 1000) for n in (1, 128, 129, 896, 897)] == [128, 128, 256, 896, 1000]


@pytest.mark.parametrize("longest", [2, 63, 256, 512, 513, 1000, 2048, 5000])
def test_there_are_few_lengths_and_each_holds_its_rows(longest):
    lens = np.arange(1, longest + 1)
    padded = np.array([bucket_len(int(n), longest) for n in lens])
    assert len({*padded.tolist()}) <= 8
    assert (padded >= lens).all() and padded[-1] == longest
    assert (padded - lens).max() < max(64, longest / 8 + 64)  # and padding stays small


def test_an_epoch_holds_every_row_once_and_differs_from_the_next():
    n_epochs = 3
    rows = [make_row(n, i) for i, n in enumerate([20, 60, 64, 65, 99, 128, 129, 10, 80, 18, 16])]
    batches, n_batches = training_batches(rows, 192, 256, seed=1)
    orders = []
    for epoch in range(n_epochs):
        numbers = []
        for i in range(n_batches):
            batch = batches[epoch * n_batches + i]
            assert batch["input_ids"].size <= 256
            numbers += [n for n in batch["row_numbers"].tolist() if n >= 0]
        assert sorted(numbers) == list(range(len(rows)))
        orders.append(tuple(numbers))
    assert len(set(orders)) == n_epochs
    shapes = {batches[i]["input_ids"].shape for i in range(n_epochs * n_batches)}
    assert shapes == {(4, 64), (2, 128), (1, 192)}  # few compilations


def test_a_batch_depends_on_rows_seed_and_number_alone():
    rows = [make_row(9, i) for i in range(30)]
    first, _ = training_batches(rows, 32, 64, seed=1)
    again, _ = training_batches(rows, 32, 64, seed=1)
    other, _ = training_batches(rows, 32, 64, seed=2)
    numbers = [b["row_numbers"].tolist() for b in (first[17], again[17], other[17])]
    assert numbers[0] == numbers[1] != numbers[2]


def test_ordered_batches_hold_every_row_once():
    rows = [make_row(n, i) for i, n in enumerate([100, 3, 70, 4, 5])]
    members = [[row.number for row in chosen] for chosen, _ in ordered_batches(rows, 128, 128)]
    assert members == [[1, 3], [4], [0], [2]]


def test_a_packed_batch_numbers_its_rows_and_scores_no_first_token():
    rows = [make_row(n, i + 1) for i, n in enumerate([3, 2, 4])]
    batch = make_packed_batch([rows[:2], rows[2:]], n_rows=3, length=6, n_segments=2)
    assert batch["input_ids"].tolist() == [[1, 1, 1, 2, 2, 0], [3, 3, 3, 3, 0, 0], [0] * 6]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 0, 0], [0] * 6]
    x = IGNORED
    assert batch["labels"].tolist() == [[x, 1, 1, x, 2, x], [x, 3, 3, 3, x, x], [x] * 6]
    assert batch["row_numbers"].tolist() == [[1, 2], [3, -1], [-1, -1]]
    one_row = make_batch(rows[:1], 1, 6)
    assert {n: a.dtype for n, a in batch.items()} == {n: a.dtype for n, a in one_row.items()}


@pytest.mark.parametrize("seed", range(3))
def test_first_fit_leaves_no_room_that_a_later_row_would_have_taken(seed):
    rng = np.random.default_rng(seed)
    rows = [make_row(int(n), i) for i, n in enumerate(rng.integers(1, 33, 200))]
    sequences = fill_sequences(rows, 32, seed)
    assert sorted(row.number for s in sequences for row in s) == list(range(200))
    totals = [sum(len(row.ids) for row in s) for s in sequences]
    assert max(totals) <= 32
    for i, later in enumerate(sequences):
        # A row opened this sequence, or came in, since none before had room for it then or now.
        assert all(32 - total < len(row.ids) for total in totals[:i] for row in later)
    assert sum(totals) > 0.85 * 32 * len(sequences)


def test_with_one_open_sequence_rows_stay_in_shuffled_order(monkeypatch):
    monkeypatch.setattr("train.batches.OPEN_SEQUENCES", 1)
    rows = [make_row(1 + i % 20, i) for i in range(60)]
    sequences = fill_sequences(rows, 32, seed=3)
    order = np.random.default_rng([3, 32]).permutation(60).tolist()
    assert [row.number for s in sequences for row in s] == order != list(range(60))


def test_packed_epochs_hold_every_row_once_and_resume_by_number():
    rng = np.random.default_rng(5)
    rows = [make_row(int(n), i) for i, n in enumerate(rng.integers(2, 40, 50))]
    batches, n_batches = training_batches(rows, 48, 96, seed=1, packing=True)
    again, _ = training_batches(rows, 48, 96, seed=1, packing=True)
    orders = []
    for epoch in range(2):
        numbers = []
        for i in range(epoch * n_batches, (epoch + 1) * n_batches):
            batch = batches[i]
            assert batch["input_ids"].shape == (2, 48)
            numbers += [n for n in batch["row_numbers"].ravel().tolist() if n >= 0]
        assert sorted(numbers) == list(range(50))
        orders.append(numbers)
    assert orders[0] != orders[1]
    for name, array in again[n_batches + 3].items():
        np.testing.assert_array_equal(array, batches[n_batches + 3][name])
    other, _ = training_batches(rows, 48, 96, seed=2, packing=True)
    assert other[0]["row_numbers"].tolist() != batches[0]["row_numbers"].tolist()
