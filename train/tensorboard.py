"""The figures of metrics.jsonl as TensorBoard events, written as they come.

tensorboardX's SummaryWriter hands events to a thread over a bounded queue: where the disk is full
that thread dies and the trainer would wait for ever, so its event file is written directly.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spd_jax.checks import ConfigError
from spd_jax.weights.files import one_line


class EventFile:
    """A file of events for a run that goes on at `step`.

    TensorBoard hides what earlier files of the folder say of later steps.
    """

    def __init__(self, directory: Path, step: int) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        self._directory = directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
            # Its own name has seconds only, and two starts within one must not share a file.
            self._file = EventsWriter(str(directory / "events"), f".{time.time_ns()}")
            start = SessionLog(status=SessionLog.START)
            self._file.write_event(Event(step=step + 1, session_log=start))
            self._file.flush()
        except OSError as error:
            raise ConfigError(f"{directory}: cannot write ({one_line(error)})") from None

    def write(self, record: dict[str, Any]) -> None:
        """Adds the numbers of a record that carries a `step`."""
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import scalar

        try:
            for name, value in scalars(record):
                event = Event(wall_time=time.time(), step=record["step"])
                event.summary.CopyFrom(scalar(name, value))
                self._file.write_event(event)
            self._file.flush()
        except OSError as error:
            raise ConfigError(f"{self._directory}: cannot write ({one_line(error)})") from None

    def __enter__(self) -> EventFile:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # of a `write` that has failed: it said so
            self._file.close()


def scalars(record: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yields the numbers of a record, `step` aside, by their path: heldout/all/loss.

    A list is one of figures by fill: agree_target_by_fill/1, ...
    """
    for name, value in record.items():
        if name == "step":
            continue
        if isinstance(value, list):
            value = {str(i): item for i, item in enumerate(value, 1)}
        if isinstance(value, dict):
            yield from ((f"{name}/{below}", number) for below, number in scalars(value))
        elif isinstance(value, int | float) and math.isfinite(value):
            yield name, float(value)
