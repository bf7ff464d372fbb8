"""The golden llama target gives HF's logits and hidden states."""

import jax.numpy as jnp
import numpy as np
import pytest

from spd_jax.models import target as model


@pytest.fixture(scope="module")
def forward(golden):
    return np.load(golden / "llama" / "forward.npz")


@pytest.fixture(scope="module")
def hidden(golden_target, forward):
    ids = jnp.asarray(forward["input_ids"])
    return model.hidden_states(golden_target.config, golden_target.params, ids)


def test_hidden_states_are_those_of_hf(forward, hidden):
    got = np.concatenate(hidden)  # of a batch of one
    np.testing.assert_allclose(got, forward["hidden_states_prenorm"], rtol=0, atol=1e-4)


def test_logits_are_those_of_hf(golden_target, forward, hidden):
    got = model.logits(golden_target.config, golden_target.params, hidden[-1])[0]
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, forward["logits"], rtol=0, atol=1e-4)
