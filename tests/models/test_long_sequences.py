"""What training on long sequences holds grows with the row types and the tokens, and no faster."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from spd_jax.config import DraftConfig
from spd_jax.models import distill
from spd_jax.models import draft as pdm
from spd_jax.models import target as model

LONG = 8192


@pytest.fixture(scope="module")
def held(config):
    """(row types M, tokens T) -> bytes that a gradient at full fill takes beside its arguments."""
    config = dataclasses.replace(config, n_layers=8, max_context=LONG)
    params = model.param_shapes(config, jnp.float32)

    @functools.cache
    def compile_gradient(n_types: int, n_tokens: int) -> int:
        draft = DraftConfig(tuple(range(n_types)), n_stages=8, n_layers=2)
        init = functools.partial(pdm.init_params, config, draft, copy=False)
        draft_params = jax.eval_shape(init, params, jax.random.key(0))
        state = jax.ShapeDtypeStruct((1, n_tokens, config.d_model), jnp.float32)
        segments = jax.ShapeDtypeStruct((1, n_tokens), jnp.int32)

        def loss(draft_params, hidden, segments):
            out = distill.draft_outputs(
                config, draft, draft_params, hidden, segments, 8, "exact", remat=True
            )
            return jnp.sum(out)

        arguments = draft_params, [state] * 9, segments
        memory = jax.jit(jax.grad(loss)).lower(*arguments).compile().memory_analysis()
        return memory.temp_size_in_bytes

    return compile_gradient


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_memory_grows_linearly_with_row_types(held):
    few, more, most = (held(n, LONG) for n in (3, 6, 9))
    assert most - more == pytest.approx(more - few, rel=0.5)
    assert most < 3.5 * few
    assert most < (9 * LONG) ** 2 / 8  # one mask of all rows with all would be as many bytes


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_memory_grows_linearly_with_tokens(held):
    assert held(9, LONG) < 2.5 * held(9, LONG // 2)
