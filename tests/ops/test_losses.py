"""KL divergence and masked means against float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spd_jax.ops.losses import kl_divergence, masked_mean


def softmax(x):
    e = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_kl_is_the_sum_over_ids(temperature):
    rng = np.random.default_rng(0)
    target, draft = (4 * rng.standard_normal((2, 3, 20)).astype(np.float32) for _ in range(2))
    p, q = softmax(target / temperature), softmax(draft / temperature)
    got = kl_divergence(jnp.asarray(target), jnp.asarray(draft), temperature)
    assert got.shape == (2, 3)
    np.testing.assert_allclose(got, (p * np.log(p / q)).sum(-1), rtol=1e-4, atol=1e-6)


def test_kl_is_zero_only_for_equal_distributions():
    x = jnp.asarray(np.random.default_rng(1).standard_normal((4, 9)), jnp.float32)
    np.testing.assert_allclose(kl_divergence(x, x + 3, 1.0), 0, atol=1e-6)
    assert (kl_divergence(x, 2 * x, 1.0) > 1e-3).all()


def test_kl_of_distant_logits_is_finite():
    target, draft = jnp.array([[0.0, -2000.0]]), jnp.array([[-500.0, 0.0]])
    np.testing.assert_allclose(kl_divergence(target, draft, 1.0), [500.0], rtol=1e-6)
    assert np.isfinite(jax.grad(lambda x: kl_divergence(target, x, 1.0).sum())(draft)).all()


def test_masked_mean_ignores_the_rest():
    values = jnp.array([[1.0, np.nan], [5.0, np.inf]])
    mask = jnp.array([[True, False], [True, False]])
    assert masked_mean(values, mask) == 3
    assert masked_mean(values, jnp.zeros_like(mask)) == 0
