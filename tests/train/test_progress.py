"""Progress of rounds and of training: a bar on a terminal, one line at a time elsewhere."""

import io

import pytest
from rich.console import Console

from train.progress import RoundProgress, TrainProgress


def show(monkeypatch, **console):
    clock = iter([0.0, 2.0, 4.0])
    monkeypatch.setattr("train.progress.time.monotonic", lambda: next(clock))
    file = io.StringIO()
    with RoundProgress(5, 1, Console(file=file, width=120, **console)) as progress:
        monkeypatch.undo()
        monkeypatch.setattr("train.progress.time.monotonic", lambda: next(clock))
        progress.advance(100)
        progress.advance(300)
        monkeypatch.undo()
    return file.getvalue()


def test_lines_tell_the_rate_and_the_time_left(monkeypatch):
    assert show(monkeypatch).splitlines() == [
        "round 2/5: 100 tokens written, 50 a second, 6 s left",
        "round 3/5: 400 tokens written, 100 a second, 4 s left",
    ]


def test_a_terminal_gets_a_bar():
    file = io.StringIO()
    console = Console(file=file, width=120, force_terminal=True)
    with RoundProgress(5, 1, console) as progress:
        progress.advance(100)
    assert "2/5" in file.getvalue() and "100 tokens written" in file.getvalue()
    assert "round 2/5" not in file.getvalue()


@pytest.mark.parametrize("is_terminal", [False, True])
def test_training_shows_the_figures(is_terminal):
    out = io.StringIO()
    console = Console(file=out, force_terminal=is_terminal, width=160)
    figures = {"loss": 1.5, "accuracy": 0.25, "coverage": 0.9, "seconds_per_step": 60.0}
    speeds = {"tokens_per_second": 120.0, "scored_per_second": 80.0}
    with TrainProgress(40, 0, console) as progress:
        progress.advance(10)
        progress.show({"step": 10, **figures, **speeds})
        progress.say("a line")
    text = out.getvalue()
    words = ["10/40", "loss 1.500", "accuracy 0.250", "coverage 0.900", "120 tok/s", "a line"]
    assert all(word in text for word in words)
    assert is_terminal or "30 min left" in text
