"""Directories that appear under their name whole or not at all, whenever the writer is killed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from spd_jax.checks import ConfigError
from spd_jax.weights.files import sync_directory, sync_file


@contextlib.contextmanager
def whole_directory(directory: Path, known: set[str]) -> Iterator[Path]:
    """Yields a folder to fill with files, which then takes the name `directory`.

    Args:
      directory: its path; the parent is made where it lacks. One that is there is replaced.
      known: the file names that such a directory may hold.
    Raises:
      ConfigError: the path holds anything else: someone's files are never replaced.
      OSError: the disk refuses.
    """
    _check_replaceable(directory, known)
    directory.parent.mkdir(parents=True, exist_ok=True)
    for stale in directory.parent.glob(f".{directory.name}.new-*"):  # of a killed writer
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(
        prefix=f".{directory.name}.new-", dir=directory.parent, ignore_cleanup_errors=True
    ) as work:
        yield Path(work)
        for path in Path(work).iterdir():
            os.chmod(path, 0o644)
            sync_file(path)
        os.chmod(work, 0o755)
        sync_directory(Path(work))
        _swap_in(Path(work), directory)
    sync_directory(directory.parent)


def _check_replaceable(directory: Path, known: set[str]) -> None:
    if directory.exists() and not (
        directory.is_dir() and {path.name for path in directory.iterdir()} <= known
    ):
        raise ConfigError(f"{directory}: holds other files; give a new directory for the head")


def _swap_in(new: Path, directory: Path) -> None:
    """Gives `new` the name `directory`; what had it ends under the name of `new` or is gone."""
    if not directory.exists():
        os.rename(new, directory)
        return
    at_cwd, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE of linux
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        if libc.renameat2(at_cwd, os.fsencode(new), at_cwd, os.fsencode(directory), exchange) == 0:
            return
    # No atomic exchange here: for an instant the name is free, but a whole head exists.
    old = new.with_name(f"{new.name}.old")
    os.rename(directory, old)
    os.rename(new, directory)
    os.rename(old, new)
