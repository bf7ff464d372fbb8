"""The 2-gram lookup against a search written out in full."""

import random

import pytest

from spd_jax.ops.lookup import lookup_hits


def naive_hits(prompt: list[int], tokens: list[int]) -> list[bool]:
    """For each new token but the first, searches backwards through everything before it."""
    hits = []
    for k in range(1, len(tokens)):
        before = prompt + tokens[:k]
        proposal = None
        for start in range(len(before) - 3, -1, -1):
            if before[start : start + 2] == before[-2:]:
                proposal = before[start + 2]
                break
        hits.append(proposal == tokens[k])
    return hits


@pytest.mark.parametrize("seed", range(30))
def test_lookup_equals_the_naive_search(seed):
    rng = random.Random(seed)
    vocab = rng.choice([1, 2, 3, 10])
    prompt = [rng.randrange(vocab) for _ in range(rng.randint(1, 12))]
    tokens = [rng.randrange(vocab) for _ in range(rng.randint(1, 60))]
    hits = lookup_hits(prompt, tokens)
    assert hits == naive_hits(prompt, tokens)
    assert len(hits) == len(tokens) - 1


def test_lookup_takes_the_latest_occurrence():
    # 1 2 was followed by 3, later by 4; the later one is proposed.
    assert lookup_hits([1, 2, 3, 1, 2, 4, 1], [2, 4]) == [True]
    assert lookup_hits([1, 2, 3, 1, 2, 4, 1], [2, 3]) == [False]


def test_an_occurrence_may_overlap_the_last_two_ids():
    assert lookup_hits([5], [5, 5, 5, 5]) == [False, True, True]


def test_a_pair_never_seen_is_a_miss():
    assert lookup_hits([1], [2, 3, 4]) == [False, False]
    assert lookup_hits([1], [2]) == []
