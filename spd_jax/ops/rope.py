"""Rotary position embedding, half-split form, with Llama 3 frequency scaling.

Each pair (x_j, x_{j + n/2}) of the first n elements of a head turns by position * inv_freq_j.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from spd_jax.config import Llama3Scaling


def inverse_frequencies(n_rotary: int, theta: float, scaling: Llama3Scaling | None) -> np.ndarray:
    """Returns [n/2] float32 angular frequencies (Llama 3 model card for the scaled form)."""
    freq = 1.0 / theta ** (np.arange(0, n_rotary, 2, dtype=np.float32) / np.float32(n_rotary))
    if scaling is None:
        return freq.astype(np.float32)
    wavelength = 2 * math.pi / freq
    longest = scaling.original_max_position / scaling.low_freq_factor
    shortest = scaling.original_max_position / scaling.high_freq_factor
    blend = (scaling.original_max_position / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1 - blend) * freq / scaling.factor + blend * freq
    scaled = np.where(wavelength > longest, freq / scaling.factor, between)
    return np.where(wavelength < shortest, freq, scaled).astype(np.float32)


def apply_rope(x: jax.Array, positions: jax.Array, inv_freq: np.ndarray) -> jax.Array:
    """Rotates the first n elements of x [B, T, H, E] by positions int [B, T]; angles in float32."""
    n_rotary = 2 * len(inv_freq)
    angles = positions[..., None].astype(jnp.float32) * inv_freq[None, None]  # [B, T, n/2]
    cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]
    left, right = jnp.split(x[..., :n_rotary].astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
    turned = turned.astype(x.dtype)
    if n_rotary == x.shape[-1]:
        return turned
    return jnp.concatenate([turned, x[..., n_rotary:]], axis=-1)
