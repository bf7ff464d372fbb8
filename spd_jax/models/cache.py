"""What layers remember: explicit trees of zeros, written by indexed updates, never copied.

An attention layer keeps a key and a value per position: keys [B, G, E, S], values [B, G, S, E],
so both products read them as stored; position S - 1 is a spare slot. A delta-net layer keeps what
it knew after each of the last n positions: position x lies at slot x mod n, slot n is spare. Rows
that must not be kept are written to the spare slot. Going back is reading at another position.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from spd_jax.config import TargetConfig

LEAST_READ = 256  # positions of a cache: fewer save too little for a program of their own
BUCKET = 128  # capacities are multiples of this, so that few programs serve many lengths

# Of T rows: {"k": [B, G, E, T], "v": [B, G, T, E]}, a cache has S for T; or what is known after
# them: {"conv": [B, C, K - 1], "state": float32 [B, H, dk, dv]}, a cache has n + 1 after B.
Rows = dict[str, jax.Array]


def bucket_capacity(n_positions: int) -> int:
    """Returns the smallest bucket that holds n_positions and the spare slot."""
    return -(-(n_positions + 1) // BUCKET) * BUCKET


def read_len(n_positions: int, capacity: int) -> int:
    """Returns how many positions of a cache attention reads where n_positions may be in use.

    Few values, so that few programs are compiled: powers of two, or all of a smaller cache.
    """
    return min(max(LEAST_READ, 1 << (n_positions - 1).bit_length()), capacity)


def first_positions(cache: Rows, n: int) -> Rows:
    """Returns the first n positions of an attention cache, to be read; other caches as they are."""
    if "k" not in cache or n == cache["v"].shape[2]:
        return cache
    return {"k": cache["k"][..., :n], "v": cache["v"][:, :, :n]}


def init_cache(
    config: TargetConfig,
    mixer: str,
    n_batch: int,
    capacity: int,
    n_snapshots: int,
    dtype: jnp.dtype,
) -> Rows:
    """Returns one layer's empty cache.

    Args:
      mixer: of the layer's kind.
      capacity: positions of an attention cache, the spare slot included.
      n_snapshots: states of a delta-net to keep, the spare not counted.
    """
    if mixer == "attention":
        g, e = config.n_kv_heads, config.head_dim
        return {
            "k": jnp.zeros((n_batch, g, e, capacity), dtype),
            "v": jnp.zeros((n_batch, g, capacity, e), dtype),
        }
    d, n_slots = config.delta, n_snapshots + 1
    state = (n_batch, n_slots, d.n_value_heads, d.key_dim, d.value_dim)
    return {
        "conv": jnp.zeros((n_batch, n_slots, d.n_channels, d.conv_width - 1), dtype),
        "state": jnp.zeros(state, jnp.float32),
    }


def row_shapes(cache: Rows, n_rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of what n_rows new rows per sequence leave for a cache."""
    if "k" in cache:
        b, g, e, _ = cache["k"].shape
        shapes = {"k": (b, g, e, n_rows), "v": (b, g, n_rows, e)}
    else:
        shapes = {name: (x.shape[0], *x.shape[2:]) for name, x in cache.items()}
    return {name: jax.ShapeDtypeStruct(s, cache[name].dtype) for name, s in shapes.items()}


def last_state(cache: Rows, cache_len: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns conv [B, C, K - 1] and state [B, H, dk, dv] after cache_len int [B] positions."""
    slot = jnp.mod(cache_len - 1, cache["state"].shape[1] - 1)

    def pick(ring: jax.Array) -> jax.Array:
        idx = slot.reshape(-1, *[1] * (ring.ndim - 1))
        return jnp.take_along_axis(ring, idx, axis=1)[:, 0]

    return pick(cache["conv"]), pick(cache["state"])


def write_row(cache: Rows, rows: Rows, positions: jax.Array, keep: jax.Array) -> Rows:
    """Writes what one new row (T = 1) per sequence left.

    Args:
      positions: int [B], of the rows; keep: bool [B], False writes to the spare slot.
    """
    if "k" in cache:
        slots = jnp.where(keep, positions, cache["v"].shape[2] - 1)
        return write_each(cache, rows, slots, {"k": 3, "v": 2})
    return _write_states(cache, rows, positions, keep)


def write_chunk(
    cache: Rows, rows: Rows, start: jax.Array, ends: jax.Array, active: jax.Array | bool = True
) -> Rows:
    """Writes what T new rows per sequence left, or nothing where the scalar `active` is False.

    Args:
      start: int scalar, position of the first row; ends: int [B], the position behind the last
        row that exists, of all that a sequence had so far.
    """
    if "k" in cache:
        return {name: _write_rows(cache[name], rows[name], start, axis, active)
                for name, axis in {"k": 3, "v": 2}.items()}  # fmt: skip
    return _write_states(cache, rows, ends - 1, jnp.broadcast_to(active, ends.shape))


def _write_rows(
    cache: jax.Array, rows: jax.Array, start: jax.Array, axis: int, active: jax.Array | bool
) -> jax.Array:
    if active is not True:
        old = lax.dynamic_slice_in_dim(cache, start, rows.shape[axis], axis)
        rows = jnp.where(active, rows, old)
    return lax.dynamic_update_slice_in_dim(cache, rows, start, axis)


def _write_states(cache: Rows, rows: Rows, positions: jax.Array, keep: jax.Array) -> Rows:
    spare = cache["state"].shape[1] - 1
    slots = jnp.where(keep, jnp.mod(positions, spare), spare)
    rows = {name: x[:, None] for name, x in rows.items()}
    return write_each(cache, rows, slots, dict.fromkeys(rows, 1))


def write_each(cache: Rows, rows: Rows, slots: jax.Array, axes: dict[str, int]) -> Rows:
    """Writes one row per sequence at slots int [B] of the given axes.

    A loop of slice updates: XLA's CPU backend copies the whole cache for a scatter.
    """

    def write_one(b, cache):
        written = {}
        for name, axis in axes.items():
            row = lax.dynamic_slice_in_dim(rows[name], b, 1)
            at = [0] * row.ndim
            at[0], at[axis] = b, slots[b]
            written[name] = lax.dynamic_update_slice(cache[name], row, at)
        return written

    return lax.fori_loop(0, slots.shape[0], write_one, cache)
