"""Sampled tokens have the target's own distribution; samplers that are wrong are found."""

import dataclasses

import pytest

from spd_jax.ops import sampling as ops
from spd_jax.pipeline import programs
from tests import distribution
from tests.distribution import LEAST_P, Cell, check

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DRAWN = [
    Cell("rejection", 2, "virtual", "random", True, 3),
    Cell("rejection", 4, "sharded", "random", False, 0),
    Cell("rejection", 3, "virtual", "perfect", False, 1),
    Cell("rejection", 2, "sharded", "wrong", True, 2),
    Cell("coupled", 2, "virtual", "perfect", True, 1),
    Cell("coupled", 3, "sharded", "random", False, 3),
]
N_DRAWS = {"virtual": 100_000, "sharded": 20_000}  # both give the same tokens: see test_sampled


@pytest.mark.parametrize("cell", DRAWN, ids=str)
def test_tokens_have_the_targets_distribution(cell):
    outcome = check(cell, N_DRAWS[cell.mode])
    assert min(outcome.p_values.values()) > LEAST_P, outcome
    if cell.draft == "perfect" and not cell.some_ids:
        assert outcome.alpha == 1
    if outcome.expected_alpha is not None:  # the count of acceptances about its sum of chances
        spread = 0.5 * outcome.n_verified**-0.5
        assert abs(outcome.alpha - outcome.expected_alpha) < 4 * spread, outcome


@pytest.mark.parametrize(
    "cell",
    [
        Cell("rejection", 2, "sharded", "random", True, 3),
        Cell("rejection", 2, "virtual", "random", False, 2),
    ],
    ids=str,
)
def test_cuts_that_need_a_second_exchange_keep_the_distribution(cell, monkeypatch):
    """Shards send so few ids that they have to send them all most of the time."""
    monkeypatch.setattr(ops, "CANDIDATES", 1)
    monkeypatch.setattr(ops, "TOP_P_CANDIDATES", 1)
    _forget_programs(monkeypatch)
    outcome = check(cell, 20_000)
    assert min(outcome.p_values.values()) > LEAST_P, outcome


def test_a_wrong_sampler_is_found(monkeypatch):
    """The replacement of a rejected draft is drawn from p, not from what q leaves of it."""
    cell = Cell("rejection", 2, "virtual", "random", False)
    monkeypatch.setattr(ops, "residual_scores", lambda log_p, q: log_p)
    _forget_programs(monkeypatch)
    outcome = check(cell, 20_000)
    assert outcome.p_values["first"] > LEAST_P  # it is drawn before any draft
    assert outcome.p_values["first and second"] < 1e-10


def test_another_temperature_is_found():
    cell = Cell("coupled", 2, "virtual", "perfect", True, 1)
    tokens, _ = distribution.draw(cell, 20_000)
    warmer = dataclasses.replace(cell.sampling, temperature=1.0)
    joint = distribution.exact(distribution.make_pair(cell)[0], warmer)
    assert min(distribution.p_values(tokens, joint).values()) < 1e-6


def _forget_programs(monkeypatch) -> None:
    """Compiles anew, and drops what was compiled with the patch in place."""
    for name in ("PREFILL", "CHUNK"):
        old = getattr(programs, name)
        monkeypatch.setattr(programs, name, type(old)(old._fn, donate=old._donate))
