"""What the frozen target says about a row: the hidden states a draft needs, and its choices.

Each row is computed once where a cache is kept: later epochs read it from disk.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spd_jax.checks import ConfigError
from spd_jax.commandline import say
from spd_jax.config import DraftConfig, TargetConfig
from spd_jax.models import target as model
from spd_jax.models.distill import (
    kept_states,
    needs_choices,
    scored_positions,
    target_choices,
)
from spd_jax.weights.files import one_line
from train.data import Corpus
from train.parallel import BY_ROW, Devices, assemble, one_device


class Teacher:
    """Adds `states` [B, T, K, D] and, for drafts of some ids, `best` [B, T] to batches."""

    def __init__(
        self,
        target: TargetConfig,
        draft: DraftConfig,
        params: Any,
        corpus: Corpus,
        cache: StateCache | None = None,
        devices: Devices | None = None,
    ) -> None:
        """`devices`: where `params` are and batches go; None: the first."""
        self._devices = devices = devices or one_device()
        self._params, self._rows, self._cache = params, corpus.rows, cache
        specs = devices.target_specs(params)

        def outputs(params: Any, *inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
            return run_target(target, draft, assemble(params, specs), *inputs)

        in_specs = (specs, BY_ROW, BY_ROW, BY_ROW)
        self._outputs = jax.jit(devices.by_rows(outputs, in_specs, BY_ROW))

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """Returns the batch on the device, with the target's outputs."""
        batch = dict(batch)
        numbers = [n for n in batch.pop("row_numbers").ravel().tolist() if n >= 0]
        lens = [len(self._rows[n].ids) for n in numbers]
        known = self._cache and self._cache.read(numbers, lens, batch["input_ids"].shape)
        on_device = self._devices.put_rows(batch)
        if known:
            states, best = self._devices.put_rows(known)
        else:
            states, best = self._outputs(
                self._params,
                on_device["input_ids"],
                on_device["attention_mask"],
                on_device["labels"],
            )
            if self._cache:
                self._cache.write(numbers, lens, *jax.device_get((states, best)))
        return {**on_device, "states": states, "best": best}


def run_target(
    target: TargetConfig,
    draft: DraftConfig,
    params: Any,
    input_ids: jax.Array,
    segments: jax.Array,
    labels: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns the hidden states a draft needs [B, T, K, D], zero on padding, and choices [B, T].

    Choices are there where they are scored; a draft that has all ids needs none.

    Args:
      input_ids, segments, labels: int [B, T]; segments are 0 on padding.
    """
    hidden = model.hidden_states(target, params, input_ids, segments)
    states = jnp.stack([hidden[b] for b in kept_states(target, draft)], axis=2)
    best = jnp.zeros(input_ids.shape, jnp.int32)
    if needs_choices(draft):
        scored = scored_positions(labels, segments)
        best = best.at[:, :-1].set(target_choices(target, params, hidden[-1], scored))
    return jnp.where(segments[..., None, None] > 0, states, 0), best


def teacher_outputs(
    target: TargetConfig, draft: DraftConfig, batch: dict[str, jax.Array]
) -> tuple[dict[int, jax.Array], jax.Array, jax.Array, jax.Array]:
    """Returns what scoring takes from a Teacher's batch: hidden states, choices, texts, labels."""
    states = {b: batch["states"][:, :, k] for k, b in enumerate(kept_states(target, draft))}
    return states, batch["best"][:, :-1], batch["attention_mask"], batch["labels"]


def _claim_blocks(paths: Sequence[Path]) -> None:
    """Gives files their disk blocks, where the system can."""
    if hasattr(os, "posix_fallocate"):
        for path in paths:
            with open(path, "r+b") as file:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


def _size(path: Path) -> int | None:
    """Returns the bytes of a file; None where it lacks."""
    return path.stat().st_size if path.is_file() else None


class StateCache:
    """The target's outputs for the rows of one corpus, in files named for all they hang on."""

    def __init__(
        self,
        directory: Path,
        corpus: Corpus,
        target: TargetConfig,
        draft: DraftConfig,
        dtype: Any,
        target_sha256: str,
    ) -> None:
        """Opens the files, or makes them; they are made anew where one has lost its size.

        Raises:
          ConfigError: the disk has no room for them.
        """
        scored = hashlib.sha256(b"".join(row.scored_mask.tobytes() for row in corpus.rows))
        data, kept = (corpus.sha256, scored.hexdigest()), kept_states(target, draft)
        made = target_sha256, kept, str(jnp.dtype(dtype)), needs_choices(draft)
        identity = repr((*data, *made))
        name = hashlib.sha256(identity.encode()).hexdigest()[:16]
        self._starts = np.cumsum([0, *(len(row.ids) for row in corpus.rows)])
        n_tokens = int(self._starts[-1])
        shape = (n_tokens, len(kept), target.d_model)
        self.n_bytes = int(np.prod(shape)) * jnp.dtype(dtype).itemsize
        directory.mkdir(parents=True, exist_ok=True)
        paths = [directory / f"{name}.{part}" for part in ("states", "best", "done")]
        fresh = not paths[2].exists()  # it is made last
        sizes = [self.n_bytes, n_tokens * np.dtype(np.int32).itemsize, len(corpus.rows)]
        if not fresh and list(map(_size, paths)) != sizes:  # a map would fill it up with zeros
            say(f"note: state cache {directory / name}.* was cut short; it is made anew")
            fresh = True
        free = shutil.disk_usage(directory).free
        if fresh and free < 1.1 * self.n_bytes:
            raise ConfigError(
                f"{directory}: the target's states need {self.n_bytes / 1e9:.1f} GB, "
                f"{free / 1e9:.1f} GB are free; set state_cache False or make room"
            )
        mode = "w+" if fresh else "r+"  # w+ makes a sparse file of zeros
        try:
            if fresh:
                paths[2].unlink(missing_ok=True)  # what it said is of the files before
            self._states = np.memmap(paths[0], jnp.dtype(dtype), mode, shape=shape)
            self._best = np.memmap(paths[1], np.int32, mode, shape=(n_tokens,))
            if fresh:  # a disk that is full under a sparse file would be a crash later
                _claim_blocks(paths[:2])
            self._done = np.memmap(paths[2], np.uint8, mode, shape=(len(corpus.rows),))
        except OSError as error:
            raise ConfigError(f"{directory}: cannot keep states ({one_line(error)})") from None

    @property
    def n_done(self) -> int:
        """Rows whose outputs are there."""
        return int(self._done.sum())

    def read(
        self, numbers: list[int], lens: list[int], shape: tuple[int, int]
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Returns states and choices of rows, zeros as padding; None unless all are there."""
        if not self._done[numbers].all():
            return None
        states = np.zeros((*shape, *self._states.shape[1:]), self._states.dtype)
        best = np.zeros(shape, np.int32)
        for b, (number, n) in enumerate(zip(numbers, lens, strict=True)):
            start = self._starts[number]
            states[b, :n] = self._states[start : start + n]
            best[b, :n] = self._best[start : start + n]
        return states, best

    def write(
        self, numbers: list[int], lens: list[int], states: np.ndarray, best: np.ndarray
    ) -> None:
        """Keeps the outputs of rows."""
        for b, (number, n) in enumerate(zip(numbers, lens, strict=True)):
            start = self._starts[number]
            self._states[start : start + n] = states[b, :n]
            self._best[start : start + n] = best[b, :n]
        self._states.flush()  # before the mark: a row that is marked is whole
        self._best.flush()
        self._done[numbers] = 1
