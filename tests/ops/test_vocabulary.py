"""Losses over the vocabulary, chunk by chunk, against all logits at once and autodiff."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spd_jax.config import LossConfig
from spd_jax.ops import vocabulary
from spd_jax.ops.losses import divergence
from spd_jax.ops.vocabulary import best_ids, vocabulary_loss

N, D, V, TEMPERATURE = 23, 6, 40, 1.7
IDS = np.arange(1, 40, 3)


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    shapes = {"x": (N, D), "head": (len(IDS), D), "target_x": (N, D), "target_head": (V, D)}
    found = {k: jnp.asarray(rng.standard_normal(s), jnp.float32) for k, s in shapes.items()}
    scored = jnp.asarray(rng.random(N) < 0.7)
    weights = jnp.asarray(scored * rng.random(N), jnp.float32)
    return {**found, "temperature": TEMPERATURE, "scored_mask": scored, "weights": weights}


def whole(loss, x, head, target_x, target_head, columns, temperature, scored_mask, weights):
    """All logits at once."""
    log_q = jax.nn.log_softmax(x @ head.T / temperature)
    log_p = jax.nn.log_softmax(target_x @ target_head.T / temperature)
    outside = 0.0
    if columns is not None:
        log_p = log_p[:, columns]
        outside = 1 - jnp.exp(log_p).sum(-1)
    losses = divergence(loss, log_p, log_q, outside) * temperature**2
    return jnp.sum(losses * weights), (losses, log_q.argmax(-1), log_p.argmax(-1))


@pytest.mark.parametrize("chunk_logits", [1, 400, 1 << 24])  # 8 rows, 10 or so, all
@pytest.mark.parametrize("outside", ["renormalise", "miss"])
@pytest.mark.parametrize("n_scored", [0, 1, None])
def test_totals_scores_and_gradients_are_those_of_all_logits(
    monkeypatch, arrays, chunk_logits, outside, n_scored
):
    monkeypatch.setattr(vocabulary, "CHUNK_LOGITS", chunk_logits)
    if n_scored is not None:
        arrays["scored_mask"] = jnp.arange(N) == 5 if n_scored else jnp.zeros(N, bool)
        arrays["weights"] = arrays["scored_mask"].astype(jnp.float32)
    columns = IDS if outside == "miss" else None
    if columns is None:
        arrays["target_head"] = arrays["target_head"][IDS]
    x, head, *rest = arrays.values()
    rest.insert(2, columns)
    loss, scored = LossConfig("js", outside), np.asarray(arrays["scored_mask"])
    ours = functools.partial(vocabulary_loss, loss, True)
    plain = functools.partial(whole, loss)
    (got, got_rows), got_grads = jax.value_and_grad(ours, (0, 1), has_aux=True)(x, head, *rest)
    (want, want_rows), want_grads = jax.value_and_grad(plain, (0, 1), has_aux=True)(x, head, *rest)
    same = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    same(got, want)
    for a, b in zip(got_rows, want_rows, strict=True):
        same(a, np.where(scored, b, 0))
    for a, b in zip(got_grads, want_grads, strict=True):
        same(a, b)
    undifferentiated, rows = ours(x, head, *rest)
    same(undifferentiated, want)
    for a, b in zip(rows, got_rows, strict=True):
        same(a, b)


def test_a_frozen_head_has_no_gradient_and_a_cotangent_scales(arrays):
    x, head, *rest = arrays.values()
    rest[1] = rest[1][IDS]
    rest.insert(2, None)

    def total(train_head, x, head):
        return 3 * vocabulary_loss(LossConfig(), train_head, x, head, *rest)[0]

    dx, d_head = jax.grad(functools.partial(total, True), (0, 1))(x, head)
    frozen_dx, frozen = jax.grad(functools.partial(total, False), (0, 1))(x, head)
    np.testing.assert_allclose(frozen_dx, dx, rtol=1e-6)
    np.testing.assert_array_equal(frozen, 0)
    want = jax.grad(lambda x: 3 * whole(LossConfig(), x, head, *rest)[0])(x)
    np.testing.assert_allclose(dx, want, rtol=1e-5, atol=1e-6)
    assert np.abs(d_head).max() > 0.1


def test_best_ids_are_the_targets_choices_where_scored(monkeypatch, arrays):
    monkeypatch.setattr(vocabulary, "CHUNK_LOGITS", 1)
    x, head, scored = (arrays[k] for k in ("target_x", "target_head", "scored_mask"))
    want = np.where(scored, np.argmax(x @ head.T, axis=-1), 0)
    np.testing.assert_array_equal(best_ids(x, head, scored), want)


def test_logits_of_all_positions_are_never_held():
    n, width = 500, 3000
    x, head = jnp.ones((n, 4)), jnp.ones((width, 4))

    def loss(x, head):
        arrays = (x, head, x, head, None, 1.0, jnp.ones(n, bool), jnp.ones(n))
        return vocabulary_loss(LossConfig(), True, *arrays)[0]

    chunk = vocabulary.chunk_rows(n, width)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary, "CHUNK_LOGITS", 100 * width)
        memory = jax.jit(jax.grad(loss, (0, 1))).lower(x, head).compile().memory_analysis()
    assert chunk == n and memory.temp_size_in_bytes < 4 * n * width


def test_bfloat16_states_and_heads_are_near_the_float32_oracle(arrays):
    """Logits are float32 sums of bfloat16 products; only the gradients are rounded."""
    halves = {k: v.astype(jnp.bfloat16) for k, v in arrays.items() if k in ("x", "head")}
    x, head, *rest = (arrays | halves).values()
    rest[0], rest[1] = rest[0].astype(jnp.bfloat16), rest[1][IDS].astype(jnp.bfloat16)
    rest.insert(2, None)
    exact = [y.astype(jnp.float32) for y in (x, head, *rest[:2])]
    ours = functools.partial(vocabulary_loss, LossConfig(), True)
    plain = functools.partial(whole, LossConfig())
    got, grads = jax.value_and_grad(lambda x, h: ours(x, h, *rest)[0], (0, 1))(x, head)
    want, want_grads = jax.value_and_grad(
        lambda x, h: plain(x, h, *exact[2:], *rest[2:])[0], (0, 1)
    )(*exact[:2])
    np.testing.assert_allclose(got, want, rtol=1e-4)
    for a, b in zip(grads, want_grads, strict=True):
        assert a.dtype == jnp.bfloat16
        np.testing.assert_allclose(a.astype(jnp.float32), b, rtol=0.02, atol=0.02)
