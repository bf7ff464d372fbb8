"""Cycles follow from what was rejected, and the figures of a result from both."""

import pytest

import spd_jax
from tests.pipeline.conftest import MESHES
from tests.random_models import full_config, make_draft, make_prompt, make_target

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# The programs of test_lossless.py: N, layers, mode.
SETTINGS = [(2, 4, "virtual"), (3, 4, "sharded"), (4, 4, "virtual"), (5, 8, "sharded")]


def decode(n, n_layers, mode, kind, length=3, n_new=40, **options):
    target = make_target(n_layers, seed=n)
    draft = make_draft(target, full_config(n_layers, n), kind)
    options = {"stop_ids": (), "mesh": MESHES[mode]} | options
    result = spd_jax.decode(target, draft, make_prompt(length), max_new_tokens=n_new, **options)
    assert result.stats.mode == mode
    return result


@pytest.mark.parametrize(("n", "n_layers", "mode"), SETTINGS)
@pytest.mark.parametrize("n_new", [2, 3, 17, 40])
def test_a_drafter_that_is_always_right(n, n_layers, mode, n_new):
    result = decode(n, n_layers, mode, "perfect", n_new=n_new)
    assert result.accepted == [True] * n_new
    assert result.cycles == n_new + n - 2
    assert (result.stats.alpha, result.stats.rejects) == (1, 0)


@pytest.mark.parametrize(("n", "n_layers", "mode"), SETTINGS)
@pytest.mark.parametrize("n_new", [2, 3, 17, 40])
def test_a_drafter_that_is_always_wrong(n, n_layers, mode, n_new):
    result = decode(n, n_layers, mode, "wrong", n_new=n_new)
    assert result.accepted == [True] + [False] * (n_new - 1)
    assert result.cycles == n * (n_new - 1)
    assert (result.stats.alpha, result.stats.rejects) == (0, n_new - 1)


@pytest.mark.parametrize(("n", "n_layers", "mode"), SETTINGS)
def test_every_rejection_costs_one_refill(n, n_layers, mode):
    """N_new - 1 + (N-1)(1 + rejects), less N-1 where the last token is itself a rejection."""
    counts, last = set(), set()
    for length in range(1, 2 * n + 2):
        for n_new in (11, 12, 40):
            result = decode(n, n_layers, mode, "even", length, n_new)
            rejects = result.accepted.count(False)
            assert result.stats.rejects == rejects
            cycles = n_new - 1 + (n - 1) * (1 + rejects)
            assert result.cycles == cycles - (0 if result.accepted[-1] else n - 1)
            counts.add(rejects)
            last.add(result.accepted[-1])
    assert len(counts) > 5 and last == {True, False}


@pytest.mark.parametrize(("n", "n_layers", "mode"), SETTINGS)
def test_figures_follow_from_the_counts(n, n_layers, mode):
    result = decode(n, n_layers, mode, "even")
    stats = result.stats
    assert stats.alpha == pytest.approx((39 - stats.rejects) / 39)
    assert stats.tokens_per_cycle == pytest.approx(40 / result.cycles)
    assert stats.tau == pytest.approx(n * 40 / result.cycles)
    assert stats.speedup == stats.tau
    assert stats.prefill_seconds > 0 and stats.decode_seconds > 0
    assert stats.tokens_per_second == pytest.approx(39 / stats.decode_seconds)
    assert stats.devices == (1 if mode == "virtual" else n + 1)
    assert stats.placement == ("virtual" if mode == "virtual" else "dedicated")


@pytest.mark.parametrize(("n", "n_layers", "mode"), SETTINGS)
def test_no_cycle_where_the_first_token_ends_it(n, n_layers, mode):
    limited = decode(n, n_layers, mode, "even", n_new=1)
    stopped = decode(n, n_layers, mode, "even", n_new=40, stop_ids=limited.tokens)
    assert limited.finish_reason == "length" and stopped.finish_reason == "stop"
    for result in (limited, stopped):
        assert len(result.tokens) == 1 and result.accepted == [True]
        assert result.cycles == 0 and result.stats.rejects == 0
        stats = result.stats
        assert stats.alpha is stats.tokens_per_cycle is stats.tau is stats.speedup is None
        assert stats.tokens_per_second is None


def test_accept_length_in_the_long_run():
    """tau -> N / (1 + (N-1)(1-alpha)): the first fill is all that a short run adds."""
    result = decode(4, 4, "virtual", "even", n_new=500)
    assert 0.2 < result.stats.alpha < 0.8
    assert result.stats.tau == pytest.approx(4 / (1 + 3 * (1 - result.stats.alpha)), rel=0.01)
