"""The replay of decoding against the pipeline moved cycle by cycle, and against every outcome."""

import itertools

import numpy as np
import pytest

from train.simulate import Counts, answers, replay


def pipelined(hits):
    """Moves tokens through N stages, one cycle at a time: drafts are right where `hits` says."""
    n_stages, n = hits.shape
    newest, fill, cycles, accepted = 0, 1, 0, []
    is_right = {}  # of the drafts in flight, by position
    while len(accepted) < n:
        cycles += 1
        right = newest < n and hits[fill - 1, newest]
        leaving = newest - n_stages + 1
        if fill == n_stages:
            accepted.append(bool(is_right[leaving + 1]))
            if not accepted[-1]:
                newest, fill = leaving + 1, 1
                continue
        newest, fill = newest + 1, min(fill + 1, n_stages)
        is_right[newest] = right
    return Counts(n + 1, n, sum(accepted), cycles), accepted


@pytest.mark.parametrize("n_stages", [2, 3, 5])
def test_a_replay_counts_what_the_pipeline_does(n_stages):
    rng, ends = np.random.default_rng(n_stages), set()
    for n in (1, 2, 7, 30):
        for share in (0.0, 0.3, 0.8, 1.0):
            hits = rng.random((n_stages, n)) < share
            expected, accepted = pipelined(hits)
            assert replay(hits) == expected
            ends.add(accepted[-1])
    assert ends == {True, False}


def test_chances_give_the_mean_over_all_outcomes():
    chances = np.random.default_rng(0).random((3, 4))
    mean = np.zeros(2)
    for outcome in itertools.product([False, True], repeat=chances.size):
        hits = np.reshape(outcome, chances.shape)
        weight = np.prod(np.where(hits, chances, 1 - chances))
        counts = replay(hits)
        mean += weight * np.array([counts.accepted, counts.cycles])
    counts = replay(chances)
    np.testing.assert_allclose([counts.accepted, counts.cycles], mean, rtol=1e-12)


def test_nothing_drafted_takes_no_cycle_and_has_no_rate():
    counts = replay(np.zeros((4, 0), bool))
    assert counts == Counts(tokens=1)
    assert counts.alpha is counts.tau(4) is counts.tokens_per_cycle is None


def test_each_answer_is_decoded_for_itself():
    mask = np.array([0, 1, 1, 0, 0, 1, 0, 1, 1, 1], bool)
    parts = list(answers(mask))
    assert [np.flatnonzero(mask)[part].tolist() for part in parts] == [[1, 2], [5], [7, 8, 9]]
    assert list(answers(np.zeros(3, bool))) == []
    total = Counts(2, 1, 1, 4) + Counts(4, 3, 1, 8)
    assert total == Counts(6, 4, 2, 12) and total.alpha == 0.5 and total.tau(4) == 2
