"""The parts of a cycle that are timed are those of the cycle, and leave the state where it is."""

import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spd_jax.pipeline import programs
from spd_jax.pipeline.probe import PROBE, probe
from tests.pipeline.conftest import MESHES
from tests.pipeline.stepping import start
from tests.pipeline.test_compiled import PRODUCT, is_collective, operations
from tests.random_models import full_config, make_draft, make_prompt, make_target

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

N = 3


@pytest.fixture
def run(mode):
    """A batch whose pipeline is full."""
    target = make_target(4, seed=N)
    draft = make_draft(target, full_config(4, N), "perfect")
    run = start(target, draft, [make_prompt(3), make_prompt(5)], 40, MESHES[mode])
    run.run(2 * N)
    assert run.engine.mode == mode and run.state.fill.tolist() == [N, N]
    return run


def copies(state):
    """A state's values on the host: without its caches, and the caches by rank."""
    host = jax.tree.map(np.array, state)
    if len(host.caches) == 1:  # a mesh: the leaves hold a block per rank
        caches = [jax.tree.map(lambda x, r=r: x[r], host.caches[0]) for r in range(N + 1)]
    else:
        caches = host.caches
    return dataclasses.replace(host, caches=None), caches


def same(a, b) -> bool:
    return all(
        np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


@pytest.mark.parametrize("part", ["cycle", "rank", "heads", "exchange"])
def test_a_part_leaves_all_but_the_caches_it_writes(run, part):
    state, caches = copies(run.state)
    n_read = programs.capacity_of(run.state)
    for rank in range(N + 1):
        held = jax.tree.map(jnp.copy, run.state)
        got, got_caches = copies(probe(run.engine, held, run.inputs, part, n_read, rank)(held, 3))
        assert same(got, state)
        kept = [same(a, b) for a, b in zip(got_caches, caches, strict=True)]
        if part == "rank":  # the spare row too is the idle rank's own
            assert not kept[rank]
        elif part == "cycle":
            assert not any(kept)
        else:
            assert all(kept)


def test_a_part_has_the_collectives_of_the_cycle(run):
    n_read, counts = programs.capacity_of(run.state), {}
    for part in ("cycle", "rank", "heads", "exchange"):
        text = PROBE.compile(
            run.engine.weights, run.state, run.inputs, jnp.int32(1), jnp.int32(0),
            spec=run.engine.spec, mesh=run.engine.mesh, n_read=n_read, part=part,
        ).as_text()  # fmt: skip
        counts[part] = sum(map(is_collective, operations(text)))
    after = 1 if run.engine.mode == "sharded" else 0  # the sum that a probe ends with
    two = 2 * after
    assert counts == {"cycle": two + after, "rank": after, "heads": after, "exchange": two + after}


def test_the_parts_have_the_products_of_the_cycle(run):
    """None is left out, though what is timed has no other use."""
    n_read, products = programs.capacity_of(run.state), {}
    for part in ("cycle", "rank", "heads"):
        text = PROBE.compile(
            run.engine.weights, run.state, run.inputs, jnp.int32(1), jnp.int32(0),
            spec=run.engine.spec, mesh=run.engine.mesh, n_read=n_read, part=part,
        ).as_text()  # fmt: skip
        products[part] = Counter(PRODUCT.findall(text))
    assert sum(products["heads"].values()) == 2
    assert products["rank"] + products["heads"] == products["cycle"]
