"""Chi-square tests of sampled decoding: its tokens have the target's own distribution.

    python -m tests.distribution            # every cell, by hand
    python -m tests.distribution --draws 400000 --only rejection

Each cell decodes the same prompt many times, three new tokens with other keys, and compares the
first token, the third, and pairs of neighbours with probabilities that are computed by enumeration
from the target's logits, warped by plain numpy.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

import spd_jax
from spd_jax.config import SamplingConfig
from spd_jax.models.bundle import Draft, Target
from spd_jax.pipeline import programs
from tests.pipeline.stepping import Stepper, start
from tests.random_models import CONFIG, full_config, make_draft, make_target

VOCAB = 12
BASE = dataclasses.replace(CONFIG, vocab_size=VOCAB, d_model=16, n_heads=2, n_kv_heads=1, d_ff=16)
PROMPT = [3, 1, 4, 1, 5]
N_NEW = 3
BATCH = 504  # a bucket; larger ones leave the processor's caches
SOME_IDS = (0, 2, 3, 5, 7, 8, 11)  # a draft vocabulary that no number of shards divides evenly
FILTERS = ({}, {"top_k": 4}, {"top_p": 0.7}, {"top_k": 6, "top_p": 0.8})
MESHES = {"virtual": "virtual", "sharded": None}
LEAST_P = 1e-4  # of a correct sampler one statistic in ten thousand falls below


@dataclasses.dataclass(frozen=True)
class Cell:
    """One setting."""

    verifier: str
    n_stages: int
    mode: str
    draft: str  # of `tests.random_models.KINDS`
    some_ids: bool  # whether the draft can propose a part of the vocabulary only
    filters: int = 0  # index into FILTERS
    temperature: float = 0.9

    @property
    def sampling(self) -> SamplingConfig:
        """The settings of the decode."""
        return SamplingConfig(self.temperature, verifier=self.verifier, **FILTERS[self.filters])


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a cell's draws say."""

    p_values: dict[str, float]  # by statistic
    alpha: float  # accepted / verified
    expected_alpha: float | None  # the mean of sum(min(p, q)); of rejection sampling only
    n_verified: int


def warp(logits: np.ndarray, sampling: SamplingConfig) -> np.ndarray:
    """The filtered distribution of logits [V], in double precision and by sorting."""
    scores = logits.astype(np.float64) / sampling.temperature
    order = np.argsort(-scores, kind="stable")
    kept = np.ones(len(scores), bool)
    if 0 < sampling.top_k < len(scores):
        kept = scores >= scores[order[sampling.top_k - 1]]
    p = np.where(kept, np.exp(scores - scores.max()), 0)
    p /= p.sum()
    before = np.concatenate([[0], np.cumsum(p[order])[:-1]])
    if sampling.top_p < 1:
        p[order[before >= sampling.top_p]] = 0
    return p / p.sum()


def exact(target: Target, sampling: SamplingConfig) -> np.ndarray:
    """Probabilities [V, V, V] of the three new tokens."""
    score = jax.jit(jax.vmap(lambda ids: spd_jax.target_logits(target, ids)[-1]))

    def after(prefixes: list[tuple[int, ...]]) -> np.ndarray:
        logits = np.asarray(score(jnp.asarray([[*PROMPT, *prefix] for prefix in prefixes])))
        return np.stack([warp(row, sampling) for row in logits])

    ids = range(VOCAB)
    first = after([()])[0]
    second = after([(i,) for i in ids])
    third = after(list(itertools.product(ids, ids))).reshape(VOCAB, VOCAB, VOCAB)
    return first[:, None, None] * second[:, :, None] * third


def make_pair(cell: Cell) -> tuple[Target, Draft]:
    """The target and the draft of a cell."""
    target = make_target(max(cell.n_stages, 3), seed=2, base=BASE)
    config = full_config(target.config.n_layers, cell.n_stages)
    if cell.some_ids:
        config = dataclasses.replace(config, draft_ids=SOME_IDS)
    return target, make_draft(target, config, cell.draft)


def draw(cell: Cell, n_draws: int, seed: int = 0) -> tuple[np.ndarray, Outcome]:
    """Decodes; returns the tokens [n, 3] and their outcome without p-values."""
    target, draft = make_pair(cell)
    prompts = [PROMPT] * min(BATCH, n_draws)
    run = start(target, draft, prompts, N_NEW, MESHES[cell.mode], sampling=cell.sampling)
    assert run.engine.mode == cell.mode
    tokens, verified, accepted, overlap = [], 0, 0, 0.0
    for i in range(-(-n_draws // len(prompts))):
        keys = jax.random.split(jax.random.key(seed + i, impl="threefry2x32"), len(prompts))
        inputs = dataclasses.replace(run.inputs, keys=keys)
        prompts_array = np.tile(np.asarray(PROMPT, np.int32), (len(prompts), 1))
        padded = np.zeros((len(prompts), 16), np.int32)
        padded[:, : len(PROMPT)] = prompts_array
        again = Stepper(run.engine, inputs, programs.prefill(run.engine, padded, inputs, N_NEW)())
        while not again.is_done:
            again.run(64)
        state = again.state
        tokens.append(np.asarray(state.tokens)[:, :N_NEW])
        verified += len(prompts) * (N_NEW - 1)
        accepted += int(np.asarray(state.accepted)[:, 1:N_NEW].sum())
        if state.proposals is not None:
            overlap += float(np.asarray(state.proposals.overlap, np.float64).sum())
    expected = overlap / verified if cell.verifier == "rejection" else None
    return np.concatenate(tokens), Outcome({}, accepted / verified, expected, verified)


def check(cell: Cell, n_draws: int, seed: int = 0) -> Outcome:
    """Decodes and tests."""
    tokens, outcome = draw(cell, n_draws, seed)
    joint = exact(make_pair(cell)[0], cell.sampling)
    return dataclasses.replace(outcome, p_values=p_values(tokens, joint))


def p_values(tokens: np.ndarray, joint: np.ndarray) -> dict[str, float]:
    """Chi-square p-values of tokens [n, 3] under probabilities [V, V, V]."""
    flat = {
        "first": (tokens[:, 0], joint.sum((1, 2))),
        "third": (tokens[:, 2], joint.sum((0, 1))),
        "first and second": (tokens[:, 0] * VOCAB + tokens[:, 1], joint.sum(2).ravel()),
        "second and third": (tokens[:, 1] * VOCAB + tokens[:, 2], joint.sum(0).ravel()),
    }
    return {name: chi_square(*pair) for name, pair in flat.items()}


def chi_square(values: np.ndarray, probabilities: np.ndarray) -> float:
    """The p-value; rare outcomes are counted together, impossible ones must not occur."""
    counts = np.bincount(values, minlength=len(probabilities))
    if counts[probabilities == 0].any():
        return 0.0
    want = probabilities * len(values)
    rare = want < 5
    observed, expected = (np.append(x[~rare], x[rare].sum()) for x in (counts, want))
    if expected[-1] < 5:  # too few for a bin: with the smallest of the others
        smallest = np.argmin(expected[:-1])
        observed[smallest] += observed[-1]
        expected[smallest] += expected[-1]
        observed, expected = observed[:-1], expected[:-1]
    if len(expected) < 2:
        return 1.0
    statistic = np.sum((observed - expected) ** 2 / expected)
    return float(stats.chi2.sf(statistic, len(expected) - 1))


def all_cells() -> list[Cell]:
    """The full matrix."""
    axes = itertools.product(
        ("rejection", "coupled"), (2, 4, 8), MESHES, ("wrong", "random", "perfect"),
        (False, True), range(len(FILTERS)),
    )  # fmt: skip
    return [Cell(*values) for values in axes]


def main() -> int:
    """Runs the cells and prints a line for each; the exit code is 1 where one fails."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--draws", type=int, default=100_000)
    parser.add_argument("--only", choices=("rejection", "coupled"))
    flags = parser.parse_args()
    cells = [cell for cell in all_cells() if flags.only in (None, cell.verifier)]
    failed, began = 0, time.monotonic()
    for cell in cells:
        outcome = check(cell, flags.draws)
        worst = min(outcome.p_values.values())
        failed += worst < LEAST_P
        print(f"{'FAILS' if worst < LEAST_P else 'holds'}  least p {worst:.2g}  {cell}  "
              f"alpha {outcome.alpha:.3f}", flush=True)  # fmt: skip
        jax.clear_caches()
    n_tests = 4 * len(cells)
    print(
        f"{len(cells)} cells of {flags.draws} draws, {n_tests} statistics, {failed} cells below "
        f"{LEAST_P:g}, {time.monotonic() - began:.0f} s"
    )
    return int(failed > 0)


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.exit(main())
