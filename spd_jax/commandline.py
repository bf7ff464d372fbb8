"""What every main does before and around its work: flags, messages, errors, exit codes.

The only room of the library that parses flags.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

import tyro

from spd_jax.cachedir import cache_directory
from spd_jax.checks import ConfigError
from spd_jax.program import keep_on_disk

Flags = TypeVar("Flags")

EXIT_USER_ERROR = 2
EXIT_LOST = 3  # another process of the same command has gone
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE
_BOX = "╭╮╰╯│─ "
_QUIET, _LEAVING = threading.Event(), threading.Lock()


def say(line: str) -> None:
    """Writes one line to stderr; nothing after `be_quiet`."""
    if not _QUIET.is_set():
        print(line, file=sys.stderr, flush=True)


def be_quiet() -> None:
    """Leaves all but errors to another process."""
    _QUIET.set()


def leave(line: str, code: int) -> NoReturn:
    """Ends the process at once from any thread, whatever the others do; only the first call speaks.

    An exception in the midst of XLA or Orbax is lost or hangs.
    """
    if not _LEAVING.acquire(timeout=1):  # never released; a signal may have come within this
        os._exit(code)
    show_cursor = "\x1b[?25h" if sys.stderr.isatty() else ""  # a live bar has hidden it
    os.write(2, f"{show_cursor}{line}\n".encode(errors="backslashreplace"))
    os._exit(code)


def parse_flags(
    cls: type[Flags],
    prog: str,
    argv: Sequence[str] | None = None,
    default: Flags | None = None,
    description: str | None = None,
) -> Flags:
    """Builds the dataclass `cls` from the command line.

    Args:
      default: what the flags override; each then takes a value, a boolean too. None: the
        dataclass' own defaults, and a boolean is a bare flag.

    Raises:
      SystemExit: a flag is unknown (a close one is suggested) or malformed: one line, code 2.
      ConfigError: a value cannot be.
    """
    caught = io.StringIO()
    keywords = {} if default is None else {"default": default}
    booleans = tyro.conf.FlagCreatePairsOff if default is None else tyro.conf.FlagConversionOff
    try:
        with contextlib.redirect_stderr(caught):
            return tyro.cli(
                cls,
                prog=prog,
                args=argv,
                description=description,
                config=(booleans,),
                **keywords,
            )
    except SystemExit as stop:
        if stop.code not in (0, None):
            say(f"error: {_unboxed(caught.getvalue())}")
        raise


def _unboxed(text: str) -> str:
    """Folds tyro's framed message into one line; the parts between its rules get a semicolon."""
    parts: list[list[str]] = [[]]
    for line in text.splitlines():
        if line.startswith(("╭", "╰")):
            continue
        words = line.strip(_BOX)
        if words:
            parts[-1].append(words)
        elif "─" in line:
            parts.append([])
    return "; ".join(" ".join(part) for part in parts if part)


def _keep_programs() -> None:
    """Keeps what a main compiles in the cache folder, or says why not."""
    folder = cache_directory() / "programs"
    try:
        keep_on_disk(folder)
    except OSError as error:
        say(f"note: compiled programs are not kept ({folder}: {error.strerror or error})")


def run(main: Callable[[], int]) -> None:
    """Runs a main and exits with its code; a ConfigError is one line on stderr and code 2."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # as it was during imports
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if isinstance(sys.stdout, io.TextIOWrapper):  # it may not be able to show every character
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        _keep_programs()
        code = main()
    except KeyboardInterrupt:
        say("stopped")
        code = EXIT_INTERRUPTED
    except BrokenPipeError:  # whoever read the output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = EXIT_BROKEN_PIPE
    except ConfigError as error:
        say(f"error: {' '.join(str(error).split())}")
        code = EXIT_USER_ERROR
    if code == EXIT_INTERRUPTED:
        # XLA's threads may still be compiling, and crash where Python takes itself down.
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(code)
    sys.exit(code)
