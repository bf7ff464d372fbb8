"""Losses of a draft's distribution q against the target's p over the draft ids.

Source: forward KL is the method's own (paper, section on training); the others are the usual ones
of speculative decoding, where 1 - TV(p, q) is the chance that a draft is accepted.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from spd_jax.config import LossConfig


def divergence(
    loss: LossConfig, log_p: jax.Array, log_q: jax.Array, outside: jax.Array | float = 0.0
) -> jax.Array:
    """Returns a loss [...] in nats (tv: a probability).

    Args:
      log_p, log_q: float32 [..., W]; q sums to one, p to 1 - outside.
      outside: [...], the target's mass on ids that the draft cannot propose.
    """
    return LOSSES[loss.name](loss, log_p, log_q, outside)


def _kl(loss, log_p, log_q, outside):
    """KL(p || q) of p within the draft ids, times its mass there."""
    inside = 1.0 - outside
    terms = jnp.exp(log_p) * (log_p - log_q)
    return jnp.sum(terms, axis=-1) - inside * jnp.log(jnp.maximum(inside, 1e-30))


def _reverse_kl(loss, log_p, log_q, outside):
    return jnp.sum(jnp.exp(log_q) * (log_q - log_p), axis=-1)


def _js(loss, log_p, log_q, outside):
    """Jensen-Shannon: the mean of both divergences from the midpoint; at most log 2."""
    log_m = jnp.logaddexp(log_p, log_q) - math.log(2)
    terms = jnp.exp(log_p) * (log_p - log_m) + jnp.exp(log_q) * (log_q - log_m)
    return 0.5 * (jnp.sum(terms, axis=-1) + outside * math.log(2))


def _tv(loss, log_p, log_q, outside):
    """Total variation: 1 - sum min(p, q), the chance that a sampled draft is rejected."""
    return 1.0 - jnp.sum(jnp.exp(jnp.minimum(log_p, log_q)), axis=-1)


def _ce(loss, log_p, log_q, outside):
    """Cross-entropy of q on the target's choice among the draft ids."""
    best = jnp.argmax(log_p, axis=-1)[..., None]
    return -jnp.take_along_axis(log_q, best, axis=-1)[..., 0]


def _hybrid(loss, log_p, log_q, outside):
    kl, tv = (f(loss, log_p, log_q, outside) for f in (_kl, _tv))
    return (1 - loss.tv_weight) * kl + loss.tv_weight * tv


LOSSES = {
    "kl": _kl,
    "reverse_kl": _reverse_kl,
    "js": _js,
    "tv": _tv,
    "ce": _ce,
    "hybrid": _hybrid,
}
