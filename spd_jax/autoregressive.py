"""Autoregressive decoding of a request: what `generate` runs, and what speed is compared with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from spd_jax.config import SamplingConfig
from spd_jax.engines import whole_params
from spd_jax.models.bundle import Target
from spd_jax.models.cache import bucket_capacity
from spd_jax.models.reference import ARState, continue_ar, start_ar
from spd_jax.ops.sampling import plan
from spd_jax.pipeline.programs import TOKEN_BUCKET
from spd_jax.requests import Request


class Autoregression:
    """The compiled programs of one request: what is returned runs, and blocks, when called."""

    def __init__(
        self,
        target: Target,
        request: Request,
        sampling: SamplingConfig,
        capacity: int | None = None,
    ):
        """Args: capacity: cache positions; None: as many as the request can use."""
        limit = request.max_new_tokens
        longest = int(request.prompt_lens.max()) + limit
        self.capacity = capacity or bucket_capacity(max(request.prompts.shape[1], longest))
        as_generate = dataclasses.replace(sampling, verifier="coupled")
        method, knobs = plan(as_generate, target.config.vocab_size)
        self._n_slots = -(-limit // TOKEN_BUCKET) * TOKEN_BUCKET
        self._static = {"config": target.config, "method": method}
        self._params = whole_params(target)
        self._prompts = jnp.asarray(request.prompts)
        lens, stops = jnp.asarray(request.prompt_lens), jnp.asarray(request.stop_ids)
        self._inputs = (lens, request.keys, stops, jnp.int32(limit), knobs)

    def prefill(self) -> Callable[[], ARState]:
        """Fills the caches and commits the first tokens."""
        args = (self._params, self._prompts, *self._inputs)
        static = {"capacity": self.capacity, "n_slots": self._n_slots, **self._static}
        program = start_ar.compile(*args, **static)
        return lambda: jax.block_until_ready(program(*args))

    def steps(self, state: ARState, n_steps: int, n_read: int) -> Callable[[ARState], ARState]:
        """Goes on with a state like `state`, which is donated, for up to n_steps.

        Args:
          n_read: cache positions that attention reads, no fewer than are in use before the last.
        """
        args = (*self._inputs, jnp.int32(n_steps))
        program = continue_ar.compile(self._params, state, *args, n_read=n_read, **self._static)
        return lambda state: jax.block_until_ready(program(self._params, state, *args))
