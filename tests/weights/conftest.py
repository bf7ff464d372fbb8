"""A small llama with every odd shape told apart, and one way to say "a one-line ConfigError"."""

import contextlib
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from spd_jax.checks import ConfigError
from spd_jax.config import TargetConfig
from spd_jax.weights import keymaps

CONFIG = TargetConfig(
    vocab_size=40,
    d_model=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    d_ff=64,
    norm_eps=1e-5,
    rope_theta=10000.0,
    max_context=128,
    tied_embeddings=False,
)


@pytest.fixture
def config() -> TargetConfig:
    return CONFIG


@pytest.fixture
def random_params():
    """config -> a target's parameter tree of float32 normals."""

    def make(config: TargetConfig) -> dict:
        rng = np.random.default_rng(0)
        return keymaps.read_target(
            config, "hf", "{i}", lambda _, shape: rng.standard_normal(shape, np.float32)
        )

    return make


@pytest.fixture
def refused():
    """A context in which a ConfigError of one line must be raised; yields its words to check."""

    @contextlib.contextmanager
    def check(*words: str) -> Iterator[None]:
        with pytest.raises(ConfigError) as caught:
            yield
        text = str(caught.value)
        assert "\n" not in text and len(text) < 600, text
        for word in words:
            assert word in text, text

    return check


@pytest.fixture
def assert_same():
    """Two trees hold the same arrays, dtypes included, and these are what lazy ones say."""

    def check(a, b) -> None:
        assert jax.tree.structure(a) == jax.tree.structure(b)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            read = np.asarray(x)
            assert (read.shape, read.dtype) == (x.shape, x.dtype) == (y.shape, y.dtype)
            np.testing.assert_array_equal(read, y)

    return check
