"""RMSNorm against float64 numpy."""

import jax.numpy as jnp
import numpy as np
import pytest

from spd_jax.ops.norms import rms_norm


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4])
def test_rms_norm_is_the_equation(scaled, size):
    rng = np.random.default_rng(0)
    x = (size * rng.standard_normal((3, 4, 16))).astype(np.float32)
    weight = rng.standard_normal(16).astype(np.float32) if scaled else None
    wide = x.astype(np.float64)
    want = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5)
    want = want * weight if scaled else want
    got = rms_norm(jnp.asarray(x), None if weight is None else jnp.asarray(weight), 1e-5)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_a_zero_row_stays_zero():
    np.testing.assert_array_equal(rms_norm(jnp.zeros((2, 8)), jnp.ones(8), 1e-6), 0)


def test_narrow_inputs_are_normalised_in_float32():
    rng = np.random.default_rng(1)
    x = jnp.asarray(300 * rng.standard_normal((5, 64)), jnp.bfloat16)  # squares sum to 6e6
    weight = jnp.asarray(rng.standard_normal(64), jnp.bfloat16)
    want = rms_norm(x.astype(jnp.float32), weight.astype(jnp.float32), 1e-6)
    got = rms_norm(x, weight, 1e-6)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, want.astype(jnp.bfloat16))
