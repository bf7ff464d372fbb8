"""The sharded heads choose as one argmax over the whole vocabulary does, ties included."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spd_jax.config import DraftConfig, PipelineConfig
from spd_jax.ops.sampling import argmax_lowest
from spd_jax.pipeline import placing
from spd_jax.pipeline.comm import LocalComm, MeshComm
from spd_jax.pipeline.heads import choose, logits, pick
from spd_jax.pipeline.mesh import resolve_mesh
from spd_jax.pipeline.spec import EngineSpec
from tests.random_models import make_draft, make_target

N = 3  # four shards
N_ROWS = 200


def choose_ids(comm, heads, hidden):
    """Ids [2, B] of the target's head and the draft's, and their embedding rows."""
    packed = [
        pick(heads, comm, logits(heads, hidden, *pair), pair[1])
        for pair in (heads.target_rows(), heads.draft_rows())
    ]
    packed = jnp.stack(packed)
    return choose(comm, packed, hidden.dtype)


@pytest.fixture(params=[None, tuple(range(1, 97, 3)), (9, 41)], ids=["all ids", "some", "two"])
def spec_and_params(request):
    """Weights of -1, 0 and 1 and no epsilon: logits of hidden states of +-1 are whole numbers."""
    target = make_target(4)
    config = dataclasses.replace(target.config, norm_eps=0.0)
    draft_config = DraftConfig((0,), N, n_layers=1, draft_ids=request.param)
    rng = np.random.default_rng(0)

    def whole_numbers(tree):
        return jax.tree.map(lambda x: jnp.asarray(rng.integers(-1, 2, x.shape), x.dtype), tree)

    params = target.params | {"lm_head": whole_numbers(target.params["lm_head"])}
    draft = make_draft(target, draft_config, "random").params
    draft = draft | {"lm_head": whole_numbers(draft["lm_head"])}
    return EngineSpec(config, draft_config, PipelineConfig(4, N)), params, draft


def test_ties_go_to_the_lowest_id(mode, spec_and_params):
    spec, params, draft = spec_and_params
    hidden = jnp.asarray(np.random.default_rng(1).choice([-1.0, 1.0], (N_ROWS, 32)), jnp.float32)
    if mode == "virtual":
        heads = placing.local_weights(spec, params, draft).heads
        ids, rows = jax.jit(lambda h, x: choose_ids(LocalComm(N), h, x))(heads, hidden)
    else:
        mesh = resolve_mesh(None, "dedicated", N)
        sharded = placing.shard_target(params, spec.target, placing.Layout(spec.pipeline, mesh))
        weights = placing.mesh_weights(spec, sharded, draft, mesh)
        specs = placing.weight_specs(weights).heads

        def per_rank(heads, hidden):
            local = jax.tree.map(lambda s, x: x[0] if s == placing.ON_RANK else x, specs, heads)
            return choose_ids(MeshComm(N), local, hidden)

        in_specs, out_specs = (specs, placing.EVERYWHERE), placing.EVERYWHERE
        run = jax.shard_map(per_rank, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
        ids, rows = jax.jit(run)(weights.heads, hidden)
    draft_ids = np.asarray(spec.draft.draft_ids or range(97))
    scores = [hidden @ params["lm_head"]["weight"].T, hidden @ draft["lm_head"]["weight"].T]
    best = [np.asarray(argmax_lowest(x)) for x in scores]
    tied = [(np.asarray(x) == np.max(x, axis=-1, keepdims=True)).sum(-1) > 1 for x in scores]
    assert all(t.sum() >= 5 for t in tied)  # or the test says nothing
    np.testing.assert_array_equal(ids, [best[0], draft_ids[best[1]]])
    np.testing.assert_array_equal(rows, params["embed"]["weight"][ids])
