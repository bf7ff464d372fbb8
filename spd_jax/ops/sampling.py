"""Choosing one token from logits: greedy, or temperature and top-k by Gumbel noise.

Noise depends on the sequence's key and the position alone, never on neighbours or batch size.
"""

import jax
import jax.numpy as jnp

from spd_jax.config import SamplingConfig


def argmax_lowest(logits: jax.Array) -> jax.Array:
    """Returns the int32 index of the largest value of the last axis, the lowest on ties."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def warp(logits: jax.Array, sampling: SamplingConfig) -> jax.Array:
    """Applies temperature and top-k (every id tied with the k-th value stays) to [B, V]."""
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        kth = jax.lax.top_k(logits, sampling.top_k)[0][..., -1:]
        logits = jnp.where(logits < kth, -jnp.inf, logits)
    return logits


def sample(
    logits: jax.Array, keys: jax.Array, positions: jax.Array, sampling: SamplingConfig
) -> jax.Array:
    """Draws one id per sequence.

    Args:
      logits: float32 [B, V].
      keys: typed PRNG keys [B], one per sequence.
      positions: int [B], position of the token being drawn.
      sampling: static settings; top_p is not supported here yet.

    Returns:
      int32 [B].
    """
    if sampling.temperature == 0:
        return argmax_lowest(logits)

    def draw(key, position, row):
        noise = jax.random.gumbel(jax.random.fold_in(key, position), row.shape, jnp.float32)
        return argmax_lowest(row + noise)

    return jax.vmap(draw)(keys, positions, warp(logits, sampling))
