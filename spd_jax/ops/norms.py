"""Root-mean-square normalisation, y = x / sqrt(mean(x^2) + eps) * w, computed in float32."""

import jax
import jax.numpy as jnp
from jax import lax


def rms_norm(x: jax.Array, weight: jax.Array | None, eps: float) -> jax.Array:
    """Normalises the last axis of x; `weight` of that axis' size, or None for no scale."""
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    if weight is not None:
        wide = wide * weight.astype(jnp.float32)
    return wide.astype(x.dtype)
