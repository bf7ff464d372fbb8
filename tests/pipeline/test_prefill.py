"""The state after a pipelined prefill is what one pass over the whole prompt gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spd_jax
from spd_jax.models import target as model
from spd_jax.ops.attention import causal_mask
from spd_jax.pipeline.slots import cache_slots
from tests.expected import expected_cycles
from tests.pipeline.conftest import MESHES
from tests.pipeline.stepping import Stepper, start
from tests.random_models import full_config, make_draft, make_prompt, make_target

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STAGES = {"virtual": 4, "sharded": 3}
NEAR = {"rtol": 2e-4, "atol": 2e-4}
LENS = (130, 1, 257, 64, 200, 65)  # chunks of 64: inside, at and just past their ends


@pytest.fixture(scope="module", params=MESHES)
def prefilled(request) -> Stepper:
    n = STAGES[request.param]
    target = make_target(4, seed=n)
    draft = make_draft(target, full_config(4, n), "random")
    prompts = [make_prompt(length) for length in LENS]
    run = start(target, draft, prompts, 40, MESHES[request.param])
    assert run.engine.mode == request.param
    return run


def rank_caches(run: Stepper, rank: int) -> list[dict[str, np.ndarray]]:
    """The cache of each layer slot of a rank, on the host."""
    if run.engine.mesh is None:
        return jax.tree.map(np.asarray, run.state.caches[rank]["attention"])
    return [
        {k: np.asarray(v)[rank] for k, v in layer.items()}
        for layer in run.state.caches[0]["attention"]
    ]


def naive(run: Stepper):
    """Per layer of the target and of the draft module: the key and value rows of all prompts.

    Also the hidden states [L+1, B, T, D], and the logits' best ids at each last position.
    """
    n, config = run.engine.spec.n_stages, run.engine.spec.target
    target = make_target(4, seed=n)
    draft = make_draft(target, full_config(4, n), "random")
    ids = np.zeros((len(LENS), max(LENS)), np.int32)
    for row, length in zip(ids, LENS, strict=True):
        row[:length] = make_prompt(length)
    turn = model.rotation(config, jnp.broadcast_to(jnp.arange(max(LENS)), ids.shape))
    mask = causal_mask(max(LENS))
    x = model.embed(target.params, ids)
    outs, rows = model.run_layers(config, target.params["layers"], x, turn, mask)
    hidden = [x, *outs]
    deepest = jnp.concatenate([hidden[b] for b in run.engine.spec.draft.anchors], axis=-1)
    x = deepest @ draft.params["projs"][-1]["weight"].T
    layer_config = run.engine.spec.draft_layer
    _, draft_rows = model.run_layers(layer_config, draft.params["layers"], x, turn, mask)
    last = jnp.stack([hidden[-1][b, length - 1] for b, length in enumerate(LENS)])
    best = np.argmax(model.logits(config, target.params, last), axis=-1)
    return jax.tree.map(np.asarray, (rows, draft_rows, jnp.stack(hidden), best))


@pytest.fixture(scope="module")
def expected(prefilled):
    return naive(prefilled)


def assert_rows(cache: dict, rows: dict, n_heads: int) -> None:
    """A layer's cache holds each prompt's rows at its first positions."""
    assert cache["k"].shape[1] == cache["v"].shape[1] == n_heads
    for b, length in enumerate(LENS):
        np.testing.assert_allclose(cache["k"][b, ..., :length], rows["k"][b, ..., :length], **NEAR)
        np.testing.assert_allclose(cache["v"][b, :, :length], rows["v"][b, :, :length], **NEAR)


def test_stages_hold_the_keys_and_values_of_the_prompt(prefilled, expected):
    rows, starts = expected[0], prefilled.engine.spec.pipeline.starts
    for stage in range(prefilled.engine.spec.n_stages):
        layers = rows[starts[stage] : starts[stage + 1]]
        caches = rank_caches(prefilled, stage)
        for cache, layer in zip(caches, layers, strict=False):
            assert_rows(cache, layer, 2)


def test_the_draft_module_holds_rows_of_full_depth(prefilled, expected):
    caches = rank_caches(prefilled, prefilled.engine.spec.n_stages)
    assert len(expected[1]) == 4
    for cache, layer in zip(caches, expected[1], strict=False):
        assert_rows(cache, layer, 2)


def test_the_ring_holds_the_anchors_of_the_last_position(prefilled, expected):
    """And the embedding of the first new token, which enters the first stage."""
    spec, hidden = prefilled.engine.spec, expected[2]
    ring, entering = np.asarray(prefilled.state.ring), np.asarray(prefilled.state.hidden[0])
    embed = np.asarray(make_target(4, seed=spec.n_stages).params["embed"]["weight"])
    for b, length in enumerate(LENS):
        for m, anchor in enumerate(spec.draft.anchors):
            held = ring[b, (length - 1) % (spec.n_stages + 1), m]
            np.testing.assert_allclose(held, hidden[anchor, b, length - 1], **NEAR)
        first = embed[expected[3][b]]
        np.testing.assert_array_equal(ring[b, length % (spec.n_stages + 1), 0], first)
        np.testing.assert_array_equal(entering[b], first)


def test_one_token_is_committed_and_in_flight(prefilled, expected):
    state = prefilled.state
    for b, length in enumerate(LENS):
        assert prefilled.committed(b) == ([int(expected[3][b])], [True], 0)
        assert int(state.newest[b]) == length
        assert int(state.fill[b]) == 1
        assert not bool(state.done[b])


def test_long_prompts_decode_to_the_targets_text(comparison):
    mode, n = "sharded", STAGES["sharded"]
    target = make_target(4, seed=n)
    draft = make_draft(target, full_config(4, n), "even")
    prompts = [make_prompt(length) for length in LENS]
    options = dict(max_new_tokens=40, stop_ids=())
    want = spd_jax.generate(target, prompts, **options)
    got = spd_jax.decode(target, draft, prompts, mesh=MESHES[mode], chunk_cycles=400, **options)
    for prompt, one, other in zip(prompts, got, want, strict=True):
        assert one.stats.mode == mode
        assert one.cycles == expected_cycles(n, one.accepted)
        if comparison.check(target, prompt, one.tokens, other.tokens):
            assert one.accepted[1:] == [token % 2 == 0 for token in one.tokens[1:]]


def test_delta_nets_know_what_the_whole_prompt_leaves(mode, golden_pair):
    """Prompts of one chunk, of several, and shorter ones beside them."""
    target, draft = golden_pair("qwen3_5/n4")
    prompts = [make_prompt(length) for length in (140, 1, 64, 65)]
    run = start(target, draft, prompts, 4, MESHES[mode])
    assert run.engine.mode == mode
    config, n = target.config, run.engine.spec.n_stages
    n_compared = 0
    for b, prompt in enumerate(prompts):
        turn = model.rotation(config, jnp.arange(len(prompt))[None])
        x, mask = model.embed(target.params, jnp.asarray([prompt])), causal_mask(len(prompt))
        _, left = model.run_layers(config, target.params["layers"], x, turn, mask)
        slot, layer = (len(prompt) - 1) % n, 0
        for rank, kinds in enumerate(run.engine.spec.rank_kinds[:n]):
            for kind, (mixer, nth) in zip(kinds, cache_slots(kinds), strict=True):
                if kind.mixer == "delta":
                    sharded = mode == "sharded"
                    cache = run.state.caches[0 if sharded else rank][mixer][nth]
                    for name, want in left[layer].items():
                        got = np.asarray(cache[name])
                        got = (got[rank] if sharded else got)[b, slot]
                        np.testing.assert_allclose(got, want[0], rtol=1e-4, atol=1e-4)
                        n_compared += 1
                layer += 1
    assert n_compared == len(prompts) * 6 * 2
