"""How far a long command is: a live bar on a terminal, elsewhere one plain line at a time."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class RoundProgress:
    """Rounds done, tokens written, their rate, and the time that is left."""

    def __init__(self, n_rounds: int, done: int, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._n_rounds, self._first, self._done = n_rounds, done, done
        self._n_tokens, self._began = 0, time.monotonic()
        self._bar = None
        if self._console.is_terminal:
            columns = (
                TextColumn("rounds"),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=self._console)
            self._task = self._bar.add_task("", total=n_rounds, completed=done, figures="")

    def __enter__(self) -> RoundProgress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def advance(self, n_tokens: int) -> None:
        """Counts a round in which so many tokens were written, and shows it."""
        self._done += 1
        self._n_tokens += n_tokens
        seconds = max(time.monotonic() - self._began, 1e-9)
        figures = f"{self._n_tokens} tokens written, {self._n_tokens / seconds:.0f} a second"
        if self._bar:
            self._bar.update(self._task, completed=self._done, figures=figures)
            return
        left = (self._n_rounds - self._done) * seconds / (self._done - self._first)
        line = f"round {self._done}/{self._n_rounds}: {figures}, {_minutes(left)} left"
        print(line, file=self._console.file, flush=True)


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
