"""Decoding replayed along a known text, from what the draft guesses at every fill.

Scored drafts are always of the newest token (depth 0); a fill says how many tokens are in flight
then, so f - 1 is the depth of the oldest. An answer begins at fill 1 after its first token, which
the prefill gives; each hit raises the fill by one up to N, each miss sets it to 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from spd_jax.results import ratio


@dataclasses.dataclass(frozen=True)
class Counts:
    """What decoding some answers took; expected numbers where hits are chances."""

    tokens: float = 0  # new ones, the first of each answer included
    drafts: float = 0  # verified: every new token but the first
    accepted: float = 0  # of these
    cycles: float = 0

    def __add__(self, other: Counts) -> Counts:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Counts(*(a + b for a, b in pairs))

    @property
    def alpha(self) -> float | None:
        """Accepted / verified drafts."""
        return ratio(self.accepted, self.drafts)

    @property
    def tokens_per_cycle(self) -> float | None:
        """New tokens / cycles."""
        return ratio(self.tokens, self.cycles)

    def tau(self, n_stages: int) -> float | None:
        """The equivalent accept length N * tokens / cycles."""
        return ratio(n_stages * self.tokens, self.cycles)


def replay(hits: np.ndarray) -> Counts:
    """Decodes one answer of n tokens after its first.

    Args:
      hits: [N, n], at each fill 1..N whether the draft is accepted, or the chance that it is. A
        chance spreads the next draft over the fills it may be made at.
    """
    n_stages, n = hits.shape
    at_fill = np.zeros(n_stages)  # the chance that the next draft is made at each fill
    at_fill[0] = 1
    accepted, miss = 0.0, 0.0
    for chances in hits.T.astype(np.float64):
        hit = at_fill * chances
        accepted += float(hit.sum())
        miss = 1 - float(hit.sum())
        at_fill = np.concatenate([[miss], hit[:-1]])
        at_fill[-1] += hit[-1]
    if n == 0:
        return Counts(1)
    refills = 1 + (n - accepted) - miss  # at the start and per reject; none after the last token
    return Counts(n + 1, n, accepted, n + (n_stages - 1) * refills)


def answers(scored_mask: np.ndarray) -> Iterator[slice]:
    """Cuts the positions where bool [T] is True, counted without the others, into their runs."""
    positions = np.flatnonzero(scored_mask)
    breaks = np.flatnonzero(np.diff(positions) > 1) + 1
    ends = [0, *breaks.tolist(), len(positions)]
    yield from (slice(a, b) for a, b in zip(ends, ends[1:], strict=False) if b > a)
