"""The real model with the shipped head: lossless at every N, and bound to its target."""

import pytest

import spd_jax
from spd_jax.loading import shipped_heads
from spd_jax.prompts import read_prompts
from tests.expected import expected_cycles

pytestmark = [pytest.mark.slow, pytest.mark.network, pytest.mark.timeout(900)]

MAX_HEAD_BYTES = 40_000_000


@pytest.fixture(scope="module")
def target():
    return spd_jax.load_target("smollm2-135m")


@pytest.fixture(scope="module")
def draft(target):
    return spd_jax.load_draft(None, target)


@pytest.fixture(scope="module")
def prompts(target):
    rows = read_prompts("infer/prompts.jsonl")[:3]
    return [target.tokenizer.encode_chat(row.text) for row in rows]


@pytest.fixture(scope="module")
def texts(target, prompts):
    return [r.tokens for r in spd_jax.generate(target, prompts, max_new_tokens=32)]


def test_the_shipped_head_is_bound_to_its_target_and_small(target, draft):
    assert draft.config.target_sha256 == target.sha256
    for path in shipped_heads():
        assert sum(file.stat().st_size for file in path.iterdir()) <= MAX_HEAD_BYTES


@pytest.mark.parametrize("n_stages", [2, 3, 5, 6, 10])
def test_decode_equals_generate(n_stages, target, draft, prompts, texts, comparison):
    results = spd_jax.decode(
        target,
        draft,
        prompts,
        max_new_tokens=32,
        n_stages=n_stages,
        mesh="virtual",
        chunk_cycles=1000,  # one chunk: no smaller batch is compiled
    )
    for prompt, result, want in zip(prompts, results, texts, strict=True):
        comparison.check(target, prompt, result.tokens, want)
        assert result.cycles == expected_cycles(n_stages, result.accepted)


def test_one_prompt_sharded_over_six_devices(target, draft, prompts, texts, comparison):
    result = spd_jax.decode(target, draft, prompts[0], max_new_tokens=32)
    assert result.stats.mode == "sharded" and result.stats.devices == 6
    comparison.check(target, prompts[0], result.tokens, texts[0])
