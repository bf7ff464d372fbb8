"""One lockstep cycle: every stage moves one token on while the draft module proposes the next.

compute (a branch per rank) -> write cache rows -> gather hidden states -> heads -> control.
Two collectives, three where sampling needs one more. Features are read as they were at the start
of the cycle.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from spd_jax.models import target as model
from spd_jax.models.aggregate import make_row, normalise
from spd_jax.models.cache import write_row
from spd_jax.ops.rope import Rotation
from spd_jax.pipeline.comm import Comm
from spd_jax.pipeline.draws import name_tokens
from spd_jax.pipeline.slots import Slots, map_slots, read_slots
from spd_jax.pipeline.spec import EngineSpec
from spd_jax.pipeline.stages import Sent, run_draft, run_rank, run_stage
from spd_jax.pipeline.state import Inputs, PipelineState
from spd_jax.pipeline.verify import control
from spd_jax.pipeline.weights import EngineWeights


def run_cycle(
    spec: EngineSpec,
    comm: Comm,
    weights: EngineWeights,
    state: PipelineState,
    inputs: Inputs,
    n_read: int,
) -> PipelineState:
    """Advances every running sequence by one cycle.

    Attention reads the first n_read positions of the caches: none beyond is in use.
    """
    n = spec.n_stages
    with jax.named_scope("compute"):
        sent, caches = compute(spec, comm, weights, state, n_read)
    with jax.named_scope("exchange"):
        gathered = comm.gather_ranks(sent)[:, :, :, 0]  # [N+1, K, B, D]
    with jax.named_scope("heads"):
        named = name_tokens(
            spec, comm, weights.heads, state, inputs, gathered[n - 1, 0], gathered[n, 0]
        )
        ids, rows, proposals = named
    with jax.named_scope("control"):
        new, reject = control(state, inputs, n, ids[0], ids[1])
        entering = jnp.where(reject[:, None], rows[0], rows[1])
        hidden = jnp.concatenate([entering[None], gathered[: n - 1, 0]])
        ring = _update_ring(spec, state, gathered, entering, new.newest)
    return dataclasses.replace(new, caches=caches, proposals=proposals, hidden=hidden, ring=ring)


def compute(
    spec: EngineSpec,
    comm: Comm,
    weights: EngineWeights,
    state: PipelineState,
    n_read: int,
    only: jax.Array | None = None,
) -> tuple[list[jax.Array], list[Slots]]:
    """Runs every local rank's work and writes the new rows.

    Args:
      only: int scalar, the one rank that works, to measure it; None: all.
    Returns:
      What each rank sends, [K, B, 1, D], and its caches.
    """
    n = spec.n_stages
    running = ~state.done
    one, drafted_turn = jnp.ones_like(state.newest), draft_rotation(spec, state)
    sent, caches = [], []
    for rank, parameters, cache in zip(comm.ranks, weights.ranks, state.caches, strict=True):
        # The PDM keeps one row, the newest completed token's; a stage the row of its own token.
        in_flight = running & (rank < state.fill)
        position = jnp.maximum(state.newest - rank, 0)

        turn = model.rotation(spec.target, position[:, None])

        def stage(kinds, rank=rank, mine=parameters, cache=cache, position=position, turn=turn):
            x = lax.dynamic_index_in_dim(state.hidden, jnp.minimum(rank, n - 1), keepdims=False)
            read = read_slots(cache, n_read)
            return run_stage(spec, comm, rank, kinds, mine, read, x[:, None], turn, position, one)

        def draft(parameters=parameters, cache=cache):
            read = read_slots(cache, n_read)
            return _draft(spec, comm, weights.projs, parameters, read, state, drafted_turn)

        is_draft = rank == n
        keep = in_flight | (running & is_draft)
        if only is not None:
            keep &= rank == only
        out, rows = run_rank(spec, comm, rank, jnp.any(keep), stage, draft)
        position = jnp.where(is_draft, state.newest - state.fill, position)
        write = functools.partial(write_row, positions=position, keep=keep)
        caches.append(map_slots(write, cache, rows))
        sent.append(out)
    return sent, caches


def draft_rotation(spec: EngineSpec, state: PipelineState) -> Rotation:
    """Returns how the N + 1 rows of the PDM turn, newest last."""
    age = jnp.arange(spec.n_stages, -1, -1)
    return model.rotation(spec.target, jnp.maximum(state.newest[:, None] - age, 0))


def _draft(
    spec: EngineSpec,
    comm: Comm,
    projs: list[dict],
    parameters: list[dict] | dict,
    cache: Slots,
    state: PipelineState,
    turn: Rotation,
) -> Sent:
    """Aggregates and runs rows p-f (completed) and p-f+1..p (in flight), newest last."""
    n = spec.n_stages
    age = jnp.arange(n, -1, -1)  # of row j: its token is p - age
    positions = state.newest[:, None] - age  # [B, N+1]
    slots = jnp.mod(positions, n + 1)[:, :, None, None]
    features = jnp.take_along_axis(state.ring, slots, axis=1)  # [B, N+1, M, D]
    features = normalise(spec.draft, features, spec.target.norm_eps)
    completed = age[None] == state.fill[:, None]  # [B, N+1]
    oldest = jnp.take_along_axis(features, (n - state.fill)[:, None, None, None], axis=1)
    oldest = make_row(projs, oldest, spec.row_types[n])  # [B, 1, D]
    rows = [oldest] + [
        make_row(projs, features[:, j : j + 1], spec.row_types[n - j]) for j in range(1, n + 1)
    ]
    rows = jnp.where(completed[..., None], oldest, jnp.concatenate(rows, axis=1))
    valid = age[None] <= state.fill[:, None]
    mask = (age[:, None] <= age[None, :])[None] & valid[:, None, :]
    return run_draft(
        spec,
        comm,
        parameters,
        cache,
        rows,
        turn,
        mask,
        state.newest - state.fill,
        kept=n - state.fill,
    )


def _update_ring(
    spec: EngineSpec,
    state: PipelineState,
    gathered: jax.Array,
    entering: jax.Array,
    newest: jax.Array,
) -> jax.Array:
    """Stores the anchors that tokens passed in this cycle, and the entering token's embedding."""
    size = spec.n_stages + 1
    batch = jnp.arange(newest.shape[0])
    ring = state.ring.at[batch, newest % size, 0].set(entering)
    for m, (stage, k) in enumerate(spec.anchor_sites, start=1):
        slot = jnp.where(stage < state.fill, (state.newest - stage) % size, size)
        ring = ring.at[batch, slot, m].set(gathered[stage, k], mode="drop")
    return ring
