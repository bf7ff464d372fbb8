"""Several processes on one machine train as one does, and end together whatever happens to one."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from spd_jax.checks import ConfigError
from spd_jax.processes import Launch, Processes, check_agree, joined, parse_address
from spd_jax.wire import Wire, WireClosed
from tests.kill_and_resume import write_rows
from train.checkpoint import checkpoint_numbers
from train.config import TrainConfig
from train.launch import check_settings, parse_run
from train.stop import StopRequest, agreed_reason

ROOT = Path(__file__).parents[2]
FLAGS = ["--config", "tiny_n4", "--sequence-len", "32", "--batch-tokens", "128", "--ema", "0.9"]
FLAGS += ["--n-stages", "2"]  # each fill is compiled
FLAGS += ["--accumulate", "2", "--log-every", "2", "--save-every", "100", "--eval-every", "100"]
LONG = ["--steps", "100000"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("processes") / "rows.jsonl"
    write_rows(path)
    return path


class Group:
    """The processes of one run, ended with it."""

    def __init__(self, rows, workdir, n, *more, own=()):
        """`own`: flags of each process beside those of all."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        flags = ["--train-data", str(rows), "--workdir", str(workdir), *FLAGS, *more]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        environment["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
        self.logs = [workdir.with_suffix(f".{n}.{i}.log") for i in range(n)]
        self.members, self.workdir = [], workdir
        for i, path in enumerate(self.logs):
            launch = ["--coordinator", f"127.0.0.1:{port}", "--num-processes", str(n)]
            launch += ["--process-id", str(i), "--process-timeout", "20"]
            command = [sys.executable, "-m", "train.pdm", *flags, *(launch if n > 1 else [])]
            with open(path, "w") as log:
                self.members.append(
                    subprocess.Popen(
                        [*command, *(own[i] if own else [])],
                        stdout=log,
                        stderr=log,
                        cwd=ROOT,
                        env=environment,
                    )
                )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for member in self.members:
            with contextlib.suppress(ProcessLookupError):
                member.kill()
            member.wait()

    def codes(self, seconds=200):
        """Waits for all to end."""
        deadline = time.monotonic() + seconds
        return [m.wait(max(deadline - time.monotonic(), 0.1)) for m in self.members]

    def said(self, i):
        return self.logs[i].read_text()

    def wait_for_updates(self, seconds=200):
        """Waits until this group has written figures."""
        deadline = time.monotonic() + seconds
        while "step " not in self.said(0):
            assert time.monotonic() < deadline and self.members[0].poll() is None, self.said(0)
            time.sleep(0.05)


def arrays(workdir, number):
    """The leaves of a checkpoint, by path."""
    import jax
    from orbax.checkpoint import v1 as ocp

    found = ocp.load(workdir / "checkpoints" / str(number))
    return {str(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(found)}


def assert_close(a, b):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_allclose(a[name], b[name], atol=1e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_run_is_that_of_one_process_and_goes_on_with_another_number(rows, tmp_path):
    """Three updates by two processes, two by three, one by one; each as one alone makes them."""
    one, several = tmp_path / "one", tmp_path / "several"
    for workdir, counts in ((one, (1, 1, 1)), (several, (2, 3, 1))):
        for n, steps in zip(counts, (3, 5, 6), strict=True):
            held = ["--heldout-data", str(rows)] if steps == 3 else []
            with Group(rows, workdir, n, "--steps", str(steps), *held) as group:
                assert group.codes() == [0] * n, group.said(0)
            if n > 1:
                assert f"{n} devices (cpu) of {n} processes" in group.said(0)
                assert "loading" not in group.said(1)  # only the first one speaks
    assert checkpoint_numbers(several / "checkpoints") == checkpoint_numbers(one / "checkpoints")
    for number in checkpoint_numbers(one / "checkpoints"):
        assert_close(arrays(several, number), arrays(one, number))
    want, got = (
        [json.loads(line) for line in (w / "metrics.jsonl").read_text().splitlines()]
        for w in (one, several)
    )
    assert [r["step"] for r in got] == [r["step"] for r in want]
    for a, b in zip(got, want, strict=True):
        if "heldout" in b:
            assert a["heldout"]["all"]["agree_target"] == b["heldout"]["all"]["agree_target"]
            assert a["heldout"]["all"]["kl"] == pytest.approx(b["heldout"]["all"]["kl"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_stop_of_one_stops_all_and_a_kill_of_one_ends_all(rows, tmp_path):
    workdir = tmp_path / "run"
    with Group(rows, workdir, 2, *LONG) as group:
        group.wait_for_updates()
        group.members[1].send_signal(signal.SIGTERM)
        assert group.codes() == [143, 143], group.said(0)
    assert "stopping: SIGTERM in process 1" in group.said(0)
    (saved,) = checkpoint_numbers(workdir / "checkpoints")

    with Group(rows, workdir, 2, *LONG, "--save-every", "1") as group:
        group.wait_for_updates()
        group.members[1].kill()
        began = time.monotonic()
        assert group.codes(40) == [3, -9]
        assert time.monotonic() - began < 30
    assert f"goes on at {saved}/" in group.said(0)
    last = group.said(0).splitlines()[-1]
    assert last.startswith("error: process 1 ended without a word") and "again" in last

    numbers = checkpoint_numbers(workdir / "checkpoints")
    with Group(rows, workdir, 1, "--steps", str(numbers[-1] + 1)) as group:
        assert group.codes() == [0], group.said(0)
    assert f"goes on at {numbers[-1]}/" in group.said(0) and "not readable" not in group.said(0)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_differing_settings_are_named_and_an_error_of_one_ends_all(rows, tmp_path):
    with Group(rows, tmp_path / "a", 2, own=[["--lr", "0.1"], ["--lr", "0.2"]]) as group:
        assert sorted(group.codes(60)) in ([2, 2], [2, 3])
    for i in range(2):
        assert "process 1 differs from process 0 in lr (0.2, not 0.1)" in group.said(i)
    assert not (tmp_path / "a").exists()

    absent = str(tmp_path / "absent.jsonl")
    own = [[], ["--train-data", absent]]
    with Group(rows, tmp_path / "b", 2, own=own) as group:
        assert group.codes(60) == [3, 2]
    assert "error: process 1 ended:" in group.said(0) and absent in group.said(0)


def test_too_few_processes_and_a_port_in_use_are_one_line():
    with socket.create_server(("", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match="cannot be used here .* name a free one"):
            with joined(Launch(address, 2, 0, process_timeout=1)):
                pass
    with pytest.raises(ConfigError, match="1 of 3 processes came within 1 s; absent: 1, 2"):
        with joined(Launch(address, 3, 0, process_timeout=1)):
            pass
    with pytest.raises(ConfigError, match=f"process 1 does not reach process 0 at {address}"):
        with joined(Launch(address, 3, 1, process_timeout=1)):
            pass


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"coordinator": "a:1", "num_processes": 2}, "need all of"),
        ({"coordinator": "a", "num_processes": 2, "process_id": 0}, "must be HOST:PORT"),
        ({"coordinator": "a:1", "num_processes": 2, "process_id": 2}, "from 0 to 1, got 2"),
        ({"coordinator": "a:1", "num_processes": 0, "process_id": 0}, "num_processes must be"),
        ({"coordinator": "a:1", "distributed": True}, "not both"),
        ({"process_timeout": 0.0}, "process_timeout must be"),
    ],
)
def test_odd_launches_are_refused(flags, message):
    with pytest.raises(ConfigError, match=message):
        Launch(**flags)


def test_addresses_are_split():
    assert parse_address("10.0.0.1:80") == ("10.0.0.1", 80)
    assert parse_address("[::1]:80") == ("::1", 80)


def test_no_cluster_is_one_line():
    with pytest.raises(ConfigError, match="no cluster is in the environment"):
        with joined(Launch(distributed=True)):
            pass


def test_all_differences_are_named():
    check_agree([{"a": 1}, {"a": 1}])
    with pytest.raises(ConfigError) as error:
        check_agree([{"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 9, "c": 8}])
    assert str(error.value) == (
        "process 2 differs from process 0 in b (9, not 2), c (8, not 3); make them the same"
    )


def test_one_process_is_alone():
    alone = Processes()
    assert alone.is_first and alone.gather((1, 2)) == [(1, 2)]
    with StopRequest(time.monotonic(), None) as stop:
        assert agreed_reason(stop, alone) is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert agreed_reason(stop, alone) == "SIGTERM"


def test_settings_and_launch_are_told_apart():
    config, launch = parse_run(
        "x", [*FLAGS, "--coordinator", "h:1", "--num-processes", "2", "--process-id", "1"]
    )
    assert type(config) is TrainConfig and config.ema == 0.9
    assert launch == Launch("h:1", 2, 1)


def test_a_state_cache_needs_one_process():
    check_settings(TrainConfig(state_cache=True), Processes())
    with pytest.raises(ConfigError, match="state_cache .* set it False"):
        check_settings(TrainConfig(state_cache=True), Processes(0, 2))


@pytest.fixture
def tcp_pair():
    """Makes connections; gives both ends of each."""
    with contextlib.ExitStack() as stack:

        def connect():
            with socket.create_server(("127.0.0.1", 0)) as server:
                ours = stack.enter_context(socket.create_connection(server.getsockname()))
                return ours, stack.enter_context(server.accept()[0])

        yield connect


def test_a_silent_wire_and_a_strange_one_are_told_apart(tcp_pair):
    ours, theirs = tcp_pair()
    wire = Wire(ours, 0.1)
    with pytest.raises(WireClosed, match="not been heard of for 0.1 s"):
        wire.read("hello")
    ours, theirs = tcp_pair()
    theirs.sendall(b"GET / HTTP/1.1\r\n")
    with pytest.raises(WireClosed, match="no process of this command"):
        Wire(ours, 5).read("hello")
    ours, theirs = tcp_pair()
    theirs.close()  # as when its process is killed
    with pytest.raises(WireClosed, match="ended without a word"):
        Wire(ours, 5).read("hello")


@pytest.mark.timeout(20)
def test_a_wire_reports_a_loss_but_not_a_parting(tcp_pair):
    lost = []
    for ends in ("close", "drop"):
        (a, b), reasons = tcp_pair(), []
        first, second = Wire(a, 5), Wire(b, 5)
        first.start(5, reasons.append)
        second.send("value", [1])
        assert first.receive() == [1]
        if ends == "close":
            second.close()
        else:
            b.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + (0.5 if ends == "close" else 5)
        while not reasons and time.monotonic() < deadline:
            time.sleep(0.01)
        lost.append(bool(reasons))
        first.close()
    assert lost == [False, True]
