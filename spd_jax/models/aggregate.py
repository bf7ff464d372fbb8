"""Rows of the Pipeline Draft Module: W_i [h^{b_0}; ...; h^{b_i}] for a row of type i.

A row of type i is made from anchors 0..i, the ones its token has passed at its depth.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from spd_jax.config import DraftConfig
from spd_jax.ops.linear import linear
from spd_jax.ops.norms import rms_norm


def normalise(config: DraftConfig, features: jax.Array, eps: float) -> jax.Array:
    """Prepares anchors [..., M, D]: each to unit mean square, or unchanged (`feature_norm`)."""
    return rms_norm(features, None, eps) if config.feature_norm == "rms" else features


def make_row(projs: list[dict], features: jax.Array, row_type: int) -> jax.Array:
    """Returns rows [..., D] of one static type from prepared anchors [..., M, D]."""
    used = features[..., : row_type + 1, :]
    flat = used.reshape(*used.shape[:-2], used.shape[-2] * used.shape[-1])
    return linear(flat, projs[row_type]["weight"])


def replicate_sequence(projs: list[dict], features: jax.Array, blocks: Sequence[int]) -> jax.Array:
    """Returns the training rows [B, K * T, D] of anchors [B, T, M, D]: K row types in order."""
    return jnp.concatenate([make_row(projs, features, i) for i in blocks], axis=1)
