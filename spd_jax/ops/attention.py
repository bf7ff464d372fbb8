"""Grouped-query attention of new rows over a read-only cached prefix and over each other.

softmax([q K_cache | q K_new]) [V_cache ; V_new]: the caches are never written or joined here.
"""

import jax
import jax.numpy as jnp

MASKED = -1e30  # finite: a row that sees nothing becomes uniform, not NaN


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    k_cache: jax.Array | None = None,
    v_cache: jax.Array | None = None,
    cache_len: jax.Array | None = None,
) -> jax.Array:
    """Attends Q query rows to T new rows and, where given, to the first cached positions.

    Args:
      q: [B, Q, H, E] queries, rotated.
      k: [B, G, E, T] keys of the new rows, positions last as in the cache.
      v: [B, G, T, E] values of the new rows.
      mask: bool [B or 1, Q, T], True where a query may see a new row.
      k_cache: [B, G, E, S]; rows at and beyond cache_len may hold any finite value.
      v_cache: [B, G, S, E].
      cache_len: int [B], cached positions that every query sees.

    Returns:
      [B, Q, H * E] in q's dtype.
    """
    n_batch, n_query, n_heads, head_dim = q.shape
    n_kv = k.shape[1]
    share = n_heads // n_kv
    q = q.reshape(n_batch, n_query, n_kv, share, head_dim).transpose(0, 2, 3, 1, 4)
    q = q.reshape(n_batch, n_kv, share * n_query, head_dim) * head_dim**-0.5
    new_mask = jnp.tile(mask, (1, share, 1))[:, None]  # [B or 1, 1, share * Q, T]
    scores = jnp.einsum("bgqe,bget->bgqt", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(new_mask, scores, MASKED)
    if k_cache is not None:
        seen = jnp.arange(k_cache.shape[-1])[None] < cache_len[:, None]  # [B, S]
        cached = jnp.einsum("bgqe,bges->bgqs", q, k_cache, preferred_element_type=jnp.float32)
        cached = jnp.where(seen[:, None, None], cached, MASKED)
        scores = jnp.concatenate([cached, scores], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    if k_cache is None:
        out = jnp.einsum("bgqt,bgte->bgqe", weights, v)
    else:
        n_cached = k_cache.shape[-1]
        out = jnp.einsum("bgqs,bgse->bgqe", weights[..., :n_cached], v_cache)
        out = out + jnp.einsum("bgqt,bgte->bgqe", weights[..., n_cached:], v)
    out = out.reshape(n_batch, n_kv, share, n_query, head_dim).transpose(0, 3, 1, 2, 4)
    return out.reshape(n_batch, n_query, n_heads * head_dim)


def causal_mask(n_rows: int) -> jax.Array:
    """Returns bool [1, T, T]: row t sees rows 0..t."""
    row = jnp.arange(n_rows)
    return (row[None, :] <= row[:, None])[None]


def segment_mask(segments: jax.Array) -> jax.Array:
    """Returns bool [B, T, T]: both tokens are of one segment [B, T], and none is padding (0)."""
    same = segments[:, :, None] == segments[:, None, :]
    return same & (segments > 0)[:, :, None]


def segment_positions(segments: jax.Array) -> jax.Array:
    """Returns int [B, T]: how far each token is from the first of its segment.

    Segments [B, T] are numbered 1, 2, ... in order; 0 is padding, wherever it is.
    """
    time, segments = jnp.arange(segments.shape[1]), segments.astype(jnp.int32)
    before = jnp.pad(jax.lax.cummax(segments, axis=1)[:, :-1], ((0, 0), (1, 0)))
    starts = jnp.where(segments > before, time, 0)
    return time - jax.lax.cummax(starts, axis=1)
