"""Orbax checkpoints of the train state, in a folder named by batch number, written atomically.

A killed writer leaves the earlier ones as they were; a checkpoint that cannot be read is passed
over with one line. The only file that knows Orbax.
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import jax
from orbax.checkpoint import v1 as ocp

from spd_jax.checks import ConfigError
from spd_jax.commandline import say
from spd_jax.weights.files import one_line
from train.step import TrainState


def save_state(directory: Path, state: TrainState, keep: int) -> None:
    """Writes a checkpoint and removes all but the newest `keep`.

    Raises:
      ConfigError: the disk refuses.
    """
    _quiet()
    newest = ocp.training.preservation_policies.LatestN(keep)
    try:
        with ocp.training.Checkpointer(
            directory.absolute(), preservation_policy=newest, cleanup_tmp_directories=True
        ) as checkpointer:
            checkpointer.save(state.position, _plain(state), force=True, overwrite=True)
    except OSError as error:
        raise ConfigError(f"{directory}: cannot save a checkpoint ({one_line(error)})") from None


def has_checkpoint(directory: Path) -> bool:
    """Tells whether a save was completed there, readable or not."""
    return directory.is_dir() and any(
        path.is_dir() and path.name.isdecimal() for path in directory.iterdir()
    )


def restore_latest(directory: Path, like: TrainState) -> TrainState | None:
    """Reads the newest readable checkpoint; None where there are none.

    Args:
      directory: what `save_state` wrote to.
      like: a state with the structure, shapes and dtypes expected.
    Raises:
      ConfigError: there are checkpoints but none can be read.
    """
    _quiet()
    if not directory.is_dir():
        return None
    with ocp.training.Checkpointer(directory.absolute()) as checkpointer:
        steps = [checkpoint.step for checkpoint in checkpointer.checkpoints][::-1]
        for step in steps:
            try:
                plain = checkpointer.load(step, _plain(like))
            except Exception as error:  # a damaged file raises whatever its parser raises
                say(f"note: checkpoint {step} in {directory} is not readable: {one_line(error)}")
                continue
            key = jax.random.wrap_key_data(plain.key, impl=jax.random.key_impl(like.key))
            return dataclasses.replace(plain, key=key)
    if has_checkpoint(directory):
        raise ConfigError(f"{directory}: no checkpoint is readable; give a new workdir")
    return None


def _plain(state: TrainState) -> TrainState:
    """Replaces the typed key by its data: files hold plain arrays only."""
    return dataclasses.replace(state, key=jax.random.key_data(state.key))


def _quiet() -> None:
    """Keeps Orbax's own log, a page per save, out of the progress display."""
    logging.getLogger("absl").setLevel(logging.ERROR)
