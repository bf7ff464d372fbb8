"""The golden targets give HF's logits and hidden states."""

import jax.numpy as jnp
import numpy as np
import pytest

from spd_jax.models import target as model


@pytest.fixture(scope="module", params=["llama", "qwen3", "qwen3_5"])
def family(request):
    return request.param


@pytest.fixture(scope="module")
def target(golden_target, family):
    return golden_target(family)


@pytest.fixture(scope="module")
def forward(golden, family):
    return np.load(golden / family / "forward.npz")


@pytest.fixture(scope="module")
def hidden(target, forward):
    return model.hidden_states(target.config, target.params, jnp.asarray(forward["input_ids"]))


def test_hidden_states_are_those_of_hf(forward, hidden):
    got = np.concatenate(hidden)  # of a batch of one
    np.testing.assert_allclose(got, forward["hidden_states_prenorm"], rtol=0, atol=1e-4)


def test_logits_are_those_of_hf(target, forward, hidden):
    got = model.logits(target.config, target.params, hidden[-1])[0]
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, forward["logits"], rtol=0, atol=1e-4)
