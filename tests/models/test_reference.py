"""Autoregressive decoding against HF's golden text and against whole forward passes in numpy."""

import dataclasses
import json

import numpy as np
import pytest

import spd_jax
from spd_jax.config import Llama3Scaling, SamplingConfig, TargetConfig

MARGIN = 1e-3  # two runs in float32 may choose differently between logits this close
LENGTHS = (1, 14, 300)  # a prefill chunk has 128 rows
VARIANTS = {
    "untied": {},
    "tied": {"tied_embeddings": True, "n_kv_heads": 1},
    "llama3 rope": {"rope_scaling": Llama3Scaling(8.0, 1.0, 4.0, 64), "rope_theta": 5e5},
}


def prompt(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 64, n).tolist()


def tokens(results) -> list[list[int]]:
    return [result.tokens for result in results]


@pytest.fixture(scope="module")
def small(config) -> TargetConfig:
    return dataclasses.replace(config, n_layers=3)


@pytest.fixture(scope="module")
def target(small, make_target):
    return make_target(small, seed=2)


@pytest.fixture(scope="module")
def text(target) -> list[int]:
    """A greedy continuation of prompt(9) with several distinct ids."""
    ids = spd_jax.generate(target, prompt(9), max_new_tokens=12).tokens
    assert len(set(ids)) > 6
    return ids


def assert_greedy(naive, target, prompt_ids: list[int], new_ids: list[int]) -> int:
    """Each new id is the argmax of a forward pass over all before it; returns the near ties."""
    ids = prompt_ids + new_ids
    logits = naive.logits(target.config, target.params, ids)[len(prompt_ids) - 1 : -1]
    best = logits.max(-1)
    chosen = logits[np.arange(len(new_ids)), new_ids]
    assert (best - chosen < MARGIN).all(), f"prompt of {len(prompt_ids)}: {best - chosen}"
    return int(np.sum(chosen < best))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_greedy_text_is_that_of_hf(family, golden, golden_target):
    cases = json.loads((golden / family / "ar_greedy.json").read_text())["cases"]
    assert cases
    for limit in {case["max_new_tokens"] for case in cases}:
        group = [case for case in cases if case["max_new_tokens"] == limit]
        prompts = [case["prompt"] for case in group]
        results = spd_jax.generate(golden_target(family), prompts, max_new_tokens=limit)
        assert tokens(results) == [case["generated_ids"] for case in group]


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_text_is_that_of_whole_forward_passes(naive, small, make_target, variant):
    target = make_target(dataclasses.replace(small, **VARIANTS[variant]), seed=2)
    lengths = (1, 14, 128, 129, 300) if variant == "untied" else (5, 130)
    prompts = [prompt(n, seed=n) for n in lengths]
    results = spd_jax.generate(target, prompts, max_new_tokens=20)
    near_ties = 0
    for prompt_ids, result in zip(prompts, results, strict=True):
        assert len(result.tokens) == 20 and result.finish_reason == "length"
        near_ties += assert_greedy(naive, target, prompt_ids, result.tokens)
    assert near_ties <= 1


@pytest.mark.parametrize(
    "sampling", [SamplingConfig(), SamplingConfig(1.0, top_k=20)], ids=["greedy", "sampled"]
)
def test_a_batch_gives_each_what_it_gets_alone(target, sampling):
    prompts, seeds = [prompt(n, seed=n) for n in LENGTHS], [5, 1, 4]
    options = {"max_new_tokens": 12, "sampling": sampling}
    together = spd_jax.generate(target, prompts, seed=seeds, **options)
    alone = [
        spd_jax.generate(target, ids, seed=seed, **options)
        for ids, seed in zip(prompts, seeds, strict=True)
    ]
    assert tokens(together) == tokens(alone)
    assert len({tuple(ids) for ids in tokens(alone)}) == len(prompts)


def test_an_int_seed_counts_up_over_the_batch(target):
    options = {"max_new_tokens": 8, "sampling": SamplingConfig(1.5)}
    same = [prompt(6)] * 3
    counted = tokens(spd_jax.generate(target, same, seed=7, **options))
    assert counted == tokens(spd_jax.generate(target, same, seed=[7, 8, 9], **options))
    assert len({tuple(ids) for ids in counted}) == 3


def test_sampled_ids_are_drawn_from_the_conditional_distribution(naive, target):
    """Chi-square of the first and of the second token given the first."""
    ids, n, top_k, temperature = prompt(6), 500, 3, 1.0
    sampling = SamplingConfig(temperature, top_k=top_k)
    drawn = np.array(
        tokens(spd_jax.generate(target, [ids] * n, max_new_tokens=2, sampling=sampling))
    )
    common = np.bincount(drawn[:, 0]).argmax()
    second = drawn[drawn[:, 0] == common, 1]
    for seen, draws in (([], drawn[:, 0]), ([common], second)):
        logits = naive.logits(target.config, target.params, ids + seen)[-1]
        top = np.sort(np.argsort(-logits)[:top_k])
        p = np.exp((logits[top] - logits.max()) / temperature)
        want = len(draws) * p / p.sum()
        assert set(draws) <= set(top) and want.min() > 5
        counts = np.bincount(np.searchsorted(top, draws), minlength=top_k)
        assert np.sum((counts - want) ** 2 / want) < 13.8  # exceeded once in a thousand


def test_a_draw_depends_on_the_seed_and_the_position_alone(target):
    """So a text goes on as it did when its beginning becomes part of the prompt."""
    options = {"sampling": SamplingConfig(2.0), "seed": 3}
    whole = spd_jax.generate(target, prompt(6), max_new_tokens=10, **options).tokens
    assert len(set(whole)) > 5
    rest = spd_jax.generate(target, prompt(6) + whole[:4], max_new_tokens=6, **options).tokens
    assert rest == whole[4:]


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_a_limit_cuts_the_text(target, text, limit):
    result = spd_jax.generate(target, prompt(9), max_new_tokens=limit)
    assert result.tokens == text[:limit] and result.finish_reason == "length"


def test_generation_ends_with_the_first_stop_id(target, text):
    for stop in dict.fromkeys(text):
        end = text.index(stop) + 1
        result = spd_jax.generate(target, prompt(9), max_new_tokens=12, stop_ids=[stop])
        assert result.tokens == text[:end] and result.finish_reason == "stop"


def test_any_of_several_stop_ids_ends_it(target, text):
    absent = next(i for i in range(64) if i not in text)
    stops = [absent, text[5], text[3]]
    end = min(text.index(text[5]), text.index(text[3])) + 1
    result = spd_jax.generate(target, prompt(9), max_new_tokens=12, stop_ids=stops)
    assert result.tokens == text[:end] and result.finish_reason == "stop"
    result = spd_jax.generate(target, prompt(9), max_new_tokens=12, stop_ids=[absent])
    assert result.tokens == text and result.finish_reason == "length"


def test_a_stop_id_at_the_limit_is_a_stop(target, text):
    last = next(i for i, id_ in enumerate(text) if i > 0 and id_ not in text[:i])
    options = {"max_new_tokens": last + 1, "stop_ids": [text[last]]}
    result = spd_jax.generate(target, prompt(9), **options)
    assert result.tokens == text[: last + 1] and result.finish_reason == "stop"


def test_a_finished_sequence_does_not_disturb_the_others(target, text):
    prompts = [prompt(9), prompt(130, seed=1), prompt(9)]
    free = tokens(spd_jax.generate(target, prompts, max_new_tokens=12, stop_ids=()))
    stopped = spd_jax.generate(target, prompts, max_new_tokens=12, stop_ids=[text[0]])
    assert [len(result.tokens) for result in stopped][::2] == [1, 1]
    other = free[1]
    end = other.index(text[0]) + 1 if text[0] in other else 12
    assert end > 3 and stopped[1].tokens == other[:end]


def test_the_targets_own_stop_ids_are_the_default(target, text):
    own = dataclasses.replace(target, stop_ids=(text[2],))
    end = text.index(text[2]) + 1
    assert spd_jax.generate(own, prompt(9), max_new_tokens=12).tokens == text[:end]
    assert spd_jax.generate(own, prompt(9), max_new_tokens=12, stop_ids=()).tokens == text


def test_a_long_text_fills_several_buckets(naive, target):
    """The cache is full to its last row but the spare one, and the token buffer grows too."""
    ids, n_new = prompt(3), 255 - 3
    result = spd_jax.generate(target, ids, max_new_tokens=n_new)
    assert len(result.tokens) == n_new
    assert assert_greedy(naive, target, ids, result.tokens) <= 1


def test_an_autoregressive_result_has_no_flags_and_no_cycles(target):
    result = spd_jax.generate(target, prompt(4), max_new_tokens=2)
    assert result.accepted is None and result.cycles is None and result.text is None
    stats = result.stats
    assert (stats.alpha, stats.tau, stats.tokens_per_cycle, stats.rejects) == (None,) * 4
