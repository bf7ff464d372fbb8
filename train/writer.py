"""What a run leaves and shows: checkpoints, heads, logs, progress, all by its first process."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from train.config import TrainConfig
from train.evaluate import Figures, describe_figures
from train.metrics import NAME as METRICS_NAME
from train.metrics import MetricsFile
from train.progress import TrainProgress
from train.saver import Saver, WriteHead
from train.step import TrainState
from train.tensorboard import EventFile


class Writer:
    """Writes while entered; in a process that is not the first each call does nothing."""

    def __init__(
        self,
        config: TrainConfig,
        position: int,
        n_steps: int,
        write_head: WriteHead,
        is_first: bool = True,
    ) -> None:
        """For a run that goes on at `position` of `n_steps`."""
        self._stack = contextlib.ExitStack()
        self._saver: Saver | None = None
        self._logs: Sequence[MetricsFile | EventFile] = ()
        self._progress: TrainProgress | None = None
        if not is_first:
            return
        with contextlib.ExitStack() as stack:  # what is open closes where the next does not open
            workdir = Path(config.workdir)
            self._saver = stack.enter_context(Saver(config, position, write_head))
            self._logs = [stack.enter_context(MetricsFile(workdir / METRICS_NAME, position))]
            if config.tensorboard:
                events = EventFile(workdir / "tensorboard", position)
                self._logs.append(stack.enter_context(events))
            self._progress = stack.enter_context(TrainProgress(n_steps, position))
            self._stack = stack.pop_all()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def advance(self, position: int) -> None:
        """Shows that an update was made; raises the error of a save that has failed."""
        if self._saver and self._progress:
            self._saver.check()
            self._progress.advance(position)

    def log(self, record: dict[str, Any]) -> None:
        """Writes and shows the figures of training."""
        self._write(record)
        if self._progress:
            self._progress.show(record)

    def log_heldout(self, position: int, figures: Figures) -> None:
        """Writes and shows held-out figures."""
        self._write({"step": position, "heldout": figures})
        self.say(f"held out at {position}  {describe_figures(figures)}")

    def say(self, line: str) -> None:
        """Shows a line."""
        if self._progress:
            self._progress.say(line)

    def save(self, state: TrainState, params: Any, notes: dict[str, Any]) -> None:
        """As `Saver.save`."""
        if self._saver:
            self._saver.save(state, params, notes)

    def _write(self, record: dict[str, Any]) -> None:
        for log in self._logs:
            log.write(record)
