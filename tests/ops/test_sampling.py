"""Drawing one id: greedy ties, top-k, the distribution, and independence of neighbours."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spd_jax.config import SamplingConfig
from spd_jax.ops.sampling import argmax_lowest, sample, warp

LOGITS = np.array([0.3, -1.0, 2.0, 0.1, 1.2, -0.4, 0.9, -1.2], np.float32)
CHI_SQUARE = {3: 16.3, 7: 24.3}  # degrees of freedom -> exceeded once in a thousand


def keys(n: int, seed: int = 0) -> jax.Array:
    return jax.random.split(jax.random.key(seed), n)


def chi_square(ids: np.ndarray, probabilities: np.ndarray) -> float:
    want = len(ids) * probabilities
    counts = np.bincount(ids, minlength=len(want))
    return float(np.sum((counts - want) ** 2 / want))


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def test_greedy_takes_the_lowest_of_tied_ids():
    logits = jnp.array([[1.0, 3.0, 3.0, 0.0], [-1.0, -1.0, -1.0, -1.0], [0.0, 0.0, 2.0, 1.0]])
    got = sample(logits, keys(3), jnp.arange(3), SamplingConfig())
    assert got.tolist() == argmax_lowest(logits).tolist() == [1, 0, 2] and got.dtype == jnp.int32


@pytest.mark.parametrize(
    ("top_k", "kept"),
    [(0, 6), (1, 2), (2, 2), (3, 5), (4, 5), (5, 5), (6, 6), (7, 6)],
)
def test_top_k_keeps_every_id_tied_with_the_kth(top_k, kept):
    logits = jnp.array([[2.0, 5.0, 2.0, 5.0, 2.0, 1.0]])
    got = warp(logits, SamplingConfig(temperature=0.5, top_k=top_k))[0]
    order = np.argsort(-logits[0], stable=True)
    np.testing.assert_array_equal(got[order[:kept]], 2 * logits[0][order[:kept]])
    assert np.isneginf(got[order[kept:]]).all()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_tempered_distribution(temperature):
    n = 20000
    logits = jnp.tile(LOGITS, (n, 1))
    sampling = SamplingConfig(temperature=temperature)
    want = softmax(LOGITS / temperature)
    by_key = sample(logits, keys(n), jnp.full(n, 5), sampling)
    assert chi_square(np.asarray(by_key), want) < CHI_SQUARE[7]
    by_position = sample(logits, keys(1)[jnp.zeros(n, int)], jnp.arange(n), sampling)
    assert chi_square(np.asarray(by_position), want) < CHI_SQUARE[7]
    other = sample(logits, keys(n), jnp.full(n, 5), SamplingConfig(temperature=3 * temperature))
    assert chi_square(np.asarray(other), want) > 10 * CHI_SQUARE[7]


def test_draws_follow_the_top_k_distribution():
    n, top = 20000, np.sort(np.argsort(-LOGITS)[:4])
    got = sample(jnp.tile(LOGITS, (n, 1)), keys(n), jnp.zeros(n, int), SamplingConfig(1.0, top_k=4))
    assert set(got.tolist()) == set(top.tolist())
    among = np.searchsorted(top, got)
    assert chi_square(among, softmax(LOGITS[top])) < CHI_SQUARE[3]


def test_a_draw_depends_on_its_key_position_and_logits_alone():
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.standard_normal((6, 40)), jnp.float32)
    positions, sampling = jnp.array([3, 3, 7, 100, 0, 8]), SamplingConfig(temperature=1.5)
    together = sample(logits, keys(6), positions, sampling).tolist()
    for b, id_ in enumerate(together):
        one = slice(b, b + 1)
        assert sample(logits[one], keys(6)[one], positions[one], sampling).tolist() == [id_]
    order = jnp.array([4, 2, 5, 0, 1, 3])
    moved = sample(logits[order], keys(6)[order], positions[order], sampling).tolist()
    assert moved == [together[b] for b in order.tolist()]


def test_keys_and_positions_give_different_draws():
    n, sampling = 200, SamplingConfig(temperature=1.0)
    flat = jnp.zeros((n, 1000))
    by_position = sample(flat, keys(1)[jnp.zeros(n, int)], jnp.arange(n), sampling)
    by_key = sample(flat, keys(n), jnp.zeros(n, int), sampling)
    assert len(set(by_position.tolist())) > 150 and len(set(by_key.tolist())) > 150
