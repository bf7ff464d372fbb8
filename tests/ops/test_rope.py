"""RoPE turns each pair as a complex number; llama3 scaling follows its published formula."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from spd_jax.config import Llama3Scaling
from spd_jax.ops.rope import apply_rope, inverse_frequencies, rotation

SCALINGS = [None, Llama3Scaling(8.0, 1.0, 4.0, 64), Llama3Scaling(32.0, 1.0, 4.0, 8192)]


def naive_frequency(j: int, head_dim: int, theta: float, scaling: Llama3Scaling | None) -> float:
    freq = theta ** (-2 * j / head_dim)
    if scaling is None:
        return freq
    wavelength = 2 * math.pi / freq
    original = scaling.original_max_position
    if wavelength < original / scaling.high_freq_factor:
        return freq
    if wavelength > original / scaling.low_freq_factor:
        return freq / scaling.factor
    smooth = (original / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    return (1 - smooth) * freq / scaling.factor + smooth * freq


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize(("head_dim", "theta"), [(8, 10000.0), (16, 500000.0), (64, 500000.0)])
def test_frequencies_follow_the_formula(head_dim, theta, scaling):
    want = [naive_frequency(j, head_dim, theta, scaling) for j in range(head_dim // 2)]
    got = inverse_frequencies(head_dim, theta, scaling)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_scaling_has_a_kept_a_blended_and_a_divided_band():
    scaling = SCALINGS[-1]
    ratio = inverse_frequencies(64, 500000.0, scaling) / inverse_frequencies(64, 500000.0, None)
    blended = (ratio > 1.001 / scaling.factor) & (ratio < 0.999)
    assert np.isclose(ratio, 1).any() and np.isclose(ratio, 1 / scaling.factor).any()
    assert blended.any() and (np.diff(ratio) <= 1e-6).all()


@pytest.mark.parametrize("scaling", SCALINGS[1:])
def test_frequencies_are_those_of_hf(scaling):
    pytest.importorskip("torch")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_position,
    }
    config = LlamaConfig(head_dim=64, max_position_embeddings=131072, rope_parameters=rope)
    want, attention_factor = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    assert attention_factor == 1
    got = inverse_frequencies(64, 500000.0, scaling)
    np.testing.assert_allclose(got, want.numpy(), rtol=1e-6)


def test_each_pair_turns_as_a_complex_number():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 5, 3, 8)).astype(np.float32)  # [B, T, H, E]
    positions = rng.integers(0, 300, (2, 5))
    inv_freq = inverse_frequencies(8, 10000.0, None)
    angles = positions[:, :, None, None] * inv_freq.astype(np.float64)
    turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angles)
    got = apply_rope(jnp.asarray(x), rotation(jnp.asarray(positions), inv_freq))
    # A float32 angle of some hundreds is exact to about 1e-5.
    np.testing.assert_allclose(got, np.concatenate([turned.real, turned.imag], -1), atol=1e-4)


def test_scores_depend_on_distance_alone():
    rng = np.random.default_rng(1)
    q, k = rng.standard_normal((2, 1, 1, 1, 16)).astype(np.float32)
    inv_freq = inverse_frequencies(16, 10000.0, None)

    def score(at: int, distance: int) -> float:
        turned_q = apply_rope(jnp.asarray(q), rotation(jnp.full((1, 1), at), inv_freq))
        back = rotation(jnp.full((1, 1), at - distance), inv_freq)
        turned_k = apply_rope(jnp.asarray(k), back)
        return float(jnp.sum(turned_q * turned_k))

    scores = [score(at, 7) for at in (7, 20, 150)]
    np.testing.assert_allclose(scores, scores[0], atol=1e-4)
    assert abs(score(20, 8) - scores[0]) > 1e-2


def test_narrow_inputs_are_turned_in_float32():
    x = jnp.ones((1, 1, 1, 8), jnp.bfloat16)
    turn = rotation(jnp.full((1, 1), 1001), inverse_frequencies(8, 10000.0, None))
    got = apply_rope(x, turn)
    want = apply_rope(x.astype(jnp.float32), turn).astype(jnp.bfloat16)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, want)
