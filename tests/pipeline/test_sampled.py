"""Sampled decoding: coupled text is that of `generate`, and a text is its seed's and prompt's."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import spd_jax
from spd_jax.config import SamplingConfig
from spd_jax.ops import sampling as ops
from spd_jax.pipeline import draws, programs
from tests import distribution
from tests.expected import expected_cycles
from tests.pipeline.conftest import MESHES
from tests.pipeline.stepping import start
from tests.pipeline.test_compiled import chunk_text, is_collective, operations
from tests.random_models import CONFIG, full_config, make_draft, make_prompt, make_target

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SOME_IDS = tuple(range(1, 97, 3))
FILTERS = ({}, {"top_k": 5}, {"top_p": 0.8}, {"top_k": 20, "top_p": 0.8})
# (N, mode, drafter, some ids only, temperature, filters): every two settings of two columns meet.
COUPLED = [
    (2, "virtual", "random", False, 0.3, 3),
    (3, "sharded", "even", True, 0.7, 2),
    (4, "virtual", "perfect", False, 1.0, 1),
    (5, "sharded", "random", False, 1.5, 0),
    (8, "virtual", "even", True, 1.0, 3),
    (3, "virtual", "perfect", False, 1.5, 2),
    (2, "sharded", "perfect", True, 0.7, 1),
    (4, "sharded", "even", False, 0.3, 0),
]


def make_pair(n: int, kind: str, some_ids: bool = False):
    target = make_target(8 if n > 4 else 4, seed=n)
    config = full_config(target.config.n_layers, n)
    if some_ids:
        config = dataclasses.replace(config, draft_ids=SOME_IDS)
    return target, make_draft(target, config, kind)


@pytest.mark.parametrize(("n", "mode", "kind", "some_ids", "temperature", "filters"), COUPLED)
def test_coupled_text_is_that_of_generate(
    comparison, n, mode, kind, some_ids, temperature, filters
):
    target, draft = make_pair(n, kind, some_ids)
    sampling = SamplingConfig(temperature, verifier="coupled", **FILTERS[filters])
    prompts, seeds = [make_prompt(length) for length in (1, 4, 2 * n + 1)], [7, -1, 2**40]
    options = dict(max_new_tokens=40, sampling=sampling, stop_ids=())
    want = spd_jax.generate(target, prompts, seed=seeds, **options)
    got = spd_jax.decode(target, draft, prompts, seed=seeds, mesh=MESHES[mode], **options)
    assert len({tuple(result.tokens) for result in want}) == len(prompts)
    for prompt, seed, a, b in zip(prompts, seeds, got, want, strict=True):
        comparison.check(target, prompt, a.tokens, b.tokens, sampling, seed)
        assert a.stats.mode == mode and a.cycles == expected_cycles(n, a.accepted)
        if kind == "perfect" and not some_ids:
            assert all(a.accepted)
    alphas = [result.stats.alpha for result in got]
    assert kind != "even" or 0 < np.mean(alphas) < 1


@pytest.mark.parametrize("verifier", ["rejection", "coupled"])
def test_a_text_depends_on_its_seed_and_prompt_alone(verifier):
    """Not on neighbours, chunks, mode, a stop of others, or a batch that is compacted."""
    target, draft = make_pair(3, "even")
    sampling = SamplingConfig(0.8, top_k=30, verifier=verifier)
    prompts = [make_prompt(length) for length in (2, 9, 5)]
    options = dict(sampling=sampling, stop_ids=(), max_new_tokens=24)
    together = spd_jax.decode(target, draft, prompts, seed=3, mesh="virtual", **options)
    for mode, chunk in (("virtual", 5), ("sharded", 32)):
        for b, prompt in enumerate(prompts):
            alone = spd_jax.decode(
                target, draft, prompt, seed=3 + b, chunk_cycles=chunk, mesh=MESHES[mode], **options
            )
            assert alone.tokens == together[b].tokens
            assert alone.accepted == together[b].accepted
    stop = together[1].tokens[3]  # others go on in a smaller batch
    options["stop_ids"] = (stop,)
    stopped = spd_jax.decode(
        target, draft, prompts, seed=3, mesh="virtual", chunk_cycles=2, **options
    )
    for ended, whole in zip(stopped, together, strict=True):
        length = whole.tokens.index(stop) + 1 if stop in whole.tokens else len(whole.tokens)
        assert ended.tokens == whole.tokens[:length]


@pytest.mark.parametrize("mode", MESHES)
def test_a_cut_beyond_the_candidates_is_found_on_every_shard(mode, comparison):
    """Each shard has more ids than it sends at first: a second exchange is compiled and needed."""
    base = dataclasses.replace(CONFIG, vocab_size=1201)
    target = make_target(2, seed=5, base=base)
    config = dataclasses.replace(full_config(2, 2), draft_ids=tuple(range(0, 1201, 2)))
    draft = make_draft(target, config, "even")
    prompt, options = make_prompt(4), dict(max_new_tokens=16, stop_ids=())
    for values in ({"top_p": 0.9999}, {"top_p": 0.2}, {"top_k": 3}):
        sampling = SamplingConfig(5.0, verifier="coupled", **values)
        want = spd_jax.generate(target, prompt, sampling=sampling, **options)
        got = spd_jax.decode(target, draft, prompt, sampling=sampling, mesh=MESHES[mode], **options)
        comparison.check(target, prompt, got.tokens, want.tokens, sampling, 0)
    ids = np.array(prompt + want.tokens)
    logits = np.asarray(spd_jax.target_logits(target, ids))
    wide = distribution.warp(logits[-1], SamplingConfig(5.0, top_p=0.9999))
    assert np.count_nonzero(wide) > 3 * ops.TOP_P_CANDIDATES  # or the second one is not needed


def test_seeds_give_other_texts():
    target, draft = make_pair(3, "even")
    prompt, options = make_prompt(4), dict(max_new_tokens=12, mesh="virtual", stop_ids=())
    sampling = SamplingConfig(1.5)
    results = spd_jax.decode(target, draft, [prompt] * 20, sampling=sampling, **options)
    assert len({tuple(result.tokens) for result in results}) == 20


@pytest.mark.parametrize(
    ("sampling", "n_collectives"),
    [
        (SamplingConfig(1.0, verifier="coupled"), 2),
        (SamplingConfig(1.0), 3),
        (SamplingConfig(1.0, top_k=5, verifier="coupled"), 3),
        (SamplingConfig(1.0, top_k=5, top_p=0.9), 3),
    ],
    ids=str,
)
def test_collectives_of_a_sampled_cycle(sampling, n_collectives):
    """97 ids on four shards: each sends all of its ids, so no second exchange is compiled."""
    target, draft = make_pair(3, "random")
    run = start(target, draft, [make_prompt(3)], 40, MESHES["sharded"], sampling=sampling)
    collectives = [name for name in operations(chunk_text(run)) if is_collective(name)]
    assert len(collectives) == n_collectives, collectives


def test_values_of_sampling_compile_nothing():
    target, draft = make_pair(3, "even")
    options = dict(max_new_tokens=6, mesh="virtual", stop_ids=())
    prompt = make_prompt(3)

    def run(seed: int, *values: float) -> None:
        sampling = SamplingConfig(*values)
        spd_jax.decode(target, draft, prompt, sampling=sampling, seed=seed, **options)
        spd_jax.generate(target, prompt, sampling=sampling, seed=seed, max_new_tokens=6)

    run(0, 0.5, 3, 0.9)
    before = programs.CHUNK.n_compiled, programs.PREFILL.n_compiled
    for seed, values in enumerate([(1.5, 4, 0.5), (0.1, 60, 1.0), (2.0, 1, 0.01)]):
        run(seed, *values)
    assert (programs.CHUNK.n_compiled, programs.PREFILL.n_compiled) == before


def test_a_draft_of_another_vocabulary_lies_where_the_target_has_its_ids():
    """As many ids on each shard as the target has, and not the same ones."""
    target, _ = make_pair(3, "even")
    config = dataclasses.replace(full_config(4, 3), draft_ids=tuple(range(1, 97)))
    draft = make_draft(target, config, "perfect")
    sampling = SamplingConfig(1.0)
    options = dict(max_new_tokens=30, sampling=sampling, stop_ids=())
    for mode in MESHES:
        result = spd_jax.decode(target, draft, [make_prompt(3)] * 4, mesh=MESHES[mode], **options)
        assert np.mean([r.stats.alpha for r in result]) > 0.9  # p and q differ by id 0 alone
        assert np.mean([r.stats.expected_alpha for r in result]) > 0.9


def test_proposals_are_kept_for_rejection_sampling_alone():
    target, draft = make_pair(3, "even")
    for sampling, kept in ((SamplingConfig(1.0), True), (SamplingConfig(), False)):
        run = start(target, draft, [make_prompt(3)], 8, "virtual", sampling=sampling)
        assert (run.state.proposals is not None) == kept
        assert jnp.ndim(run.inputs.knobs.temperature) == 0
    assert draws.GREEDY == ops.plan(SamplingConfig(), 97)[0]
