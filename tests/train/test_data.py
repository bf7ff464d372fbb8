"""Rows: what is refused, skipped and cut; batches: each row once an epoch, resumable by number."""

import json

import numpy as np
import pytest

from spd_jax.checks import ConfigError
from spd_jax.models.distill import IGNORED
from train.data import (
    Corpus,
    Row,
    bucket_len,
    count_draft_ids,
    last_answers,
    make_batch,
    ordered_batches,
    read_corpus,
    training_batches,
)

GOOD = {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "temperature": 0.7}


def write(path, *rows, end="\n"):
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + end)
    return path


def make_row(n, number=0):
    ids = np.full(n, number, np.int32)
    return Row(ids, np.ones(n, bool), 0.7, number)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{not json}", "not a JSON row"),
        ("[1]", "must be a JSON object, got list"),
        ({**GOOD, "input_ids": "abc"}, "input_ids must be a list of integers"),
        ({**GOOD, "input_ids": [1, 2.5, 3]}, "input_ids must be a list of integers"),
        ({**GOOD, "loss_mask": [True, True, True]}, "loss_mask must be a list of integers"),
        ({"input_ids": [1]}, "loss_mask must be a list of integers"),
        ({**GOOD, "loss_mask": [0, 1]}, "one entry per id, got 2 for 3 ids"),
        ({**GOOD, "loss_mask": [0, 1, 2]}, "must hold 0 and 1 only"),
        ({**GOOD, "input_ids": [1, 2, 64]}, "from 0 to 63, got 64"),
        ({**GOOD, "input_ids": [-1, 2, 3]}, "from 0 to 63, got -1"),
        ({**GOOD, "temperature": "warm"}, "temperature must be a number >= 0, got 'warm'"),
    ],
)
def test_a_bad_row_is_an_error_that_names_file_and_line(tmp_path, row, message):
    path = write(tmp_path / "rows.jsonl", GOOD, row, GOOD)
    with pytest.raises(ConfigError, match=message) as error:
        read_corpus(path, 64, 8)
    assert f"{path}:2:" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_gives_no_row_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot read training rows"):
        read_corpus(tmp_path / "absent.jsonl", 64, 8)
    with pytest.raises(ConfigError, match="no usable row"):
        read_corpus(write(tmp_path / "empty.jsonl"), 64, 8)
    unscored = write(tmp_path / "unscored.jsonl", {**GOOD, "loss_mask": [1, 0, 0]})
    with pytest.raises(ConfigError, match="no usable row \\(1 without a scored id\\)"):
        read_corpus(unscored, 64, 8)


def test_skipped_rows_and_cut_tokens_are_counted(tmp_path):
    unscored = {**GOOD, "loss_mask": [0, 0, 0]}
    long = {"input_ids": [5] * 10, "loss_mask": [0, *[1] * 9]}
    path = write(tmp_path / "rows.jsonl", GOOD, unscored, long, '{"input_ids": [1,', end="")
    corpus = read_corpus(path, 64, 8)
    assert [len(row.ids) for row in corpus.rows] == [3, 8]
    assert [row.number for row in corpus.rows] == [0, 1]
    assert (corpus.n_skipped, corpus.n_cut) == (2, 2)
    assert "2 rows, 11 tokens, 9 of them scored; 2 rows skipped" in corpus.describe()
    assert "2 tokens beyond sequence_len cut" in corpus.describe()


def test_an_unfinished_line_inside_the_file_is_an_error(tmp_path):
    path = write(tmp_path / "rows.jsonl", '{"input_ids": [1,', GOOD)
    with pytest.raises(ConfigError, match=":1: not a JSON row"):
        read_corpus(path, 64, 8)


def test_labels_are_the_scored_ids():
    row = Row(np.array([7, 8, 9], np.int32), np.array([False, True, True]), 0.0, 4)
    batch = make_batch([row], n_rows=2, length=4)
    assert batch["input_ids"].tolist() == [[7, 8, 9, 0], [0, 0, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [0, 0, 0, 0]]
    assert batch["labels"].tolist() == [[IGNORED, 8, 9, IGNORED], [IGNORED] * 4]
    assert batch["row_numbers"].tolist() == [4, -1]


def test_lengths_are_multiples_of_64_up_to_the_longest():
    assert [bucket_len(n, 160) for n in (1, 64, 65, 128, 129, 160)] == [64, 64, 128, 128, 160, 160]


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


def test_draft_ids_are_the_most_frequent_scored_ids_and_the_stop_ids():
    ids = np.array([9, 9, 9, 3, 3, 5, 7, 7, 7, 7], np.int32)
    mask = np.array([1, 1, 1, 1, 1, 1, 0, 0, 0, 0], bool)  # 7 is prompt only
    rows = [Row(ids, mask, 0.0)]
    assert count_draft_ids(rows, 3, 12, stop_ids=(11,)) == ((3, 9, 11), 5 / 6)
    assert count_draft_ids(rows, 1, 12, stop_ids=()) == ((9,), 3 / 6)
    filled, mass = count_draft_ids(rows, 6, 12, stop_ids=(11,))
    assert filled == (0, 1, 3, 5, 9, 11) and mass == 1  # the lowest unseen ids fill up
    assert count_draft_ids(rows, 2, 12, (11,), among=(3, 5, 11)) == ((3, 11), 2 / 6)
    assert count_draft_ids(rows, 3, 12, (11,), among=(0, 3, 11)) == ((0, 3, 11), 2 / 6)
    assert count_draft_ids(rows, 2, 12, (11,), among=(0, 3, 5)) == ((3, 5), 3 / 6)
    with pytest.raises(ConfigError, match="to the draft ids of start_from, 3, got 4"):
        count_draft_ids(rows, 4, 12, (11,), among=(3, 5, 11))
    for size in (0, 13):
        with pytest.raises(ConfigError, match="draft_vocab_size must be from 1"):
            count_draft_ids(rows, size, 12, stop_ids=(11,))


def test_last_answers_leave_out_a_self_written_prompt():
    mask = np.array([0, 1, 1, 0, 0, 1, 1, 1], bool)
    corpus = Corpus((Row(np.arange(8, dtype=np.int32), mask, 0.0, 0),), "aa", 0, 0)
    (row,) = last_answers(corpus).rows
    assert row.scored_mask.tolist() == [False] * 5 + [True] * 3
    whole = Corpus((Row(np.arange(3, dtype=np.int32), np.ones(3, bool), 0.0, 0),), "aa", 0, 0)
    assert last_answers(whole).rows[0].scored_mask.all()
