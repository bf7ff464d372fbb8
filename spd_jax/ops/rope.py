"""Rotary position embedding, half-split form, with Llama 3 frequency scaling.

Each pair (x_j, x_{j + n/2}) of the first n elements of a head turns by position * inv_freq_j.
"""

import math
from typing import NamedTuple

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


class Rotation(NamedTuple):
    """By how much each pair of a row turns."""

    cos: jax.Array  # float32 [B, T, n/2]
    sin: jax.Array  # float32 [B, T, n/2]

    def last(self, n: int) -> "Rotation":
        """That of the last n rows."""
        return Rotation(*(x[:, x.shape[1] - n :] for x in self))


def rotation(positions: jax.Array, inv_freq: np.ndarray) -> Rotation:
    """Returns the rotation of rows at positions int [B, T]; angles in float32.

    Once for all layers, outside of what a branch computes: in a step of one token XLA's CPU
    backend would else spend a tenth of its time on sines, again for each layer and head.
    """
    angles = positions[..., None].astype(jnp.float32) * inv_freq[None, None]
    return Rotation(jnp.cos(angles), jnp.sin(angles))


def apply_rope(x: jax.Array, turn: Rotation) -> jax.Array:
    """Rotates the first n elements of x [B, T, H, E], in float32."""
    n_rotary = 2 * turn.cos.shape[-1]
    cos, sin = turn.cos[:, :, None], turn.sin[:, :, None]
    left, right = jnp.split(x[..., :n_rotary].astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
    turned = turned.astype(x.dtype)
    if n_rotary == x.shape[-1]:
        return turned
    return jnp.concatenate([turned, x[..., n_rotary:]], axis=-1)
