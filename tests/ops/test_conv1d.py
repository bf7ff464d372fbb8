"""The causal convolution against a loop over tokens that keeps the last K inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spd_jax.ops.conv1d import causal_conv

KERNEL = 4

convolve = jax.jit(causal_conv)


def naive(x, weight, state, n_valid):
    """As `causal_conv`, in float64; NaN where an output means nothing."""
    out, last = np.full(x.shape, np.nan), state.copy()
    for b, n in enumerate(n_valid):
        for t in range(n):
            window = np.concatenate([last[b], x[b, t][:, None]], axis=1)  # [C, K]
            out[b, t] = (window.astype(np.float64) * weight).sum(1)
            last[b] = window[:, 1:]
    return out, last


def make(n_rows, n_batch=4, n_channels=6):
    rng = np.random.default_rng(n_rows)
    sizes = (n_batch, n_rows, n_channels), (n_channels, KERNEL), (n_batch, n_channels, KERNEL - 1)
    return [rng.standard_normal(shape).astype(np.float32) for shape in sizes]


@pytest.mark.parametrize(
    ("n_rows", "n_valid"), [(1, [0, 1, 1, 0]), (2, [0, 1, 2, 2]), (7, [0, 2, 3, 7])]
)
def test_padding_changes_neither_outputs_nor_state(n_rows, n_valid):
    x, weight, state = make(n_rows)
    state[0, 0] = -0.0  # a sum with 0 would lose the sign
    want, want_state = naive(x, weight, state, n_valid)
    for b, n in enumerate(n_valid):
        x[b, n:] = [np.nan, 1e30, -np.inf, 0, 1, np.nan]
    y, new_state = convolve(*map(jnp.asarray, (x, weight, state, n_valid)))
    y, valid = np.asarray(y), ~np.isnan(want)
    np.testing.assert_allclose(y[valid], want[valid], rtol=1e-5, atol=1e-6)
    assert np.isfinite(y).all()
    np.testing.assert_array_equal(  # a state is a copy of inputs: bit for bit
        np.asarray(new_state).view(np.uint32), want_state.view(np.uint32)
    )


def test_a_split_run_equals_the_whole():
    x, weight, state = map(jnp.asarray, make(7))
    want, want_state = convolve(x, weight, state, jnp.full(4, 7))
    for split in (2, 5):
        left, between = convolve(x[:, :split], weight, state, jnp.full(4, split))
        right, last = convolve(x[:, split:], weight, between, jnp.full(4, 7 - split))
        np.testing.assert_array_equal(jnp.concatenate([left, right], axis=1), want)
        np.testing.assert_array_equal(last, want_state)


def test_bfloat16_rows_are_summed_in_float32():
    x, weight, state = (jnp.asarray(a, jnp.bfloat16) for a in make(7))
    n_valid = np.full(4, 7)
    y, new_state = convolve(x, weight, state, jnp.asarray(n_valid))
    want, _ = naive(*(np.asarray(a, np.float32) for a in (x, weight, state)), n_valid)
    assert y.dtype == new_state.dtype == jnp.bfloat16
    # Half a unit in bfloat16's last place: the one rounding, of the sum.
    np.testing.assert_allclose(y.astype(np.float32), want, rtol=2**-8, atol=1e-6)


def test_gradients_ignore_padding_that_is_not_a_number():
    x, weight, state = make(7)
    n_valid = jnp.array([0, 2, 3, 7])
    valid = jnp.arange(7)[None, :, None] < n_valid[:, None, None]

    def loss(x, weight, state):
        y, last = convolve(x, weight, state, n_valid)
        return jnp.sum(jnp.where(valid, y, 0) ** 2) + jnp.sum(last**3)

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    want = gradient(*map(jnp.asarray, (x, weight, state)))
    got = gradient(jnp.where(valid, x, jnp.nan), jnp.asarray(weight), jnp.asarray(state))
    for one, other in zip(got, want, strict=True):
        assert np.abs(other).max() > 0.1
        np.testing.assert_array_equal(one, other)
