"""A connection between two processes: lines of JSON, signs of life, and what its end means.

Each line is [kind, value]: hello, welcome, value, alive, gone (with a reason), bye.
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
from collections.abc import Callable
from typing import Any

ALIVE_EVERY = 6  # signs of life in the time after which a silent process counts as lost


class WireClosed(Exception):
    """The other side has ended, is silent or is no process of this command; the text says which."""


class Wire:
    """One connection; after `start` a thread listens, and another sends signs of life."""

    def __init__(self, connection: socket.socket, timeout: float) -> None:
        connection.settimeout(timeout)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection, self._file = connection, connection.makefile("rb")
        self._sending, self._ended = threading.Lock(), threading.Event()
        self._values: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def send(self, kind: str, value: Any = None) -> None:
        """Sends one line; raises OSError where the other side has gone."""
        line = json.dumps([kind, value]).encode() + b"\n"
        with self._sending:
            self._connection.sendall(line)

    def read(self, *kinds: str) -> Any:
        """Returns the value of the next line, which must be of one of the kinds."""
        kind, value = self._read()
        if kind == "gone":
            raise WireClosed(value)
        if kind not in kinds:
            raise WireClosed("it is no process of this command")
        return value

    def start(self, timeout: float, on_loss: Callable[[str], None]) -> None:
        """Begins to listen; `on_loss` is called with the reason from the listening thread."""
        self._connection.settimeout(timeout)
        for work in (self._listen, self._live):
            threading.Thread(target=work, args=(timeout, on_loss), daemon=True).start()

    def receive(self) -> Any:
        """Waits for the next value; after a loss for ever: `on_loss` ends the process."""
        return self._values.get()

    def close(self) -> None:
        """Says that nothing more will come."""
        self._ended.set()
        with contextlib.suppress(OSError):
            self.send("bye")
            self._connection.shutdown(socket.SHUT_WR)

    def _read(self) -> tuple[str, Any]:
        try:
            line = self._file.readline()
        except TimeoutError:
            seconds = self._connection.gettimeout()
            raise WireClosed(f"has not been heard of for {seconds:g} s") from None
        except ConnectionResetError:
            line = b""
        except OSError as error:
            raise WireClosed(f"is not reachable any more ({error.strerror})") from None
        if not line.endswith(b"\n"):
            raise WireClosed("ended without a word: it was killed, or its host went down")
        try:
            kind, value = json.loads(line)
        except (ValueError, TypeError):
            raise WireClosed("is no process of this command") from None
        return kind, value

    def _listen(self, timeout: float, on_loss: Callable[[str], None]) -> None:
        while True:
            try:
                kind, value = self._read()
            except WireClosed as error:
                if not self._ended.is_set():
                    on_loss(str(error))
                return
            if kind == "value":
                self._values.put(value)
            elif kind == "gone":
                on_loss(value)
                return
            elif kind == "bye":
                return

    def _live(self, timeout: float, on_loss: Callable[[str], None]) -> None:
        while not self._ended.wait(timeout / ALIVE_EVERY):
            with contextlib.suppress(OSError):  # the listener finds out
                self.send("alive")
