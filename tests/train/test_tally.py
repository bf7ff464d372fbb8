"""Counts of a file in one line, however many reasons and rows there are."""

from pathlib import Path

import pytest

from spd_jax.checks import ConfigError
from train.tally import Tally


def test_only_the_first_rows_and_the_commonest_reasons_are_shown():
    tally = Tally(Path("rows.jsonl"), n_records=30)
    for number in range(1, 9):
        tally.skip(number, "common")
    for number in range(11, 20):
        tally.skip(number, f"reason {number}")
    text = tally.describe_skipped()
    assert text.startswith("17 skipped: 8 common (lines 1, 2, 3, 4, 5, ...), 1 reason 11 (line 11)")
    assert text.endswith("1 reason 15 (line 15), 4 for other reasons")
    assert (tally.n_skipped, tally.n_used) == (17, 13)


def test_a_file_without_a_used_row_is_an_error_that_says_why():
    tally = Tally(Path("rows.parquet"), n_records=1)
    tally.check("unused")
    tally.skip(1, "not UTF-8")
    with pytest.raises(ConfigError, match=r"1 skipped: 1 not UTF-8 \(row 1\); give others"):
        tally.check("give others")
    with pytest.raises(ConfigError, match="it has no rows; give others"):
        Tally(Path("rows.jsonl")).check("give others")
