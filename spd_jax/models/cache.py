"""Key/value caches: explicit trees of zeros, written by indexed updates, never copied.

Keys lie [B, G, E, S] and values [B, G, S, E], so both attention products read them as stored.
Position S - 1 is a spare slot: rows that must not be kept are written there.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from spd_jax.config import TargetConfig
from spd_jax.models.layers import Rows

BUCKET = 128  # capacities are multiples of this, so that few programs serve many lengths


def bucket_capacity(n_positions: int) -> int:
    """Returns the smallest bucket that holds n_positions and the spare slot."""
    return -(-(n_positions + 1) // BUCKET) * BUCKET


def init_cache(config: TargetConfig, n_batch: int, capacity: int, dtype: jnp.dtype) -> Rows:
    """Returns one layer's empty cache of `capacity` positions, the spare slot included."""
    g, e = config.n_kv_heads, config.head_dim
    return {
        "k": jnp.zeros((n_batch, g, e, capacity), dtype),
        "v": jnp.zeros((n_batch, g, capacity, e), dtype),
    }


def write_row(cache: Rows, rows: Rows, positions: jax.Array) -> Rows:
    """Writes one new row (T = 1) per sequence at positions int [B].

    A loop of slice updates: XLA's CPU backend copies the whole cache for a scatter.
    """

    def write_one(b, cache):
        k, v = (lax.dynamic_slice_in_dim(rows[name], b, 1) for name in ("k", "v"))
        return {
            "k": lax.dynamic_update_slice(cache["k"], k, (b, 0, 0, positions[b])),
            "v": lax.dynamic_update_slice(cache["v"], v, (b, 0, positions[b], 0)),
        }

    return lax.fori_loop(0, positions.shape[0], write_one, cache)


def write_chunk(cache: Rows, rows: Rows, start: jax.Array) -> Rows:
    """Writes T new rows of every sequence at positions start..start+T-1 (start a scalar)."""
    zero = jnp.zeros((), start.dtype)
    return {
        "k": lax.dynamic_update_slice(cache["k"], rows["k"], (zero, zero, zero, start)),
        "v": lax.dynamic_update_slice(cache["v"], rows["v"], (zero, zero, start, zero)),
    }
