"""Coupled sampling against `generate`, token for token, run by hand.

    python -m tests.coupled_matrix --runs 500          # random targets
    python -m tests.coupled_matrix --target smollm2-135m

Every temperature meets every filter, drafter, mode and N from 2 to 8; runs are batches of two.
"""

import argparse
import itertools
import os
import random
import sys
import time

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=9")

import spd_jax
from spd_jax.config import SamplingConfig
from spd_jax.prompts import read_prompts
from tests.expected import GAP
from tests.full_matrix import Tally
from tests.pipeline.conftest import MESHES
from tests.pipeline.test_sampled import FILTERS, make_pair
from tests.random_models import make_prompt

TEMPERATURES = (0.3, 0.7, 1.0, 1.5)
DRAFTERS = (("random", False), ("even", False), ("even", True))  # and whether of some ids alone
STAGES = range(2, 9)
SMOLLM2_STAGES = (2, 5)
BATCH, N_NEW = 2, 40


class SampledTally(Tally):
    """Counts sequences and what differed."""

    def check_batch(self, target, prompts, seeds, got, want, sampling, group) -> None:
        """Compares decoded sequences with those of `generate`."""
        for prompt, seed, a, b in zip(prompts, seeds, got, want, strict=True):
            self.counts[group] += 1
            gap = self.comparison.add(target, prompt, a.tokens, b.tokens, sampling, seed)
            if gap is not None and not gap < GAP:
                self.faults.append(f"{group} {sampling}: {a.tokens} for {b.tokens}, gap {gap}")


def run_tiny(tally: SampledTally, n_runs: int | None) -> None:
    """Decodes on random targets: all cells, or so many of them at random."""
    cells = list(itertools.product(STAGES, MESHES, FILTERS, TEMPERATURES, DRAFTERS))
    if n_runs is not None:
        cells = random.Random(0).sample(cells, min(n_runs // BATCH, len(cells)))
    order = {name: i for i, name in enumerate(MESHES)}
    cells.sort(key=lambda c: (c[0], order[c[1]], FILTERS.index(c[2])))  # program by program
    for i, (n, mode, filters, temperature, (kind, some_ids)) in enumerate(cells):
        target, draft = make_pair(n, kind, some_ids)
        sampling = SamplingConfig(temperature, verifier="coupled", **filters)
        prompts = [make_prompt(1 + (i + b) % (2 * n + 1), seed=i) for b in range(BATCH)]
        seeds = [BATCH * i + b for b in range(BATCH)]
        options = dict(max_new_tokens=N_NEW, sampling=sampling, stop_ids=(), seed=seeds)
        want = spd_jax.generate(target, prompts, **options)
        got = spd_jax.decode(target, draft, prompts, mesh=MESHES[mode], **options)
        assert got[0].stats.mode == mode
        tally.check_batch(target, prompts, seeds, got, want, sampling, f"N={n} {mode}")
        if i % 50 == 0:
            print(f"{i} of {len(cells)} batches", file=sys.stderr, flush=True)


def run_smollm2(tally: SampledTally, paths: list[str], n_prompts: int) -> None:
    """Decodes prompts of files with the shipped head, each temperature and filter in turn."""
    target = spd_jax.load_target("smollm2-135m")
    draft = spd_jax.load_draft(None, target)
    rows = [row for path in paths for row in read_prompts(path)][:n_prompts]
    prompts = [target.tokenizer.encode_chat(row.text) for row in rows]
    size = -(-len(prompts) // len(TEMPERATURES))
    for i, temperature in enumerate(TEMPERATURES):
        some = prompts[i * size : (i + 1) * size]
        filters = FILTERS[0] if i % 2 else FILTERS[2]
        sampling = SamplingConfig(temperature, verifier="coupled", **filters)
        seeds = [i * size + b for b in range(len(some))]
        options = dict(max_new_tokens=32, sampling=sampling, seed=seeds)
        want = spd_jax.generate(target, some, **options)
        for n in SMOLLM2_STAGES:
            got = spd_jax.decode(target, draft, some, n_stages=n, mesh="virtual", **options)
            tally.check_batch(target, some, seeds, got, want, sampling, f"N={n} {sampling}")
            alpha = sum(r.accepted[1:].count(True) for r in got) / sum(
                len(r.tokens) - 1 for r in got
            )
            print(f"{sampling}, N={n}: alpha {alpha:.3f}", file=sys.stderr, flush=True)


def main() -> int:
    """Runs the matrix; returns 1 where a decode differs by more than rounding."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=("tiny", "smollm2-135m"), default="tiny")
    parser.add_argument("--runs", type=int, help="sequences on random targets; default: all")
    parser.add_argument("--prompts", nargs="+", default=["infer/prompts.jsonl"])
    parser.add_argument("--n-prompts", type=int, default=20)
    args = parser.parse_args()
    tally, began = SampledTally(), time.perf_counter()
    if args.target == "tiny":
        run_tiny(tally, args.runs)
    else:
        run_smollm2(tally, args.prompts, args.n_prompts)
    return tally.report(time.perf_counter() - began)


if __name__ == "__main__":
    sys.exit(main())
