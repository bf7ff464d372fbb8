"""A difference counts as rounding only where the target's two best logits nearly tie."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

import spd_jax
from infer import agreement
from infer.agreement import Agreement, compare_tokens, first_difference, padded_to_bucket
from spd_jax.config import SamplingConfig
from spd_jax.ops.sampling import COUPLED, gumbel
from spd_jax.requests import prompt_keys


@pytest.mark.parametrize(
    ("a", "b", "position"),
    [
        ([], [], None),
        ([1, 2], [1, 2], None),
        ([1, 2], [1, 3], 1),
        ([1, 2], [1, 2, 3], 2),
        ([4], [5], 0),
        ([], [1], 0),
    ],
)
def test_first_difference(a, b, position):
    assert first_difference(a, b) == position
    assert first_difference(b, a) == position


def test_padding_keeps_the_ids_and_stays_within_the_context():
    assert padded_to_bucket([1] * 128, 1000).shape == (128,)
    assert padded_to_bucket([1] * 129, 1000).shape == (256,)
    assert padded_to_bucket([1] * 129, 200).shape == (200,)
    padded = padded_to_bucket([7, 8], 1000)
    assert padded.dtype == np.int32
    assert list(padded[:3]) == [7, 8, 0]


@pytest.mark.parametrize(
    ("gap", "dtype", "is_rounding"),
    [
        (1e-4, "float32", True),
        (1e-2, "float32", False),
        (0.1, "bfloat16", True),
        (1.0, "bfloat16", False),
    ],
)
def test_the_gap_is_read_at_the_last_common_token(gap, dtype, is_rounding, monkeypatch):
    def fake_logits(target, ids):
        logits = np.zeros((len(ids), 5), np.float32)
        logits[:, 1] = 9.0  # a wide lead everywhere but where the two part
        logits[3, 2] = 9.0 - gap  # after prompt [1, 2] and the common tokens [1, 1]
        return logits

    target = SimpleNamespace(
        config=SimpleNamespace(max_context=64),
        params={"embed": {"weight": jnp.zeros(1, dtype)}},
    )
    monkeypatch.setattr(spd_jax, "target_logits", fake_logits)
    found = compare_tokens(target, [1, 2], [1, 1, 2, 4], [1, 1, 1, 4])
    assert found.position == 2
    assert found.gap == pytest.approx(gap, rel=1e-2)
    assert found.is_rounding is is_rounding
    assert not found.identical


def test_a_decode_that_ends_early_is_never_called_rounding(monkeypatch):
    monkeypatch.setattr(agreement, "deciding_margin", lambda *_: 0.0)
    found = compare_tokens(None, [1], [5, 6], [5, 6, 7])
    assert (found.position, found.identical, found.is_rounding) == (2, False, False)


def test_equal_tokens_are_identical():
    found = compare_tokens(None, [1], [5, 6], [5, 6])
    assert found == Agreement(None, None)
    assert found.identical
    assert not found.is_rounding


def test_a_wrong_token_beside_the_edge_of_top_p_is_not_rounding(monkeypatch):
    """Hundreds of ids lie within 1e-3 of the edge; only one of them may be taken for another."""
    logits = np.linspace(5, 0, 2000).astype(np.float32)
    monkeypatch.setattr(
        spd_jax, "target_logits", lambda target, ids: np.tile(logits, (len(ids), 1))
    )
    target = SimpleNamespace(config=SimpleNamespace(max_context=64))
    sampling = SamplingConfig(1.0, top_p=0.9)
    p = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    before = np.cumsum(p) - p
    edge = int(np.flatnonzero(before < 0.9)[-1])
    assert np.sum(np.abs(before - 0.9) < 1e-3) > 3

    def margin(chosen, other, sampling=sampling):
        return agreement.deciding_margin(target, [1, 2], chosen, other, sampling, seed=4)

    scores = (
        logits + np.asarray(gumbel(prompt_keys([4]), COUPLED, jnp.array([2]), jnp.arange(2000)))[0]
    )
    best, second = np.argsort(-np.where(before < 0.9, scores, -np.inf))[:2]
    assert margin(best, second) == pytest.approx(scores[best] - scores[second], abs=1e-3)
    assert margin(best, edge) > 1e-2  # kept for sure, and far behind
    assert margin(best, 1999) >= before[1999] - 0.9 - 1e-6  # left out for sure
    outside = int(np.argmax(np.where(before > 0.95, scores, -np.inf)))
    assert margin(best, outside) > 0.04
    top_k = SamplingConfig(1.0, top_k=10)
    assert margin(0, 1500, top_k) >= logits[9] - logits[1500] - 1e-3
