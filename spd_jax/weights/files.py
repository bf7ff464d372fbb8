"""Files on disk: content hashes, and writes that no kill or second writer can leave half done."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from spd_jax.checks import ConfigError


def one_line(error: BaseException | str) -> str:
    """Returns an error's text folded into one short line, for use inside a ConfigError."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."


class Unchanged:
    """Remembers a file as it is, so that what is read later is of the same file."""

    def __init__(self, path: Path):
        self._path = path
        self._state = self._look()

    def check(self) -> None:
        """Raises ConfigError where the file is another one by now, or gone."""
        if self._look() != self._state:
            raise ConfigError(f"{self._path}: changed or removed since it was opened; load anew")

    def _look(self) -> tuple[int, ...] | None:
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def file_sha256(path: Path) -> str:
    """Returns the hex sha256 of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_directory(directory: Path) -> None:
    """Makes the names in a directory durable."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_file(path: Path) -> None:
    """Makes a file's content durable."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def found_at(path: Path) -> os.stat_result | None:
    """Returns what has a path that a person gave (a link itself); None where nothing has it.

    Raises:
      ConfigError: the system cannot tell: the name is too long, or nobody may look there.
    """
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        shown = one_line(str(path))[:80]
        raise ConfigError(f"{shown}: {error.strerror}; give another path") from None


def check_out(path: Path, flag: str = "--out") -> None:
    """Raises ConfigError where `path`, which a flag gave, is what no file may take the place of."""
    found = found_at(path)
    if found is not None and not stat.S_ISREG(found.st_mode):
        kind = "folder" if stat.S_ISDIR(found.st_mode) else "link or device"
        raise ConfigError(f"{flag} must name a file, got the {kind} {path}")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Yields a file to write; when all went well, it takes the name `path` at once.

    Raises:
      OSError: the disk refuses, or the name is that of a folder, a device or a link.
    """
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise FileExistsError(errno.EEXIST, "not a regular file", str(path))
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    sync_directory(path.parent)


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file so that its name holds either the old content or all of the new."""
    with replacing(path) as file:
        file.write(content)


def check_writable(path: Path, flag: str = "--json") -> None:
    """Raises ConfigError where `path`, which a flag gave, cannot become a file."""
    parent = path.parent
    found = found_at(path)
    is_other = found is not None and not stat.S_ISREG(found.st_mode)  # a folder, a device, a link
    if is_other or not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{flag} must name a file in an existing, writable folder, got {path}")


def write_json(path: Path, record: Any) -> None:
    """Writes the file that `--json` gave, whole or not at all.

    Raises:
      ConfigError: the file cannot be written.
    """
    try:
        replace_file(path, (json.dumps(record, indent=1) + "\n").encode())
    except OSError as error:
        reason = one_line(error.strerror or error)
        raise ConfigError(f"cannot write {path}: {reason}; change --json") from None


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Holds a lock file, made where it lacks; the system drops the lock of a killed process.

    Raises:
      BlockingIOError: another process holds it, and this one is not to wait.
    """
    import fcntl  # not on Windows

    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


@contextlib.contextmanager
def sole_writer(lock: Path) -> Iterator[None]:
    """Holds a lock file, and makes its folder where that lacks.

    Raises:
      ConfigError: another process holds it, or the disk refuses.
    """
    with contextlib.ExitStack() as stack:
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(lock, wait=False))
        except BlockingIOError:
            raise ConfigError(
                f"{lock.parent}: another process is writing there (it holds {lock.name}); wait for "
                "it, stop it or name another place"
            ) from None
        except OSError as error:
            raise ConfigError(f"{lock.parent}: cannot write there ({one_line(error)})") from None
        yield


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        twice = next(name for name in fields if sum(name == other for other, _ in pairs) > 1)
        raise ValueError(f"{twice!r} is there twice")
    return fields


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file.

    Raises:
      ConfigError: there is none.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_object)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; give a directory that has one") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not readable JSON ({one_line(error)})") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: must hold a JSON object, holds {type(value).__name__}")
    return value
