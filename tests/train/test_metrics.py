"""The metrics file survives kills without a duplicate step; means are weighted by positions."""

import json

import pytest

from spd_jax.checks import ConfigError
from train.metrics import MeanMetrics, MetricsFile


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_resumed_file_holds_each_step_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path, 0) as log:
        for step in (10, 20, 30):
            log.write({"step": step, "run": 1})
            assert read(path)[-1]["step"] == step  # on disk at once
    with open(path, "a") as file:
        file.write('{"step": 2')  # the writer was killed here
    with MetricsFile(path, 20) as log:
        log.write({"step": 30, "run": 2})
    assert [(r["step"], r["run"]) for r in read(path)] == [(10, 1), (20, 1), (30, 2)]


def test_damaged_lines_are_dropped_with_a_note(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    damaged = [b"[" * 200_000, bytes(range(128, 256)), b'{"step": "3"}', b"9" * 5000, b""]
    good = b'{"step": 1}\n'
    path.write_bytes(good + b"\n".join(damaged) + b'\n{"step": 2}\n{"step": 3}\n')
    with MetricsFile(path, 2):
        pass
    assert read(path) == [{"step": 1}, {"step": 2}]
    assert f"note: {path}: 5 damaged lines are dropped\n" == capsys.readouterr().err
    with MetricsFile(path, 2):
        pass
    assert not capsys.readouterr().err


def test_a_disk_that_refuses_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="cannot keep metrics"):
        MetricsFile(tmp_path / "absent" / "metrics.jsonl", 0)

    with (
        pytest.raises(ConfigError, match="/dev/full: cannot write .*No space left"),
        MetricsFile(tmp_path / "metrics.jsonl", 0) as log,
    ):
        log._file.close()
        log._file = open("/dev/full", "w")
        log.write({"step": 1})


def test_an_interval_goes_on_after_a_stop():
    one = {"accuracy": 0.5, "coverage": 1.0, "grad_norm": 1.0}
    whole, first = MeanMetrics(), MeanMetrics()
    for window in (whole, first):
        window.add({**one, "loss": 0.1, "n_valid": 3}, n_tokens=50)
    second = MeanMetrics(json.loads(json.dumps(first.so_far())))
    for window in (whole, second):
        window.add({**one, "loss": 0.7, "n_valid": 7}, n_tokens=20)
    names = ("loss", "accuracy", "n_valid")
    want, got = whole.take(), second.take()
    assert [got[name] for name in names] == [want[name] for name in names]
    assert got["seconds_per_step"] > 0


def test_means_are_weighted_by_valid_positions():
    window = MeanMetrics()
    zero = {"accuracy": 0.0, "coverage": 1.0, "grad_norm": 1.0}
    window.add({**zero, "loss": 1.0, "n_valid": 30}, n_tokens=50)
    window.add({**zero, "loss": 4.0, "n_valid": 10}, n_tokens=50)
    record = window.take()
    assert record["loss"] == pytest.approx(1.75) and record["n_valid"] == 40
    ratio = record["scored_per_second"] / record["tokens_per_second"]
    assert ratio == pytest.approx(0.4)
    assert window.take()["n_valid"] == 0  # each interval starts anew
