"""The reference's version 10 draft module, against one query at a time in float64 numpy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spd_jax.checks import ConfigError
from spd_jax.config import Llama3Scaling, V10DraftConfig
from spd_jax.models import distill, draft_v10
from spd_jax.models import target as model
from spd_jax.weights import keymaps

DRAFT = V10DraftConfig(((0, 1, 3, 5), (0, 3), (2, 1), (0,)), n_layers=2, d_ff=40)
LENGTHS = (11, 6)
SCALED = Llama3Scaling(8.0, 1.0, 4.0, 64)


@pytest.fixture(scope="module", params=["llama", "gated"])
def target(request, config, make_target):
    """A llama, whose layers have no q/k norms, or full attention as Qwen3.5 has it.

    Those of the draft module are plain and have such norms; the target's RoPE is theirs too.
    """
    config = dataclasses.replace(config, rope_scaling=SCALED)
    if request.param == "gated":
        gated = dict(norm_offset=True, attn_gate=True, qk_norm=True, rotary_dim=4)
        config = dataclasses.replace(config, **gated)
    return make_target(config)


@pytest.fixture(scope="module")
def params(target):
    rng = np.random.default_rng(1)
    layers = draft_v10.layer_config(target.config, DRAFT)
    sizes = keymaps.target_sizes(layers) | {"W": layers.vocab_size}

    def take(name, shape):
        noise = rng.standard_normal(shape, np.float32)
        return 1 + 0.2 * noise if len(shape) == 1 else noise * np.float32(shape[-1] ** -0.5)

    return jax.tree.map(jnp.asarray, keymaps.read_draft_v10(DRAFT, sizes, take))


@pytest.fixture(scope="module")
def hidden(target):
    ids = np.random.default_rng(0).integers(0, 64, (len(LENGTHS), max(LENGTHS)))
    return model.hidden_states(target.config, target.params, ids)


@pytest.fixture(scope="module")
def outputs(target, params, hidden):
    """(fill, mask_mode) -> outputs [B, T, D]."""
    valid_mask = jnp.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]
    args = (target.config, DRAFT, params, hidden, valid_mask)
    return lambda fill, mode="exact": distill.draft_outputs(*args, fill, mode)


def weight(node: dict) -> np.ndarray:
    return np.asarray(node["weight"]).astype(np.float64)


def naive_output(naive, target, params, hidden, fill, n_tokens):
    """Outputs [T, D] of one sequence; hidden [L+1, T, D]."""
    n, config = DRAFT.n_stages, draft_v10.layer_config(target.config, DRAFT)

    def row(time, depth):
        block = n - (n if depth >= fill else depth)  # complete where it is not in flight
        return weight(params["projs"][block]) @ np.concatenate(
            [hidden[b, time] for b in DRAFT.row_anchors[block]]
        )

    newest = np.stack([row(t, 0) for t in range(n_tokens)])
    for i, layer in enumerate(params["layers"]):
        after = []
        for t in range(n_tokens):
            seen = []
            for time in range(t):
                depth = min(n, t - time)
                x = row(time, depth)
                for projs in params["memory"][: i + 1]:
                    x = weight(projs[n - depth]) @ x
                seen.append(x)
            rows = np.stack([*seen, newest[t]])
            causal = np.tril(np.ones((t + 1, t + 1), bool))
            after.append(naive.layers(config, [layer], rows, np.arange(t + 1), causal)[0][-1])
        newest = np.stack(after)
    return newest


@pytest.mark.parametrize("fill", [1, 2, 3])
def test_outputs_are_those_of_one_query_at_a_time(naive, target, params, hidden, outputs, fill):
    got = outputs(fill)
    for b, n_tokens in enumerate(LENGTHS):
        states = np.stack([np.asarray(h[b], np.float64) for h in hidden])
        want = naive_output(naive, target, params, states, fill, n_tokens)
        np.testing.assert_allclose(got[b, :n_tokens], want, rtol=0, atol=1e-4)


def test_fills_differ_and_a_traced_one_is_the_static_one(outputs):
    static = [outputs(fill) for fill in (1, 2, 3)]
    assert all(np.abs(a - b).max() > 0.1 for a, b in zip(static, static[1:], strict=False))
    traced = jax.jit(outputs)
    for fill, want in enumerate(static, start=1):
        np.testing.assert_allclose(traced(fill), want, rtol=0, atol=1e-5)


def test_both_mask_modes_are_one_and_another_is_an_error(outputs):
    np.testing.assert_array_equal(outputs(2, "exact"), outputs(2, "reference"))
    with pytest.raises(ConfigError, match="mask_mode must be"):
        outputs(2, "roughly")
    with pytest.raises(ConfigError, match="from 1 to n_stages 3, got 4"):
        outputs(4)
