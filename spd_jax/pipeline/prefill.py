"""Pipelined prefill: chunk c of the prompt is at stage s in step c + s, at the PDM in c + N.

All stages work at once; anchors wait in a ring of N + 1 chunks until the PDM has read them.
"""

from __future__ import annotations

import functools
from collections import Counter

import jax
import jax.numpy as jnp
from jax import lax

from spd_jax.models import target as model
from spd_jax.models.aggregate import make_row, normalise
from spd_jax.models.cache import Rows, init_cache, write_chunk
from spd_jax.models.reference import is_stop
from spd_jax.ops.attention import causal_mask
from spd_jax.pipeline.comm import Comm
from spd_jax.pipeline.draws import empty_proposals, first_tokens
from spd_jax.pipeline.heads import Heads, embed_rows
from spd_jax.pipeline.slots import Slots, cache_slots, map_slots, read_slots
from spd_jax.pipeline.spec import EngineSpec
from spd_jax.pipeline.stages import run_draft, run_rank, run_stage
from spd_jax.pipeline.state import Inputs, PipelineState
from spd_jax.pipeline.weights import EngineWeights

CHUNK = 64  # rows per chunk: prompts come padded to a power of two or a multiple of 128


def run_prefill(
    spec: EngineSpec,
    comm: Comm,
    weights: EngineWeights,
    caches: list[Slots],
    prompts: jax.Array,
    inputs: Inputs,
    n_slots: int,
) -> PipelineState:
    """Fills all caches and commits the first token of each sequence.

    Args:
      caches: empty, per local rank and slot; prompts: int [B, T] right-padded.
      n_slots: size of the token buffers, at least max_new_tokens + N.
    """
    n, heads, prompt_lens = spec.n_stages, weights.heads, inputs.prompt_lens
    n_batch, n_padded = prompts.shape
    chunk = min(CHUNK, n_padded)
    assert n_padded % chunk == 0, (n_padded, chunk)
    n_chunks = (jnp.max(prompt_lens) + chunk - 1) // chunk
    chunks = n_chunks, chunk, n_padded
    embedded = embed_rows(heads, comm, prompts)  # [B, T, D]
    dtype, width = embedded.dtype, embedded.shape[-1]
    last_idx = prompt_lens - 1

    def pick_last(picked: jax.Array, rows: jax.Array, c: jax.Array) -> jax.Array:
        """Keeps each sequence's last prompt row [B, ...] out of chunk c's rows [B, C, ...]."""
        offset = jnp.clip(last_idx - c * chunk, 0, chunk - 1)
        offset = offset.reshape(-1, *[1] * (rows.ndim - 1))
        row = jnp.take_along_axis(rows, offset, axis=1)[:, 0]
        here = (last_idx // chunk == c).reshape(-1, *[1] * (row.ndim - 1))
        return jnp.where(here, row, picked)

    def step(t, carry):
        caches, entered, ring, last_hidden, last_anchors = carry
        start = jnp.clip(t, 0, n_padded // chunk - 1) * chunk
        entered = entered.at[0].set(lax.dynamic_slice_in_dim(embedded, start, chunk, axis=1))
        ring = ring.at[t % (n + 1), :, :, 0].set(entered[0])
        features = ring[(t - n) % (n + 1)]  # of the chunk at the PDM
        sent, caches = _compute_chunk(
            spec, comm, weights, caches, t, chunks, entered, features, prompt_lens
        )
        gathered = comm.gather_ranks(sent)  # [N+1, K, B, C, D]
        for m, (stage, k) in enumerate(spec.anchor_sites, start=1):
            ring = ring.at[(t - stage) % (n + 1), :, :, m].set(gathered[stage, k])
        last_hidden = pick_last(last_hidden, gathered[n - 1, 0], t - n + 1)
        last_anchors = pick_last(last_anchors, features, t - n)
        entered = jnp.concatenate([entered[:1], gathered[: n - 1, 0]])
        return caches, entered, ring, last_hidden, last_anchors

    carry = (
        caches,
        jnp.zeros((n, n_batch, chunk, width), dtype),
        jnp.zeros((n + 1, n_batch, chunk, spec.n_anchors, width), dtype),
        jnp.zeros((n_batch, width), dtype),
        jnp.zeros((n_batch, spec.n_anchors, width), dtype),
    )
    caches, _, _, last_hidden, anchors = lax.fori_loop(0, n_chunks + n, step, carry)

    return _first_state(spec, comm, heads, caches, last_hidden, anchors, inputs, n_slots)


def _first_state(
    spec: EngineSpec,
    comm: Comm,
    heads: Heads,
    caches: list[Slots],
    last_hidden: jax.Array,
    anchors: jax.Array,
    inputs: Inputs,
    n_slots: int,
) -> PipelineState:
    """Commits the first token: one token in flight, the last prompt position in the ring."""
    n, n_batch, width = spec.n_stages, *last_hidden.shape
    dtype, prompt_lens = last_hidden.dtype, inputs.prompt_lens
    first, entering = first_tokens(comm, heads, inputs, last_hidden)
    batch = jnp.arange(n_batch)
    ring = jnp.zeros((n_batch, n + 1, spec.n_anchors, width), dtype)
    ring = ring.at[batch, (prompt_lens - 1) % (n + 1)].set(anchors)
    ring = ring.at[batch, prompt_lens % (n + 1), 0].set(entering)
    ones = jnp.ones(n_batch, jnp.int32)
    return PipelineState(
        caches=caches,
        proposals=empty_proposals(spec, comm, heads, inputs),
        hidden=jnp.zeros((n, n_batch, width), dtype).at[0].set(entering),
        ring=ring,
        tokens=jnp.zeros((n_batch, n_slots), jnp.int32).at[:, 0].set(first),
        accepted=jnp.zeros((n_batch, n_slots), bool).at[:, 0].set(True),
        newest=prompt_lens,
        fill=ones,
        n_committed=ones,
        n_cycles=jnp.zeros(n_batch, jnp.int32),
        done=is_stop(first, inputs.stop_ids) | (inputs.limit <= 1) | (prompt_lens == 0),
    )


def empty_caches(
    spec: EngineSpec, comm: Comm, n_batch: int, capacity: int, dtype: jnp.dtype
) -> list[Slots]:
    """Returns zero caches per local rank: a ring of N states for each delta-net layer.

    N suffice: when the token that leaves is refused, stage s has run N - 1 - s positions past the
    one before its replacement, so stage 0 goes back furthest, by N - 1 states.
    """
    counts = [Counter(mixer for mixer, _ in cache_slots(kinds)) for kinds in spec.rank_kinds]

    def empty(mixer: str) -> Rows:
        cache = jax.eval_shape(
            lambda: init_cache(spec.target, mixer, n_batch, capacity, spec.n_stages, dtype)
        )
        return jax.tree.map(lambda x: comm.zeros(x.shape, x.dtype), cache)

    return [
        {mixer: [empty(mixer) for _ in range(n)] for mixer, n in sorted(there.items())}
        for there in comm.n_slots(counts)
    ]


def _compute_chunk(spec, comm, weights, caches, t, chunks, entered, features, prompt_lens):
    """Runs every local rank on its chunk of step t and writes the new rows.

    Args:
      chunks: how many there are (traced), of how many rows, and the rows of all.
    """
    n, (n_chunks, chunk, n_read) = spec.n_stages, chunks
    n_batch = entered.shape[1]
    sent, written = [], []
    for rank, parameters, cache in zip(comm.ranks, weights.ranks, caches, strict=True):
        c = t - rank
        active = (c >= 0) & (c < n_chunks)
        start = jnp.clip(c, 0, n_chunks - 1) * chunk
        positions = jnp.broadcast_to(start + jnp.arange(chunk), (n_batch, chunk))
        turn = model.rotation(spec.target, positions)  # the draft module's too
        before, ends = (jnp.minimum(end, prompt_lens) for end in (start, start + chunk))

        def stage(
            kinds, rank=rank, mine=parameters, cache=cache, turn=turn, n_seen=before, ends=ends
        ):
            x = lax.dynamic_index_in_dim(entered, jnp.minimum(rank, n - 1), keepdims=False)
            read = read_slots(cache, n_read)
            return run_stage(spec, comm, rank, kinds, mine, read, x, turn, n_seen, ends - n_seen)

        def draft(mine=parameters, cache=cache, turn=turn, n_seen=before):
            prepared = normalise(spec.draft, features, spec.target.norm_eps)
            rows = make_row(weights.projs, prepared, spec.row_types[n])
            read = read_slots(cache, n_read)
            return run_draft(spec, comm, mine, read, rows, turn, causal_mask(chunk), n_seen)

        out, rows = run_rank(spec, comm, rank, active, stage, draft)
        write = functools.partial(write_chunk, start=start, ends=ends, active=active)
        written.append(map_slots(write, cache, rows))
        sent.append(out)
    return sent, written
