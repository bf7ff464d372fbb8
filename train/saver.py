"""Saves a run behind its back, and keeps the newest and the best of what was saved.

head -> checkpoint -> what is kept -> best.json, in one thread and in this order: where a
checkpoint is, its head is too, whenever the process is killed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from spd_jax.checks import ConfigError
from spd_jax.commandline import say
from spd_jax.weights.files import one_line, read_json, replace_file
from spd_jax.weights.heads import HEAD_FILES
from train.checkpoint import UNFINISHED, checkpoint_numbers, read_notes, save_state, snapshot
from train.config import TrainConfig
from train.metrics import NAME as METRICS_NAME
from train.record import NAME as RECORD_NAME
from train.step import TrainState

BEST_NAME = "best.json"
# Of a killed `_discard`, head writer or `replace_file`, besides what Orbax leaves.
REPLACED = "|".join(map(re.escape, (BEST_NAME, RECORD_NAME, METRICS_NAME)))
RANDOM = "[a-z0-9_]{8}"  # what `tempfile` adds
LEFTOVER = re.compile(
    rf"\.\d+\.(old|new-{RANDOM}(\.old)?)|\.({REPLACED})\.{RANDOM}|\d+{re.escape(UNFINISHED)}.*"
)
Judged = tuple[int, dict[str, Any]]  # held-out figures, and the position they were taken at
WriteHead = Callable[[int, Any, Judged | None], None]  # position, parameters, last figures


class Saver:
    """One save at a time; an error of a save is raised by the next call. Leaving it waits."""

    def __init__(self, config: TrainConfig, position: int, write_head: WriteHead) -> None:
        """Removes what killed savers left, for a run that goes on at `position`."""
        workdir = Path(config.workdir)
        self._other_heads: set[int] = set()  # with files of others: said and left
        self._config, self._write_head = config, write_head
        self._checkpoints, self._heads = workdir / "checkpoints", workdir / "heads"
        self._best_path = workdir / BEST_NAME
        self._figures: dict[int, float | None] = {
            number: best_figure(config, number, read_notes(self._checkpoints, number))
            for number in checkpoint_numbers(self._checkpoints)
            if number <= position  # later ones could not be read: no slot is theirs
        }
        self._pending: Future | None = None
        self._executor = ThreadPoolExecutor(1, "saver")
        self._tidy(position)

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        self._executor.shutdown()
        if kind is None:
            self.wait()

    def save(self, state: TrainState, params: Any, notes: dict[str, Any]) -> None:
        """Copies a state to the host and begins to write it.

        Args:
          params: what the head is made of, state.params or their average.
          notes: for the checkpoint; under "judged" the last figures, or None.
        """
        self.wait()
        copy = snapshot(state)
        head = copy.params
        if params is not state.params:
            head = jax.tree.map(np.array, jax.device_get(params))
        self._pending = self._executor.submit(self._write, copy, head, notes)

    def check(self) -> None:
        """Raises the error of a save that has failed; does not wait for one that is at work."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Waits until what was begun is on disk.

        Raises:
          ConfigError: the disk refused.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _write(self, state: TrainState, head: Any, notes: dict[str, Any]) -> None:
        position = state.position
        self._write_head(position, head, notes["judged"])
        save_state(self._checkpoints, state, notes)
        self._figures[position] = best_figure(self._config, position, notes)
        self._tidy(position)

    def _tidy(self, position: int) -> None:
        """Leaves the saves up to `position` that are to be kept, and marks the best.

        Later ones are of a longer run, or not readable: they go as the run passes them.
        """
        newest, best = kept_numbers(self._figures, self._config.keep, self._config.keep_best)
        try:
            # Where it lacks later on, someone has removed the run's checkpoints.
            self._checkpoints.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(self._checkpoints.parent)
            for directory in (self._checkpoints, self._heads):
                _remove_leftovers(directory)
                for number in checkpoint_numbers(directory):
                    if number <= position and number not in newest | {*best}:
                        self._discard(directory / str(number))
            self._mark(best[0] if best else None)
        except OSError as error:
            raise ConfigError(
                f"{self._checkpoints.parent}: cannot write there ({one_line(error)})"
            ) from None
        for number in self._figures.keys() - newest - {*best}:
            del self._figures[number]

    def _discard(self, path: Path) -> None:
        """Removes a save, or says once why it stays; killed on the way, none looks whole."""
        if path.parent == self._heads and has_other_files(path):
            if int(path.name) not in self._other_heads:
                say(f"note: {path} is not removed: it holds files that are no head's")
                self._other_heads.add(int(path.name))
            return
        gone = path.with_name(f".{path.name}.old")
        os.rename(path, gone)
        shutil.rmtree(gone)

    def _mark(self, best: int | None) -> None:
        if best is None:
            self._best_path.unlink(missing_ok=True)
            return
        by = self._config.best_by
        figure = self._figures[best] * (-1 if by == "loss" else 1)
        fields = {"position": best, "best_by": by, "figure": figure, "head": f"heads/{best}"}
        content = (json.dumps(fields) + "\n").encode()
        if not self._best_path.exists() or self._best_path.read_bytes() != content:
            replace_file(self._best_path, content)


def best_figure(config: TrainConfig, position: int, notes: dict[str, Any]) -> float | None:
    """Returns what a checkpoint is judged by, more is better.

    None where it was not evaluated, or on rows that hold no position to judge by.
    """
    judged_at, figures = notes.get("judged") or (None, {})
    if judged_at != position:
        return None
    figure = figures["all"][config.best_by]
    return -figure if figure is not None and config.best_by == "loss" else figure


def best_note(workdir: Path) -> str:
    """Says where the best head is, where held-out rows have found one."""
    found = workdir / BEST_NAME
    if not found.exists():
        return ""
    best = read_json(found)
    return f"; the best by {best['best_by']} is {workdir / best['head']}"


def kept_numbers(
    figures: Mapping[int, float | None], keep: int, keep_best: int
) -> tuple[set[int], list[int]]:
    """Returns the newest `keep` saves, and the best `keep_best`, best first, the earlier of equals.

    Args:
      figures: of each save, more is better; None where it has none.
    """
    judged = sorted(n for n, figure in figures.items() if figure is not None)
    best = sorted(judged, key=lambda n: -figures[n])
    return {*sorted(figures)[-keep:]}, best[:keep_best]


def has_other_files(head: Path) -> bool:
    """Whether a head's folder holds what no head does: it is someone's own."""
    return any(path.name not in HEAD_FILES for path in head.iterdir())


def _remove_leftovers(directory: Path) -> None:
    for path in directory.iterdir() if directory.is_dir() else ():
        if LEFTOVER.fullmatch(path.name):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
