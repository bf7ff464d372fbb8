"""What `infer.bench` times: loops on the device, all of one kind from the same state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from infer.timing import Run
from spd_jax.autoregressive import Autoregression
from spd_jax.config import SamplingConfig
from spd_jax.models.bundle import Target
from spd_jax.pipeline import programs
from spd_jax.pipeline.loop import Committed, Stopwatch, decode_batch
from spd_jax.pipeline.probe import probe
from spd_jax.pipeline.programs import Engine
from spd_jax.pipeline.state import Inputs
from spd_jax.pipeline.synthetic import Script
from spd_jax.requests import Request, make_inputs


class Loops:
    """A state that every run begins from; only its caches, which programs are given, are new."""

    def __init__(self, state: Any):
        self._first, self._caches = dataclasses.replace(state, caches=None), state.caches

    def state(self, **changes: Any) -> Any:
        """The state to run from, with some fields changed."""
        first = jax.tree.map(jnp.copy, self._first)
        return dataclasses.replace(first, caches=self._caches, **changes)

    def run(self, program: Callable[[Any], Any], state: Any) -> tuple[float, Any]:
        """Runs program(state), which is donated; returns the seconds, and what comes of it."""
        clock = Stopwatch()
        state = program(state)
        seconds = clock.lap()
        self._caches = state.caches
        return seconds, state


class ARLoops:
    """Autoregressive decoding of one prompt."""

    def __init__(self, target: Target, request: Request, n_read: int, capacity: int | None = None):
        self._decoder = Autoregression(target, request, SamplingConfig(), capacity)
        self._loops = Loops(self._decoder.prefill()())
        self._n_read, self._n_new = n_read, request.max_new_tokens

    def steps(self, n: int) -> float:
        """Seconds of n steps after the first token."""
        return self._steps(n)[0]

    def text(self) -> list[int]:
        """All new tokens."""
        _, state = self._steps(self._n_new)
        return np.asarray(state.tokens)[0, : self._n_new].tolist()

    def _steps(self, n: int) -> tuple[float, Any]:
        state = self._loops.state()
        return self._loops.run(self._decoder.steps(state, n, self._n_read), state)


class EngineLoops:
    """Cycles of one prompt, drafted by a module of set quality; at first the pipeline is full."""

    def __init__(
        self,
        engine: Engine,
        target: Target,
        request: Request,
        text: list[int],
        n_read: int,
        room: int | None = None,
    ):
        """Args: text: of `generate`; room: tokens to have room for, None: those of the request."""
        self._engine, self._request, self._n_read = engine, request, n_read
        self._inputs = make_inputs(target, request, SamplingConfig())
        self._text = jnp.asarray([text], jnp.int32)
        self._always = self._scripted(1.0)
        state = programs.prefill(
            engine, request.prompts, self._always, room or request.max_new_tokens
        )()
        fill_up = programs.chunk(engine, state, self._always, 2 * engine.spec.n_stages, n_read)
        self._loops = Loops(fill_up(state))
        self.n_cycles = request.max_new_tokens - 2 * engine.spec.n_stages  # there may be at most

    def cycles(self, n: int) -> float:
        """Seconds of n cycles of `decode`; all drafts are accepted, so that it stays full."""
        state = self._loops.state()
        run = programs.chunk(self._engine, state, self._always, n, self._n_read)
        return self._loops.run(run, state)[0]

    def part(self, part: str, rank: int = 0, fill: int | None = None) -> Run:
        """Returns what runs a part of a cycle, as `pipeline.probe` says, at a fill (None: N)."""
        program = probe(self._engine, self._loops.state(), self._always, part, self._n_read, rank)
        fill = self._engine.spec.n_stages if fill is None else fill

        def run(n: int) -> float:
            state = self._loops.state()
            state = dataclasses.replace(state, fill=jnp.full_like(state.fill, fill))
            return self._loops.run(lambda state: program(state, n), state)[0]

        return run

    def decode(self, acceptance: float, chunk_cycles: int) -> tuple[float, Committed]:
        """Decodes the request; drafts are right with the probability given.

        Returns:
          Seconds without the prefill, and the sequence.
        """
        inputs = self._scripted(acceptance)
        limit = self._request.max_new_tokens
        found = decode_batch(
            self._engine, self._request.prompts, inputs, limit, chunk_cycles, on_tokens=None
        )
        (sequence,) = found.sequences
        return found.decode_seconds, sequence

    def _scripted(self, acceptance: float) -> Inputs:
        n = jnp.full(1, self._text.shape[1], jnp.int32)
        script = Script(self._text, n, jnp.float32(acceptance))
        return dataclasses.replace(self._inputs, script=script)
