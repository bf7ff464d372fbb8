"""Orbax checkpoints of the train state, in a folder named by update number, written atomically.

Each carries notes (JSON: what else a resumed run needs) and a digest of both. A killed writer
leaves the earlier ones as they were; one that cannot be read, or reads as something else, is
passed over with one line. The only file that knows Orbax.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import logging
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from spd_jax.checks import ConfigError
from spd_jax.commandline import say
from spd_jax.weights.files import one_line, sync_directory
from train.step import TrainState

UNFINISHED = ".orbax-checkpoint-tmp"  # in the name of what a killed save leaves


def snapshot(state: TrainState) -> TrainState:
    """Copies a state to the host, so that steps may go on (and donate it) while it is written."""
    # On the CPU device_get is a view of the very buffers that the next step writes to.
    return jax.tree.map(np.array, jax.device_get(_plain(state)))


def with_key(plain: TrainState, like: jax.Array) -> TrainState:
    """Gives a state that holds its key as plain data a typed key of the kind of `like`."""
    key = jax.random.wrap_key_data(plain.key, impl=jax.random.key_impl(like))
    return dataclasses.replace(plain, key=key)


def save_state(directory: Path, state: TrainState, notes: dict[str, Any]) -> None:
    """Writes the checkpoint directory/<position> of a `snapshot`.

    Raises:
      ConfigError: the disk refuses; what was written of it is removed.
    """
    _quiet()
    path = directory.absolute() / str(state.position)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        metadata = {"notes": notes, "sha256": _digest(state, notes)}
        with _alone():
            ocp.save(path, state, overwrite=True, custom_metadata=metadata)
        sync_directory(directory)
    except Exception as error:  # TensorStore has its own kinds for what a disk says
        for unfinished in directory.glob(f"{path.name}{UNFINISHED}*"):
            shutil.rmtree(unfinished, ignore_errors=True)
        raise ConfigError(
            f"{directory}: cannot save checkpoint {path.name} ({_reason(error)}); make room, the "
            "same command goes on from the checkpoint before"
        ) from None


def checkpoint_numbers(directory: Path) -> list[int]:
    """Returns the numbers of the completed saves there, readable or not, rising."""
    if not directory.is_dir():
        return []
    return sorted(int(p.name) for p in directory.iterdir() if p.is_dir() and p.name.isdecimal())


def restore_latest(directory: Path, like: TrainState) -> tuple[TrainState, dict[str, Any]] | None:
    """Reads the newest readable checkpoint and its notes; None where there are none.

    Args:
      directory: what `save_state` wrote to.
      like: a state with the structure, shapes and dtypes expected.
    Raises:
      ConfigError: there are checkpoints but none can be read.
    """
    _quiet()
    numbers = checkpoint_numbers(directory)
    for number in reversed(numbers):
        path = directory.absolute() / str(number)
        try:
            with _alone():
                plain = ocp.load(path, snapshot(like))
                metadata = ocp.metadata(path).custom_metadata
            notes = metadata["notes"]
            if _digest(plain, notes) != metadata["sha256"]:
                raise ValueError("its content is not what was written")
        except Exception as error:  # a damaged file raises whatever its parser raises
            say(f"note: checkpoint {number} in {directory} is not readable: {_reason(error)}")
            continue
        return with_key(plain, like.key), notes
    if numbers:
        raise ConfigError(f"{directory}: no checkpoint is readable; give a new workdir")
    return None


def read_notes(directory: Path, number: int) -> dict[str, Any]:
    """Returns the notes of a checkpoint, {} where they cannot be read."""
    _quiet()
    try:
        with _alone():
            return ocp.metadata(directory.absolute() / str(number)).custom_metadata["notes"]
    except Exception:  # as above; `restore_latest` says so where it matters
        return {}


def _digest(state: TrainState, notes: dict[str, Any]) -> str:
    """Hashes notes and arrays: the array files have no checksum of their own."""
    digest = hashlib.sha256(json.dumps(notes, sort_keys=True).encode())
    for leaf in jax.tree.leaves(jax.device_get(state)):
        digest.update(np.ascontiguousarray(leaf))
    return digest.hexdigest()


def _reason(error: Exception) -> str:
    """Returns the end of an error's text: TensorStore names every path on the way to it."""
    return one_line(str(error).split('": ')[-1] or type(error).__name__)


def _plain(state: TrainState) -> TrainState:
    """Replaces the typed key by its data: files hold plain arrays only."""
    return dataclasses.replace(state, key=jax.random.key_data(state.key))


def _alone() -> ocp.Context:
    """Keeps Orbax from waiting for other processes: one writes and reads for all."""
    if jax.process_count() > 1:
        # Its comparison of paths waits for all processes, whichever are active (0.12.8).
        try:
            from orbax.checkpoint.experimental.v1._src.saving import execution

            assert execution._check_directory_consistency
        except (ImportError, AttributeError):
            version = importlib.metadata.version("orbax-checkpoint")
            raise ConfigError(
                f"orbax-checkpoint {version} cannot save from one of several processes as 0.12.8 "
                "does; install that version, or train with one process"
            ) from None
        execution._check_directory_consistency = lambda directory: None
    index = jax.process_index()
    options = ocp.options.MultiprocessingOptions(primary_host=index, active_processes={index})
    return ocp.Context(multiprocessing_options=options)


def _quiet() -> None:
    """Keeps what Orbax says itself, a page per save, out of the progress display."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    if getattr(sys.unraisablehook, "func", None) is not _show_error:
        sys.unraisablehook = functools.partial(_show_error, sys.unraisablehook)


def _show_error(show: Callable, unraisable: Any) -> None:
    """Stands in for sys.unraisablehook, silent of what says nothing beside a failed save's error.

    TensorStore's threads that were still writing find Orbax's event loop gone, one trace for each.
    """
    error = unraisable.exc_value
    if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
        show(unraisable)
