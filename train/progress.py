"""How far a long command is: a live bar on a terminal, elsewhere one plain line at a time."""

from __future__ import annotations

import time
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class LiveBar:
    """What is done of a total, with figures beside it."""

    def __init__(self, name: str, total: int, done: int, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._total, self._bar = total, None
        if self._console.is_terminal:
            columns = (
                TextColumn(name),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=self._console)
            self._task = self._bar.add_task("", total=total, completed=done, figures="")

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def say(self, line: str) -> None:
        """Prints a line above the bar."""
        if self._bar:
            self._console.print(line, highlight=False, markup=False)
        else:
            print(line, file=self._console.file, flush=True)

    def _move(self, done: int) -> None:
        if self._bar:
            self._bar.update(self._task, completed=done)

    def _tell(self, figures: str, line: str) -> None:
        """Shows figures beside the bar, or prints a line where there is none."""
        if self._bar:
            self._bar.update(self._task, figures=figures)
        else:
            self.say(line)


class TrainProgress(LiveBar):
    """Updates made, and the figures of each training record."""

    def __init__(self, n_steps: int, step: int, console: Console | None = None) -> None:
        super().__init__("training", n_steps, step, console)

    def advance(self, step: int) -> None:
        """Moves the bar to a step."""
        self._move(step)

    def show(self, record: dict[str, Any]) -> None:
        """Shows the figures of a training record."""
        figures = (
            f"loss {record['loss']:.3f}  accuracy {record['accuracy']:.3f}  coverage "
            f"{record['coverage']:.3f}  {record['tokens_per_second']:.0f} tok/s "
            f"({record['scored_per_second']:.0f} scored)"
        )
        left = (self._total - record["step"]) * record["seconds_per_step"] / 60
        self._tell(figures, f"step {record['step']}/{self._total}  {figures}  {left:.0f} min left")


class RoundProgress(LiveBar):
    """Rounds done, tokens written, their rate, and the time that is left."""

    def __init__(self, n_rounds: int, done: int, console: Console | None = None) -> None:
        super().__init__("rounds", n_rounds, done, console)
        self._first, self._done = done, done
        self._n_tokens, self._began = 0, time.monotonic()

    def advance(self, n_tokens: int) -> None:
        """Counts a round in which so many tokens were written, and shows it."""
        self._done += 1
        self._n_tokens += n_tokens
        seconds = max(time.monotonic() - self._began, 1e-9)
        left = (self._total - self._done) * seconds / (self._done - self._first)
        figures = f"{self._n_tokens} tokens written, {self._n_tokens / seconds:.0f} a second"
        self._move(self._done)
        self._tell(figures, f"round {self._done}/{self._total}: {figures}, {_minutes(left)} left")


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
