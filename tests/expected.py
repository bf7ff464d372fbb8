"""What decoding must give: the target's own text up to near ties, and cycles from the flags.

A product of the same numbers differs in its last bits with the shapes around it, so the target's
best two logits may change places where they almost tie. Partings at such places are counted and
must be rare.
"""

import dataclasses
from typing import Any

import numpy as np

from infer.agreement import GREEDY, deciding_margin
from spd_jax.config import SamplingConfig
from spd_jax.models.bundle import Target

GAP = 1e-3  # that decided a token where runs part
SHARE = 0.005  # of the sequences; one is allowed in any run


def expected_cycles(n_stages: int, accepted: list[bool]) -> int:
    """Cycles that decoding takes: one per token, and a refill at the start and per rejection."""
    n_new, rejects = len(accepted), accepted.count(False)
    if n_new == 1:
        return 0
    refills = 1 + rejects - (not accepted[-1])  # none after the last token
    return n_new - 1 + (n_stages - 1) * refills


@dataclasses.dataclass
class Comparison:
    """Counts the sequences compared in one run, and the gaps where they parted."""

    n_sequences: int = 0
    gaps: list[float] = dataclasses.field(default_factory=list)

    def add(
        self,
        target: Target,
        prompt: list[int],
        got: list[int],
        want: list[int],
        sampling: SamplingConfig = GREEDY,
        seed: int = 0,
    ) -> float | None:
        """Returns None for equal texts, else the gap where they part (infinite: the length)."""
        self.n_sequences += 1
        if got == want:
            return None
        pairs = enumerate(zip(got, want, strict=False))
        parting = next((i for i, (a, b) in pairs if a != b), None)
        gap = np.inf
        if parting is not None:
            pair = want[parting], got[parting]
            gap = deciding_margin(target, prompt + want[:parting], *pair, sampling, seed)
        self.gaps.append(gap)
        return gap

    @property
    def is_fair(self) -> bool:
        """True where every parting is a near tie and they are rare."""
        few = len(self.gaps) <= max(1, SHARE * self.n_sequences)
        return few and all(gap < GAP for gap in self.gaps)

    def check(
        self, target: Target, prompt: list[int], got: list[int], want: list[int], *drawn: Any
    ) -> bool:
        """True for equal texts; raises where they part and the rule does not excuse it.

        Args:
          drawn: the SamplingConfig and the seed of sampled texts.
        """
        gap = self.add(target, prompt, got, want, *drawn)
        assert self.is_fair, f"parted at a gap of {gap}: {got} for {want}; so far {self.gaps}"
        return gap is None
