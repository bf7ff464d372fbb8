"""A decoder layer against plain numpy, and the ways of running only part of it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spd_jax.config import LayerKind
from spd_jax.models import target as model
from spd_jax.models.cache import init_cache, write_chunk
from spd_jax.ops.attention import causal_mask

N_ROWS = 9


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "qk_norm"])
def case(request, config, make_target):
    """A config, one layer's parameters, and rows [2, T, D]."""
    config = dataclasses.replace(config, n_layers=1, qk_norm=request.param)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, N_ROWS, config.d_model)).astype(np.float32)
    return config, make_target(config).params["layers"][0], x


def run(config, layer, x, start, mask, cache=None, cache_len=None, n_query=None):
    positions = start + jnp.tile(jnp.arange(x.shape[1]), (x.shape[0], 1))
    args = (x, model.rotation(config, positions), mask, cache, cache_len)
    return model.run_layer(config, LayerKind(), layer, *args, n_query=n_query)


def test_a_layer_is_its_equations(naive, case):
    config, layer, x = case
    out, _ = run(config, layer, x, 40, causal_mask(N_ROWS))
    for got, rows in zip(out, x, strict=True):
        mask = np.tril(np.ones((N_ROWS, N_ROWS), bool))
        want = naive.layers(config, [layer], rows.astype(float), 40 + np.arange(N_ROWS), mask)[0]
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_rows_after_a_cached_prefix_are_as_in_one_pass(case):
    """Also with every row of the cache beyond the prefix poisoned."""
    config, layer, x = case
    whole, _ = run(config, layer, x, 0, causal_mask(N_ROWS))
    empty = init_cache(config, "attention", 2, 16, 1, jnp.float32)
    first, rows = run(config, layer, x[:, :5], 0, causal_mask(5), empty, jnp.zeros(2, int))
    cache = write_chunk(jax.tree.map(lambda a: a + 1e4, empty), rows, jnp.int32(0), jnp.full(2, 5))
    last, _ = run(config, layer, x[:, 5:], 5, causal_mask(N_ROWS - 5), cache, jnp.full(2, 5))
    got = np.concatenate([first, last], axis=1)
    np.testing.assert_allclose(got, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n_query", [1, 4, N_ROWS])
def test_fewer_queries_are_the_last_rows(case, n_query):
    config, layer, x = case
    whole, _ = run(config, layer, x, 0, causal_mask(N_ROWS))
    mask = causal_mask(N_ROWS)[:, -n_query:]
    got, rows = run(config, layer, x, 0, mask, n_query=n_query)
    np.testing.assert_allclose(got, whole[:, -n_query:], rtol=1e-5, atol=1e-5)
    assert rows["k"].shape[-1] == rows["v"].shape[-2] == N_ROWS
