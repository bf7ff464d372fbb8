"""The host's loop: one program per chunk of cycles, then one look at its small counters.

Never one dispatch per cycle. Finished sequences leave: once half of a batch is done, the rest
goes on as a smaller batch.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import numpy as np

from spd_jax.models.cache import read_len
from spd_jax.pipeline import programs
from spd_jax.pipeline.programs import Engine
from spd_jax.pipeline.state import Inputs, PipelineState

OnTokens = Callable[[int, list[int]], None]


@dataclasses.dataclass
class Committed:
    """One sequence of a batch, as far as it is verified."""

    tokens: list[int]
    accepted: list[bool]
    cycles: int = 0
    overlap: float | None = None  # sum of min(p, q) over its drafts; None: not rejection sampling


@dataclasses.dataclass(frozen=True)
class Decoded:
    """A decoded batch and what it took; compilation is not counted."""

    sequences: list[Committed]
    prefill_seconds: float
    decode_seconds: float


class Stopwatch:
    """Tells the seconds since the last lap."""

    def __init__(self):
        self._began = time.perf_counter()

    def lap(self) -> float:
        """Returns the seconds since the last lap, and starts the next."""
        began, self._began = self._began, time.perf_counter()
        return self._began - began


def decode_batch(
    engine: Engine,
    prompts: np.ndarray,
    inputs: Inputs,
    max_new_tokens: int,
    chunk_cycles: int,
    on_tokens: OnTokens | None,
) -> Decoded:
    """Decodes a batch to its end.

    Args:
      prompts: int32 [B, T] right-padded; sequences of no length, the last ones, are padding.
      on_tokens: called with a sequence's index and its newly verified ids after every chunk.
    """
    fill_caches = programs.prefill(engine, prompts, inputs, max_new_tokens)
    clock = Stopwatch()
    state = fill_caches()
    prefill_seconds = clock.lap()

    lens = [length for length in np.asarray(inputs.prompt_lens).tolist() if length]
    sequences = [Committed([], []) for _ in lens]
    members = list(range(len(lens)))  # whose sequence each row of the batch is; padding past these
    done, run, n_read = _read(state, members, sequences, on_tokens), None, 0
    decode_seconds, capacity = 0.0, programs.capacity_of(state)
    while not all(done):
        running = [row for row, ended in enumerate(done) if not ended]
        if 2 * len(running) <= state.done.shape[0] and state.done.shape[0] > 1:
            state, inputs = programs.compact(engine, state, inputs, running)
            members, run = [members[row] for row in running], None
        longest = max(lens[i] + len(sequences[i].tokens) for i in members)
        in_use = min(longest + engine.spec.n_stages + chunk_cycles, capacity)
        if run is None or in_use > n_read:
            n_read = read_len(in_use, capacity)
            run = programs.chunk(engine, state, inputs, chunk_cycles, n_read)
            clock.lap()  # compiling is not decoding
        state = run(state)
        done = _read(state, members, sequences, on_tokens)
        decode_seconds += clock.lap()
    return Decoded(sequences, prefill_seconds, decode_seconds)


def _read(
    state: PipelineState,
    members: list[int],
    sequences: list[Committed],
    on_tokens: OnTokens | None,
) -> list[bool]:
    """Takes over what was committed since the last look; returns which rows are done."""
    tokens, accepted = np.asarray(state.tokens), np.asarray(state.accepted)
    counts, cycles = np.asarray(state.n_committed), np.asarray(state.n_cycles)
    overlap = None if state.proposals is None else np.asarray(state.proposals.overlap)
    for row, member in enumerate(members):
        sequence = sequences[member]
        fresh = slice(len(sequence.tokens), int(counts[row]))
        new = tokens[row, fresh].tolist()
        sequence.tokens += new
        sequence.accepted += accepted[row, fresh].tolist()
        sequence.cycles = int(cycles[row])
        if overlap is not None:
            sequence.overlap = float(overlap[..., row].sum())  # over the shards, where they are
        if new and on_tokens is not None:
            on_tokens(member, new)
    return np.asarray(state.done)[: len(members)].tolist()
