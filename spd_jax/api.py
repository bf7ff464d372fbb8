"""The public functions: load, decode, generate, score. Contracts are in each docstring."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from spd_jax.config import ConfigError, SamplingConfig
from spd_jax.models import reference
from spd_jax.models.bundle import Target
from spd_jax.models.cache import bucket_capacity
from spd_jax.requests import Prompt, Request, make_request
from spd_jax.results import DecodeResult, make_stats
from spd_jax.weights import load_target_files

GREEDY = SamplingConfig()
AR_CHUNK_STEPS = 256  # steps per compiled call of `generate`
TOKEN_BUCKET = 64  # the token buffers' size is a multiple of this


def load_target(source: str, dtype: str = "float32") -> Target:
    """Loads a target model."""
    loaded = load_target_files(source, dtype)
    params = jax.tree.map(jnp.asarray, loaded.params)
    return Target(
        params, loaded.config, loaded.tokenizer, loaded.stop_ids, loaded.sha256, str(source)
    )


def generate(
    target: Target,
    prompt: Prompt | Sequence[Prompt],
    *,
    max_new_tokens: int = 128,
    sampling: SamplingConfig = GREEDY,
    stop_ids: Sequence[int] | None = None,
    seed: int | Sequence[int] = 0,
) -> DecodeResult | list[DecodeResult]:
    """Decodes autoregressively: the baseline and the oracle of `decode`.

    Args:
      prompt: token ids, a string (chat template), or a list of either (a batch).
      max_new_tokens: at least 1; sampling: temperature and top-k.
      stop_ids: ids that end a text; None: the target's; (): never.
      seed: prompt b draws from seed + b, or from its own entry of a list.

    Returns:
      A `DecodeResult` (accepted and cycles None), or a list of them in the prompts' order.

    Raises:
      ConfigError: the input cannot be decoded; the text says what to change.
    """
    if sampling.top_p < 1:
        raise ConfigError(f"top_p below 1 is not supported yet, got {sampling.top_p}; use top_k")
    request = make_request(target, prompt, max_new_tokens, stop_ids, seed)
    n_slots = -(-max_new_tokens // TOKEN_BUCKET) * TOKEN_BUCKET
    capacity = bucket_capacity(
        max(request.prompts.shape[1], int(request.prompt_lens.max()) + max_new_tokens)
    )
    limit, lens = jnp.int32(max_new_tokens), jnp.asarray(request.prompt_lens)
    params, stops = target.params, jnp.asarray(request.stop_ids)
    static = {"config": target.config, "sampling": sampling}
    args = (params, jnp.asarray(request.prompts), lens, request.keys, stops, limit)
    start = reference.start_ar.compile(*args, capacity=capacity, n_slots=n_slots, **static)
    began = time.perf_counter()
    state = jax.block_until_ready(start(*args))
    prefill_seconds = time.perf_counter() - began
    steps = jnp.int32(AR_CHUNK_STEPS)
    args = (params, state, lens, request.keys, stops, limit, steps)
    proceed = reference.continue_ar.compile(*args, **static)
    began = time.perf_counter()
    while not bool(np.all(np.asarray(state.done))):
        state = proceed(params, state, lens, request.keys, stops, limit, steps)
    decode_seconds = time.perf_counter() - began
    tokens, counts = np.asarray(state.tokens), np.asarray(state.n_tokens)
    results = [
        finish_result(target, request, row[:n].tolist(), prefill_seconds, decode_seconds)
        for row, n in zip(tokens, counts, strict=True)
    ]
    return results[0] if request.single else results


def finish_result(
    target: Target,
    request: Request,
    tokens: list[int],
    prefill_seconds: float,
    decode_seconds: float,
    accepted: list[bool] | None = None,
    cycles: int | None = None,
    n_stages: int | None = None,
    mode: str = "virtual",
    placement: str = "virtual",
    devices: int = 1,
) -> DecodeResult:
    """Adds text, reason and figures to one sequence's tokens."""
    stopped = tokens[-1] in request.stop_ids.tolist()
    stats = make_stats(
        tokens, accepted, cycles, n_stages, prefill_seconds, decode_seconds, mode, placement, devices
    )
    text = None if target.tokenizer is None else target.tokenizer.decode(tokens)
    return DecodeResult(tokens, accepted, cycles, text, "stop" if stopped else "length", stats)
