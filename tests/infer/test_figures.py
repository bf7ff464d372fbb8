"""Pooled rates are sums over sums; what was not counted is None, not zero."""

import math

import pytest

from infer.figures import Sample, set_figures, table_rows


def sample(**counts) -> Sample:
    base = dict(path="p", line=1, tokens=9, cycles=18, verified=8, accepted=4, lookup_hits=2)
    return Sample(**{**base, "tau": 2.0, **counts})


def test_rates_are_pooled_over_tokens():
    figures = set_figures(
        [
            sample(),
            sample(tokens=3, cycles=2, verified=2, accepted=2, lookup_hits=0, tau=6.0),
        ],
        n_stages=4,
    )
    assert figures["alpha"] == pytest.approx(6 / 10)
    assert figures["lookup"] == pytest.approx(2 / 10)
    assert figures["tau_pooled"] == pytest.approx(4 * 12 / 20)
    assert figures["tau_mean"] == pytest.approx(4.0)
    assert (figures["tokens"], figures["cycles"]) == (12, 20)


def test_differences_are_told_apart():
    figures = set_figures(
        [
            sample(identical=True, is_rounding=False),
            sample(identical=False, is_rounding=True, gap=1e-5),
            sample(identical=False, is_rounding=False, gap=0.5),
            sample(identical=False, is_rounding=False),
        ],
        n_stages=4,
    )
    assert figures["compared_with_generate"] == 4
    assert figures["identical"] == 1
    assert figures["rounding_differences"] == 1
    assert figures["other_differences"] == 2
    rows = table_rows(figures)
    assert rows["identical to generate"] == "1 of 4"
    assert rows["different by rounding"] == "1 of 4"
    assert rows["different otherwise"] == "2 of 4"


def test_what_was_not_measured_is_none_and_shown_as_a_dash():
    figures = set_figures([sample(tokens=1, cycles=0, verified=0, accepted=0, tau=None)], 4)
    for name in ("alpha", "lookup", "tau_pooled", "tau_mean", "bf16_match_rate"):
        assert figures[name] is None
    assert figures["sampled_agreement"] is None
    assert table_rows(figures)["alpha"] == "-"
    assert table_rows(figures)["identical to generate"] == "-"


def test_sampled_and_bfloat16_rates():
    figures = set_figures(
        [
            sample(sampled_positions=10, sampled_agreed=2.5, sampled_lookup_hits=1),
            sample(sampled_positions=30, sampled_agreed=5.5, sampled_lookup_hits=3),
            sample(bf16_matched=9, bf16_total=9),
            sample(bf16_matched=0, bf16_total=11),
        ],
        n_stages=4,
    )
    assert math.isclose(figures["sampled_agreement"], 8 / 40)
    assert math.isclose(figures["sampled_lookup"], 4 / 40)
    assert math.isclose(figures["bf16_match_rate"], 9 / 20)
