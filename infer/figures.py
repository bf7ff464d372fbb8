"""What an evaluation counts per prompt, and the rates of a set of prompts.

Rates are pooled over tokens (sum over sum) unless their name says otherwise, and None where they
would divide by zero.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from infer.report import shown
from spd_jax.results import ratio


@dataclasses.dataclass
class Sample:
    """Everything counted on one prompt; a count that was not asked for stays None."""

    path: str  # the file it came from
    line: int  # its line there, 1-based
    tokens: int  # new tokens of the pipeline's decode
    cycles: int
    verified: int  # drafts verified: every new token but the first
    accepted: int  # of them
    lookup_hits: int  # of them, by the 2-gram lookup
    tau: float | None
    expected: float | None = None  # of rejection sampling: sum of sum(min(p, q)) over `verified`
    identical: bool | None = None  # to autoregressive decoding
    gap: float | None = None  # where not: by how much the first different token was decided
    is_rounding: bool | None = None  # where not: that gap is within the rounding margin
    bf16_matched: int | None = None  # leading tokens that bfloat16 shares with float32
    bf16_total: int | None = None  # float32 tokens
    sampled_positions: int | None = None  # scored positions of the sampled row
    sampled_agreed: float | None = None  # of them, draft equals the row's next id; mean over fills
    sampled_lookup_hits: int | None = None  # of them, by the 2-gram lookup


def _sum(samples: Sequence[Sample], name: str) -> float:
    return sum(getattr(sample, name) or 0 for sample in samples)


def set_figures(samples: Sequence[Sample], n_stages: int) -> dict[str, Any]:
    """Returns the figures of a set of samples: counts and rates, ready for JSON."""
    verified, tokens, cycles = (_sum(samples, n) for n in ("verified", "tokens", "cycles"))
    taus = [s.tau for s in samples if s.tau is not None]
    positions = _sum(samples, "sampled_positions")
    compared = [s for s in samples if s.identical is not None]
    per_cycle = ratio(tokens, cycles)
    return {
        "prompts": len(samples),
        "tokens": tokens,
        "cycles": cycles,
        "drafts_verified": verified,
        "alpha": ratio(_sum(samples, "accepted"), verified),
        "expected_alpha": _expected_alpha(samples),
        "lookup": ratio(_sum(samples, "lookup_hits"), verified),
        "tau_pooled": None if per_cycle is None else n_stages * per_cycle,
        "tau_mean": ratio(sum(taus), len(taus)),
        "compared_with_generate": len(compared),
        "identical": sum(s.identical for s in compared),
        "rounding_differences": sum(bool(s.is_rounding) for s in compared),
        "other_differences": sum(not s.identical and not s.is_rounding for s in compared),
        "bf16_match_rate": ratio(_sum(samples, "bf16_matched"), _sum(samples, "bf16_total")),
        "sampled_positions": positions,
        "sampled_agreement": ratio(_sum(samples, "sampled_agreed"), positions),
        "sampled_lookup": ratio(_sum(samples, "sampled_lookup_hits"), positions),
    }


def _expected_alpha(samples: Sequence[Sample]) -> float | None:
    known = [s for s in samples if s.expected is not None]
    return ratio(_sum(known, "expected"), _sum(known, "verified"))


def table_rows(figures: dict[str, Any]) -> dict[str, str]:
    """Returns the rows of the closing table for one set, ready to print."""
    compared = figures["compared_with_generate"]
    of_compared = {
        name: f"{figures[name]} of {compared}" if compared else shown(None)
        for name in ("identical", "rounding_differences", "other_differences")
    }
    return {
        "prompts": shown(figures["prompts"]),
        "tokens": shown(figures["tokens"]),
        "cycles": shown(figures["cycles"]),
        "alpha": shown(figures["alpha"]),
        "alpha expected: mean of sum(min(p, q))": shown(figures["expected_alpha"]),
        "2-gram lookup, same positions": shown(figures["lookup"]),
        "tau, pooled": shown(figures["tau_pooled"]),
        "tau, mean of prompts": shown(figures["tau_mean"]),
        "identical to generate": of_compared["identical"],
        "different by rounding": of_compared["rounding_differences"],
        "different otherwise": of_compared["other_differences"],
        "float32-to-bfloat16 token match": shown(figures["bf16_match_rate"]),
        "sampled rows: draft agreement": shown(figures["sampled_agreement"]),
        "sampled rows: 2-gram lookup": shown(figures["sampled_lookup"]),
    }
