"""Attention among the replicas of a sequence, one per row type, that never joins all with all.

Rows are K blocks of T tokens, block 0 the deepest. Of each earlier token a query sees exactly one
row: of tokens `far_from` or more behind it that in block 0, of nearer ones that in block
seen[query block, distance]. Its keys are a causal prefix of block 0 and at most n single rows, so
the cost is O(K * T * (T + n)) where a dense mask is [K * T, K * T]. Scores are made for a chunk of
queries at a time, and made again for the gradient.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spd_jax.ops.attention import MASKED

CHUNK_SCORES = 1 << 22  # far scores that are held at once; at least those of one query a block
SHORT = 128  # tokens that are not cut further for the sake of groups
N_GROUPS = 4  # of chunks: those of one group see a prefix of one length, and compile once


def attend_by_depth(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    seen: np.ndarray | jax.Array,
    far_from: np.ndarray,
    segments: jax.Array,
) -> jax.Array:
    """Attends the query rows of Kq blocks to all K blocks.

    Args:
      q: [B, Kq * T, H, E] queries, rotated; k, v: [B, K * T, G, E].
      seen: int [Kq, n], in which block a query sees the token at each distance below n.
      far_from: int [Kq], none above n: from this distance on, tokens are seen in block 0.
      segments: int [B, T], equal for tokens that see each other; 0 is padding, which neither sees
        nor is seen (its rows give zeros).

    Returns:
      [B, Kq * T, H * E] in q's dtype.
    """
    (n_batch, n_tokens), (n_heads, head_dim) = segments.shape, q.shape[2:]
    n_kv, n_query_blocks, n_near = k.shape[2], len(far_from), int(max(far_from))
    chunk = _chunk_len(n_batch * n_heads * n_query_blocks, n_tokens, n_near)
    n_chunks = -(-n_tokens // chunk)
    n_added = n_chunks * chunk - n_tokens

    def by_block(x: jax.Array) -> jax.Array:  # [B, heads, blocks, T', E]
        x = x.reshape(n_batch, -1, n_tokens, *x.shape[2:]).transpose(0, 3, 1, 2, 4)
        return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, n_added), (0, 0)))

    q, k, v = by_block(q * head_dim**-0.5), by_block(k), by_block(v)
    q = q.reshape(n_batch, n_kv, n_heads // n_kv, *q.shape[2:])  # [B, G, H/G, Kq, T', E]
    segments = jnp.pad(segments, ((0, 0), (0, n_added)))
    in_chunks = (
        jnp.arange(n_chunks) * chunk,
        _split(q, n_chunks, axis=4),
        *(_split(x, n_chunks, axis=3, n_before=n_near) for x in (k, v)),
        _split(segments, n_chunks, axis=1, n_before=n_near),
    )
    outs = []
    for group in np.array_split(np.arange(n_chunks), min(N_GROUPS, n_chunks)):
        chunks = slice(group[0], group[-1] + 1)
        prefix = slice(0, chunks.stop * chunk)
        far = k[:, :, 0, prefix], v[:, :, 0, prefix], segments[:, prefix]
        attend = functools.partial(_attend_chunk, seen, far_from, *far)
        outs.append(lax.map(lambda args, f=attend: f(*args), [x[chunks] for x in in_chunks]))
    out = jnp.concatenate(outs)  # [chunks, B, G, H/G, Kq, C, E]
    out = out.transpose(1, 4, 0, 5, 2, 3, 6)
    out = out.reshape(n_batch, n_query_blocks, n_tokens + n_added, n_heads * head_dim)
    return out[:, :, :n_tokens].reshape(n_batch, n_query_blocks * n_tokens, n_heads * head_dim)


def attend_causally(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
    """As `attend_by_depth` with one block: a token sees itself and those before it."""
    return attend_by_depth(q, k, v, np.zeros((1, 0), int), np.zeros(1, int), segments)


@functools.partial(jax.checkpoint, static_argnums=(1,))
def _attend_chunk(seen, far_from, k_far, v_far, segments_far, start, q, k_near, v_near, segments):
    """Attends queries [B, G, H/G, Kq, C, E] at times start, start + 1, ...; returns their shape.

    Far keys are [B, G, S, E] from time 0 on, near ones [B, G, K, n + C, E] from start - n on.
    """
    chunk = q.shape[4]
    n_near = segments.shape[1] - chunk
    own = segments[:, n_near:]
    own = jnp.where(own > 0, own, -1)  # of padding: the segment of no key

    distance = start + jnp.arange(chunk)[:, None] - jnp.arange(k_far.shape[2])  # [C, S]
    is_far = distance >= np.asarray(far_from)[:, None, None]  # [Kq, C, S]
    same = own[:, :, None] == segments_far[:, None]  # [B, C, S]
    scores = jnp.einsum("bghqce,bgse->bghqcs", q, k_far, preferred_element_type=jnp.float32)
    scores = jnp.where((is_far & same[:, None])[:, None, None], scores, MASKED)

    near_scores, near_values = [], []
    for d in range(n_near):
        keys, values = (
            jnp.take(x[:, :, :, n_near - d : n_near - d + chunk], seen[:, d], axis=2)[:, :, None]
            for x in (k_near, v_near)
        )  # [B, G, 1, Kq, C, E]
        there = own == segments[:, n_near - d : n_near - d + chunk]  # [B, C]
        there = there[:, None] & (d < np.asarray(far_from))[:, None]  # [B, Kq, C]
        products = jnp.sum((q * keys).astype(jnp.float32), axis=-1)
        near_scores.append(jnp.where(there[:, None, None], products, MASKED))
        near_values.append(values)

    top = functools.reduce(jnp.maximum, near_scores, jnp.max(scores, axis=-1))
    top = lax.stop_gradient(jnp.maximum(top, MASKED / 2))  # nothing seen: all weights become 0
    weights = jnp.exp(scores - top[..., None])
    near_weights = [jnp.exp(x - top) for x in near_scores]
    out = jnp.einsum(
        "bghqcs,bgse->bghqce", weights.astype(q.dtype), v_far, preferred_element_type=jnp.float32
    )
    out = _sum([out, *(w[..., None] * x for w, x in zip(near_weights, near_values, strict=True))])
    total = _sum([jnp.sum(weights, axis=-1), *near_weights])
    return (out / jnp.maximum(total, 1e-30)[..., None]).astype(q.dtype)


def _sum(terms: Sequence[jax.Array]) -> jax.Array:
    return functools.reduce(operator.add, terms)


def _split(x: jax.Array, n_chunks: int, axis: int, n_before: int = 0) -> jax.Array:
    """Cuts an axis into chunks, [chunks, ...], each with the n_before entries that precede it.

    Where there are several they are no shorter than that; before the first one are zeros.
    """
    padding = [(0, 0)] * x.ndim
    padding[axis] = (n_before, 0)
    before = jnp.pad(x, padding)
    if n_chunks == 1:
        return before[None]
    shape = (*x.shape[:axis], n_chunks, -1, *x.shape[axis + 1 :])
    parts = jnp.moveaxis(x.reshape(shape), axis, 0)
    shifted = lax.slice_in_dim(before, 0, x.shape[axis], axis=axis).reshape(shape)
    tails = lax.slice_in_dim(jnp.moveaxis(shifted, axis, 0), 0, n_before, axis=axis + 1)
    return jnp.concatenate([tails, parts], axis=axis + 1)


def _chunk_len(n_rows: int, n_tokens: int, n_near: int) -> int:
    """Returns how many of T tokens query at once, where n_rows rows of each token do."""
    fitting = CHUNK_SCORES // (n_rows * n_tokens)
    even = -(-n_tokens // N_GROUPS)  # no fewer chunks than groups, but for short sequences
    return min(n_tokens, max(min(fitting, max(even, SHORT)), n_near, 1))
