"""Streaming verification and rollback: the control step of a cycle, integers only.

Every rank runs it on the same values. A rejection rolls back by setting positions: cache rows at
and beyond a valid length are never read, and of a delta-net's states only the one before the next
position, so nothing is copied or cleared.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from spd_jax.models.reference import is_stop
from spd_jax.pipeline.state import Inputs, PipelineState


def control(
    state: PipelineState,
    inputs: Inputs,
    n_stages: int,
    verified: jax.Array,
    drafted: jax.Array,
) -> tuple[PipelineState, jax.Array]:
    """Commits or corrects the token that follows the leaving one, and inserts the draft.

    Args:
      state: before the cycle, but for caches, hidden and ring, which are left alone.
      verified: int32 [B], the target's id for position p - N + 2 (of use where f == N).
      drafted: int32 [B], the draft's id for position p + 1.

    Returns:
      The new state, and bool [B]: True where the draft was rejected (the newest token is now
      the target's own).
    """
    batch = jnp.arange(state.newest.shape[0])
    running = ~state.done
    full = running & (state.fill == n_stages)
    checked = state.newest - n_stages + 2 - inputs.prompt_lens  # index of the token being verified
    drafted_there = state.tokens[batch, jnp.maximum(checked, 0)]
    reject = full & (verified != drafted_there)
    insert = running & ~reject

    newest = jnp.where(insert, state.newest + 1, state.newest)
    newest = jnp.where(reject, checked + inputs.prompt_lens, newest)
    fill = jnp.where(insert, jnp.minimum(state.fill + 1, n_stages), state.fill)
    fill = jnp.where(reject, 1, fill)

    n_slots = state.tokens.shape[1]
    write = jnp.where(running, newest - inputs.prompt_lens, n_slots)  # out of range: dropped
    tokens = state.tokens.at[batch, write].set(jnp.where(reject, verified, drafted), mode="drop")
    accepted = state.accepted.at[batch, write].set(~reject, mode="drop")

    n_committed = state.n_committed + full
    ended = full & (is_stop(verified, inputs.stop_ids) | (n_committed >= inputs.limit))
    new = dataclasses.replace(
        state,
        tokens=tokens,
        accepted=accepted,
        newest=newest,
        fill=fill,
        n_committed=n_committed,
        n_cycles=state.n_cycles + running,
        done=state.done | ended,
    )
    return new, reject
