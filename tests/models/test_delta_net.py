"""A delta-net layer: rows in one pass, one by one, in chunks and behind padding are the same."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spd_jax
from spd_jax.config import DeltaNetConfig, LayerKind
from spd_jax.models import target as model
from spd_jax.models.cache import init_cache, last_state, write_chunk, write_row
from spd_jax.ops.attention import causal_mask
from tests.random_models import HYBRID, make_prompt, make_target, scale_matrix

KIND = LayerKind("delta", "dense")
N_ROWS = 11
NEAR = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="module")
def case(config):
    """A config, a layer's parameters, rows [2, T, D], and the layer's output and state for them."""
    delta = DeltaNetConfig(n_key_heads=2, n_value_heads=4, key_dim=8, value_dim=4, conv_width=4)
    config = dataclasses.replace(config, n_layers=1, kinds=(KIND,), delta=delta)
    layer = jax.tree.map(scale_matrix, model.init_layer(config, KIND, jax.random.key(0)))
    x = jax.random.normal(jax.random.key(1), (2, N_ROWS, config.d_model))
    return config, layer, x, *run(config, layer, x)


@functools.partial(jax.jit, static_argnums=0)
def run(config, layer, x, cache=None, cache_len=None, n_valid=None):
    positions = jnp.tile(jnp.arange(x.shape[1]), (x.shape[0], 1))
    turn = model.rotation(config, positions)
    args = (x, turn, causal_mask(x.shape[1]), cache, cache_len, n_valid)
    return model.run_layer(config, KIND, layer, *args)


def empty(config, n_snapshots):
    return init_cache(config, "delta", 2, 16, n_snapshots, jnp.float32)


def assert_state(cache, n_rows, want):
    got = last_state(cache, jnp.full(2, n_rows))
    for a, b in zip(got, (want["conv"], want["state"]), strict=True):
        np.testing.assert_allclose(a, b, **NEAR)


@pytest.mark.parametrize("n_snapshots", [1, 3])
def test_rows_one_by_one_are_as_in_one_pass(case, n_snapshots):
    config, layer, x, want, state = case
    cache, outs = empty(config, n_snapshots), []
    for t in range(N_ROWS):
        at = jnp.full(2, t)
        out, rows = run(config, layer, x[:, t : t + 1], cache, at)
        cache = write_row(cache, rows, at, jnp.ones(2, bool))
        outs.append(out)
    np.testing.assert_allclose(jnp.concatenate(outs, axis=1), want, **NEAR)
    assert_state(cache, N_ROWS, state)


def test_going_back_is_reading_an_older_state(case):
    """With three states kept, two rows can be taken back and others put in their place."""
    config, layer, x, *_ = case
    keep, cache = jnp.ones(2, bool), empty(config, 3)
    steps = [*range(7), 9, 10]  # five, six are wrong and taken back
    for position, row in zip([0, 1, 2, 3, 4, 5, 6, 5, 6], steps, strict=True):
        at = jnp.full(2, position)
        out, rows = run(config, layer, x[:, row : row + 1], cache, at)
        cache = write_row(cache, rows, at, keep)
    right = x[:, jnp.array([0, 1, 2, 3, 4, 9, 10])]
    want, state = run(config, layer, right)
    np.testing.assert_allclose(out[:, 0], want[:, -1], **NEAR)
    assert_state(cache, 7, state)


def test_rows_that_are_not_kept_change_no_state(case):
    config, layer, x, *_ = case
    cache = empty(config, 2)
    _, rows = run(config, layer, x[:, :1], cache, jnp.zeros(2, int))
    cache = write_row(cache, rows, jnp.zeros(2, int), jnp.array([True, False]))
    conv, state = last_state(cache, jnp.ones(2, int))
    assert np.any(state[0]) and np.any(conv[0])
    assert not np.any(state[1]) and not np.any(conv[1])


def test_chunks_behind_which_padding_follows_are_as_in_one_pass(case):
    """Sequences of 11 and 5 rows in chunks of 4: the second has only padding in the last."""
    config, layer, x, *_ = case
    lens, cache, outs = jnp.array([N_ROWS, 5]), empty(config, 2), []
    padded = jnp.pad(x, ((0, 0), (0, 1), (0, 0)), constant_values=1e3)
    padded = padded.at[1, 5:].set(-1e3)
    for start in range(0, 12, 4):
        before, ends = (jnp.minimum(end, lens) for end in (start, start + 4))
        out, rows = run(config, layer, padded[:, start : start + 4], cache, before, ends - before)
        cache = write_chunk(cache, rows, jnp.int32(start), ends)
        outs.append(out)
    outs = jnp.concatenate(outs, axis=1)
    for b, length in enumerate(lens.tolist()):
        want, state = run(config, layer, x[b : b + 1, :length])
        np.testing.assert_allclose(outs[b, :length], want[0], **NEAR)
        conv, kept = last_state(cache, lens)
        np.testing.assert_allclose(kept[b], state["state"][0], **NEAR)
        np.testing.assert_allclose(conv[b], state["conv"][0], **NEAR)


@pytest.mark.slow
def test_a_hybrid_batch_writes_what_each_writes_alone():
    target = make_target(8, seed=1, base=HYBRID)
    prompts = [make_prompt(length) for length in (1, 7, 140)]
    together = spd_jax.generate(target, prompts, max_new_tokens=16)
    for prompt, result in zip(prompts, together, strict=True):
        alone = spd_jax.generate(target, prompt, max_new_tokens=16)
        assert result.tokens == alone.tokens
        assert len(set(result.tokens)) > 4
