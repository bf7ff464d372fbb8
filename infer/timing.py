"""Timing on the device: loops of known length, measured in turn, so that a busy moment hits all."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping

from rich.console import Console
from rich.progress import track

Run = Callable[[int], float]  # does a thing n times and returns the seconds that took
Once = Callable[[], float]  # measures and returns the seconds of one time


@dataclasses.dataclass(frozen=True)
class Figure:
    """Seconds of doing a thing once."""

    seconds: float  # median
    fastest: float
    slowest: float


def timed(work: Callable[[int], object]) -> Run:
    """Returns a Run of work(n), which waits for its results."""

    def run(n: int) -> float:
        began = time.perf_counter()
        work(n)
        return time.perf_counter() - began

    return run


def once_of(run: Run, seconds: float, most: int | None = None) -> Once:
    """Returns what measures a run that takes about `seconds`, or that is of `most` times."""
    run(1)  # warms up
    n = max(2, math.ceil(seconds / (run(2) / 2)))
    n = n if most is None else min(n, most)
    return lambda: run(n) / n


def interleave(measures: Mapping[str, Once], reps: int) -> dict[str, Figure]:
    """Takes each of the measures `reps` times, in turn, and shows on stderr how far it is."""
    found: dict[str, list[float]] = {name: [] for name in measures}
    for _ in track(range(reps), "measuring", console=Console(stderr=True)):
        for name, once in measures.items():
            found[name].append(once())
    return {
        name: Figure(statistics.median(times), min(times), max(times))
        for name, times in found.items()
    }
