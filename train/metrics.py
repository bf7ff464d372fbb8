"""metrics.jsonl, one JSON object a line, and the means that go into it."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

from spd_jax.checks import ConfigError
from spd_jax.commandline import say
from spd_jax.weights.files import one_line, replace_file

NAME = "metrics.jsonl"


class MetricsFile:
    """Appends records that carry a `step`; each is on disk when `write` returns.

    A disk that refuses is a ConfigError.

    Opening it for a run that resumes at `step` drops the records beyond that, which the
    resumed run will write again, and lines that are no records.
    """

    def __init__(self, path: Path, step: int) -> None:
        try:
            if path.exists():
                # The last is empty, or what a killed writer left unfinished.
                lines = path.read_bytes().split(b"\n")
                steps = [_step(line) for line in lines[:-1]]
                n_damaged = steps.count(None)
                if n_damaged:
                    say(f"note: {path}: {n_damaged} damaged lines are dropped")
                kept = [
                    line + b"\n"
                    for line, its_step in zip(lines, steps, strict=False)
                    if its_step is not None and its_step <= step
                ]
                if b"".join(kept) != b"\n".join(lines):
                    replace_file(path, b"".join(kept))
            self._file = open(path, "a", encoding="utf-8")
        except OSError as error:
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


def _step(line: bytes) -> int | None:
    """Returns the step of a record; None where the line is none."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return step if isinstance(step, int) else None


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
