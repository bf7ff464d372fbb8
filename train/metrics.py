"""metrics.jsonl, one JSON object a line, and the progress display."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from spd_jax.checks import ConfigError
from spd_jax.weights.files import one_line, replace_file


class MetricsFile:
    """Appends records that carry a `step`; each is on disk when `write` returns.

    A disk that refuses is a ConfigError.

    Opening it for a run that resumes at `step` drops the records beyond that, which the
    resumed run will write again.
    """

    def __init__(self, path: Path, step: int) -> None:
        try:
            if path.exists():
                lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
                kept = [line for line in lines if _is_before(line, step)]
                if kept != lines:
                    replace_file(path, "".join(kept).encode())
            self._file = open(path, "a", encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: cannot keep metrics ({one_line(error)})") from None

    def write(self, record: dict[str, Any]) -> None:
        """Appends one record."""
        try:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        except OSError as error:
            raise ConfigError(f"{self._file.name}: cannot write ({one_line(error)})") from None

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # of a `write` that has failed: it said so
            self._file.close()


def _is_before(line: str, step: int) -> bool:
    try:
        return line.endswith("\n") and json.loads(line)["step"] <= step
    except (ValueError, KeyError, TypeError):
        return False  # a line that a killed writer left unfinished


class MeanMetrics:
    """Means over the steps of a log interval, weighted by their valid positions, and speeds.

    An interval may span a stop: `so_far` goes into the checkpoint and comes back as `begun`.
    """

    def __init__(self, begun: dict[str, Any] | None = None) -> None:
        self._start()
        if begun is not None:
            self._sums = dict(begun["sums"])
            self._n_steps, self._n_valid = begun["n_steps"], begun["n_valid"]
            self._n_tokens, self._seconds = begun["n_tokens"], begun["seconds"]

    def _start(self) -> None:
        self._sums = dict.fromkeys(("loss", "accuracy", "coverage", "grad_norm"), 0.0)
        self._n_steps = self._n_valid = self._n_tokens = 0
        self._seconds, self._resumed = 0.0, time.monotonic()

    def so_far(self) -> dict[str, Any]:
        """Returns what the interval holds, as JSON can."""
        return {
            "sums": dict(self._sums),
            "n_steps": self._n_steps,
            "n_valid": self._n_valid,
            "n_tokens": self._n_tokens,
            "seconds": self._seconds,
        }

    def add(self, metrics: dict[str, Any], n_tokens: int) -> None:
        """Adds the metrics of a step and its number of tokens without padding."""
        now = time.monotonic()
        self._seconds, self._resumed = self._seconds + now - self._resumed, now
        n_valid = int(metrics["n_valid"])
        for name in self._sums:
            self._sums[name] += float(metrics[name]) * n_valid
        self._n_valid += n_valid
        self._n_tokens += n_tokens
        self._n_steps += 1

    def restart_clock(self) -> None:
        """Leaves out the time since the last `add`: an evaluation or a save."""
        self._resumed = time.monotonic()

    def take(self) -> dict[str, Any]:
        """Returns the means and speeds since the last call."""
        means = {name: total / max(self._n_valid, 1) for name, total in self._sums.items()}
        seconds = max(self._seconds, 1e-9)
        record = {
            **means,
            "n_valid": self._n_valid,
            "tokens_per_second": self._n_tokens / seconds,
            "scored_per_second": self._n_valid / seconds,
            "seconds_per_step": seconds / max(self._n_steps, 1),
        }
        self._start()
        return record


class TrainProgress:
    """A live bar on a terminal; elsewhere one plain line per record."""

    def __init__(self, n_steps: int, step: int, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._n_steps = n_steps
        columns = (
            TextColumn("training"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
        )
        self._bar = None
        if self._console.is_terminal:
            self._bar = Progress(*columns, console=self._console)
            self._task = self._bar.add_task("training", total=n_steps, completed=step, figures="")

    def __enter__(self) -> TrainProgress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def advance(self, step: int) -> None:
        """Moves the bar to a step."""
        if self._bar:
            self._bar.update(self._task, completed=step)

    def show(self, record: dict[str, Any]) -> None:
        """Shows the figures of a training record."""
        figures = (
            f"loss {record['loss']:.3f}  accuracy {record['accuracy']:.3f}  coverage "
            f"{record['coverage']:.3f}  {record['tokens_per_second']:.0f} tok/s "
            f"({record['scored_per_second']:.0f} scored)"
        )
        if self._bar:
            self._bar.update(self._task, figures=figures)
        else:
            seconds_left = (self._n_steps - record["step"]) * record["seconds_per_step"]
            minutes = f"{seconds_left / 60:.0f} min left"
            self.say(f"step {record['step']}/{self._n_steps}  {figures}  {minutes}")

    def say(self, line: str) -> None:
        """Prints a line above the bar."""
        if self._bar:
            self._console.print(line, highlight=False, markup=False)
        else:
            print(line, file=self._console.file, flush=True)
