"""When a run ends early: a signal or its time limit, noticed before it begins and between steps."""

from __future__ import annotations

import signal
import time
from types import FrameType

from spd_jax.commandline import EXIT_INTERRUPTED, leave
from spd_jax.processes import Processes


class StopRequest:
    """While entered, Ctrl-C and SIGTERM ask for a stop instead of ending the process.

    A second Ctrl-C ends it at once, and raises nothing: an exception in the midst of XLA or Orbax
    is lost or hangs. What is on disk is whole at any moment.
    """

    def __init__(self, started: float, max_minutes: float | None) -> None:
        self._deadline = None if max_minutes is None else started + 60 * max_minutes
        self._signal: str | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None and number == signal.SIGINT:
            leave("stopped at once; what is saved is whole", EXIT_INTERRUPTED)
        self._signal = signal.Signals(number).name

    @property
    def exit_code(self) -> int:
        """That of a run that stops now, as a shell reports the signal; 0 for the time limit."""
        return 0 if self._signal is None else 128 + signal.Signals[self._signal]

    @property
    def reason(self) -> str | None:
        """Why the run should stop now; None while it should go on."""
        if self._signal is not None:
            return self._signal
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return "max_minutes"
        return None


def agreed_reason(stop: StopRequest, processes: Processes) -> str | None:
    """Returns why all processes should stop now: the reason of the first that has one."""
    for index, reason in enumerate(processes.gather(stop.reason)):
        if reason:
            return reason if processes.n == 1 else f"{reason} in process {index}"
    return None
