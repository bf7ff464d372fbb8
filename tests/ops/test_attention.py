"""Attention over a cached prefix and new rows against one query, head and key at a time."""

import jax.numpy as jnp
import numpy as np
import pytest

from spd_jax.ops.attention import attend, causal_mask

POISON = 1e4  # finite, as a stale cache row is


def naive(q, k, v, mask, k_cache, v_cache, cache_len):
    """All arrays as `attend` takes them; softmax over exactly the rows that are seen."""
    n_batch, n_query, n_heads, head_dim = q.shape
    out = np.zeros((n_batch, n_query, n_heads, head_dim))
    share = n_heads // k.shape[1]
    for b in range(n_batch):
        for h in range(n_heads):
            past = cache_len[b]
            keys = np.concatenate([k_cache[b, h // share].T[:past], k[b, h // share].T])
            values = np.concatenate([v_cache[b, h // share, :past], v[b, h // share]])
            for t in range(n_query):
                seen = np.concatenate([np.ones(past, bool), mask[b % len(mask), t]])
                scores = keys[seen].astype(np.float64) @ q[b, t, h] / np.sqrt(head_dim)
                weights = np.exp(scores - scores.max())
                out[b, t, h] = weights @ values[seen] / weights.sum()
    return out.reshape(n_batch, n_query, -1)


def make(rng, n_batch, n_query, n_rows, n_heads, n_kv, n_cached, head_dim=8):
    shapes = [
        (n_batch, n_query, n_heads, head_dim),
        (n_batch, n_kv, head_dim, n_rows),
        (n_batch, n_kv, n_rows, head_dim),
        (n_batch, n_kv, head_dim, n_cached),
        (n_batch, n_kv, n_cached, head_dim),
    ]
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize(("n_heads", "n_kv"), [(4, 4), (4, 2), (6, 2), (3, 1)])
@pytest.mark.parametrize("per_sequence_mask", [True, False])
def test_rows_beyond_the_cached_length_never_count(n_heads, n_kv, per_sequence_mask):
    rng = np.random.default_rng(n_heads)
    cache_len = np.array([0, 3, 9, 12])
    q, k, v, k_cache, v_cache = make(rng, 4, 3, 5, n_heads, n_kv, 12)
    mask = rng.random((4 if per_sequence_mask else 1, 3, 5)) < 0.5
    mask[:, np.arange(3), np.arange(3)] = True  # every query sees something
    want = naive(q, k, v, mask, k_cache, v_cache, cache_len)
    for b, past in enumerate(cache_len):
        k_cache[b, :, :, past:] = POISON * rng.choice([-1, 1], k_cache[b, :, :, past:].shape)
        v_cache[b, :, past:] = POISON
    got = attend(*map(jnp.asarray, (q, k, v, mask, k_cache, v_cache, cache_len)))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_without_a_cache_only_new_rows_are_seen():
    rng = np.random.default_rng(0)
    q, k, v, k_cache, v_cache = make(rng, 2, 6, 6, 4, 2, 0)
    mask = np.tril(np.ones((1, 6, 6), bool))
    want = naive(q, k, v, mask, k_cache, v_cache, [0, 0])
    got = attend(*map(jnp.asarray, (q, k, v, mask)))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_a_query_that_sees_nothing_is_uniform_and_disturbs_no_other():
    rng = np.random.default_rng(0)
    q, k, v, _, _ = make(rng, 1, 3, 4, 2, 1, 0)
    mask = np.ones((1, 3, 4), bool)
    seeing = attend(*map(jnp.asarray, (q, k, v, mask)))
    mask[0, 1] = False
    got = attend(*map(jnp.asarray, (q, k, v, mask)))
    np.testing.assert_allclose(got[0, 1], np.tile(v[0, 0].mean(0), 2), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got[0, ::2], seeing[0, ::2])


def test_large_scores_do_not_overflow():
    rng = np.random.default_rng(0)
    q, k, v, k_cache, v_cache = make(rng, 1, 2, 2, 2, 1, 4)
    q, k, k_cache = 300 * q, 300 * k, 300 * k_cache
    mask = np.tril(np.ones((1, 2, 2), bool))
    want = naive(q, k, v, mask, k_cache, v_cache, [4])
    got = attend(*map(jnp.asarray, (q, k, v, mask, k_cache, v_cache, [4])))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_causal_mask_sees_itself_and_what_came_before():
    np.testing.assert_array_equal(causal_mask(5)[0], np.tril(np.ones((5, 5), bool)))
