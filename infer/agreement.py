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
    target: Any, ids: Sequence[int], sampling: SamplingConfig, seed: int = 0
) -> float:
    """Returns by how much the id after `ids` was decided, by `generate` with these settings.

    Greedy: the lead of the best logit over the second. Sampled: the least of that lead with
    temperature and noise, and of what separates kept from dropped ids: in logits over the
    temperature for top-k, in probability for top-p.
    """
    logits = spd_jax.target_logits(target, padded_to_bucket(ids, target.config.max_context))
    scores = np.asarray(logits[len(ids) - 1], np.float64)
    if sampling.temperature == 0:
        return _lead(scores)
    scores = scores / sampling.temperature
    order, margins, kept = np.argsort(-scores, kind="stable"), [], np.ones(len(scores), bool)
    if 0 < sampling.top_k < len(scores):
        edge = scores[order[sampling.top_k - 1]]
        kept = scores >= edge
        margins += [edge - scores[~kept].max()] if not kept.all() else []
    if sampling.top_p < 1:
        p = np.where(kept, np.exp(scores - scores.max()), 0)
        before = np.concatenate([[0], np.cumsum(p[order])[:-1]]) / p.sum()
        margins.append(np.abs(before - sampling.top_p).min())
        kept[order[before >= sampling.top_p]] = False
    key, all_ids = prompt_keys([seed]), jnp.arange(len(scores))
    noise = np.asarray(gumbel(key, COUPLED, jnp.array([len(ids)]), all_ids))[0]
    return float(min([_lead(np.where(kept, scores + noise, -np.inf)), *margins]))


def _lead(scores: np.ndarray) -> float:
    second, best = np.sort(scores)[-2:]
    return float(best - second)


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
    return Agreement(position, deciding_margin(target, before, sampling, seed), margin)
