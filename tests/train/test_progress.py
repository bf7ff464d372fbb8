"""Progress of rounds: a bar on a terminal, one line a round elsewhere."""

import io

from rich.console import Console

from train.progress import RoundProgress


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
