"""Distillation: KL(softmax(target / T) || softmax(draft / T)), and means over valid positions."""

import jax
import jax.numpy as jnp


def kl_divergence(target: jax.Array, draft: jax.Array, temperature: float) -> jax.Array:
    """Returns KL(target || draft) [...] in nats of float32 logits [..., W] at a temperature."""
    log_p = jax.nn.log_softmax(target / temperature, axis=-1)
    log_q = jax.nn.log_softmax(draft / temperature, axis=-1)
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


def masked_mean(values: jax.Array, valid_mask: jax.Array) -> jax.Array:
    """Returns the mean of values where valid_mask; 0 where it is nowhere True."""
    total = jnp.sum(jnp.where(valid_mask, values, 0.0))
    return total / jnp.maximum(jnp.sum(valid_mask), 1)
