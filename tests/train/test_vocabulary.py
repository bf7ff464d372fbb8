"""Draft ids: the most frequent ones, written and read in the published form."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from spd_jax.checks import ConfigError
from train import vocabulary
from train.config import TrainConfig
from train.data import Row
from train.vocabulary import check_same_ids, count_draft_ids, read_draft_ids, run_draft_ids

PUBLISHED = {  # its own vocab_size is below an id: it is the tokenizer's base size
    "tokenizer_name": "x",
    "data_paths": ["y"],
    "mask_assistant": True,
    "vocab_size": 10,
    "draft_vocab_size": 3,
    "token_ids": [1, 4, 12],
    "total_positions_counted": 100,
    "topk_selected_token_count_sum": 90,
    "topk_mass_ratio": 0.9,
}


def write(path, fields):
    path.write_text(fields if isinstance(fields, str) else json.dumps(fields))
    return path


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


def test_a_published_file_is_read_by_the_models_vocabulary(tmp_path):
    path = write(tmp_path / "vocab.json", PUBLISHED)
    assert read_draft_ids(path, 13) == (1, 4, 12)
    with pytest.raises(ConfigError, match=r"from 0 to 11 .* got 12"):
        read_draft_ids(path, 12)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("{", "not readable JSON"),
        ("[1]", "must hold a JSON object"),
        ({}, "token_ids must be a list of integers"),
        ({"token_ids": []}, "token_ids must be a list of integers"),
        ({"token_ids": [1, 2.0]}, "token_ids must be a list of integers"),
        ({"token_ids": [1, True]}, "token_ids must be a list of integers"),
        ({"token_ids": [2, 1]}, "must ascend"),
        ({"token_ids": [1, 1]}, "must ascend"),
        ({"token_ids": [-1, 1]}, "from 0 to 12 .* got -1"),
        ({"token_ids": [1, 10**300]}, "from 0 to 12 .* got 1000"),
        ({**PUBLISHED, "draft_vocab_size": 4}, "says 4, token_ids has 3"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path, fields, message):
    path = write(tmp_path / "vocab.json", fields)
    with pytest.raises(ConfigError, match=message) as error:
        read_draft_ids(path, 13)
    assert str(error.value).startswith(f"{path}: ") and "\n" not in str(error.value)


def test_the_command_writes_what_it_counted(tmp_path, capsys):
    text = {"text": "aaaabbbc"}
    data = write(tmp_path / "rows.jsonl", json.dumps(text) + "\n[]\n")
    out = tmp_path / "vocab.json"
    flags = ["--target", "tiny", "--data", str(data), "--out", str(out)]
    assert vocabulary.main([*flags, "--size", "2"]) == 0
    fields = json.loads(out.read_text())
    assert set(fields) == set(PUBLISHED)
    assert fields["token_ids"] == [97, 98] and fields["vocab_size"] == 256
    assert (fields["total_positions_counted"], fields["topk_selected_token_count_sum"]) == (8, 7)
    assert fields["topk_mass_ratio"] == 7 / 8
    assert read_draft_ids(out, 256) == (97, 98)
    said = capsys.readouterr().err
    assert "2 ids cover 87.50% of 8 scored ids" in said and "1 skipped" in said
    with pytest.raises(ConfigError, match="^--size must be from 1"):
        vocabulary.main([*flags, "--size", "257"])
    with pytest.raises(ConfigError, match="existing folder"):
        vocabulary.main([*flags, "--size", "2", "--out", str(tmp_path / "no" / "vocab.json")])


def test_only_a_vocabulary_file_is_replaced(tmp_path):
    data = write(tmp_path / "rows.jsonl", {"text": "aab"})
    other = write(tmp_path / "other.json", {"token_ids": "mine"})
    link = tmp_path / "link.json"
    link.symlink_to(write(tmp_path / "vocab.json", PUBLISHED))
    for out, message in (
        (data, "is one of the files of --data"),
        (other, "is there and is no draft vocabulary"),
        (link, "got the link or device"),
        (tmp_path, "got the folder"),
        ("/dev/full", "got the link or device"),
        ("x" * 256, "File name too long"),
    ):
        before = {p: p.read_bytes() for p in tmp_path.iterdir()}
        with pytest.raises(ConfigError, match=message):
            vocabulary.main(
                ["--target", "tiny", "--data", str(tmp_path / "*.jsonl"), "--size", "2"]
                + ["--out", str(out)]
            )
        assert {p: p.read_bytes() for p in tmp_path.iterdir()} == before
    vocabulary.check_replaceable(tmp_path / "vocab.json", [str(data)])


def test_a_file_of_other_ids_is_warned_of(tmp_path, capsys):
    target = SimpleNamespace(config=SimpleNamespace(vocab_size=13), stop_ids=())
    config = TrainConfig(draft_vocab=str(write(tmp_path / "vocab.json", PUBLISHED)))
    for ids, is_poor in (([1, 5, 6], True), ([1, 4, 5, 6], False)):
        rows = [Row(np.array(ids, np.int32), np.ones(len(ids), bool), 0.0)]
        run_draft_ids(config, rows, target)
        assert ("vocab.json are only 33.33% of the" in capsys.readouterr().err) == is_poor


def test_a_run_takes_its_ids_from_the_file_and_goes_on_with_the_same_ones_only(tmp_path):
    path = write(tmp_path / "vocab.json", PUBLISHED)
    config = TrainConfig(draft_vocab=str(path))
    target = SimpleNamespace(config=SimpleNamespace(vocab_size=13), stop_ids=(12,))
    rows = [Row(np.array([1, 1, 4, 5], np.int32), np.ones(4, bool), 0.0)]
    assert run_draft_ids(config, rows, target) == ((1, 4, 12), 3 / 4)
    assert run_draft_ids(TrainConfig(), rows, target) == (None, 1.0)
    assert run_draft_ids(TrainConfig(draft_vocab_size=2), rows, target) == ((1, 12), 2 / 4)
    check_same_ids(config, SimpleNamespace(draft_ids=(1, 4, 12)), target)
    check_same_ids(TrainConfig(), SimpleNamespace(draft_ids=(1, 4)), target)
    with pytest.raises(ConfigError, match="are not those of the run in runs/pdm"):
        check_same_ids(config, SimpleNamespace(draft_ids=(1, 4)), target)
