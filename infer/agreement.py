"""Telling a rounding difference between two decodes from a fault.

Products depend in their last bits on how many rows are computed at once, so two correct decodes
can part where two tokens are almost equally good, or almost left out, and only there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

import spd_jax
from spd_jax.config import SamplingConfig
from spd_jax.ops.sampling import COUPLED, gumbel
from spd_jax.requests import prompt_keys

GREEDY = SamplingConfig()

# A smaller gap between the two best logits can flip by rounding. bfloat16 has steps of 0.125 from
# 16 to 32, where logits lie, and a hidden state is rounded in every layer.
ROUNDING_MARGINS = {"float32": 1e-3, "bfloat16": 0.5}
_BUCKET = 128  # lengths are padded to multiples of it, so that few programs are compiled


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Returns the first index at which two id lists differ, None where they are equal."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def padded_to_bucket(ids: Sequence[int], max_context: int) -> np.ndarray:
    """Returns int32 ids followed by zeros, which a causal model's earlier rows never see."""
    length = min(-len(ids) // _BUCKET * -_BUCKET, max_context)
    padded = np.zeros(max(length, len(ids)), np.int32)
    padded[: len(ids)] = ids
    return padded


def deciding_margin(
    target: Any,
    ids: Sequence[int],
    chosen: int,
    other: int,
    sampling: SamplingConfig,
    seed: int = 0,
) -> float:
    """Returns by how much `chosen` was to be preferred to `other` as the id after `ids`.

    That is what rounding would have to move for the other choice: the lead of its logit; where
    sampled, that with temperature and noise, or what keeps the one or leaves out the other (of
    top-k in logits over the temperature, of top-p in probability).
    """
    logits = spd_jax.target_logits(target, padded_to_bucket(ids, target.config.max_context))
    scores = np.asarray(logits[len(ids) - 1], np.float64)
    if sampling.temperature == 0:
        return float(scores[chosen] - scores[other])
    scores = scores / sampling.temperature
    key, both = prompt_keys([seed]), jnp.array([chosen, other])
    noise = np.asarray(gumbel(key, COUPLED, jnp.array([len(ids)]), both))[0]
    lead = float(scores[chosen] + noise[0] - scores[other] - noise[1])
    edges = _edges(scores, sampling)
    # `other` must be kept after all, and either lead or be alone.
    return max(-edges[other], min(lead, edges[chosen]))


def _edges(scores: np.ndarray, sampling: SamplingConfig) -> np.ndarray:
    """How far each id is inside what is kept [V]; negative where it is left out."""
    order, edges = np.argsort(-scores, kind="stable"), np.full(len(scores), np.inf)
    if 0 < sampling.top_k < len(scores):
        kth, next_best = scores[order[sampling.top_k - 1]], scores[order[sampling.top_k]]
        edges = np.where(scores >= kth, scores - next_best, scores - kth)
    if sampling.top_p < 1:
        p = np.where(edges >= 0, np.exp(scores - scores.max()), 0)
        before = np.concatenate([[0], np.cumsum(p[order])[:-1]]) / p.sum()
        edges[order] = np.minimum(edges[order], sampling.top_p - before)
    return edges


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How one decode compares with the autoregressive one."""

    position: int | None  # index of the first different token, None where all are the same
    gap: float | None  # there, by how much the token was decided: see `deciding_margin`
    margin: float = 0.0  # a smaller gap can flip by rounding

    @property
    def identical(self) -> bool:
        """True where every token is the same."""
        return self.position is None

    @property
    def is_rounding(self) -> bool:
        """True where the difference is one that rounding explains."""
        return self.gap is not None and self.gap < self.margin

    def describe(self) -> str:
        """One line for people."""
        if self.identical:
            return "identical to autoregressive decoding, token for token"
        line = f"DIFFERENT from autoregressive decoding, first at new token {self.position}"
        if self.gap is None:
            return f"{line}, where one of the two ends"
        cause = "a rounding difference" if self.is_rounding else "not explained by rounding"
        return f"{line}, which was decided by {self.gap:.2g}: {cause}"


def compare_tokens(
    target: Any,
    prompt: Sequence[int],
    tokens: Sequence[int],
    reference: Sequence[int],
    sampling: SamplingConfig = GREEDY,
    seed: int = 0,
) -> Agreement:
    """Compares new tokens with the autoregressive ones for the same prompt ids."""
    position = first_difference(tokens, reference)
    if position is None or position == min(len(tokens), len(reference)):
        return Agreement(position, None)
    margin = ROUNDING_MARGINS[str(target.params["embed"]["weight"].dtype)]
    before = [*prompt, *reference[:position]]
    pair = reference[position], tokens[position]
    return Agreement(position, deciding_margin(target, before, *pair, sampling, seed), margin)
