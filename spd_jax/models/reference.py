"""Plain autoregressive decoding: the baseline, and the oracle of everything else.

A chunked prefill, then one compiled loop that emits one token per sequence and step.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from spd_jax.config import TargetConfig
from spd_jax.models import target as model
from spd_jax.models.cache import Rows, first_positions, init_cache, write_chunk, write_row
from spd_jax.ops.attention import causal_mask
from spd_jax.ops.sampling import Knobs, Method, sample
from spd_jax.program import Program

PREFILL_CHUNK = 128


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["caches", "tokens", "n_tokens", "last", "done", "step"],
    meta_fields=[],
)
@dataclasses.dataclass
class ARState:
    """Everything the decoding loop carries."""

    caches: list[Rows]  # one per layer; of a delta-net only the newest state
    tokens: jax.Array  # int32 [B, n_slots], ids committed so far; the rest is zero
    n_tokens: jax.Array  # int32 [B], how many of them count
    last: jax.Array  # int32 [B], newest committed id
    done: jax.Array  # bool [B], stopped or at the limit
    step: jax.Array  # int32 scalar, tokens emitted per running sequence


def prefill_chunk_len(n_padded: int) -> int:
    """Rows per prefill chunk for prompts padded to n_padded."""
    return min(PREFILL_CHUNK, n_padded)


def padded_prompt_len(longest: int) -> int:
    """Length to pad prompts to: a power of two up to the chunk, then a multiple of it."""
    if longest <= PREFILL_CHUNK:
        return max(16, 1 << (longest - 1).bit_length())
    return -(-longest // PREFILL_CHUNK) * PREFILL_CHUNK


def prefill(
    config: TargetConfig, params: dict, prompts: jax.Array, prompt_lens: jax.Array, capacity: int
) -> tuple[list[Rows], jax.Array]:
    """Fills the caches; returns them and the hidden state [B, D] of each last prompt position.

    Args:
      prompts: int [B, T] right-padded, T a multiple of the chunk; prompt_lens: int [B].
      capacity: cache positions S, at least T.
    """
    n_batch, n_padded = prompts.shape
    chunk = prefill_chunk_len(n_padded)
    dtype = params["embed"]["weight"].dtype
    caches = [
        init_cache(config, kind.mixer, n_batch, capacity, n_snapshots=1, dtype=dtype)
        for kind in config.layer_kinds
    ]
    last_idx = prompt_lens - 1

    def run_chunk(c, carry):
        caches, last = carry
        start = c * chunk
        ids = lax.dynamic_slice_in_dim(prompts, start, chunk, axis=1)
        positions = jnp.broadcast_to(start + jnp.arange(chunk), (n_batch, chunk))
        before, ends = (jnp.minimum(end, prompt_lens) for end in (start, start + chunk))
        active, mask = c < n_chunks, causal_mask(chunk)  # always active: see run_if
        x = model.run_if(active, lambda: model.embed(params, ids))
        read = [first_positions(cache, n_padded) for cache in caches]
        turn = model.rotation(config, positions)
        args = (params["layers"], x, turn, mask, read, before, ends - before)
        x, rows = model.run_block(active, config, *args)
        caches = [write_chunk(*pair, start, ends) for pair in zip(caches, rows, strict=True)]
        offset = jnp.clip(last_idx - start, 0, chunk - 1)
        row = jnp.take_along_axis(x, offset[:, None, None], axis=1)[:, 0]
        return caches, jnp.where((last_idx // chunk == c)[:, None], row, last)

    n_chunks = (jnp.max(prompt_lens) + chunk - 1) // chunk
    return lax.fori_loop(
        0, n_chunks, run_chunk, (caches, jnp.zeros((n_batch, config.d_model), dtype))
    )


def start_state(
    params: dict,
    prompts: jax.Array,
    prompt_lens: jax.Array,
    keys: jax.Array,
    stop_ids: jax.Array,
    limit: jax.Array,
    knobs: Knobs,
    *,
    config: TargetConfig,
    capacity: int,
    n_slots: int,
    method: Method,
) -> ARState:
    """Runs the prefill and commits the first token of each sequence.

    Args:
      prompts, prompt_lens: as for `prefill`, 0 in rows that pad the batch; keys: typed [B].
      stop_ids: int [n], -1 pads; limit: int scalar, max_new_tokens, at most n_slots.
      method, knobs: how tokens are drawn, as `ops.sampling.plan` gives them.
    """
    caches, last_hidden = prefill(config, params, prompts, prompt_lens, capacity)
    first = sample(model.logits(config, params, last_hidden), keys, prompt_lens, method, knobs)
    n_batch = prompts.shape[0]
    tokens = jnp.zeros((n_batch, n_slots), jnp.int32).at[:, 0].set(first)
    done = is_stop(first, stop_ids) | (limit == 1) | (prompt_lens == 0)
    ones = jnp.ones(n_batch, jnp.int32)
    return ARState(caches, tokens, ones, first, done, jnp.int32(1))


def is_stop(ids: jax.Array, stop_ids: jax.Array) -> jax.Array:
    """Returns bool [B], True where an id is among stop_ids int [n] (-1 pads)."""
    return jnp.any(ids[:, None] == stop_ids[None], axis=-1)


def decode_steps(
    params: dict,
    state: ARState,
    prompt_lens: jax.Array,
    keys: jax.Array,
    stop_ids: jax.Array,
    limit: jax.Array,
    knobs: Knobs,
    n_steps: jax.Array,
    *,
    config: TargetConfig,
    method: Method,
    n_read: int,
) -> ARState:
    """Runs up to n_steps (traced) more steps, fewer when every sequence is done.

    Args:
      n_read: cache positions that attention reads: none beyond is in use before the last step.
    """
    n_batch, n_slots = state.tokens.shape
    until = state.step + n_steps

    def running(state: ARState):
        return (state.step < until) & ~jnp.all(state.done)

    def one_step(state: ARState) -> ARState:
        active = ~jnp.all(state.done)
        position = prompt_lens + state.n_tokens - 1  # of the newest committed token
        x = model.run_if(active, lambda: model.embed(params, state.last))[:, None]
        hidden, rows = model.run_block(
            active,
            config,
            params["layers"],
            x,
            model.rotation(config, position[:, None]),
            causal_mask(1),
            [first_positions(cache, n_read) for cache in state.caches],
            position,
        )
        caches = [
            write_row(*pair, position, ~state.done) for pair in zip(state.caches, rows, strict=True)
        ]
        scores = model.run_if(active, lambda: model.logits(config, params, hidden[:, 0]))
        drawn = sample(scores, keys, position + 1, method, knobs)
        new = jnp.where(state.done, state.last, drawn)
        write_idx = jnp.where(state.done, n_slots, state.n_tokens)  # out of range: dropped
        tokens = state.tokens.at[jnp.arange(n_batch), write_idx].set(new, mode="drop")
        n_tokens = state.n_tokens + ~state.done
        done = state.done | is_stop(new, stop_ids) | (n_tokens >= limit)
        return ARState(caches, tokens, n_tokens, new, done, state.step + 1)

    return lax.while_loop(running, one_step, state)


start_ar = Program(start_state)
continue_ar = Program(decode_steps, donate=(1,))
