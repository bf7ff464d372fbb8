"""Losses against their definitions in float64 numpy."""

from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spd_jax.config import LossConfig, LossName
from spd_jax.ops.losses import LOSSES, divergence

LOSS_NAMES = get_args(LossName)


def log_softmax(x):
    x = np.asarray(x, np.float64) - np.max(x, axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def kl(p, q):
    """Of two distributions over the same ids, those of no mass in p left out."""
    terms = np.where(p > 0, p * np.log(np.where(p > 0, p, 1) / np.where(p > 0, q, 1)), 0)
    return terms.sum(-1)


def expected(name, p, q, outside):
    """`p` and `outside` sum to one; the id outside has no mass in q."""
    inside = p / (1 - outside)[..., None]
    whole_p = np.concatenate([p, outside[..., None]], -1)
    whole_q = np.concatenate([q, np.zeros_like(outside)[..., None]], -1)
    middle = (whole_p + whole_q) / 2
    tv = np.abs(whole_p - whole_q).sum(-1) / 2
    weighted = (1 - outside) * kl(inside, q)
    return {
        "kl": weighted,
        "reverse_kl": (q * np.log(q / p)).sum(-1),
        "js": (kl(whole_p, middle) + kl(whole_q, middle)) / 2,
        "tv": tv,
        "ce": -np.log(np.take_along_axis(q, p.argmax(-1)[..., None], -1)[..., 0]),
        "hybrid": 0.75 * weighted + 0.25 * tv,
    }[name]


@pytest.mark.parametrize("mass_outside", [0.0, 0.3])
@pytest.mark.parametrize("name", LOSS_NAMES)
def test_every_loss_is_its_definition(name, mass_outside):
    rng = np.random.default_rng(0)
    log_p, log_q = (log_softmax(3 * rng.standard_normal((2, 3, 20))) for _ in range(2))
    outside = np.full((2, 3), mass_outside)
    log_p += np.log(1 - outside)[..., None]
    given = (jnp.asarray(x, jnp.float32) for x in (log_p, log_q, outside))
    got = divergence(LossConfig(name, tv_weight=0.25), *given)
    want = expected(name, np.exp(log_p), np.exp(log_q), outside)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
    assert sorted(LOSSES) == sorted(LOSS_NAMES)


@pytest.mark.parametrize("name", [name for name in LOSS_NAMES if name != "ce"])
def test_a_loss_is_least_where_the_distributions_are_equal(name):
    p = jnp.asarray(np.random.default_rng(1).standard_normal((4, 9)), jnp.float32)
    loss = LossConfig(name)

    def at(x):
        return divergence(loss, jax.nn.log_softmax(p), jax.nn.log_softmax(x)).sum()

    np.testing.assert_allclose(at(p), 0, atol=1e-6)
    assert at(2 * p) > 1e-3
    if name not in ("tv", "hybrid"):  # those have a kink there
        np.testing.assert_allclose(jax.grad(at)(p), 0, atol=1e-6)


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_distant_logits_give_finite_losses_and_gradients(name):
    logits = jnp.array([[0.0, -2000.0]]), jnp.array([[-500.0, 0.0]])
    log_p, log_q = map(jax.nn.log_softmax, logits)

    def total(x):
        return divergence(LossConfig(name), log_p, x).sum()

    assert np.isfinite(total(log_q)) and np.isfinite(jax.grad(total)(log_q)).all()
    if name == "kl":
        np.testing.assert_allclose(total(log_q), 500.0, rtol=1e-6)
