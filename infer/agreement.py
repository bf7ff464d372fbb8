"""Telling a rounding difference between two decodes from a fault.

Products depend in their last bits on how many rows are computed at once, so two correct decodes
can part where the target's two best tokens are almost equal, and only there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

import spd_jax

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


def top2_gap(target: Any, ids: Sequence[int]) -> float:
    """Returns how far the target's best logit for the id after `ids` leads the second best."""
    logits = spd_jax.target_logits(target, padded_to_bucket(ids, target.config.max_context))
    second, best = np.sort(np.asarray(logits[len(ids) - 1]))[-2:]
    return float(best - second)


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How one decode compares with the autoregressive one."""

    position: int | None  # index of the first different token, None where all are the same
    gap: float | None  # there, how far the target's best logit leads its second best
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
        return f"{line}, where the target's two best logits are {self.gap:.2g} apart: {cause}"


def compare_tokens(
    target: Any, prompt: Sequence[int], tokens: Sequence[int], reference: Sequence[int]
) -> Agreement:
    """Compares new tokens with the autoregressive ones for the same prompt ids."""
    position = first_difference(tokens, reference)
    if position is None or position == min(len(tokens), len(reference)):
        return Agreement(position, None)
    margin = ROUNDING_MARGINS[str(target.params["embed"]["weight"].dtype)]
    return Agreement(position, top2_gap(target, [*prompt, *reference[:position]]), margin)
