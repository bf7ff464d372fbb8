"""Several processes, one on each host, that run the same command as one: how they meet and end.

Process 0 listens where `--coordinator` says, the others connect to it, and then jax starts. The
connections stay: settings are compared and stops agreed over them, and a process that dies, goes
silent or gives up is known to all at once. jax would find out later, and end with a stack trace.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import time
import traceback
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from spd_jax.checks import ConfigError
from spd_jax.commandline import EXIT_LOST, EXIT_USER_ERROR, be_quiet, leave
from spd_jax.wire import Wire, WireClosed

AGAIN = "start all processes again"
JAX_PATIENCE = 3  # jax waits longer than the connections do, which say what happened


@dataclasses.dataclass(frozen=True)
class Launch:
    """Which of how many processes this is. Without any of these flags there is one."""

    coordinator: str | None = None
    """Of several processes: HOST:PORT of process 0, as the others reach it."""
    num_processes: int | None = None
    """How many processes there are; each runs this command."""
    process_id: int | None = None
    """Which of them this one is, from 0; process 0 prints and writes."""
    distributed: bool = False
    """Find these three in the environment, as jax does: Slurm, Open MPI, TPU pods."""
    process_timeout: float = 30.0
    """Seconds to wait for the others at the start, and for a sign of life later."""

    def __post_init__(self) -> None:
        given = [self.coordinator, self.num_processes, self.process_id]
        if self.distributed and any(x is not None for x in given):
            raise ConfigError(
                "distributed finds coordinator, num_processes and process_id in the environment; "
                "give it or them, not both"
            )
        if not 1 <= self.process_timeout <= 86400:
            raise ConfigError(
                f"process_timeout must be from 1 to 86400 seconds, got {self.process_timeout}"
            )
        if all(x is None for x in given):
            return
        if None in given:
            raise ConfigError(
                "several processes need all of coordinator, num_processes and process_id, got "
                f"{self.coordinator}, {self.num_processes} and {self.process_id}"
            )
        if not 1 <= self.num_processes <= 4096:
            raise ConfigError(f"num_processes must be from 1 to 4096, got {self.num_processes}")
        if not 0 <= self.process_id < self.num_processes:
            raise ConfigError(
                f"process_id must be from 0 to {self.num_processes - 1}, got {self.process_id}"
            )
        parse_address(self.coordinator)


def parse_address(address: str) -> tuple[str, int]:
    """Returns the host and the port of HOST:PORT."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"coordinator must be HOST:PORT, such as 10.0.0.1:7654, got {address}")
    return host.strip("[]"), int(port)


class Processes:
    """All processes of a command, as one of them sees them; by default it is alone."""

    def __init__(self, index: int = 0, n: int = 1, wires: dict[int, Wire] | None = None) -> None:
        """`wires`: of process 0 to each other one; of these to process 0."""
        self.index, self.n, self._wires = index, n, wires or {}

    @property
    def is_first(self) -> bool:
        """Whether this one prints and writes."""
        return self.index == 0

    def gather(self, value: Any) -> list[Any]:
        """Returns what each process gave, in order, as JSON holds it. Waits for all."""
        if self.n == 1:
            return [value]
        if not self.is_first:
            with contextlib.suppress(OSError):  # the listener says who has gone, and ends this
                self._wires[0].send("value", value)
            return self._wires[0].receive()
        value = json.loads(json.dumps(value))  # as the others get it: a tuple is a list
        values = [value, *(self._wires[i].receive() for i in range(1, self.n))]
        for wire in self._wires.values():
            with contextlib.suppress(OSError):
                wire.send("value", values)
        return values

    def agree(self, what: dict[str, Any]) -> None:
        """Raises ConfigError where a process has another value of one of the names."""
        if self.n > 1:
            check_agree(self.gather(what))

    def broadcast(self, tree: Any) -> Any:
        """Returns the arrays of process 0 on the host, bit for bit; all hold like ones."""
        if self.n == 1:
            return tree
        from jax.experimental import multihost_utils

        def of_first(leaf: Any) -> np.ndarray:
            array = np.asarray(leaf)
            bits = np.atleast_1d(np.ascontiguousarray(array)).view(np.uint32)  # -0.0 + 0.0 is 0.0
            found = multihost_utils.broadcast_one_to_all(bits)
            return np.array(found).view(array.dtype).reshape(array.shape)

        return jax.tree.map(of_first, tree)

    def tell(self, reason: str) -> None:
        """Says to all others why this one ends; they end too."""
        _send_gone(self._wires.values(), reason)

    def watch(self, timeout: float) -> None:
        """Begins to send signs of life and to listen for those of the others."""
        for other, wire in self._wires.items():
            wire.start(timeout, lambda reason, other=other: self._lose(other, reason))

    def close(self) -> None:
        """Parts in peace: to be called by all when all is done."""
        self.gather("done")
        if self.is_first:  # its service goes last: without it jax aborts the others
            self.gather("left")
        with contextlib.suppress(Exception):  # all is done and said
            jax.distributed.shutdown()
        if not self.is_first:
            self.gather("left")
        for wire in self._wires.values():
            wire.close()

    def _lose(self, other: int, reason: str) -> None:
        # What another tells of itself or of a third one is whole.
        line = reason if reason.startswith("process ") else f"process {other} {reason}; {AGAIN}"
        self.tell(line)
        leave(f"error: {line}", EXIT_LOST)


def check_agree(values: list[dict[str, Any]]) -> None:
    """Raises ConfigError where a later dict differs from the first; the line names it all."""
    first, lines = values[0], []
    for i, other in enumerate(values[1:], 1):
        different = [name for name in first if other.get(name) != first[name]]
        if different:
            shown = ", ".join(
                f"{name} ({_short(other.get(name))}, not {_short(first[name])})"
                for name in different
            )
            lines.append(f"process {i} differs from process 0 in {shown}")
    if lines:
        raise ConfigError(f"{'; '.join(lines)}; make them the same")


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@contextlib.contextmanager
def joined(launch: Launch) -> Iterator[Processes]:
    """Meets the other processes and starts jax; alone where no flag says that there are others.

    An error inside ends this process here, and all the others with a line that says why: jax
    would have each wait for all.

    Raises:
      ConfigError: they did not come together.
    """
    launch, local_ids = _found(launch) if launch.distributed else (launch, None)
    if launch.num_processes in (None, 1):
        yield Processes()
        return
    processes = _meet(launch, local_ids)
    if not processes.is_first:
        be_quiet()
    try:
        yield processes
        processes.close()
    except ConfigError as error:
        line = " ".join(str(error).split())
        processes.tell(f"process {processes.index} ended: {line}")
        leave(f"error: {line}", EXIT_USER_ERROR)
    except jax.errors.JaxRuntimeError as error:
        # Mostly another one has gone, and its wire is about to say so.
        time.sleep(launch.process_timeout / JAX_PATIENCE)
        line = " ".join(str(error).split())[:300]
        processes.tell(f"process {processes.index} ended: {line}")
        leave(f"error: {line}; {AGAIN}", EXIT_LOST)
    except BaseException as error:
        processes.tell(f"process {processes.index} ended: {type(error).__name__}")
        traceback.print_exc()
        leave(f"error: {type(error).__name__}", EXIT_LOST)


def _found(launch: Launch) -> tuple[Launch, list[int] | None]:
    """Returns the launch that a cluster's environment describes, and the devices of this one."""
    from jax._src.clusters import ClusterEnv  # what jax.distributed.initialize() asks

    try:
        address, n, index, local_ids = ClusterEnv.auto_detect_unset_distributed_params(
            None, None, None, None, None, int(launch.process_timeout)
        )
    except Exception as error:  # each kind of cluster has its own
        raise ConfigError(f"distributed: the cluster's environment is odd ({error})") from None
    if None in (address, n, index):
        raise ConfigError(
            "distributed: no cluster is in the environment (Slurm, Open MPI, TPU pod); give "
            "coordinator, num_processes and process_id instead"
        )
    fields = {"coordinator": address, "num_processes": int(n), "process_id": int(index)}
    return dataclasses.replace(launch, distributed=False, **fields), local_ids


def _meet(launch: Launch, local_ids: list[int] | None) -> Processes:
    host, port = parse_address(launch.coordinator)
    index, n, timeout = launch.process_id, launch.num_processes, launch.process_timeout
    deadline = time.monotonic() + timeout
    if index == 0:
        wires = _await_others(port, n, deadline, timeout)
        with _listen(0, 1) as free:
            jax_port = free.getsockname()[1]
        for other, wire in wires.items():
            try:
                wire.send("welcome", jax_port)
            except OSError as error:
                reason = f"process {other} has gone ({error.strerror})"
                _send_gone(wires.values(), reason)
                raise ConfigError(f"{reason}; {AGAIN}") from None
    else:
        wire, jax_port = _reach_first(host, port, index, n, deadline, timeout)
        wires = {0: wire}
    processes = Processes(index, n, wires)
    processes.watch(timeout)
    # A SIGTERM is a matter of the command, not of jax's preemption service.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_enable_recoverability", True)  # else one's end aborts the others
    patience = int(JAX_PATIENCE * timeout)
    try:
        jax.distributed.initialize(
            f"[{host}]:{jax_port}" if ":" in host else f"{host}:{jax_port}",
            n,
            index,
            local_ids,
            initialization_timeout=patience,
            heartbeat_timeout_seconds=patience,
            shutdown_timeout_seconds=int(timeout),
            cluster_detection_method="deactivate",
        )
    except RuntimeError as error:
        processes.tell(f"process {index} ended: jax does not start ({error})")
        leave(f"error: jax does not start ({' '.join(str(error).split())})", EXIT_LOST)
    return processes


def _listen(port: int, backlog: int) -> socket.socket:
    """Returns a server at a port of every address, of IPv6 too where there is such."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=backlog)


def _await_others(port: int, n: int, deadline: float, timeout: float) -> dict[int, Wire]:
    """Returns the wires to all others; each begins with its index and the number it expects."""
    wires: dict[int, Wire] = {}
    try:
        server = _listen(port, n)
    except OSError as error:
        raise ConfigError(
            f"coordinator: port {port} cannot be used here ({error.strerror}); name a free one, "
            "the same for all processes"
        ) from None
    with server:
        while len(wires) < n - 1:
            server.settimeout(max(deadline - time.monotonic(), 0.01))
            try:
                connection = server.accept()[0]
            except TimeoutError:
                absent = ", ".join(str(i) for i in range(1, n) if i not in wires)
                reason = (
                    f"{len(wires) + 1} of {n} processes came within {timeout:g} s; absent: {absent}"
                )
                _send_gone(wires.values(), reason)
                raise ConfigError(f"{reason}; start them, or lower num_processes") from None
            wire = Wire(connection, min(timeout, 5.0))
            try:
                index, expected = wire.read("hello")
            except (WireClosed, ValueError, TypeError):
                wire.close()  # a stranger
                continue
            reason = None
            if expected != n:
                reason = f"process {index} has num_processes {expected}, process 0 has {n}"
            elif index in wires or not 0 < index < n:
                reason = f"process_id {index} is there twice"
            if reason:
                _send_gone([wire, *wires.values()], reason)
                raise ConfigError(f"{reason}; start all with the same number and each its own id")
            wires[index] = wire
    return wires


def _send_gone(wires: Iterable[Wire], reason: str) -> None:
    for wire in wires:
        with contextlib.suppress(OSError):
            wire.send("gone", reason)


def _reach_first(
    host: str, port: int, index: int, n: int, deadline: float, timeout: float
) -> tuple[Wire, int]:
    """Returns the wire to process 0 and the port where jax is to start, once all are there."""
    where, reason = f"{host}:{port}", "nothing answers"
    while (left := deadline - time.monotonic()) > 0:
        try:
            wire = Wire(socket.create_connection((host, port), timeout=left), 2 * timeout)
            break
        except OSError as error:
            reason = error.strerror or str(error)
            time.sleep(min(0.2, max(left, 0)))
    else:
        raise ConfigError(
            f"process {index} does not reach process 0 at {where} within {timeout:g} s ({reason}); "
            "start process 0, or correct coordinator"
        )
    try:
        wire.send("hello", [index, n])
        return wire, int(wire.read("welcome"))
    except (WireClosed, OSError, ValueError) as error:
        raise ConfigError(
            f"process 0 at {where} did not let process {index} in: {error}; {AGAIN}"
        ) from None
